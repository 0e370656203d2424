import jax
import numpy as np
import pytest

from experiments import classifiers
from jaxml25.data import digits


@pytest.mark.parametrize("fit", [classifiers.logistic, classifiers.perceptron])
def test_classifiers_of_real_digits_recognise_held_out_ones(fit):
    images, labels = digits.arrays("train")
    x = digits.normalise(images).reshape(len(images), -1)
    test_images, test_labels = digits.arrays("test")
    scores = classifiers.log_probabilities(fit(x, labels), digits.normalise(test_images).reshape(len(test_images), -1))
    np.testing.assert_allclose(np.exp(scores).sum(axis=1), 1, rtol=1e-5)
    assert np.mean(scores.argmax(axis=1) == test_labels) > 0.93


def test_frechet_distance_of_gaussians_is_the_closed_form():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(200_000, 2)) * [1.0, 2.0]
    b = rng.normal(size=(200_000, 2)) * [3.0, 2.0] + [0.0, 1.0]
    assert classifiers.frechet_distance(a, b) == pytest.approx(1 + (3 - 1) ** 2, abs=0.05)
    assert classifiers.frechet_distance(a, a) == pytest.approx(0, abs=1e-6)


def test_features_are_the_last_hidden_layer():
    one = classifiers.Dense((np.eye(2, dtype=np.float32), np.ones((2, 3), np.float32)), (np.zeros(2), np.zeros(3)))
    np.testing.assert_allclose(classifiers.features(one, jax.numpy.array([[1.0, -1.0]])), [[1.0, 0.0]])
