"""Training losses of denoisers: mean squared error at a random noise level.

With x_t = sqrt(ab_t) x_0 + sqrt(1 - ab_t) eps and t uniform on the schedule's levels,

    loss = E w(t) |denoise(x_t, t) - target|^2 / dim.

Weightings are stated for the error of x_0, W, so that one choice means the same for every prediction type; with
snr = ab / (1 - ab) and sigma^2 = 1 / snr, the prediction's own error gets w = W |d x_0 / d pred|^2:

    uniform: w = 1;    min_snr: W = min(snr, gamma);    edm: W = (sigma^2 + sigma_d^2) / (sigma sigma_d)^2.

References: J. Ho, A. Jain, P. Abbeel, "Denoising diffusion probabilistic models" (2006.11239); T. Hang et al., "Efficient
diffusion training via Min-SNR weighting strategy" (2303.09556); T. Karras et al., "Elucidating the design space of
diffusion-based generative models" (2206.00364); Y. Lipman et al., "Flow matching for generative modeling" (2210.02747);
P. Esser et al., "Scaling rectified flow transformers" (2403.03206, the logit-normal times).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key

from jaxml25.diffusion import checks, predictions
from jaxml25.diffusion.schedules import Scalar, Schedule, expand, q_sample, q_sample_flow, time_shift

WEIGHTINGS = ("uniform", "min_snr", "edm")
Denoise = Callable[..., Array]


def loss(
    denoise: Denoise,
    schedule: Schedule,
    key: Key[Array, ""],
    x0: Float[ArrayLike, "batch *dims"],
    cond: Any = None,
    weighting: str = "uniform",
    *,
    prediction_type: str = "epsilon",
    gamma: Scalar = 5.0,
    sigma_data: Scalar = 0.5,
    null_cond: Any = None,
    p_uncond: Scalar = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of the module's equation, one level and one noise per sample.

    Args:
      denoise: `(x, t, cond) -> pred` with the parameters to train closed over.
      schedule: its table may be traced.
      key: draws levels, noise, and which conditions are dropped.
      x0: data.
      cond: handed to the network.
      weighting: `uniform`, `min_snr` or `edm`.
      prediction_type: what the network predicts.
      gamma: the cap of `min_snr`.
      sigma_data: standard deviation of the data for `edm`.
      null_cond: with `p_uncond`, what replaces a dropped condition; may be a learned parameter. See `drop_cond`.
      p_uncond: probability of dropping a sample's condition, so that the network can be guided without a classifier.

    Returns:
      The loss, and scalars to log: `mse` (unweighted) and `weight` (the mean one).

    Raises:
      ValueError: for an unknown name, a p_uncond outside [0, 1] or without null_cond, or a schedule with zero terminal SNR
        for a network that predicts epsilon or a score.
    """
    checks.one_of("weighting", weighting, WEIGHTINGS)
    checks.one_of("prediction_type", prediction_type, predictions.PREDICTION_TYPES)
    predictions.check_terminal_snr(schedule.alphas_cumprod, prediction_type)
    cond = _maybe_drop(jax.random.fold_in(key, 2), cond, null_cond, p_uncond)
    t = jax.random.randint(jax.random.fold_in(key, 0), x0.shape[:1], 0, schedule.T)
    noise = jax.random.normal(jax.random.fold_in(key, 1), x0.shape, x0.dtype)
    ab = schedule.alphas_cumprod[t]
    x_t = q_sample(schedule, x0, t, noise)
    target = _target(x0, noise, ab, prediction_type)
    weight = weights(ab, weighting, prediction_type, gamma=gamma, sigma_data=sigma_data)
    return _weighted(denoise(x_t, t, cond), target, weight)


def flow_loss(
    denoise: Denoise,
    key: Key[Array, ""],
    x0: Float[ArrayLike, "batch *dims"],
    cond: Any = None,
    *,
    times: str = "uniform",
    shift: Scalar = 1.0,
    null_cond: Any = None,
    p_uncond: Scalar = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Flow matching: the error of u = eps - x_0 at x_s = (1 - s) x_0 + s eps.

    Args:
      denoise: `(x, s, cond) -> u` with s in [0, 1], one per sample.
      key: draws times, noise, and which conditions are dropped.
      x0: data.
      cond: handed to the network.
      times: `uniform` on [0, 1], or `logit_normal` (the sigmoid of a standard normal, fewer near the ends).
      shift: `schedules.time_shift` of the times.
      null_cond: see `loss`.
      p_uncond: see `loss`.

    Raises:
      ValueError: for an unknown name, or a p_uncond outside [0, 1] or without null_cond.
    """
    checks.one_of("times", times, ("uniform", "logit_normal"))
    cond = _maybe_drop(jax.random.fold_in(key, 2), cond, null_cond, p_uncond)
    draw = jax.random.uniform if times == "uniform" else jax.random.normal
    s = draw(jax.random.fold_in(key, 0), x0.shape[:1], x0.dtype)
    s = time_shift(s if times == "uniform" else jax.nn.sigmoid(s), shift)
    noise = jax.random.normal(jax.random.fold_in(key, 1), x0.shape, x0.dtype)
    return _weighted(denoise(q_sample_flow(x0, s, noise), s, cond), noise - x0, jnp.ones_like(s))


def weights(
    ab: Float[Array, "batch"],
    weighting: str,
    prediction_type: str = "epsilon",
    *,
    gamma: Scalar = 5.0,
    sigma_data: Scalar = 0.5,
) -> Float[Array, "batch"]:
    """The weight w of the prediction's squared error at level ab; see the module's docstring.

    Raises:
      ValueError: for an unknown weighting or prediction type.
    """
    checks.one_of("weighting", weighting, WEIGHTINGS)
    checks.one_of("prediction_type", prediction_type, predictions.PREDICTION_TYPES)
    if weighting == "uniform":
        return jnp.ones_like(ab)
    remaining = 1 - ab
    if weighting == "min_snr":
        # min(snr, gamma) times the variance of the noise: finite at both ends of the schedule.
        share = jnp.minimum(ab, gamma * remaining)
    else:
        share = (1 / sigma_data**2 + ab / remaining) * remaining
    # share = W (1 - ab), and what is left of |d x_0 / d pred|^2:
    if prediction_type == "epsilon":
        return share / ab
    if prediction_type == "v_prediction":
        return share
    if prediction_type == "score":
        return share * remaining / ab
    if prediction_type == "flow":
        return share / (jnp.sqrt(ab) + jnp.sqrt(remaining)) ** 2
    return share / remaining


def drop_cond(key: Key[Array, ""], cond: Any, null_cond: Any, p_uncond: Scalar) -> Any:
    """Replaces each sample's condition, all of its leaves at once, by the null condition with probability `p_uncond`.

    Args:
      key: consumed.
      cond: a tree of arrays with the batch axis first.
      null_cond: a tree of the same structure, its leaves with or without the batch axis.
      p_uncond: in [0, 1].
    """
    batch = jax.tree.leaves(cond)[0].shape[0]
    dropped = jax.random.bernoulli(key, p_uncond, (batch,))
    return jax.tree.map(lambda n, c: jnp.where(expand(dropped, c), jnp.asarray(n, c.dtype), c), null_cond, cond)


def _maybe_drop(key: Key[Array, ""], cond: Any, null_cond: Any, p_uncond: Scalar) -> Any:
    checks.between("p_uncond", p_uncond, 0, 1)
    if checks.is_concrete(p_uncond) and p_uncond == 0:
        return cond
    if null_cond is None or cond is None:
        raise ValueError(f"cond and null_cond must be given when p_uncond is not 0, got p_uncond {p_uncond}")
    return drop_cond(key, cond, null_cond, p_uncond)


def _target(x0: Array, noise: Array, ab: Array, prediction_type: str) -> Array:
    if prediction_type == "epsilon":
        return noise
    if prediction_type == "v_prediction":
        return (expand(jnp.sqrt(ab), x0) * noise - expand(jnp.sqrt(1 - ab), x0) * x0).astype(x0.dtype)
    if prediction_type == "score":
        return (-noise / expand(jnp.sqrt(1 - ab), x0)).astype(x0.dtype)
    return noise - x0 if prediction_type == "flow" else x0


def _weighted(pred: Array, target: Array, weight: Array) -> tuple[Array, dict[str, Array]]:
    if pred.shape != target.shape:
        raise ValueError(f"denoise must return shape {target.shape}, got {pred.shape}")
    errors = jnp.mean(jnp.square(pred - target), axis=tuple(range(1, pred.ndim)))
    return jnp.mean(weight * errors).astype(errors.dtype), {"mse": jnp.mean(errors), "weight": jnp.mean(weight)}
