"""Batches for training: a Grain iterator that is deterministic, split over processes, and can be checkpointed.

With n records, a global batch of B and P processes of b = B / P records each, process p's batch i holds in row r the record

    order_e(j B + p b + r),    e, j = divmod(i, floor(n / B)),                                        (1)

where order_e is a permutation of 0..n-1 drawn from (seed, e). The processes' parts put one after the other are therefore the
same global batch, record for record, for every P: a run may be continued on another number of hosts. (Grain's own sharding
gives each process a contiguous part of the data, and so other batches for every P.)
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import grain
import jax
import numpy as np


class ArraySource:
    """Records that are rows of arrays in memory: whole batches are read by one indexing operation.

    Args:
      arrays: an array, or a tree of arrays (such as a dict) with the same leading size.

    Raises:
      ValueError: if there is no array, or their leading sizes differ.
    """

    def __init__(self, arrays: Any):
        self.arrays = jax.tree.map(np.asarray, arrays)
        sizes = sorted({array.shape[0] if array.ndim else None for array in jax.tree.leaves(self.arrays)}, key=str)
        if len(sizes) != 1 or sizes[0] is None:
            raise ValueError(f"arrays must share one leading size, got {sizes}")
        self._size = sizes[0]

    @classmethod
    def of(cls, source: Any) -> "ArraySource":
        """Decodes every record of `source`, once, into memory."""
        chunks = [range(start, min(start + 4096, len(source))) for start in range(0, len(source), 4096)]
        return cls(jax.tree.map(lambda *arrays: np.concatenate(arrays), *[_stack(_read(source, chunk)) for chunk in chunks]))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self.rows(index)

    def rows(self, indices: Any) -> Any:
        """The tree of arrays at `indices` of the leading axis."""
        return jax.tree.map(lambda array: array[indices], self.arrays)


def make_batches(
    source: Any,
    *,
    batch_size: int,
    seed: int,
    transform: Callable[[Any], Any] | None = None,
    shuffle: bool = True,
    num_epochs: int | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
    drop_remainder: bool = True,
    cache_bytes: int = 1 << 28,
    num_threads: int = 0,
) -> grain.DatasetIterator:
    """Returns this process's part of the global batches of `source`, by equation (1).

    Decoding a TFDS record costs tens of microseconds, so a source whose records take at most `cache_bytes` in all (estimated
    from the first) is decoded into memory once, here; that needs records of one shape, as batches do anyway.

    Args:
      source: a random-access source such as a TFDS data source (`len` and integer indexing; `__getitems__` is used where
        there is one), an `ArraySource`, an array, or a dict of arrays with the same leading size.
      batch_size: B, records in a global batch, at least 1; a multiple of `process_count`.
      seed: decides the order together with the epoch; any int from 0.
      transform: function of one batch (the tree of stacked NumPy arrays), such as a change of range; pure, since it is not
        part of the iterator's state.
      shuffle: whether every epoch has its own order; otherwise the order of the source.
      num_epochs: passes over the source, at least 1; `None` never ends.
      process_index: p, this process's number; JAX's if not given.
      process_count: P; JAX's if not given.
      drop_remainder: whether the n mod B records at the end of an epoch are left out. If not, the epoch's last batch is
        smaller; its size must be a multiple of `process_count` too.
      cache_bytes: see above; 0 always reads from the source.
      num_threads: threads that read ahead, for sources that are read from disk; 0 reads when asked.

    Returns:
      A Grain iterator. `get_state()` is a small dict that JSON can hold, and `set_state` of it continues with the batch that
      would have come next, also on another process count.

    Raises:
      ValueError: if the source is empty, a size or number is out of range, `batch_size` is not a multiple of
        `process_count`, or `batch_size` exceeds the source while remainders are dropped.
    """
    process_count = jax.process_count() if process_count is None else process_count
    process_index = jax.process_index() if process_index is None else process_index
    if isinstance(source, Mapping):
        source = ArraySource(source)
    _check(len(source), batch_size, seed, num_epochs, process_index, process_count, drop_remainder)
    if _fits(source, cache_bytes):
        source = ArraySource.of(source)
    batches = _Batches(source, _orders(len(source), seed, shuffle), batch_size, process_index, process_count, drop_remainder)
    dataset = batches.repeat(num_epochs)
    if transform is not None:
        dataset = dataset.map(transform)
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=4 * num_threads)
    return iter(dataset.to_iter_dataset(options))


class _Batches(grain.MapDataset):
    """One epoch of this process's batches; indices beyond it are later epochs, as everywhere in Grain."""

    def __init__(self, source, orders, batch_size, process_index, process_count, drop_remainder):
        super().__init__()
        self._source, self._orders, self._batch_size = source, orders, batch_size
        self._process_index, self._process_count = process_index, process_count
        self._length = len(source) // batch_size if drop_remainder else -(-len(source) // batch_size)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        epoch, batch = divmod(index, self._length)
        start = batch * self._batch_size
        part = min(self._batch_size, len(self._source) - start) // self._process_count
        first = start + self._process_index * part
        records = self._orders(epoch)[first : first + part]
        if isinstance(self._source, ArraySource):
            return self._source.rows(records)
        return _stack(_read(self._source, records))


def _orders(size: int, seed: int, shuffle: bool) -> Callable[[int], np.ndarray]:
    """Returns epoch -> order of the records; memory 16 bytes per record while an epoch is drawn, and 8 kept."""
    if not shuffle:
        in_order = np.arange(size)
        return lambda epoch: in_order

    @functools.lru_cache(maxsize=2)  # threads that read ahead are at most in two epochs
    def order(epoch: int) -> np.ndarray:
        # Sorting raw bits, whose stream NumPy promises to keep, gives one order in every version; `permutation` may not.
        # (Grain's own shuffle takes 30 microseconds per record, which would be most of the time of a small batch.)
        return np.argsort(np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(size), kind="stable")

    return order


def _fits(source: Any, cache_bytes: int) -> bool:
    if isinstance(source, ArraySource) or cache_bytes <= 0:
        return False
    first = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(source[0]))
    return first * len(source) <= cache_bytes


def _read(source: Any, indices: Any) -> list:
    if hasattr(source, "__getitems__"):
        return list(source.__getitems__([int(i) for i in indices]))
    return [source[int(i)] for i in indices]


def _stack(records: list) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *records)


def _check(size, batch_size, seed, num_epochs, process_index, process_count, drop_remainder) -> None:
    if size < 1:
        raise ValueError("source must hold at least one record, got an empty one")
    for name, value in (("batch_size", batch_size), ("process_count", process_count), ("num_epochs", num_epochs)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in 0..{process_count - 1} (process_count - 1), got {process_index}")
    if batch_size % process_count:
        raise ValueError(f"batch_size must be a multiple of process_count = {process_count}, got {batch_size}")
    if drop_remainder and batch_size > size:
        raise ValueError(f"batch_size must be at most {size}, the records of source, to drop remainders, got {batch_size}")
    last = size % batch_size
    if not drop_remainder and last % process_count:
        raise ValueError(f"process_count must divide the {last} records of an epoch's last batch, got {process_count}")
