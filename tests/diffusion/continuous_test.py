import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import continuous, predictions, schedules

# beta_max large enough for p_1 to be N(0, I) to 1e-4.
SCHEDULE = schedules.ContinuousVP(0.1, 40.0)
MEAN = jnp.array([0.3, -0.5])
COVARIANCE = jnp.array([[0.4, 0.25], [0.25, 0.3]])


def _law(t):
    ab = SCHEDULE.alpha_bar(t)
    return jnp.sqrt(ab) * MEAN, ab * COVARIANCE + (1 - ab) * jnp.eye(2)


def _network(prediction_type):
    """The exact network for correlated Gaussian data."""

    def denoise(x, t, cond=None):
        mean, covariance = _law(t[0])
        score = -jnp.linalg.solve(covariance, (x - mean).T).T
        return predictions.convert(score, x, SCHEDULE.alpha_bar(t[0]), "score", prediction_type)

    return denoise


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_the_ode_carries_noise_to_the_law_of_the_data(prediction_type, x64):
    with jax.enable_x64(x64):
        # The flow of Gaussians is affine, so a simplex shows where the mean and the covariance go.
        x_T = jnp.concatenate([jnp.zeros((1, 2)), jnp.eye(2)]).astype(float)
        run = jax.jit(
            lambda x: continuous.ode_sample(_network(prediction_type), SCHEDULE, x, prediction_type=prediction_type)
        )
        x = run(x_T)
        assert x.dtype == x_T.dtype
        mean, matrix = x[0], (x[1:] - x[0]).T
        start_mean, start_covariance = _law(1.0)
        end_mean, end_covariance = _law(1e-3)
        np.testing.assert_allclose(mean + matrix @ start_mean, end_mean, atol=5e-4)
        np.testing.assert_allclose(matrix @ start_covariance @ matrix.T, end_covariance, atol=5e-4)


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
def test_likelihoods_match_the_closed_form(x64):
    with jax.enable_x64(x64):
        x0 = MEAN + 0.5 * jax.random.normal(jax.random.key(0), (5, 2), float)
        run = jax.jit(
            lambda key, trace, probes: continuous.log_likelihood(
                key, _network("epsilon"), SCHEDULE, x0, trace=trace, probes=probes
            ),
            static_argnums=(1, 2),
        )
        exact = jax.scipy.stats.multivariate_normal.logpdf(x0, *_law(1e-3))
        np.testing.assert_allclose(run(jax.random.key(1), "exact", 1), exact, atol=1e-3)
        estimates = run(jax.random.key(1), "hutchinson", 400)
        assert estimates.dtype == x0.dtype
        # z^T J z = tr J + 2 J_12 z_1 z_2: about one nat of spread per probe here.
        np.testing.assert_allclose(estimates, exact, atol=0.25)
        assert np.max(np.abs(run(jax.random.key(2), "hutchinson", 1) - exact)) > 0.05


def test_hutchinson_is_unbiased():
    x0 = MEAN[None] + 0.2
    keys = jax.random.split(jax.random.key(3), 2)
    run = jax.jit(lambda key: continuous.log_likelihood(key, _network("epsilon"), SCHEDULE, x0, probes=1000)[0])
    exact = jax.scipy.stats.multivariate_normal.logpdf(x0[0], *_law(1e-3))
    for key in keys:
        assert abs(run(key) - exact) < 0.15


def test_the_sde_draws_from_the_law_of_the_data():
    chains = 4000
    x_T = jax.random.normal(jax.random.key(0), (chains, 2))
    run = jax.jit(lambda key: continuous.sde_sample(key, _network("epsilon"), SCHEDULE, x_T, num_steps=400))
    x = run(jax.random.key(1))
    mean, covariance = _law(1e-3)
    np.testing.assert_allclose(jnp.mean(x, axis=0), mean, atol=4 * (0.4 / chains) ** 0.5 + 0.01)
    np.testing.assert_allclose(jnp.cov(x.T), covariance, atol=4 * 0.4 * (2 / chains) ** 0.5 + 0.015)
    np.testing.assert_array_equal(run(jax.random.key(1)), x)
    assert np.max(np.abs(run(jax.random.key(2)) - x)) > 0.5


def test_the_sde_follows_its_path_whatever_the_number_of_steps():
    x_T = jax.random.normal(jax.random.key(0), (8, 2))
    run = lambda n: jax.jit(
        lambda: continuous.sde_sample(jax.random.key(1), _network("epsilon"), SCHEDULE, x_T, num_steps=n)
    )()
    fine = run(1600)
    errors = [float(jnp.sqrt(jnp.mean((run(n) - fine) ** 2))) for n in (100, 400)]
    assert errors[1] < 0.5 * errors[0] < 0.15


def test_the_ode_is_differentiable_in_the_schedule_and_the_start():
    def end(x_T, beta_max):
        schedule = schedules.ContinuousVP(0.1, beta_max)
        return jnp.sum(continuous.ode_sample(lambda x, t, cond: 0.5 * x, schedule, x_T, max_steps=256))

    slopes = jax.jit(jax.grad(end, argnums=(0, 1)))(jnp.ones((1, 2)), 10.0)
    assert all(np.all(np.isfinite(slope)) and np.any(slope != 0) for slope in slopes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, x: continuous.ode_sample(f, SCHEDULE, x, prediction_type="eps"), "prediction_type must be one of"),
        (lambda f, x: continuous.ode_sample(f, SCHEDULE, x, t_end=0.0), r"must be in \(0, 1\), got 0.0"),
        (lambda f, x: continuous.sde_sample(jax.random.key(0), f, SCHEDULE, x, num_steps=0), "num_steps must be at least 1"),
        (lambda f, x: continuous.log_likelihood(jax.random.key(0), f, SCHEDULE, x, trace="exakt"), "did you mean 'exact'"),
        (lambda f, x: continuous.log_likelihood(jax.random.key(0), f, SCHEDULE, x, trace="exact"), "at most 64 .* got 65"),
        (lambda f, x: continuous.log_likelihood(jax.random.key(0), f, SCHEDULE, x, probes=0), "probes must be at least 1"),
    ],
)
def test_bad_arguments_are_errors_that_name_them(call, message):
    with pytest.raises(ValueError, match=message):
        call(lambda x, t, cond: x, jnp.zeros((1, 65)))
