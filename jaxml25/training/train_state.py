"""Everything a training step changes, as one pytree."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key


class TrainState(NamedTuple):
    """What the next step needs; all of it is checkpointed."""

    step: Int[Array, ""]  # steps taken
    params: Any
    opt_state: Any
    ema: Any  # average of the parameters, or None
    key: Key[Array, ""]  # never changes: step k draws from fold_in(key, k)


def init(key: Key[Array, ""], params: Any, optimiser: optax.GradientTransformation, *, ema: bool = False) -> TrainState:
    """Starts at step 0.

    Args:
      key: source of every step's randomness.
      params: any pytree of arrays.
      optimiser: any optax optimiser.
      ema: whether to average the parameters, from a copy of these on.
    """
    average = jax.tree.map(jnp.copy, params) if ema else None
    opt_state = jax.tree.map(jnp.copy, optimiser.init(params))  # some keep one array twice, which cannot be donated
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, average, key)
