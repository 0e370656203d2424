import jax.numpy as jnp
import numpy as np
import pytest

from experiments import ngram


def test_bigram_likelihood_is_the_hand_computed_one():
    model = ngram.fit(jnp.array([0, 1, 0, 1, 0, 2]), order=2, vocabulary=3, strength=2.0)
    unigram = (np.array([3, 2, 1]) + 2 / 3) / 8
    after_zero = (np.array([0, 2, 1]) + 2 * unigram) / 5
    expected = np.log([after_zero[1], (2 + 2 * unigram[0]) / 4]).sum()
    start = np.log((1 + 2 * unigram[0]) / 3)  # one text was seen to start, with a 0
    measured = ngram.log_likelihood(model, jnp.array([[0, 1, 0]]))
    np.testing.assert_allclose(measured, [(start + expected) / 3], rtol=1e-5)


def test_probabilities_of_the_next_character_sum_to_one():
    rng = np.random.default_rng(0)
    model = ngram.fit(jnp.asarray(rng.integers(0, 7, 500)), order=4, vocabulary=7)
    prefix = jnp.asarray(rng.integers(0, 7, 10))
    continued = jnp.concatenate([jnp.tile(prefix, (7, 1)), jnp.arange(7)[:, None]], axis=1)
    last = 11 * ngram.log_likelihood(model, continued) - 10 * ngram.log_likelihood(model, prefix)
    np.testing.assert_allclose(jnp.exp(last).sum(), 1, rtol=1e-4)


def test_order_below_one_is_an_error():
    with pytest.raises(ValueError, match="order must be at least 1, got 0"):
        ngram.fit(jnp.array([0]), order=0, vocabulary=2)
