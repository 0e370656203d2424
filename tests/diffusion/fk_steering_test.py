import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import fk_steering as fk

A, S, NUM_STEPS = 0.8, 0.6, 6  # x' = A x + S z keeps N(0, 1)
LAM, TARGET = 2.0, 1.5
SCHEMES = ("multinomial", "systematic", "stratified", "residual", "ssp")
EVERY_STEP = {"every": 1, "start": 0, "stop": NUM_STEPS - 1, "lam": LAM, "output": "weighted"}


def reward(x, info):
    return -((x - TARGET) ** 2) / 2


def gaussian_kernel(num_steps=NUM_STEPS, start=0.0, ratio=0.0):
    """A chain whose final law is N(m, v); predicts the clean sample by its conditional mean."""

    def propose(key, x, i):
        left = num_steps - i
        return A * x + S * jax.random.normal(key, x.shape, x.dtype), A**left * x, jnp.full(x.shape, ratio)

    return fk.Kernel(lambda key, num: start + jax.random.normal(key, (num,)), propose, lambda x: x, num_steps)


def recorded_kernel(noise):
    """The same chain on recorded noise (steps + 1, slots): nothing depends on keys."""

    def propose(key, x, i):
        return A * x + S * noise[i + 1], A ** (len(noise) - 1 - i) * x, jnp.zeros(x.shape)

    return fk.Kernel(lambda key, num: noise[0], propose, lambda x: x, len(noise) - 1)


def log_normaliser(mean=0.0, var=1.0, lam=LAM, target=TARGET):
    return -0.5 * np.log(1 + lam * var) - lam * (mean - target) ** 2 / (2 * (1 + lam * var))


@functools.cache
def compiled(x64=False, **options):
    """One program for all rewards -bend (x - target)^2 / 2 + slope x + offset and all lambda."""

    @jax.jit
    def runs(keys, lam, coefficients):
        bend, target, slope, offset = coefficients
        score = lambda x, info: -bend * (x - target) ** 2 / 2 + slope * x + offset
        config = fk.Config(**EVERY_STEP | options | {"lam": lam})
        return jax.vmap(lambda key: fk.run(key, gaussian_kernel(), score, 8, config))(keys)

    return runs


def many(lam=LAM, coefficients=(1.0, TARGET, 0.0, 0.0), runs=4000, **options):
    """Independent runs of 8 particles on the Gaussian chain."""
    run = compiled(x64=jax.config.jax_enable_x64, **options)
    keys = jax.random.split(jax.random.key(7), 4000)
    result = run(keys, jnp.asarray(lam, float), jnp.asarray(coefficients, float))
    return jax.tree.map(lambda leaf: leaf[:runs], result)


def many_of(kernel, config, runs, reward=reward, **settings):
    """Independent runs of 8 particles of any kernel."""
    run = lambda key: fk.run(key, kernel, reward, 8, config, **settings)
    return jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(7), runs))


def assert_unbiased(log_z, exact):
    ratio = np.exp(np.asarray(log_z, np.float64) - exact)
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / ratio.size**0.5
    assert ratio.std() > 1e-3  # an estimate, not a constant


@pytest.mark.parametrize("ess_threshold", [None, 0.5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_normaliser_is_unbiased_under_every_scheme(scheme, ess_threshold):
    result = many(resample=scheme, ess_threshold=ess_threshold)
    assert_unbiased(result.log_z, log_normaliser())
    assert np.any(result.resampled) and (ess_threshold is None) == bool(np.all(result.resampled))


@pytest.mark.parametrize(
    "options",
    [
        {"potential": "is"},
        {"potential": "is", "ess_threshold": None, "resample": "ssp"},
        {"r_min": -3.0},
        {"reward_at": "current"},
        {"every": 2, "start": 1, "stop": 4},
    ],
)
def test_the_normaliser_is_unbiased_under_other_options(options):
    result = many(**options)
    assert_unbiased(result.log_z, log_normaliser())
    if options == {"potential": "is"}:
        assert not np.any(result.resampled)


def test_the_normaliser_is_unbiased_under_any_lambda_on_the_way():
    schedule = lambda step: LAM * (step + 1) / NUM_STEPS
    result = many_of(gaussian_kernel(), fk.Config(**EVERY_STEP), 4000, lambda_schedule=schedule)
    assert_unbiased(result.log_z, log_normaliser())


def test_a_change_of_proposal_is_made_up_for_by_its_ratio():
    """A proposal that shifts every step by d, with the ratio of the two Gaussians, leaves the target where it was."""
    shift = 0.3

    def propose(key, x, i):
        z = jax.random.normal(key, x.shape)
        return A * x + S * z + shift, x, -(shift / S * z + (shift / S) ** 2 / 2)

    kernel = gaussian_kernel()._replace(propose=propose)
    assert_unbiased(many_of(kernel, fk.Config(**EVERY_STEP), 4000).log_z, log_normaliser())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_weighted_particles_have_the_moments_of_the_tilted_law(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        config = fk.Config(**EVERY_STEP)
        run = jax.jit(lambda key: fk.run(key, gaussian_kernel(), reward, 20_000, config))
        result = run(jax.random.key(0))
        mean, var = LAM * TARGET / (1 + LAM), 1 / (1 + LAM)
        assert result.x.dtype == dtype and result.log_weights.dtype == dtype
        np.testing.assert_allclose(result.expectation(lambda x: x), mean, atol=0.02)
        np.testing.assert_allclose(result.expectation(lambda x: (x - mean) ** 2), var, atol=0.02)
        np.testing.assert_allclose(result.log_z, log_normaliser(), atol=0.03)
        np.testing.assert_allclose(jnp.sum(jnp.exp(result.log_weights)), 1, rtol=1e-5)


def test_a_linear_reward_has_its_closed_form_normaliser():
    """The tilt of N(0, 1) by exp(lambda b x) is N(lambda b, 1), with log Z = lambda^2 b^2 / 2."""
    b = 0.4
    assert_unbiased(
        many(coefficients=(0.0, 0.0, b, 0.0), resample="systematic", ess_threshold=0.5).log_z, (LAM * b) ** 2 / 2
    )


def test_the_twisted_proposal_with_the_exact_value_has_no_variance():
    """With V and the transitions p exp(V_t) / exp(V_{t+1}), every path has the same weight: log Z exactly."""
    with jax.enable_x64(True):
        slopes = A ** np.arange(NUM_STEPS, -1, -1)  # E[x_0 | x] = slope x after 0, 1, ... steps
        slopes = jnp.asarray(slopes)
        curvature = LAM / (1 + LAM * (1 - slopes**2))
        value = lambda x, k: (
            -0.5 * jnp.log(1 + LAM * (1 - slopes[k] ** 2)) - curvature[k] * (slopes[k] * x - TARGET) ** 2 / 2
        )

        def twist(key, mean, scale, k):
            """Draws from N(mean, scale^2) exp(V_k), normalised; returns log N / that."""
            precision = 1 / scale**2 + curvature[k] * slopes[k] ** 2
            twisted_mean = (mean / scale**2 + curvature[k] * slopes[k] * TARGET) / precision
            x = twisted_mean + jax.random.normal(key, mean.shape) / jnp.sqrt(precision)
            log_normal = lambda x, mean, precision: 0.5 * jnp.log(precision) - precision * (x - mean) ** 2 / 2
            return x, log_normal(x, mean, 1 / scale**2) - log_normal(x, twisted_mean, precision)

        def propose(key, state, i):
            x, owed = state
            x, log_ratio = twist(key, A * x, S, i + 1)
            return (x, jnp.zeros_like(owed)), x, log_ratio + owed

        start = lambda key, num: twist(key, jnp.zeros(num), 1.0, 0)
        kernel = fk.Kernel(start, propose, lambda state: state[0], NUM_STEPS)
        scores = fk.value_reward(lambda state, step: value(state[0], step + 1) / LAM, reward)
        log_z = many_of(kernel, fk.Config(ess_threshold=None, **EVERY_STEP), 50, scores).log_z
        assert np.var(log_z) < 1e-10
        np.testing.assert_allclose(log_z, log_normaliser(), rtol=1e-10)


def test_without_resampling_diff_is_importance_sampling():
    diff, importance = (many(runs=50, potential=name, resample="none") for name in ("diff", "is"))
    np.testing.assert_allclose(diff.log_weights, importance.log_weights, atol=1e-5)
    np.testing.assert_allclose(diff.log_z, importance.log_z, atol=1e-5)
    assert not np.any(diff.resampled)


def test_a_constant_reward_only_shifts_log_z():
    coefficients = (1.0, TARGET, 0.0)
    plain, shifted = (
        many(coefficients=(*coefficients, c), runs=50, resample="systematic", ess_threshold=0.5) for c in (0.0, 1.25)
    )
    np.testing.assert_allclose(shifted.log_weights, plain.log_weights, atol=1e-4)
    np.testing.assert_array_equal(shifted.ancestors, plain.ancestors)
    np.testing.assert_allclose(shifted.log_z, plain.log_z + LAM * 1.25, atol=1e-4)


def test_lambda_zero_is_the_base_sampler():
    kernel = gaussian_kernel()
    result = jax.jit(lambda key: fk.run(key, kernel, reward, 16, fk.Config(**EVERY_STEP | {"lam": 0.0})))(jax.random.key(3))
    assert not np.any(result.resampled) and np.all(np.asarray(result.ess) == 16)
    np.testing.assert_allclose(result.log_weights, np.full(16, -np.log(16)), rtol=1e-6)
    np.testing.assert_allclose(result.log_z, 0, atol=1e-6)
    np.testing.assert_array_equal(result.x, jax.jit(lambda key: fk.base_sample(key, kernel, 16))(jax.random.key(3)))


@pytest.mark.parametrize("potential", ["diff", "max", "is", "bon"])
def test_one_particle_is_the_base_sampler_bit_for_bit(potential):
    kernel = gaussian_kernel()
    config = fk.Config(potential=potential, ess_threshold=None, **EVERY_STEP)
    result = jax.jit(lambda key: fk.run(key, kernel, reward, 1, config))(jax.random.key(4))
    np.testing.assert_array_equal(result.x, jax.jit(lambda key: fk.base_sample(key, kernel, 1))(jax.random.key(4)))
    if potential != "bon":
        np.testing.assert_allclose(result.log_z, LAM * result.rewards[0], rtol=1e-5)


def test_best_of_n_sorts_independent_samples():
    kernel = gaussian_kernel()
    result = jax.jit(lambda key: fk.best_of_n(key, kernel, reward, 32))(jax.random.key(5))
    independent = fk.base_sample(jax.random.key(5), kernel, 32)
    order = np.argsort(-np.asarray(reward(independent, None)))
    np.testing.assert_allclose(result.x, independent[order], rtol=1e-6)
    np.testing.assert_array_equal(result.ancestors[-1], order)
    assert result.best == result.x[0] and result.unique_ancestors == 32 and not np.any(result.resampled)
    np.testing.assert_allclose(result.log_weights, np.full(32, -np.log(32)), rtol=1e-6)


@pytest.mark.parametrize("potential", ["diff", "max", "add", "rt"])
def test_permuted_particles_give_permuted_results(potential):
    num, rng = 8, np.random.default_rng(0)
    noise = jnp.asarray(rng.normal(size=(NUM_STEPS + 1, num)), jnp.float32)
    draws = rng.integers(num, size=(NUM_STEPS, num))
    order = rng.permutation(num)
    config = fk.Config(potential=potential, ess_threshold=0.9, r_min=-9.0, **EVERY_STEP)
    run = jax.jit(lambda noise, draws: fk.run(jax.random.key(0), recorded_kernel(noise), reward, num, config, draws=draws))
    plain = run(noise, draws)
    permuted = run(noise[:, order], np.argsort(order)[draws[:, order]])
    assert np.any(plain.resampled)
    np.testing.assert_array_equal(permuted.x, plain.x[order])
    np.testing.assert_allclose(permuted.log_weights, plain.log_weights[order], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(permuted.log_z, plain.log_z, rtol=1e-5)


def test_a_run_replays_from_its_own_ancestors():
    config = fk.Config(**EVERY_STEP | {"every": 2})
    kernel = gaussian_kernel()
    run = jax.jit(lambda draws: fk.run(jax.random.key(1), kernel, reward, 8, config, draws=draws))
    first = run(None)
    again = run(first.ancestors)
    short = run(first.ancestors[fk.scored_steps(config, NUM_STEPS)])
    for other in (again, short):
        jax.tree.map(np.testing.assert_array_equal, first, other)
    np.testing.assert_array_equal(first.ancestors[1], np.arange(8))  # an unscored step


@pytest.mark.parametrize("x64", [False, True])
def test_weights_far_beyond_the_exponent_range_stay_finite(x64):
    """Rewards of 1e3 and lambda = 10 are weights of exp(10^4)."""
    with jax.enable_x64(x64):
        result = many(10.0, (0.0, 0.0, 1e3, 0.0), runs=5, resample="systematic", ess_threshold=0.5)
        assert np.all(np.isfinite(result.log_z)) and np.all(np.isfinite(result.rewards))
        assert np.all(np.isfinite(result.ess)) and not np.any(np.isnan(result.log_weights))
        assert np.all(np.max(result.log_weights, axis=1) > np.log(1 / 8) - 1e-6)


def slots_kernel(num_steps=4):
    """Particles that keep the index of the slot where they started."""
    return fk.Kernel(
        lambda key, num: jnp.arange(float(num)), lambda key, x, i: (x, x, jnp.zeros(x.shape)), lambda x: x, num_steps
    )


@pytest.mark.parametrize("potential", ["diff", "rt", "is"])
def test_nan_rewards_are_counted_and_weigh_nothing(potential):
    config = fk.Config(potential=potential, every=1, start=0, stop=3, ess_threshold=None)
    bad = lambda x, info: jnp.where(x == 2, jnp.nan, 0.0)
    result = jax.jit(lambda key: fk.run(key, slots_kernel(), bad, 4, config))(jax.random.key(0))
    assert not np.any(np.asarray(result.x) == 2) and np.all(np.isfinite(result.rewards))
    np.testing.assert_array_equal(result.info.nan_rewards, [0, 0, 0, 1] if potential == "is" else [1, 0, 0, 0])
    np.testing.assert_allclose(result.log_z, np.log(3 / 4), rtol=1e-5)
    assert not np.any(result.info.degenerate)
    last_only = fk.Config(potential=potential, every=-1)
    kept = jax.jit(lambda key: fk.run(key, slots_kernel(), bad, 4, last_only))(jax.random.key(0))
    np.testing.assert_array_equal(np.isneginf(kept.rewards), np.asarray(kept.x) == 2)
    np.testing.assert_array_equal(np.isneginf(kept.log_weights), np.asarray(kept.x) == 2)


@pytest.mark.parametrize("ess_threshold", [None, 0.5])
def test_no_positive_weight_at_all_is_flagged_and_taken_as_equal_weights(ess_threshold):
    config = fk.Config(every=1, start=0, stop=3, lam=1.0, ess_threshold=ess_threshold)
    dead_at_one = lambda x, info: jnp.where(info.step == 1, -jnp.inf, x)
    result = jax.jit(lambda key: fk.run(key, slots_kernel(), dead_at_one, 4, config))(jax.random.key(0))
    np.testing.assert_array_equal(result.info.degenerate, [False, True, False, False])
    assert np.isneginf(result.log_z) and np.all(np.isfinite(result.log_weights))


def test_rewards_are_evaluated_on_schedule_only_and_on_the_host_if_asked():
    calls = []

    def count(x, info):
        calls.append((int(info.step), bool(info.last)))
        assert isinstance(x, np.ndarray)
        return reward(x, info)

    config = fk.Config(every=2, start=1, stop=4, lam=LAM)
    run = jax.jit(lambda key: fk.run(key, gaussian_kernel(), count, 8, config, reward_host=True))
    hosted = jax.block_until_ready(run(jax.random.key(2)))
    assert sorted(calls) == [(1, False), (3, False), (NUM_STEPS - 1, True)]
    device = jax.jit(lambda key: fk.run(key, gaussian_kernel(), reward, 8, config))(jax.random.key(2))
    np.testing.assert_allclose(hosted.log_z, device.log_z, rtol=1e-5)
    np.testing.assert_array_equal(hosted.ancestors, device.ancestors)

    calls.clear()
    jax.block_until_ready(fk.best_of_n(jax.random.key(2), gaussian_kernel(), count, 8, reward_host=True).x)
    assert calls == [(NUM_STEPS - 1, True)]


def test_a_prompt_per_system_under_vmap_is_a_loop_over_prompts():
    targets = jnp.asarray([-1.0, 0.5, 2.0])
    keys = jax.random.split(jax.random.key(0), 3)
    calls = []

    def host(x, info):
        calls.append(1)
        return -((x[:, 0] - x[:, 1]) ** 2)

    kernel = lambda target: gaussian_kernel()._replace(
        propose=lambda key, x, i: (lambda s: (s[0], jnp.stack([s[1], jnp.full(x.shape, target)], 1), s[2]))(
            gaussian_kernel().propose(key, x, i)
        ),
        finish=lambda x: jnp.stack([x, jnp.full(x.shape, target)], 1),
    )
    config = fk.Config(every=3, start=2, stop=2, lam=1.0)
    run = lambda key, target: fk.run(key, kernel(target), host, 4, config, reward_host=True)
    batched = jax.block_until_ready(jax.jit(jax.vmap(run))(keys, targets))
    assert len(calls) == 3 * 2
    single = jax.jit(run)(keys[1], targets[1])
    np.testing.assert_allclose(batched.x[1], single.x, rtol=1e-6)
    np.testing.assert_allclose(batched.log_z[1], single.log_z, rtol=1e-5)


def test_microbatches_change_nothing():
    sizes = []

    def sized(x, info):
        sizes.append(x.shape[0])
        return reward(x, info)

    config = fk.Config(**EVERY_STEP)
    run = jax.jit(
        lambda microbatch: fk.run(jax.random.key(0), gaussian_kernel(), sized, 12, config, microbatch=microbatch),
        static_argnums=0,
    )
    whole = run(None)
    assert set(sizes) == {12}
    sizes.clear()
    parts = run(4)
    assert set(sizes) == {4}
    np.testing.assert_array_equal(parts.ancestors, whole.ancestors)
    np.testing.assert_allclose(parts.log_z, whole.log_z, rtol=1e-6)
    with pytest.raises(ValueError, match="microbatch must be at least 1 and divide the 12 particles, got 5"):
        fk.run(jax.random.key(0), gaussian_kernel(), reward, 12, config, microbatch=5)


def test_another_lambda_key_or_reward_scale_compiles_nothing():
    traces = []

    @jax.jit
    def run(key, lam, scale):
        traces.append(1)
        return fk.run(key, gaussian_kernel(), lambda x, info: scale * x, 8, fk.Config(**EVERY_STEP | {"lam": lam}))

    first = run(jax.random.key(0), 1.0, 2.0)
    second = run(jax.random.key(0), 2.0, 1.0)
    assert len(traces) == 1
    np.testing.assert_allclose(first.log_z, second.log_z, rtol=1e-5)


def test_particles_may_be_any_pytree():
    def propose(key, state, i):
        x = A * state["x"] + S * jax.random.normal(key, state["x"].shape)
        state = {"x": x, "trace": state["trace"].at[:, i].set(x[:, 0]), "count": state["count"] + 1}
        return state, {"clean": x}, jnp.zeros(x.shape[0])

    kernel = fk.Kernel(
        lambda key, num: {
            "x": jax.random.normal(key, (num, 2)),
            "trace": jnp.zeros((num, NUM_STEPS)),
            "count": jnp.asarray(0),
        },
        propose,
        lambda state: {"clean": state["x"], "trace": state["trace"], "count": state["count"]},
        NUM_STEPS,
    )
    config = fk.Config(ess_threshold=None, **EVERY_STEP)
    score = lambda x, info: -jnp.sum(x["clean"] ** 2, axis=1)
    result = jax.jit(lambda key: fk.run(key, kernel, score, 8, config))(jax.random.key(0))
    assert result.x["count"] == NUM_STEPS
    # The trace travelled with its particle: the last entry is the particle's own, and copies share what came before.
    np.testing.assert_array_equal(result.x["trace"][:, -1], result.x["clean"][:, 0])
    assert len(np.unique(np.asarray(result.x["trace"][:, 0]))) == result.unique_ancestors < 8


def test_copies_of_a_particle_separate():
    result = many(50.0, runs=20, resample="systematic", ess_threshold=0.5)
    shared = np.asarray(jax.vmap(lambda r: r.unique_ancestors)(result)) < 8
    assert np.all(shared)
    assert all(len(np.unique(x)) == 8 for x in np.asarray(result.x))


def test_outputs_and_accessors_read_the_result():
    config = fk.Config(**EVERY_STEP)
    result = jax.tree.map(lambda leaf: leaf[0], many(resample="systematic", ess_threshold=0.5))
    assert result.best == result.x[jnp.argmax(result.rewards)]
    key = jax.random.key(1)
    assert fk.output(key, result, fk.Config(output="best")) == result.best
    assert fk.output(key, result, fk.Config(output="sample")) == result.sample(key)
    x, log_weights = fk.output(key, result, config)
    np.testing.assert_array_equal(x, result.x)
    np.testing.assert_array_equal(log_weights, result.log_weights)
    drawn = jax.vmap(result.sample)(jax.random.split(key, 20_000))
    share = np.mean(np.asarray(drawn) == result.x[3])
    expected = np.exp(result.log_weights[3])
    assert abs(share - expected) < 4 * (expected / 20_000) ** 0.5

    resampled = many(resample="systematic", ess_threshold=0.5, output="resampled")
    assert_unbiased(resampled.log_z, log_normaliser())
    resampled = jax.tree.map(lambda leaf: leaf[0], resampled)
    assert resampled.resampled[-1] and not result.resampled[-1]
    np.testing.assert_allclose(resampled.log_weights, np.full(8, -np.log(8)), rtol=1e-6)
    np.testing.assert_allclose(resampled.log_z, result.log_z, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"potential": "dif"}, "potential must be one of .*got 'dif'; did you mean 'diff'"),
        ({"resample": "sytematic"}, "resample must be one of"),
        ({"lam": float("nan")}, "lam must be finite, got nan"),
        ({"lam": float("inf")}, "lam must be finite, got inf"),
        ({"ess_threshold": 0.0}, r"ess_threshold must be in \(0, 1\], got 0.0"),
        ({"ess_threshold": 1.5}, r"ess_threshold must be in \(0, 1\], got 1.5"),
        ({"every": 0}, "every must be positive, or -1 for none, got 0"),
        ({"start": 5, "stop": 4}, "stop must be at least start = 5, got 4"),
        ({"variant": "reference_image"}, "resample must be 'multinomial' with variant 'reference_image', got 'systematic'"),
        ({"variant": "referense"}, "variant must be one of"),
        ({"output": "all"}, "output must be one of"),
        ({"reward_at": "next"}, "reward_at must be one of"),
        ({"num_x0_samples": 0}, "num_x0_samples must be at least 1, got 0"),
    ],
)
def test_bad_options_name_themselves(options, message):
    with pytest.raises(ValueError, match=message):
        fk.Config(**options)


def test_bad_runs_name_what_is_wrong():
    run = functools.partial(fk.run, jax.random.key(0), gaussian_kernel())
    config = fk.Config(**EVERY_STEP)
    with pytest.raises(ValueError, match="num_particles must be at least 1, got 0"):
        run(reward, 0, config)
    with pytest.raises(ValueError, match=r"reward must return shape \(4,\), got \(4, 1\)"):
        run(lambda x, info: x[:, None], 4, config)
    with pytest.raises(ValueError, match=r"scored steps in \[0, 6\), got 2, 8 and 3, which is \[2, 5, 8\]"):
        run(reward, 4, fk.Config(every=3, start=2, stop=8))
    with pytest.raises(ValueError, match=r"scored steps in \[0, 6\)"):
        run(reward, 4, fk.Config(every=3, start=-1, stop=4))
    with pytest.raises(ValueError, match=r"draws must have shape \(6, 4\), or \(6, 4\).*got \(5, 4\)"):
        run(reward, 4, config, draws=np.zeros((5, 4), np.int32))
    frozen = gaussian_kernel()._replace(stochastic=False)
    with pytest.raises(ValueError, match="kernel must be stochastic"):
        fk.run(jax.random.key(0), frozen, reward, 4, config)
    assert fk.run(jax.random.key(0), frozen, reward, 4, fk.Config(every=-1)).x.shape == (4,)


def test_reference_alone_means_the_image_code():
    assert fk.Config(variant="reference", resample="multinomial").variant == "reference_image"


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from jaxml25.diffusion import fk_steering as fk, masked, samplers, schedules
assert jax.device_count() == 8
mesh = jax.make_mesh((8,), ("particles",), axis_types=(jax.sharding.AxisType.Auto,))
grid = schedules.make_grid(schedules.make_schedule("linear"), 4)
denoise = lambda x, t, cond: jnp.sqrt(1 - grid.ab[jnp.argmin(jnp.abs(grid.t - t[0]))]) * x
vectors = lambda axis: fk.from_sampler(samplers.ddim(eta=1.0), denoise, grid, (3,), axis_name=axis)
logits = lambda x, t, cond: jnp.broadcast_to(jnp.arange(5.0) / 4, (*x.shape, 5))
tokens = lambda axis: fk.from_masked(masked.MaskedSchedule("loglinear"), logits, 6, 4, 4, axis_name=axis)
cases = [
    (vectors, lambda x, info: -jnp.sum((x - 1) ** 2, -1), fk.Config(every=1, start=0, stop=2, lam=2.0)),
    (tokens, lambda x, info: jnp.sum(x == 0, -1) * 1.0, fk.Config(every=1, start=0, stop=2, lam=2.0, ess_threshold=None)),
]
for kernel, reward, config in cases:
    alone = jax.jit(lambda key: fk.run(key, kernel(None), reward, 32, config))(jax.random.key(0))
    body = lambda key: fk.run(key, kernel("particles"), reward, 32, config, axis_name="particles")
    spread = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=fk.result_specs("particles")))(jax.random.key(0))
    assert len(spread.x.sharding.device_set) == 8 and spread.x.sharding.spec == P("particles")
    assert np.any(alone.resampled)
    np.testing.assert_array_equal(spread.ancestors, alone.ancestors)
    for one, eight in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
        np.testing.assert_allclose(eight, one, rtol=1e-5, atol=1e-5)
"""


def test_eight_devices_give_the_numbers_of_one(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text('import os\nos.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"\n' + SHARDED)
    root = pathlib.Path(__file__).parent.parent.parent
    environment = os.environ | {"PYTHONPATH": str(root)}
    outcome = subprocess.run([sys.executable, str(script)], cwd=root, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
