"""The decisions of the authors' own particle class, for comparison with their results.

`fk_steering.Config(variant="reference_image" | "reference_text")` makes `fk_steering.run` decide as the published code does.
It differs from the exact method (`variant="smc"`) in what follows; prefer `smc` for anything but a comparison.

- Weights live in linear space, NaN counts as 0 and they are clamped to [0, 1e10]: beyond it they all become equal.
- A step that does not resample drops its weights, while the running reward moves on: `diff` with an ESS rule is biased.
- `max` and `add` end with exp(lambda m) or exp(lambda s) over the product of the earlier weights, not with the tilt by the
  true final reward. That product is only multiplied where a draw happens.
- The image code applies the rule ESS < K / 2 to the last step even if it resamples at every other one. The text code draws
  at the last step unless it is adaptive, and takes equal weights if all are zero (the image code fails there; here it does
  as the text code).
- Ancestors are drawn multinomially, unsorted. No normaliser is defined.

Reference: R. Singhal et al., "A General Framework for Inference-time Scaling and Steering of Diffusion Models", ICML 2025
(arXiv 2501.06848), with the code published beside it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxml25.diffusion import resampling
from jaxml25.diffusion.schedules import Scalar

LARGEST_WEIGHT = 1e10
VARIANTS = ("reference_image", "reference_text")


class State(NamedTuple):
    """What the published class keeps of every particle."""

    running: Float[Array, "particles"]  # last, largest or summed reward
    product: Float[Array, "particles"]  # of the weights of the steps that drew


class Replay(NamedTuple):
    """What happened at every step of a replayed run, after that step; weights are NaN where no draw happened."""

    ancestry: Int[Array, "steps particles"]  # the initial particle every slot descends from
    running: Float[Array, "steps particles"]
    product: Float[Array, "steps particles"]
    weights: Float[Array, "steps particles"]
    resampled: Bool[Array, "steps"]


def init(num_particles: int, r_min: Scalar = 0.0) -> State:
    """Starts with the reward `r_min` and an empty product."""
    running = jnp.full((num_particles,), r_min, jnp.result_type(float))
    return State(running, jnp.ones_like(running))


def weigh(
    state: State, rewards: Float[Array, "particles"], *, potential: str, lam: Scalar, last: bool
) -> tuple[Float[Array, "particles"], State]:
    """Returns the clamped weights, and the state as it will be if the step draws (see `settle`)."""
    if potential == "max":
        running = jnp.maximum(state.running, rewards)
    elif potential == "add":
        running = state.running + rewards
    else:
        running = rewards

    if potential == "diff":
        weights = jnp.exp(lam * (rewards - state.running))
    elif last:
        weights = jnp.exp(lam * running) / state.product
    else:
        weights = jnp.exp(lam * running)
    weights = jnp.clip(jnp.where(jnp.isnan(weights), 0, weights), 0, LARGEST_WEIGHT)
    return weights, State(running, state.product * weights)


def should_resample(
    ess: Float[Array, ""], num_particles: int, *, variant: str, ess_threshold: float | None, last: bool
) -> Bool[Array, ""]:
    """Decides by the published rules, with `ess_threshold` in place of their 1/2."""
    is_adaptive = ess_threshold is not None or (last and variant == "reference_image")
    if not is_adaptive:
        return jnp.asarray(True)
    return ess < (0.5 if ess_threshold is None else ess_threshold) * num_particles


def settle(before: State, drawn: State, resampled: Bool[Array, ""]) -> State:
    """Keeps the product of a step that did not draw; the running reward moves on in any case."""
    return State(drawn.running, jnp.where(resampled, drawn.product, before.product))


def replay(
    rewards: Float[Array, "steps particles"],
    draws: Int[Array, "steps particles"],
    *,
    scored: Bool[Array, "steps"],
    potential: str,
    lam: float,
    r_min: float = 0.0,
    ess_threshold: float | None = None,
    variant: str = "reference_image",
) -> Replay:
    """Repeats a recorded run: rewards as the particles stood at each step, and the ancestors of every draw.

    Args:
      rewards: of every slot at every step.
      draws: ancestors, used at the steps that decide to draw.
      scored: which steps are scored, besides the last; as `fk_steering.scored_steps` returns them.
      potential: `diff`, `max`, `add`, `rt`, `is` or `bon`.
      lam: strength of the tilt.
      r_min: where the running reward starts.
      ess_threshold: resample below this share of K; None for at every scored step.
      variant: one of `VARIANTS`.
    """
    num_steps, num_particles = rewards.shape
    identity = jnp.arange(num_particles)
    idle = potential in ("is", "bon")

    def decide(state, ancestry, step_rewards, recorded, last):
        weights, drawn = weigh(state, step_rewards, potential=potential, lam=lam, last=last)
        ess = resampling.effective_sample_size(jnp.log(weights))
        resampled = should_resample(ess, num_particles, variant=variant, ess_threshold=ess_threshold, last=last)
        state = settle(state, drawn, resampled)
        parents = jnp.where(resampled, recorded, identity)
        state, ancestry = resampling.take((state, ancestry), parents)
        return (state, ancestry), (weights, resampled)

    def skip(state, ancestry, step_rewards, recorded):
        return (state, ancestry), (jnp.full_like(step_rewards, jnp.nan), jnp.asarray(False))

    def body(carry, inputs):
        step_rewards, recorded, is_scored, is_last = inputs
        branch = jnp.where(is_last, 2, jnp.where(is_scored & (not idle), 1, 0))
        branches = [skip, lambda *args: decide(*args, last=False), lambda *args: decide(*args, last=True)]
        if potential == "bon":
            branches[2] = _sort
        carry, (weights, resampled) = jax.lax.switch(branch, branches, *carry, step_rewards, recorded)
        weights = jnp.where(resampled, weights, jnp.nan)
        return carry, Replay(carry[1], carry[0].running, carry[0].product, weights, resampled)

    is_last = jnp.arange(num_steps) == num_steps - 1
    start = init(num_particles, r_min)
    start = jax.tree.map(lambda leaf: leaf.astype(rewards.dtype), start)
    return jax.lax.scan(body, (start, identity), (rewards, draws, scored, is_last))[1]


def _sort(state, ancestry, step_rewards, recorded):
    """Best-of-n draws nothing and sorts at the end, best first."""
    ancestry = ancestry[jnp.argsort(-step_rewards)]
    return (state, ancestry), (jnp.full_like(step_rewards, jnp.nan), jnp.asarray(False))
