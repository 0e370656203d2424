"""Scalars of a run: JSON lines, TensorBoard events and lines on the console.

`metrics.jsonl` holds no clock: a row is `{"namespace", "step", name: value, ...}`, so that a run that was killed and resumed ends
with the same file as one that was not. A resumed run writes the file anew; a training stage repeats the rows that its
checkpoint remembers, everything else is computed again.
"""

import json
import math
import pathlib
import shutil
import time
from collections.abc import Mapping
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import scalar


class Metrics:
    """Writes to `directory`; rows are flushed as they come.

    Args:
      directory: the run's folder, which must exist.
      enabled: False on all processes but the first, where nothing is written.
    """

    def __init__(self, directory: pathlib.Path, *, enabled: bool = True):
        self._enabled = enabled
        self._file = self._events = None
        if enabled:
            shutil.rmtree(directory / "tensorboard", ignore_errors=True)
            self._file = (directory / "metrics.jsonl").open("w", encoding="utf-8")
            (directory / "tensorboard").mkdir()
            # Not SummaryWriter: its thread dies of a full disk in silence, and the run then waits for it forever.
            self._events = EventsWriter(str(directory / "tensorboard" / "events"))

    def write(self, scalars: Mapping[str, Any], *, step: int | None = None, namespace: str = "") -> dict[str, Any]:
        """Writes one row and returns it.

        Args:
          scalars: name to number (arrays of one element are numbers too) or to text.
          step: what the row is plotted against.
          namespace: the part of the run it belongs to.
        """
        row = {"namespace": namespace} if namespace else {}
        row |= {} if step is None else {"step": int(step)}
        row |= {name: _plain(value) for name, value in scalars.items()}
        self.repeat(row)
        return row

    def repeat(self, row: Mapping[str, Any]) -> None:
        """Writes a row that `write` returned earlier."""
        if not self._enabled:
            return
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        prefix = f"{row['namespace']}/" if "namespace" in row else ""
        for name, value in row.items():
            if name not in ("namespace", "step") and isinstance(value, int | float) and math.isfinite(value):
                summary = scalar(prefix + name, value)
                self._events.write_event(Event(wall_time=time.time(), step=row.get("step"), summary=summary))
        self._events.flush()

    def close(self) -> None:
        """Flushes and closes the files; once more does no harm."""
        if self._enabled and not self._file.closed:
            self._file.close()
            self._events.close()


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int | float):
        return value
    return value.item()
