import json
import math
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxml25.data import pipeline
from jaxml25.training import loop, step, train_state
from jaxml25.training.workdir import Workdir

_OPTIMISER = optax.adam(0.05)
_X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)


def _loss(params, key, batch):
    noise = jax.random.normal(key, (3,))
    loss = jnp.mean((batch @ (params["w"] - 0.1 * noise)) ** 2)
    return loss, {"largest": jnp.max(jnp.abs(batch))}


_step = step.make_step(_loss, _OPTIMISER, ema_decay=0.9)


def _state():
    return train_state.init(jax.random.key(0), {"w": jnp.ones(3)}, _OPTIMISER, ema=True)


def _batches():
    return pipeline.make_batches(_X, batch_size=5, seed=1, process_index=0, process_count=1)


class Killed(Exception):
    """Stands for the end of the process: nothing after it runs."""


class _Watched:
    """Batches, with something that happens before the one of step `at`."""

    def __init__(self, at, action):
        self._batches, self._at, self._action, self._count = _batches(), at, action, 0

    def __iter__(self):
        return self

    def __next__(self):
        self._count += 1
        batch = next(self._batches)
        return batch if self._count != self._at else self._action(batch)

    def get_state(self):
        return self._batches.get_state()

    def set_state(self, state):
        self._batches.set_state(state)


def _kill(batch):
    raise Killed


def _fit(path, batches=None, step_fn=_step, **options):
    workdir = Workdir(path)
    options = {"num_steps": 23, "log_every": 4, "checkpoint_every": 7} | options
    try:
        return loop.fit(workdir, "stage", _state(), step_fn, _batches() if batches is None else batches, **options)
    finally:
        workdir.close()


def _rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def _steps(path):
    return sorted(int(one.name) for one in (path / "checkpoints" / "stage").iterdir())


def _numbers(state):
    return [np.array(leaf) for leaf in jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    return path, _numbers(_fit(path))


def test_rows_are_means_over_the_steps_since_the_row_before_and_the_last_step_has_one(whole):
    rows = _rows(whole[0])
    assert [row["step"] for row in rows] == [4, 8, 12, 16, 20, 23]
    state, batches, losses = _state(), _batches(), []
    for _ in range(23):
        state, metrics = _step(state, next(batches))
        losses.append(float(metrics["loss"]))
    assert rows[1]["loss"] == pytest.approx(np.mean(losses[4:8]), rel=1e-6)
    assert rows[-1]["loss"] == pytest.approx(np.mean(losses[20:]), rel=1e-6)
    assert set(rows[0]) == {"namespace", "step", "loss", "largest", "grad_norm", "update_norm"}
    for ours, expected in zip(_numbers(state), whole[1], strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_the_last_step_has_a_checkpoint_and_the_latest_three_are_kept(whole):
    assert _steps(whole[0]) == [14, 21, 23]


@pytest.mark.parametrize("at", [3, 8, 11, 23])
def test_a_run_that_dies_between_rows_and_checkpoints_resumes_to_identical_rows_and_state(tmp_path, whole, at):
    with pytest.raises(Killed):
        _fit(tmp_path, _Watched(at, _kill))
    resumed = _numbers(_fit(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == (whole[0] / "metrics.jsonl").read_bytes()
    for ours, expected in zip(resumed, whole[1], strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_a_finished_stage_returns_at_once_with_its_rows(tmp_path, whole):
    path = shutil.copytree(whole[0], tmp_path / "run")
    state = _fit(path, _Watched(1, _kill))
    for ours, expected in zip(_numbers(state), whole[1], strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert _rows(path) == _rows(whole[0])


def test_batches_may_be_a_function_of_the_step_also_after_resuming(tmp_path):
    asked = []

    def batch(number):
        asked.append(number)
        if len(asked) == 10:
            raise Killed
        return _X[number : number + 2]

    with pytest.raises(Killed):
        _fit(tmp_path, batch, num_steps=12)
    _fit(tmp_path, batch, num_steps=12)
    assert asked == [*range(10), *range(7, 12)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_stops_the_run_and_names_its_step_and_sound_checkpoints_stay(tmp_path, bad):
    def poison(batch):
        batch[0, 0] = bad
        return batch

    with pytest.raises(
        loop.NonFiniteError, match=r"stage: \w+ is (nan|inf) at step 10; the last checkpoint before it was kept"
    ):
        _fit(tmp_path, _Watched(10, poison))
    assert _steps(tmp_path) == [7]
    assert [row["step"] for row in _rows(tmp_path)] == [4, 8]
    state = _fit(tmp_path, num_steps=8)
    assert bool(jnp.all(jnp.isfinite(state.params["w"])))


def test_an_update_that_is_not_finite_is_seen_though_the_loss_is(tmp_path):
    def loss(params, key, batch):
        return jnp.sqrt(jnp.sum((params["w"] - 1) ** 2)), {}  # its gradient is NaN at w = 1

    with pytest.raises(loop.NonFiniteError, match="grad_norm is nan at step 1"):
        _fit(tmp_path, lambda i: i, step.make_step(loss, _OPTIMISER), num_steps=3)


def test_parameters_that_are_not_finite_are_not_saved_though_every_metric_is(tmp_path):
    def step_fn(state, batch):
        number = state.step + 1
        params = {"w": jnp.where(number >= 9, jnp.inf, state.params["w"])}
        return state._replace(step=number, params=params), {"loss": jnp.ones(())}

    with pytest.raises(loop.NonFiniteError, match="stage: parameter w is not finite after step 14; the last checkpoint"):
        _fit(tmp_path, lambda i: i, step_fn)
    assert _steps(tmp_path) == [7]


class _Counter:
    """Batches whose state is bytes, as that of Grain's data loaders."""

    def __init__(self, length=100):
        self.count, self._length = 0, length

    def __next__(self):
        if self.count == self._length:
            raise StopIteration
        self.count += 1
        return np.full((5, 3), self.count, np.float32)

    def get_state(self):
        return bytes([255, self.count])

    def set_state(self, state):
        assert isinstance(state, bytes) and state[0] == 255
        self.count = state[1]


def test_the_state_of_batches_may_be_bytes(tmp_path):
    _fit(tmp_path, _Counter(), num_steps=7)
    batches = _Counter()
    _fit(tmp_path, batches, num_steps=10)
    assert batches.count == 10
    assert [row["largest"] for row in _rows(tmp_path)] == [2.5, 6.0, 8.0, 9.5]


def test_batches_that_end_too_early_are_an_error_that_names_the_step(tmp_path):
    with pytest.raises(ValueError, match="batches must last for the whole stage, got no batch for step 10"):
        _fit(tmp_path, _Counter(length=9))
    assert _steps(tmp_path) == [7]


@pytest.mark.parametrize("at", [9, 23], ids=["midway", "last step"])
def test_sigterm_finishes_the_step_writes_a_checkpoint_and_exits_with_status_0(tmp_path, whole, capsys, at):
    def terminate(batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return batch

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        _fit(tmp_path, _Watched(at, terminate))
    assert stopped.value.code == 0 and signal.getsignal(signal.SIGTERM) is before
    assert f"stage: stopped by a signal at step {at}, checkpoint written; run the same command" in capsys.readouterr().out
    assert _steps(tmp_path)[-1] == at
    resumed = _numbers(_fit(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == (whole[0] / "metrics.jsonl").read_bytes()
    for ours, expected in zip(resumed, whole[1], strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_a_signal_that_comes_after_the_last_step_reaches_the_earlier_handler():
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with loop.Interruption() as interruption:
            signal.raise_signal(signal.SIGTERM)
            assert interruption.requested() and got == []
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_checkpoint_of_the_lowest_row_is_kept_too(tmp_path):
    heights = [5.0, 4.0, 1.0, 3.0, 2.0, 6.0]
    height = step.make_step(lambda params, key, batch: (jnp.sum(params["w"] ** 2), {"height": batch}), _OPTIMISER)
    options = {"num_steps": 6, "log_every": 1, "checkpoint_every": 1, "keep": 1, "best": "height"}
    _fit(tmp_path, lambda i: jnp.float32(heights[i]), height, **options)
    assert _steps(tmp_path) == [3, 6]


def test_progress_counts_every_step_once_also_after_resuming(tmp_path, capsys):
    with pytest.raises(Killed):
        _fit(tmp_path, _Watched(9, _kill))
    _fit(tmp_path)
    out = capsys.readouterr().out
    assert "stage: resumed at step 7 of 23" in out and "stage: 23/23 loss " in out


@pytest.mark.parametrize("argument", ["num_steps", "log_every", "checkpoint_every", "keep"])
def test_a_number_below_1_is_an_error_that_names_it(tmp_path, argument):
    with pytest.raises(ValueError, match=f"{argument} must be at least 1, got 0"):
        _fit(tmp_path, **{argument: 0})


def test_batches_that_cannot_be_resumed_are_an_error_before_any_step(tmp_path):
    with pytest.raises(
        ValueError, match="batches must have get_state and set_state, or be a function of the step, got <list"
    ):
        _fit(tmp_path, iter([_X]))


def test_a_best_that_is_no_metric_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"best must be one of the metrics .*loss.*, got 'los'"):
        _fit(tmp_path, best="los")
