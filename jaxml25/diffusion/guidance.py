"""Guidance: turning one denoiser into another that aims at a condition or a reward.

Classifier-free, with w = 1 the conditional model, w = 0 the unconditional one and w > 1 beyond the condition (some papers
write 1 + w for this w):

    pred = pred_u + w (pred_c - pred_u).                                                              (1)

By a reward f(x, t), a classifier's log probability say, of strength s:

    eps = eps - s sqrt(1 - ab_t) grad_x f(x, t),  i.e.  score = score + s grad_x f.                   (2)

References: J. Ho, T. Salimans, "Classifier-free diffusion guidance" (2207.12598); P. Dhariwal, A. Nichol, "Diffusion models
beat GANs on image synthesis" (2105.05233); S. Lin et al., "Common diffusion noise schedules and sample steps are flawed"
(2305.08891, the rescaling); T. Kynkäänniemi et al., "Applying guidance in a limited interval" (2404.07724).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from jaxml25.diffusion import checks, predictions
from jaxml25.diffusion.schedules import Scalar, Schedule, alpha_bar_at, expand, safe_sqrt

Denoise = Callable[..., Array]


def guided(
    denoise: Denoise,
    null_cond: Any,
    scale: Real[ArrayLike, "..."],
    *,
    rescale: Scalar = 0.0,
    interval: tuple[Scalar, Scalar] | None = None,
) -> Denoise:
    """Wraps a conditional denoiser with classifier-free guidance, equation (1), in one call on a doubled batch.

    Args:
      denoise: `(x, t, cond) -> pred`, of any prediction type.
      null_cond: what stands for no condition: a tree like cond, with or without its batch axis.
      scale: w, one or one per sample; may be traced.
      rescale: phi in [0, 1]: how much of each sample's standard deviation is set back to that of the conditional
        prediction, which keeps large w from over-exposing.
      interval: (t_lo, t_hi), inclusive; outside of it w is 1. The network is still called on the doubled batch there.

    Returns:
      `(x, t, cond) -> pred`; cond's leaves have the batch axis first.

    Raises:
      ValueError: if rescale is known to be outside [0, 1]; by the result, if it is called without a cond.
    """
    checks.between("rescale", rescale, 0, 1)

    def denoise_guided(x: Array, t: Array, cond: Any) -> Array:
        if cond is None:
            raise ValueError("cond must be given to a guided denoiser, got None")
        both = jax.tree.map(lambda n, c: jnp.concatenate([_like(n, c), jnp.asarray(c)]), null_cond, cond)
        pred = denoise(jnp.concatenate([x, x]), jnp.concatenate([t, t]), both)
        without, given = jnp.split(pred, 2)
        w = jnp.asarray(scale)
        if interval is not None:
            w = jnp.where((t >= interval[0]) & (t <= interval[1]), w, 1)
        guided_pred = without + expand(w, pred) * (given - without)
        if not (checks.is_concrete(rescale) and rescale == 0):
            guided_pred = _rescaled(guided_pred, given, rescale)
        return guided_pred.astype(pred.dtype)

    return denoise_guided


def _like(null: ArrayLike, cond: ArrayLike) -> Array:
    cond = jnp.asarray(cond)
    return jnp.broadcast_to(jnp.asarray(null, cond.dtype), cond.shape)


def _rescaled(pred: Array, given: Array, phi: Scalar) -> Array:
    deviation, wanted = _deviation(pred), _deviation(given)
    factor = wanted / jnp.where(deviation > 0, deviation, 1)
    return pred * (phi * factor + 1 - phi)


def _deviation(x: Array) -> Array:
    return safe_sqrt(jnp.var(x, axis=tuple(range(1, x.ndim)), keepdims=True))


def reward_guided(
    denoise: Denoise,
    schedule: Schedule,
    reward: Callable[[Array, Array], Float[Array, "batch"]],
    scale: Real[ArrayLike, "..."],
    *,
    prediction_type: str = "epsilon",
) -> Denoise:
    """Wraps a denoiser with the gradient of a reward, equation (2).

    Args:
      denoise: `(x, t, cond) -> pred`.
      schedule: what its levels t mean.
      reward: f(x, t), one number per sample that depends on that sample only.
      scale: s, one or one per sample; may be traced.
      prediction_type: what the network predicts; the result predicts the same.

    Raises:
      ValueError: for an unknown prediction type.
    """
    checks.one_of("prediction_type", prediction_type, predictions.PREDICTION_TYPES)

    def denoise_guided(x: Array, t: Array, cond: Any = None) -> Array:
        gradient = jax.grad(lambda x: jnp.sum(reward(x, t)))(x)
        ab = alpha_bar_at(schedule, t)
        eps = predictions.to_eps(denoise(x, t, cond), x, ab, prediction_type)
        eps = eps - expand(jnp.asarray(scale), x) * expand(jnp.sqrt(1 - ab), x) * gradient
        return predictions.convert(eps.astype(x.dtype), x, ab, "epsilon", prediction_type)

    return denoise_guided
