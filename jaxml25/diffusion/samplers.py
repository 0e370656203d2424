"""One-step samplers, each a pure function of the state, the network's output, the grid's row and the noise.

    step(x, pred, row, noise) -> (x_next, x0_hat)

The factories below return such steps. A step is a pytree: its numbers (eta, kappa, clip) are leaves, so it can be an
argument of a jitted function and a new eta compiles nothing; its names are static. Every step is affine in the noise.
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
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Real

from jaxml25.diffusion import checks, predictions
from jaxml25.diffusion.schedules import Grid, Scalar, SigmaGrid, Values, expand, safe_sqrt

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

    def scale_input(self, x: Values, row: Grid | SigmaGrid) -> Values:
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

    def read(self, x: Values, pred: Values, row: Grid | SigmaGrid) -> tuple[Values, Values]:
        """Reads the network's output as (x_0 after clipping, eps before it)."""
        x0, eps = predictions.read(pred, x, row, self.prediction_type)
        return predictions.clip_x0(x0, self.clip), eps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ddpm(Step):
    """See `ddpm`."""

    variance: str = static("fixed_small")
    channel_axis: int = static(-1)

    def __call__(self, x: Values, pred: Values, row: Grid, noise: Values) -> tuple[Array, Array]:
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

    def __call__(self, x: Values, pred: Values, row: Grid, noise: Values) -> tuple[Array, Array]:
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Euler(Step):
    """See `euler`."""

    churn: Any = None  # None is no churn, which jit must be able to tell from a traced 0
    churn_range: Any = (0.0, math.inf)
    churn_noise: Any = 1.0

    space = "sigma"

    @property
    def stochastic(self) -> bool:
        """Whether there is churn."""
        return self.churn is not None

    def perturb(self, x: Values, row: SigmaGrid, noise: Values) -> tuple[Values, SigmaGrid]:
        """Raises the noise level before the network is called (churn): the state and the row to go on from."""
        if not self.stochastic:
            return x, row
        low, high = self.churn_range
        gamma = jnp.where((row.sigma >= low) & (row.sigma <= high), self.churn, 0.0)
        sigma = row.sigma * (1 + gamma)
        added = self.churn_noise * row.sigma * safe_sqrt(gamma * (2 + gamma))
        return (x + added * noise).astype(x.dtype), row._replace(t=sigma, sigma=sigma)

    def __call__(self, x: Values, pred: Values, row: SigmaGrid, noise: Values) -> tuple[Array, Array]:
        """Takes one Euler step from a state that has been perturbed already; the noise is not used."""
        x0, _ = self.read(x, pred, row)
        x_next = x + (row.sigma_next - row.sigma) * (x - x0) / row.sigma
        return x_next.astype(x.dtype), x0.astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Heun(Euler):
    """See `heun`."""

    def correct(self, x: Values, x0: Values, row: SigmaGrid, x_euler: Values, pred: Values, t_next: Scalar) -> Array:
        """Replaces an Euler step by the trapezoidal one.

        Args:
          x: where the step starts.
          x0: its clean sample, from the Euler step.
          row: the grid's row; its sigma_next must be positive.
          x_euler: where the Euler step arrives.
          pred: the network's output there, at level t_next.
          t_next: that level.
        """
        arrival = SigmaGrid(t_next, row.sigma_next, row.sigma_next)
        x0_next, _ = self.read(x_euler, pred, arrival)
        slope = (x - x0) / row.sigma + (x_euler - x0_next) / row.sigma_next
        return (x + (row.sigma_next - row.sigma) * 0.5 * slope).astype(x.dtype)


def euler(
    prediction_type: str = "epsilon",
    clip: Clip = None,
    *,
    churn: Scalar = 0.0,
    churn_range: tuple[Scalar, Scalar] = (0.0, math.inf),
    churn_noise: Scalar = 1.0,
) -> Euler:
    """Euler's method for the probability-flow ODE in sigma space: first order, one network call per step.

    Churn makes the sampler stochastic: before the network is called, noise lifts the level from sigma to (1 + churn) sigma.
    The network must then be told that level, so churn needs `edm` and the grid's t to be sigma (`edm_grid`).

    Args:
      prediction_type: one of `predictions.PREDICTION_TYPES`. A network trained on a VP schedule is fed
        x / sqrt(1 + sigma^2); `edm` names a denoiser D(x; sigma) that is fed x (see `edm_precondition`).
      clip: see `ddpm`.
      churn: in [0, sqrt(2) - 1], EDM's min(S_churn / n, sqrt(2) - 1); may be traced.
      churn_range: only levels within are churned, EDM's (S_tmin, S_tmax).
      churn_noise: standard deviation of the noise, EDM's S_noise.

    Raises:
      ValueError: for an unknown type, a range that is not positive, or a churn out of range or without `edm`.
    """
    return _euler(Euler, prediction_type, clip, churn, churn_range, churn_noise)


def heun(
    prediction_type: str = "epsilon",
    clip: Clip = None,
    *,
    churn: Scalar = 0.0,
    churn_range: tuple[Scalar, Scalar] = (0.0, math.inf),
    churn_noise: Scalar = 1.0,
) -> Heun:
    """Heun's method in sigma space: second order, two network calls per step; arguments and errors as `euler`.

    Called alone it takes the Euler step, its predictor; `trajectories.sample` calls the network once more at the next row
    and then `correct`. The last row has no next one to call the network at and stays an Euler step.
    """
    return _euler(Heun, prediction_type, clip, churn, churn_range, churn_noise)


def _euler(kind: type, prediction_type: str, clip: Clip, churn: Scalar, churn_range: tuple, churn_noise: Scalar) -> Any:
    checks.one_of("prediction_type", prediction_type, predictions.PREDICTION_TYPES)
    checks.between("churn", churn, 0, math.sqrt(2) - 1)
    churn = None if checks.is_concrete(churn) and churn == 0 else churn
    if prediction_type != "edm" and churn is not None:
        raise ValueError(f"churn needs prediction_type 'edm' (a network that is told sigma), got {prediction_type!r}")
    return kind(
        prediction_type=prediction_type,
        clip=as_clip(clip),
        churn=churn,
        churn_range=churn_range,
        churn_noise=churn_noise,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EulerAncestral(Step):
    """See `euler_ancestral`."""

    space = "sigma"

    def __call__(self, x: Values, pred: Values, row: SigmaGrid, noise: Values) -> tuple[Array, Array]:
        """Takes one step; see the module's equations."""
        x0, _ = self.read(x, pred, row)
        sigma, target = row.sigma, row.sigma_next
        up = jnp.minimum(target, target / sigma * safe_sqrt(sigma**2 - target**2))
        down = safe_sqrt(target**2 - up**2)
        x_next = x + (down - sigma) * (x - x0) / sigma + up * noise
        return x_next.astype(x.dtype), x0.astype(x.dtype)


def euler_ancestral(prediction_type: str = "epsilon", clip: Clip = None) -> EulerAncestral:
    """Euler to a level below the target, then noise back up to it; arguments and errors as `euler`."""
    checks.one_of("prediction_type", prediction_type, predictions.PREDICTION_TYPES)
    return EulerAncestral(prediction_type=prediction_type, clip=as_clip(clip))


def edm_coefficients(sigma: Real[ArrayLike, "..."], sigma_data: Scalar = 0.5) -> tuple[Array, Array, Array, Array]:
    """EDM's (c_skip, c_out, c_in, c_noise) at a noise level, which keep a network's input and target at variance 1."""
    total = jnp.asarray(sigma) ** 2 + sigma_data**2
    root = jnp.sqrt(total)
    return sigma_data**2 / total, sigma * sigma_data / root, 1 / root, 0.25 * jnp.log(jnp.asarray(sigma))


def edm_denoised(output: Values, x: Values, sigma: Scalar, sigma_data: Scalar = 0.5) -> Array:
    """The denoised sample D = c_skip x + c_out F of a preconditioned network's output F at state x."""
    c_skip, c_out, _, _ = edm_coefficients(sigma, sigma_data)
    return (c_skip * x + c_out * output).astype(x.dtype)


def edm_precondition(network: Callable[..., Array], sigma_data: Scalar = 0.5) -> Callable[..., Array]:
    """Wraps F(c_in x, c_noise, cond) as a denoiser D(x, sigma, cond) for `prediction_type="edm"` and `edm_grid`."""

    def denoise(x: Array, sigma: Array, cond: Any = None) -> Array:
        c_skip, c_out, c_in, c_noise = edm_coefficients(sigma, sigma_data)
        output = network((expand(c_in, x) * x).astype(x.dtype), c_noise, cond)
        return (expand(c_skip, x) * x + expand(c_out, x) * output).astype(x.dtype)

    return denoise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow(Step):
    """See `flow_euler` and `flow_sde`."""

    prediction_type: str = static("flow")
    kappa: Any = None  # None is the ODE
    diffusion: str = static("matched")

    space = "sigma"

    @property
    def stochastic(self) -> bool:
        """Whether this is the SDE."""
        return self.kappa is not None

    def scale_input(self, x: Values, row: SigmaGrid) -> Values:
        """A flow's network is fed x itself."""
        return x

    def check(self, grid: Any) -> None:
        """Checks that a grid has an s, and for the Flow-GRPO noise that it stays below 1.

        Raises:
          ValueError: if not.
        """
        super().check(grid)
        s = grid.sigma
        if self.diffusion == "flow_grpo" and checks.is_concrete(s) and np.any(np.asarray(s) >= 1):
            raise ValueError(f"grid must have sigma < 1 for diffusion 'flow_grpo', got {float(np.max(np.asarray(s)))}")

    def __call__(self, x: Values, pred: Values, row: SigmaGrid, noise: Values) -> tuple[Array, Array]:
        """Takes one step; see the module's equations."""
        s, change = row.sigma, row.sigma_next - row.sigma
        x0 = x - s * pred
        drift, variance = pred, 0.0
        if self.stochastic:
            # rate is g^2 / (2 s), which is finite at s = 0 where the score is not: -g^2 score / 2 = rate * n.
            rate = self.kappa if self.diffusion == "matched" else self.kappa**2 / (2 * (1 - s))
            drift = pred + rate * (x + (1 - s) * pred)
            variance = -change * 2 * rate * s
        x_next = x + change * drift + safe_sqrt(variance) * noise
        return x_next.astype(x.dtype), x0.astype(x.dtype)


def flow_euler() -> Flow:
    """Euler's method for a rectified flow whose network predicts the velocity u = eps - x_0; the grid is `flow_grid`."""
    return Flow()


def flow_sde(kappa: Scalar = 1.0, diffusion: str = "matched") -> Flow:
    """A stochastic sampler with the marginals of the flow's ODE as the steps become small, for any kappa.

    Args:
      kappa: strength of the noise, at least 0 (0 takes the steps of `flow_euler`); may be traced.
      diffusion: `matched` g^2 = 2 kappa s, which vanishes at the data; `flow_grpo` g^2 = kappa^2 s / (1 - s), which needs
        s < 1 (`flow_grid(..., start=...)`).

    Raises:
      ValueError: for an unknown diffusion, or a kappa known to be negative.
    """
    checks.one_of("diffusion", diffusion, ("matched", "flow_grpo"))
    checks.between("kappa", kappa, 0, math.inf)
    return Flow(kappa=kappa, diffusion=diffusion)
