import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml25.diffusion import masked

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "fk-steering"
KINDS = ("loglinear", "cosine", "cosinesqr", "linear", "geometric")


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN / "masked_diffusion.npz"))


@pytest.fixture(scope="module")
def table():
    """A law over three tokens of four values, and its exact conditionals when 4 is the mask."""
    p0 = np.load(GOLDEN / "closed_form.npz")["mask/p0"]
    grids = np.stack(np.meshgrid(*[np.arange(5)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    conditionals = np.zeros((125, 3, 5))
    for state, visible in enumerate(grids):
        kept = p0
        for place, token in enumerate(visible):
            if token < 4:
                kept = np.take(kept, [token], axis=place)
        for place in range(3):
            marginal = kept.sum(axis=tuple(a for a in range(3) if a != place)) / kept.sum()
            at = range(4) if len(marginal) == 4 else [visible[place]]
            conditionals[state, place, at] = marginal
    return {"p0": p0, "states": grids, "conditionals": conditionals}


def table_denoiser(table, dtype=jnp.float32):
    # Tokens not asked for get log 0 = -inf on purpose: SUBS must survive it.
    logits = jnp.asarray(np.log(np.maximum(table["conditionals"], 1e-300)), dtype)

    def denoise(x_t, t, cond):
        return logits[(x_t * jnp.array([25, 5, 1])).sum(-1)]

    return denoise


def fixed_denoiser(logits):
    return lambda x_t, t, cond: jnp.broadcast_to(logits, (*x_t.shape, logits.shape[-1]))


# Schedules.


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_match_the_reference(golden, kind):
    t = jnp.asarray(golden[f"{kind}/t"])
    schedule = masked.MaskedSchedule(kind)
    np.testing.assert_allclose(schedule.sigma(t), golden[f"{kind}/sigma"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(schedule.dsigma(t), golden[f"{kind}/dsigma"], rtol=2e-6)
    np.testing.assert_allclose(schedule.alpha(t), np.exp(-golden[f"{kind}/sigma"]), rtol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_dsigma_is_the_derivative_of_sigma(kind):
    with jax.enable_x64(True):
        schedule = masked.MaskedSchedule(kind)
        t = jnp.linspace(0.001, 0.999, 50)
        np.testing.assert_allclose(schedule.dsigma(t), jax.vmap(jax.grad(schedule.sigma))(t), rtol=1e-10)
        np.testing.assert_allclose(schedule.mask_probability(t), 1 - jnp.exp(-schedule.sigma(t)), rtol=1e-10)
        np.testing.assert_allclose(schedule.loss_weight(t), schedule.dsigma(t) / jnp.expm1(schedule.sigma(t)), rtol=1e-10)
        assert schedule.sigma(t).dtype == jnp.float64


@pytest.mark.parametrize("kind", KINDS)
def test_chances_and_weights_keep_their_digits_at_small_times_in_float32(kind):
    schedule = masked.MaskedSchedule(kind)
    t = np.float32(1e-4)
    single = [schedule.mask_probability(jnp.asarray(t)), schedule.loss_weight(jnp.asarray(t))]
    with jax.enable_x64(True):
        double = [schedule.mask_probability(float(t)), schedule.loss_weight(float(t))]
    np.testing.assert_allclose(single, double, rtol=2e-6)


def test_a_schedule_passes_through_jit_and_takes_python_floats():
    schedule = masked.MaskedSchedule("linear", sigma_max=3.0)
    assert float(jax.jit(lambda schedule, t: schedule.sigma(t))(schedule, 0.5)) == 1.5
    assert float(masked.MaskedSchedule("loglinear", eps=0.5).mask_probability(0.5)) == 0.25


def test_bad_schedules_are_errors_that_name_the_argument():
    with pytest.raises(ValueError, match=r"kind must be one of loglinear, .* got 'loglin'; did you mean 'loglinear'"):
        masked.MaskedSchedule("loglin")
    with pytest.raises(ValueError, match=r"eps must be in \(0, 1\), got 0.0"):
        masked.MaskedSchedule("cosine", eps=0.0)
    with pytest.raises(ValueError, match="sigma_min and sigma_max must be increasing and positive"):
        masked.MaskedSchedule("geometric", sigma_min=0.0)


# The pieces against the reference's arrays.


@pytest.mark.parametrize("kind", KINDS)
def test_subs_step_and_loss_match_the_reference(golden, kind):
    x0, logits, x_t = (jnp.asarray(golden[name]) for name in ("x0", "logits", f"{kind}/xt"))
    t, dt, m = jnp.asarray(golden[f"{kind}/t"]), golden[f"{kind}/dt"], int(golden["mask_index"])
    schedule = masked.MaskedSchedule(kind)

    log_probs = masked.subs_log_probs(logits, x_t, m)
    possible = golden[f"{kind}/log_p_x0"] > -1e5
    np.testing.assert_allclose(log_probs[possible], golden[f"{kind}/log_p_x0"][possible], atol=1e-6)
    assert np.all(log_probs[~possible] == masked.LOG_ZERO)

    probs = masked.masked_step_probs(log_probs, x_t, t, t - dt, schedule, m)
    expected = golden[f"{kind}/q_xs_unnormalised"]
    expected = expected / expected.sum(axis=-1, keepdims=True)
    masks = np.asarray(x_t == m)
    np.testing.assert_allclose(probs[masks], expected[masks], atol=2e-6)
    np.testing.assert_array_equal(jnp.argmax(probs, axis=-1), golden[f"{kind}/xs_argmax"])
    np.testing.assert_allclose(probs.sum(axis=-1), 1, rtol=1e-6)

    losses = masked.token_losses(log_probs, x0, t, schedule)
    np.testing.assert_allclose(losses, golden[f"{kind}/token_loss"], rtol=1e-5)
    assert np.all(losses[~masks] == 0)


def test_subs_ignores_the_mask_column_wherever_it_is():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 6))
    x_t = jnp.array([[0, 5, 1], [0, 0, 3]])  # the mask is token 0 here
    log_probs = masked.subs_log_probs(logits, x_t, 0)
    at_masks = jax.nn.log_softmax(logits[..., 1:])
    np.testing.assert_allclose(log_probs[0, 0, 1:], at_masks[0, 0], atol=1e-6)
    assert log_probs[0, 0, 0] == masked.LOG_ZERO
    np.testing.assert_array_equal(jnp.exp(log_probs)[0, 1], np.eye(6)[5])
    loud = masked.subs_log_probs(logits.at[..., 0].set(1e4), x_t, 0)
    np.testing.assert_array_equal(loud, log_probs)


def test_half_precision_logits_give_float32_log_probs():
    logits = jnp.zeros((1, 2, 4), jnp.bfloat16)
    log_probs = masked.subs_log_probs(logits, jnp.array([[3, 1]]), 3)
    assert log_probs.dtype == jnp.float32
    np.testing.assert_allclose(log_probs[0, 0, :3], -math.log(3), rtol=1e-6)


def test_q_mask_masks_each_example_at_its_own_rate():
    schedule = masked.MaskedSchedule("loglinear")
    x0 = jnp.broadcast_to(jnp.arange(20_000) % 7, (3, 20_000))
    t = jnp.array([0.0, 0.3, 1.0])
    x_t = masked.q_mask(jax.random.key(0), x0, t, schedule, 7)
    rate = np.asarray((x_t == 7).mean(axis=1))
    chance = 0.999 * np.asarray(t)
    assert np.all(np.abs(rate - chance) <= 4 * np.sqrt(chance * (1 - chance) / 20_000))
    assert np.all((x_t == 7) | (x_t == x0))


# The loss.


def test_times_are_evenly_spread_and_keep_away_from_zero():
    t = np.sort(masked.low_discrepancy_times(jax.random.key(3), 64))
    assert t[0] >= 1e-3 and t[-1] < 1
    np.testing.assert_allclose(np.diff(t), 0.999 / 64, rtol=1e-3)


@pytest.mark.parametrize("kind", ["loglinear", "cosine", "cosinesqr"])
def test_the_loss_of_the_exact_independent_model_is_the_entropy(kind):
    # For independent tokens the bound is tight, whatever the schedule, but for the times and masks cut off at the ends.
    p = jnp.array([0.7, 0.2, 0.1])
    x0 = jax.random.categorical(jax.random.key(0), jnp.log(p), shape=(4096, 16))
    denoise = fixed_denoiser(jnp.append(jnp.log(p), 5.0))
    loss, aux = masked.masked_loss(jax.random.key(1), denoise, x0, masked.MaskedSchedule(kind), 3)
    entropy = float(-jnp.sum(p * jnp.log(p)))
    # A token's loss is weight x surprise when masked: its variance is about E[surprise^2] times the mean weight, at most 8.
    standard_error = float(jnp.sum(p * jnp.log(p) ** 2) * 8 / x0.size) ** 0.5
    assert abs(float(loss) - entropy) < 4 * standard_error
    assert abs(float(aux["masked_cross_entropy"]) - entropy) < 4 * standard_error
    assert 0.3 < float(aux["masked_fraction"]) < 0.7


def test_an_untrained_model_pays_the_logarithm_of_the_vocabulary():
    x0 = jax.random.randint(jax.random.key(0), (512, 32), 0, 10)
    loss, _ = masked.masked_loss(jax.random.key(1), fixed_denoiser(jnp.zeros(11)), x0, masked.MaskedSchedule(), 10)
    assert abs(float(loss) - math.log(10)) < 4 * math.log(10) * (6 / x0.size) ** 0.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_loss_gradient_is_finite_and_pushes_nothing_through_the_mask_column(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        x0 = jnp.array([[0, 1, 2, 3, 1]])
        loss = lambda logits: masked.masked_loss(
            jax.random.key(0), lambda x_t, t, cond: logits, x0, masked.MaskedSchedule(), 4
        )[0]
        logits = jnp.full((1, 5, 5), -jnp.inf, dtype).at[..., :4].set(0.5).at[..., 4].set(1e4)
        value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
        assert value.dtype == dtype and gradient.dtype == dtype
        assert np.isfinite(value) and np.all(np.isfinite(gradient))
        assert np.all(gradient[..., 4] == 0) and np.any(gradient[..., :4] != 0)


def test_the_loss_passes_time_and_condition_to_the_denoiser():
    def denoise(x_t, t, cond):
        assert t.shape == x_t.shape[:1] and cond == "fixed"
        return jnp.zeros((*x_t.shape, 4))

    loss, _ = masked.masked_loss(
        jax.random.key(0), denoise, jnp.zeros((3, 1), jnp.int32), masked.MaskedSchedule(), 3, "fixed"
    )
    assert np.isfinite(loss)


# The reverse step.


def test_step_probabilities_end_at_the_clean_distribution_and_start_as_a_mask():
    log_probs = masked.subs_log_probs(jnp.arange(4.0)[None], jnp.array([3]), 3)
    schedule = masked.MaskedSchedule("loglinear")
    probs = lambda t, s: masked.masked_step_probs(log_probs, jnp.array([3]), t, s, schedule, 3)[0]
    np.testing.assert_allclose(probs(0.4, 0.0), jnp.exp(log_probs[0]), rtol=1e-6)
    np.testing.assert_allclose(probs(0.4, 0.4), [0, 0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(probs(0.0, 0.0), [0, 0, 0, 1])  # no mask exists at t = 0; not NaN


def test_a_drawn_step_follows_the_step_probabilities():
    draws, schedule = 40_000, masked.MaskedSchedule("cosine")
    x_t = jnp.array([2, 0, 2])  # the mask is token 2
    log_probs = masked.subs_log_probs(jnp.array([[0.0, 1.0, 3.0, -1.0]] * 3), x_t, 2)
    keys = jax.random.split(jax.random.key(0), draws)
    step = jax.jit(jax.vmap(lambda key: masked.masked_step(key, log_probs, x_t, 0.8, 0.5, schedule, 2)))
    counts = jax.nn.one_hot(step(keys), 4).mean(axis=0)
    probs = masked.masked_step_probs(log_probs, x_t, 0.8, 0.5, schedule, 2)
    assert np.all(np.abs(counts - probs) <= 4 * np.sqrt(probs * (1 - probs) / draws))


def test_clean_draws_copy_visible_tokens_and_follow_p_elsewhere():
    draws = 20_000
    x_t = jnp.array([[3, 1], [0, 3]])
    log_probs = masked.subs_log_probs(jnp.broadcast_to(jnp.array([0.0, 1.0, 2.0, 9.0]), (2, 2, 4)), x_t, 3)
    clean = jax.jit(masked.draw_clean, static_argnames="num_draws")(jax.random.key(0), log_probs, num_draws=draws)
    assert clean.shape == (draws, 2, 2)
    assert np.all(clean[:, 0, 1] == 1) and np.all(clean[:, 1, 0] == 0)
    for place in ((0, 0), (1, 1)):
        frequency = jnp.bincount(clean[:, *place], length=4) / draws
        p = jnp.exp(log_probs[place])
        assert np.all(np.abs(frequency - p) <= 4 * np.sqrt(p * (1 - p) / draws))
    correlation = jnp.corrcoef(clean[:, 0, 0], clean[:, 1, 1])[0, 1]
    assert abs(float(correlation)) < 4 / draws**0.5


# The sampler.


@pytest.mark.parametrize(("num_steps", "distance"), [(3, 0.184), (8, 0.073), (64, 0.009)])
def test_the_exact_law_of_the_sampler_is_the_tabulated_one(table, num_steps, distance):
    golden = np.load(GOLDEN / "closed_form.npz")
    with jax.enable_x64(True):
        states = jnp.asarray(table["states"])
        log_probs = masked.subs_log_probs(table_denoiser(table, jnp.float64)(states, None, None), states, 4)
        schedule = masked.MaskedSchedule("loglinear")

        @jax.jit
        def kernel(t, s):
            probs = masked.masked_step_probs(log_probs, states, t, s, schedule, 4)
            return jnp.einsum("ni,nj,nk->nijk", probs[:, 0], probs[:, 1], probs[:, 2]).reshape(125, 125)

        law = jnp.zeros(125).at[-1].set(1)
        times = jnp.linspace(1.0, 0.0, num_steps + 1)
        for t, s in itertools.pairwise(times):
            law = law @ kernel(t, s)
        law = np.asarray(law).reshape(5, 5, 5)[:4, :4, :4]
    np.testing.assert_allclose(law, golden[f"mask_steps{num_steps}/sampler_law"], atol=1e-14)
    total_variation = 0.5 * np.abs(law - table["p0"]).sum()
    assert total_variation == pytest.approx(float(golden[f"mask_steps{num_steps}/tv_to_p0"]), abs=1e-13)
    assert total_variation == pytest.approx(distance, abs=5e-4)


@pytest.mark.parametrize("num_steps", [3, 8])
def test_drawn_sequences_follow_the_tabulated_law(table, num_steps):
    batch, denoise = 60_000, table_denoiser(table)
    sample = jax.jit(lambda key: masked.masked_sample(key, denoise, masked.MaskedSchedule(), (batch, 3), num_steps, 4))
    tokens = np.asarray(sample(jax.random.key(7)))
    assert tokens.max() < 4
    observed = np.bincount((tokens * [16, 4, 1]).sum(-1), minlength=64)
    expected = batch * np.load(GOLDEN / "closed_form.npz")[f"mask_steps{num_steps}/sampler_law"].ravel()
    chi_square = np.sum((observed - expected) ** 2 / expected)
    assert chi_square < 63 + 4.5 * (2 * 63) ** 0.5  # the data law itself would give thousands at 3 steps


@pytest.mark.parametrize("kind", ["loglinear", "geometric"])
def test_no_mask_is_left_and_prefixes_are_kept(kind):
    denoise = fixed_denoiser(jnp.array([9.0, 0.0, 0.0, 0.0]))  # the mask is token 0, and has the largest logit
    prefix = jnp.array([[1, 2], [3, 1]])
    tokens = masked.masked_sample(jax.random.key(0), denoise, masked.MaskedSchedule(kind), (2, 5), 2, 0, prefix=prefix)
    assert tokens.shape == (2, 5) and np.all(tokens > 0)
    np.testing.assert_array_equal(tokens[:, :2], prefix)
    shared = masked.masked_sample(jax.random.key(0), denoise, masked.MaskedSchedule(kind), (2, 5), 2, 0, prefix=prefix[0])
    np.testing.assert_array_equal(shared[:, :2], [[1, 2]] * 2)


def test_a_template_is_filled_only_where_it_has_masks():
    template = jnp.array([2, 3, 1, 3])
    tokens = masked.masked_sample(
        jax.random.key(0), fixed_denoiser(jnp.zeros(4)), masked.MaskedSchedule(), (64, 4), 3, 3, prefix=template
    )
    assert np.all(tokens[:, 0] == 2) and np.all(tokens[:, 2] == 1)
    assert len(np.unique(tokens[:, 1])) == 3 and np.all(tokens < 3)


def test_caching_gives_the_same_tokens_with_fewer_calls(table):
    denoise, schedule = table_denoiser(table), masked.MaskedSchedule("loglinear")
    plain = jax.jit(lambda key: masked.masked_sample(key, denoise, schedule, (2, 3), 50, 4))(jax.random.key(2))
    cached = jax.jit(lambda key: masked.masked_sample_cached(key, denoise, schedule, (2, 3), 50, 4))
    tokens, info = cached(jax.random.key(2))
    np.testing.assert_array_equal(tokens, plain)
    assert 3 <= int(info.network_calls) <= 7  # six tokens, at least three different steps for this key


@pytest.mark.parametrize("length", [1, 4])
def test_sampling_compiles_once_and_maps_over_keys(length):
    traces = []

    @jax.jit
    def run(key, logits):
        traces.append(1)
        return masked.masked_sample(key, fixed_denoiser(logits), masked.MaskedSchedule(), (3, length), 4, 2)

    first, second = (run(jax.random.key(seed), jnp.array([0.0, 1.0 + seed, 0.0])) for seed in (0, 1))
    assert len(traces) == 1 and first.shape == second.shape == (3, length)
    keys = jax.random.split(jax.random.key(0), 2)
    both = jax.vmap(run, in_axes=(0, None))(keys, jnp.zeros(3))
    np.testing.assert_array_equal(both[1], run(keys[1], jnp.zeros(3)))


def test_bad_arguments_are_errors_that_name_them():
    denoise, schedule, key = fixed_denoiser(jnp.zeros(4)), masked.MaskedSchedule(), jax.random.key(0)
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        masked.masked_sample(key, denoise, schedule, (2, 3), 0, 3)
    with pytest.raises(ValueError, match=r"mask_index must be in \[0, 4\), the size of the vocabulary, got 4"):
        masked.masked_sample(key, denoise, schedule, (2, 3), 1, 4)
    with pytest.raises(ValueError, match=r"prefix must be \(p,\) or \(batch, p\) .* got \(4,\)"):
        masked.masked_sample(key, denoise, schedule, (2, 3), 1, 3, prefix=jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match=r"t must be a scalar or of a leading shape of the tokens \(2, 3\), got \(3,\)"):
        masked.q_mask(key, jnp.zeros((2, 3), jnp.int32), jnp.zeros(3), schedule, 3)
    with pytest.raises(ValueError, match="num_draws must be at least 1, got 0"):
        masked.draw_clean(key, jnp.zeros((2, 4)), 0)
