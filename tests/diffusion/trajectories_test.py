import functools
import math
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import dpm_solver, guidance, samplers, schedules, trajectories
from tests.diffusion import gaussian

ROOT = pathlib.Path(__file__).parents[2]
STEPS = {"ddim": samplers.ddim(0.5), "heun": samplers.heun(), "dpmpp": dpm_solver.dpmpp(3)}


def _problem(step, n, width=16, batch=4, dtype=float):
    """A small network, and everything else `sample` takes."""
    schedule = schedules.make_schedule("linear")
    grid = schedules.make_sigma_grid(schedule, n) if isinstance(step, samplers.Euler) else schedules.make_grid(schedule, n)
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "in": jax.random.normal(keys[0], (3, width), dtype),
        "out": jax.random.normal(keys[1], (width, 3), dtype) / width,
    }
    x_T = jax.random.normal(keys[2], (batch, 3), dtype)
    return params, grid, x_T, jax.random.normal(keys[3], (n, batch, 3), dtype)


@functools.cache
def _loss(name, remat):
    step = STEPS[name]

    def loss(params, grid, x_T, noise):
        denoise = lambda x, t, cond: jnp.tanh(x @ params["in"] + 1e-3 * t[:, None]) @ params["out"]
        x_0, seen = trajectories.sample(step, denoise, grid, x_T, noise, remat=remat, collect=("x0_hat",))
        return jnp.sum(x_0**2), (x_0, seen["x0_hat"])

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3), has_aux=True))


@pytest.mark.parametrize(
    ("name", "x64"),
    [("ddim", False), ("heun", True), ("dpmpp", True)],
    ids=["ddim-float32", "heun-float64", "dpmpp-float64"],
)
def test_recomputation_changes_neither_values_nor_gradients(name, x64):
    with jax.enable_x64(x64):
        problem = _problem(STEPS[name], 7)  # 7 is no multiple of a chunk: the rest has a scan of its own
        (_, outputs), slopes = _loss(name, "none")(*problem)
        for remat in ("step", "sqrt"):
            (_, again), slopes_again = _loss(name, remat)(*problem)
            close = lambda tolerance: (
                lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.max(np.abs(a)))
            )
            jax.tree.map(close(1e-6), outputs, again)
            jax.tree.map(close(1e-5), slopes, slopes_again)


def _peak(remat, n, width, batch):
    shapes = jax.eval_shape(lambda: _problem(STEPS["ddim"], n, width, batch))

    def loss(params, grid, x_T, noise):
        denoise = lambda x, t, cond: jnp.tanh(x @ params["in"] + 1e-3 * t[:, None]) @ params["out"]
        return jnp.sum(trajectories.sample(STEPS["ddim"], denoise, grid, x_T, noise, remat=remat) ** 2)

    return jax.jit(jax.grad(loss)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_recomputation_lowers_the_peak_as_estimated():
    n, width, batch = 64, 256, 32
    peaks = {remat: _peak(remat, n, width, batch) for remat in trajectories.REMATS}
    estimates = {
        remat: trajectories.memory_estimate(
            (batch, 3), n, activation_bytes=2 * batch * width * 4, remat=remat, stochastic=False
        )
        for remat in trajectories.REMATS
    }
    assert peaks["none"] > 10 * peaks["step"]
    assert 0.5 < peaks["none"] / estimates["none"] < 2
    # The network stores its activation and its slope. What the state costs shows with a network that stores next to nothing.
    small = {remat: _peak(remat, 400, 1, 1000) for remat in ("step", "sqrt")}
    assert small["step"] > 2.5 * small["sqrt"]


def test_memory_estimates_order_the_presets():
    state, activations, n = 1000, 50_000, 100
    sizes = {
        remat: trajectories.memory_estimate((10, 25), n, activation_bytes=activations, remat=remat, stochastic=False)
        for remat in trajectories.REMATS
    }
    assert sizes == {
        "none": n * (state + activations),
        "step": n * state + activations,
        "sqrt": 20 * state + activations,
    }
    noisy = trajectories.memory_estimate((10, 25), n, activation_bytes=activations, remat="sqrt")
    assert noisy == sizes["sqrt"] + n * state


@pytest.mark.parametrize("n", [1, 2, 5, 10])
def test_chunks_cover_every_step_in_order(n):
    count = lambda x, pred, row, noise: (10 * x + row.t, x)
    grid = schedules.Grid(jnp.arange(1, n + 1) % 10, jnp.zeros(n), jnp.zeros(n))
    with jax.enable_x64(True):
        x = jnp.zeros((1,), jnp.int64)
        x_0, seen = trajectories.sample(
            count, lambda x, t, c: x, grid, x.astype(float), jnp.zeros((n, 1)), remat="sqrt", collect=("x_t",)
        )
        assert int(x_0[0]) == int("".join(str(i % 10) for i in range(1, n + 1)))
        assert seen["x_t"].shape == (n, 1) and seen["x_t"][0] == 0


def test_other_scales_etas_keys_and_schedules_do_not_compile_again():
    traces = []

    def network(x, t, cond):
        traces.append(x.shape)
        return 0.1 * x + cond[:, None]

    @jax.jit
    def run(step, scale, schedule, key, x_T):
        grid = schedules.make_grid(schedule, 6)
        noise = jax.random.normal(key, (6, *x_T.shape))
        return trajectories.sample(step, guidance.guided(network, jnp.array(0.0), scale), grid, x_T, noise, jnp.ones(4))

    x_T = jax.random.normal(jax.random.key(9), (4, 3))
    outputs = [
        run(samplers.ddim(eta), scale, schedules.make_schedule(kind), jax.random.key(seed), x_T)
        for eta, scale, kind, seed in [(0.0, 1.0, "linear", 0), (0.5, 7.5, "cosine", 1), (1.0, 2.0, "sigmoid", 2)]
    ]
    assert len(traces) == 1 and run._cache_size() == 1
    assert np.max(np.abs(outputs[0] - outputs[1])) > 0.01 and np.max(np.abs(outputs[1] - outputs[2])) > 0.01


@pytest.mark.parametrize(
    ("step", "calls"), [(samplers.ddim(), 1), (dpm_solver.dpmpp(3), 1), (samplers.heun(), 2)], ids=["ddim", "dpmpp", "heun"]
)
def test_one_body_is_compiled_whatever_the_number_of_steps(step, calls):
    traces = []

    def network(x, t, cond):
        traces.append(t.shape)
        return 0.1 * x

    _, grid, x_T, noise = _problem(step, 50)
    jax.jit(lambda: trajectories.sample(step, network, grid, x_T, noise))()
    assert traces == [(4,)] * calls


def test_trajectories_map_over_starts_noises_and_etas():
    _, grid, x_T, noise = _problem(samplers.ddim(), 5)
    denoise = gaussian.network(schedules.make_schedule("linear"), 0.3, 0.25)
    etas = jnp.array([0.0, 0.4, 1.0, 0.7])
    run = lambda eta, x, z: trajectories.sample(samplers.ddim(eta), denoise, grid, x[None], z[:, None])[0]
    together = jax.jit(jax.vmap(run, in_axes=(0, 0, 1)))(etas, x_T, noise)
    alone = jax.jit(run)
    for i in range(4):
        np.testing.assert_allclose(together[i], alone(etas[i], x_T[i], noise[:, i]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", STEPS)
def test_gradients_match_finite_differences(name):
    with jax.enable_x64(True):
        step = STEPS[name]
        params, grid, x_T, noise = _problem(step, 7)
        run = _loss(name, "none")
        (_, _), (_, slope, noise_slope) = run(params, grid, x_T, noise)
        direction, noise_direction = jnp.cos(jnp.arange(x_T.size)).reshape(x_T.shape), jnp.sin(noise)
        h = 1e-5
        ahead, behind = (run(params, grid, x_T + d * direction, noise + d * noise_direction)[0][0] for d in (h, -h))
        expected = jnp.sum(slope * direction) + jnp.sum(noise_slope * noise_direction)
        np.testing.assert_allclose((ahead - behind) / (2 * h), expected, rtol=1e-6)


def test_a_plain_function_is_a_step_and_collects_are_aligned_with_their_rows():
    grid = schedules.make_grid(schedules.make_schedule("linear"), 3)
    step = lambda x, pred, row, noise: (x + noise, pred)
    noise = jnp.array([1.0, 10.0, 100.0])[:, None]
    network = lambda x, t, cond: x * 0 + t * cond
    x_0, seen = trajectories.sample(step, network, grid, jnp.zeros(1), noise, 2.0, collect=("x_t", "x0_hat"))
    np.testing.assert_array_equal(x_0, [111])
    np.testing.assert_array_equal(seen["x_t"][:, 0], [0, 1, 11])
    np.testing.assert_array_equal(seen["x0_hat"][:, 0], 2.0 * grid.t)
    assert isinstance(trajectories.sample(step, network, grid, jnp.zeros(1), noise, 2.0), jax.Array)


def test_the_network_of_a_vp_schedule_is_fed_unit_variance_in_sigma_space():
    seen = {}

    def network(x, t, cond):
        seen.update(x=x, t=t)
        return x

    row = schedules.SigmaGrid(jnp.float32(7.5), jnp.float32(3.0), jnp.float32(1.0))
    x = jnp.full((2, 4), 10**0.5)
    trajectories.predict(samplers.euler(), network, x, row)
    np.testing.assert_allclose(seen["x"], 1.0, rtol=1e-6)
    np.testing.assert_array_equal(seen["t"], [7.5, 7.5])
    trajectories.predict(samplers.euler("edm"), network, x, row)
    np.testing.assert_array_equal(seen["x"], x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": jnp.zeros((6, 4, 3))}, r"noise must have one row per step: expected a leading axis of 7, got shape \(6,"),
        ({"noise": jnp.zeros((7, 4, 2))}, r"noise must have shape \(7, 4, 3\).* got \(7, 4, 2\)"),
        ({"noise": None}, r"noise must be given .* expected \(7, 4, 3\), got None"),
        ({"remat": "steps"}, "did you mean 'step'"),
        ({"collect": ("x0",)}, "collect must be one of 'x_t', 'x0_hat', got 'x0'"),
    ],
)
def test_bad_arguments_are_errors_that_name_them(change, message):
    _, grid, x_T, noise = _problem(samplers.ddim(), 7)
    arguments = {"step_fn": samplers.ddim(0.5), "denoise": lambda x, t, c: x, "grid": grid, "x_T": x_T, "noise": noise}
    with pytest.raises(ValueError, match=message):
        trajectories.sample(**(arguments | change))


@pytest.mark.parametrize(
    ("n", "remat", "message"), [(0, "none", "n must be at least 1, got 0"), (4, "all", "remat must be")]
)
def test_bad_estimates_are_errors(n, remat, message):
    with pytest.raises(ValueError, match=message):
        trajectories.memory_estimate((2,), n, activation_bytes=1, remat=remat)


def test_eight_devices_give_the_numbers_of_one():
    script = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from jaxml25.diffusion import dpm_solver, guidance, schedules, trajectories

        assert jax.device_count() == 8
        mesh = jax.make_mesh((8,), ("data",))
        schedule = schedules.make_schedule("linear")
        keys = jax.random.split(jax.random.key(0), 3)
        w = jax.random.normal(keys[0], (3, 3))
        denoise = guidance.guided(lambda x, t, c: jnp.tanh(x @ w + c[:, None]), jnp.array(0.0), 3.0)
        x_T, noise = jax.random.normal(keys[1], (16, 3)), jax.random.normal(keys[2], (6, 16, 3))
        cond = jnp.arange(16.0)
        step, grid = dpm_solver.dpmpp(2, algorithm="sde-dpmsolver++"), schedules.make_grid(schedule, 6)
        run = jax.jit(lambda x, z, c: trajectories.sample(step, denoise, grid, x, z, c, remat="sqrt"))
        split = run(
            jax.device_put(x_T, NamedSharding(mesh, P("data"))),
            jax.device_put(noise, NamedSharding(mesh, P(None, "data"))),
            jax.device_put(cond, NamedSharding(mesh, P("data"))),
        )
        assert len(split.sharding.device_set) == 8 and not split.is_fully_replicated
        np.testing.assert_allclose(split, run(x_T, noise, cond), rtol=1e-5, atol=1e-5)
    """
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment, timeout=300)


def test_the_square_root_preset_stores_about_two_roots_of_states():
    for n in (10, 50, 1000):
        size = trajectories.memory_estimate((1,), n, activation_bytes=0, itemsize=1, remat="sqrt", stochastic=False)
        assert size <= 2 * math.ceil(math.sqrt(n))
