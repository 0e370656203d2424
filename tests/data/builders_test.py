import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxml25.data import builders, digits

_ROOT = pathlib.Path(__file__).parents[2]

# Prepares the digits with the same global random state in every process, no network, and says what it saw.
_PREPARE = """
import random, socket, sys
random.seed(0)
def refuse(*args): raise AssertionError("network")
socket.socket.connect = refuse
from jaxml25.data import digits
images, labels = digits.arrays("train", sys.argv[1])
print(images.shape, images.astype(int).sum(), labels.sum(), "tensorflow" in sys.modules)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    digits.splits(folder)
    return folder


def _folder(cache) -> pathlib.Path:
    return cache / "digits" / "1.0.0"


def test_two_processes_prepare_the_same_data_set_at_once_without_network_or_tensorflow(tmp_path):
    environment = dict(os.environ, PYTHONPATH=str(_ROOT), JAXML25_DATA=str(tmp_path / "public"))
    (tmp_path / "public").mkdir()
    command = [sys.executable, "-c", _PREPARE, str(tmp_path / "cache")]
    runs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=_ROOT) for _ in range(2)]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0] == outputs[1] and outputs[0].startswith("(1500, 8, 8)") and outputs[0].endswith("False\n")
    assert sorted(p.name for p in (tmp_path / "cache" / "digits").iterdir()) == [".lock", "1.0.0"]  # no temporary is left
    assert not list((tmp_path / "public").iterdir())


@pytest.mark.parametrize("damage", ["truncated", "missing", "{", "{}", "[]"])
def test_a_half_written_cache_is_rebuilt(cache, damage):
    shard = next(_folder(cache).glob("*train*"))
    intact = shard.read_bytes()
    if damage == "truncated":
        shard.write_bytes(intact[:1000])
    elif damage == "missing":
        shard.unlink()
    else:
        (_folder(cache) / "prepared.json").write_text(damage)
    assert len(digits.arrays("train", cache)[0]) == 1500
    assert shard.stat().st_size == len(intact)


def test_a_complete_cache_is_not_written_again(cache):
    marker = _folder(cache) / "prepared.json"
    before = marker.stat().st_mtime_ns
    digits.splits(cache)
    assert marker.stat().st_mtime_ns == before
    assert set(json.loads(marker.read_text())) >= {"dataset_info.json", "features.json"}


def test_the_cache_is_the_argument_then_the_variable_then_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXML25_CACHE", str(tmp_path / "variable"))
    assert builders.cache_dir(tmp_path / "argument") == tmp_path / "argument"
    assert builders.cache_dir() == tmp_path / "variable"
    monkeypatch.delenv("JAXML25_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert builders.cache_dir() == tmp_path / ".cache" / "jaxml25"


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write the data cache .*file.*; set JAXML25_CACHE"):
        digits.splits(tmp_path / "file")


def test_local_copies_of_public_data_are_never_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXML25_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="data_dir must not lie in JAXML25_DATA"):
        digits.splits(tmp_path / "prepared")
    assert not list(tmp_path.iterdir())


def test_the_builder_works_through_the_interface_of_tfds_itself(tmp_path, capsys):
    builder = digits.Digits(data_dir=tmp_path)
    builder.download_and_prepare()
    capsys.readouterr()
    sources = builder.as_data_source()
    assert {split: len(source) for split, source in sources.items()} == digits.SIZES
    assert builder.info.redistribution_info.license == "CC BY 4.0"
