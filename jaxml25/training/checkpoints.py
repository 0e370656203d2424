"""Checkpoints of a training stage, written by Orbax and verified when they are read.

A checkpoint holds the train state (parameters, optimiser, average, key, step) and a small JSON record (state of the data
iterator, what was logged so far). Orbax writes it in the background under a temporary name and renames it when it is complete,
so a killed process leaves whole checkpoints only. What the disk did to them since is caught by a hash of the record and by a
fingerprint of the state: a weighted sum of the bits of every leaf, computed on the devices that hold it. A checkpoint that
cannot be read or does not match is moved aside, with a warning, and the one before it is taken.
"""

import functools
import hashlib
import json
import logging
import math
import pathlib
import re
import shutil
import sys
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import Array, UInt
from orbax.checkpoint import checkpoint_managers

from jaxml25.training.train_state import TrainState


class Restored(NamedTuple):
    """What a checkpoint held."""

    step: int
    state: TrainState
    record: dict[str, Any]


class Checkpointer:
    """Saves and restores the checkpoints of one stage.

    Args:
      directory: folder of the stage; made if it is missing.
      keep: how many of the latest to keep, at least 1.
      best: name of a metric; the checkpoint where it was lowest is kept too. None for none.

    Raises:
      ValueError: if `keep` is below 1.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int = 3, best: str | None = None):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        _hush()
        self._directory = directory.absolute()
        self._best = best
        policies = [checkpoint_managers.LatestN(keep)]
        if best is not None:
            lowest = checkpoint_managers.BestN(
                get_metric_fn=lambda metrics: metrics[best], reverse=True, n=1, keep_checkpoints_without_metrics=False
            )
            policies.append(lowest)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            best_fn=(lambda metrics: metrics[best]) if best is not None else None,  # without it no metrics are stored
            best_mode="min",
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,  # what a killed process left half written
            create=True,
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, record: dict[str, Any], metrics: dict[str, Any] | None = None) -> None:
        """Starts writing a checkpoint; returns as soon as the state has been copied.

        Args:
          step: its number; one that exists is left alone.
          state: may be donated as soon as this returns.
          record: what JSON can hold; may be changed as soon as this returns. With several processes, the first one's is kept.
          metrics: with the metric named `best`, if there is one.

        Raises:
          ValueError: if `metrics` has no metric named `best`.
        """
        if self._best is not None and metrics is not None and self._best not in metrics:
            raise ValueError(f"best must be one of the metrics {', '.join(metrics)}, got {self._best!r}")
        if step in self._manager.all_steps():
            return
        plain = _without_key_types(state)
        record = {**record, "structure": _structure(plain), "fingerprint": int(_fingerprint(plain))}
        record = json.loads(json.dumps(record))  # a copy: it is written later, and the caller may have changed his by then
        record["hash"] = _hash(record)
        chosen = {self._best: metrics[self._best]} if self._best and metrics else None
        args = ocp.args.Composite(state=ocp.args.StandardSave(plain), record=ocp.args.JsonSave(record))
        self._manager.save(step, args=args, metrics=chosen)

    def restore(self, like: TrainState) -> Restored | None:
        """Reads the newest checkpoint that is sound, onto the devices and shardings of `like`; None if there is none.

        Raises:
          ValueError: if a sound checkpoint is of another structure or shape than `like`.
          OSError, MemoryError, jax.errors.JaxRuntimeError: where it is not the checkpoint's fault: a file that may not be
            read, or a device without the memory for it.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            restored = reason = None
            try:
                restored = self._restore(step, like)
            except _Mismatch as error:
                raise ValueError(f"the checkpoint {self._directory / str(step)} is of another model: {error}") from error
            except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
                raise  # the checkpoint may be sound; the machine is at fault
            except Exception as error:  # a damaged file surfaces as anything from KeyError to ValueError
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if _everywhere(restored is not None):
                return restored
            reason = reason or "another process cannot read it"
            warnings.warn(f"skipping the damaged checkpoint {self._directory / str(step)}: {reason[:200]}", stacklevel=2)
            self._set_aside(step)
        return None

    def wait(self) -> None:
        """Blocks until what was saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and lets go of the threads."""
        self._manager.close()

    def _restore(self, step: int, like: TrainState) -> Restored:
        plain = _without_key_types(like)
        record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
        if record.pop("hash") != _hash(record):
            raise OSError("its record is not what was written")
        _check_structure(record.pop("structure"), _structure(plain))
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), plain)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        restored = self._manager.restore(step, args=args).state
        if int(_fingerprint(restored)) != record.pop("fingerprint"):
            raise OSError("its contents are not what was written")
        return Restored(step, _with_key_types(restored, like), record)

    def _set_aside(self, step: int) -> None:
        aside = self._directory.parent / "damaged" / f"{self._directory.name}-{step}"
        if jax.process_index() == 0:
            aside.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            shutil.move(self._directory / str(step), aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"set aside {step}")
        self._manager.reload()


class _Mismatch(Exception):
    pass


@functools.cache
def _hush() -> None:
    """Keeps Orbax from telling every phase of every save, and from printing what it raises once more per thread and task.

    A full disk or a damaged file would otherwise be hundreds of lines with the one that matters among them.
    """
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: not re.search("orbax|tensorstore", record.getMessage()))
    before = sys.unraisablehook

    def report(unraisable):
        code = getattr(unraisable.object, "cr_code", None)
        abandoned = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
        if not abandoned and not (code and "orbax" in code.co_filename):
            before(unraisable)

    sys.unraisablehook = report


def _everywhere(fine: bool) -> bool:
    """Whether it is so on every process."""
    return bool(np.all(multihost_utils.process_allgather(np.asarray(fine)))) if jax.process_count() > 1 else fine


def _without_key_types(state: TrainState) -> TrainState:
    """Typed keys as the integers they are made of, which is what can be stored."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf), state)


def _with_key_types(plain: TrainState, like: TrainState) -> TrainState:
    def wrap(leaf, typed):
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(typed)) if _is_key(typed) else leaf

    return jax.tree.map(wrap, plain, like)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _hash(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _structure(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{leaf.shape}" for path, leaf in leaves}


def _check_structure(stored: dict[str, str], expected: dict[str, str]) -> None:
    for path in sorted({*stored, *expected}):
        if stored.get(path) != expected.get(path):
            raise _Mismatch(f"{path} is {stored.get(path, 'absent')} there, expected {expected.get(path, 'absent')}")


@jax.jit
def _fingerprint(tree: Any) -> UInt[Array, ""]:
    """A sum over all bits, weighted by where they stand, modulo 2^32."""
    total = jnp.zeros((), jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        words = _words(leaf)
        strides = [math.prod(words.shape[axis + 1 :]) for axis in range(words.ndim)]
        place = jnp.zeros(words.shape, jnp.uint32)
        for axis, stride in enumerate(strides):
            place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        total = total * jnp.uint32(16777619) + jnp.sum(words * (2 * place + 1), dtype=jnp.uint32) + jnp.uint32(number)
    return total


def _words(leaf: Array) -> UInt[Array, "..."]:
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype.itemsize >= 4 and leaf.dtype != jnp.bool_:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jax.lax.bitcast_convert_type(leaf, jnp.uint16 if leaf.dtype.itemsize == 2 else jnp.uint8)
    return leaf.astype(jnp.uint32)
