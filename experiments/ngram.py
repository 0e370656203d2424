"""An interpolated character n-gram model, the judge of text quality in the miniatures.

Each order is smoothed towards the one below it with a Dirichlet prior of strength a, down to the uniform law over V characters:

    p_n(c | h) = (N(h, c) + a p_{n-1}(c | h')) / (N(h) + a),    p_0 = 1 / V,    (1)

where h' drops the oldest character of h. Counts live in hashed tables of fixed size, so that the likelihood is a few gathers.

Reference: D. MacKay and L. Peto, "A hierarchical Dirichlet language model", Natural Language Engineering 1(3), 1995.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

_BUCKETS = 1 << 20


class NGram(NamedTuple):
    """Counts of order 1, 2, ...: of a context with its next character, and of the context alone."""

    joint: tuple[Float[Array, "buckets"], ...]
    context: tuple[Float[Array, "buckets"], ...]
    vocabulary: int
    strength: float


def fit(tokens: Int[Array, "length"], *, order: int, vocabulary: int, strength: float = 3.0) -> NGram:
    """Counts the n-grams of one long text.

    Args:
      tokens: the text, in 0 .. vocabulary - 1.
      order: the longest n-gram, at least 1; 5 looks back four characters.
      vocabulary: V.
      strength: a of equation (1), in characters.
    """
    if order < 1:
        raise ValueError(f"order must be at least 1, got {order}")
    return NGram(*_count(tokens, order), vocabulary, strength)


def log_likelihood(model: NGram, tokens: Int[Array, "*batch length"]) -> Float[Array, "*batch"]:
    """Mean log-likelihood of each sequence, in nats per character."""
    probability = jnp.full(tokens.shape, 1 / model.vocabulary)
    for n, (joint, context) in enumerate(zip(model.joint, model.context, strict=True), start=1):
        seen, total = joint[_joint_keys(tokens, n)], context[_context_keys(tokens, n)]
        probability = (seen + model.strength * probability) / (total + model.strength)
    return jnp.mean(jnp.log(probability), axis=-1)


@functools.partial(jax.jit, static_argnames="order")
def _count(tokens, order):
    tables = lambda keys: tuple(jnp.zeros(_BUCKETS).at[keys(tokens, n)].add(1.0) for n in range(1, order + 1))
    return tables(_joint_keys), tables(_context_keys)


def _joint_keys(tokens, order):
    return _hash(tokens, order, shift=0)


def _context_keys(tokens, order):
    return _hash(tokens, order - 1, shift=1)


def _hash(tokens: Int[Array, "*batch length"], width: int, shift: int) -> UInt[Array, "*batch length"]:
    """A bucket for the `width` tokens that end `shift` before each position; what lies before the text is a token of its own."""
    length = tokens.shape[-1]
    padding = [(0, 0)] * (tokens.ndim - 1) + [(width + shift, 0)]
    padded = jnp.pad(tokens.astype(jnp.uint32) + 1, padding)
    key = jnp.full(tokens.shape, 2166136261, jnp.uint32)
    for j in range(width):
        key = (key ^ padded[..., j + 1 : j + 1 + length]) * jnp.uint32(16777619)
    key = (key ^ (key >> 15)) * jnp.uint32(2246822519)
    return (key ^ (key >> 13)) % _BUCKETS
