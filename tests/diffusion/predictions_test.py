import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import predictions, schedules
from tests.diffusion import gaussian


@pytest.fixture(params=[False, True], ids=["float32", "float64"])
def state(request):
    with jax.enable_x64(request.param):
        x0, eps = jax.random.normal(jax.random.key(0), (2, 3, 4, 5), float)
        ab = jnp.array([0.95, 0.5, 0.05])
        shaped = ab[:, None, None]
        yield jnp.sqrt(shaped) * x0 + jnp.sqrt(1 - shaped) * eps, x0, eps, ab


def _truths(x0, eps, ab):
    ab = ab[:, None, None]
    v = jnp.sqrt(ab) * eps - jnp.sqrt(1 - ab) * x0
    score = -eps / jnp.sqrt(1 - ab)
    return {"epsilon": eps, "sample": x0, "v_prediction": v, "score": score, "flow": eps - x0, "edm": x0}


@pytest.mark.parametrize("source", predictions.PREDICTION_TYPES)
def test_every_prediction_gives_every_other(state, source):
    x, x0, eps, ab = state
    truths = _truths(x0, eps, ab)
    tolerance = 1e-13 if x.dtype == jnp.float64 else 1e-5
    readers = {
        "sample": predictions.to_x0,
        "epsilon": predictions.to_eps,
        "v_prediction": predictions.to_v,
        "score": predictions.to_score,
        "flow": predictions.to_flow,
    }
    for target, read in readers.items():
        np.testing.assert_allclose(read(truths[source], x, ab, source), truths[target], rtol=tolerance, atol=tolerance)


def test_there_and_back_is_the_identity(state):
    x, x0, eps, ab = state
    tolerance = 1e-14 if x.dtype == jnp.float64 else 1e-6
    for source, pred in _truths(x0, eps, ab).items():
        for target in predictions.PREDICTION_TYPES:
            back = predictions.convert(predictions.convert(pred, x, ab, source, target), x, ab, target, source)
            # Through x_0 and back at ab = 0.05, relative to the largest number involved.
            scale = np.max(np.abs(pred)) / np.sqrt(0.05)
            np.testing.assert_allclose(back, pred, rtol=0, atol=tolerance * scale)


def test_velocity_matches_the_golden_one():
    golden = gaussian.golden("schedules")
    ab = schedules.make_schedule("scaled_linear").alphas_cumprod[golden["fwd_t"]]
    v = predictions.to_v(golden["fwd_noise"], golden["fwd_xt"], ab, "epsilon")
    # x_0 is read back from x_t at ab = 0.02, where float32 keeps one digit less.
    np.testing.assert_allclose(v, golden["fwd_v"], rtol=0, atol=1e-5)


def test_velocity_and_sample_need_no_signal_but_epsilon_does():
    x, pred = jax.random.normal(jax.random.key(0), (2, 3))
    np.testing.assert_allclose(predictions.to_x0(pred, x, 0.0, "v_prediction"), -pred, rtol=1e-6)
    np.testing.assert_allclose(predictions.to_x0(pred, x, 0.0, "flow"), x - pred, rtol=1e-6)
    np.testing.assert_array_equal(predictions.to_x0(pred, x, 0.0, "sample"), pred)
    for kind in ("epsilon", "score"):
        with pytest.raises(ValueError, match=f"'{kind}' cannot be used where alphas_cumprod is 0"):
            predictions.to_x0(pred, x, 0.0, kind)
        with pytest.raises(ValueError, match="zero terminal SNR"):
            predictions.to_v(pred, x, jnp.zeros(3), kind)


def test_an_unknown_type_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"prediction_type must be one of .* got 'eps'"):
        predictions.to_x0(jnp.ones(1), jnp.ones(1), 0.5, "eps")
    with pytest.raises(ValueError, match="did you mean 'v_prediction'"):
        predictions.to_eps(jnp.ones(1), jnp.ones(1), 0.5, "v-prediction")


def test_dynamic_thresholding_is_each_samples_own():
    small, large = jnp.linspace(-0.5, 0.5, 1001), jnp.linspace(-2.0, 2.0, 1001)
    out = predictions.dynamic_threshold(jnp.stack([small, large]), quantile=0.9, max_value=5.0)
    np.testing.assert_allclose(out[0], small)
    np.testing.assert_allclose(out[1], jnp.clip(large / 1.8, -1, 1), rtol=1e-5, atol=1e-6)
    capped = predictions.dynamic_threshold(large[None], quantile=0.9, max_value=1.0)
    np.testing.assert_allclose(capped[0], jnp.clip(large, -1, 1))
