"""The publication's image runs: a pretrained text-to-image model that you bring, steered by a reward of the decoded image.

`config.images.model` names a function, `"your_module:load"`, that returns an `ImageModel`: the denoiser with its parameters closed
over, one condition per prompt (say, text embeddings), a decoder from latents to images, and a reward of images. The reward may be
traced by JAX, or any Python function of NumPy arrays with `reward_host=True` (a model in another framework, a person).
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot
from ml_collections import ConfigDict

from jaxml25.diffusion import fk_steering as fk
from jaxml25.diffusion import guidance, samplers, schedules
from jaxml25.training import claims
from jaxml25.training.workdir import Workdir


class ImageModel(NamedTuple):
    """What the runs need of a model."""

    denoise: Callable[..., Any]  # (x, t, cond) -> prediction
    schedule: schedules.Schedule
    sample_shape: tuple[int, ...]  # of one latent
    prompts: Any  # pytree of conditions; leading axis: one entry per prompt
    null_cond: Any  # the condition of no prompt, without that axis
    reward: Callable[..., Any]  # (images, prompt's number) -> one number per image
    decode: Callable[..., Any] = lambda latents: latents
    reward_host: bool = False
    prediction_type: str = "epsilon"


def run(config: ConfigDict, seed: int, workdir: Workdir, devices: jax.sharding.Mesh) -> dict:
    """Best-of-n and every potential, for every number of particles and every prompt.

    Raises:
      ValueError: if `config.model` does not name a function.
    """
    model = load(config.model)
    num_prompts = jax.tree.leaves(model.prompts)[0].shape[0]
    methods = {"best of n": "bon", **{f"FK {name}": name for name in config.potentials}}
    cases = [(method, k) for method in methods for k in config.particles if method == "best of n" or k > 1]
    rows, shown = [], {}
    for method, k in workdir.progress(cases, "steering images"):
        step = _compiled(model, methods[method], k, config, devices)
        keys = jax.random.split(jax.random.key(seed), num_prompts)
        images, rewards, ancestors = zip(*(step(keys[i], i) for i in range(num_prompts)), strict=True)
        rewards = np.array(jax.device_get(rewards))
        shown[method, k] = np.asarray(images[0])
        error = float(rewards.std(ddof=1) / num_prompts**0.5) if num_prompts > 1 else 0.0
        row = {"method": method, "particles": k, "network_calls": k * config.steps, "reward": float(rewards.mean())}
        row |= {"reward_stderr": error, "unique_ancestors": float(np.mean(jax.device_get(ancestors)))}
        workdir.log(row, namespace="images")
        rows.append(row)
    workdir.figure("images", _draw(shown, rows))
    return {"claims": _claims(rows)}


def load(name: str) -> ImageModel:
    """Calls the function that `name` points at."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(
            f"config.images.model must be 'module:function', a function that returns an ImageModel, got {name!r}"
        )
    return getattr(importlib.import_module(module), function)()


def _compiled(model: ImageModel, potential: str, num_particles: int, config: ConfigDict, devices: jax.sharding.Mesh):
    """A jitted (key, prompt) -> (best image, its reward, surviving lines); particles are split over the mesh's data axis."""
    grid = schedules.make_grid(model.schedule, config.steps)
    guided = guidance.guided(model.denoise, model.null_cond, config.guidance)
    split = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("data"))
    divides = num_particles % devices.shape["data"] == 0
    options = fk.Config(
        potential,
        lam=config.lam,
        every=config.every,
        start=config.start,
        stop=config.stop,
        r_min=config.r_min,
        ess_threshold=0.5,
    )

    def steer(key, prompt):
        cond = jax.tree.map(lambda leaf: leaf[prompt], model.prompts)

        def denoise(x, t, _):
            x = jax.lax.with_sharding_constraint(x, split) if divides else x
            return guided(x, t, jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (x.shape[0], *leaf.shape)), cond))

        step = samplers.ddim(config.eta, model.prediction_type)
        microbatch = min(config.microbatch, num_particles) if config.microbatch else None
        kernel = fk.from_sampler(step, denoise, grid, model.sample_shape, microbatch=microbatch)
        reward = lambda x, info=None: model.reward(model.decode(x), prompt)
        if model.reward_host:
            reward = _on_host(model, prompt)
        result = fk.run(key, kernel, reward, num_particles, options)
        return model.decode(result.best[None])[0], jnp.max(result.rewards), result.unique_ancestors

    return jax.jit(steer)


def _on_host(model: ImageModel, prompt) -> Callable:
    """Decoded on the device, rewarded on the host."""

    def reward(x, info=None):
        call = functools.partial(np.asarray, dtype=np.float32)
        shape = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
        images = model.decode(x)
        return jax.pure_callback(lambda images, prompt: call(model.reward(images, int(prompt))), shape, images, prompt)

    return reward


def _claims(rows: list[dict]) -> list[claims.Claim]:
    by_case = {(row["method"], row["particles"]): row for row in rows}
    found = []
    for (method, k), row in by_case.items():
        if method != "best of n" and ("best of n", k) in by_case:
            other = by_case["best of n", k]
            found.append(
                claims.at_least(
                    f"Images: reward of {method} with {k} particles less that of the best of {k}",
                    paper=None,
                    measured=row["reward"] - other["reward"],
                    bar=0.0,
                    stderr=float(np.hypot(row["reward_stderr"], other["reward_stderr"])),
                )
            )
    return found


def _draw(shown: dict, rows: list[dict]) -> pyplot.Figure:
    figure, axes = pyplot.subplots(
        1, len(shown) + 1, figsize=(2.2 * len(shown) + 4, 2.6), width_ratios=[1] * len(shown) + [2]
    )
    for axis, ((method, k), image) in zip(axes, shown.items(), strict=False):
        low, high = image.min(), image.max()
        axis.imshow((image - low) / max(high - low, 1e-9), cmap="gray")
        axis.set(xticks=[], yticks=[])
        axis.set_title(f"{method}, K = {k}", fontsize=8)
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        calls, values = [row["network_calls"] for row in mine], [row["reward"] for row in mine]
        axes[-1].errorbar(calls, values, [row["reward_stderr"] for row in mine], marker="o", label=method)
    axes[-1].set(xlabel="network calls per image", ylabel="reward", xscale="log")
    axes[-1].legend(fontsize=7)
    figure.tight_layout()
    return figure
