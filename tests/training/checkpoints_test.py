import contextlib
import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxml25.training import checkpoints, step, train_state
from jaxml25.training.checkpoints import Checkpointer


def _loss(params, key, batch):
    noise = jax.random.normal(key, params["w"].shape)
    return jnp.mean((params["w"] - noise) ** 2), {}


_OPTIMISER = optax.adamw(0.1)
_step = step.make_step(_loss, _OPTIMISER, ema_decay=0.9)


def _state(seed=0, size=1000, impl="threefry2x32"):
    params = {"w": jnp.zeros(size), "b": jnp.ones((2, 3), jnp.bfloat16)}
    return train_state.init(jax.random.key(seed, impl=impl), params, _OPTIMISER, ema=True)


def _numbers(state):
    plain = jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state)
    return [np.array(leaf) for leaf in jax.tree.leaves(plain)]


def _assert_equal(ours, numbers):
    for a, b in zip(_numbers(ours), numbers, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


@contextlib.contextmanager
def _open(directory, **options):
    checkpointer = Checkpointer(directory, **options)
    yield checkpointer
    checkpointer.close()


def _steps(directory):
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Checkpoints of steps 1, 2 and 3, and the numbers that were saved."""
    directory, state, saved = tmp_path_factory.mktemp("three") / "stage", _state(), {}
    with _open(directory) as checkpointer:
        for number in (1, 2, 3):
            state, _ = _step(state, 0)
            saved[number] = _numbers(state)
            checkpointer.save(number, state, {"rows": [number], "data": {"next": number}})
    return directory, saved


@pytest.fixture
def copy(three, tmp_path):
    return shutil.copytree(three[0], tmp_path / "stage")


def test_everything_comes_back_to_the_bit_with_typed_keys_and_the_record(three):
    directory, saved = three
    with _open(directory) as checkpointer:
        restored = checkpointer.restore(_state(seed=5))
        assert restored.step == checkpointer.latest_step() == 3
    assert restored.record == {"rows": [3], "data": {"next": 3}}
    _assert_equal(restored.state, saved[3])
    assert restored.state.key.dtype == jax.random.key(0).dtype
    state, _ = _step(restored.state, 0)  # it can be trained on, and donated
    assert int(state.step) == 4


def test_an_empty_folder_holds_nothing(tmp_path):
    with _open(tmp_path / "stage") as checkpointer:
        assert checkpointer.restore(_state()) is None and checkpointer.latest_step() is None


def test_what_is_saved_is_the_state_and_the_record_before_what_is_done_to_them_right_after(tmp_path):
    state, record, saved = _state(size=500_000), {"rows": [0]}, {}
    with _open(tmp_path / "stage", keep=2) as checkpointer:
        for number in (1, 2):
            state, _ = _step(state, 0)
            saved[number] = _numbers(state)
            checkpointer.save(number, state, record)
            record["rows"].append(number)
            for _ in range(5):
                state, _ = _step(state, 0)
        checkpointer.wait()
        restored = checkpointer.restore(_state(size=500_000))
    assert restored.step == 2 and restored.record == {"rows": [0, 1]}
    _assert_equal(restored.state, saved[2])


def test_the_last_few_and_the_best_are_kept_also_when_the_best_was_saved_by_an_earlier_process(tmp_path):
    directory = tmp_path / "stage"
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 2.0, 6: 9.0}
    for numbers in ((1, 2, 3), (4, 5, 6)):
        with _open(directory, keep=2, best="loss") as checkpointer:
            for number in numbers:
                checkpointer.save(number, _state(size=3), {}, {"loss": losses[number], "other": -number})
    assert _steps(directory) == [2, 5, 6]


def test_without_a_best_only_the_last_few_are_kept(tmp_path):
    with _open(tmp_path / "stage", keep=1) as checkpointer:
        for number in (1, 2, 3):
            checkpointer.save(number, _state(size=3), {}, {"loss": number})
    assert _steps(tmp_path / "stage") == [3]


def test_a_step_that_was_saved_is_left_alone(copy, three):
    with _open(copy) as checkpointer:
        checkpointer.save(3, _state(), {"rows": []})
        checkpointer.wait()
        _assert_equal(checkpointer.restore(_state()).state, three[1][3])


def _largest(directory):
    return max(
        (path for path in (directory / "3" / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def _truncate(directory):
    path = _largest(directory)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip_a_bit_of_the_numbers(directory):
    path = _largest(directory)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _change_a_digit_of_the_record(directory):
    (path,) = [path for path in (directory / "3" / "record").rglob("*") if path.is_file() and "next" in path.read_text()]
    record = json.loads(path.read_text())
    record["data"]["next"] = 4
    path.write_text(json.dumps(record))


def _fill_the_record_with_garbage(directory):
    for path in (directory / "3" / "record").rglob("*"):
        if path.is_file():
            path.write_bytes(b"\x00garbage")


_DAMAGE = {
    "truncated": _truncate,
    "deleted": lambda directory: _largest(directory).unlink(),
    "bit": _flip_a_bit_of_the_numbers,
    "no_state": lambda directory: shutil.rmtree(directory / "3" / "state"),
    "no_record": lambda directory: shutil.rmtree(directory / "3" / "record"),
    "garbage": _fill_the_record_with_garbage,
    "digit": _change_a_digit_of_the_record,
    "empty": lambda directory: [shutil.rmtree(path) for path in (directory / "3").iterdir() if path.is_dir()],
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax drops the reads that were under way
@pytest.mark.parametrize("damage", _DAMAGE.values(), ids=_DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_with_a_warning_for_the_one_before(copy, three, damage):
    damage(copy)
    with _open(copy) as checkpointer:
        with pytest.warns(UserWarning, match="skipping the damaged checkpoint .*stage/3: ") as told:
            restored = checkpointer.restore(_state())
        assert len([one for one in told if "skipping" in str(one.message)]) == 1
        assert "\n" not in str(told[0].message)
        assert restored.step == 2 and restored.record["rows"] == [2]
        _assert_equal(restored.state, three[1][2])
        checkpointer.save(3, _state(), {"rows": []})  # its place is free again
    assert _steps(copy) == [1, 2, 3] and (copy.parent / "damaged" / "stage-3").is_dir()


def test_when_all_are_damaged_there_is_none(copy):
    for number in (1, 2, 3):
        shutil.rmtree(copy / str(number) / "record")
    with _open(copy) as checkpointer, pytest.warns(UserWarning, match="skipping"):
        assert checkpointer.restore(_state()) is None


def test_what_a_killed_process_left_half_written_is_ignored_and_removed(copy):
    shutil.copytree(copy / "3", copy / "4.orbax-checkpoint-tmp")
    shutil.copytree(copy / "3", copy / "5.orbax-checkpoint-tmp-1234")
    with _open(copy) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpointer.restore(_state()).step == 3
        checkpointer.save(4, _state(), {})
    assert sorted(path.name for path in copy.iterdir()) == ["2", "3", "4"]


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (lambda: _state(size=7), r"ema/w is float32\(1000,\) there, expected float32\(7,\)"),
        (lambda: _state()._replace(ema=None), r"ema/b is bfloat16\(2, 3\) there, expected absent"),
        (lambda: _state(impl="rbg"), r"key is uint32\(2,\) there, expected uint32\(4,\)"),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error_that_names_the_leaf_and_it_is_kept(copy, like, message):
    with _open(copy) as checkpointer, pytest.raises(ValueError, match="is of another model: " + message):
        checkpointer.restore(like())
    assert _steps(copy) == [1, 2, 3]


def test_an_error_that_is_not_the_checkpoints_fault_is_raised_and_it_is_kept(copy, monkeypatch):
    def fail(*arguments):
        raise MemoryError

    monkeypatch.setattr(checkpoints, "_fingerprint", fail)
    with _open(copy) as checkpointer, pytest.raises(MemoryError):
        checkpointer.restore(_state())
    assert _steps(copy) == [1, 2, 3]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.complex64, jnp.float8_e4m3fn])
def test_the_fingerprint_sees_a_changed_number_and_an_exchange_of_two_in_every_type(dtype):
    array = jnp.array([[0, 0, 1], [0, 1, 1]]) if dtype == jnp.bool_ else jnp.arange(6).reshape(2, 3)
    array = array.astype(dtype)
    changed = array.at[0, 0].set(jnp.ones((), dtype))
    prints = {int(checkpoints._fingerprint({"a": one})) for one in (array, changed, array[:, ::-1], array[::-1])}
    assert len(prints) == 4
    two = [checkpoints._fingerprint({"a": a, "b": b}) for a, b in ((array[0], array[1]), (array[1], array[0]))]
    assert int(two[0]) != int(two[1])


def test_plain_numpy_parameters_and_64_bit_ones_are_saved_too(tmp_path):
    with jax.enable_x64(True), _open(tmp_path / "stage") as checkpointer:
        state = _state(size=3)._replace(params={"w": np.array([1.0, 1e-300]), "z": np.array([1 + 2j])})
        checkpointer.save(1, state, {"steps": {1: 2}})
        checkpointer.wait()
        restored = checkpointer.restore(state)
        np.testing.assert_array_equal(restored.state.params["w"], state.params["w"])
        assert restored.state.params["w"].dtype == jnp.float64 and complex(restored.state.params["z"][0]) == 1 + 2j
        assert restored.record == {"steps": {"1": 2}}


def test_bad_arguments_are_errors_that_name_them(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpointer(tmp_path, keep=0)
    message = "best must be one of the metrics kept, loss, got 'los'"
    with _open(tmp_path / "stage", best="los") as checkpointer, pytest.raises(ValueError, match=message):
        checkpointer.save(1, _state(size=3), {}, {"kept": 1, "loss": 0.5})
