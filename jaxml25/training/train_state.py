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
    """Starts at step 0, from copies: steps donate the state, and what is passed in here outlives them.

    Args:
      key: source of every step's randomness.
      params: any pytree of arrays and numbers; leaves that are not floating point are carried along, not trained.
      optimiser: any optax optimiser.
      ema: whether to average the parameters, from a copy of these on.
    """
    params = jax.tree.map(_array, params)
    average = jax.tree.map(jnp.copy, params) if ema else None
    # Copied, since some optimisers keep one array twice, which cannot be donated.
    opt_state = jax.tree.map(jnp.copy, optimiser.init(trained(params)))
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, average, jnp.copy(key))


def trained(params: Any) -> Any:
    """The leaves that have gradients; None, which is no leaf, where the others were."""
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None, params)


def join(leaves: Any, params: Any) -> Any:
    """Puts what `trained` selected, or an update of it, back among the other leaves of `params`."""
    return jax.tree.map(lambda new, old: old if new is None else new, leaves, params, is_leaf=lambda leaf: leaf is None)


def _array(leaf: Any) -> Array:
    leaf = jnp.array(leaf)
    # A weakly typed leaf becomes strong in the first step, which would be compiled a second time for it.
    return leaf.astype(leaf.dtype) if leaf.aval.weak_type else leaf
