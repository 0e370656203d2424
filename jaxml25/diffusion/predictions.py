"""What a network predicts, and how to read one prediction as another.

At x = a x_0 + s eps (VP: a = sqrt(ab), s = sqrt(1 - ab)) each of these determines the others:

    epsilon: eps;  sample: x_0;  v_prediction: v = a eps - s x_0;  score: -eps / s;  flow: u = eps - x_0;
    x_0 = (x - s eps) / a = a x - s v = (x - s u) / (a + s),    eps = a v + s x = (x - a x_0) / s.

`edm` names a network that already returns x_0 and is called in sigma space without scaling its input.

References: T. Salimans, J. Ho, "Progressive distillation for fast sampling of diffusion models" (2202.00512, v); Y. Lipman
et al., "Flow matching for generative modeling" (2210.02747, u); C. Saharia et al., "Photorealistic text-to-image diffusion
models with deep language understanding" (2205.11487, dynamic thresholding).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from jaxml25.diffusion import checks
from jaxml25.diffusion.schedules import Grid, Scalar, SigmaGrid, Values, expand

PREDICTION_TYPES = ("epsilon", "sample", "v_prediction", "score", "flow", "edm")
Level = Real[ArrayLike, "..."]  # one number, or one per sample along the leading axis of x


def to_x0(pred: Values, x: Values, ab: Level, prediction_type: str) -> Array:
    """The clean sample that `pred` stands for.

    Args:
      pred: the network's output at x.
      x: VP state, same shape.
      ab: its level, one number or one per sample.
      prediction_type: one of `PREDICTION_TYPES`.

    Raises:
      ValueError: for an unknown type, or if ab is known to be 0 for a type that has no x_0 there (epsilon, score).
    """
    _check(ab, prediction_type)
    return _x0(pred, x, *_vp(ab, x), prediction_type).astype(x.dtype)


def to_eps(pred: Values, x: Values, ab: Level, prediction_type: str) -> Array:
    """The noise that `pred` stands for; arguments and errors as `to_x0`. Where ab is 1 only epsilon and v have one."""
    _check_type(prediction_type)
    return _eps(pred, x, *_vp(ab, x), prediction_type).astype(x.dtype)


def to_v(pred: Values, x: Values, ab: Level, prediction_type: str) -> Array:
    """The velocity v = sqrt(ab) eps - sqrt(1 - ab) x_0 that `pred` stands for; arguments and errors as `to_x0`."""
    return convert(pred, x, ab, prediction_type, "v_prediction")


def to_score(pred: Values, x: Values, ab: Level, prediction_type: str) -> Array:
    """The score -eps / sqrt(1 - ab) that `pred` stands for; arguments and errors as `to_x0`."""
    return convert(pred, x, ab, prediction_type, "score")


def to_flow(pred: Values, x: Values, ab: Level, prediction_type: str) -> Array:
    """The flow velocity eps - x_0 that `pred` stands for; arguments and errors as `to_x0`."""
    return convert(pred, x, ab, prediction_type, "flow")


def convert(pred: Values, x: Values, ab: Level, source: str, target: str) -> Array:
    """Reads a prediction of type `source` as one of type `target`; arguments and errors as `to_x0`."""
    _check_type(source)
    _check_type(target)
    if source == target:
        return jnp.asarray(pred)
    a, s = _vp(ab, x)
    if target in ("epsilon", "score"):
        eps = _eps(pred, x, a, s, source)
        return (eps if target == "epsilon" else -eps / s).astype(x.dtype)
    _check(ab, source)
    x0 = _x0(pred, x, a, s, source)
    if target in ("sample", "edm"):
        return x0.astype(x.dtype)
    eps = _eps(pred, x, a, s, source)
    return (a * eps - s * x0 if target == "v_prediction" else eps - x0).astype(x.dtype)


def _vp(ab: Level, x: Values) -> tuple[Array, Array]:
    ab = expand(ab, x)
    return jnp.sqrt(ab), jnp.sqrt(1 - ab)


def _x0(pred: Values, x: Values, a: Array, s: Array, prediction_type: str) -> Values:
    if prediction_type == "epsilon":
        return (x - s * pred) / a
    if prediction_type == "v_prediction":
        return a * x - s * pred
    if prediction_type == "score":
        return (x + s * s * pred) / a
    if prediction_type == "flow":
        return (x - s * pred) / (a + s)
    return pred


def _eps(pred: Values, x: Values, a: Array, s: Array, prediction_type: str) -> Values:
    if prediction_type == "epsilon":
        return pred
    if prediction_type == "v_prediction":
        return a * pred + s * x
    if prediction_type == "score":
        return -s * pred
    if prediction_type == "flow":
        return (x + a * pred) / (a + s)
    return (x - a * pred) / s


def _check_type(prediction_type: str) -> None:
    checks.one_of("prediction_type", prediction_type, PREDICTION_TYPES)


def _check(ab: Level, prediction_type: str) -> None:
    _check_type(prediction_type)
    check_terminal_snr(ab, prediction_type)


def check_terminal_snr(ab: Level, prediction_type: str) -> None:
    """Checks that x_0 can be read from a prediction at these levels; traced levels pass.

    Raises:
      ValueError: if some ab is 0 and the prediction is epsilon or score.
    """
    if prediction_type in ("epsilon", "score") and checks.is_concrete(ab) and np.any(np.asarray(ab) <= 0):
        raise ValueError(
            f"prediction_type {prediction_type!r} cannot be used where alphas_cumprod is 0 (zero terminal SNR): x_0 would "
            "be divided by zero; use 'v_prediction' or 'sample'"
        )


def scale_input(x: Values, row: Grid | SigmaGrid, prediction_type: str) -> Values:
    """What the network is fed at state x of a grid's row.

    In sigma space a network trained on a VP schedule sees x / sqrt(1 + sigma^2), and an `edm` one sees x.
    """
    if not isinstance(row, SigmaGrid) or prediction_type == "edm":
        return x
    return (x / jnp.sqrt(1 + row.sigma**2)).astype(x.dtype)


def read(pred: Values, x: Values, row: Grid | SigmaGrid, prediction_type: str) -> tuple[Values, Values]:
    """Reads the network's output at state x of a grid's row as (x_0, eps), in the wider of the two dtypes."""
    if not isinstance(row, SigmaGrid):
        a, s = jnp.sqrt(row.ab), jnp.sqrt(1 - row.ab)
        return _x0(pred, x, a, s, prediction_type), _eps(pred, x, a, s, prediction_type)
    if prediction_type == "edm":
        return pred, (x - pred) / row.sigma
    # Not by way of ab = 1 / (1 + sigma^2): in float32, 1 - ab loses all its digits at small sigma.
    a = 1 / jnp.sqrt(1 + row.sigma**2)
    x, s = x * a, row.sigma * a
    return _x0(pred, x, a, s, prediction_type), _eps(pred, x, a, s, prediction_type)


def dynamic_threshold(
    x0: Float[ArrayLike, "batch *dims"], quantile: Scalar = 0.995, max_value: Scalar = 1.0
) -> Float[Array, "batch *dims"]:
    """Keeps each sample in [-1, 1] by its own scale: s = clip(quantile of |x0|, 1, max_value), x0 <- clip(x0, -s, s) / s."""
    magnitudes = jnp.abs(x0).reshape(x0.shape[0], -1)
    s = expand(jnp.clip(jnp.quantile(magnitudes, quantile, axis=1), 1.0, max_value), x0)
    return jnp.clip(x0, -s, s) / s


def clip_x0(x0: Values, clip: Any | Callable[[Array], Array] | None) -> Values:
    """Applies a sampler's `clip`: nothing for None, a range r for [-r, r], or any function of x_0."""
    if clip is None:
        return x0
    if callable(clip):
        return clip(x0)
    return jnp.clip(x0, -clip, clip)
