import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import dpm_solver, fk_rewards, masked, samplers, schedules, trajectories
from jaxml25.diffusion import fk_steering as fk

GOLDEN = np.load(pathlib.Path(__file__).parent.parent / "golden" / "fk-steering" / "closed_form.npz")
SCHEDULE = masked.MaskedSchedule("loglinear")


def gaussian_problem(case):
    """Golden Gaussian data, its exact denoiser on the recorded grid, and the recorded closed forms."""
    values = {key.split("/")[1]: GOLDEN[key] for key in GOLDEN.files if key.startswith(f"{case}/")}
    ab = jnp.asarray(values["alphas_cumprod"], float)
    grid = schedules.Grid(jnp.asarray(values["timesteps"]), ab, jnp.append(ab[1:], 1.0))
    mean, var = float(values["data_mean"]), float(values["data_var"])

    def denoise(x, t, cond):
        ab_t = ab[jnp.argmin(jnp.abs(grid.t - t[0]))]
        return jnp.sqrt(1 - ab_t) * (x - jnp.sqrt(ab_t) * mean) / (ab_t * var + 1 - ab_t)

    return values, grid, denoise


def quadratic(values):
    return lambda x, *info: -((x - float(values["quad_a"])) ** 2) / 2


def assert_mean_near(values, exact):
    values = np.asarray(values, np.float64)
    assert abs(values.mean() - exact) < 4 * values.std() / values.size**0.5


def runs(kernel, reward, config, count=4000, num_particles=8):
    run = lambda key: fk.run(key, kernel, reward, num_particles, config)
    return jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(11), count))


@pytest.mark.parametrize("case", ["gauss0", "gauss1"])
def test_ddim_particles_reproduce_the_recorded_normaliser_and_law(case):
    with jax.enable_x64(True):
        values, grid, denoise = gaussian_problem(case)
        kernel = fk.from_sampler(samplers.ddim(eta=float(values["eta"])), denoise, grid, ())
        config = fk.Config(every=2, start=1, stop=8, lam=float(values["lam"]), ess_threshold=None, output="weighted")
        result = runs(kernel, quadratic(values), config)
        assert_mean_near(np.exp(result.log_z - values["quad_logZ"]), 1)
        samples = jax.jit(lambda key: fk.base_sample(key, kernel, 50_000))(jax.random.key(0))
        assert_mean_near(samples, values["sampler_mean"])
        assert_mean_near((samples - values["sampler_mean"]) ** 2, values["sampler_var"])


def test_guided_proposals_keep_the_normaliser_and_plain_guidance_is_biased():
    values, grid, denoise = gaussian_problem("gauss0")
    lam = float(values["lam"])
    reward = quadratic(values)
    kernel = fk.from_sampler(samplers.ddim(eta=1.0), denoise, grid, (), guidance=reward, guidance_scale=lam)
    plain = fk.from_sampler(samplers.ddim(eta=1.0), denoise, grid, ())
    config = fk.Config(every=2, start=1, stop=8, lam=lam, output="weighted")
    result, unguided = runs(kernel, reward, config), runs(plain, reward, config)
    assert_mean_near(np.exp(result.log_z - values["quad_logZ"]), 1)
    assert np.std(result.log_z) < np.std(unguided.log_z)  # what guidance is for
    tilted = np.asarray(jax.vmap(lambda r: r.expectation(lambda x: x))(result))
    assert abs(tilted.mean() - values["quad_tilt_mean"]) < 0.02

    biased = jax.jit(lambda key: fk.guided(key, kernel, reward, 50_000))(jax.random.key(0))
    assert abs(biased.x.mean() - values["quad_tilt_mean"]) > 0.02
    assert biased.x.mean() > values["sampler_mean"] + 0.02  # but it does go the right way
    np.testing.assert_allclose(biased.log_weights, np.full(50_000, -np.log(50_000)), rtol=1e-5)


def vp_grid(n=6):
    return schedules.make_grid(schedules.make_schedule("linear"), n, previous="next")


def network(x, t, cond):
    return jnp.tanh(x) * (1 + t.reshape(-1, *[1] * (x.ndim - 1)) / 1000)


SIGMA_GRID = schedules.make_sigma_grid(schedules.make_schedule("linear"), 6)


@pytest.mark.parametrize(
    ("step_fn", "grid", "scale"),
    [
        (samplers.ddim(eta=0.5), vp_grid(), 1.0),
        (samplers.euler_ancestral(), SIGMA_GRID, float(SIGMA_GRID.sigma[0])),
        (samplers.euler("edm", churn=0.2), schedules.edm_grid(6), 80.0),
        (samplers.flow_sde(), schedules.flow_grid(6), 1.0),
        (dpm_solver.dpmpp(2, algorithm="sde-dpmsolver++"), vp_grid(), 1.0),
    ],
)
def test_a_particle_alone_is_the_sampler_on_the_same_noise(step_fn, grid, scale):
    kernel = fk.from_sampler(step_fn, network, grid, (2,))
    reward = lambda x, info: -jnp.sum(x**2, axis=-1)
    config = fk.Config(every=1, start=0, stop=5, lam=1.0, ess_threshold=None)
    alone = jax.jit(lambda key: fk.run(key, kernel, reward, 1, config))(jax.random.key(3))
    start, noise = fk.run_noise(jax.random.key(3), 6, 1, (2,))
    base = jax.jit(lambda start, noise: trajectories.sample(step_fn, network, grid, start * scale, noise))(start, noise)
    np.testing.assert_allclose(alone.x, base, rtol=2e-6, atol=1e-6)
    bitwise = jax.jit(lambda key: fk.base_sample(key, kernel, 1))(jax.random.key(3))
    np.testing.assert_array_equal(alone.x, bitwise)


@pytest.mark.parametrize("step_fn", [samplers.ddim(eta=1.0), samplers.ddpm()])
def test_a_particle_alone_is_the_substrate_sampler_bit_for_bit(step_fn):
    grid = vp_grid()
    kernel = fk.from_sampler(step_fn, network, grid, (2,))
    config = fk.Config(every=2, start=0, stop=4, lam=1.0)
    alone = jax.jit(lambda key: fk.run(key, kernel, lambda x, info: x[:, 0], 1, config))(jax.random.key(3))
    start, noise = fk.run_noise(jax.random.key(3), 6, 1, (2,))
    base = jax.jit(lambda *arrays: trajectories.sample(step_fn, network, grid, *arrays))(start, noise)
    np.testing.assert_array_equal(alone.x, base)


def test_multistep_solvers_hand_their_memory_down_with_the_particle():
    """After a draw, a copy must go on from its parent's last network output: a replay by hand gives the same samples."""
    step_fn, grid = dpm_solver.dpmpp(2, algorithm="sde-dpmsolver++"), vp_grid()
    kernel = fk.from_sampler(step_fn, network, grid, (2,))
    config = fk.Config(every=2, start=2, stop=2, lam=3.0, ess_threshold=None)
    draws = np.tile(np.arange(4), (6, 1))
    draws[2] = [1, 1, 3, 0]
    run = lambda key: fk.run(key, kernel, lambda x, info: jnp.sum(x, -1), 4, config, draws=draws)
    result = jax.jit(run)(jax.random.key(0))
    assert np.flatnonzero(result.resampled).tolist() == [2, 5]
    start, noise = fk.run_noise(jax.random.key(0), 6, 4, (2,))
    parents = draws[2]
    history = jnp.concatenate([noise[:3][:, parents], noise[3:]])
    by_hand = trajectories.sample(step_fn, network, grid, start[parents], history)
    np.testing.assert_allclose(result.x, by_hand, rtol=1e-5, atol=1e-6)


def test_a_deterministic_sampler_is_refused_unless_jittered_or_resampled_at_the_end_only():
    kernel = fk.from_sampler(samplers.ddim(eta=0.0), network, vp_grid(), (2,))
    reward = lambda x, info: x[:, 0]
    config = fk.Config(every=2, start=0, stop=4)
    with pytest.raises(ValueError, match="kernel must be stochastic"):
        fk.run(jax.random.key(0), kernel, reward, 4, config)
    assert fk.best_of_n(jax.random.key(0), kernel, reward, 4).x.shape == (4, 2)
    jittered = fk.from_sampler(samplers.ddim(eta=0.0), network, vp_grid(), (2,), jitter=0.1)
    run = lambda key: fk.run(key, jittered, reward, 4, fk.Config(every=2, start=0, stop=2, lam=50.0))
    result = jax.jit(run)(jax.random.key(0))
    assert result.unique_ancestors < 4 and len(np.unique(np.asarray(result.x[:, 0]))) == 4
    with pytest.raises(ValueError, match="guidance needs a step_fn that adds noise"):
        fk.from_sampler(samplers.ddim(eta=0.0), network, vp_grid(), (2,), guidance=reward)
    with pytest.raises(ValueError, match="once per step"):
        fk.from_sampler(samplers.heun(), network, SIGMA_GRID, (2,))


def test_the_network_runs_on_microbatches_with_the_same_result():
    sizes = []

    def sized(x, t, cond):
        sizes.append(x.shape[0])
        return network(x, t, cond) + cond

    cond = jnp.linspace(0, 1, 6)[:, None]
    make = lambda microbatch: fk.from_sampler(samplers.ddim(eta=1.0), sized, vp_grid(), (2,), cond, microbatch=microbatch)
    whole = fk.base_sample(jax.random.key(0), make(None), 6)
    assert set(sizes) == {6}
    sizes.clear()
    parts = fk.base_sample(jax.random.key(0), make(2), 6)
    assert set(sizes) == {2}
    np.testing.assert_allclose(parts, whole, rtol=1e-6)


def table_denoiser():
    """Exact conditional marginals of the recorded table of sequences, as logits; token 4 is the mask."""
    table = jnp.asarray(GOLDEN["mask/p0"])

    def one(tokens):
        compatible = table
        for position in range(3):
            visible = jnp.arange(4) == tokens[position]
            keep = jnp.where(tokens[position] == 4, True, visible)
            compatible = compatible * keep.reshape([-1 if axis == position else 1 for axis in range(3)])
        marginals = [compatible.sum(tuple(a for a in range(3) if a != position)) for position in range(3)]
        return jnp.log(jnp.pad(jnp.stack(marginals), ((0, 0), (0, 1))))

    return lambda tokens, t, cond: jax.vmap(one)(tokens)


def table_reward(x, info):
    return jnp.asarray(GOLDEN["mask/reward"])[x[:, 0], x[:, 1], x[:, 2]]


def law_of(x, log_weights):
    flat = jnp.zeros(64).at[(x[..., 0] * 16 + x[..., 1] * 4 + x[..., 2]).ravel()].add(jnp.exp(log_weights).ravel())
    return np.asarray(flat / flat.sum()).reshape(4, 4, 4)


def total_variation(p, q):
    return 0.5 * np.abs(p - q).sum()


def recorded_law(num_steps, name):
    return GOLDEN[f"mask_steps{num_steps}/{name}"]


@pytest.mark.parametrize("num_steps", [3, 8])
def test_masked_samples_have_the_exact_law_of_the_table(num_steps):
    kernel = fk.from_masked(SCHEDULE, table_denoiser(), 3, num_steps, 4)
    base = jax.jit(lambda key: fk.base_sample(key, kernel, 60_000))(jax.random.key(0))
    assert total_variation(law_of(base, jnp.zeros(len(base))), recorded_law(num_steps, "sampler_law")) < 0.02


def test_masked_particles_have_the_exact_tilted_law_and_normaliser_of_the_table():
    kernel = fk.from_masked(SCHEDULE, table_denoiser(), 3, 3, 4)
    lam = float(GOLDEN["mask/lam"])
    config = fk.Config(every=1, start=0, stop=1, lam=lam, output="weighted", num_x0_samples=2)
    result = runs(kernel, table_reward, config, count=24, num_particles=4096)
    law = law_of(result.x, result.log_weights)
    assert total_variation(law, recorded_law(3, "tilted_law")) < 0.02
    assert total_variation(law, recorded_law(3, "sampler_law")) > 0.1
    small = runs(kernel, table_reward, config, count=3000)
    assert np.any(small.resampled)
    assert_mean_near(np.exp(np.asarray(small.log_z)) / recorded_law(3, "Z"), 1)


def test_clean_draws_follow_the_networks_law_and_never_enter_the_state():
    """With one token behind a mask, the reward of M draws tends to log mean exp of the reward under p."""
    probs = jnp.asarray([0.1, 0.2, 0.7])
    values = jnp.asarray([1.0, -2.0, 0.5])
    logits = lambda x, t, cond: jnp.broadcast_to(jnp.append(jnp.log(probs), 0.0), (*x.shape, 4))
    kernel = fk.from_masked(SCHEDULE, logits, 1, 2, 3)
    state = kernel.init(jax.random.key(0), 1)
    info = kernel.propose(jax.random.key(0), state, 0)[1]
    draws = info.draw(fk.particle_keys(jax.random.key(1), 1), 100_000)
    assert draws.shape == (100_000, 1, 1)
    share = np.bincount(np.asarray(draws).ravel(), minlength=3) / draws.size
    assert np.all(np.abs(share - probs) < 4 * np.sqrt(np.asarray(probs) / draws.size))

    def score(x, info):
        if not info.last:
            assert x.shape == (8, 1) and info.state.shape == (8, 1)
        return values[x[:, 0]]

    for scaled, lam in ((False, 2.0), (True, 2.0)):
        config = fk.Config(
            every=1, start=0, stop=0, lam=lam, potential="rt", num_x0_samples=4000, logmeanexp_lambda=scaled, resample="none"
        )
        result = jax.jit(lambda key, config=config: fk.run(key, kernel, score, 8, config))(jax.random.key(2))
        # ESS is 8 at the first step: every particle's reward is near the same mean over draws.
        assert result.ess[0] > 7.9 and np.all(np.asarray(result.x) < 3)
        np.testing.assert_allclose(result.log_weights, jax.nn.log_softmax(lam * values[result.x[:, 0]]), atol=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
def test_rewards_of_several_draws_combine_by_their_formula(scaled):
    rewards = jnp.asarray([[1.0, jnp.nan, jnp.nan], [3.0, 2.0, jnp.nan]])
    lam = jnp.asarray(2.0)
    combined = np.asarray(fk_rewards.combine(rewards, lam, scaled))
    scale = 2.0 if scaled else 1.0
    expected = [np.log(np.mean(np.exp(scale * np.asarray([1.0, 3.0])))) / scale, 2.0 + np.log(0.5) / scale]
    np.testing.assert_allclose(combined[:2], expected, rtol=1e-6)
    assert np.isnan(combined[2])
    np.testing.assert_allclose(fk_rewards.combine(rewards[:, :1], jnp.asarray(0.0), True), [2.0])


def test_a_prefix_is_kept_and_no_mask_comes_out():
    logits = lambda x, t, cond: jnp.zeros((*x.shape, 6))
    prefix = jnp.asarray([1, 2], jnp.int32)
    kernel = fk.from_masked(SCHEDULE, logits, 5, 4, 5, prefix)
    config = fk.Config(every=1, start=0, stop=2, lam=3.0)
    reward = lambda x, info: jnp.sum(x[:, 2:] == 0, axis=-1) * 1.0
    result = jax.jit(lambda key: fk.run(key, kernel, reward, 16, config))(jax.random.key(0))
    np.testing.assert_array_equal(result.x[:, :2], np.tile([1, 2], (16, 1)))
    assert np.all(np.asarray(result.x) < 5)
    with pytest.raises(ValueError, match=r"prefix must not be longer than length 1, got shape \(2,\)"):
        fk.from_masked(SCHEDULE, logits, 1, 4, 5, prefix)
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        fk.from_masked(SCHEDULE, logits, 5, 0, 5)


def test_particle_keys_do_not_depend_on_how_many_there_are():
    few, more = (jax.random.key_data(fk.particle_keys(jax.random.key(0), n)) for n in (3, 5))
    np.testing.assert_array_equal(few, more[:3])
    assert len(np.unique(np.asarray(more), axis=0)) == 5
