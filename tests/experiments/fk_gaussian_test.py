import jax
import jax.numpy as jnp
import numpy as np

from experiments import fk_gaussian
from jaxml25.diffusion import samplers, schedules


def test_the_law_found_by_probing_is_that_of_the_samples():
    schedule = schedules.make_schedule("scaled_linear")
    grid = schedules.make_grid(schedule, 10, previous="next")
    model = fk_gaussian.Model(schedule, grid, 0.3, 0.6)
    mean, variance = model.law(samplers.ddpm())
    keys = jax.random.split(jax.random.key(0))
    noise = jax.random.normal(keys[0], (10, 40_000, 1))
    x = jax.random.normal(keys[1], (40_000, 1))
    for i in range(10):
        row = jax.tree.map(lambda leaf, i=i: leaf[i], grid)
        x, _ = samplers.ddpm()(x, model.denoise(x, jnp.full(40_000, row.t)), row, noise[i])
    assert abs(x.mean() - mean) < 4 * (variance / 40_000) ** 0.5
    assert abs(x.var() / variance - 1) < 4 * (2 / 40_000) ** 0.5


def test_the_tilted_law_agrees_with_numerical_integration():
    tilt = fk_gaussian.tilt(mean=0.3, variance=0.5, lam=2.0, a=1.7)
    x = np.linspace(-6, 8, 20_001)
    density = np.exp(-((x - 0.3) ** 2) / (2 * 0.5)) / np.sqrt(2 * np.pi * 0.5) * np.exp(-2.0 * (x - 1.7) ** 2 / 2)
    np.testing.assert_allclose(np.log(np.trapezoid(density, x)), tilt.log_z, rtol=1e-6)
    np.testing.assert_allclose(np.trapezoid(x * density, x) / np.trapezoid(density, x), tilt.mean, rtol=1e-6)
