"""Whole trajectories: any one-step sampler under one `lax.scan`.

    for i in 0 .. n-1:  pred = denoise(x, t_i, cond);  x, x0_hat = step(x, pred, row_i, noise_i)

The noise is an argument, so a trajectory is a differentiable function of its start and of all its noise. Reverse mode
through n steps stores n states and whatever the network stores at each; `remat` trades the latter, and then the former, for
recomputation (T. Chen et al., "Training deep nets with sublinear memory cost", 1604.06174):

    none: n (state + activations)    step: n state + activations    sqrt: 2 sqrt(n) state + activations.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jaxml25.diffusion import checks

Denoise = Callable[..., Array]  # (x, t of shape (batch,), cond) -> prediction
REMATS = ("none", "step", "sqrt")
COLLECTABLE = ("x_t", "x0_hat")


def predict(step_fn: Callable, denoise: Denoise, x: ArrayLike, row: Any, cond: Any = None) -> Array:
    """Calls the network at a grid's row the way `step_fn` wants it: input scaled, t repeated over the batch."""
    scale_input = getattr(step_fn, "scale_input", None)
    x = x if scale_input is None else scale_input(x, row)
    return denoise(x, jnp.broadcast_to(row.t, x.shape[:1]), cond)


def sample(
    step_fn: Callable,
    denoise: Denoise,
    grid: Any,
    x_T: Float[ArrayLike, "batch *dims"],
    noise: Float[ArrayLike, "..."] | None,
    cond: Any = None,
    *,
    remat: str = "none",
    collect: Sequence[str] = (),
) -> Array | tuple[Array, dict[str, Array]]:
    """Runs a sampler from x_T over every row of a grid.

    Memory is O(1) in the number of steps, but for what is collected and what `jax.grad` needs (see `remat`).

    Args:
      step_fn: from a factory of `samplers` or `dpm_solver`, or any function `(x, pred, row, noise) -> (x_next, x0_hat)`.
      denoise: `(x, t, cond) -> pred`, any closure; t has shape (batch,). Traced once, twice for Heun.
      grid: a `Grid` or `SigmaGrid` of n rows, noisiest first; its values may be traced.
      x_T: start: a standard normal on a VP grid and on a flow, sigma[0] times one in sigma space.
      noise: standard normals, shape (n, *x_T.shape); noise[i] belongs to the i-th step taken. None for a step that is
        known to use none (not `ddim` with a traced eta).
      cond: handed to every call of `denoise`.
      remat: `none`; `step`, each step is recomputed in the backward pass; `sqrt`, chunks of about sqrt(n) steps too, at the
        price of one more forward pass. The values are the same.
      collect: names out of `x_t` (the state at which the network is called, so aligned with grid.t) and `x0_hat`.

    Returns:
      x_0, or (x_0, {name: array of shape (n, *x_T.shape)}) if `collect` is not empty.

    Raises:
      ValueError: for a noise of another shape, an unknown name, or a grid that the step cannot walk.
    """
    checks.one_of("remat", remat, REMATS)
    for name in collect:
        checks.one_of("collect", name, COLLECTABLE)
    n = grid.t.shape[0]
    x_T = jnp.asarray(x_T)
    noise = None if noise is None else jnp.asarray(noise)
    _check(step_fn, grid, x_T, noise, n)
    body = _body(step_fn, denoise, cond, tuple(collect))
    init = getattr(step_fn, "init", None)
    carry = (x_T, None if init is None else init(x_T, n))
    (x_0, _), collected = _scan(body, carry, (grid, _following(step_fn, grid, n), noise), n, remat)
    return (x_0, collected) if collect else x_0


def _check(step_fn: Callable, grid: Any, x_T: Array, noise: Array | None, n: int) -> None:
    if noise is None:
        if getattr(step_fn, "stochastic", True):
            raise ValueError(
                f"noise must be given unless the step is known to use none: expected {(n, *x_T.shape)}, got None"
            )
    elif noise.shape[:1] != (n,):
        raise ValueError(f"noise must have one row per step: expected a leading axis of {n}, got shape {noise.shape}")
    elif noise.shape[1:] != x_T.shape:
        raise ValueError(f"noise must have shape {(n, *x_T.shape)}, like x_T at each step, got {noise.shape}")
    check = getattr(step_fn, "check", None)
    if check is not None:
        check(grid)


def _following(step_fn: Callable, grid: Any, n: int) -> tuple[Array, Array] | None:
    """For a step with a corrector: the next row's t, and whether there is a next row."""
    if not hasattr(step_fn, "correct"):
        return None
    return jnp.append(grid.t[1:], grid.t[-1:]), jnp.arange(n) < n - 1


def _body(step_fn: Callable, denoise: Denoise, cond: Any, collect: tuple[str, ...]) -> Callable:
    """One step of any kind as a scan body: carry (x, state of a multistep solver)."""
    perturb = getattr(step_fn, "perturb", None)

    def body(carry, inputs):
        x_t, state = carry
        row, following, noise = inputs
        noise = jnp.zeros((), x_t.dtype) if noise is None else noise
        x, row = (x_t, row) if perturb is None else perturb(x_t, row, noise)
        pred = predict(step_fn, denoise, x, row, cond)
        if state is None:
            x_next, x0_hat = step_fn(x, pred, row, noise)
        else:
            x_next, state, x0_hat = step_fn(x, pred, row, noise, state)
        if following is not None:
            x_next = _corrected(step_fn, denoise, x, x0_hat, row, x_next, following, cond)
        stored = {"x_t": x_t, "x0_hat": x0_hat}
        return (x_next, state), {name: stored[name] for name in collect}

    return body


def _corrected(step_fn, denoise, x, x0_hat, row, x_euler, following, cond):
    """A second network call where the Euler step arrives; the last row, which has no t there, keeps the Euler step."""
    t_next, exists = following
    # The last row may arrive at sigma 0: its discarded correction must stay finite, or its gradient is NaN.
    row = row._replace(sigma_next=jnp.where(exists, row.sigma_next, row.sigma))
    arrival = row._replace(t=t_next, sigma=row.sigma_next)
    pred = predict(step_fn, denoise, x_euler, arrival, cond)
    return jnp.where(exists, step_fn.correct(x, x0_hat, row, x_euler, pred, t_next), x_euler)


def _scan(body: Callable, carry: Any, inputs: Any, n: int, remat: str) -> tuple[Any, Any]:
    if remat == "none":
        return jax.lax.scan(body, carry, inputs)
    step = jax.checkpoint(body)
    if remat == "step":
        return jax.lax.scan(step, carry, inputs)

    run = jax.checkpoint(lambda carry, chunk: jax.lax.scan(step, carry, chunk))
    length = math.ceil(n / math.ceil(math.sqrt(n)))
    whole = n - n % length
    chunks = jax.tree.map(lambda a: a[:whole].reshape(whole // length, length, *a.shape[1:]), inputs)
    carry, outputs = jax.lax.scan(run, carry, chunks)
    outputs = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), outputs)
    if whole < n:
        carry, rest = run(carry, jax.tree.map(lambda a: a[whole:], inputs))
        outputs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outputs, rest)
    return carry, outputs


def memory_estimate(
    shape: Sequence[int], n: int, *, activation_bytes: int, itemsize: int = 4, remat: str = "none", stochastic: bool = True
) -> int:
    """Bytes that reverse mode through `sample` holds at its peak, beside the parameters and their gradient.

    Args:
      shape: of the state, batch included.
      n: number of steps.
      activation_bytes: what the backward pass of one network call stores at this batch.
      itemsize: bytes per number of the state.
      remat: as in `sample`.
      stochastic: whether a noise array of n states is held too (and, if it is differentiated, as much again).

    Raises:
      ValueError: for an unknown remat or n below 1.
    """
    checks.one_of("remat", remat, REMATS)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    state = math.prod(shape) * itemsize
    chunks = math.ceil(math.sqrt(n))
    stored = {
        "none": n * (state + activation_bytes),
        "step": n * state + activation_bytes,
        "sqrt": (chunks + math.ceil(n / chunks)) * state + activation_bytes,
    }[remat]
    return stored + (n * state if stochastic else 0)
