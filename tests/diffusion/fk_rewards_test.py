import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import fk_steering as fk
from jaxml25.diffusion import particle_kernels, samplers, schedules, trajectories

SCHEDULE = schedules.make_schedule("linear")
GRID = schedules.make_grid(SCHEDULE, 8, previous="next")


def network(x, t, cond):
    return jnp.tanh(x) * (1 + t[:, None] / 1000)


def info_at(x, step, last=False):
    return fk.RewardInfo(particle_kernels.SamplerState(x, None), jnp.asarray(step), last)


def first(x, info):
    return x[:, 0]


def test_looking_ahead_by_all_remaining_steps_is_the_deterministic_sampler():
    x = jax.random.normal(jax.random.key(0), (4, 2))
    for step in (0, 3, 6):
        remaining = jax.tree.map(lambda leaf, step=step: leaf[step + 1 :], GRID)
        exact = trajectories.sample(samplers.ddim(0.0), network, remaining, x, None)
        ahead = fk.look_ahead(first, network, GRID, 8 - step - 1)(None, info_at(x, step))
        np.testing.assert_allclose(ahead, exact[:, 0], rtol=1e-5)


def test_looking_ahead_by_one_step_is_the_prediction_from_the_state():
    x = jax.random.normal(jax.random.key(0), (4, 2))
    row = jax.tree.map(lambda leaf: leaf[3], GRID)
    pred = network(x, jnp.full((4,), row.t), None)
    predicted = (x - jnp.sqrt(1 - row.ab) * pred) / jnp.sqrt(row.ab)
    ahead = fk.look_ahead(first, network, GRID, 1)(None, info_at(x, 2))
    np.testing.assert_allclose(ahead, predicted[:, 0], rtol=1e-5)
    clean = jax.random.normal(jax.random.key(1), (4, 2))
    np.testing.assert_array_equal(fk.look_ahead(first, network, GRID, 1)(clean, info_at(x, 7, True)), clean[:, 0])
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        fk.look_ahead(first, network, GRID, 0)


def test_looking_ahead_steers_inside_a_run():
    kernel = fk.from_sampler(samplers.ddim(eta=1.0), network, GRID, (2,))
    reward = fk.look_ahead(first, network, GRID, 2)
    config = fk.Config(every=2, start=1, stop=5, lam=5.0)
    result = jax.jit(lambda key: fk.run(key, kernel, reward, 64, config))(jax.random.key(0))
    assert result.expectation(lambda x: x[:, 0]) > 3 * fk.base_sample(jax.random.key(0), kernel, 64)[:, 0].mean()
    np.testing.assert_allclose(result.rewards, result.x[:, 0])


@pytest.mark.parametrize("lam", [None, 1.5])
def test_the_value_loss_is_smallest_at_the_value_function(lam):
    """For x_0 of -1 or 1 and r = x_0, E[r | x_t] and log E[exp(lam r) | x_t] are known; other functions do worse."""
    x0 = jnp.where(jnp.arange(40_000) % 2 == 0, -1.0, 1.0)[:, None]

    def value(x_t, t):
        ab = SCHEDULE.alphas_cumprod[t]
        log_odds = 2 * jnp.sqrt(ab) * x_t[:, 0] / (1 - ab)
        if lam is None:
            return jnp.tanh(log_odds / 2)
        log_p = jax.nn.log_sigmoid(jnp.stack([log_odds, -log_odds]))
        return jax.scipy.special.logsumexp(log_p + lam * jnp.asarray([[1.0], [-1.0]]), axis=0) / lam

    loss = jax.jit(
        lambda shift, scale: fk.value_loss(
            jax.random.key(0), lambda x, t: shift + scale * value(x, t), SCHEDULE, x0, x0[:, 0], lam=lam
        )
    )
    slopes = jax.grad(loss, (0, 1))(0.0, 1.0)
    assert abs(slopes[0]) < 0.03 and abs(slopes[1]) < 0.03
    for shift, scale in ((0.2, 1.0), (-0.2, 1.0), (0.0, 0.8), (0.0, 1.2)):
        assert loss(shift, scale) > loss(0.0, 1.0)
