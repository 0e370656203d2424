"""Rewards and value functions of intermediate states, for Feynman-Kac steering.

The best intermediate reward is the value function of the tilt,

    V_t(x_t) = log E[exp(lambda r(x_0)) | x_t],    G_t = exp(V_t(x_t) - V_{t+1}(x_{t+1})),    (1)

which `diff` uses if the intermediate rewards are V_t / lambda. What may stand in for it, from cheap to exact: the reward of
the predicted clean sample (the default of `fk_steering.run`), of several clean draws (`from_masked`), of a look-ahead of a
few deterministic steps (`look_ahead`), of a regression (`value_loss`, then `value_reward`), or V itself (`value_reward`).

Reference: R. Singhal et al., "A General Framework for Inference-time Scaling and Steering of Diffusion Models", ICML 2025
(arXiv 2501.06848).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxml25.diffusion import resampling, samplers, schedules, trajectories
from jaxml25.diffusion.particle_kernels import in_chunks
from jaxml25.diffusion.schedules import Scalar


class RewardInfo(NamedTuple):
    """What a reward is told besides the clean samples."""

    state: Any  # the kernel's state after the step (`.x` holds x_t for `from_sampler`); None for a reward on the host
    step: Int[Array, ""]  # counted from 0 in running order
    last: bool | Bool[Array, ""] | Bool[np.ndarray, ""]  # whether the samples are the final ones; known while tracing


Reward = Callable[[Any, RewardInfo], Any]


def evaluator(reward: Reward, num_particles: int, *, host: bool, microbatch: int | None) -> Callable[..., Array]:
    """Wraps a reward: its shape is checked, it may run on the host, on few particles at a time, and on several draws.

    Args:
      reward: the user's.
      num_particles: K, on this device.
      host: call it on NumPy arrays through `jax.pure_callback`; several draws then come as one batch of M K rows.
      microbatch: number of particles at a time.

    Returns:
      `evaluate(x0, info, num_draws=None) -> rewards`, (K,) or with `num_draws` (num_draws, K), in JAX's default float.
    """
    dtype = jnp.result_type(float)

    def check(shape, expected):
        if shape != expected:
            raise ValueError(f"reward must return shape {expected}, got {shape}")

    def on_host(num_rows, x0, info):
        def call(x0, step):
            x0, step = jax.tree.map(np.asarray, (x0, step))
            rewards = np.asarray(reward(x0, RewardInfo(None, step, info.last)), dtype)
            check(rewards.shape, (num_rows,))
            return rewards

        expected = jax.ShapeDtypeStruct((num_rows,), dtype)
        return jax.pure_callback(call, expected, x0, info.step, vmap_method="sequential")

    def on_device(num_rows, x0, info):
        rewards = jnp.asarray(reward(x0, info))
        check(rewards.shape, (num_rows,))
        return rewards.astype(dtype)

    compute = on_host if host else on_device

    def in_batches(x0, info, num_rows):
        if microbatch is None:
            return compute(num_rows, x0, info)
        chunked = lambda x0, state: compute(microbatch, x0, info._replace(state=state))
        return in_chunks(chunked, microbatch, "microbatch")(x0, info.state)

    def evaluate(x0, info, num_draws=None):
        info = info._replace(state=None) if host else info
        if num_draws is None:
            return in_batches(x0, info, num_particles)
        if not host:
            return jax.vmap(lambda x0: in_batches(x0, info, num_particles))(x0)
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), x0)
        return in_batches(rows, info, num_draws * num_particles).reshape(num_draws, num_particles)

    return evaluate


def combine(
    rewards: Float[Array, "draws particles"], lam: Float[Array, ""], scale_by_lam: bool
) -> Float[Array, "particles"]:
    """Combines the rewards of several clean samples per particle by log mean exp, of r or of lambda r (and then / lambda).

    A NaN counts as -inf, except where all rewards of a particle are NaN: that stays for the run to count.
    """
    all_nan = jnp.all(jnp.isnan(rewards), axis=0)
    rewards = jnp.where(jnp.isnan(rewards), -jnp.inf, rewards)
    if scale_by_lam:
        scale = jnp.where(lam == 0, 1, lam)
        scaled = resampling.log_mean_exp(scale * rewards, axis=0) / scale
        combined = jnp.where(lam == 0, jnp.mean(rewards, axis=0), scaled)
    else:
        combined = resampling.log_mean_exp(rewards, axis=0)
    return jnp.where(all_nan, jnp.nan, combined)


def value_reward(value: Callable[[Any, Int[Array, ""]], Float[Array, "particles"]], reward: Reward) -> Reward:
    """Scores intermediate states by a value function of their own, and final samples by the reward.

    Args:
      value: `(state, step) -> (K,)`, in the units of the reward: V_t / lambda of equation (1), where `state` is the kernel's
        after that step.
      reward: of the final samples.
    """

    def score(x0, info):
        return reward(x0, info) if info.last else value(info.state, info.step)

    return score


def look_ahead(
    reward: Reward,
    denoise: Callable[..., Array],
    grid: schedules.Grid,
    num_steps: int,
    cond: Any = None,
    *,
    step_fn: Callable | None = None,
) -> Reward:
    """Scores where `num_steps` deterministic steps from x_t lead, instead of the one-step prediction.

    Costs `num_steps` network calls per particle and scored step. The levels are spread over what is left of the grid.

    Args:
      reward: of clean samples.
      denoise: the model of `from_sampler`.
      grid: the VP grid of the kernel, walked by `previous="next"` or evenly spaced, so that every level it arrives at but
        the last is one that it has.
      num_steps: at least 1.
      cond: handed to `denoise`.
      step_fn: `samplers.ddim(0)` by default; give one that knows the network's prediction type.

    Raises:
      ValueError: if `num_steps` is below 1.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    step_fn = samplers.ddim(eta=0.0) if step_fn is None else step_fn
    num_levels = grid.t.shape[0]

    def predict(x, step):
        first = step + 1  # the row that starts at x_t
        rows = first + jnp.arange(num_steps + 1) * (num_levels - first) // num_steps
        levels = jnp.minimum(rows, num_levels - 1)
        arrives = jnp.where(rows[1:] < num_levels, grid.ab[levels[1:]], grid.ab_prev[-1])
        path = schedules.Grid(grid.t[levels[:-1]], grid.ab[levels[:-1]], arrives)
        return trajectories.sample(step_fn, denoise, path, x, None, cond)

    def score(x0, info):
        return reward(x0 if info.last else predict(info.state.x, info.step), info)

    return score


def value_loss(
    key: Key[Array, ""],
    value: Callable[[Float[Array, "batch *dims"], Int[Array, "batch"]], Float[Array, "batch"]],
    schedule: schedules.Schedule,
    x0: Float[Array, "batch *dims"],
    rewards: Float[Array, "batch"],
    *,
    lam: Scalar | None = None,
) -> Float[Array, ""]:
    """Loss whose minimiser is a value function: regresses the rewards of clean data on noised data.

    Without lambda the squared error (f - r)^2, minimised by E[r(x_0) | x_t]. With d = lambda (r - f) the loss
    exp(d) - d - 1 instead, minimised by f = (1 / lambda) log E[exp(lambda r(x_0)) | x_t], that is V_t / lambda of (1).

    Args:
      key: consumed by the levels and the noise.
      value: `(x_t, t) -> f`, any closure over parameters.
      schedule: of the forward process.
      x0: clean data, or samples of the model.
      rewards: of `x0`.
      lam: lambda of the tilt, not 0; None for the mean.
    """
    level_key, noise_key = jax.random.split(key)
    t = jax.random.randint(level_key, rewards.shape, 0, schedule.T)
    x_t = schedules.q_sample(schedule, x0, t, jax.random.normal(noise_key, x0.shape, x0.dtype))
    error = rewards - value(x_t, t)
    if lam is None:
        return jnp.mean(error**2)
    return jnp.mean(jnp.expm1(lam * error) - lam * error)
