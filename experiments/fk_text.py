"""Miniature C: a masked character model of Python's documentation, steered towards likely text and towards a rare attribute.

Two rewards, both black boxes to the model: the log-likelihood per character under a 5-gram model of held-out documentation (so
that exp(-reward) is a perplexity), and how many digits a sample has, up to three. Having three is the rare attribute.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from matplotlib import pyplot
from ml_collections import ConfigDict
from rich.text import Text

from experiments import denoisers, ngram
from jaxml25.data import topics
from jaxml25.diffusion import fk_steering as fk
from jaxml25.training import claims
from jaxml25.training.claims import Claim
from jaxml25.training.workdir import Workdir

BEST, DIFF = "best of n", "FK diff"
LIKELY, DIGITS = REWARDS = ("likely text", "three digits")
_MANY_DIGITS = 3


def run(config: ConfigDict, seed: int, workdir: Workdir, devices: jax.sharding.Mesh) -> dict:
    """Trains the model (or takes it from its checkpoint), steers it, and compares with independent samples."""
    model = denoisers.train_text(config, seed, workdir, devices)
    held_out = np.concatenate([topics.encode(text) for text in topics.texts("test").values()])
    judge = ngram.fit(jnp.asarray(held_out), order=5, vocabulary=topics.VOCAB_SIZE)
    settings = _Settings.of(config)
    found = {}  # (reward, method, K) -> one array of samples per seed
    cases = [(BEST, tuple(config.particles)), *((DIFF, (k,)) for k in config.particles if k > 1)]
    for method, counts in workdir.progress(cases, "steering text"):
        for reward, sampling_seed in itertools.product(REWARDS, config.seeds):
            samples = steer(
                jax.random.key(sampling_seed),
                model.params,
                judge,
                REWARDS.index(reward),
                config.lam[reward.split()[0]],
                schedule=model.schedule,
                denoise=model.denoise,
                method=method,
                counts=counts,
                config=settings,
            )
            for k, tokens in zip(counts, samples, strict=True):
                found.setdefault((reward, method, k), []).append(tokens)
    rows = [_row(case, samples, judge) for case, samples in found.items()]
    for row in rows:
        workdir.log(row, namespace="text")
    workdir.figure("text", _draw(rows))
    _show(found, max(config.particles), workdir)
    return {"claims": _claims(rows), "params": model.params}


class _Settings(NamedTuple):
    """The part of the configuration that shapes the computation."""

    length: int
    steps: int
    every: int
    repeats: int
    num_x0_samples: int
    ess_threshold: float

    @classmethod
    def of(cls, config: ConfigDict) -> "_Settings":
        return cls(*(config[name] for name in cls._fields))


def count_digits(tokens: Int[Array, "*batch length"]) -> Int[Array, "*batch"]:
    """How many characters are 0 to 9."""
    zero, nine = (int(token) for token in topics.encode("09"))
    return jnp.sum((tokens >= zero) & (tokens <= nine), axis=-1)


def _reward(index, judge: ngram.NGram) -> Callable:
    """The reward at a traced index of `REWARDS`."""
    likelihood = lambda tokens: ngram.log_likelihood(judge, tokens)
    digits = lambda tokens: jnp.minimum(count_digits(tokens), _MANY_DIGITS).astype(jnp.float32)
    return lambda tokens, info=None: jax.lax.switch(index, [likelihood, digits], tokens)


@functools.partial(jax.jit, static_argnames=("schedule", "denoise", "method", "counts", "config"))
def steer(
    key, params, judge, reward, lam, *, schedule, denoise, method: str, counts: tuple[int, ...], config: _Settings
) -> list[Int[Array, "repeats length"]]:
    """For every number of particles in `counts` one sample per repeat: the particle of largest reward."""
    score = _reward(reward, judge)
    kernel = fk.from_masked(
        schedule,
        lambda tokens, t, cond: denoise(params, tokens, t),
        config.length,
        config.steps,
        topics.MASK_INDEX,
    )

    def once(key):
        if method == BEST:
            tokens = fk.base_sample(key, kernel, max(counts))
            return [tokens[jnp.argmax(score(tokens[:k]))] for k in counts]
        options = fk.Config(
            "diff",
            lam=lam,
            every=config.every,
            start=config.every - 1,
            stop=config.steps - 2,
            ess_threshold=config.ess_threshold,
            num_x0_samples=config.num_x0_samples,
        )
        (k,) = counts
        return [fk.run(key, kernel, score, k, options).best]

    return jax.vmap(once)(jax.random.split(key, config.repeats))


def _row(case: tuple[str, str, int], samples: list[Int[Array, "repeats length"]], judge: ngram.NGram) -> dict:
    reward, method, k = case
    perplexities = np.array([float(jnp.exp(-jnp.mean(ngram.log_likelihood(judge, tokens)))) for tokens in samples])
    rates = np.array([float(jnp.mean(count_digits(tokens) >= _MANY_DIGITS)) for tokens in samples])
    error = lambda values: float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
    return {
        "reward": reward,
        "method": method,
        "particles": k,
        "perplexity": float(perplexities.mean()),
        "perplexity_stderr": error(perplexities),
        "digits_rate": float(rates.mean()),
        "digits_rate_stderr": error(rates),
    }


def _claims(rows: list[dict]) -> list[Claim]:
    by_case = {(row["reward"], row["method"], row["particles"]): row for row in rows}
    if (DIGITS, DIFF, 8) not in by_case or (LIKELY, DIFF, 4) not in by_case:
        return []
    steered, independent = by_case[DIGITS, DIFF, 8], by_case[DIGITS, BEST, 8]
    ratio = steered["digits_rate"] / max(independent["digits_rate"], 1e-9)
    relative = np.hypot(*(row["digits_rate_stderr"] / max(row["digits_rate"], 1e-9) for row in (steered, independent)))
    likely = {
        name: by_case[LIKELY, method, k] for name, method, k in (("base", BEST, 1), ("best", BEST, 4), ("fk", DIFF, 4))
    }

    def below(sentence, low, high):
        return claims.at_most(
            sentence,
            paper=None,
            measured=likely[low]["perplexity"] / likely[high]["perplexity"],
            bar=1.0,
            stderr=float(np.hypot(*(likely[n]["perplexity_stderr"] / likely[n]["perplexity"] for n in (low, high)))),
        )

    return [
        claims.at_least(
            "Text: share of samples with three digits, `diff` with 8 particles over the best of 8",
            paper=None,
            measured=ratio,
            bar=3.0,
            stderr=float(ratio * relative),
        ),
        below("Text: 5-gram perplexity of `diff` with 4 particles over that of the best of 4", "fk", "best"),
        below("Text: 5-gram perplexity of the best of 4 over that of the base model", "best", "base"),
    ]


def _draw(rows: list[dict]) -> pyplot.Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8))
    for axis, reward, name in ((left, LIKELY, "perplexity"), (right, DIGITS, "digits_rate")):
        for method in (BEST, DIFF):
            mine = [row for row in rows if row["reward"] == reward and row["method"] == method]
            values, errors = [row[name] for row in mine], [row[f"{name}_stderr"] for row in mine]
            axis.errorbar([row["particles"] for row in mine], values, errors, marker="o", label=method)
        axis.set(xlabel="particles (network calls per step and sample)", title=f"reward: {reward}")
    left.set_ylabel("5-gram perplexity per character")
    right.set_ylabel("share of samples with three digits")
    left.legend()
    figure.tight_layout()
    return figure


def _show(found: dict, most: int, workdir: Workdir) -> None:
    for case in ((LIKELY, BEST, 1), (LIKELY, DIFF, most), (DIGITS, DIFF, most)):
        if case in found:
            reward, method, k = case
            name = "base model" if (method, k) == (BEST, 1) else f"{method}, K = {k}, {reward}"
            sample = topics.decode(np.asarray(found[case][-1][0])).replace("\n", "⏎")
            workdir.say(Text(f"{name:>32}: {sample}"))
