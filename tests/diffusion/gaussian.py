"""Data with a closed form, N(m, s2) in every coordinate, and the golden arrays: what the diffusion tests compare with."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxml25.diffusion import predictions, schedules, trajectories

_GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "diffusion-substrate"

# Steps are pytrees, so that one compilation serves every step of a kind.
sample = jax.jit(trajectories.sample, static_argnames=("denoise", "remat", "collect"))
step_once = jax.jit(lambda step, *args: step(*args))
step_each = jax.jit(lambda step, *args: jax.vmap(step)(*args))


@functools.cache
def golden(name):
    with np.load(_GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


def run(name, prefix, dtype):
    """One golden run: its arrays by their last name, floats cast to `dtype`."""
    arrays = {key.split("/")[1]: value for key, value in golden(name).items() if key.startswith(prefix + "/")}
    return {key: value.astype(dtype) if value.dtype.kind == "f" else value for key, value in arrays.items()}


def network(schedule, m, s2, prediction_type="epsilon"):
    """The exact VP network; `edm` is the exact denoiser of sigma space, told sigma."""

    def denoise(x, t, cond=None):
        if prediction_type == "edm":
            variance = schedules.expand(t, x) ** 2
            return (s2 * x + variance * m) / (s2 + variance)
        ab = schedules.expand(schedules.alpha_bar_at(schedule, t), x)
        eps = jnp.sqrt(1 - ab) * (x - jnp.sqrt(ab) * m) / (ab * s2 + 1 - ab)
        return predictions.convert(eps, x, ab, "epsilon", prediction_type)

    return denoise


def velocity(m, s2):
    """The exact flow network, E[eps - x_0 | x_s]."""

    def denoise(x, s, cond=None):
        s = schedules.expand(s, x)
        centred = (x - (1 - s) * m) / ((1 - s) ** 2 * s2 + s**2)
        return s * centred - (m + (1 - s) * s2 * centred)

    return denoise


def log_snr_levels(n, high=4.0, low=-4.0):
    """A schedule and a grid whose n + 1 levels are even in log(a / s), and whose t counts them."""
    ab = jax.nn.sigmoid(2 * jnp.linspace(high, low, n + 1))
    t = jnp.arange(n, 0, -1)
    return schedules.Schedule(ab), schedules.Grid(t, ab[t], ab[t - 1])


def law(step_fn, denoise, grid, mean_T, variance_T):
    """Mean and variance of what a sampler makes of N(mean_T, variance_T): exact, for with Gaussian data it is affine."""
    n = grid.t.shape[0]
    if not step_fn.stochastic:
        low, high = sample(step_fn, denoise, grid, mean_T + jnp.array([0.0, 1.0]), jnp.zeros((n, 2)))
        return low, (high - low) ** 2 * variance_T

    def x_0(x_T, noise):
        return trajectories.sample(step_fn, denoise, grid, x_T[None], noise[:, None])[0]

    mean, slopes = jax.jit(jax.value_and_grad(x_0, argnums=(0, 1)))(jnp.asarray(mean_T, float), jnp.zeros(n))
    return mean, slopes[0] ** 2 * variance_T + jnp.sum(slopes[1] ** 2)


def order(errors, counts):
    """Slope of -log error against log n."""
    return -np.polyfit(np.log(counts), np.log(np.abs(errors)), 1)[0]
