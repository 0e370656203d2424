"""Miniature B: an unconditional model of handwritten digits, steered towards one class by a classifier it has never seen.

The black-box reward is the log-probability of the class under a logistic regression. A perceptron fitted on other images judges
what comes out: how often it is of the class, and how far its features lie from those of real digits of that class.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib import pyplot
from ml_collections import ConfigDict

from experiments import classifiers, denoisers, fk_choices
from jaxml25.data import digits
from jaxml25.diffusion import fk_steering as fk
from jaxml25.diffusion import samplers, schedules
from jaxml25.training import claims
from jaxml25.training.claims import Claim
from jaxml25.training.workdir import Workdir

GUIDED, BEST, FK = "gradient guidance", "best of n", "FK"  # the best of 1 is the base model
DIFF, MAX = "FK diff", "FK max"
POTENTIALS = {DIFF: 0, MAX: 1}


class Judges(NamedTuple):
    """The classifier that rewards, and the one that judges."""

    reward: classifiers.Dense
    judge: classifiers.Dense


def run(config: ConfigDict, seed: int, workdir: Workdir, devices: jax.sharding.Mesh) -> dict:
    """Trains the model (or takes it from its checkpoint), steers it, and compares with the baselines."""
    model = denoisers.train_digits(config, seed, workdir, devices)
    judges, accuracies = fit_judges(seed)
    settings = _Settings.of(config)
    found = {}  # (method, K) -> one array of samples (class, repeat, pixel) per seed
    for methods, counts in workdir.progress(_cases(config.particles), "steering digits"):
        for method, sampling_seed in itertools.product(methods, config.seeds):
            key = jax.random.key(sampling_seed)
            samples = steer(
                key,
                model.schedule,
                model.params,
                judges.reward,
                POTENTIALS.get(method, 0),
                denoise=model.denoise,
                method=method if method in (BEST, GUIDED) else FK,
                counts=counts,
                config=settings,
            )
            for k, x in zip(counts, samples, strict=True):
                found.setdefault((method, k), []).append(x)
    rows = [
        {"method": m, "particles": k, **_mean_and_error([_judge(x, judges) for x in xs])} for (m, k), xs in found.items()
    ]
    for row in rows:
        workdir.log(row, namespace="digits")
    workdir.figure("digits", _draw_digits(found, max(config.particles)))
    workdir.figure("digits_curves", _draw_curves(rows))
    return {"claims": _claims(rows), "metrics": accuracies, "params": model.params}


def fit_judges(seed: int) -> tuple[Judges, dict]:
    """Fits the two classifiers on the two halves of the training images; returns their accuracies on the test images too."""
    images, labels = digits.arrays("train")
    x = digits.normalise(images).reshape(len(images), -1)
    judges = Judges(classifiers.logistic(x[::2], labels[::2]), classifiers.perceptron(x[1::2], labels[1::2], seed=seed))
    test_images, test_labels = digits.arrays("test")
    test = digits.normalise(test_images).reshape(len(test_images), -1)
    right = lambda classifier: float(np.mean(classifiers.log_probabilities(classifier, test).argmax(-1) == test_labels))
    return judges, {"reward_accuracy": right(judges.reward), "judge_accuracy": right(judges.judge)}


class _Settings(NamedTuple):
    """The part of the configuration that shapes the computation."""

    steps: int
    every: int
    lam: float
    ess_threshold: float
    r_min: float
    guidance: float
    repeats: int

    @classmethod
    def of(cls, config: ConfigDict) -> "_Settings":
        return cls(*(config[name] for name in cls._fields))


def _cases(particles: tuple[int, ...]) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Methods and numbers of particles that one compiled program serves: independent samples come as one largest set."""
    return [((BEST,), tuple(particles)), ((GUIDED,), (1,)), *(((DIFF, MAX), (k,)) for k in particles if k > 1)]


@functools.partial(jax.jit, static_argnames=("denoise", "method", "counts", "config"))
def steer(
    key, schedule, params, reward_classifier, potential, *, denoise, method: str, counts: tuple[int, ...], config: _Settings
) -> list[Float[Array, "classes repeats dim"]]:
    """For every number of particles in `counts` one sample per class and repeat: the particle of largest reward."""
    grid = schedules.make_grid(schedule, config.steps, previous="next")

    def once(key, label):
        def reward(x, info=None):
            return classifiers.log_probabilities(reward_classifier, x)[:, label]

        def unconditional(x, t, cond):
            return denoise(params, x, t, jnp.full(x.shape[0], digits.NUM_CLASSES))

        follows = {"guidance": reward, "guidance_scale": config.guidance} if method == GUIDED else {}
        kernel = fk.from_sampler(samplers.ddim(1.0, clip=1.0), unconditional, grid, (64,), **follows)
        if method == BEST:
            x = fk.base_sample(key, kernel, max(counts))
            return [x[jnp.argmax(reward(x[:k]))] for k in counts]
        (k,) = counts
        if method == GUIDED:
            return [fk.guided(key, kernel, reward, k).best]
        options = fk.Config(
            fk_choices.any_potential(("diff", "max"), potential),
            lam=config.lam,
            every=config.every,
            start=config.every - 1,
            stop=config.steps - 1,
            ess_threshold=config.ess_threshold,
            r_min=config.r_min,
        )
        return [fk.run(key, kernel, reward, k, options).best]

    keys = jax.random.split(key, (digits.NUM_CLASSES, config.repeats))
    over_repeats = jax.vmap(once, in_axes=(0, None))
    return jax.vmap(over_repeats)(keys, jnp.arange(digits.NUM_CLASSES))


def _judge(x: Float[Array, "classes repeats dim"], judges: Judges) -> dict[str, float]:
    asked = jnp.arange(x.shape[0])[:, None]
    rewards = jnp.take_along_axis(classifiers.log_probabilities(judges.reward, x), asked[..., None], -1)
    right = classifiers.log_probabilities(judges.judge, x).argmax(-1) == asked
    images, _ = digits.arrays("test")
    real = digits.normalise(images).reshape(len(images), -1)
    distance = classifiers.frechet_distance(
        classifiers.features(judges.judge, x.reshape(-1, x.shape[-1])), classifiers.features(judges.judge, real)
    )
    return {"reward": float(rewards.mean()), "accuracy": float(right.mean()), "distance": distance}


def _mean_and_error(results: list[dict[str, float]]) -> dict[str, float]:
    row = {}
    for name in results[0]:
        values = np.array([result[name] for result in results])
        row[name] = float(values.mean())
        row[f"{name}_stderr"] = float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
    return row


def _claims(rows: list[dict]) -> list[Claim]:
    by_case = {(row["method"], row["particles"]): row for row in rows}
    if (DIFF, 4) not in by_case or (BEST, 8) not in by_case:
        return []
    few, many, same = by_case[DIFF, 4], by_case[BEST, 8], by_case[BEST, 4]
    return [
        claims.at_least(
            "Digits: reward of `diff` with 4 particles less that of the best of 8",
            paper=None,
            measured=few["reward"] - many["reward"],
            bar=0.0,
            stderr=float(np.hypot(few["reward_stderr"], many["reward_stderr"])),
        ),
        claims.at_least(
            "Digits: accuracy of `diff` with 4 particles less that of the best of 4, in points",
            paper=None,
            measured=100 * (few["accuracy"] - same["accuracy"]),
            bar=10.0,
            stderr=float(100 * np.hypot(few["accuracy_stderr"], same["accuracy_stderr"])),
        ),
    ]


def _draw_digits(found: dict, most: int) -> pyplot.Figure:
    """One row per method: what was made when each class was asked for."""
    shown = [case for case in found if case[1] in (1, most)]
    figure, axes = pyplot.subplots(len(shown), 10, figsize=(10, 1.05 * len(shown)))
    for row, (method, k) in zip(axes, shown, strict=True):
        for label, axis in enumerate(row):
            axis.imshow(np.asarray(found[method, k][-1][label, 0]).reshape(8, 8), cmap="gray_r", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
        name = "base" if (method, k) == (BEST, 1) else method
        row[0].set_ylabel(f"{name}\nK = {k}", rotation=0, ha="right", va="center")
    for label, axis in enumerate(axes[0]):
        axis.set_title(f"asked: {label}", fontsize=8)
    return figure


def _draw_curves(rows: list[dict]) -> pyplot.Figure:
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6))
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        for axis, name in zip(axes, ("reward", "accuracy", "distance"), strict=True):
            values, errors = [row[name] for row in mine], [row[f"{name}_stderr"] for row in mine]
            axis.errorbar([row["particles"] for row in mine], values, errors, marker="o", label=method)
    labels = ("log-probability of the class (reward)", "share the judge agrees with", "Fréchet distance to real digits")
    for axis, label in zip(axes, labels, strict=True):
        axis.set(xlabel="network calls per step and sample", ylabel=label, xscale="log")
        counts = sorted({row["particles"] for row in rows})
        axis.set_xticks(counts, [str(k) for k in counts])
        axis.minorticks_off()
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    return figure
