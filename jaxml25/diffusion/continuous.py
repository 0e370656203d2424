"""Diffusion in continuous time: the probability-flow ODE, its likelihood, and the reverse SDE, by diffrax.

The forward VP process dx = -beta/2 x dt + sqrt(beta) dw has marginals p_t. With their score, run backward from t = 1,

    ODE  dx = -beta(t)/2 [x + score(x, t)] dt                 (same marginals, no noise)              (1)
    SDE  dx = [-beta(t)/2 x - beta(t) score(x, t)] dt + sqrt(beta(t)) dw                              (2)

and by the instantaneous change of variables, along (1) from x_0 at t_0 to x_1 at 1,

    log p_{t_0}(x_0) = log N(x_1; 0, I) + integral of div(dx/dt) dt from t_0 to 1.                    (3)

References: Y. Song et al., "Score-based generative modeling through stochastic differential equations" (2011.13456); W.
Grathwohl et al., "FFJORD" (1810.01367, the trace estimator); P. Kidger, "On neural differential equations" (2202.02435).
"""

import math
from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import lineax
from jaxtyping import Array, Float, Key

from jaxml25.diffusion import checks, predictions
from jaxml25.diffusion.schedules import ContinuousVP, Scalar, safe_sqrt

Denoise = Callable[..., Array]
_LARGEST_EXACT = 64  # an exact trace costs one network call per dimension


def ode_sample(
    denoise: Denoise,
    schedule: ContinuousVP,
    x_T: Float[Array, "batch *dims"],
    cond: Any = None,
    *,
    prediction_type: str = "epsilon",
    t_end: Scalar = 1e-3,
    tolerance: Scalar = 1e-5,
    max_steps: int = 4096,
) -> Float[Array, "batch *dims"]:
    """Solves (1) from t = 1 to `t_end` by Tsit5 with adaptive steps, the batch in one solve.

    Differentiable in x_T, cond and whatever `denoise` closes over, in memory O(sqrt(max_steps)) states.

    Args:
      denoise: `(x, t, cond) -> pred` with t in (0, 1], one per sample.
      schedule: may be traced.
      x_T: standard normals.
      cond: handed to the network.
      prediction_type: what the network predicts.
      t_end: where to stop, in (0, 1); the score of clean data need not exist.
      tolerance: relative and absolute error of a step.
      max_steps: more are a run-time error.

    Raises:
      ValueError: for an unknown prediction type or t_end out of range.
    """
    velocity = _velocity(denoise, schedule, cond, prediction_type, t_end)
    return _solve(velocity, 1.0, t_end, x_T, tolerance, max_steps)


def log_likelihood(
    key: Key[Array, ""],
    denoise: Denoise,
    schedule: ContinuousVP,
    x0: Float[Array, "batch *dims"],
    cond: Any = None,
    *,
    trace: str = "hutchinson",
    probes: int = 1,
    prediction_type: str = "epsilon",
    t_start: Scalar = 1e-3,
    tolerance: Scalar = 1e-5,
    max_steps: int = 4096,
) -> Float[Array, "batch"]:
    """The log density (3) of each sample, in nats, under the marginal at `t_start`.

    It takes p_1 = N(0, I), which is off by O(sqrt(ab(1))); a network must treat the samples of a batch independently.

    Args:
      key: draws the probes; not used by the exact trace.
      denoise: as in `ode_sample`.
      schedule: may be traced.
      x0: points, read as lying at t_start.
      cond: handed to the network.
      trace: `hutchinson`, unbiased, z^T J z with Rademacher z held for the whole solve; `exact`, one derivative per
        dimension, for at most 64 of them (memory: dimensions times the batch).
      probes: how many z to average.
      prediction_type: what the network predicts.
      t_start: where the data lie, in (0, 1).
      tolerance: relative and absolute error of a step.
      max_steps: more are a run-time error.

    Raises:
      ValueError: for an unknown name, probes below 1, t_start out of range, or too many dimensions for `exact`.
    """
    checks.one_of("trace", trace, ("hutchinson", "exact"))
    if probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes}")
    dim = math.prod(x0.shape[1:])
    if trace == "exact" and dim > _LARGEST_EXACT:
        raise ValueError(f"trace 'exact' takes at most {_LARGEST_EXACT} dimensions, got {dim}")
    velocity = _velocity(denoise, schedule, cond, prediction_type, t_start)
    if trace == "exact":
        directions = jnp.eye(dim, dtype=x0.dtype).reshape(dim, 1, *x0.shape[1:])
        directions = jnp.broadcast_to(directions, (dim, *x0.shape))
    else:
        directions = jax.random.rademacher(key, (probes, *x0.shape), x0.dtype)
    share = 1.0 if trace == "exact" else 1.0 / probes

    def augmented(t, state):
        x, _ = state
        slope, jvp = jax.linearize(lambda x: velocity(t, x), x)
        products = jax.vmap(jvp)(directions) * directions
        return slope, share * _per_sample_sum(jnp.sum(products, axis=0))

    start = (x0, jnp.zeros(x0.shape[:1], x0.dtype))
    x_1, divergence = _solve(augmented, t_start, 1.0, start, tolerance, max_steps)
    return _per_sample_sum(jax.scipy.stats.norm.logpdf(x_1)) + divergence


def sde_sample(
    key: Key[Array, ""],
    denoise: Denoise,
    schedule: ContinuousVP,
    x_T: Float[Array, "batch *dims"],
    cond: Any = None,
    *,
    num_steps: int = 1000,
    prediction_type: str = "epsilon",
    t_end: Scalar = 1e-3,
) -> Float[Array, "batch *dims"]:
    """Solves (2) from t = 1 to `t_end` by Euler-Maruyama with equal steps on a virtual Brownian tree.

    The tree makes the path a function of the key alone: fewer or more steps follow the same one.

    Args:
      key: fixes the Brownian path.
      denoise: as in `ode_sample`.
      schedule: may be traced.
      x_T: standard normals, independent of the key.
      cond: handed to the network.
      num_steps: number of steps.
      prediction_type: what the network predicts.
      t_end: where to stop, in (0, 1).

    Raises:
      ValueError: for an unknown prediction type, t_end out of range, or num_steps below 1.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    score = _score(denoise, schedule, cond, prediction_type, t_end)
    step = (1.0 - t_end) / num_steps
    path = diffrax.VirtualBrownianTree(t_end, 1.0, tol=step / 2, shape=jax.eval_shape(lambda: x_T), key=key)

    def drift(t, x, args):
        return -schedule.beta(t) * (0.5 * x + score(t, x))

    def diffusion(t, x, args):
        return lineax.DiagonalLinearOperator(jnp.full_like(x, safe_sqrt(schedule.beta(t))))

    solution = diffrax.diffeqsolve(
        diffrax.MultiTerm(diffrax.ODETerm(drift), diffrax.ControlTerm(diffusion, path)),
        diffrax.Euler(),
        1.0,
        t_end,
        None,
        x_T,
        stepsize_controller=diffrax.StepTo(jnp.linspace(1.0, t_end, num_steps + 1)),
        max_steps=num_steps,
    )
    return solution.ys[-1]


def _score(denoise: Denoise, schedule: ContinuousVP, cond: Any, prediction_type: str, t_end: Scalar) -> Callable:
    checks.one_of("prediction_type", prediction_type, predictions.PREDICTION_TYPES)
    if not 0 < t_end < 1:
        raise ValueError(f"the time of the data must be in (0, 1), got {t_end}")

    def score(t, x):
        t = jnp.asarray(t, x.dtype)
        pred = denoise(x, jnp.broadcast_to(t, x.shape[:1]), cond)
        return predictions.to_score(pred, x, schedule.alpha_bar(t), prediction_type)

    return score


def _velocity(denoise: Denoise, schedule: ContinuousVP, cond: Any, prediction_type: str, t_end: Scalar) -> Callable:
    score = _score(denoise, schedule, cond, prediction_type, t_end)
    return lambda t, x: (-0.5 * schedule.beta(t) * (x + score(t, x))).astype(x.dtype)


def _solve(field: Callable, t0: Scalar, t1: Scalar, y0: Any, tolerance: Scalar, max_steps: int) -> Any:
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: field(t, y)),
        diffrax.Tsit5(),
        t0,
        t1,
        None,
        y0,
        stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
        max_steps=max_steps,
    )
    return jax.tree.map(lambda y: y[-1], solution.ys)


def _per_sample_sum(x: Float[Array, "batch *dims"]) -> Float[Array, "batch"]:
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))
