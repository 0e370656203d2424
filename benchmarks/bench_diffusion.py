"""FK steering, samplers and resampling beside their peers, on the same work in one run.

    make bench        (or: python benchmarks/bench_diffusion.py, with JAXML25_PEER_PYTHON naming the peers' interpreter)

- steering: 16 particles of 32x32 vectors, a two-layer perceptron, 100 DDIM steps with eta 1, the running maximum as potential,
  scored every 5 steps; against a plain PyTorch loop over the same weights.
- sampling: 50 DDIM steps of a two-level UNet, batch 16, against `diffusers`' scheduler driving the same weights in PyTorch; and
  with the identity as network, which leaves the scheduler's own cost.
- resampling: 4096 particles, every scheme, against the `particles` library.
"""

import os
import tempfile

import _peer
import jax
import jax.numpy as jnp
import numpy as np

from jaxml25.diffusion import fk_steering as fk
from jaxml25.diffusion import networks, samplers, schedules, trajectories

_DIM, _HIDDEN = 1024, 256
_SCHEMES = ("multinomial", "systematic", "stratified", "residual", "ssp")


def main():
    peer = _peer.Peer("torch_diffusion.py")
    unet = networks.UNet2D(channels=(32, 64))
    arrays = make_arrays(unet)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "arrays.npz")
        np.savez(file, **arrays)
        about = peer.ask("load", file=file, threads=os.cpu_count())
        rows = {"steering": steering(peer, arrays), **sampling(peer, unet, arrays, folder), **resampling(peer)}
    peer.close()
    _peer.write("diffusion", rows, jax=jax.__version__, device=str(jax.devices()[0]), cpus=os.cpu_count(), **about)


def make_arrays(unet: networks.UNet2D) -> dict[str, np.ndarray]:
    """Weights and inputs that both sides use; the UNet's zero layers are filled, or it would return zeros."""
    rng = np.random.default_rng(0)
    params = unet.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)), jnp.zeros(1))["params"]
    leaves = {
        jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    filled = {f"unet/{name}": np.asarray(leaf) + 0.02 * rng.normal(size=leaf.shape) for name, leaf in leaves.items()}
    mlp = {
        "mlp/w1": rng.normal(size=(_DIM + 1, _HIDDEN)) / _DIM**0.5,
        "mlp/b1": np.zeros(_HIDDEN),
        "mlp/w2": rng.normal(size=(_HIDDEN, _DIM)) / _HIDDEN**0.5,
        "mlp/b2": np.zeros(_DIM),
        "target": rng.normal(size=_DIM),
    }
    inputs = {"unet_x": rng.normal(size=(16, 3, 16, 16)), "unet_t": np.full(16, 500.0)}
    return {name: value.astype(np.float32) for name, value in {**filled, **mlp, **inputs}.items()}


def steering(peer: _peer.Peer, arrays: dict[str, np.ndarray]) -> dict:
    w1, b1, w2, b2, target = (jnp.asarray(arrays[name]) for name in ("mlp/w1", "mlp/b1", "mlp/w2", "mlp/b2", "target"))

    def denoise(x, t, cond):
        return jax.nn.silu(jnp.concatenate([x, t[:, None] / 1000], axis=1) @ w1 + b1) @ w2 + b2

    grid = schedules.make_grid(schedules.make_schedule("scaled_linear"), 100)
    kernel = fk.from_sampler(samplers.ddim(1.0), denoise, grid, (_DIM,))
    config = fk.Config("max", lam=1.0, resample="multinomial", every=5, start=0, stop=98, ess_threshold=None)
    run = jax.jit(lambda key: fk.run(key, kernel, lambda x, info: -jnp.mean((x - target) ** 2, axis=1), 16, config).x)
    ours = lambda: jax.block_until_ready(run(jax.random.key(0)))
    theirs = lambda: peer.ask("fk", particles=16, steps=100, every=5, lam=1.0)["seconds"]
    return _peer.side_by_side(ours, theirs, rounds=15)


def sampling(peer: _peer.Peer, unet: networks.UNet2D, arrays: dict[str, np.ndarray], folder: str) -> dict[str, dict]:
    params = {}
    for name, value in arrays.items():
        if name.startswith("unet/"):
            *parents, leaf = name.split("/")[1:]
            branch = params
            for part in parents:
                branch = branch.setdefault(part, {})
            branch[leaf] = jnp.asarray(value)
    x = jnp.moveaxis(jnp.asarray(arrays["unet_x"]), 1, -1)
    network = lambda x, t, cond: unet.apply({"params": params}, x, t)
    agreement = os.path.join(folder, "out.npz")
    peer.ask("unet_output", file=agreement)
    expected = np.moveaxis(np.load(agreement)["out"], 1, -1)
    difference = float(np.abs(np.asarray(network(x, jnp.full(16, 500.0), None)) - expected).max())
    assert difference < 1e-3 * np.abs(expected).max(), f"the two UNets differ by {difference}"

    grid = schedules.make_grid(schedules.make_schedule("scaled_linear"), 50)
    with_unet = jax.jit(lambda x: trajectories.sample(samplers.ddim(0.0), network, grid, x, None))
    alone = jax.jit(lambda x: trajectories.sample(samplers.ddim(0.0), lambda x, t, cond: x, grid, x, None))
    noise = jax.random.normal(jax.random.key(0), (1, 64, 64, 4))
    return {
        "sampling_unet": {
            "largest_output_difference": difference,
            **_peer.side_by_side(
                lambda: jax.block_until_ready(with_unet(x)), lambda: peer.ask("ddim_unet", steps=50)["seconds"], rounds=5
            ),
        },
        "sampling_identity": _peer.side_by_side(
            lambda: jax.block_until_ready(alone(noise)), lambda: peer.ask("ddim_identity", steps=50)["seconds"], rounds=15
        ),
    }


def resampling(peer: _peer.Peer) -> dict[str, dict]:
    log_weights = jnp.log(jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(4096)), jnp.float32))
    rows = {}
    for scheme in _SCHEMES:
        draw = jax.jit(fk.resampling.get(scheme), static_argnums=2)
        ours = lambda draw=draw: jax.block_until_ready(draw(jax.random.key(0), log_weights, 4096))
        theirs = lambda scheme=scheme: peer.ask("resample", scheme=scheme, particles=4096, repeats=1)["seconds"]
        rows[f"resampling_{scheme}"] = _peer.side_by_side(ours, theirs, rounds=41)
    return rows


if __name__ == "__main__":
    main()
