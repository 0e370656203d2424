import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import schedules
from tests.diffusion import gaussian


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    ("kind", "zero_snr"),
    [*((kind, False) for kind in schedules.KINDS), ("linear", True), ("scaled_linear", True)],
)
def test_tables_match_the_golden_ones(kind, zero_snr, x64):
    name = f"{kind}{'_zsnr' if zero_snr else ''}_T1000_alphas_cumprod"
    with jax.enable_x64(x64):
        schedule = schedules.make_schedule(kind, 1000, zero_snr=zero_snr)
        assert schedule.alphas_cumprod.dtype == (jnp.float64 if x64 else jnp.float32) and schedule.T == 1000
        np.testing.assert_allclose(schedule.alphas_cumprod, gaussian.golden("schedules")[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", schedules.KINDS)
def test_the_product_is_taken_in_float64_and_rounded_once(kind):
    with jax.enable_x64(True):
        exact = np.asarray(schedules.make_schedule(kind).alphas_cumprod)
    np.testing.assert_array_equal(schedules.make_schedule(kind).alphas_cumprod, exact.astype(np.float32))


@pytest.mark.parametrize("kind", schedules.KINDS)
def test_zero_terminal_snr_ends_in_noise_and_keeps_the_first_level(kind):
    plain, rescaled = schedules.make_schedule(kind), schedules.make_schedule(kind, zero_snr=True)
    assert rescaled.alphas_cumprod[-1] <= 1e-10
    np.testing.assert_allclose(rescaled.alphas_cumprod[0], plain.alphas_cumprod[0], rtol=1e-6)
    assert np.all(np.diff(rescaled.alphas_cumprod) < 0)


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("n", [10, 50])
def test_timesteps_match_the_golden_ones(spacing, offset, n):
    grid = schedules.make_grid(schedules.make_schedule("linear"), n, spacing, offset)
    np.testing.assert_array_equal(grid.t, gaussian.golden("schedules")[f"timesteps_{spacing}_off{offset}_n{n}"])


def test_ddim_arrives_a_spacing_earlier_and_ddpm_at_the_next_of_the_list():
    schedule = schedules.make_schedule("scaled_linear")
    table = np.asarray(schedule.alphas_cumprod)
    by_spacing = schedules.make_grid(schedule, 7, offset=1, final="alpha0")
    np.testing.assert_array_equal(by_spacing.ab_prev[:-1], table[np.asarray(by_spacing.t)[:-1] - 1000 // 7])
    assert by_spacing.ab_prev[-1] == table[0]
    by_list = schedules.make_grid(schedule, 7, "linspace", previous="next")
    np.testing.assert_array_equal(by_list.ab_prev[:-1], by_list.ab[1:])
    assert by_list.ab_prev[-1] == 1
    np.testing.assert_array_equal(by_list.ab, table[np.asarray(by_list.t)])


def test_a_grid_of_every_level_visits_every_level():
    schedule = schedules.make_schedule("cosine", 12)
    for spacing in ("leading", "linspace", "trailing"):
        np.testing.assert_array_equal(schedules.make_grid(schedule, 12, spacing).t, np.arange(12)[::-1])


@pytest.mark.parametrize("karras", [False, True])
def test_sigma_grids_match_the_golden_ones(karras):
    grid = schedules.make_sigma_grid(schedules.make_schedule("scaled_linear"), 8, karras)
    golden = gaussian.golden("schedules")
    sigmas = golden[f"euler_sigmas_karras{int(karras)}"]
    # The golden table was multiplied up in float32, which is off by about 1e-6.
    np.testing.assert_allclose(grid.t, golden[f"euler_timesteps_karras{int(karras)}"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(grid.sigma, sigmas[:-1], rtol=3e-6)
    np.testing.assert_allclose(grid.sigma_next, sigmas[1:], rtol=3e-6)


def test_karras_sigmas_match_the_golden_ones_and_end_at_zero():
    sigmas = schedules.karras_sigmas(8, 0.002, 80)
    np.testing.assert_allclose(sigmas, gaussian.golden("sigma_space")["edm_euler/sigmas"], rtol=1e-6)
    grid = schedules.edm_grid(8)
    np.testing.assert_array_equal(grid.sigma, sigmas[:-1])
    np.testing.assert_array_equal(grid.sigma_next, sigmas[1:])
    np.testing.assert_array_equal(grid.t, grid.sigma)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_grids_run_from_noise_to_data_through_shifted_equal_steps(shift):
    grid = schedules.flow_grid(4, shift)
    s = np.linspace(1, 0, 5)
    s = shift * s / (1 + (shift - 1) * s)
    np.testing.assert_allclose(grid.sigma, s[:-1], rtol=1e-6)
    np.testing.assert_allclose(grid.sigma_next, s[1:], rtol=1e-6)
    np.testing.assert_array_equal(schedules.time_shift(jnp.array([0.0, 1.0]), shift), [0, 1])


@pytest.mark.parametrize("x64", [False, True])
def test_forward_samples_match_the_golden_ones(x64):
    golden = gaussian.golden("schedules")
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        x0, noise = jnp.asarray(golden["fwd_x0"], dtype), jnp.asarray(golden["fwd_noise"], dtype)
        x_t = schedules.q_sample(schedules.make_schedule("scaled_linear"), x0, golden["fwd_t"], noise)
        assert x_t.dtype == dtype
        np.testing.assert_allclose(x_t, golden["fwd_xt"], rtol=0, atol=2e-6)


def test_a_ve_state_shrunk_is_the_vp_state_of_its_level():
    x0, noise = jax.random.normal(jax.random.key(0), (2, 3, 4))
    schedule = schedules.make_schedule("linear")
    t = jnp.array([0, 500, 999])
    ab = schedule.alphas_cumprod[t]
    sigma = schedules.sigma_of(ab)
    vp, ve = schedules.q_sample(schedule, x0, t, noise), schedules.q_sample_ve(x0, sigma, noise)
    np.testing.assert_allclose(schedules.vp_from_ve(ve, sigma), vp, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(schedules.ve_from_vp(vp, ab), ve, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(schedules.q_sample_flow(x0, 0.25, noise), 0.75 * x0 + 0.25 * noise, rtol=1e-6)


def test_levels_between_integers_interpolate_sigma():
    schedule = schedules.make_schedule("linear")
    t = jnp.array([0, 500, 999])
    np.testing.assert_allclose(
        schedules.alpha_bar_at(schedule, t.astype(float)), schedules.alpha_bar_at(schedule, t), rtol=1e-5
    )
    sigma = schedules.sigma_of(schedules.alpha_bar_at(schedule, jnp.array([10.0, 10.5, 11.0])))
    np.testing.assert_allclose(sigma[1], (sigma[0] + sigma[2]) / 2, rtol=1e-5)


def test_continuous_schedule_is_the_integral_of_its_rate():
    schedule = schedules.ContinuousVP()
    slope = jax.vmap(jax.grad(lambda t: jnp.log(schedule.alpha_bar(t))))(jnp.linspace(0.0, 1.0, 5))
    np.testing.assert_allclose(slope, -schedule.beta(jnp.linspace(0.0, 1.0, 5)), rtol=1e-5)
    assert schedule.alpha_bar(0.0) == 1


def test_schedules_and_grids_can_be_traced():
    grids = jax.vmap(lambda table: schedules.make_grid(schedules.Schedule(table), 4))(
        jnp.linspace(0.9, 0.1, 20).reshape(2, 10)
    )
    assert grids.ab.shape == (2, 4) and grids.t.shape == (2, 4)


def test_safe_square_root_has_no_slope_where_it_is_zero():
    value, slope = jax.vmap(jax.value_and_grad(schedules.safe_sqrt))(jnp.array([-1e-8, 0.0, 4.0]))
    np.testing.assert_array_equal(value, [0, 0, 2])
    np.testing.assert_array_equal(slope, [0, 0, 0.25])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda s: schedules.make_schedule("liner"), "kind must be one of .* got 'liner'; did you mean 'linear'"),
        (lambda s: schedules.make_schedule("linear", 0), "T must be at least 1, got 0"),
        (lambda s: schedules.make_schedule("linear", 1, zero_snr=True), "T must be at least 2 with zero_snr, got 1"),
        (lambda s: schedules.make_schedule("linear", beta_start=0.5, beta_end=0.1), "beta_start 0.5 and beta_end 0.1"),
        (lambda s: schedules.make_schedule("cosine", beta_end=0.1), "do not apply to kind 'cosine'"),
        (lambda s: schedules.make_grid(s, 11), "n must be from 1 to the schedule's T = 10, got 11"),
        (lambda s: schedules.make_grid(s, 0), "n must be from 1 .* got 0"),
        (lambda s: schedules.make_grid(s, 10, offset=1), r"offset must keep the levels in \[0, 9\], got 1"),
        (lambda s: schedules.make_grid(s, 5, "leding"), "spacing must be one of .* did you mean 'leading'"),
        (lambda s: schedules.make_grid(s, 5, final="zero"), "final must be one of 'one', 'alpha0', got 'zero'"),
        (lambda s: schedules.make_grid(s, 5, previous="last"), "previous must be one of"),
        (lambda s: schedules.make_sigma_grid(schedules.make_schedule("linear", 10, zero_snr=True), 5), "positive"),
        (lambda s: schedules.edm_grid(5, 2.0, 1.0), "sigma_min 2.0 and sigma_max 1.0"),
        (lambda s: schedules.karras_sigmas(0), "n must be at least 1, got 0"),
        (lambda s: schedules.flow_grid(0), "n must be at least 1, got 0"),
        (lambda s: schedules.flow_grid(4, -1.0), "shift must be positive, got -1.0"),
        (lambda s: schedules.flow_grid(4, start=1.5), r"start must be in \(0, 1\], got 1.5"),
    ],
)
def test_bad_arguments_are_errors_that_name_them(build, message):
    with pytest.raises(ValueError, match=message):
        build(schedules.make_schedule("linear", 10))
