"""Device meshes, and rules from a parameter's path to how it is split over one.

A rule is a regular expression and a tuple with one mesh axis (or None) per dimension. The first rule that matches the whole
path (`block_0/attention/kernel`) decides; what no rule matches is replicated. Methods know no mesh: arrays are placed here,
and the compiler moves what has to move.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

Rules = Mapping[str, tuple]


def make_mesh(axes: Mapping[str, int] | ConfigDict, devices: list | None = None) -> Mesh:
    """Arranges the devices of all processes.

    Args:
      axes: size of every axis, outermost first, e.g. `{"data": -1, "model": 2}`; one -1 takes what is left.
      devices: all of them by default.

    Raises:
      ValueError: if there is no axis, more than one -1, or the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dict(axes)
    if not sizes or any(size < 1 and size != -1 for size in sizes.values()) or list(sizes.values()).count(-1) > 1:
        raise ValueError(f"mesh must name at least one axis, with sizes from 1 and at most one -1, got {sizes}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(devices) % fixed or (-1 not in sizes.values() and fixed != len(devices)):
        raise ValueError(f"mesh must multiply to the {len(devices)} devices there are, got {sizes}")
    shape = tuple(len(devices) // fixed if size == -1 else size for size in sizes.values())
    return jax.make_mesh(shape, tuple(sizes), devices=devices, axis_types=(AxisType.Auto,) * len(shape))


def shardings(tree: Any, rules: Rules, mesh: Mesh) -> Any:
    """The sharding of every leaf; paths are those of the parameters, with what contains them as a prefix.

    Raises:
      ValueError: if a rule does not fit a leaf that it matches; the message names the leaf.
    """
    compiled = [(re.compile(pattern), tuple(spec)) for pattern, spec in rules.items()]

    def place(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next((spec for pattern, spec in compiled if pattern.fullmatch(name)), ())
        _check(name, np.shape(leaf), spec, mesh)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(place, tree)


def shard(tree: Any, rules: Rules, mesh: Mesh) -> Any:
    """Places every leaf by the rules; with several processes each must hold the same values.

    Raises:
      ValueError: as `shardings`.
    """
    return jax.tree.map(_place, tree, shardings(tree, rules, mesh))


def shard_batch(batch: Any, mesh: Mesh, axis: str = "data") -> Any:
    """Joins the parts of a batch that the processes hold into global arrays, split along their leading dimension.

    Each process hands in its own rows, as many as the others. Where its devices need rows of others too (the mesh's other axes
    span processes), the parts are exchanged.

    Raises:
      ValueError: if the mesh has no such axis, it does not divide the global batch, or there is an array without dimensions.
    """
    if axis not in mesh.shape:
        raise ValueError(f"axis must be one of the mesh's {tuple(mesh.shape)}, got {axis!r}")
    sharding = NamedSharding(mesh, PartitionSpec(axis))

    def join(path, part):
        part = np.asarray(part)
        if not part.ndim:
            raise ValueError(
                f"batch must hold arrays with a leading dimension, got a scalar at {jax.tree_util.keystr(path)!r}"
            )
        total = part.shape[0] * jax.process_count()
        if total % mesh.shape[axis]:
            raise ValueError(f"batch must divide over the {mesh.shape[axis]} devices of axis {axis!r}, got {total} rows")
        shape = (total, *part.shape[1:])
        if _rows_here(sharding, shape) == part.shape[0]:
            return jax.make_array_from_process_local_data(sharding, part, shape)
        whole = multihost_utils.process_allgather(part, tiled=True)
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])

    return jax.tree_util.tree_map_with_path(join, batch)


def _rows_here(sharding: NamedSharding, shape: tuple[int, ...]) -> int:
    """How many rows of a global array this process's devices hold, copies not counted."""
    parts = {index[0].indices(shape[0])[:2] for index in sharding.addressable_devices_indices_map(shape).values()}
    return sum(stop - start for start, stop in parts)


def _check(name: str, shape: tuple[int, ...], spec: tuple, mesh: Mesh) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"the rule {spec} for {name} has more dimensions than its shape {shape}")
    for size, axis in zip(shape, spec, strict=False):
        names = axis if isinstance(axis, tuple) else (axis,) if axis else ()
        unknown = [name for name in names if name not in mesh.shape]
        if unknown:
            raise ValueError(f"the rule {spec} for {name} names the axis {unknown[0]!r}, the mesh has {tuple(mesh.shape)}")
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts:
            raise ValueError(f"the rule {spec} for {name} splits a dimension of {size} into {parts} parts, shape {shape}")


def _place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _place(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
