import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import potentials

PATHS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)  # steps, particles


def total(potential, lam, r_min, lams=None):
    """Sum of log G along every path."""
    state = potential.init(4, r_min)
    logs = []
    for step, rewards in enumerate(PATHS):
        is_last = step == len(PATHS) - 1
        log_g, state = potential.update(state, rewards, lam if lams is None or is_last else lams[step], is_last)
        logs.append(log_g)
    return np.asarray(logs)


@pytest.mark.parametrize("lams", [None, [0.1, 5.0, 0.0, 1.0]])
@pytest.mark.parametrize(("name", "constant"), [("diff", -1), ("max", 0), ("add", 0), ("rt", 0), ("is", 0)])
def test_the_product_along_any_path_is_the_tilt(name, constant, lams):
    """For any lambda on the way, as long as the last one is lambda."""
    lam, r_min = 3.0, -0.7
    logs = total(potentials.get(name), lam, r_min, lams)
    np.testing.assert_allclose(logs.sum(0), lam * PATHS[-1] + constant * lam * r_min, rtol=1e-5, atol=1e-5)


def test_factors_before_the_last_are_the_named_ones():
    lam, r_min = 2.0, 0.25
    start = np.full((1, 4), r_min, np.float32)
    previous = np.concatenate([start, PATHS])[:-1]
    best = np.maximum.accumulate(np.concatenate([start, PATHS]))[1:]
    summed = np.cumsum(np.concatenate([start, PATHS]), axis=0)[1:]
    expected = {"diff": PATHS - previous, "max": best, "add": summed, "rt": PATHS, "is": 0 * PATHS}
    for name, factors in expected.items():
        logs = total(potentials.get(name), lam, r_min)
        np.testing.assert_allclose(logs[:-1], lam * factors[:-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["diff", "max", "add", "rt"])
def test_a_reward_of_minus_infinity_does_not_poison_what_follows(name):
    potential = potentials.get(name)
    state = potential.init(1)
    for rewards, last in ((1.0, False), (-jnp.inf, False), (2.0, False)):
        _, state = potential.update(state, jnp.asarray([rewards]), 1.5, last)
    log_g, _ = potential.update(state, jnp.asarray([0.5]), 1.5, True)
    assert np.isfinite(log_g).all()


def test_lambda_zero_tilts_nothing_even_at_minus_infinity():
    np.testing.assert_array_equal(potentials.tilt(0.0, jnp.asarray([-jnp.inf, 3.0])), [0, 0])


def test_unknown_potential_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"potential must be one of 'diff', 'max'.*got 'dif'; did you mean 'diff'"):
        potentials.get("dif")
