import builtins
import json
import pathlib
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxml25.training.metrics import Metrics


def _rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def _events(data):
    while data:  # length, checksum, event, checksum
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_a_row_is_one_json_object_with_namespace_step_and_plain_scalars(tmp_path):
    metrics = Metrics(tmp_path)
    returned = metrics.write(
        {"loss": jnp.float32(0.5), "n": np.int64(3), "one": np.ones(1), "note": "a"}, step=4, namespace="t"
    )
    metrics.write({"final": 1.25})
    assert _rows(tmp_path) == [  # before anything is closed
        {"namespace": "t", "step": 4, "loss": 0.5, "n": 3, "one": 1.0, "note": "a"},
        {"final": 1.25},
    ]
    assert returned == _rows(tmp_path)[0]
    metrics.close()


def test_numbers_survive_the_file_to_the_last_bit(tmp_path):
    metrics = Metrics(tmp_path)
    values = {f"x{i}": float(value) for i, value in enumerate(np.random.default_rng(0).normal(size=20))}
    metrics.write(values)
    metrics.close()
    assert _rows(tmp_path) == [values]


def test_a_new_writer_starts_the_files_anew_and_repeats_what_it_is_given(tmp_path):
    first = Metrics(tmp_path)
    row = first.write({"loss": 0.1}, step=1, namespace="t")
    first.write({"loss": 0.2}, step=2, namespace="t")
    first.close()
    second = Metrics(tmp_path)
    second.repeat(row)
    second.close()
    assert _rows(tmp_path) == [row]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_tensorboard_shows_the_finite_numbers_under_their_namespace(tmp_path):
    metrics = Metrics(tmp_path)
    for step in (1, 2):
        metrics.write({"loss": step / 2, "bad": float("nan"), "note": "a"}, step=step, namespace="t")
    metrics.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    shown = [
        (value.tag, event.step, value.simple_value) for event in _events(path.read_bytes()) for value in event.summary.value
    ]
    assert shown == [("t/loss", 1, 0.5), ("t/loss", 2, 1.0)]


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("which", ["metrics.jsonl", "tensorboard"])
def test_a_full_disk_is_an_error_at_the_row_that_does_not_fit(tmp_path, monkeypatch, which):
    opened = builtins.open

    def full(file, *arguments, **options):
        return opened("/dev/full" if which in str(file) else file, *arguments, **options)

    monkeypatch.setattr(builtins, "open", full)
    monkeypatch.setattr(pathlib.Path, "open", lambda path, *arguments, **options: full(path, *arguments, **options))
    writer = Metrics(tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        writer.write({"loss": 1.0}, step=1)


def test_processes_that_do_not_lead_write_nothing_but_return_the_same_row(tmp_path):
    metrics = Metrics(tmp_path, enabled=False)
    assert metrics.write({"loss": 0.5}, step=1) == {"step": 1, "loss": 0.5}
    metrics.close()
    assert list(tmp_path.iterdir()) == []
