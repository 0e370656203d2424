"""Masked (absorbing-state) discrete diffusion of token sequences.

Forward in time every token is independently replaced by the mask token m with probability 1 - alpha(t), alpha = exp(-sigma),

    q(x_t = m) = 1 - alpha(t),    q(x_t = x_0) = alpha(t).                                                      (1)

A network predicts the clean token behind each mask. Its logits become a distribution p(. | x_t) by the SUBS rules: no mass
on the mask token, and tokens that are already visible stay as they are. Training minimises the continuous-time bound

    -log p(x_0) <= E_t sum_l  sigma'(t) / (exp(sigma(t)) - 1)  *  -log p(x_0^l | x_t),                          (2)

and sampling runs the exact reverse of (1) with p in place of the unknown x_0: from t back to s < t, with c = 1 - alpha,
a mask

    stays with probability c(s) / c(t),    becomes token v with probability p(v | x_t) (c(t) - c(s)) / c(t).    (3)

Everything here is a pure function of a denoiser `denoise(x_t, t, cond) -> logits` that the caller brings; `t` comes to it
with the shape of the batch. The mask token may have any index; the logits have a column for it, which is ignored.

Reference: S. S. Sahoo, M. Arriola, Y. Schiff, A. Gokaslan, E. Marroquin, J. T. Chiu, A. Rush and V. Kuleshov, "Simple and
Effective Masked Diffusion Language Models", arXiv 2406.07524, 2024.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

Denoiser = Callable[[Int[Array, "batch length"], Float[Array, "batch"], Any], Float[Array, "batch length vocab"]]
Time = Float[Array, "..."] | float

SCHEDULES = ("loglinear", "cosine", "cosinesqr", "linear", "geometric")
SMALLEST_TRAINING_TIME = 1e-3
SMALLEST_SAMPLING_TIME = 1e-5
# The logarithm of "impossible". Finite, so that 0 times it is 0 and no gradient is NaN; exp of it is exactly 0.
LOG_ZERO = -1e6


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MaskedSchedule:
    """How much is masked at time t in [0, 1]; hashable and without arrays, so it passes through `jit` as it is.

    With c(t) the probability of a mask and sigma = -log(1 - c):

        loglinear  c = (1 - eps) t
        cosine     c = (1 - eps) (1 - cos(pi t / 2))
        cosinesqr  c = (1 - eps) (1 - cos^2(pi t / 2))
        linear     sigma = sigma_min + t (sigma_max - sigma_min)
        geometric  sigma = sigma_min^(1 - t) sigma_max^t

    Only a schedule with c(1) near 1 matches the sampler's start from nothing but masks; `geometric` with its default
    sigma_max has c(1) = 0.63.

    Attributes:
      kind: one of `SCHEDULES`.
      eps: what stays visible at t = 1 in the first three kinds, in (0, 1).
      sigma_min: end point of the last two kinds; by default 0 (`linear`) or 1e-3 (`geometric`).
      sigma_max: end point of the last two kinds; by default 10 (`linear`) or 1 (`geometric`).

    Raises:
      ValueError: if `kind` is unknown, `eps` is outside (0, 1), or the end points are not in order.
    """

    kind: str = "loglinear"
    eps: float = 1e-3
    sigma_min: float | None = None
    sigma_max: float | None = None

    def __post_init__(self):
        if self.kind not in SCHEDULES:
            near = difflib.get_close_matches(str(self.kind), SCHEDULES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"kind must be one of {', '.join(SCHEDULES)}, got {self.kind!r}{hint}")
        if not 0 < self.eps < 1:
            raise ValueError(f"eps must be in (0, 1), got {self.eps}")
        low, high = self._ends()
        if not 0 <= low < high or (self.kind == "geometric" and low == 0):
            raise ValueError(f"sigma_min and sigma_max must be increasing and positive, got {low} and {high}")

    def sigma(self, t: Time) -> Float[Array, "..."]:
        """The total noise sigma(t) >= 0 at times in [0, 1]; increasing."""
        t = jnp.asarray(t)
        low, high = self._ends()
        if self.kind == "linear":
            return low + t * (high - low)
        if self.kind == "geometric":
            return low ** (1 - t) * high**t
        if self.kind == "loglinear":
            return -jnp.log1p(-self.mask_probability(t))
        return -jnp.log(self.alpha(t))

    def dsigma(self, t: Time) -> Float[Array, "..."]:
        """The rate sigma'(t)."""
        t = jnp.asarray(t)
        low, high = self._ends()
        if self.kind == "linear":
            return jnp.full_like(t, high - low)
        if self.kind == "geometric":
            return self.sigma(t) * math.log(high / low)
        slope = {
            "loglinear": jnp.ones_like,
            "cosine": lambda t: jnp.pi / 2 * jnp.sin(jnp.pi / 2 * t),
            "cosinesqr": lambda t: jnp.pi / 2 * jnp.sin(jnp.pi * t),
        }[self.kind](t)
        return (1 - self.eps) * slope / self.alpha(t)

    def alpha(self, t: Time) -> Float[Array, "..."]:
        """The probability exp(-sigma(t)) that a token is still visible."""
        t = jnp.asarray(t)
        if self.kind in ("linear", "geometric"):
            return jnp.exp(-self.sigma(t))
        shape = {
            "loglinear": lambda t: 1 - t,
            "cosine": lambda t: jnp.cos(jnp.pi / 2 * t),
            "cosinesqr": lambda t: jnp.cos(jnp.pi / 2 * t) ** 2,
        }[self.kind](t)
        return self.eps + (1 - self.eps) * shape

    def mask_probability(self, t: Time) -> Float[Array, "..."]:
        """The probability c(t) = 1 - alpha(t) of a mask, to full relative precision.

        The difference itself, or sigma in float32, has few correct digits at small t: sampling and losses divide by this.
        """
        t = jnp.asarray(t)
        if self.kind in ("linear", "geometric"):
            return -jnp.expm1(-self.sigma(t))
        shape = {
            "loglinear": lambda t: t,
            "cosine": lambda t: 2 * jnp.sin(jnp.pi / 4 * t) ** 2,
            "cosinesqr": lambda t: jnp.sin(jnp.pi / 2 * t) ** 2,
        }[self.kind](t)
        return (1 - self.eps) * shape

    def loss_weight(self, t: Time) -> Float[Array, "..."]:
        """The weight sigma' / (exp(sigma) - 1) of the bound (2), at t > 0; for `loglinear` it is 1 / t."""
        return self.dsigma(t) * self.alpha(t) / self.mask_probability(t)

    def _ends(self) -> tuple[float, float]:
        low, high = {"linear": (0.0, 10.0)}.get(self.kind, (1e-3, 1.0))
        return (low if self.sigma_min is None else self.sigma_min, high if self.sigma_max is None else self.sigma_max)


def subs_log_probs(
    logits: Float[Array, "*batch length vocab"], x_t: Int[Array, "*batch length"], mask_index: int
) -> Float[Array, "*batch length vocab"]:
    """The distribution of each clean token: log p(x_0 | x_t) from the network's logits by the SUBS rules.

    The mask token gets no mass, what remains is normalised, and where x_t is not a mask all mass is on x_t.

    Args:
      logits: any real numbers; the column of the mask token is ignored.
      x_t: tokens in [0, vocab).
      mask_index: the mask token, in [0, vocab).

    Returns:
      Log-probabilities in float32 or better; `LOG_ZERO` (whose exp is 0) where the probability is zero.

    Raises:
      ValueError: if `mask_index` is outside [0, vocab).
    """
    _check_mask_index(mask_index, logits.shape[-1])
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    tokens = jnp.arange(logits.shape[-1])
    of_masks = jax.nn.log_softmax(jnp.where(tokens == mask_index, LOG_ZERO, logits))
    of_masks = jnp.where(tokens == mask_index, LOG_ZERO, of_masks)
    of_visible = jnp.where(tokens == x_t[..., None], 0.0, LOG_ZERO)
    return jnp.where((x_t == mask_index)[..., None], of_masks, of_visible)


def q_mask(
    key: Key[Array, ""], x0: Int[Array, "*batch length"], t: Time, schedule: MaskedSchedule, mask_index: int
) -> Int[Array, "*batch length"]:
    """Draws x_t of equation (1): every token becomes a mask with probability 1 - alpha(t).

    Args:
      key: consumed.
      x0: clean tokens.
      t: times in [0, 1], a scalar or of the leading shape of `x0`.
      schedule: gives alpha.
      mask_index: the mask token.
    """
    chance = _align(schedule.mask_probability(t), x0)
    return jnp.where(jax.random.uniform(key, x0.shape, chance.dtype) < chance, mask_index, x0)


def low_discrepancy_times(
    key: Key[Array, ""], batch: int, smallest: float = SMALLEST_TRAINING_TIME
) -> Float[Array, "batch"]:
    """One time per example, each uniform on [smallest, 1), together evenly spread: (u + i / batch) mod 1 with one u.

    Spreading the times takes most of the variance out of a batch's mean loss.
    """
    u = (jax.random.uniform(key) + jnp.arange(batch) / batch) % 1
    return smallest + (1 - smallest) * u


def token_losses(
    log_probs: Float[Array, "*batch length vocab"], x0: Int[Array, "*batch length"], t: Time, schedule: MaskedSchedule
) -> Float[Array, "*batch length"]:
    """The integrand of the bound (2) at each position, in nats; exactly zero at visible tokens.

    Args:
      log_probs: from `subs_log_probs`.
      x0: the clean tokens, none of which is the mask token.
      t: times in (0, 1], a scalar or of the leading shape of `x0`.
      schedule: gives the weight.
    """
    surprise = -jnp.take_along_axis(log_probs, x0[..., None], axis=-1)[..., 0]
    return _align(schedule.loss_weight(t), x0) * surprise


def masked_loss(
    key: Key[Array, ""],
    denoise: Denoiser,
    x0: Int[Array, "batch length"],
    schedule: MaskedSchedule,
    mask_index: int,
    cond: Any = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """An unbiased estimate of the bound (2) on the negative log-likelihood, one time per example.

    Times below `SMALLEST_TRAINING_TIME` are left out, which changes the bound by about 0.1 %.

    Args:
      key: consumed by the times and the masks.
      denoise: `(x_t, t, cond) -> logits`.
      x0: clean tokens, none of which is the mask token.
      schedule: gives sigma.
      mask_index: the mask token.
      cond: handed to `denoise` as it is.

    Returns:
      Mean nats per token (divide by log 2 for bits), and what to log beside it: `masked_fraction`, and
      `masked_cross_entropy`, the unweighted mean nats per masked token.
    """
    time_key, mask_key = jax.random.split(key)
    t = low_discrepancy_times(time_key, x0.shape[0])
    x_t = q_mask(mask_key, x0, t, schedule, mask_index)
    log_probs = subs_log_probs(denoise(x_t, t, cond), x_t, mask_index)
    surprise = -jnp.take_along_axis(log_probs, x0[..., None], axis=-1)
    masks = jnp.sum(x_t == mask_index)
    aux = {
        "masked_fraction": masks / x0.size,
        "masked_cross_entropy": jnp.sum(surprise) / jnp.maximum(masks, 1),
    }
    return jnp.mean(token_losses(log_probs, x0, t, schedule)), aux


def masked_step_probs(
    log_probs: Float[Array, "*batch length vocab"],
    x_t: Int[Array, "*batch length"],
    t: Time,
    s: Time,
    schedule: MaskedSchedule,
    mask_index: int,
) -> Float[Array, "*batch length vocab"]:
    """The law of each token of x_s given x_t, equation (3); rows sum to one, those of visible tokens are point masses.

    Args:
      log_probs: from `subs_log_probs`.
      x_t: the tokens `log_probs` was computed at.
      t: time of `x_t`, a scalar or of the leading shape of `x_t`.
      s: the earlier time, 0 <= s <= t.
      schedule: gives the probability c of a mask.
      mask_index: the mask token.

    Raises:
      ValueError: if `mask_index` is outside [0, vocab).
    """
    _check_mask_index(mask_index, log_probs.shape[-1])
    stay = _align(_stay_probability(schedule, t, s), x_t)[..., None]
    masked = (x_t == mask_index)[..., None]
    tokens = jnp.arange(log_probs.shape[-1])
    moved = (1 - stay) * jnp.exp(log_probs) + stay * (tokens == mask_index)
    return jnp.where(masked, moved, tokens == x_t[..., None]).astype(log_probs.dtype)


def masked_step(
    key: Key[Array, ""],
    log_probs: Float[Array, "*batch length vocab"],
    x_t: Int[Array, "*batch length"],
    t: Time,
    s: Time,
    schedule: MaskedSchedule,
    mask_index: int,
) -> Int[Array, "*batch length"]:
    """Draws x_s from the law of `masked_step_probs`; arguments as there.

    Which masks move and what they become are drawn apart. One draw over the whole row would compare a mask's probability
    near 1 with the tokens' tiny ones through float32 Gumbel noise, whose upper tail is cut: rare tokens would never come.
    """
    move_key, token_key = jax.random.split(key)
    stay = _align(_stay_probability(schedule, t, s), x_t)
    moves = (x_t == mask_index) & (jax.random.uniform(move_key, x_t.shape, stay.dtype) >= stay)
    return jnp.where(moves, _draw(token_key, log_probs, x_t.dtype), x_t)


def draw_clean(
    key: Key[Array, ""], log_probs: Float[Array, "*batch length vocab"], num_draws: int
) -> Int[Array, "draws *batch length"]:
    """Draws whole clean sequences x_0 ~ prod_l p(x_0^l | x_t); visible tokens are copied.

    The draws come one after the other, so memory is that of `log_probs` and not `num_draws` times that.

    Raises:
      ValueError: if `num_draws` is below 1.
    """
    if num_draws < 1:
        raise ValueError(f"num_draws must be at least 1, got {num_draws}")
    return jax.lax.map(lambda key: _draw(key, log_probs, jnp.int32), jax.random.split(key, num_draws))


def masked_sample(
    key: Key[Array, ""],
    denoise: Denoiser,
    schedule: MaskedSchedule,
    shape: tuple[int, int],
    num_steps: int,
    mask_index: int,
    cond: Any = None,
    prefix: Int[Array, "..."] | None = None,
) -> Int[Array, "batch length"]:
    """Generates sequences from nothing but masks in `num_steps` steps of equation (3) on an even grid of times.

    Masks that are left after the last step (at t = 1e-5) are drawn in one more pass, so none comes out.

    Args:
      key: consumed.
      denoise: `(x_t, t, cond) -> logits`; called `num_steps` times, and once more if a mask is left.
      schedule: gives the probability of a mask.
      shape: (batch, length).
      num_steps: at least 1.
      mask_index: the mask token.
      cond: handed to `denoise` as it is.
      prefix: tokens to begin with, (p,) for all sequences or (batch, p), p <= length. They are kept, except for masks
        among them, which are filled in: a prefix of full length is a template.

    Raises:
      ValueError: if `shape` is not (batch, length), `num_steps` is below 1, or `prefix` does not fit `shape`.
    """
    start = _start(shape, num_steps, mask_index, prefix)

    def body(x_t, step_inputs):
        step_key, t, s = step_inputs
        log_probs = _predict(denoise, x_t, t, cond, mask_index)
        return masked_step(step_key, log_probs, x_t, t, s, schedule, mask_index), None

    keys, final_key, times = _keys_and_times(key, num_steps)
    x_t, _ = jax.lax.scan(body, start, (keys, times[:-1], times[1:]))

    def fill(x_t):
        return _draw(final_key, _predict(denoise, x_t, times[-1], cond, mask_index), x_t.dtype)

    return jax.lax.cond(jnp.any(x_t == mask_index), fill, lambda x_t: x_t, x_t)


class CachedInfo(NamedTuple):
    """What `masked_sample_cached` saved."""

    network_calls: Int[Array, ""]  # without the cache: num_steps, or one more


def masked_sample_cached(
    key: Key[Array, ""],
    denoise: Denoiser,
    schedule: MaskedSchedule,
    shape: tuple[int, int],
    num_steps: int,
    mask_index: int,
    cond: Any = None,
    prefix: Int[Array, "..."] | None = None,
) -> tuple[Int[Array, "batch length"], CachedInfo]:
    """`masked_sample` for a denoiser that ignores t: the network runs only after a step that changed some token.

    The result is that of `masked_sample` with the same key. A batch of B sequences of length L needs at most B L + 1
    calls, so this pays when `num_steps` is larger; under `vmap` both branches run and it saves nothing. If `denoise`
    does depend on t, its answers are those of an earlier time.

    Args and errors are those of `masked_sample`.
    """
    start = _start(shape, num_steps, mask_index, prefix)

    def refresh(x_t, t, log_probs, stale):
        return jax.lax.cond(stale, lambda: _predict(denoise, x_t, t, cond, mask_index), lambda: log_probs)

    def body(carry, step_inputs):
        x_t, log_probs, stale, calls = carry
        step_key, t, s = step_inputs
        log_probs = refresh(x_t, t, log_probs, stale)
        x_s = masked_step(step_key, log_probs, x_t, t, s, schedule, mask_index)
        return (x_s, log_probs, jnp.any(x_s != x_t), calls + stale), None

    keys, final_key, times = _keys_and_times(key, num_steps)
    blank = jax.eval_shape(lambda x_t: _predict(denoise, x_t, times[0], cond, mask_index), start)
    carry = (start, jnp.zeros(blank.shape, blank.dtype), jnp.array(True), jnp.zeros((), jnp.int32))
    (x_t, log_probs, stale, calls), _ = jax.lax.scan(body, carry, (keys, times[:-1], times[1:]))

    left = jnp.any(x_t == mask_index)
    log_probs = refresh(x_t, times[-1], log_probs, stale & left)
    x_0 = jnp.where(x_t == mask_index, _draw(final_key, log_probs, x_t.dtype), x_t)
    return x_0, CachedInfo(calls + (stale & left))


def _stay_probability(schedule: MaskedSchedule, t: Time, s: Time) -> Float[Array, "..."]:
    """c(s) / c(t), and 1 where nothing is masked at t."""
    at_t, at_s = schedule.mask_probability(t), schedule.mask_probability(s)
    return jnp.where(at_t > 0, at_s / jnp.where(at_t > 0, at_t, 1), 1.0)


def _draw(key: Key[Array, ""], log_probs: Float[Array, "*batch length vocab"], dtype: Any) -> Int[Array, "*batch length"]:
    return jax.random.categorical(key, log_probs).astype(dtype)


def _predict(denoise, x_t, t, cond, mask_index):
    return subs_log_probs(denoise(x_t, jnp.full(x_t.shape[:1], t), cond), x_t, mask_index)


def _keys_and_times(key, num_steps):
    step_key, final_key = jax.random.split(key)
    return jax.random.split(step_key, num_steps), final_key, jnp.linspace(1.0, SMALLEST_SAMPLING_TIME, num_steps + 1)


def _start(shape, num_steps, mask_index, prefix) -> Int[Array, "batch length"]:
    if len(shape) != 2:
        raise ValueError(f"shape must be (batch, length), got {shape}")
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    start = jnp.full(shape, mask_index, jnp.int32)
    if prefix is None:
        return start
    fits = prefix.ndim in (1, 2) and prefix.shape[:-1] in ((), shape[:1]) and prefix.shape[-1] <= shape[1]
    if not fits:
        raise ValueError(f"prefix must be (p,) or (batch, p) with p <= length for shape {shape}, got {prefix.shape}")
    return start.at[:, : prefix.shape[-1]].set(prefix.astype(jnp.int32))


def _align(per_example: Float[Array, "..."], x: Int[Array, "..."]) -> Float[Array, "..."]:
    """Appends axes to a scalar or to an array of `x`'s leading shape, so that it broadcasts against `x`."""
    if per_example.shape != x.shape[: per_example.ndim]:
        raise ValueError(f"t must be a scalar or of a leading shape of the tokens {x.shape}, got {per_example.shape}")
    return per_example.reshape(per_example.shape + (1,) * (x.ndim - per_example.ndim))


def _check_mask_index(mask_index: int, vocab: int) -> None:
    if not 0 <= mask_index < vocab:
        raise ValueError(f"mask_index must be in [0, {vocab}), the size of the vocabulary, got {mask_index}")
