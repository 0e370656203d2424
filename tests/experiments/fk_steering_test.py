import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import fk_steering as fk_config
from experiments import fk_choices, fk_digits, fk_steering, fk_text
from jaxml25.data import topics
from jaxml25.diffusion import fk_steering as fk
from jaxml25.training import workdir as workdir_lib


def test_the_smoke_variant_trains_steers_and_draws_everything(tmp_path):
    workdir = workdir_lib.Workdir(tmp_path)
    outcome = fk_steering.run(fk_config.get_config("smoke"), workdir)
    workdir.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    cases = {(row["method"], row["particles"]) for row in rows if row.get("namespace") == "digits" and "method" in row}
    assert {("best of n", 1), ("gradient guidance", 1), ("FK diff", 2), ("FK max", 2)} <= cases
    assert {row["reward"] for row in rows if row.get("namespace") == "text" and "reward" in row} == set(fk_text.REWARDS)
    names = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert names == {"gaussian", "digits", "digits_curves", "text"}
    assert set(outcome["params"]) == {"digits", "text"}
    assert outcome["metrics"]["digits/reward_accuracy"] > 0.9
    unbiased = [claim for claim in outcome["claims"] if claim.claim.startswith("E[Z")]
    assert len(unbiased) == 2
    assert all(claim.measured < 4 for claim in unbiased)


@pytest.mark.parametrize("variant", fk_config.VARIANTS)
def test_every_variant_has_what_its_parts_need(variant):
    config = fk_config.get_config(variant)
    assert all(part in config for part in config.parts)
    assert config.train is config.digits.train


def test_an_unknown_variant_is_an_error_that_names_the_valid_ones():
    with pytest.raises(ValueError, match=r"variant must be one of .*'smoke', 'small', 'paper'.*got 'smal'"):
        fk_config.get_config("smal")


def test_a_scheme_chosen_by_index_draws_what_the_scheme_draws():
    names = ("multinomial", "systematic", "ssp")
    log_weights = jnp.log(jnp.arange(1.0, 9.0))
    chosen = jax.jit(lambda index, key: fk_choices.any_scheme(names, index)(key, log_weights, 8))
    for index, name in enumerate(names):
        expected = fk.resampling.get(name)(jax.random.key(3), log_weights, 8)
        np.testing.assert_array_equal(chosen(index, jax.random.key(3)), expected)


def test_a_potential_chosen_by_index_weighs_as_the_potential_does():
    names = ("diff", "max", "is")
    rewards = jnp.array([0.5, -1.0])
    state = fk.potentials.diff.init(2, 0.1)
    for index, name in enumerate(names):
        for last in (False, True):
            measured = jax.jit(fk_choices.any_potential(names, index).update)(state, rewards, 2.0, last)
            expected = fk.potentials.get(name).update(state, rewards, 2.0, last)
            for a, b in zip(jax.tree.leaves(measured), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)


def test_digits_of_a_text_are_counted():
    tokens = jnp.asarray(np.stack([topics.encode("a1b22"), topics.encode("no!/:")]))
    np.testing.assert_array_equal(fk_text.count_digits(tokens), [3, 0])


def test_claims_about_digits_compare_the_right_rows():
    case = {"reward_stderr": 0.0, "accuracy_stderr": 0.0}
    rows = [
        {"method": "FK diff", "particles": 4, "reward": -1.0, "accuracy": 0.9, **case},
        {"method": "best of n", "particles": 8, "reward": -2.0, "accuracy": 0.85, **case},
        {"method": "best of n", "particles": 4, "reward": -3.0, "accuracy": 0.75, **case},
    ]
    reward, accuracy = fk_digits._claims(rows)
    assert (reward.measured, reward.holds) == (1.0, True)
    assert accuracy.measured == pytest.approx(15.0)
