"""Trains the small denoisers that the diffusion experiments steer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxml25.data import digits, pipeline, topics
from jaxml25.diffusion import losses, masked, networks, schedules
from jaxml25.training import loop, mesh, optimisers, step, train_state
from jaxml25.training.workdir import Workdir


class DigitsModel(NamedTuple):
    """A class-conditional denoiser of 64-pixel vectors; class `digits.NUM_CLASSES` stands for none."""

    schedule: schedules.Schedule
    denoise: Callable[..., Any]  # (params, x, t, label) -> epsilon
    params: Any


class TextModel(NamedTuple):
    """A masked diffusion model of characters."""

    schedule: masked.MaskedSchedule
    denoise: Callable[..., Any]  # (params, tokens, t, cond) -> logits
    params: Any


def train_digits(config: ConfigDict, seed: int, workdir: Workdir, devices: jax.sharding.Mesh) -> DigitsModel:
    """Epsilon-prediction on scikit-learn's digits; a fifth of the labels is dropped, so that the model can be guided."""
    schedule = schedules.make_schedule("linear")
    network = networks.MLPDenoiser(**config.network, num_classes=digits.NUM_CLASSES)
    images, labels = digits.arrays("train")
    source = {"x": digits.normalise(images).reshape(len(images), -1), "label": labels}

    def denoise(params, x, t, label):
        return network.apply({"params": params}, x, t, label)

    def loss(params, key, batch):
        return losses.loss(
            lambda *inputs: denoise(params, *inputs),
            schedule,
            key,
            batch["x"],
            batch["label"],
            null_cond=digits.NUM_CLASSES,
            p_uncond=config.train.p_uncond,
        )

    example = (jnp.zeros((1, 64)), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
    params = _train("digits", config, seed, workdir, devices, network, example, loss, source)
    return DigitsModel(schedule, denoise, params)


def train_text(config: ConfigDict, seed: int, workdir: Workdir, devices: jax.sharding.Mesh) -> TextModel:
    """Masked diffusion of characters on the documentation topics that come with Python."""
    schedule = masked.MaskedSchedule("loglinear")
    network = networks.DiT(**config.network, vocab=topics.VOCAB_SIZE + 1)
    windows = topics.windows("train", length=config.length, stride=config.train.stride)

    def denoise(params, tokens, t, cond=None):
        return network.apply({"params": params}, tokens, t, cond)

    def loss(params, key, batch):
        bound, aux = masked.masked_loss(key, lambda *inputs: denoise(params, *inputs), batch, schedule, topics.MASK_INDEX)
        return bound, aux | {"bits_per_character": bound / jnp.log(2.0)}

    example = (jnp.zeros((1, config.length), jnp.int32), jnp.zeros(1))
    params = _train("text", config, seed, workdir, devices, network, example, loss, windows)
    return TextModel(schedule, denoise, params)


def _train(
    name: str,
    config: ConfigDict,
    seed: int,
    workdir: Workdir,
    devices: jax.sharding.Mesh,
    network: nn.Module,
    example: tuple,
    loss: Callable,
    source: Any,
) -> Any:
    """Runs the loop, or takes up where a killed run left off; returns the averaged parameters."""
    key = jax.random.key(seed)
    params = network.init(jax.random.fold_in(key, 0), *example)["params"]
    # A shorter run, asked for on the command line, warms up in proportion.
    warmup_steps = min(config.optimiser.warmup_steps, config.train.steps // 10)
    optimiser = optimisers.make_optimiser({**config.optimiser, "warmup_steps": warmup_steps}, config.train.steps)
    state = train_state.init(jax.random.fold_in(key, 1), params, optimiser, ema=True)
    state = mesh.shard(state, {}, devices)
    batches = pipeline.make_batches(source, batch_size=config.train.batch_size, seed=seed)
    state = loop.fit(
        workdir,
        name,
        state,
        step.make_step(loss, optimiser, ema_decay=config.train.ema_decay),
        batches,
        num_steps=config.train.steps,
        log_every=config.train.log_every,
        checkpoint_every=config.train.checkpoint_every,
        mesh=devices,
    )
    return state.ema
