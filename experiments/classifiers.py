"""Classifiers of digits, fitted by scikit-learn and evaluated in JAX.

One is the black-box reward that steers; the other, of another family and fitted on other images, is the judge that never saw the
reward. Both are plain pytrees, so that they run inside a jitted sampler.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier


class Dense(NamedTuple):
    """Layers of a multilayer perceptron with ReLU between them."""

    weights: tuple[Float[Array, "fan_in fan_out"], ...]
    biases: tuple[Float[Array, "fan_out"], ...]


def features(classifier: Dense, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch features"]:
    """Activations of the last hidden layer; the input itself where there is none."""
    for weight, bias in zip(classifier.weights[:-1], classifier.biases[:-1], strict=True):
        x = jax.nn.relu(x @ weight + bias)
    return x


def log_probabilities(classifier: Dense, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch classes"]:
    """Log-probability of every class."""
    return jax.nn.log_softmax(features(classifier, x) @ classifier.weights[-1] + classifier.biases[-1])


def logistic(x: Float[np.ndarray, "n dim"], labels: Int[np.ndarray, "n"]) -> Dense:
    """Multinomial logistic regression."""
    model = LogisticRegression(max_iter=1_000).fit(x, labels)
    return Dense((jnp.asarray(model.coef_.T, jnp.float32),), (jnp.asarray(model.intercept_, jnp.float32),))


def perceptron(x: Float[np.ndarray, "n dim"], labels: Int[np.ndarray, "n"], *, hidden: int = 64, seed: int = 0) -> Dense:
    """A network of one hidden layer."""
    model = MLPClassifier((hidden,), alpha=1e-2, learning_rate_init=3e-3, max_iter=400, random_state=seed).fit(x, labels)
    as_float32 = lambda arrays: tuple(jnp.asarray(a, jnp.float32) for a in arrays)
    return Dense(as_float32(model.coefs_), as_float32(model.intercepts_))


def frechet_distance(a: Float[np.ndarray, "n features"], b: Float[np.ndarray, "m features"]) -> float:
    """Distance of the Gaussians fitted to two sets of features: |mean difference|^2 + tr(A + B - 2 (A^1/2 B A^1/2)^1/2)."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    values, vectors = np.linalg.eigh(cov_a)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ cov_b @ root), 0)).sum()
    return float(np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(cov_a) + np.trace(cov_b) - 2 * cross)
