"""Potentials that steer interacting particles towards a reward.

A potential turns the rewards r_t of intermediate states into factors G_t whose product along a path is the tilt,

    prod_t G_t = exp(lambda r(x_0))    up to a constant,                        (1)

so that the weighted particles target p(x_0) exp(lambda r(x_0)) whatever the intermediate rewards are. With m_t the running
maximum and s_t the running sum of rewards, both started at r_min, the factors before the last one are

    diff: exp(lambda (r_t - r_{t+1}))    max: exp(lambda m_t)    add: exp(lambda s_t)    rt: exp(lambda r_t)    is: 1

and the last one is what is missing from (1). For `diff` the constant of (1) is exp(-lambda r_min); for the others it is 1.

A potential is a pair of functions, like an optax transformation:

    init(num_particles, r_min) -> state
    update(state, rewards, lam, last) -> (log_g, state)

with any pytree of arrays with a leading particle axis as state. A reward of -inf gives weight zero; the running state then
keeps its last finite value, so that a particle which lives on because all of them had weight zero starts from there.

Reference: R. Singhal, Z. Horvitz, R. Teehan, M. Ren, Z. Yu, K. McKeown and R. Ranganath, "A General Framework for
Inference-time Scaling and Steering of Diffusion Models", ICML 2025 (arXiv 2501.06848).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxml25.diffusion import checks
from jaxml25.diffusion.schedules import Scalar

Rewards = Float[ArrayLike, "particles"]
Last = Bool[Array, ""] | bool


class Potential(NamedTuple):
    """A pair of functions; see the module's docstring."""

    init: Callable[..., Any]
    update: Callable[..., tuple[Rewards, Any]]


class Running(NamedTuple):
    """The state of every potential here."""

    statistic: Rewards  # r_{t+1}, m or s
    log_product: Rewards  # sum of the log G given out so far
    r_min: Rewards


def _init(num_particles: int, r_min: Scalar = 0.0) -> Running:
    """Starts all particles at the reward `r_min`."""
    start = jnp.full((num_particles,), r_min, jnp.result_type(float))
    return Running(start, jnp.zeros_like(start), start)


def _update_diff(state: Running, rewards: Rewards, lam: Scalar, last: Last) -> tuple[Rewards, Running]:
    """log G = lambda (r_t - r_{t+1}); the last one also makes up for a lambda that changed on the way."""
    log_g = tilt(lam, rewards - state.statistic)
    owed = tilt(lam, state.statistic - state.r_min) - state.log_product
    log_g = log_g + jnp.where(last, owed, 0)
    return log_g, _advance(state, rewards, log_g)


def _update_max(state: Running, rewards: Rewards, lam: Scalar, last: Last) -> tuple[Rewards, Running]:
    """log G = lambda m_t, the best reward of the path so far."""
    return _update_statistic(state, jnp.maximum(state.statistic, rewards), rewards, lam, last)


def _update_add(state: Running, rewards: Rewards, lam: Scalar, last: Last) -> tuple[Rewards, Running]:
    """log G = lambda s_t, the sum of the path's rewards so far."""
    return _update_statistic(state, state.statistic + rewards, rewards, lam, last)


def _update_current(state: Running, rewards: Rewards, lam: Scalar, last: Last) -> tuple[Rewards, Running]:
    """log G = lambda r_t."""
    return _update_statistic(state, rewards, rewards, lam, last)


def _update_importance(state: Running, rewards: Rewards, lam: Scalar, last: Last) -> tuple[Rewards, Running]:
    """log G = 0 until the end: plain importance sampling."""
    return jnp.where(last, tilt(lam, rewards), 0), state


def _update_statistic(state, statistic, rewards, lam, last):
    log_g = jnp.where(last, tilt(lam, rewards) - state.log_product, tilt(lam, statistic))
    return log_g, _advance(state, statistic, log_g)


def _advance(state: Running, statistic: Rewards, log_g: Rewards) -> Running:
    return Running(
        jnp.where(jnp.isfinite(statistic), statistic, state.statistic),
        state.log_product + jnp.where(jnp.isfinite(log_g), log_g, 0),
        state.r_min,
    )


def tilt(lam: Scalar, rewards: Float[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
    """Computes lambda r, which is 0 at lambda = 0 even for r = -inf."""
    return jnp.where(jnp.asarray(lam) == 0, 0, lam * rewards)


diff = Potential(_init, _update_diff)
max_ = Potential(_init, _update_max)
add = Potential(_init, _update_add)
current = Potential(_init, _update_current)
importance = Potential(_init, _update_importance)

# Best-of-n weighs nothing: importance sampling whose lambda `fk_steering.run` takes to be 0.
POTENTIALS: dict[str, Potential] = {
    "diff": diff,
    "max": max_,
    "add": add,
    "rt": current,
    "is": importance,
    "bon": importance,
}


def get(potential: str | Potential) -> Potential:
    """Looks a potential up by name, or returns the user's own.

    Raises:
      ValueError: if there is none of that name; the message lists them.
    """
    if isinstance(potential, Potential):
        return potential
    checks.one_of("potential", potential, tuple(POTENTIALS))
    return POTENTIALS[potential]
