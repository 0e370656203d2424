import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import guidance, predictions, schedules


def _network(x, t, cond):
    """Shifts every sample by its condition's two parts; any mix-up of samples, times or branches shows."""
    assert x.shape[0] == t.shape[0] == cond["label"].shape[0] == cond["text"].shape[0]
    return x * (1 + t)[:, None] + cond["label"][:, None] * 10 + jnp.sum(cond["text"], axis=1)[:, None]


@pytest.fixture
def inputs():
    x = jax.random.normal(jax.random.key(0), (3, 4))
    cond = {"label": jnp.array([1.0, 2.0, 3.0]), "text": jax.random.normal(jax.random.key(1), (3, 5))}
    null = {"label": jnp.array(-1.0), "text": jnp.zeros(5)}
    return x, jnp.array([0, 1, 2]), cond, null


def _nothing(null):
    return {"label": jnp.broadcast_to(null["label"], (3,)), "text": jnp.broadcast_to(null["text"], (3, 5))}


def test_scale_one_is_conditional_zero_is_not_and_the_rest_lies_on_their_line(inputs):
    x, t, cond, null = inputs
    given, without = _network(x, t, cond), _network(x, t, _nothing(null))
    for scale in (0.0, 1.0, 3.5):
        guided = guidance.guided(_network, null, scale)(x, t, cond)
        np.testing.assert_allclose(guided, without + scale * (given - without), rtol=1e-5, atol=1e-5)


def test_the_network_is_called_once_on_both_branches(inputs):
    x, t, cond, null = inputs
    sizes = []

    def counted(x, t, cond):
        sizes.append(x.shape[0])
        return _network(x, t, cond)

    guidance.guided(counted, null, 2.0)(x, t, cond)
    assert sizes == [6]


def test_scales_may_differ_from_sample_to_sample(inputs):
    x, t, cond, null = inputs
    scales = jnp.array([0.0, 1.0, 4.0])
    together = guidance.guided(_network, null, scales)(x, t, cond)
    for i in range(3):
        np.testing.assert_allclose(together[i], guidance.guided(_network, null, scales[i])(x, t, cond)[i], rtol=1e-6)


def test_outside_of_the_interval_the_model_is_conditional(inputs):
    x, t, cond, null = inputs
    guided = guidance.guided(_network, null, 3.0, interval=(1, 1))(x, t, cond)
    everywhere = guidance.guided(_network, null, 3.0)(x, t, cond)
    given = _network(x, t, cond)
    np.testing.assert_allclose(guided[jnp.array([0, 2])], given[jnp.array([0, 2])], rtol=1e-6)
    np.testing.assert_allclose(guided[1], everywhere[1], rtol=1e-6)


def test_rescaling_sets_the_deviation_back(inputs):
    x, t, cond, null = inputs
    steep = lambda x, t, cond: x * cond["label"][:, None]
    plain = guidance.guided(steep, null, 5.0)(x, t, cond)
    given = steep(x, t, cond)
    full = guidance.guided(steep, null, 5.0, rescale=1.0)(x, t, cond)
    np.testing.assert_allclose(jnp.std(full, axis=1), jnp.std(given, axis=1), rtol=1e-5)
    half = guidance.guided(steep, null, 5.0, rescale=0.5)(x, t, cond)
    np.testing.assert_allclose(half, (plain + full) / 2, rtol=1e-5)


def test_a_constant_prediction_can_be_rescaled_and_differentiated():
    flat = lambda x, t, cond: 0 * x + cond[:, None]
    run = lambda x: jnp.sum(guidance.guided(flat, jnp.array(0.0), 2.0, rescale=0.7)(x, jnp.zeros(2), jnp.ones(2)))
    value, slope = jax.value_and_grad(run)(jnp.ones((2, 3)))
    assert np.isfinite(value) and np.all(np.isfinite(slope))


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction", "score", "flow"])
def test_a_reward_adds_its_gradient_to_the_score(prediction_type):
    schedule = schedules.make_schedule("linear")
    x = jax.random.normal(jax.random.key(0), (3, 4))
    t = jnp.array([100, 500, 700])
    ab = schedule.alphas_cumprod[t]
    slope = jnp.array([1.0, -2.0, 0.5, 0.0])
    denoise = lambda x, t, cond: jnp.tanh(x)
    reward = lambda x, t: jnp.sum(x * slope, axis=1) * (1 + t / 1000)
    guided = guidance.reward_guided(denoise, schedule, reward, 1.7, prediction_type=prediction_type)
    score = predictions.to_score(denoise(x, t, None), x, ab, prediction_type)
    shifted = predictions.to_score(guided(x, t), x, ab, prediction_type)
    np.testing.assert_allclose(shifted - score, 1.7 * slope * (1 + t / 1000)[:, None], rtol=1e-3, atol=2e-3)


def test_bad_arguments_are_errors_that_name_them(inputs):
    x, t, _, null = inputs
    with pytest.raises(ValueError, match=r"rescale must be in \[0, 1\], got 2.0"):
        guidance.guided(_network, null, 2.0, rescale=2.0)
    with pytest.raises(ValueError, match="cond must be given"):
        guidance.guided(_network, null, 2.0)(x, t, None)
    with pytest.raises(ValueError, match="prediction_type must be one of"):
        guidance.reward_guided(_network, schedules.make_schedule("linear"), jnp.sum, 1.0, prediction_type="x")
