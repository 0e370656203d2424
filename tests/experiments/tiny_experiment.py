"""The smallest experiment the launcher can run: a perceptron on generated data, with dropout so that keys matter."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxml25.data import pipeline
from jaxml25.training import claims, loop, mesh, optimisers, step, train_state

RULES = {".*hidden/kernel": (None, "model"), ".*out/kernel": ("model", None)}


def run(config, workdir):
    devices = mesh.make_mesh(config.mesh)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 8)).astype(np.float32)
    source = {"x": x, "y": np.sin(x.sum(axis=1, keepdims=True))}
    params = {
        "hidden": {"kernel": jnp.asarray(0.3 * rng.normal(size=(8, 32)), jnp.float32), "bias": jnp.zeros(32)},
        "out": {"kernel": jnp.asarray(0.3 * rng.normal(size=(32, 1)), jnp.float32)},
    }

    def loss(params, key, batch):
        hidden = jnp.tanh(batch["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        kept = jax.random.bernoulli(key, 0.9, hidden.shape)
        error = jnp.mean((jnp.where(kept, hidden, 0) @ params["out"]["kernel"] - batch["y"]) ** 2)
        return error * jnp.where(batch["x"][0, 0] == config.poison, jnp.nan, 1), {"kept": jnp.mean(kept)}

    optimiser = optimisers.make_optimiser(config.optimiser, config.steps)
    state = train_state.init(jax.random.key(config.seed), params, optimiser, ema=True)
    state = mesh.shard(state, RULES, devices)
    batches = pipeline.make_batches(source, batch_size=32, seed=config.seed)
    if config.fail_at:
        batches = _Poisoned(batches, config.fail_at, config.poison)
    state = loop.fit(
        workdir,
        "tiny",
        state,
        step.make_step(loss, optimiser, ema_decay=0.99, accumulate=config.accumulate),
        batches,
        num_steps=config.steps,
        log_every=config.log_every,
        checkpoint_every=config.checkpoint_every,
        mesh=devices,
    )
    final = float(jnp.mean(jnp.abs(state.params["hidden"]["bias"])))
    workdir.log({"bias": final})
    finding = claims.at_most("The bias stays small", paper=None, measured=final, bar=10.0)
    places = {path: str(leaf.sharding.spec) for path, leaf in _leaves(state)}
    return {"claims": [finding], "metrics": {"bias": final, "places": places}, "params": state.params}


def _leaves(state):
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state))
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


class _Poisoned:
    """Batches of which one makes the loss NaN."""

    def __init__(self, batches, fail_at, poison):
        self._batches, self._fail_at, self._poison, self._count = batches, fail_at, poison, 0

    def __iter__(self):
        return self

    def __next__(self):
        batch, self._count = next(self._batches), self._count + 1
        if self._count == self._fail_at:
            batch["x"][0, 0] = self._poison
        return batch

    def get_state(self):
        return self._batches.get_state()

    def set_state(self, state):
        self._batches.set_state(state)
