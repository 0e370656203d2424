import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxml25.training import step, train_state


def _loss(params, key, batch):
    error = batch["x"] @ params["w"] - batch["y"]
    return jnp.mean(error**2), {"error": jnp.mean(error), "all_small": jnp.all(jnp.abs(error) < 100)}


def _noisy(params, key, batch):
    return jnp.sum(params["w"] ** 2), {"drawn": jax.random.uniform(key)}


def _batch(rows=12):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(rows, 3)), "y": rng.normal(size=rows)}


def _state(optimiser, **options):
    return train_state.init(jax.random.key(0), {"w": jnp.array([1.0, -2.0, 0.5])}, optimiser, **options)


def test_a_step_of_gradient_descent_is_the_closed_form():
    batch = _batch()
    state, metrics = step.make_step(_loss, optax.sgd(0.1))(_state(optax.sgd(0.1)), batch)
    before = np.array([1.0, -2.0, 0.5])
    gradient = 2 * batch["x"].T @ (batch["x"] @ before - batch["y"]) / 12
    np.testing.assert_allclose(state.params["w"], before - 0.1 * gradient, rtol=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    assert float(metrics["update_norm"]) == pytest.approx(0.1 * np.linalg.norm(gradient), rel=1e-5)
    assert int(state.step) == 1 and state.ema is None


@pytest.mark.parametrize(("accumulate", "dtype"), [(3, jnp.float32), (4, jnp.float64)])
def test_accumulated_gradients_and_metrics_equal_those_of_the_whole_batch(accumulate, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        batch = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), _batch())

        def run(accumulate):
            state = train_state.init(jax.random.key(0), {"w": jnp.array([1.0, -2.0, 0.5], dtype)}, optax.adam(0.1))
            return step.make_step(_loss, optax.adam(0.1), accumulate=accumulate)(state, batch)

        tolerance = 1e-5 if dtype == jnp.float32 else 1e-13
        for ours, whole in zip(jax.tree.leaves(run(accumulate)), jax.tree.leaves(run(1)), strict=True):
            if not jax.dtypes.issubdtype(ours.dtype, jax.dtypes.prng_key):
                np.testing.assert_allclose(ours, whole, rtol=tolerance, atol=tolerance)


def test_every_microbatch_and_every_step_draws_from_a_key_of_its_own():
    take = step.make_step(_noisy, optax.sgd(0.1))
    state, drawn = _state(optax.sgd(0.1)), []
    for _ in range(3):
        state, metrics = take(state, _batch())
        drawn.append(float(metrics["drawn"]))
    key = jax.random.key(0)
    assert drawn == [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(3)]
    _, metrics = step.make_step(_noisy, optax.sgd(0.1), accumulate=4)(_state(optax.sgd(0.1)), _batch())
    keys = jax.random.split(jax.random.fold_in(key, 0), 4)
    assert float(metrics["drawn"]) == pytest.approx(float(jnp.mean(jax.vmap(jax.random.uniform)(keys))), rel=1e-6)


def test_the_state_is_donated_and_steps_do_not_compile_anew():
    take = step.make_step(_loss, optax.adam(0.1), ema_decay=0.9)
    first = _state(optax.adam(0.1), ema=True)
    state, _ = take(first, _batch())
    state, _ = take(state, _batch())
    assert first.params["w"].is_deleted() and take._cache_size() == 1


@pytest.mark.parametrize("accumulate", [1, 3])
def test_numbers_are_trained_and_leaves_that_have_no_gradient_are_carried_along(accumulate):
    def loss(params, key, batch):
        return jnp.mean((batch["x"] * params["scale"] * params["count"]) ** 2), {}

    optimiser = optax.adamw(0.5, weight_decay=0.1)  # which would pull a counter to 0 as well
    params = {"scale": 2.0, "count": 3, "key": jax.random.key(7), "none": None}
    state = train_state.init(jax.random.key(0), params, optimiser, ema=True)
    take = step.make_step(loss, optimiser, ema_decay=0.9, accumulate=accumulate)
    for _ in range(2):
        state, _ = take(state, _batch())
    assert take._cache_size() == 1
    # Adam's first two steps under a gradient of one sign are (nearly) the rate; the decay takes 5 % more of the weight.
    assert float(state.params["scale"]) == pytest.approx((2.0 * 0.95 - 0.5) * 0.95 - 0.5, rel=0.02)
    assert int(state.params["count"]) == int(state.ema["count"]) == 3 and state.params["none"] is None
    assert jax.random.key_data(state.params["key"]).tolist() == jax.random.key_data(jax.random.key(7)).tolist()
    assert len(jax.tree.leaves(state.opt_state[0].mu)) == 1


def test_the_parameters_and_the_key_that_a_state_was_made_of_outlive_its_steps():
    params, key = {"w": jnp.array([1.0, -2.0, 0.5])}, jax.random.key(0)
    step.make_step(_loss, optax.sgd(0.1))(train_state.init(key, params, optax.sgd(0.1)), _batch())
    assert params["w"].tolist() == [1.0, -2.0, 0.5] and jax.random.key_data(key).tolist() == [0, 0]


def test_the_average_is_that_of_the_new_parameters_and_starts_at_the_first():
    take = step.make_step(_loss, optax.sgd(0.1), ema_decay=0.9)
    state, _ = take(_state(optax.sgd(0.1), ema=True), _batch())
    np.testing.assert_allclose(
        state.ema["w"], 0.1 * np.array([1.0, -2.0, 0.5]) + 0.9 * np.asarray(state.params["w"]), rtol=1e-6
    )


@pytest.mark.parametrize(
    "optimiser",
    [
        optax.chain(optax.clip(1.0), optax.adam(1e-1), optax.contrib.reduce_on_plateau()),
        optax.contrib.schedule_free_adamw(1e-1),
        optax.lbfgs(),
    ],
    ids=["plateau", "schedule_free", "lbfgs"],
)
def test_any_optimiser_lowers_the_loss_also_one_that_looks_at_it(optimiser):
    take = step.make_step(_loss, optimiser)
    state, losses = _state(optimiser), []
    for _ in range(6):
        state, metrics = take(state, _batch())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


def test_what_cannot_work_is_an_error_that_names_the_argument():
    with pytest.raises(ValueError, match="accumulate must be at least 1, got 0"):
        step.make_step(_loss, optax.sgd(0.1), accumulate=0)
    with pytest.raises(ValueError, match="accumulate must divide the batch of 12, got 5"):
        step.make_step(_loss, optax.sgd(0.1), accumulate=5)(_state(optax.sgd(0.1)), _batch())
    with pytest.raises(ValueError, match=r"ema_decay must be None for a state without an average, got 0\.9"):
        step.make_step(_loss, optax.sgd(0.1), ema_decay=0.9)(_state(optax.sgd(0.1)), _batch())
