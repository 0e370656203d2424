"""Exponential moving average of parameters, with a warm-up.

    average_{k+1} = d_k average_k + (1 - d_k) params_{k+1},    d_k = min(d, (1 + k) / (10 + k)),    (1)

so that a long memory (d near 1) does not remember the initial parameters for its first 1 / (1 - d) steps.

Reference: B. Polyak and A. Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control Optim. 30(4), 1992.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def decay(step: Int[Array, ""] | int, limit: float) -> Float[Array, ""]:
    """d_k of equation (1) at k = `step`, counted from 0."""
    return jnp.minimum(limit, (1 + step) / (10 + step))


def update(average: Any, params: Any, step: Int[Array, ""] | int, limit: float) -> Any:
    """Equation (1) leaf by leaf; leaves that are not floating point are taken over as they are.

    Args:
      average: before.
      params: a pytree of the same structure.
      step: k, counted from 0; may be traced.
      limit: d in [0, 1).

    Raises:
      ValueError: if `limit` is outside [0, 1).
    """
    if not 0 <= limit < 1:
        raise ValueError(f"limit must be in [0, 1), got {limit}")
    d = decay(step, limit)

    def mix(old, new):
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return new
        return (d * old + (1 - d) * new).astype(old.dtype)

    return jax.tree.map(mix, average, params)
