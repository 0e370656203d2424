"""The same denoiser as a Linen module, an NNX module, an Equinox module and a plain dict gives the same samples."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxml25.diffusion import fk_steering as fk
from jaxml25.diffusion import samplers, schedules, trajectories

DIM, HIDDEN = 3, 8
GRID = schedules.make_grid(schedules.make_schedule("linear"), 5, previous="next")
WEIGHTS = {
    "in": {"kernel": np.linspace(-1, 1, (DIM + 1) * HIDDEN).reshape(DIM + 1, HIDDEN), "bias": np.full(HIDDEN, 0.1)},
    "out": {"kernel": np.linspace(-0.5, 0.7, HIDDEN * DIM).reshape(HIDDEN, DIM), "bias": np.zeros(DIM)},
}
PARAMS = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), WEIGHTS)


def features(x, t):
    return jnp.concatenate([x, t[:, None] / 1000], axis=-1)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, t):
        return nn.Dense(DIM, name="out")(nn.silu(nn.Dense(HIDDEN, name="in")(features(x, t))))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(DIM + 1, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, DIM, rngs=rngs)

    def __call__(self, x, t):
        return self.second(nnx.silu(self.first(features(x, t))))


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x, t):  # of one sample
        return self.second(jax.nn.silu(self.first(features(x[None], t[None])[0])))


def dict_apply(params, x, t):
    hidden = jax.nn.silu(features(x, t) @ params["in"]["kernel"] + params["in"]["bias"])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"]


def linen():
    return PARAMS, lambda params, x, t: LinenNet().apply({"params": params}, x, t)


def nnx_split():
    graph, state = nnx.split(NnxNet(nnx.Rngs(0)))
    nnx.replace_by_pure_dict(state, {"first": dict(PARAMS["in"]), "second": dict(PARAMS["out"])})
    return state, lambda state, x, t: nnx.merge(graph, state)(x, t)


def equinox():
    net = EquinoxNet(*(eqx.nn.Linear(*sizes, key=jax.random.key(0)) for sizes in ((DIM + 1, HIDDEN), (HIDDEN, DIM))))
    leaves = lambda net: (net.first.weight, net.first.bias, net.second.weight, net.second.bias)
    values = (PARAMS["in"]["kernel"].T, PARAMS["in"]["bias"], PARAMS["out"]["kernel"].T, PARAMS["out"]["bias"])
    params, static = eqx.partition(eqx.tree_at(leaves, net, values), eqx.is_array)
    return params, lambda params, x, t: jax.vmap(eqx.combine(params, static))(x, t)


def plain_dict():
    return PARAMS, dict_apply


def steer_and_sample(make):
    params, apply = make()

    @jax.jit
    def both(params, key):
        denoise = lambda x, t, cond: apply(params, x, t)
        kernel = fk.from_sampler(samplers.ddim(eta=1.0), denoise, GRID, (DIM,))
        config = fk.Config(every=1, start=1, stop=3, lam=2.0, ess_threshold=None)
        steered = fk.run(key, kernel, lambda x, info: -jnp.sum(x**2, axis=-1), 4, config)
        sampled = trajectories.sample(samplers.ddim(), denoise, GRID, jax.random.normal(key, (4, DIM)), None)
        return steered, sampled

    return both(params, jax.random.key(0))


@pytest.fixture(scope="module")
def expected():
    return steer_and_sample(plain_dict)


@pytest.mark.parametrize("make", [linen, nnx_split, equinox])
def test_any_kind_of_denoiser_gives_the_same_samples(make, expected):
    steered, sampled = steer_and_sample(make)
    np.testing.assert_allclose(sampled, expected[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(steered.ancestors, expected[0].ancestors)
    np.testing.assert_allclose(steered.x, expected[0].x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(steered.log_z, expected[0].log_z, rtol=1e-5)
    assert np.any(np.asarray(steered.ancestors[1]) != np.arange(4))
