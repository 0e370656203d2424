import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from jaxml25.diffusion import masked, networks

LABELS = jnp.array([0, 2, 3])  # of three classes; 3 is the null class

# name: (module, input, condition)
NETWORKS = {
    "unet": (networks.UNet2D((8, 16), 1, groups=4, num_classes=3), (3, 3, 2, 2), LABELS),
    "unet with context": (
        networks.UNet2D((8,), 1, self_attention=True, heads=2, cond_dim=3),
        (3, 2, 2, 1),
        jnp.ones((3, 2, 3)),
    ),
    "image dit": (networks.DiT(16, 1, 2, patch=2, num_classes=3), (3, 4, 6, 2), LABELS),
    "text dit": (networks.DiT(16, 1, 2, vocab=7, window=3, num_classes=3), (3, 5), LABELS),
    "mlp": (networks.MLPDenoiser(16, 1, num_classes=3, embedding_dim=8), (3, 6), LABELS),
}
# Every kind of block once, and quick to compile: for the tests that compile anew.
SMALL = ("unet with context", "image dit", "text dit", "mlp")
# Initialising draws every parameter by itself; with this generator that compiles many times faster.
QUICK_KEY = jax.random.key(0, impl="unsafe_rbg")
TIMES = jnp.array([3.0, 500.0, 999.0])


def network_input(name):
    module, shape, _ = NETWORKS[name]
    if name == "text dit":
        return jax.random.randint(jax.random.key(1), shape, 0, module.vocab)
    return jax.random.normal(jax.random.key(1), shape)


@pytest.fixture(scope="module")
def params():
    """Parameters of every network with nothing at zero, so that every input matters."""

    def some(name):
        module, _, cond = NETWORKS[name]
        shapes = jax.eval_shape(module.init, jax.random.key(0), network_input(name), TIMES, cond)["params"]
        rng = np.random.default_rng(0)
        draw = lambda leaf: jnp.asarray(
            rng.normal(size=leaf.shape) / max(np.sqrt(leaf.size / leaf.shape[-1]), 2), leaf.dtype
        )
        return jax.tree.map(draw, shapes)

    return {name: some(name) for name in NETWORKS}


@pytest.fixture(scope="module")
def apply():
    """Every network under one jit each: `apply[name](params, x, t, cond)`."""

    def jitted(module):
        return jax.jit(lambda params, x, t, cond: module.apply({"params": params}, x, t, cond))

    return {name: jitted(module) for name, (module, _, _) in NETWORKS.items()}


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "text dit"])
def test_an_untrained_network_has_an_epsilon_loss_of_one(name):
    module, shape, cond = NETWORKS[name]
    noise = jax.random.normal(jax.random.key(3), shape)
    predicted, variables = jax.jit(module.init_with_output)(QUICK_KEY, noise, TIMES, cond)
    assert abs(float(jnp.mean((predicted - noise) ** 2) / jnp.mean(noise**2)) - 1) < 0.05
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype("float32")}


def test_an_untrained_text_network_gives_every_token_the_same_probability():
    module, _, cond = NETWORKS["text dit"]
    logits, _ = jax.jit(module.init_with_output)(QUICK_KEY, network_input("text dit"), TIMES, cond)
    assert logits.shape == (3, 5, 7) and np.all(logits == 0)


@pytest.mark.parametrize("name", NETWORKS)
def test_time_and_condition_reach_every_output_of_their_own_example_only(name, params, apply):
    x, cond = network_input(name), NETWORKS[name][2]
    run = lambda x, t, cond: apply[name](params[name], x, t, cond)
    before = run(x, TIMES, cond)
    assert before.dtype == jnp.float32
    assert before.shape == ((3, 5, 7) if name == "text dit" else x.shape)
    changes = (
        run(x, TIMES.at[1].add(200), cond),
        run(x, TIMES, cond.at[1].set(1 - cond[1])),
        run(x.at[1].set(0), TIMES, cond),
    )
    for after in changes:
        differs = np.any(np.abs(after - before) > 1e-5, axis=tuple(range(1, before.ndim)))
        np.testing.assert_array_equal(differs, [False, True, False])


@pytest.mark.parametrize("name", ["text dit", "mlp"])
def test_a_scalar_time_is_that_time_for_every_example(name, params, apply):
    x, cond = network_input(name), NETWORKS[name][2]
    expected = apply[name](params[name], x, jnp.full(3, 70.0), cond)
    np.testing.assert_allclose(apply[name](params[name], x, 70.0, cond), expected, atol=1e-6)
    np.testing.assert_allclose(NETWORKS[name][0].apply({"params": params[name]}, x, 70, cond), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["text dit", "mlp"])
def test_no_condition_is_the_null_class(name, params, apply):
    run = lambda cond: apply[name](params[name], network_input(name), TIMES, cond)
    np.testing.assert_allclose(run(None), run(jnp.full(3, 3)), atol=1e-6)
    assert np.any(np.abs(run(None) - run(jnp.zeros(3, jnp.int32))) > 1e-3)


def test_no_context_is_the_learned_null_token_and_context_is_a_set(params, apply):
    name = "unet with context"
    run = lambda cond: apply[name](params[name], network_input(name), TIMES, cond)
    null = jnp.broadcast_to(params[name]["null_context"], (3, 1, 3))
    np.testing.assert_allclose(run(None), run(null), atol=1e-5)
    np.testing.assert_allclose(run(null), run(jnp.repeat(null, 2, axis=1)), atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_finite_and_reach_every_parameter(name, params):
    module, _, cond = NETWORKS[name]
    cond = None if name == "unet with context" else cond
    loss = lambda params: jnp.mean(jnp.sin(module.apply({"params": params}, network_input(name), TIMES, cond)))
    gradient = traverse_util.flatten_dict(jax.jit(jax.grad(loss))(params[name]), sep="/")
    assert all(np.all(np.isfinite(g)) for g in gradient.values())
    # One null token is attended to whatever the query, so the query is free.
    assert {path for path, g in gradient.items() if not np.any(g)} <= {path for path in gradient if "query" in path}


@pytest.mark.parametrize("name", SMALL)
def test_everything_is_float64_when_inputs_and_parameters_are(name, params, apply):
    module, x, cond = NETWORKS[name][0], network_input(name), NETWORKS[name][2]
    single = apply[name](params[name], x, TIMES, cond)
    with jax.enable_x64(True):
        widen = lambda leaf: leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        arguments = jax.tree.map(widen, ({"params": params[name]}, x, TIMES, cond))
        lowered = jax.jit(module.apply).lower(*arguments)
        double = lowered.compile()(*arguments)
    assert "f32>" not in lowered.as_text() and double.dtype == jnp.float64
    np.testing.assert_allclose(double, single, atol=1e-4)


@pytest.mark.parametrize("name", ["unet with context", "text dit"])
def test_bfloat16_compute_leaves_parameters_and_output_in_float32(name, params, apply):
    module, x, cond = NETWORKS[name][0], network_input(name), NETWORKS[name][2]
    half = module.clone(dtype=jnp.bfloat16)
    stored = jax.eval_shape(half.init, jax.random.key(0), x, TIMES, cond)
    assert {leaf.dtype for leaf in jax.tree.leaves(stored)} == {np.dtype("float32")}
    lowered = jax.jit(half.apply).lower({"params": params[name]}, x, TIMES, cond)
    assert re.search(r"(dot_general|convolution).*bf16>", lowered.as_text())
    rounded = lowered.compile()({"params": params[name]}, x, TIMES, cond)
    exact = apply[name](params[name], x, TIMES, cond)
    assert rounded.dtype == jnp.float32
    assert 0 < float(jnp.max(jnp.abs(exact - rounded))) < 0.1 * float(jnp.max(jnp.abs(exact)))


def test_bfloat16_compute_tells_neighbouring_timesteps_apart(params):
    half = NETWORKS["mlp"][0].clone(dtype=jnp.bfloat16)
    run = jax.jit(lambda t: half.apply({"params": params["mlp"]}, network_input("mlp"), t, LABELS))
    assert np.any(run(998.0) != run(999.0))  # both are 1000 in bfloat16


@pytest.mark.parametrize("name", ["text dit", "mlp"])
def test_parameters_can_be_mapped_over_and_nothing_recompiles(name, params, apply):
    module, x, cond = NETWORKS[name][0], network_input(name), NETWORKS[name][2]
    traces = []

    @jax.jit
    def both(params, t):
        traces.append(1)
        return jax.vmap(lambda params: module.apply({"params": params}, x, t, cond))(params)

    pair = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), params[name])
    first = both(pair, TIMES)
    both(jax.tree.map(lambda leaf: 2 * leaf, pair), TIMES + 1)
    assert len(traces) == 1
    alone = apply[name](jax.tree.map(lambda leaf: 0.5 * leaf, params[name]), x, TIMES, cond)
    np.testing.assert_allclose(first[1], alone, atol=1e-5)


# The pieces.


def test_timestep_embedding_is_sines_then_cosines():
    embedded = networks.timestep_embedding(jnp.array([0.0, 2.0]), 4)
    np.testing.assert_allclose(embedded[0], [0, 0, 1, 1])
    np.testing.assert_allclose(embedded[1], [np.sin(2), np.sin(0.02), np.cos(2), np.cos(0.02)], rtol=1e-6)


@pytest.mark.parametrize("size", [(1, 1), (3, 7)])
def test_unet_keeps_any_image_size(size):
    module = networks.UNet2D((8, 8, 8), 1)
    x = jnp.zeros((1, *size, 3))
    params = jax.eval_shape(module.init, jax.random.key(0), x, 0)
    assert jax.eval_shape(module.apply, params, x, 0).shape == x.shape


def test_dit_patches_are_squares_of_the_image():
    image = jnp.arange(2 * 4 * 6 * 3.0).reshape(2, 4, 6, 3)
    patches = networks._to_patches(image, 2)
    assert patches.shape == (2, 6, 12)
    np.testing.assert_array_equal(patches[1, 4], image[1, 2:4, 2:4].ravel())
    np.testing.assert_array_equal(networks._from_patches(patches, image.shape, 2), image)


def test_windows_are_the_neighbours_in_order_with_zeros_beyond_the_ends():
    windows = networks._windows(jnp.array([[[1.0], [2.0], [3.0]]]), 3)
    np.testing.assert_array_equal(windows[0], [[0, 1, 2], [1, 2, 3], [2, 3, 0]])


@pytest.mark.parametrize("axes", [1, 2])
def test_rotary_scores_depend_only_on_the_difference_of_places(axes):
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    score = lambda a, b: jnp.sum(networks._rotate(query, a) * networks._rotate(key, b))
    place = jnp.arange(axes)[None]
    np.testing.assert_allclose(score(place + 3, place), score(place + 10, place + 7), rtol=1e-4)
    assert abs(score(place + 3, place) - score(place, place)) > 1e-2


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_the_text_network_sees_order(positions):
    module = networks.DiT(16, 1, 2, vocab=5, positions=positions, use_time=False)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32), 0)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype), shapes)
    run = jax.jit(lambda tokens: module.apply(params, tokens[None], 0)[0])
    # Without positions, swapping two other tokens would not change the first one's logits.
    assert np.max(np.abs(run(jnp.array([0, 1, 2, 3]))[0] - run(jnp.array([0, 2, 1, 3]))[0])) > 1e-3


def test_a_network_without_time_ignores_it_and_a_single_token_is_a_sequence():
    module, token = networks.DiT(16, 1, 2, vocab=5, use_time=False), jnp.array([[4]])
    variables = jax.jit(module.init)(QUICK_KEY, token, 0.0)
    run = jax.jit(lambda params, t: module.apply(params, token, t))
    moved = jax.tree.map(lambda leaf: leaf + 0.3, variables)
    np.testing.assert_array_equal(run(moved, 0.0), run(moved, 0.9))
    assert not any("time" in path for path in traverse_util.flatten_dict(variables, sep="/"))


def test_time_scale_multiplies_time(params, apply):
    module, x, cond = NETWORKS["mlp"][0], network_input("mlp"), LABELS
    scaled = module.clone(time_scale=1000.0).apply({"params": params["mlp"]}, x, 0.25, cond)
    np.testing.assert_allclose(scaled, apply["mlp"](params["mlp"], x, 250.0, cond), atol=1e-5)


def test_the_text_network_trains_and_samples_through_masked_diffusion():
    module = networks.DiT(16, 1, 2, vocab=4, positions="learned", use_time=False)
    schedule, x0 = masked.MaskedSchedule(), jnp.tile(jnp.array([1, 2, 3]), (32, 2))  # the mask is token 0
    params = jax.jit(module.init)(QUICK_KEY, x0, 0.0)["params"]
    denoiser = lambda params: lambda x, t, cond: module.apply({"params": params}, x, t, cond)

    optimiser = optax.adam(1e-2)

    @jax.jit
    def train(params):
        def body(carry, key):
            params, state = carry
            loss = lambda params: masked.masked_loss(key, denoiser(params), x0, schedule, 0)[0]
            value, gradient = jax.value_and_grad(loss)(params)
            updates, state = optimiser.update(gradient, state)
            return (optax.apply_updates(params, updates), state), value

        (params, _), losses = jax.lax.scan(body, (params, optimiser.init(params)), jax.random.split(QUICK_KEY, 200))
        return params, losses

    params, losses = train(params)
    assert abs(float(losses[0]) - np.log(3)) < 0.5 and float(losses[-20:].mean()) < 0.1
    tokens = jax.jit(lambda key: masked.masked_sample(key, denoiser(params), schedule, (16, 6), 12, 0))(jax.random.key(2))
    assert np.mean(tokens == x0[:16]) > 0.9


def test_sharding_rules_name_parameters_that_exist_with_as_many_axes(params):
    paths = traverse_util.flatten_dict(params, sep="/")
    for rule, spec in networks.SHARDING_RULES.items():
        chosen = [leaf for path, leaf in paths.items() if re.fullmatch(rule, path)]
        assert chosen and all(leaf.ndim == len(spec) for leaf in chosen), rule


# Errors.


@pytest.mark.parametrize(
    ("module", "x", "t", "cond", "message"),
    [
        (networks.MLPDenoiser(8, 1), (2, 3), np.zeros(3), None, r"t must be a scalar or one time .* 2 examples, got \(3,\)"),
        (networks.MLPDenoiser(8, 1), (2, 3), 0, np.zeros(2, int), "cond must be None for a network without num_classes"),
        (
            networks.MLPDenoiser(8, 1, num_classes=2),
            (2, 3),
            0,
            np.zeros(1, int),
            r"cond must be 2 integer labels, got \(1,\)",
        ),
        (networks.UNet2D((6,)), (2, 4, 4, 1), 0, None, r"channels must be even and divisible by groups=8, got \(6,\)"),
        (networks.UNet2D((8,), 0), (2, 4, 4, 1), 0, None, "blocks_per_level must be at least 1, got 0"),
        (networks.UNet2D((8,), cond_dim=3), (2, 4, 4, 1), 0, np.zeros((2, 5, 4)), r"cond must be \(2, tokens, cond_dim=3\)"),
        (networks.UNet2D((8,), cond_dim=3, num_classes=2), (2, 4, 4, 1), 0, None, "give cond_dim or num_classes, not both"),
        (networks.DiT(8, 1, 2, patch=2), (2, 4, 5, 1), 0, None, r"patch must divide the image's sides \(4, 5\), got 2"),
        (networks.DiT(8, 1, 3, patch=2), (2, 4, 4, 1), 0, None, "heads must divide the width 8, got 3"),
        (networks.DiT(8, 1, 4, patch=2), (2, 4, 4, 1), 0, None, "hidden / heads must be divisible by 4 .* got 2"),
        (networks.DiT(8, 1, 2, vocab=3, window=2), (2, 4, 4, 1), 0, None, "window must be odd and at least 1, got 2"),
        (networks.DiT(8, 1, 2, positions="rotary"), (2, 4, 4, 1), 0, None, "positions must be one of rope, learned"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it(module, x, t, cond, message):
    t, cond = (jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in (t, cond))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(module.init, jax.random.key(0), jnp.zeros(x), t, cond)


def test_learned_positions_keep_to_the_length_they_were_made_for():
    module = networks.DiT(8, 1, 2, vocab=3, positions="learned")
    variables = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32), 0)
    with pytest.raises(ValueError, match="x must have 4 tokens, the length of the learned positions, got 5"):
        jax.eval_shape(module.apply, variables, jnp.zeros((1, 5), jnp.int32), 0)
