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

    variances, axes = np.linalg.eigh(np.asarray(COVARIANCE, np.float64))

    def denoise(x, t, cond=None):
        ab = SCHEDULE.alpha_bar(t[0])
        mean = jnp.sqrt(ab) * MEAN
        score = -((x - mean) @ axes / (ab * variances + 1 - ab)) @ axes.T
        return predictions.convert(score, x, ab, "score", prediction_type)

    return denoise


@pytest.mark.parametrize(
    ("prediction_type", "x64"), [("v_prediction", False), ("epsilon", True)], ids=["v-float32", "epsilon-float64"]
)
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


def _likelihood(trace, probes=1):
    return jax.jit(
        lambda key, x: continuous.log_likelihood(key, _network("epsilon"), SCHEDULE, x, trace=trace, probes=probes)
    )


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
def test_exact_traces_give_the_closed_form_likelihood(x64):
    with jax.enable_x64(x64):
        x0 = MEAN + 0.5 * jax.random.normal(jax.random.key(0), (5, 2), float)
        value = _likelihood("exact")(jax.random.key(1), x0)
        assert value.dtype == x0.dtype
        np.testing.assert_allclose(value, jax.scipy.stats.multivariate_normal.logpdf(x0, *_law(1e-3)), atol=1e-3)


def test_hutchinson_estimates_the_same_without_bias():
    x0 = MEAN + jnp.array([[0.2, 0.2], [-0.3, 0.4]])
    exact = jax.scipy.stats.multivariate_normal.logpdf(x0, *_law(1e-3))
    many = _likelihood("hutchinson", 1000)(jax.random.key(3), x0)
    # One probe is z^T J z = tr J + 2 J_12 z_1 z_2, off by the same amount up or down; a thousand are off by 3 % of it.
    one = jnp.abs(_likelihood("hutchinson")(jax.random.key(3), x0) - exact)
    assert np.all(one > 0.1)
    assert np.all(np.abs(many - exact) < 4 * one / 1000**0.5 + 1e-3)


def test_the_sde_draws_from_the_law_of_the_data_along_one_path():
    chains = 500
    x_T = jax.random.normal(jax.random.key(0), (chains, 2))

    def run(num_steps):
        sample = lambda key: continuous.sde_sample(key, _network("epsilon"), SCHEDULE, x_T, num_steps=num_steps)
        return jax.jit(sample)

    finer = run(128)
    x = finer(jax.random.key(1))
    mean, covariance = _law(1e-3)
    np.testing.assert_allclose(jnp.mean(x, axis=0), mean, atol=4 * (0.4 / chains) ** 0.5 + 0.02)
    np.testing.assert_allclose(jnp.cov(x.T), covariance, atol=4 * 0.4 * (2 / chains) ** 0.5 + 0.02)
    apart = lambda a, b: float(jnp.sqrt(jnp.mean((a - b) ** 2)))
    # Another key is another path; another number of steps is the same path, more coarsely.
    assert apart(finer(jax.random.key(2)), x) > 0.5
    assert apart(run(64)(jax.random.key(1)), x) < 0.2


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
