"""The training loop: one stage of a run, resumable at any moment.

The loop never waits for the device but where it logs or saves: until then the metrics of every step stay where they were
computed, and are read all at once. What a checkpoint holds beside the state (where the data iterator stands, what was logged,
which metrics wait to be averaged) makes a resumed run repeat the uninterrupted one bit for bit on the same devices.
"""

import base64
import itertools
import math
import signal
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxml25.training import mesh as meshes
from jaxml25.training.checkpoints import Checkpointer
from jaxml25.training.step import StepFn
from jaxml25.training.train_state import TrainState, trained
from jaxml25.training.workdir import Workdir


@runtime_checkable
class Batches(Protocol):
    """What batches are taken from; it must have `get_state` and `set_state` too, as Grain's iterators do."""

    def __next__(self) -> Any:
        """The next batch."""


class NonFiniteError(ArithmeticError):
    """A metric or a parameter was NaN or infinite; the checkpoints written before it are sound."""


def fit(
    workdir: Workdir,
    name: str,
    state: TrainState,
    step_fn: StepFn,
    batches: Batches | Callable[[int], Any],
    *,
    num_steps: int,
    log_every: int = 100,
    checkpoint_every: int = 1_000,
    keep: int = 3,
    best: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> TrainState:
    """Trains until step `num_steps`, from the newest sound checkpoint of this stage if there is one.

    SIGTERM ends the process with status 0 after a checkpoint. With several processes the cluster's preemption notice does so,
    at a step they agree on.

    Args:
      workdir: where checkpoints and metrics go.
      name: the stage; unique in the run.
      state: where to start; donated.
      step_fn: from `step.make_step`.
      batches: an iterator with `get_state` and `set_state` such as Grain's, or a function of the step number.
      num_steps: length of the stage, at least 1.
      log_every: steps per row of metrics, which are means over these steps.
      checkpoint_every: steps per checkpoint; the last step always has one.
      keep: how many of the latest checkpoints to keep.
      best: a metric; of the checkpoints, the one whose latest row has it lowest is kept too.
      mesh: if given, batches are this process's parts and are split over the axis `data`, and the state stays placed as it is.

    Returns:
      The final state; at once if the stage was finished before.

    Raises:
      NonFiniteError: if a metric is NaN or infinite, or a parameter where a checkpoint is due; the message names it and the
        step. No checkpoint is written from that step on.
      ValueError: if a number is below 1, `best` names no metric, `batches` cannot be resumed or end too early, or a checkpoint
        is of another model.
    """
    for argument, value in (("num_steps", num_steps), ("log_every", log_every), ("checkpoint_every", checkpoint_every)):
        if value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    feed = _Feed(batches, mesh)
    step_fn = step_fn if mesh is None else _in_place(step_fn, state, mesh)
    checkpointer = Checkpointer(workdir.path / "checkpoints" / name, keep=keep, best=best)
    try:
        return _fit(workdir, name, state, step_fn, feed, checkpointer, num_steps, log_every, checkpoint_every)
    finally:
        checkpointer.close()


def _fit(workdir, name, state, step_fn, feed, checkpointer, num_steps, log_every, checkpoint_every) -> TrainState:
    start, rows, waiting = 0, [], []
    restored = checkpointer.restore(state)
    if restored is not None:
        start, state = restored.step, restored.state
        rows, waiting = restored.record["rows"], restored.record["waiting"]
        feed.set_state(restored.record["data"])
        workdir.repeat(rows)
        workdir.say(f"{name}: resumed at step {start} of {num_steps}")

    with Interruption() as interruption, workdir.bar(name, num_steps, start) as bar:
        unread, shown = [], start
        for step in range(start + 1, num_steps + 1):
            state, metrics = step_fn(state, feed.batch(step - 1))
            unread.append(metrics)
            stop = interruption.requested()
            last = step == num_steps
            logs, saves = last or step % log_every == 0, last or stop or step % checkpoint_every == 0
            if logs or saves:
                waiting += _read(name, unread, step)
                unread = []
            if logs:
                means = _means(waiting)
                rows.append(workdir.log(means, step=step, namespace=name))
                waiting = []
                bar.advance(step - shown, f"loss {means['loss']:.4g}" if "loss" in means else "")
                shown = step
            if saves:
                _check_finite(name, state, step)
                record = {"data": feed.get_state(), "rows": rows, "waiting": waiting}
                checkpointer.save(step, state, record, rows[-1] if rows else None)
            if stop:
                checkpointer.wait()
                workdir.say(f"{name}: stopped by a signal at step {step}, checkpoint written; run the same command to go on")
                raise SystemExit(0)
    return state


def _in_place(step_fn: StepFn, state: TrainState, mesh: jax.sharding.Mesh) -> StepFn:
    """Keeps the state where it is: the compiler may choose another place for the new one, and compile anew for it."""

    def place(leaf):
        return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else NamedSharding(mesh, PartitionSpec())

    return jax.jit(step_fn, donate_argnums=0, out_shardings=(jax.tree.map(place, state), None))


class _Feed:
    """Batches from an iterator or from a function of the step, on the devices of the mesh."""

    def __init__(self, batches: Any, mesh: jax.sharding.Mesh | None):
        self._batches, self._mesh = batches, mesh
        self._counts = callable(batches) and not hasattr(batches, "__next__")
        if not self._counts and not (hasattr(batches, "get_state") and hasattr(batches, "set_state")):
            raise ValueError(f"batches must have get_state and set_state, or be a function of the step, got {batches!r}")

    def batch(self, step: int) -> Any:
        try:
            batch = self._batches(step) if self._counts else next(self._batches)
        except StopIteration:
            raise ValueError(f"batches must last for the whole stage, got no batch for step {step + 1}") from None
        return batch if self._mesh is None else meshes.shard_batch(batch, self._mesh)

    def get_state(self) -> Any:
        """What JSON can hold; bytes, which Grain's data loaders have, as text in a list of one."""
        if self._counts:
            return None
        state = self._batches.get_state()
        return [base64.b64encode(state).decode()] if isinstance(state, bytes) else {"state": state}

    def set_state(self, state: Any) -> None:
        if not self._counts:
            self._batches.set_state(base64.b64decode(state[0]) if isinstance(state, list) else state["state"])


class Interruption:
    """Notices SIGTERM without losing the step under way; the earlier handler is back on leaving, and has what came too late."""

    _steps = itertools.count()  # over all stages: what the processes agree on is a number that must not go back

    def __init__(self):
        self._asked = False
        # Signals reach the main thread only; several processes agree through JAX's own handler, which must stay.
        self._ours = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "Interruption":
        if self._ours:
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._ours:
            signal.signal(signal.SIGTERM, self._before)
            if self._asked and kind is None:
                signal.raise_signal(signal.SIGTERM)

    def _ask(self, number, frame) -> None:
        self._asked = True

    def requested(self) -> bool:
        """Whether to stop after this step; to be asked once a step; the same on every process."""
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(next(self._steps)))
        return self._asked


def _read(name: str, metrics: list[dict[str, Any]], step: int) -> list[dict[str, float]]:
    """The metrics of the last steps as numbers, all of them finite."""
    read = [{key: float(value) for key, value in row.items()} for row in jax.device_get(metrics)]
    for number, row in enumerate(read, start=step - len(read) + 1):
        for key, value in row.items():
            if not math.isfinite(value):
                raise NonFiniteError(f"{name}: {key} is {value} at step {number}; the last checkpoint before it was kept")
    return read


@jax.jit
def _finite(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)), tree)


def _check_finite(name: str, state: TrainState, step: int) -> None:
    """Metrics can be finite where the parameters they lead to are not."""
    for tree, what in ((state.params, "parameter"), (state.ema, "average")):
        for path, fine in jax.tree_util.tree_leaves_with_path(jax.device_get(_finite(trained(tree)))):
            if not fine:
                leaf = jax.tree_util.keystr(path, simple=True, separator="/")
                raise NonFiniteError(f"{name}: {what} {leaf} is not finite after step {step}; the last checkpoint was kept")


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
