"""One-step samplers, each a pure function of the state, the network's output, the grid's row and the noise.

    step(x, pred, row, noise) -> (x_next, x0_hat)

The factories below return such steps. A step is a pytree: its numbers (eta, kappa, clip) are leaves, so it can be an argument
of a jitted function and a new eta compiles nothing; its names are static. It is affine in the noise unless it says otherwise.
Steps on a VP grid (a = sqrt(ab), s = sqrt(1 - ab), primes for the level arrived at):

    DDPM      x' = a' b / s^2 x_0 + sqrt(1 - b) s'^2 / s^2 x + sqrt(var) z,    b = 1 - ab / ab'
    DDIM      x' = a' x_0 + sqrt(s'^2 - sd^2) eps + sd z,    sd = eta (s' / s) sqrt(1 - ab / ab')

in sigma space, with d = (x - x_0) / sigma, and on a flow with velocity u, score -n / s and n = x + (1 - s) u:

    Euler     x' = x + (sigma' - sigma) d            Heun    x' = x + (sigma' - sigma) (d + d') / 2
    ancestral x' = x + (sigma_down - sigma) d + sigma_up z
    flow      x' = x + (s' - s) (u - g^2 score / 2) + g sqrt(s - s') z

References: J. Ho, A. Jain, P. Abbeel, "Denoising diffusion probabilistic models" (2006.11239); J. Song, C. Meng, S. Ermon,
"Denoising diffusion implicit models" (2010.02502); T. Karras et al., "Elucidating the design space of diffusion-based
generative models" (2206.00364); Y. Lipman et al., "Flow matching for generative modeling" (2210.02747); J. Liu et al.,
"Flow-GRPO" (2505.05470).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxml25.diffusion import checks, predictions
from jaxml25.diffusion.schedules import Grid, Scalar, SigmaGrid, safe_sqrt

Clip = Scalar | Callable[[Array], Array] | None
VARIANCES = ("fixed_small", "fixed_large", "learned_range")


def static(default: Any = dataclasses.MISSING) -> Any:
    """A field of a step that is part of its type, not a leaf."""
    return dataclasses.field(default=default, metadata={"static": True})


def as_clip(clip: Clip) -> Any:
    """Checks a `clip` argument and makes it a pytree: a range stays a leaf, a function becomes static.

    Raises:
      ValueError: if the range is known not to be positive.
    """
    if callable(clip):
        return jax.tree_util.Partial(clip)
    if clip is not None and checks.is_concrete(clip) and not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    return clip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What `trajectories.sample` asks of a step besides calling it; a plain function answers none of it.

    Attributes:
      prediction_type: what the network predicts.
      clip: see `ddpm`.
    """

    prediction_type: str = static("epsilon")
    clip: Any = None  # None, a number that may be traced, or a pytree function

    space = "vp"

    @property
    def stochastic(self) -> bool:
        """Whether the step uses its noise."""
        return True

    def scale_input(self, x: Array, row: Grid | SigmaGrid) -> Array:
        """What the network is fed at state x."""
        return predictions.scale_input(x, row, self.prediction_type)

    def check(self, grid: Any) -> None:
        """Checks that the step can walk a grid, as far as its values are known.

        Raises:
          ValueError: for the other kind of grid, or where ab is 0 and the network predicts epsilon or a score.
        """
        expected = {"vp": "Grid", "sigma": "SigmaGrid", "both": ""}[self.space]
        if expected and hasattr(grid, "sigma") != (expected == "SigmaGrid"):
            raise ValueError(f"grid must be a {expected} for {type(self).__name__}, got a {type(grid).__name__}")
        if not hasattr(grid, "sigma"):
            predictions.check_terminal_snr(grid.ab, self.prediction_type)

    def read(self, x: Array, pred: Array, row: Grid | SigmaGrid) -> tuple[Array, Array]:
        """Reads the network's output as (x_0 after clipping, eps before it)."""
        x0, eps = predictions.read(pred, x, row, self.prediction_type)
        return predictions.clip_x0(x0, self.clip), eps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ddpm(Step):
    """See `ddpm`."""

    variance: str = static("fixed_small")
    channel_axis: int = static(-1)

    def __call__(self, x: Array, pred: Array, row: Grid, noise: Array) -> tuple[Array, Array]:
        """Takes one step; see the module's equations."""
        fraction = None
        if self.variance == "learned_range":
            pred, raw = jnp.split(pred, 2, axis=self.channel_axis)
            fraction = (raw + 1) / 2
        x0, _ = self.read(x, pred, row)
        remaining, remaining_prev = 1 - row.ab, 1 - row.ab_prev
        a = row.ab / row.ab_prev
        beta = 1 - a
        mean = jnp.sqrt(row.ab_prev) * beta / remaining * x0 + jnp.sqrt(a) * remaining_prev / remaining * x
        # The floor keeps the logarithm finite where the step arrives at clean data.
        small = jnp.maximum(remaining_prev / remaining * beta, 1e-20)
        if self.variance == "fixed_small":
            scale = jnp.sqrt(small)
        elif self.variance == "fixed_large":
            scale = safe_sqrt(beta)
        else:
            scale = jnp.exp(0.5 * (fraction * jnp.log(beta) + (1 - fraction) * jnp.log(small)))
        x_next = mean + jnp.where(row.t > 0, scale, 0) * noise
        return x_next.astype(x.dtype), x0.astype(x.dtype)


def ddpm(
    variance: str = "fixed_small", prediction_type: str = "epsilon", clip: Clip = None, *, channel_axis: int = -1
) -> Ddpm:
    """Ancestral sampling of a VP model; no noise is added at level 0. Use a grid with `previous="next"`.

    Args:
      variance: `fixed_small`, the posterior's (1 - ab') / (1 - ab) b; `fixed_large`, b; `learned_range`, between the two in
        logarithm, by the second half of the network's channels.
      prediction_type: one of `predictions.PREDICTION_TYPES`.
      clip: the range r that x_0 is clipped to, [-r, r], or a function of x_0 such as `predictions.dynamic_threshold`.
      channel_axis: where `learned_range` finds the channels.

    Raises:
      ValueError: for an unknown name or a range that is not positive.
    """
    checks.one_of("variance", variance, VARIANCES)
    checks.one_of("prediction_type", prediction_type, predictions.PREDICTION_TYPES)
    return Ddpm(variance=variance, prediction_type=prediction_type, clip=as_clip(clip), channel_axis=channel_axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ddim(Step):
    """See `ddim`."""

    eta: Any = 0.0
    use_clipped_model_output: bool = static(False)

    @property
    def stochastic(self) -> bool:
        """Whether eta may differ from 0."""
        return not checks.is_concrete(self.eta) or bool(self.eta != 0)

    def __call__(self, x: Array, pred: Array, row: Grid, noise: Array) -> tuple[Array, Array]:
        """Takes one step; see the module's equations."""
        x0, eps = self.read(x, pred, row)
        remaining, remaining_prev = 1 - row.ab, 1 - row.ab_prev
        if self.use_clipped_model_output:
            eps = (x - jnp.sqrt(row.ab) * x0) / jnp.sqrt(remaining)
        deviation = self.eta * safe_sqrt(remaining_prev / remaining) * safe_sqrt(1 - row.ab / row.ab_prev)
        # 1 - ab' - deviation^2 without its cancellation, which at eta = 1 could leave a negative number.
        share = 1 - self.eta**2 + self.eta**2 * row.ab * remaining_prev / (row.ab_prev * remaining)
        x_next = jnp.sqrt(row.ab_prev) * x0 + safe_sqrt(remaining_prev * share) * eps + deviation * noise
        return x_next.astype(x.dtype), x0.astype(x.dtype)


def ddim(
    eta: Scalar = 0.0, prediction_type: str = "epsilon", clip: Clip = None, *, use_clipped_model_output: bool = False
) -> Ddim:
    """DDIM: deterministic at eta 0, and at eta 1 the same as `ddpm("fixed_small")` on the same grid.

    Args:
      eta: in [0, 1]; may be traced.
      prediction_type: one of `predictions.PREDICTION_TYPES`.
      clip: see `ddpm`.
      use_clipped_model_output: read eps again from the clipped x_0 (by default only x_0 is clipped).

    Raises:
      ValueError: if eta is known to be outside [0, 1], for an unknown type, or a range that is not positive.
    """
    checks.between("eta", eta, 0, 1)
    checks.one_of("prediction_type", prediction_type, predictions.PREDICTION_TYPES)
    return Ddim(
        eta=eta, prediction_type=prediction_type, clip=as_clip(clip), use_clipped_model_output=use_clipped_model_output
    )
