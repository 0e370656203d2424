import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.training import ema


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_warmed_up_average_of_a_constant_forgets_the_start_by_the_product_of_the_decays(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        average, params = {"a": jnp.array([1.0, 5.0], dtype)}, {"a": jnp.array([3.0, 3.0], dtype)}
        update = jax.jit(ema.update, static_argnames="limit")
        for step in range(20):
            average = update(average, params, step, limit=0.5)
        # d_k = (1 + k) / (10 + k) up to k = 8, where it reaches 1/2: the product telescopes to 9! 9! / 18!.
        kept = np.prod([(1 + k) / (10 + k) for k in range(9)]) * 0.5**11
        np.testing.assert_allclose(
            average["a"], 3 + kept * np.array([-2.0, 2.0]), rtol=1e-6 if dtype == jnp.float32 else 1e-14
        )
        assert average["a"].dtype == dtype


def test_the_decay_grows_from_a_tenth_to_its_limit():
    assert [float(ema.decay(k, 0.9)) for k in (0, 8, 80, 81, 1000)] == pytest.approx([0.1, 0.5, 0.9, 0.9, 0.9])


def test_counters_are_taken_over_as_they_are():
    new = ema.update({"n": jnp.array(1), "x": jnp.array(1.0)}, {"n": jnp.array(7), "x": jnp.array(2.0)}, 0, 0.9)
    assert int(new["n"]) == 7 and new["n"].dtype == jnp.int32 and float(new["x"]) == pytest.approx(1.9)


@pytest.mark.parametrize("limit", [1.0, -0.1, float("nan")])
def test_a_limit_out_of_range_is_an_error_that_names_it(limit):
    with pytest.raises(ValueError, match=r"limit must be in \[0, 1\), got"):
        ema.update(jnp.ones(1), jnp.ones(1), 0, limit)
