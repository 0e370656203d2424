"""Makes a jitted training step of any loss function and any optax optimiser.

With microbatches B_1 .. B_m of equal size the gradient is the mean of theirs, which for a mean loss is that of the whole batch;
memory is that of one microbatch and one extra copy of the gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from jaxml25.training import ema
from jaxml25.training.train_state import TrainState, join, trained

LossFn = Callable[[Any, Key[Array, ""], Any], tuple[Array, dict[str, Array]]]
StepFn = Callable[[TrainState, Any], tuple[TrainState, dict[str, Array]]]


def make_step(
    loss_fn: LossFn, optimiser: optax.GradientTransformation, *, ema_decay: float | None = None, accumulate: int = 1
) -> StepFn:
    """Builds `step(state, batch) -> (state, metrics)`, jitted; the state that is passed in is donated.

    Args:
      loss_fn: `(params, key, batch) -> (loss, scalars to log)`.
      optimiser: any optax optimiser; those that look at the loss (`reduce_on_plateau`, `lbfgs`) are given it.
      ema_decay: d of `ema.update`; None leaves `state.ema` alone.
      accumulate: microbatches per step; divides the leading dimension of every array of the batch.

    Returns:
      The step. Its metrics are those of `loss_fn`, averaged over microbatches, with `loss`, `grad_norm` and `update_norm`.

    Raises:
      ValueError: if `accumulate` is below 1, or, by the step, if it does not divide the batch or there is no average to update.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, got {accumulate}")
    optimiser = optax.with_extra_args_support(optimiser)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        if ema_decay is not None and state.ema is None:
            raise ValueError(f"ema_decay must be None for a state without an average, got {ema_decay}")
        key = jax.random.fold_in(state.key, state.step)
        gradient, metrics = _gradient(loss_fn, state.params, key, batch, accumulate)
        leaves = trained(state.params)

        def value_fn(leaves):
            return loss_fn(join(leaves, state.params), key, batch)[0]

        loss = {"value": metrics["loss"], "grad": gradient, "value_fn": value_fn}
        updates, opt_state = optimiser.update(gradient, state.opt_state, leaves, **loss)
        params = join(optax.apply_updates(leaves, updates), state.params)
        average = state.ema if ema_decay is None else ema.update(state.ema, params, state.step, ema_decay)
        # A loss that is finite can still have a gradient or an update that is not, so the guard sees those too.
        metrics |= {"grad_norm": optax.tree.norm(gradient), "update_norm": optax.tree.norm(updates)}
        return TrainState(state.step + 1, params, opt_state, average, state.key), metrics

    return jax.jit(step, donate_argnums=0)


def _gradient(loss_fn: LossFn, params: Any, key: Key[Array, ""], batch: Any, accumulate: int):
    def evaluate(key, batch):
        def loss_of(leaves):
            return loss_fn(join(leaves, params), key, batch)

        (loss, aux), gradient = jax.value_and_grad(loss_of, has_aux=True)(trained(params))
        return gradient, {"loss": loss, **{name: value + 0.0 for name, value in aux.items()}}  # bools do not add up

    if accumulate == 1:
        return evaluate(key, batch)

    def add(total, inputs):
        return jax.tree.map(jnp.add, total, evaluate(*inputs)), None

    parts = jax.tree.map(lambda leaf: _split(leaf, accumulate), batch)
    inputs = (jax.random.split(key, accumulate), parts)
    shapes = jax.eval_shape(evaluate, *jax.tree.map(lambda leaf: leaf[0], inputs))
    total, _ = jax.lax.scan(add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), inputs)
    return jax.tree.map(lambda leaf: leaf / accumulate, total)


def _split(leaf: Array, parts: int) -> Array:
    if leaf.shape[0] % parts:
        raise ValueError(f"accumulate must divide the batch of {leaf.shape[0]}, got {parts}")
    # Row r goes to microbatch r mod m, so that each keeps an equal share of every device's rows.
    return jnp.swapaxes(leaf.reshape(leaf.shape[0] // parts, parts, *leaf.shape[1:]), 0, 1)
