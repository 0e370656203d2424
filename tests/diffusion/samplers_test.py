import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import dpm_solver, predictions, samplers, schedules, trajectories
from tests.diffusion import gaussian

# Golden run: the step, and how its grid differs from make_grid's defaults.
VP_RUNS = {
    "ddpm_small_epsilon": (samplers.ddpm(), {}),
    "ddpm_small_sample": (samplers.ddpm(prediction_type="sample"), {}),
    "ddpm_small_v_prediction": (samplers.ddpm(prediction_type="v_prediction"), {}),
    "ddpm_large": (samplers.ddpm("fixed_large"), {}),
    "ddpm_clip": (samplers.ddpm(clip=0.7), {}),
    "ddpm_trailing": (samplers.ddpm(), {"spacing": "trailing", "previous": "next"}),
    "ddim_eta0_epsilon": (samplers.ddim(), {"offset": 1, "final": "alpha0"}),
    "ddim_eta0_sample": (samplers.ddim(prediction_type="sample"), {"offset": 1, "final": "alpha0"}),
    "ddim_eta0_v_prediction": (samplers.ddim(prediction_type="v_prediction"), {"offset": 1, "final": "alpha0"}),
    "ddim_eta1": (samplers.ddim(1.0), {}),
    "ddim_eta05_clip": (samplers.ddim(0.5, clip=0.7), {}),
}
SIGMA_RUNS = {
    "euler": (samplers.euler(), False),
    "euler_karras": (samplers.euler(), True),
    "euler_ancestral": (samplers.euler_ancestral(), False),
    "heun": (samplers.heun(), False),
}


def _close(actual, golden, *, tolerance, scale=None):
    scale = max(1.0, np.max(np.abs(golden))) if scale is None else scale
    np.testing.assert_allclose(actual, golden, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("name", VP_RUNS)
def test_vp_steps_and_trajectories_match_the_golden_ones(name, x64):
    step, options = VP_RUNS[name]
    with jax.enable_x64(x64):
        golden = gaussian.run("vp_ddpm_ddim", name, np.float64 if x64 else np.float32)
        schedule = schedules.make_schedule("scaled_linear")
        grid = schedules.make_grid(schedule, 8, **options)
        np.testing.assert_array_equal(grid.t, golden["timesteps"])

        xs, x0s = gaussian.step_each(step, golden["xs"][:-1], golden["model_outputs"], grid, golden["noises"])
        assert xs.dtype == golden["xs"].dtype
        _close(xs, golden["xs"][1:], tolerance=2e-6)
        _close(x0s, golden["x0s"], tolerance=2e-6)

        data = gaussian.golden("vp_ddpm_ddim")
        denoise = gaussian.network(schedule, data["m"], data["s2"], step.prediction_type)
        x_0, seen = trajectories.sample(step, denoise, grid, golden["xs"][0], golden["noises"], collect=("x_t", "x0_hat"))
        _close(x_0, golden["xs"][-1], tolerance=1e-4)
        _close(seen["x_t"], golden["xs"][:-1], tolerance=1e-4)
        _close(seen["x0_hat"], golden["x0s"], tolerance=1e-4)


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("name", SIGMA_RUNS)
def test_sigma_space_steps_and_trajectories_match_the_golden_ones(name, x64):
    step, karras = SIGMA_RUNS[name]
    # Heun's arrays alternate predictor and corrector; every other state is a step's start.
    stride = 2 if name == "heun" else 1
    with jax.enable_x64(x64):
        golden = gaussian.run("sigma_space", name, np.float64 if x64 else np.float32)
        sigmas = jnp.asarray(np.append(golden["sigmas"][:1], golden["sigmas"][1::stride]))
        grid = schedules.SigmaGrid(jnp.asarray(golden["timesteps"][::stride]), sigmas[:-1], sigmas[1:])
        starts, preds = golden["xs"][:-1:stride], golden["model_outputs"][::stride]

        xs, _ = gaussian.step_each(step, starts, preds, grid, golden["noises"][:8])
        scale = np.maximum(1.0, np.max(np.abs(starts), axis=(1, 2, 3, 4), keepdims=True))
        _close(xs / scale, golden["xs"][1::stride] / scale, tolerance=2e-6)

        schedule = schedules.make_schedule("scaled_linear")
        data = gaussian.golden("sigma_space")
        x_0, seen = gaussian.sample(
            step,
            gaussian.network(schedule, data["m"], data["s2"]),
            schedules.make_sigma_grid(schedule, 8, karras),
            golden["xs"][0],
            golden["noises"][:8],
            collect=("x_t",),
        )
        _close(x_0, golden["xs"][-1], tolerance=1e-4)
        _close(seen["x_t"] / scale, starts / scale, tolerance=1e-4)


def test_heun_corrections_match_the_golden_ones():
    golden = gaussian.run("sigma_space", "heun", np.float32)
    sigmas = np.append(golden["sigmas"][:1], golden["sigmas"][1::2])
    heun = samplers.heun()
    correct = jax.jit(lambda step, *args: step.correct(*args))
    for i in range(7):
        row = schedules.SigmaGrid(*(jnp.float32(v) for v in (golden["timesteps"][2 * i], sigmas[i], sigmas[i + 1])))
        x, pred, pred_next = golden["xs"][2 * i], golden["model_outputs"][2 * i], golden["model_outputs"][2 * i + 1]
        x_euler, x0 = gaussian.step_once(heun, x, pred, row, 0.0)
        x_next = correct(heun, x, x0, row, x_euler, pred_next, golden["timesteps"][2 * i + 1])
        _close(x_next, golden["xs"][2 * i + 2], tolerance=2e-6, scale=np.max(np.abs(x)))


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ["edm_euler", "edm_dpmsolver++2m"])
def test_edm_preconditioning_and_trajectories_match_the_golden_ones(name, x64):
    step = samplers.euler("edm") if name == "edm_euler" else dpm_solver.dpmpp(prediction_type="edm")
    with jax.enable_x64(x64):
        golden = gaussian.run("sigma_space", name, np.float64 if x64 else np.float32)
        data = gaussian.golden("sigma_space")
        denoise = gaussian.network(None, data["m"], data["s2"], "edm")
        sigmas = jnp.asarray(golden["sigmas"])
        grid = schedules.SigmaGrid(sigmas[:-1], sigmas[:-1], sigmas[1:])
        c_noise = samplers.edm_coefficients(grid.sigma)[3]
        _close(c_noise, golden["timesteps"], tolerance=2e-6)

        denoised = jax.jit(jax.vmap(samplers.edm_denoised))(golden["model_outputs"], golden["xs"][:-1], grid.sigma)
        exact = jax.jit(jax.vmap(denoise))(golden["xs"][:-1], grid.t)
        _close(denoised, exact, tolerance=2e-6)

        x_0, seen = gaussian.sample(step, denoise, grid, golden["xs"][0], golden["noises"], collect=("x_t",))
        _close(x_0, golden["xs"][-1], tolerance=1e-4)
        scale = np.maximum(1.0, np.max(np.abs(golden["xs"][:-1]), axis=(1, 2, 3, 4), keepdims=True))
        _close(seen["x_t"] / scale, golden["xs"][:-1] / scale, tolerance=2e-6)


def test_a_preconditioned_network_sees_unit_variance_and_its_own_level():
    sigma_data, sigma = 0.5, jnp.array([0.01, 1.0, 50.0])
    seen = {}

    def network(x, t, cond):
        seen.update(x=x, t=t, cond=cond)
        return 2 * x

    denoise = samplers.edm_precondition(network, sigma_data)
    x = jnp.sqrt(sigma**2 + sigma_data**2)[:, None] * jnp.ones((3, 4))
    out = denoise(x, sigma, "cond")
    np.testing.assert_allclose(seen["x"], jnp.ones((3, 4)), rtol=1e-6)
    np.testing.assert_allclose(seen["t"], jnp.log(sigma) / 4, rtol=1e-6)
    assert seen["cond"] == "cond"
    for i in range(3):
        np.testing.assert_allclose(out[i], samplers.edm_denoised(2 * seen["x"][i], x[i], sigma[i]), rtol=1e-6)


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("shift", [1, 3])
def test_flow_steps_and_trajectories_match_the_golden_ones(shift, x64):
    with jax.enable_x64(x64):
        golden = gaussian.run("sigma_space", f"flow_euler_shift{shift}", np.float64 if x64 else np.float32)
        s = jnp.asarray(golden["sigmas"])
        grid = schedules.SigmaGrid(s[:-1], s[:-1], s[1:])
        step = samplers.flow_euler()
        xs, _ = gaussian.step_each(step, golden["xs"][:-1], golden["model_outputs"], grid, golden["xs"][:-1])
        _close(xs, golden["xs"][1:], tolerance=2e-6)
        data = gaussian.golden("sigma_space")
        denoise = gaussian.velocity(data["m"], data["s2"])
        _close(gaussian.sample(step, denoise, grid, golden["xs"][0], None), golden["xs"][-1], tolerance=1e-4)


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_ddim_at_eta_one_is_ddpm_with_the_small_variance(prediction_type, x64):
    with jax.enable_x64(x64):
        grid = schedules.make_grid(schedules.make_schedule("scaled_linear"), 20, previous="next")
        x, pred, noise = jax.random.normal(jax.random.key(0), (3, 20, 2, 5), float)
        ddim, _ = gaussian.step_each(samplers.ddim(1.0, prediction_type), x, pred, grid, noise)
        ddpm, _ = gaussian.step_each(samplers.ddpm("fixed_small", prediction_type), x, pred, grid, noise)
        # The clamp of DDPM's variance, 1e-20, is 1e-10 of noise.
        np.testing.assert_allclose(ddim, ddpm, rtol=0, atol=1e-9 if x64 else 1e-5)


def test_ddim_without_noise_runs_backward_to_where_it_came_from():
    # With a point mass as data the network is affine in x and its eps is constant along the trajectory.
    with jax.enable_x64(True):
        schedule = schedules.make_schedule("scaled_linear")
        denoise = gaussian.network(schedule, 0.7, 0.0)
        grid = schedules.make_grid(schedule, 8, offset=1, final="alpha0")
        arrive = jnp.append(grid.t[1:], 0)
        back = schedules.Grid(arrive[::-1], grid.ab_prev[::-1], grid.ab[::-1])
        x_T = jax.random.normal(jax.random.key(0), (4, 3))
        no_noise = jnp.zeros((8, 4, 3))
        x_0 = gaussian.sample(samplers.ddim(), denoise, grid, x_T, no_noise)
        assert np.max(np.abs(x_0 - x_T)) > 0.5
        np.testing.assert_allclose(gaussian.sample(samplers.ddim(), denoise, back, x_0, no_noise), x_T, atol=1e-11)


S2 = 0.25


def _ode_error(step, n, kind):
    """Relative error of the standard deviation that a deterministic sampler ends with."""
    if kind == "vp":
        schedule, grid = gaussian.log_snr_levels(n)
        variance = lambda ab: ab * S2 + 1 - ab
        denoise, start, end = gaussian.network(schedule, 0.0, S2), variance(grid.ab[0]), variance(grid.ab_prev[-1])
    elif kind == "sigma":
        grid = schedules.edm_grid(n, 1e-4, 10.0)
        denoise, start, end = gaussian.network(None, 0.0, S2, "edm"), S2 + 100.0, S2
    else:
        grid, denoise, start, end = schedules.flow_grid(n), gaussian.velocity(0.0, S2), 1.0, S2
    _, reached = gaussian.law(step, denoise, grid, 0.0, start)
    return jnp.sqrt(reached / end) - 1


@pytest.mark.parametrize(
    ("step", "kind", "expected"),
    [
        (samplers.ddim(), "vp", 1),
        (samplers.euler("edm"), "sigma", 1),
        (samplers.flow_euler(), "flow", 1),
        (dpm_solver.dpmpp(1), "vp", 1),
        (samplers.heun("edm"), "sigma", 2),
        (dpm_solver.dpmpp(2), "vp", 2),
        (dpm_solver.dpmpp(2, "heun"), "vp", 2),
        (dpm_solver.dpmpp(2, prediction_type="edm"), "sigma", 2),
        (dpm_solver.dpmpp(2, algorithm="dpmsolver"), "vp", 2),
        (dpm_solver.dpmpp(3), "vp", 2),  # its first two steps are of lower order
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, samplers.Step) else str(value),
)
def test_deterministic_samplers_converge_at_their_order(step, kind, expected):
    with jax.enable_x64(True):
        counts = (40, 160)
        order = gaussian.order([_ode_error(step, n, kind) for n in counts], counts)
        assert abs(order - expected) < 0.25


def test_the_third_order_is_worth_its_memory():
    with jax.enable_x64(True):
        assert abs(_ode_error(dpm_solver.dpmpp(3), 80, "vp")) < 0.5 * abs(_ode_error(dpm_solver.dpmpp(2), 80, "vp"))


def _sde_errors(step, n, kind):
    """Errors of mean and variance that a stochastic sampler ends with, for data N(0.7, S2)."""
    m = 0.7
    if kind == "vp":
        schedule, grid = gaussian.log_snr_levels(n)
        law = lambda ab: (jnp.sqrt(ab) * m, ab * S2 + 1 - ab)
        denoise, start, end = gaussian.network(schedule, m, S2), law(grid.ab[0]), law(grid.ab_prev[-1])
    elif kind == "sigma":
        grid = schedules.edm_grid(n, 1e-4, 10.0)
        denoise, start, end = gaussian.network(None, m, S2, "edm"), (m, S2 + 100.0), (m, S2)
    else:
        first = 0.95 if step.diffusion == "flow_grpo" else 1.0
        grid, denoise = schedules.flow_grid(n, start=first), gaussian.velocity(m, S2)
        start, end = ((1 - first) * m, (1 - first) ** 2 * S2 + first**2), (m, S2)
    mean, variance = gaussian.law(step, denoise, grid, *start)
    return abs(mean - end[0]), abs(variance - end[1])


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (samplers.ddpm(), "vp"),
        (samplers.ddpm("fixed_large"), "vp"),
        (samplers.ddim(0.5), "vp"),
        (dpm_solver.dpmpp(2, algorithm="sde-dpmsolver++"), "vp"),
        (samplers.euler_ancestral("edm"), "sigma"),
        ("churned", "sigma"),
        (samplers.flow_sde(1.0), "flow"),
        (samplers.flow_sde(0.3), "flow"),
        (samplers.flow_sde(0.7, "flow_grpo"), "flow"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, samplers.Step) else str(value),
)
def test_stochastic_samplers_tend_to_the_law_of_the_data(step, kind):
    with jax.enable_x64(True):
        make = lambda n: samplers.euler("edm", churn=2 / n) if step == "churned" else step
        coarse, fine = (_sde_errors(make(n), n, kind) for n in (100, 400))
        for before, after in zip(coarse, fine, strict=True):
            assert after < max(before / 3, 1e-3) and after < 0.02


def test_churned_heun_keeps_the_law_of_the_data_at_second_order():
    with jax.enable_x64(True):
        errors = [_sde_errors(samplers.heun("edm", churn=5 / n), n, "sigma")[1] for n in (100, 400)]
        assert abs(gaussian.order(errors, (100, 400)) - 2) < 0.25 and errors[1] < 1e-4
        # Noise of half the deviation must show.
        assert _sde_errors(samplers.heun("edm", churn=0.05, churn_noise=0.5), 100, "sigma")[1] > 0.02
        # Levels that are not churned are Heun's own.
        unchurned = samplers.heun("edm", churn=0.05, churn_range=(20.0, 30.0))
        np.testing.assert_allclose(
            _sde_errors(unchurned, 40, "sigma")[1], _sde_errors(samplers.heun("edm"), 40, "sigma")[1], rtol=1e-6
        )


def test_flow_sde_without_noise_is_the_ode_and_samples_of_both_share_their_moments():
    grid = schedules.flow_grid(100)
    denoise = gaussian.velocity(0.7, S2)
    chains = 4000
    x_T = jax.random.normal(jax.random.key(0), (chains, 1))
    noise = jax.random.normal(jax.random.key(1), (100, chains, 1))
    run = jax.jit(lambda step: trajectories.sample(step, denoise, grid, x_T, noise))
    ode, silent, noisy = run(samplers.flow_euler()), run(samplers.flow_sde(0.0)), run(samplers.flow_sde(1.0))
    np.testing.assert_array_equal(ode, silent)
    assert abs(jnp.mean(noisy) - jnp.mean(ode)) < 4 * jnp.sqrt(2 * S2 / chains) + 0.01
    assert abs(jnp.var(noisy) - jnp.var(ode)) < 4 * S2 * jnp.sqrt(4 / chains) + 0.01
    assert jnp.corrcoef(noisy[:, 0], ode[:, 0])[0, 1] < 0.9


@pytest.mark.parametrize("raw", [-1.0, 0.0, 1.0])
def test_learned_variance_runs_from_small_to_large_in_logarithm(raw):
    row = jax.tree.map(lambda a: a[5], schedules.make_grid(schedules.make_schedule("linear"), 10))
    x, pred, noise = jax.random.normal(jax.random.key(0), (3, 2, 4, 4, 3))
    step = gaussian.step_once
    small, large = (step(samplers.ddpm(v), x, pred, row, noise)[0] for v in ("fixed_small", "fixed_large"))
    silent = step(samplers.ddpm(), x, pred, row, jnp.zeros_like(x))[0]
    wide = jnp.concatenate([pred, jnp.full_like(pred, raw)], axis=-1)
    learned = step(samplers.ddpm("learned_range"), x, wide, row, noise)[0]
    f = (raw + 1) / 2
    scale = jnp.exp(f * jnp.log((large - silent) / noise) + (1 - f) * jnp.log((small - silent) / noise))
    np.testing.assert_allclose(learned, silent + scale * noise, rtol=1e-3, atol=1e-5)
    first = jnp.moveaxis(wide, -1, 1)
    moved = step(
        samplers.ddpm("learned_range", channel_axis=1), jnp.moveaxis(x, -1, 1), first, row, jnp.moveaxis(noise, -1, 1)
    )[0]
    np.testing.assert_allclose(moved, jnp.moveaxis(learned, -1, 1), rtol=1e-5, atol=1e-6)


def test_eps_is_read_again_after_clipping_only_on_request():
    row = jax.tree.map(lambda a: a[3], schedules.make_grid(schedules.make_schedule("linear"), 10))
    x, pred = jax.random.normal(jax.random.key(0), (2, 3, 4))
    x_next, x0 = samplers.ddim(clip=0.3)(x, pred, row, 0.0)
    again, _ = samplers.ddim(clip=0.3, use_clipped_model_output=True)(x, pred, row, 0.0)
    a, s = jnp.sqrt(row.ab_prev), jnp.sqrt(1 - row.ab_prev)
    np.testing.assert_allclose(x_next, a * x0 + s * pred, rtol=1e-5, atol=1e-6)
    eps = (x - jnp.sqrt(row.ab) * x0) / jnp.sqrt(1 - row.ab)
    np.testing.assert_allclose(again, a * x0 + s * eps, rtol=1e-5, atol=1e-6)
    assert np.max(np.abs(x_next - again)) > 0.1


def test_clip_may_be_a_function_of_the_sample():
    row = jax.tree.map(lambda a: a[0], schedules.make_grid(schedules.make_schedule("linear"), 10))
    x, pred = jax.random.normal(jax.random.key(0), (2, 3, 4))
    _, x0 = jax.jit(lambda step: step(x, pred, row, 0.0))(samplers.ddim(clip=predictions.dynamic_threshold))
    np.testing.assert_allclose(x0, predictions.dynamic_threshold(predictions.to_x0(pred, x, row.ab, "epsilon")), rtol=1e-4)


def test_no_noise_is_added_at_level_zero():
    grid = schedules.make_grid(schedules.make_schedule("linear"), 10)
    x, pred, noise = jax.random.normal(jax.random.key(0), (3, 2, 4))
    last, first = (jax.tree.map(lambda a, i=i: a[i], grid) for i in (-1, 0))
    for step in (samplers.ddpm("fixed_large"), samplers.ddpm(), samplers.ddim(1.0)):
        move = lambda row, noise, step=step: gaussian.step_once(step, x, pred, row, noise)[0]
        np.testing.assert_array_equal(move(last, noise), move(last, 0 * noise))
        assert np.max(np.abs(move(first, noise) - move(first, 0 * noise))) > 0.1


def test_zero_terminal_snr_is_sampled_by_v_and_refused_for_epsilon():
    schedule = schedules.make_schedule("scaled_linear", zero_snr=True)
    grid = schedules.make_grid(schedule, 10, "trailing")
    x_T = jax.random.normal(jax.random.key(0), (4, 3))
    noise = jax.random.normal(jax.random.key(1), (10, 4, 3))
    # The exact v network, whose conversion from epsilon would divide by 0 at the first level.
    ab = schedule.alphas_cumprod

    def v(x, t, cond):
        a, s = (schedules.expand(level[t], x) for level in (jnp.sqrt(ab), jnp.sqrt(1 - ab)))
        centred = (x - a * 0.7) / (a**2 * S2 + s**2)
        return a * s * centred - s * (0.7 + a * S2 * centred)

    for step in (
        samplers.ddim(0.0, "v_prediction"),
        samplers.ddim(1.0, "v_prediction"),
        samplers.ddpm(prediction_type="v_prediction"),
    ):
        loss = lambda x_T, noise, step=step: jnp.sum(trajectories.sample(step, v, grid, x_T, noise) ** 2)
        value, slopes = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x_T, noise)
        assert np.isfinite(value) and all(np.all(np.isfinite(slope)) for slope in slopes)
    _, seen = trajectories.sample(samplers.ddim(0.0, "v_prediction"), v, grid, x_T, noise, collect=("x0_hat",))
    np.testing.assert_allclose(seen["x0_hat"][0], 0.7, rtol=1e-5)  # from pure noise, the best guess is the mean
    for step in (samplers.ddim(), samplers.ddpm(), dpm_solver.dpmpp(), samplers.ddim(prediction_type="score")):
        with pytest.raises(ValueError, match="zero terminal SNR"):
            trajectories.sample(step, v, grid, x_T, noise)


def test_gradients_at_full_eta_are_finite_in_everything():
    schedule = schedules.make_schedule("linear")
    x_T = jax.random.normal(jax.random.key(0), (2, 3))
    noise = jax.random.normal(jax.random.key(1), (5, 2, 3))

    def loss(x_T, noise, eta, table):
        schedule = schedules.Schedule(table)
        denoise = gaussian.network(schedule, 0.3, S2)
        grid = schedules.make_grid(schedule, 5)
        return jnp.sum(trajectories.sample(samplers.ddim(eta), denoise, grid, x_T, noise) ** 2)

    slopes = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(x_T, noise, 1.0, schedule.alphas_cumprod)
    assert all(np.all(np.isfinite(slope)) for slope in slopes)
    assert np.any(slopes[0] != 0) and np.any(slopes[1][0] != 0) and np.all(slopes[1][-1] == 0)


@pytest.mark.parametrize(
    "step",
    [
        samplers.ddpm(clip=0.5),
        samplers.ddim(0.6),
        samplers.euler_ancestral(),
        samplers.flow_sde(0.8),
        dpm_solver.dpmpp(algorithm="sde-dpmsolver++"),
    ],
    ids=lambda step: type(step).__name__,
)
def test_every_step_is_affine_in_its_noise(step):
    schedule = schedules.make_schedule("linear")
    grid = schedules.flow_grid(4, start=0.9) if isinstance(step, samplers.Flow) else schedules.make_grid(schedule, 4)
    grid = schedules.make_sigma_grid(schedule, 4) if isinstance(step, samplers.EulerAncestral) else grid
    row = jax.tree.map(lambda a: a[1], grid)
    x, pred, a, b = jax.random.normal(jax.random.key(0), (4, 2, 3))
    state = (step.init(x),) if hasattr(step, "init") else ()
    move = lambda noise: gaussian.step_once(step, x, pred, row, noise, *state)[0]
    origin = move(jnp.zeros_like(x))
    np.testing.assert_allclose(move(2 * a - 3 * b) - origin, 2 * (move(a) - origin) - 3 * (move(b) - origin), atol=1e-4)
    assert np.max(np.abs(move(a) - origin)) > 0.01


def test_a_step_computes_in_float32_for_a_bfloat16_state():
    grid = schedules.make_grid(schedules.make_schedule("linear"), 1000)
    row = jax.tree.map(lambda a: a[-2], grid)  # 1 - ab is 2e-4, which bfloat16 would lose
    x, pred = jax.random.normal(jax.random.key(0), (2, 50))
    rounded = x.astype(jnp.bfloat16), pred.astype(jnp.bfloat16)
    x_next, x0 = samplers.ddim()(*rounded, row, 0.0)
    exact = samplers.ddim()(*(v.astype(jnp.float32) for v in rounded), row, 0.0)
    assert x_next.dtype == x0.dtype == jnp.bfloat16
    np.testing.assert_array_equal(x_next, exact[0].astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: samplers.ddim(1.5), r"eta must be in \[0, 1\], got 1.5"),
        (lambda: samplers.ddim(-0.1), r"eta must be in \[0, 1\], got -0.1"),
        (lambda: samplers.ddim(prediction_type="v"), "prediction_type must be one of"),
        (lambda: samplers.ddpm("small"), "variance must be one of 'fixed_small'"),
        (lambda: samplers.ddpm(clip=0), "clip must be positive, got 0"),
        (lambda: samplers.euler("epsilon", churn=0.1), "churn needs prediction_type 'edm'"),
        (lambda: samplers.heun("edm", churn=1), r"churn must be in \[0, 0.41\d*\], got 1"),
        (lambda: samplers.euler_ancestral("x0"), "prediction_type must be one of"),
        (lambda: samplers.flow_sde(-1.0), "kappa must be in .* got -1.0"),
        (lambda: samplers.flow_sde(diffusion="grpo"), "diffusion must be one of 'matched', 'flow_grpo'"),
    ],
)
def test_bad_arguments_are_errors_that_name_them(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_step_refuses_the_other_kind_of_grid_and_infinite_noise():
    schedule = schedules.make_schedule("linear")
    x = jnp.zeros((1, 1))
    with pytest.raises(ValueError, match="grid must be a Grid for Ddim, got a SigmaGrid"):
        trajectories.sample(samplers.ddim(), lambda x, t, c: x, schedules.make_sigma_grid(schedule, 4), x, None)
    with pytest.raises(ValueError, match="grid must be a SigmaGrid for Heun, got a Grid"):
        trajectories.sample(samplers.heun(), lambda x, t, c: x, schedules.make_grid(schedule, 4), x, None)
    noise = jnp.zeros((4, 1, 1))
    with pytest.raises(ValueError, match=r"sigma < 1 for diffusion 'flow_grpo', got 1.0"):
        trajectories.sample(samplers.flow_sde(0.5, "flow_grpo"), lambda x, t, c: x, schedules.flow_grid(4), x, noise)
