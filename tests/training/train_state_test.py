import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxml25.training import train_state


def test_a_state_starts_at_step_0_with_an_average_of_its_own_if_one_is_asked_for():
    params, optimiser = {"w": jnp.arange(3.0)}, optax.adam(0.1)
    state = train_state.init(jax.random.key(1), params, optimiser, ema=True)
    assert int(state.step) == 0 and state.ema["w"] is not state.params["w"]
    np.testing.assert_array_equal(state.ema["w"], params["w"])
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(optimiser.init(params))
    assert train_state.init(jax.random.key(1), params, optimiser).ema is None
