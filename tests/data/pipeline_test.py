import itertools
import json
import time

import numpy as np
import pytest

from jaxml25.data import digits, pipeline


def _batches(source, num, **options):
    options = {"batch_size": 8, "seed": 0, "process_index": 0, "process_count": 1} | options
    return [np.asarray(batch) for batch in itertools.islice(pipeline.make_batches(source, **options), num)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_parts_put_together_are_the_same_global_batches_for_every_process_count(count, shuffle):
    records = np.arange(30)
    whole = _batches(records, 7, shuffle=shuffle)  # beyond two epochs of three batches
    parts = [_batches(records, 7, shuffle=shuffle, process_index=p, process_count=count) for p in range(count)]
    for batch, *pieces in zip(whole, *parts, strict=True):
        assert batch.shape == (8,) and pieces[0].shape == (8 // count,)
        np.testing.assert_array_equal(batch, np.concatenate(pieces))


def test_an_epoch_visits_every_record_once_and_the_next_in_another_order():
    batches = _batches(np.arange(32), 8)
    epochs = [np.concatenate(batches[:4]), np.concatenate(batches[4:])]
    for epoch in epochs:
        assert sorted(epoch) == list(range(32))
    assert list(epochs[0]) != list(epochs[1])


def test_order_depends_on_the_seed_alone_and_no_seed_is_another_ones_next_epoch():
    assert all(map(np.array_equal, _batches(np.arange(32), 8), _batches(np.arange(32), 8)))
    second_epoch = np.concatenate(_batches(np.arange(32), 8)[4:])
    assert list(second_epoch) != list(np.concatenate(_batches(np.arange(32), 4, seed=1)))


def test_the_order_is_the_same_in_every_version():
    np.testing.assert_array_equal(_batches(np.arange(10), 1, seed=7)[0], [8, 4, 3, 6, 2, 1, 0, 5])


def test_every_order_of_three_records_is_equally_likely():
    orders = [tuple(pipeline._orders(3, seed, shuffle=True)(0)) for seed in range(1200)]
    counts = [orders.count(order) for order in itertools.permutations(range(3))]
    assert all(abs(count - 200) < 4 * (1200 * 5 / 36) ** 0.5 for count in counts)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("taken", [0, 1, 3, 5])
def test_a_state_that_went_through_json_continues_identically(taken, num_threads, cache_bytes):
    def start():
        records = [{"x": np.full(2, i), "y": i} for i in range(13)]
        return pipeline.make_batches(
            records, batch_size=4, seed=3, process_index=0, process_count=1, num_threads=num_threads, cache_bytes=cache_bytes
        )

    first = start()
    for _ in range(taken):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    rest = [next(first) for _ in range(4)]
    second = start()
    next(second)  # a state overrides where the iterator was
    second.set_state(state)
    for a, b in zip(rest, [next(second) for _ in range(4)], strict=True):
        np.testing.assert_array_equal(a["x"], b["x"])
        np.testing.assert_array_equal(a["y"], b["y"])
        np.testing.assert_array_equal(a["x"][:, 0], a["y"])


def test_reading_from_disk_and_from_memory_gives_the_same_batches(tmp_path):
    source = digits.splits(tmp_path)["test"]
    images, labels = digits.arrays("test", tmp_path)
    options = {"batch_size": 64, "seed": 1, "process_index": 0, "process_count": 1}
    iterators = [
        pipeline.make_batches(source, **options),
        pipeline.make_batches(source, cache_bytes=0, **options),
        pipeline.make_batches({"image": images, "label": labels}, **options),
    ]
    for _ in range(5):
        memory, disk, arrays = map(next, iterators)
        for name in ("image", "label"):
            np.testing.assert_array_equal(memory[name], disk[name])
            np.testing.assert_array_equal(memory[name], arrays[name])


def test_small_data_is_read_fast_enough_to_feed_a_small_model(tmp_path):
    batches = pipeline.make_batches(digits.splits(tmp_path)["train"], batch_size=256, seed=0)
    next(batches)
    start = time.process_time()
    for _ in range(100):
        next(batches)
    assert 100 / (time.process_time() - start) > 200


def test_a_transform_sees_whole_batches():
    batches = _batches(np.arange(16), 2, transform=lambda x: x / x.shape[0], shuffle=False)
    np.testing.assert_array_equal(batches[1], np.arange(8, 16) / 8)


def test_epochs_end_and_remainders_are_dropped_or_kept():
    records = np.arange(10)
    assert [len(b) for b in _batches(records, 99, num_epochs=3)] == [8, 8, 8]
    kept = _batches(records, 99, num_epochs=2, drop_remainder=False)
    assert [len(b) for b in kept] == [8, 2, 8, 2]
    assert sorted(np.concatenate(kept[:2])) == list(records)
    assert [len(b) for b in _batches(records, 99, num_epochs=1, drop_remainder=False, process_count=2)] == [4, 1]


def test_processes_default_to_those_of_jax():
    batches = pipeline.make_batches(np.arange(8), batch_size=8, seed=0)
    assert len(next(batches)) == 8


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        (0, {}, "source must hold at least one record, got an empty one"),
        (10, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (10, {"process_count": 3}, "batch_size must be a multiple of process_count = 3, got 8"),
        (7, {}, "batch_size must be at most 7, the records of source, to drop remainders, got 8"),
        (
            9,
            {"drop_remainder": False, "process_count": 2},
            "process_count must divide the 1 records of an epoch's last batch, got 2",
        ),
        (10, {"process_index": 1}, r"process_index must be in 0\.\.0 \(process_count - 1\), got 1"),
        (10, {"num_epochs": 0}, "num_epochs must be at least 1, got 0"),
        (10, {"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bad_arguments_are_named(records, options, message):
    with pytest.raises(ValueError, match=message):
        _batches(np.arange(records), 1, **options)


def test_arrays_of_different_sizes_are_no_source():
    with pytest.raises(ValueError, match=r"arrays must share one leading size, got \[2, 3\]"):
        pipeline.ArraySource({"x": np.zeros(2), "y": np.zeros(3)})
