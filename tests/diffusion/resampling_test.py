import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import resampling

GOLDEN = np.load(pathlib.Path(__file__).parent.parent / "golden" / "fk-steering" / "resampling.npz")
NAMES = ("multinomial", "systematic", "stratified", "residual", "ssp")
GOLDEN_CASES = sorted({key.split("/")[0] for key in GOLDEN.files if key.endswith("/idx")})


def offspring(ancestors, size):
    return np.bincount(np.asarray(ancestors), minlength=size)


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_recorded_uniforms_give_the_recorded_ancestors(case):
    with jax.enable_x64(True):
        weights, num, expected = (GOLDEN[f"{case}/{name}"] for name in ("W", "M", "idx"))
        scheme = resampling.SCHEMES[case.split("_")[-1]]
        # No uniforms are recorded where residual resampling had nothing left to draw.
        uniforms = GOLDEN[f"{case}/u0"] if f"{case}/u0" in GOLDEN.files else np.zeros(0)
        if scheme is resampling.ssp and uniforms.size == 0:
            uniforms = np.full(weights.size - 1, 0.5)
        ancestors = scheme(jnp.asarray(uniforms), jnp.log(weights), int(num))
        assert ancestors.dtype == jnp.int32
        if scheme is resampling.multinomial and uniforms.size == 0:
            return
        np.testing.assert_array_equal(ancestors, expected)


@pytest.mark.parametrize("case", [key for key in GOLDEN.files if key.endswith("_ess")])
def test_effective_sample_size_is_the_recorded_one(case):
    weights = GOLDEN[f"{case[:-4]}_systematic/W"]
    with jax.enable_x64(True):
        np.testing.assert_allclose(resampling.effective_sample_size(jnp.log(weights) + 700), GOLDEN[case], rtol=1e-12)
    np.testing.assert_allclose(resampling.effective_sample_size(np.log(weights).astype(np.float32)), GOLDEN[case], rtol=1e-5)


@pytest.mark.parametrize(("size", "num"), [(7, 7), (5, 12), (12, 5)])
@pytest.mark.parametrize("name", NAMES)
def test_expected_offspring_is_proportional_to_the_weights(name, size, num):
    draws = 200_000
    log_weights = jax.random.normal(jax.random.key(1), (size,))
    keys = jax.random.split(jax.random.key(2), draws)
    counts = jax.jit(
        lambda keys: jax.vmap(lambda key: jnp.bincount(resampling.get(name)(key, log_weights, num), length=size))(keys)
    )(keys)
    expected = num * jax.nn.softmax(log_weights)
    standard_error = np.std(np.asarray(counts), axis=0) / draws**0.5
    assert np.all(np.abs(np.mean(np.asarray(counts), axis=0) - expected) < 4 * standard_error + 1e-5)
    assert np.all(np.sum(np.asarray(counts), axis=1) == num)
    if name in ("systematic", "ssp"):
        assert np.all(counts >= np.floor(expected)) and np.all(counts <= np.ceil(expected))
    if name == "residual":
        assert np.all(counts >= np.floor(expected))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("name", ["systematic", "ssp", "residual", "stratified"])
def test_offspring_of_many_particles_stays_within_its_bounds(name, dtype):
    """A one-word cumulative sum in float32 is off by 1e-3 offspring here, and miscounts some of these."""
    with jax.enable_x64(dtype == jnp.float64):
        size = 5000
        run = jax.jit(resampling.get(name), static_argnums=2)
        for seed in range(10):
            log_weights = 2 * jax.random.normal(jax.random.key(seed), (size,), dtype)
            counts = offspring(run(jax.random.key(100 + seed), log_weights, size), size)
            exact = np.exp(np.asarray(log_weights, np.float64))
            expected = size * exact / exact.sum()
            slack = 1e-6 * expected  # the weights themselves are rounded
            assert counts.sum() == size
            if name != "stratified":
                assert np.all(counts >= np.floor(expected - slack))
            if name in ("systematic", "ssp"):
                assert np.all(counts <= np.ceil(expected + slack))
            if name == "stratified":  # an interval of length M W meets at most two strata more than it fills
                assert np.all(np.abs(counts - expected) < 2 + slack)


@pytest.mark.parametrize("name", NAMES)
def test_zero_weights_have_no_offspring_even_at_the_outer_edges(name):
    uniform_count = {"multinomial": 64, "systematic": 1, "stratified": 64, "residual": 65, "ssp": 4095}[name]
    alive = np.zeros(4096, bool)
    alive[1000:3000:7] = True
    log_weights = jnp.where(alive, jax.random.normal(jax.random.key(0), (4096,)), -jnp.inf)
    last_below_one = np.nextafter(np.float32(1), np.float32(0))
    draws = [jax.random.key(i) for i in range(20)]
    draws += [jnp.full((uniform_count,), u, jnp.float32) for u in (0.0, last_below_one)]
    for draw in draws:
        ancestors = np.asarray(resampling.get(name)(draw, log_weights, 64))
        assert np.all(alive[ancestors])


@pytest.mark.parametrize("name", NAMES)
def test_only_differences_of_log_weights_matter(name):
    scheme = jax.jit(resampling.get(name), static_argnums=2)
    with jax.enable_x64(True):
        base = jnp.asarray([-3.0, 0.5, 0.0, -0.25, 1.0])
        for shift in (0.0, np.log(1e300), -np.log(1e300)):
            np.testing.assert_array_equal(scheme(jax.random.key(3), base + shift, 9), scheme(jax.random.key(3), base, 9))
        extreme = jnp.asarray([np.log(1e-300), np.log(1e300), np.log(1e-300)])
        assert np.all(np.asarray(scheme(jax.random.key(3), extreme, 9)) == 1)
        assert resampling.effective_sample_size(extreme) == 1
    extreme = jnp.asarray([-1e30, 1e4, -3e38], jnp.float32)
    assert np.all(np.asarray(scheme(jax.random.key(3), extreme, 9)) == 1)


@pytest.mark.parametrize("name", NAMES)
def test_nan_counts_as_zero_and_no_weight_at_all_as_equal_weights(name):
    scheme = resampling.get(name)
    ancestors = scheme(jax.random.key(0), jnp.asarray([jnp.nan, 0.0, jnp.nan, -jnp.inf]), 6)
    assert np.all(np.asarray(ancestors) == 1)
    ancestors = scheme(jax.random.key(0), jnp.full((3,), -jnp.inf), 3)
    if name != "multinomial":
        np.testing.assert_array_equal(np.sort(ancestors), [0, 1, 2])
    assert resampling.effective_sample_size(jnp.full((3,), -jnp.inf)) == 3
    ancestors = scheme(jax.random.key(0), jnp.asarray([0.0, jnp.inf, 0.0]), 4)
    assert np.all(np.asarray(ancestors) == 1)


@pytest.mark.parametrize("name", ["systematic", "stratified", "residual", "ssp"])
def test_equal_weights_keep_every_particle_once(name):
    for size in (1, 3, 49, 1000):
        ancestors = resampling.get(name)(jax.random.key(size), jnp.full((size,), 0.3), size)
        np.testing.assert_array_equal(np.sort(ancestors), np.arange(size))


def test_none_is_the_identity():
    np.testing.assert_array_equal(resampling.none(jax.random.key(0), jnp.zeros(3), 3), [0, 1, 2])
    with pytest.raises(ValueError, match="num must equal the number of particles"):
        resampling.none(jax.random.key(0), jnp.zeros(3), 4)


def test_log_mean_exp_of_huge_values_is_exact():
    np.testing.assert_allclose(resampling.log_mean_exp(jnp.asarray([1e4, 1e4])), 1e4)
    assert resampling.log_mean_exp(jnp.full((3,), -jnp.inf)) == -jnp.inf


def test_scalars_are_shared_and_arrays_gathered():
    particles = {"x": jnp.arange(6.0).reshape(3, 2), "count": jnp.asarray(5)}
    taken = resampling.take(particles, jnp.asarray([2, 0, 0]))
    np.testing.assert_array_equal(taken["x"], [[4, 5], [0, 1], [0, 1]])
    assert taken["count"] == 5


def test_bad_arguments_name_themselves():
    weights = jnp.zeros(4)
    with pytest.raises(ValueError, match="num must be at least 1, got 0"):
        resampling.systematic(jax.random.key(0), weights, 0)
    with pytest.raises(ValueError, match="4 uniforms for stratified resampling, got uniforms of shape"):
        resampling.stratified(jnp.zeros(3), weights, 4)
    with pytest.raises(ValueError, match="did you mean 'systematic'"):
        resampling.get("sytematic")


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from jaxml25.diffusion import resampling
assert jax.device_count() == 8
particles = {"x": jnp.arange(64 * 3.0).reshape(64, 3), "tag": jnp.arange(64)}
log_weights = jax.random.normal(jax.random.key(0), (64,))
def resample(key, log_weights, particles):
    everyone = resampling.gather_log_weights(log_weights, "particles")
    return resampling.take(particles, resampling.systematic(key, everyone, 64), axis_name="particles")
mesh = jax.make_mesh((8,), ("particles",), axis_types=(jax.sharding.AxisType.Auto,))
split = P("particles")
spread = jax.jit(jax.shard_map(resample, mesh=mesh, in_specs=(P(), split, split), out_specs=split))
alone = resampling.take(particles, resampling.systematic(jax.random.key(1), log_weights, 64))
for name, leaf in spread(jax.random.key(1), log_weights, particles).items():
    assert len(leaf.sharding.device_set) == 8
    np.testing.assert_array_equal(leaf, alone[name])
"""


def test_eight_devices_exchange_the_same_particles_as_one(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text('import os\nos.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"\n' + SHARDED)
    root = pathlib.Path(__file__).parent.parent.parent
    environment = os.environ | {"PYTHONPATH": str(root)}
    outcome = subprocess.run([sys.executable, str(script)], cwd=root, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
