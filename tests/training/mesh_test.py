"""Meshes of forced host devices live in a process of their own; what needs none is tested here."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from jaxml25.training import mesh

_ON_EIGHT_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jaxml25.training import mesh

assert dict(mesh.make_mesh({"data": -1, "model": 2}).shape) == {"data": 4, "model": 2}
assert dict(mesh.make_mesh({"data": 8}).shape) == {"data": 8}
devices = mesh.make_mesh({"data": 4, "model": 2})
for axes in ({"data": 3, "model": -1}, {"data": 4}, {"data": 16}):
    try:
        mesh.make_mesh(axes)
        raise SystemExit(f"{axes} made a mesh")
    except ValueError as error:
        assert str(error) == f"mesh must multiply to the 8 devices there are, got {axes}", error

tree = {"block_0": {"kernel": np.arange(24.0).reshape(4, 6), "bias": jnp.arange(6)}, "key": jax.random.key(3)}
rules = {"block_.*/kernel": (None, "model"), ".*kernel": ("model", None), "key": ()}
placed = mesh.shard(tree, rules, devices)
kernel = placed["block_0"]["kernel"]
assert kernel.sharding.spec == jax.P(None, "model") and kernel.addressable_shards[0].data.shape == (4, 3)
assert placed["block_0"]["bias"].sharding.is_fully_replicated and len(placed["block_0"]["bias"].devices()) == 8
assert jax.random.key_data(placed["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()
assert placed["key"].dtype == tree["key"].dtype and len(placed["key"].devices()) == 8
keys = mesh.shard({"keys": jax.random.split(jax.random.key(0), 4)}, {"keys": ("data",)}, devices)["keys"]
assert keys.addressable_shards[0].data.shape == (1,)
np.testing.assert_array_equal(kernel, tree["block_0"]["kernel"])
both = mesh.shard(np.arange(16), {".*": (("data", "model"),)}, devices)
assert both.addressable_shards[0].data.shape == (2,)

batch = mesh.shard_batch({"x": np.arange(8), "y": np.ones((8, 3))}, devices)
assert [shard.data.tolist() for shard in batch["x"].addressable_shards[::2]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
for tree, rules, message in (
    (np.ones(3), {".*": ("model",)}, "splits a dimension of 3 into 2 parts, shape (3,)"),
    (np.ones(6), {".*": (("data", "model"),)}, "splits a dimension of 6 into 8 parts, shape (6,)"),
):
    try:
        mesh.shardings({"w": tree}, rules, devices)
        raise SystemExit(f"{rules} was accepted")
    except ValueError as error:
        assert message in str(error) and "for w" in str(error), error
try:
    mesh.shard_batch(np.ones(6), devices)
    raise SystemExit("6 rows were split over 4")
except ValueError as error:
    assert "batch must divide over the 4 devices of axis 'data', got 6 rows" in str(error), error

# The compiler would rather split the bias, which the rules replicate, as it splits what the bias is added to.
import tempfile
import optax
from jaxml25.training import loop, step, train_state, workdir

def loss(params, key, batch):
    return jnp.mean((jnp.tanh(batch @ params["kernel"] + params["bias"]) - 1) ** 2), {}

def batches(number):
    compiled_before.append(len(compiled))
    return np.ones((8, 3), np.float32)

params = {"kernel": jnp.full((3, 32), 0.1), "bias": jnp.zeros(32)}
state = mesh.shard(train_state.init(jax.random.key(0), params, optax.adam(0.1), ema=True), {".*kernel": (None, "model")}, devices)
placed = [leaf.sharding for leaf in jax.tree.leaves(state)]
compiled, compiled_before = [], []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event) if "compile" in event else None)
take = step.make_step(loss, optax.adam(0.1), ema_decay=0.9, accumulate=2)
with tempfile.TemporaryDirectory() as folder:
    state = loop.fit(workdir.Workdir(folder), "stage", state, take, batches, num_steps=4, mesh=devices)
now = [leaf.sharding for leaf in jax.tree.leaves(state)]
assert now == placed, [(a, b) for a, b in zip(now, placed) if a != b]
assert compiled_before[1] == compiled_before[3], compiled
print("done")
"""


def test_eight_devices_are_arranged_and_arrays_split_by_the_first_rule_that_matches_and_steps_leave_them_there():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", _ON_EIGHT_DEVICES], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("done\n"), done.stderr


def test_rules_match_whole_paths_through_what_contains_the_parameters():
    devices = mesh.make_mesh({"data": 1}, jax.devices()[:1])
    tree = {"params": {"out": {"kernel": jnp.ones((2, 2))}, "outer": jnp.ones(2)}}
    specs = jax.tree.map(lambda sharding: sharding.spec, mesh.shardings(tree, {".*out": ("data",)}, devices))
    assert jax.tree.leaves(specs) == [PartitionSpec(), PartitionSpec()]
    specs = mesh.shardings(tree, {".*/kernel": (None, "data"), ".*": ("data",)}, devices)["params"]
    assert specs["out"]["kernel"].spec == PartitionSpec(None, "data") and specs["outer"].spec == PartitionSpec("data")


def test_a_config_is_a_mesh_and_one_device_one_too():
    assert dict(mesh.make_mesh(ConfigDict({"data": -1, "model": 1}), jax.devices()[:1]).shape) == {"data": 1, "model": 1}


def test_a_batch_without_rows_is_an_error_that_names_the_leaf():
    with pytest.raises(ValueError, match=r"leading dimension, got a scalar at .*rate"):
        mesh.shard_batch({"x": np.ones(4), "rate": np.float32(0.1)}, mesh.make_mesh({"data": 1}, jax.devices()[:1]))


@pytest.mark.parametrize("axes", [{}, {"data": -1, "model": -1}, {"data": 0}, {"data": -2}])
def test_sizes_that_make_no_mesh_are_an_error(axes):
    with pytest.raises(ValueError, match="mesh must name at least one axis, with sizes from 1 and at most one -1, got"):
        mesh.make_mesh(axes)


def test_a_rule_that_does_not_fit_is_an_error_that_names_the_leaf():
    devices = mesh.make_mesh({"data": 1}, jax.devices()[:1])
    with pytest.raises(ValueError, match=r"\('data', None\) for a/bias has more dimensions than its shape \(3,\)"):
        mesh.shardings({"a": {"bias": np.ones(3)}}, {".*bias": ("data", None)}, devices)
    with pytest.raises(ValueError, match=r"for w names the axis 'modle', the mesh has \('data',\)"):
        mesh.shard({"w": np.ones(3)}, {".*": ("modle",)}, devices)
    with pytest.raises(ValueError, match=r"axis must be one of the mesh's \('data',\), got 'batch'"):
        mesh.shard_batch(np.ones(3), devices, "batch")
