"""Noise schedules and the grids of noise levels that samplers walk.

A variance-preserving (VP) schedule has T levels. With betas b_t and ab_t = prod_{s <= t} (1 - b_s), data x_0 and a
standard normal eps,

    x_t = sqrt(ab_t) x_0 + sqrt(1 - ab_t) eps.                                                        (VP)

Two other families need no table: x_sigma = x_0 + sigma eps (VE), and x_s = (1 - s) x_0 + s eps with s in [0, 1] (flow).
The first two are one family: with sigma = sqrt((1 - ab) / ab), x_VP = x_VE / sqrt(1 + sigma^2).

References: J. Ho, A. Jain, P. Abbeel, "Denoising diffusion probabilistic models" (2006.11239); A. Nichol, P. Dhariwal,
"Improved denoising diffusion probabilistic models" (2102.09672, the cosine schedule); T. Karras et al., "Elucidating the
design space of diffusion-based generative models" (2206.00364, the spacing of sigmas); S. Lin et al., "Common diffusion
noise schedules and sample steps are flawed" (2305.08891, zero terminal signal); Y. Song et al., "Score-based generative
modeling through stochastic differential equations" (2011.13456); Y. Lipman et al., "Flow matching for generative
modeling" (2210.02747).
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Real

from jaxml25.diffusion import checks

Scalar = Real[ArrayLike, ""]  # a number: Python's, NumPy's or an array that may be traced
Values = Float[ArrayLike, "..."]  # the same of any shape

KINDS = ("linear", "scaled_linear", "cosine", "sigmoid")
SPACINGS = ("leading", "linspace", "linspace_dpm", "trailing")
_BETA_RANGES = {"linear": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012), "sigmoid": (1e-4, 0.02)}


class Schedule(NamedTuple):
    """A VP schedule; a pytree whose one leaf may be traced."""

    alphas_cumprod: Float[Array, "T"]  # ab_t, falling from almost 1 to almost (or exactly) 0

    @property
    def T(self) -> int:
        """Number of training levels; static."""
        return self.alphas_cumprod.shape[-1]


class Grid(NamedTuple):
    """The levels of a VP sampler, noisiest first; row i is `jax.tree.map(lambda a: a[i], grid)`."""

    t: Int[Array, "n"]  # level at which the network is called
    ab: Float[Array, "n"]  # ab at t
    ab_prev: Float[Array, "n"]  # ab at the level the step arrives at


class SigmaGrid(NamedTuple):
    """The levels of a sampler in sigma space (VE) or on a flow, noisiest first."""

    t: Real[Array, "n"]  # what the network is told: a VP level, sigma itself (`edm_grid`), or s (`flow_grid`)
    sigma: Float[Array, "n"]  # noise level at t; s for a flow
    sigma_next: Float[Array, "n"]  # noise level the step arrives at


class ContinuousVP(NamedTuple):
    """The VP schedule of continuous time t in [0, 1]: beta(t) = beta_min + t (beta_max - beta_min)."""

    beta_min: Scalar = 0.1
    beta_max: Scalar = 20.0

    def beta(self, t: ArrayLike) -> Array:
        """The rate at which the signal's variance decays."""
        return self.beta_min + jnp.asarray(t) * (self.beta_max - self.beta_min)

    def alpha_bar(self, t: ArrayLike) -> Array:
        """ab(t) = exp(-integral of beta from 0 to t)."""
        t = jnp.asarray(t)
        return jnp.exp(-t * (self.beta_min + 0.5 * t * (self.beta_max - self.beta_min)))


def make_schedule(
    kind: str, T: int = 1000, *, beta_start: Scalar | None = None, beta_end: Scalar | None = None, zero_snr: bool = False
) -> Schedule:
    """Builds a VP schedule in float64 on the host and casts it once, to JAX's default float.

    Args:
      kind: `linear` (DDPM; betas from 1e-4 to 0.02 unless given), `scaled_linear` (Stable Diffusion; linear in the root
        of beta, 0.00085 to 0.012), `sigmoid` (1e-4 to 0.02) or `cosine` (no betas to give; also `squaredcos_cap_v2`).
      T: number of levels, at least 1 (2 with `zero_snr`).
      beta_start: first beta, in (0, 1).
      beta_end: last beta, in [beta_start, 1).
      zero_snr: shift and scale sqrt(ab) so that the last level is pure noise and the first is unchanged. A network that
        predicts epsilon cannot be used there: nothing of x_0 is left to divide out.

    Raises:
      ValueError: for an unknown kind, T too small, or betas out of range.
    """
    kind = "cosine" if kind == "squaredcos_cap_v2" else kind
    checks.one_of("kind", kind, KINDS)
    if T < 1:
        raise ValueError(f"T must be at least 1, got {T}")
    if zero_snr and T < 2:
        raise ValueError(f"T must be at least 2 with zero_snr, got {T}")
    alphas_cumprod = np.cumprod(1 - _betas(kind, T, beta_start, beta_end))
    if zero_snr:
        root = np.sqrt(alphas_cumprod)
        alphas_cumprod = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    return Schedule(jnp.asarray(alphas_cumprod))


def _betas(kind: str, T: int, beta_start: Scalar | None, beta_end: Scalar | None) -> np.ndarray:
    if kind == "cosine":
        if beta_start is not None or beta_end is not None:
            raise ValueError(f"beta_start and beta_end do not apply to kind 'cosine', got {beta_start} and {beta_end}")
        signal = np.cos((np.arange(T + 1) / T + 0.008) / 1.008 * np.pi / 2) ** 2
        return np.minimum(1 - signal[1:] / signal[:-1], 0.999)
    low, high = _BETA_RANGES[kind]
    low = low if beta_start is None else beta_start
    high = high if beta_end is None else beta_end
    if not 0 < low <= high < 1:
        raise ValueError(f"0 < beta_start <= beta_end < 1 must hold, got beta_start {low} and beta_end {high}")
    if kind == "linear":
        return np.linspace(low, high, T)
    if kind == "scaled_linear":
        return np.linspace(low**0.5, high**0.5, T) ** 2
    return low + (high - low) / (1 + np.exp(-np.linspace(-6, 6, T)))


def timesteps(T: int, n: int, spacing: str = "leading", offset: int = 0) -> np.ndarray:
    """The n of T levels that a sampler visits, noisiest first, as integers on the host.

    Args:
      T: number of training levels.
      n: number of steps, from 1 to T.
      spacing: `leading` i (T // n) + offset; `linspace` from T - 1 to 0, rounded; `linspace_dpm` the same with n + 1
        points and without the final 0, as the DPM-Solver family takes it; `trailing` T - i T / n - 1, rounded.
      offset: added under `leading` only (Stable Diffusion ships 1).

    Raises:
      ValueError: for an unknown spacing, n outside [1, T], or an offset that leaves the table.
    """
    checks.one_of("spacing", spacing, SPACINGS)
    if not 1 <= n <= T:
        raise ValueError(f"n must be from 1 to the schedule's T = {T}, got {n}")
    if spacing == "linspace":
        return np.linspace(0, T - 1, n).round()[::-1].astype(np.int32)
    if spacing == "linspace_dpm":
        return np.linspace(0, T - 1, n + 1).round()[:0:-1].astype(np.int32)
    if spacing == "trailing":
        return (T - np.arange(n) * (T / n)).round().astype(np.int32) - 1
    steps = np.arange(n - 1, -1, -1, dtype=np.int32) * (T // n) + offset
    if steps[-1] < 0 or steps[0] >= T:
        raise ValueError(f"offset must keep the levels in [0, {T - 1}], got {offset}")
    return steps


def make_grid(
    schedule: Schedule, n: int, spacing: str = "leading", offset: int = 0, final: str = "one", *, previous: str = "spacing"
) -> Grid:
    """Builds the grid of an n-step VP sampler.

    Args:
      schedule: its table; may be traced.
      n: number of steps, from 1 to T.
      spacing: see `timesteps`.
      offset: see `timesteps`.
      final: ab past the end of the table: `one` (clean data) or `alpha0` (the table's first entry; Stable Diffusion's
        DDIM, and the final sigma `sigma_min` of DPM-Solver).
      previous: where a step arrives. `spacing`: at t - T // n, as DDIM is defined, whichever levels come next; `next`: at
        the next level of the list, as DDPM and DPM-Solver have it.

    Raises:
      ValueError: for an unknown name, or n or offset out of range.
    """
    checks.one_of("final", final, ("one", "alpha0"))
    checks.one_of("previous", previous, ("spacing", "next"))
    T = schedule.T
    t = timesteps(T, n, spacing, offset)
    before = t - T // n if previous == "spacing" else np.append(t[1:], -1)
    table = schedule.alphas_cumprod
    last = table[0] if final == "alpha0" else jnp.ones((), table.dtype)
    return Grid(jnp.asarray(t), table[t], jnp.where(before < 0, last, table[np.maximum(before, 0)]))


def karras_sigmas(n: int, sigma_min: Scalar = 0.002, sigma_max: Scalar = 80.0, rho: Scalar = 7.0) -> Float[Array, "levels"]:
    """EDM's noise levels: n of them, even in sigma^(1/rho) from `sigma_max` to `sigma_min`, and then 0.

    Raises:
      ValueError: if n is below 1.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    xp = jnp
    if all(map(checks.is_concrete, (sigma_min, sigma_max, rho))):
        # In float64 on the host where possible: the power magnifies a rounding error rho times.
        xp, sigma_min, sigma_max, rho = np, float(sigma_min), float(sigma_max), float(rho)
    high, low = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return jnp.asarray(xp.append((high + xp.linspace(0.0, 1.0, n) * (low - high)) ** rho, 0.0))


def make_sigma_grid(
    schedule: Schedule, n: int, karras: bool = False, *, spacing: str = "linspace", offset: int = 0, rho: Scalar = 7.0
) -> SigmaGrid:
    """Builds the sigma-space grid on which a network trained on a VP schedule is sampled; it ends at sigma 0.

    A sampler starts from x_T = sigma[0] eps here, not from a standard normal.

    Args:
      schedule: its table; may be traced. Its ab must not be 0 (sigma would be infinite).
      n: number of steps, from 1 to T.
      karras: space the sigmas between the same ends by `karras_sigmas`; the levels t are then found by interpolation in
        log sigma.
      spacing: see `timesteps`; `linspace` keeps unrounded levels here and interpolates sigma.
      offset: see `timesteps`.
      rho: the exponent of the Karras spacing.

    Raises:
      ValueError: for an unknown spacing, n or offset out of range, or a table known to hold a 0.
    """
    table = schedule.alphas_cumprod
    if checks.is_concrete(table) and not np.all(np.asarray(table) > 0):
        raise ValueError("schedule must have positive alphas_cumprod in sigma space, got a zero-terminal-SNR table")
    t = timesteps(schedule.T, n, spacing, offset)
    t = np.linspace(0, schedule.T - 1, n)[::-1] if spacing == "linspace" else t
    levels = jnp.arange(schedule.T, dtype=table.dtype)
    sigmas = sigma_of(table)
    t = jnp.asarray(t, table.dtype)
    sigma = jnp.interp(t, levels, sigmas)
    if karras:
        sigma = karras_sigmas(n, sigma[-1], sigma[0], rho)[:-1].astype(table.dtype)
        t = jnp.interp(jnp.log(sigma), jnp.log(sigmas), levels)
    return SigmaGrid(t, sigma, jnp.append(sigma[1:], 0.0))


def edm_grid(n: int, sigma_min: Scalar = 0.002, sigma_max: Scalar = 80.0, rho: Scalar = 7.0) -> SigmaGrid:
    """The grid of `karras_sigmas` for networks that are told sigma itself: t is sigma.

    Raises:
      ValueError: if n is below 1, or unless 0 < sigma_min <= sigma_max.
    """
    if not 0 < sigma_min <= sigma_max:
        raise ValueError(f"0 < sigma_min <= sigma_max must hold, got sigma_min {sigma_min} and sigma_max {sigma_max}")
    sigmas = karras_sigmas(n, sigma_min, sigma_max, rho)
    return SigmaGrid(sigmas[:-1], sigmas[:-1], sigmas[1:])


def time_shift(s: Real[ArrayLike, "*dims"], shift: Scalar) -> Float[Array, "*dims"]:
    """Spends more steps near the noise for shift k > 1: s <- k s / (1 + (k - 1) s), which keeps 0 and 1."""
    s = jnp.asarray(s)
    return shift * s / (1 + (shift - 1) * s)


def flow_grid(n: int, shift: Scalar = 1.0, *, start: Scalar = 1.0) -> SigmaGrid:
    """The grid of a rectified flow: n equal steps of s from `start` to 0, then time-shifted; t is s.

    Args:
      n: number of steps.
      shift: k > 0 of `time_shift`; may be traced.
      start: the first s before the shift, in (0, 1]; below 1 for the Flow-GRPO choice of noise, which is infinite at 1.

    Raises:
      ValueError: if n is below 1, start outside (0, 1], or shift known not to be positive.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if not 0 < start <= 1:
        raise ValueError(f"start must be in (0, 1], got {start}")
    if checks.is_concrete(shift) and not shift > 0:
        raise ValueError(f"shift must be positive, got {shift}")
    s = time_shift(jnp.linspace(start, 0.0, n + 1), shift)
    return SigmaGrid(s[:-1], s[:-1], s[1:])


def sigma_of(ab: Float[ArrayLike, "*dims"]) -> Float[Array, "*dims"]:
    """The VE noise level that has the signal-to-noise ratio of ab: sqrt((1 - ab) / ab)."""
    ab = jnp.asarray(ab)
    return jnp.sqrt((1 - ab) / ab)


def alpha_bar_at(schedule: Schedule, t: Real[ArrayLike, "*dims"]) -> Float[Array, "*dims"]:
    """ab at levels t: a lookup for integers, and for fractions the interpolation of sigma that `make_sigma_grid` uses."""
    t = jnp.asarray(t)
    table = schedule.alphas_cumprod
    if jnp.issubdtype(t.dtype, jnp.integer):
        return table[t]
    levels = jnp.arange(schedule.T, dtype=table.dtype)
    return 1 / (1 + jnp.interp(t, levels, sigma_of(table)) ** 2)


def safe_sqrt(x: ArrayLike) -> Array:
    """The square root with value and slope 0 wherever x <= 0: rounding cannot make it NaN, nor 0 its gradient infinite."""
    x = jnp.asarray(x)
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def expand(level: ArrayLike, x: ArrayLike) -> Array:
    """Appends axes to a level per sample, or to one for all, so that it broadcasts against x from the left."""
    level = jnp.asarray(level)
    return level.reshape(level.shape + (1,) * (jnp.ndim(x) - level.ndim))


def q_sample(
    schedule: Schedule,
    x0: Float[ArrayLike, "batch *dims"],
    t: Int[ArrayLike, "batch"] | Int[ArrayLike, ""],
    noise: Float[ArrayLike, "batch *dims"],
) -> Float[Array, "batch *dims"]:
    """Draws from the forward process (VP): sqrt(ab_t) x0 + sqrt(1 - ab_t) noise, with one level per sample or for all."""
    ab = expand(schedule.alphas_cumprod[jnp.asarray(t)], x0)
    return (jnp.sqrt(ab) * x0 + jnp.sqrt(1 - ab) * noise).astype(x0.dtype)


def q_sample_ve(x0: Float[ArrayLike, "batch *dims"], sigma: Real[ArrayLike, "..."], noise: Values) -> Array:
    """Draws from the VE forward process: x0 + sigma noise."""
    return (x0 + expand(sigma, x0) * noise).astype(x0.dtype)


def q_sample_flow(x0: Float[ArrayLike, "batch *dims"], s: Real[ArrayLike, "..."], noise: Values) -> Array:
    """Draws from the flow's path: (1 - s) x0 + s noise."""
    s = expand(s, x0)
    return ((1 - s) * x0 + s * noise).astype(x0.dtype)


def vp_from_ve(x: Values, sigma: Real[ArrayLike, "..."]) -> Array:
    """The VP state of a VE state at noise level sigma: x / sqrt(1 + sigma^2)."""
    return (x / jnp.sqrt(1 + expand(sigma, x) ** 2)).astype(x.dtype)


def ve_from_vp(x: Values, ab: Float[ArrayLike, "..."]) -> Array:
    """The VE state of a VP state at level ab > 0: x / sqrt(ab)."""
    return (x / jnp.sqrt(expand(ab, x))).astype(x.dtype)
