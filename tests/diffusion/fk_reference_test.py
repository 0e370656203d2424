import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import fk_reference
from jaxml25.diffusion import fk_steering as fk

GOLDEN = np.load(pathlib.Path(__file__).parent.parent / "golden" / "fk-steering" / "fkd_steps.npz")
RUNS = sorted({key.split("/")[0] for key in GOLDEN.files})


def recorded(run):
    """Returns the recorded arrays and the same settings as our config."""
    arrays = {key.split("/")[1]: GOLDEN[key] for key in GOLDEN.files if key.startswith(f"{run}/")}
    config = fk.Config(
        potential=run.split("_")[1],
        lam=float(arrays["cfg_lmbda"]),
        resample="multinomial",
        every=int(arrays["cfg_resample_frequency"]),
        start=int(arrays["cfg_resampling_t_start"]),
        stop=int(arrays["cfg_resampling_t_end"]),
        ess_threshold=0.5 if arrays["cfg_adaptive_resampling"] else None,
        r_min=float(arrays["cfg_reward_min_value"]),
        variant=f"reference_{run.split('_')[0]}",
    )
    return arrays, config


@pytest.mark.parametrize("run", RUNS)
def test_a_recorded_run_is_repeated_decision_by_decision(run):
    arrays, config = recorded(run)
    replay = fk_reference.replay(
        jnp.asarray(arrays["rewards"]),
        jnp.asarray(arrays["indices"]),
        scored=jnp.asarray(fk.scored_steps(config, len(arrays["rewards"]))),
        potential=config.potential,
        lam=config.lam,
        r_min=config.r_min,
        ess_threshold=config.ess_threshold,
        variant=config.variant,
    )
    np.testing.assert_array_equal(replay.resampled, arrays["resampled"].astype(bool))
    np.testing.assert_array_equal(replay.ancestry, arrays["ancestry"])
    np.testing.assert_allclose(replay.weights, arrays["weights"], rtol=1e-5)
    np.testing.assert_allclose(replay.running, arrays["population_rs"], rtol=1e-6)
    np.testing.assert_allclose(replay.product, arrays["product_of_potentials"], rtol=1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_steering_with_a_reference_variant_decides_like_the_recorded_run(run):
    arrays, config = recorded(run)
    rewards = jnp.asarray(arrays["rewards"])
    # Particles know the slot they came from; the recorded rewards belong to slots.
    kernel = fk.Kernel(
        init=lambda key, num: jnp.arange(num),
        propose=lambda key, state, i: (state, rewards[i], jnp.zeros(state.shape)),
        finish=lambda state: state,
        num_steps=len(rewards),
    )
    reward = lambda x0, info: rewards[-1] if info.last else x0
    result = jax.jit(lambda: fk.run(jax.random.key(0), kernel, reward, 8, config, draws=arrays["indices"]))()
    np.testing.assert_array_equal(result.resampled, arrays["resampled"].astype(bool))
    np.testing.assert_array_equal(result.lineage, arrays["ancestry"])
    np.testing.assert_array_equal(result.x, arrays["ancestry"][-1])
    np.testing.assert_allclose(result.log_weights, np.full(8, -np.log(8)), rtol=1e-6)
    assert np.isnan(result.log_z)


def test_draws_of_a_key_follow_the_weights():
    """Over many runs of one decision, offspring is K W in the mean."""
    rewards = jnp.asarray([0.0, 0.3, -0.5, 1.0])
    kernel = fk.Kernel(
        lambda key, num: jnp.arange(num), lambda key, x, i: (x, x, jnp.zeros(x.shape)), lambda state: state, num_steps=1
    )
    config = fk.Config(every=-1, lam=1.0, resample="multinomial", variant="reference_text", ess_threshold=None)
    run = lambda key: fk.run(key, kernel, lambda x, info: rewards[x], 4, config).x
    draws = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 20_000)))
    expected = np.exp(rewards) / np.exp(rewards).sum()
    share = np.bincount(draws.ravel(), minlength=4) / draws.size
    assert np.all(np.abs(share - expected) < 4 * np.sqrt(expected / draws.size))
    assert not np.all(np.diff(draws, axis=1) >= 0)  # unsorted
