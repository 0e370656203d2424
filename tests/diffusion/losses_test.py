import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import losses, predictions, schedules
from tests.diffusion import gaussian

SCHEDULE = schedules.make_schedule("scaled_linear")


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
def test_the_exact_network_reaches_the_closed_form_and_nothing_costs_one(x64):
    with jax.enable_x64(x64):
        s2, batch = 0.25, 20_000
        schedule = schedules.make_schedule("scaled_linear")
        x0 = 0.3 + s2**0.5 * jax.random.normal(jax.random.key(0), (batch, 2), float)
        run = jax.jit(losses.loss, static_argnames=("denoise", "weighting"))
        value, aux = run(gaussian.network(schedule, 0.3, s2), schedule, jax.random.key(1), x0, None, "uniform")
        ab = schedule.alphas_cumprod
        per_level = ab * s2 / (ab * s2 + 1 - ab)  # variance of eps given x_t
        # Each sample's two squares are 2-dof chi-squares at their level.
        error = jnp.sqrt((2 * jnp.mean(per_level**2) - jnp.mean(per_level) ** 2) / batch)
        assert abs(value - jnp.mean(per_level)) < 4 * error
        assert value.dtype == x0.dtype and aux["mse"] == value and aux["weight"] == 1
        nothing, _ = run(_zero, schedule, jax.random.key(1), x0, None, "uniform")
        assert abs(nothing - 1) < 0.03


def _zero(x, t, cond):
    return jnp.zeros_like(x)


def test_weights_have_their_published_forms():
    ab = jnp.array([0.999, 0.9, 0.5, 0.01])
    snr = ab / (1 - ab)
    np.testing.assert_allclose(losses.weights(ab, "min_snr"), jnp.minimum(snr, 5) / snr, rtol=1e-4)
    np.testing.assert_allclose(losses.weights(ab, "min_snr", "sample"), jnp.minimum(snr, 5), rtol=1e-4)
    np.testing.assert_allclose(
        losses.weights(ab, "min_snr", "v_prediction", gamma=3.0), jnp.minimum(snr, 3) / (snr + 1), rtol=1e-4
    )
    sigma2 = 1 / snr
    np.testing.assert_allclose(losses.weights(ab, "edm", "sample"), (sigma2 + 0.25) / (sigma2 * 0.25), rtol=1e-4)
    np.testing.assert_array_equal(losses.weights(ab, "uniform", "flow"), jnp.ones(4))
    assert np.all(np.isfinite(losses.weights(jnp.array([0.0, 1.0]), "min_snr", "v_prediction")))


@pytest.mark.parametrize("weighting", ["min_snr", "edm"])
def test_a_weighting_means_the_same_for_every_prediction_type(weighting):
    # The same guess of x_0, told in any way, costs the same.
    x0 = jax.random.normal(jax.random.key(0), (64, 3))

    def network(prediction_type):
        def denoise(x, t, cond):
            ab = SCHEDULE.alphas_cumprod[t]
            return predictions.convert(jnp.tanh(x), x, ab, "sample", prediction_type)

        return denoise

    def cost(prediction_type):
        run = lambda key: losses.loss(
            network(prediction_type), SCHEDULE, key, x0, None, weighting, prediction_type=prediction_type
        )
        return jax.jit(run)(jax.random.key(1))[0]

    reference = cost("sample")
    for prediction_type in ("epsilon", "v_prediction", "score", "flow"):
        np.testing.assert_allclose(cost(prediction_type), reference, rtol=1e-4)


@pytest.mark.parametrize("prediction_type", predictions.PREDICTION_TYPES)
def test_the_target_is_what_the_conversions_call_by_that_name(prediction_type):
    x0 = jax.random.normal(jax.random.key(0), (16, 3))

    def oracle(x, t, cond):
        ab = SCHEDULE.alphas_cumprod[t]
        return predictions.convert(x0, x, ab, "sample", prediction_type)

    run = lambda key: losses.loss(oracle, SCHEDULE, key, x0, None, "edm", prediction_type=prediction_type)
    value, _ = jax.jit(run)(jax.random.key(1))
    assert value < 1e-6


def test_conditions_are_dropped_whole_at_their_rate_and_the_null_one_learns():
    seen = {}

    def denoise(x, t, cond):
        seen.update(cond)
        return x * 0 + cond["a"][:, None] + cond["b"]

    x0 = jnp.zeros((4000, 2))
    cond = {"a": jnp.ones(4000), "b": jnp.ones((4000, 2))}
    null = {"a": jnp.array(-1.0), "b": jnp.array([-2.0, -3.0])}
    run = lambda null, p: losses.loss(denoise, SCHEDULE, jax.random.key(2), x0, cond, null_cond=null, p_uncond=p)[0]
    run(null, 0.2)
    dropped = seen["a"] == -1
    assert abs(jnp.mean(dropped) - 0.2) < 4 * (0.16 / 4000) ** 0.5
    np.testing.assert_array_equal(seen["b"], jnp.where(dropped[:, None], null["b"], 1.0))
    run(null, 1.0)
    assert jnp.all(seen["a"] == -1)
    run(null, 0.0)
    np.testing.assert_array_equal(seen["b"], cond["b"])
    slope = jax.grad(run)(null, 0.5)
    assert slope["a"] < 0 and np.all(slope["b"] < 0)


@pytest.mark.parametrize("times", ["uniform", "logit_normal"])
def test_flow_matching_is_zero_for_the_velocity_and_reads_shifted_times(times):
    x0 = jax.random.normal(jax.random.key(0), (2000, 2))
    seen = []

    def oracle(x, s, cond):
        seen.append(s)
        return (x - x0) / s[:, None]  # (x_s - x_0) / s = eps - x_0

    value, aux = losses.flow_loss(oracle, jax.random.key(1), x0, times=times)
    assert value < 1e-6 and aux["mse"] == value
    losses.flow_loss(oracle, jax.random.key(1), x0, times=times, shift=3.0)
    np.testing.assert_allclose(seen[1], schedules.time_shift(seen[0], 3.0), rtol=1e-6)
    spread = {"uniform": 1 / 12**0.5, "logit_normal": 0.2083}[times]
    assert abs(jnp.mean(seen[0]) - 0.5) < 0.03 and abs(jnp.std(seen[0]) - spread) < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weighting": "minsnr"}, "did you mean 'min_snr'"),
        ({"prediction_type": "eps"}, "prediction_type must be one of"),
        ({"p_uncond": 1.5}, r"p_uncond must be in \[0, 1\], got 1.5"),
        ({"p_uncond": 0.1}, "null_cond must be given"),
        ({"schedule": schedules.make_schedule("linear", zero_snr=True)}, "zero terminal SNR"),
        ({"denoise": lambda x, t, cond: x[:, :1]}, r"denoise must return shape \(2, 3\), got \(2, 1\)"),
    ],
)
def test_bad_arguments_are_errors_that_name_them(arguments, message):
    defaults = {"denoise": _zero, "schedule": SCHEDULE, "key": jax.random.key(0), "x0": jnp.zeros((2, 3))}
    with pytest.raises(ValueError, match=message):
        losses.loss(**(defaults | arguments))
