import json
import re

import jax.numpy as jnp
import pytest
from matplotlib import pyplot

from jaxml25.training import workdir
from jaxml25.training.workdir import WorkdirError

_CONFIG = {"seed": 0, "train": {"steps": 3, "rate": 0.5}, "parts": ("a", "b")}


@pytest.fixture
def open_workdir():
    opened = []

    def open_one(*arguments, **options):
        opened.append(workdir.Workdir(*arguments, **options))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def test_an_unfinished_run_is_continued_under_the_same_configuration_only(open_workdir, tmp_path):
    open_workdir(tmp_path, config=_CONFIG)
    open_workdir(tmp_path, config=json.loads(json.dumps(_CONFIG)))
    other = {"seed": 0, "train": {"steps": 4, "rate": 0.5, "new": 1}, "parts": ("a", "b")}
    told = "train.new: absent there, 1 asked for; train.steps: 3 there, 4 asked for); give another --workdir, or --overwrite"
    with pytest.raises(WorkdirError, match=re.escape(told)):
        open_workdir(tmp_path, config=other)
    many = {f"key{i}": i for i in range(9)}
    with pytest.raises(WorkdirError, match="and 10 more"):
        open_workdir(tmp_path, config=many)
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 3
    open_workdir(tmp_path)  # no configuration, no check, and the one that is there stays
    with pytest.raises(WorkdirError, match="another configuration"):
        open_workdir(tmp_path, config=other)


def test_a_finished_run_is_refused_and_left_as_it_is(open_workdir, tmp_path):
    run = open_workdir(tmp_path, config=_CONFIG)
    run.log({"loss": 1.0}, step=1)
    run.finish({"metrics": {"plain": 1, "array": jnp.float32(0.5)}})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"metrics": {"plain": 1, "array": 0.5}}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(WorkdirError, match="holds a finished run; give another --workdir, or --overwrite to replace it"):
        open_workdir(tmp_path, config=_CONFIG)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_overwriting_forgets_what_a_run_left_and_keeps_what_none_writes(open_workdir, tmp_path):
    run = open_workdir(tmp_path, config=_CONFIG)
    run.log({"loss": 1.0}, step=1)
    run.figure("picture", pyplot.figure())
    (tmp_path / "checkpoints" / "stage").mkdir(parents=True)
    run.finish({})
    (tmp_path / "notes.txt").write_text("mine")
    open_workdir(tmp_path, config={"seed": 1}, overwrite=True)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["config.json", "metrics.jsonl", "notes.txt", "tensorboard"]
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/none"])
def test_a_folder_that_cannot_be_written_is_one_line_that_names_it(open_workdir, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError) as error:
        open_workdir(tmp_path / name, config=_CONFIG)
    assert str(error.value).startswith(f"cannot write workdir {tmp_path / name}: ") and "\n" not in str(error.value)


def test_a_configuration_that_was_torn_does_not_stop_the_run(open_workdir, tmp_path):
    (tmp_path / "config.json").write_text('{"se')
    open_workdir(tmp_path, config=_CONFIG)
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0


@pytest.mark.parametrize("items", [[3, 1, 2], (i for i in (3, 1, 2))], ids=["list", "generator"])
def test_progress_passes_the_items_through_and_says_so_at_the_end(open_workdir, tmp_path, capsys, items):
    assert list(open_workdir(tmp_path).progress(items, "things", total=3)) == [3, 1, 2]
    assert capsys.readouterr().out == "things: 3/3\n"


def test_a_bar_within_a_bar_is_shown_below_it_on_a_terminal(open_workdir, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    run = open_workdir(tmp_path)
    seen = [(seed, step) for seed in run.progress([7, 8], "seeds") for step in run.progress(range(2), f"seed {seed}")]
    assert seen == [(7, 0), (7, 1), (8, 0), (8, 1)]
    shown = capsys.readouterr().out
    assert "seeds" in shown and "2/2" in shown
    assert list(run.progress([1], "another")) == [1]


def test_lines_are_printed_whole_and_as_they_are(open_workdir, tmp_path, capsys):
    text = "what [stands] in brackets stays, and " + "a long line is not broken " * 10
    open_workdir(tmp_path).say(text.strip())
    assert capsys.readouterr().out == text.strip() + "\n"


def test_a_figure_is_saved_as_png_and_closed(open_workdir, tmp_path):
    figure = pyplot.figure()
    open_workdir(tmp_path).figure("picture", figure)
    assert (tmp_path / "figures" / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert not pyplot.fignum_exists(figure.number)
