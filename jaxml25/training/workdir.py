"""The folder of a run, and everything a run shows: progress, scalars, figures, the summary.

    config.json       what was asked for; a run is resumed under the same configuration only
    checkpoints/      one folder per training stage
    metrics.jsonl     scalars, and tensorboard/ the same for TensorBoard
    figures/*.png
    summary.json      written last: a folder that has it holds a finished run, and is not written to again

With several processes the first one writes; the others go through the same motions silently.
"""

import contextlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxml25.training.metrics import Metrics

Item = TypeVar("Item")
# In the order they are removed: until the last of them is gone, no other run can be mistaken for this one.
_OURS = ("checkpoints", "metrics.jsonl", "tensorboard", "figures", "summary.json", "config.json")
_SECONDS_BETWEEN_LINES = 10


class WorkdirError(RuntimeError):
    """The folder cannot be used; the message is one line that says why and what to do."""


class Workdir:
    """Opens a folder for a new run, or for one to be resumed.

    Args:
      path: the folder; made if it is missing.
      config: what identifies the run, as JSON can hold it; None leaves the check out.
      overwrite: forget what an earlier run left here (files that no run writes are kept).

    Raises:
      WorkdirError: if the folder cannot be written, holds a finished run, or one of another configuration.
    """

    def __init__(self, path: str | os.PathLike[str], *, config: Mapping[str, Any] | None = None, overwrite: bool = False):
        self.path = pathlib.Path(path).expanduser().absolute()
        self._leads = jax.process_index() == 0
        self._console = Console(quiet=not self._leads)
        self._shown: Progress | None = None
        problem = self._open(config, overwrite)
        if jax.process_count() > 1 and not multihost_utils.broadcast_one_to_all(np.asarray(problem is None)):
            problem = problem or WorkdirError(f"process 0 cannot use workdir {self.path}")
        if problem is not None:
            raise problem
        self._start = time.perf_counter()

    def _open(self, config: Mapping[str, Any] | None, overwrite: bool) -> WorkdirError | None:
        try:
            if self._leads:
                _prepare(self.path, config, overwrite)
            self._metrics = Metrics(self.path, enabled=self._leads)
        except WorkdirError as error:
            return error
        except OSError as error:
            return WorkdirError(f"cannot write workdir {self.path}: {error.strerror or error}")
        return None

    def say(self, text: Any) -> None:
        """Prints a line, or anything rich can render."""
        plain = isinstance(text, str)  # not to be wrapped at 80 columns, nor searched for brackets
        self._console.print(text, highlight=False, markup=not plain, soft_wrap=plain)

    def log(self, scalars: Mapping[str, Any], step: int | None = None, namespace: str = "") -> dict[str, Any]:
        """Writes a row of scalars; see `Metrics.write`."""
        return self._metrics.write(scalars, step=step, namespace=namespace)

    def repeat(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes rows again that a checkpoint remembers."""
        for row in rows:
            self._metrics.repeat(row)

    def figure(self, name: str, figure: Any) -> None:
        """Saves a figure of Matplotlib's as figures/<name>.png and closes it."""
        from matplotlib import pyplot

        if self._leads:
            folder = self.path / "figures"
            folder.mkdir(exist_ok=True)
            figure.savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight")
        pyplot.close(figure)

    def progress(self, items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
        """Passes `items` through while a progress bar counts them."""
        total = len(items) if total is None and hasattr(items, "__len__") else total
        with self.bar(description, total) as bar:
            for item in items:
                yield item
                bar.advance()

    @contextlib.contextmanager
    def bar(self, description: str, total: int | None, done: int = 0) -> Iterator["Bar"]:
        """A progress bar to advance by hand: live on a terminal, a line every few seconds elsewhere."""
        if not (self._console.is_terminal and self._leads) or self._console.is_jupyter:
            yield _Lines(self, description, total, done)
            return
        if self._shown is not None:  # a bar within a bar is one more line of it
            task = self._shown.add_task(description, total=total, completed=done, note="")
            try:
                yield _Live(self._shown, task)
            finally:
                self._shown.remove_task(task)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=self._console) as self._shown:
            try:
                yield _Live(self._shown, self._shown.add_task(description, total=total, completed=done, note=""))
            finally:
                self._shown = None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, whole or not at all, and closes the files."""
        self.close()
        if self._leads:
            temporary = self.path / "summary.json.tmp"
            temporary.write_text(json.dumps(summary, indent=2, default=_as_json) + "\n", encoding="utf-8")
            temporary.replace(self.path / "summary.json")

    def close(self) -> None:
        """Closes the files of a run that is not finished."""
        self._metrics.close()

    @property
    def seconds(self) -> float:
        """Wall time since this process opened the folder."""
        return time.perf_counter() - self._start


class Bar(Protocol):
    """Counts what has been done."""

    def advance(self, count: int = 1, note: str = "") -> None:
        """Moves on by `count`, and shows `note` beside the bar."""


class _Live:
    def __init__(self, shown: Progress, task: Any):
        self._shown, self._task = shown, task

    def advance(self, count: int = 1, note: str = "") -> None:
        self._shown.update(self._task, advance=count, **({"note": note} if note else {}))


class _Lines:
    def __init__(self, workdir: Workdir, description: str, total: int | None, done: int):
        self._workdir, self._description, self._total, self._done = workdir, description, total, done
        self._note, self._last = "", time.monotonic()

    def advance(self, count: int = 1, note: str = "") -> None:
        self._done += count
        self._note = note or self._note
        now = time.monotonic()
        if self._done == self._total or now - self._last > _SECONDS_BETWEEN_LINES:
            self._last = now
            of = f"/{self._total}" if self._total else ""
            self._workdir.say(f"{self._description}: {self._done}{of} {self._note}".rstrip())


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"summary must hold numbers, text, lists and dicts, got {value!r}")


def _prepare(path: pathlib.Path, config: Mapping[str, Any] | None, overwrite: bool) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for name in _OURS:
            _remove(path / name)
    if (path / "summary.json").exists():
        raise WorkdirError(f"workdir {path} holds a finished run; give another --workdir, or --overwrite to replace it")
    if config is None:
        return
    asked = json.loads(json.dumps(config))
    stored = _read_config(path / "config.json")
    if stored is not None and stored != asked:
        raise WorkdirError(
            f"workdir {path} holds an unfinished run of another configuration ({_difference(stored, asked)}); "
            "give another --workdir, or --overwrite to start anew"
        )
    temporary = path / "config.json.tmp"
    temporary.write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path / "config.json")


def _remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read_config(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _difference(stored: Any, asked: Any) -> str:
    """The first few keys that differ, with both values."""
    old, new = _flat(stored), _flat(asked)
    keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    told = [f"{key}: {old.get(key, 'absent')} there, {new.get(key, 'absent')} asked for" for key in keys[:3]]
    more = [f"and {len(keys) - 3} more"] if len(keys) > 3 else []
    return "; ".join(told + more)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{name}.{key}" if name else key).items()}
