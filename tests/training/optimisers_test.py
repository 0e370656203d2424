import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jaxml25.training import optimisers


def _update(config, gradient, num_steps=10, params=None):
    params = jnp.zeros(2) if params is None else params
    optimiser = optimisers.make_optimiser(config, num_steps)
    return optimiser.update(jnp.asarray(gradient), optimiser.init(params), params)[0]


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("constant", lambda t: 1.0),
        ("cosine", lambda t: 0.5 * (1 + np.cos(np.pi * t))),
        ("linear", lambda t: 1 - t),
    ],
)
@pytest.mark.parametrize("warmup", [0, 4])
def test_the_rate_rises_linearly_and_then_follows_its_closed_form_to_the_end(name, after, warmup):
    schedule = optimisers.make_schedule(name, 0.3, warmup, 20)
    expected = [0.3 * (k / warmup if k < warmup else after((k - warmup) / (20 - warmup))) for k in range(21)]
    np.testing.assert_allclose([schedule(k) for k in range(21)], expected, atol=1e-7)


def test_the_whole_gradient_is_clipped_and_only_when_it_is_too_long():
    config = ConfigDict({"name": "sgd", "learning_rate": 1.0, "clip_norm": 1.0})
    np.testing.assert_allclose(_update(config, [3.0, -4.0]), [-0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(_update(config, [0.3, -0.4]), [-0.3, 0.4], rtol=1e-6)
    np.testing.assert_allclose(_update({**config, "clip_norm": 0.0}, [3.0, -4.0]), [-3.0, 4.0], rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_decay_pulls_the_weights_themselves(name):
    params = jnp.array([2.0, -1.0])
    config = {"name": name, "learning_rate": 0.1, "weight_decay": 0.5}
    plain = _update({**config, "weight_decay": 0.0}, [1.0, 1.0], params=params)
    np.testing.assert_allclose(_update(config, [1.0, 1.0], params=params) - plain, -0.05 * params, rtol=1e-4)


def test_the_defaults_are_adamw_without_decay():
    gradient = jnp.array([0.5, -3.0])
    reference = optax.adam(1e-3)
    expected, _ = reference.update(gradient, reference.init(jnp.zeros(2)))
    np.testing.assert_allclose(_update({}, gradient), expected, rtol=1e-6)


@pytest.mark.parametrize("name", optimisers.OPTIMISERS)
def test_every_optimiser_goes_downhill(name):
    update = _update({"name": name, "learning_rate": 0.1, "clip_norm": 1.0}, [1.0, -1.0], params=jnp.ones(2))
    assert update[0] < 0 < update[1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "adamm"}, r"name must be one of adam, adamw, .*, got 'adamm' \(did you mean 'adam'\?\)"),
        ({"schedule": "cosin"}, r"schedule must be one of .*, got 'cosin' \(did you mean 'cosine'\?\)"),
        ({"learningrate": 1.0}, r"optimiser key must be one of .*, got 'learningrate' \(did you mean 'learning_rate'\?\)"),
        ({"learning_rate": -1.0}, r"learning_rate must be at least 0, got -1.0"),
        ({"clip_norm": float("nan")}, r"clip_norm must be at least 0, got nan"),
        ({"warmup_steps": 11}, r"warmup_steps must be at most the 10 steps of the run, got 11"),
        ({"name": "adam", "weight_decay": 0.1}, r"weight_decay must be 0 for adam, got 0.1"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it_and_the_nearest(config, message):
    with pytest.raises(ValueError, match=message):
        optimisers.make_optimiser(config, 10)
