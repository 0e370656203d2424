import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import dpm_solver, schedules, trajectories
from tests.diffusion import gaussian

RUNS = {
    **{f"dpmsolver++_o{order}": dpm_solver.dpmpp(order) for order in (1, 2, 3)},
    **{f"dpmsolver_o{order}": dpm_solver.dpmpp(order, algorithm="dpmsolver") for order in (1, 2, 3)},
    "dpmsolver++_o2_heun": dpm_solver.dpmpp(2, "heun"),
    "sde-dpmsolver++_o2": dpm_solver.dpmpp(2, algorithm="sde-dpmsolver++"),
}


def _grid(schedule, step, n):
    final = "alpha0" if step.algorithm == "dpmsolver" else "one"
    return schedules.make_grid(schedule, n, "linspace_dpm", final=final, previous="next")


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("name", RUNS)
def test_steps_and_trajectories_match_the_golden_ones(name, x64):
    step = RUNS[name]
    with jax.enable_x64(x64):
        golden = gaussian.run("dpmsolver", name, np.float64 if x64 else np.float32)
        schedule = schedules.make_schedule("scaled_linear")
        grid = _grid(schedule, step, 8)
        np.testing.assert_array_equal(grid.t, golden["timesteps"])
        xs = golden["xs"]

        def one(state, inputs):
            x_next, state, _ = step(*inputs, state)
            return state, x_next

        inputs = (xs[:-1], golden["model_outputs"], grid, golden["noises"])
        _, ahead = jax.jit(lambda: jax.lax.scan(one, step.init(xs[0], 8), inputs))()
        np.testing.assert_allclose(ahead, xs[1:], rtol=0, atol=2e-6 * np.max(np.abs(xs)))

        data = gaussian.golden("dpmsolver")
        denoise = gaussian.network(schedule, data["m"], data["s2"])
        x_0, seen = gaussian.sample(step, denoise, grid, xs[0], golden["noises"], collect=("x_t",))
        np.testing.assert_allclose(x_0, xs[-1], rtol=0, atol=1e-4)
        np.testing.assert_allclose(seen["x_t"], xs[:-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("n", [8, 20])
@pytest.mark.parametrize("step", [RUNS["dpmsolver++_o3"], RUNS["sde-dpmsolver++_o2"]], ids=["o3", "sde"])
def test_the_step_to_clean_data_returns_its_own_guess_exactly(step, n):
    schedule = schedules.make_schedule("scaled_linear")
    x_T = jax.random.normal(jax.random.key(0), (2, 3))
    noise = jax.random.normal(jax.random.key(1), (n, 2, 3))
    denoise = gaussian.network(schedule, 0.3, 0.25)
    x_0, seen = gaussian.sample(step, denoise, _grid(schedule, step, n), x_T, noise, collect=("x0_hat",))
    np.testing.assert_array_equal(x_0, seen["x0_hat"][-1])


def test_lower_final_orders_apply_to_few_steps_only():
    schedule = schedules.make_schedule("scaled_linear")
    denoise = gaussian.network(schedule, 0.3, 0.25)
    x_T = jax.random.normal(jax.random.key(0), (2, 3))
    for n, differs in ((14, True), (15, False)):
        grid = schedules.make_grid(schedule, n, "linspace_dpm", final="alpha0", previous="next")
        runs = [
            trajectories.sample(dpm_solver.dpmpp(3, lower_order_final=lower), denoise, grid, x_T, None)
            for lower in (True, False)
        ]
        assert bool(np.max(np.abs(runs[0] - runs[1])) > 1e-6) == differs


def test_sigma_space_and_vp_agree_on_the_same_levels():
    with jax.enable_x64(True):
        schedule, grid = gaussian.log_snr_levels(12)
        denoise = gaussian.network(schedule, 0.3, 0.25)
        x_T = jax.random.normal(jax.random.key(0), (2, 3))
        sigma_grid = schedules.SigmaGrid(grid.t, schedules.sigma_of(grid.ab), schedules.sigma_of(grid.ab_prev))
        for step in (dpm_solver.dpmpp(2), dpm_solver.dpmpp(3, algorithm="dpmsolver")):
            vp = trajectories.sample(step, denoise, grid, x_T, None)
            ve = trajectories.sample(step, denoise, sigma_grid, schedules.ve_from_vp(x_T, grid.ab[0]), None)
            np.testing.assert_allclose(schedules.vp_from_ve(ve, sigma_grid.sigma_next[-1]), vp, rtol=1e-9)


def test_pure_noise_is_a_level_like_any_other_for_v():
    schedule = schedules.make_schedule("scaled_linear", zero_snr=True)
    grid = schedules.make_grid(schedule, 10, "trailing", previous="next")
    x_T = jax.random.normal(jax.random.key(0), (2, 3))
    half = lambda x, t, cond: 0.5 * x
    loss = lambda x_T, step: jnp.sum(trajectories.sample(step, half, grid, x_T, None) ** 2)
    for order in (1, 2, 3):
        step = dpm_solver.dpmpp(order, prediction_type="v_prediction")
        value, slope = jax.jit(jax.value_and_grad(loss))(x_T, step)
        assert np.isfinite(value) and np.all(np.isfinite(slope))
    with pytest.raises(ValueError, match="zero terminal SNR"):
        loss(x_T, dpm_solver.dpmpp(algorithm="dpmsolver", prediction_type="v_prediction"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": 4}, "order must be from 1 to 3 .* got 4"),
        ({"order": 3, "algorithm": "sde-dpmsolver++"}, "order must be from 1 to 2 .* got 3"),
        ({"order": 0}, "got 0"),
        ({"solver": "midpont"}, "did you mean 'midpoint'"),
        ({"algorithm": "ddpm++"}, "algorithm must be one of"),
        ({"prediction_type": "noise"}, "prediction_type must be one of"),
        ({"clip": -1.0}, "clip must be positive, got -1.0"),
    ],
)
def test_bad_arguments_are_errors_that_name_them(arguments, message):
    with pytest.raises(ValueError, match=message):
        dpm_solver.dpmpp(**arguments)
