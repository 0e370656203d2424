"""Miniature A: a rare event under a sampler of one Gaussian variable, where everything has a closed form.

The network is exact, so the sampler's law is N(mu, v) and tilting it by exp(-lambda (x - a)^2 / 2) gives

    N((mu / v + lambda a) / (1 / v + lambda), 1 / (1 / v + lambda)),
    log Z = -log(1 + lambda v) / 2 - lambda (mu - a)^2 / (2 (1 + lambda v)).    (1)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot
from ml_collections import ConfigDict

from experiments import fk_choices
from jaxml25.diffusion import fk_steering as fk
from jaxml25.diffusion import samplers, schedules
from jaxml25.training import claims
from jaxml25.training.claims import Claim
from jaxml25.training.workdir import Workdir

SCHEMES = ("multinomial", "systematic", "stratified", "residual", "ssp")
POTENTIALS = ("diff", "max", "is")


class Model(NamedTuple):
    """A denoiser of N(mean, variance), its sampler, and the law of what comes out."""

    schedule: schedules.Schedule
    grid: schedules.Grid
    mean: float
    variance: float

    def denoise(self, x, t, cond=None):
        """The exact noise prediction."""
        ab = schedules.expand(self.schedule.alphas_cumprod[t], x)
        return jnp.sqrt(1 - ab) * (x - jnp.sqrt(ab) * self.mean) / (ab * self.variance + 1 - ab)

    def law(self, step) -> tuple[float, float]:
        """Mean and variance of the samples: every step is affine in the state and the noise, so three probes give its map."""
        mean, variance = 0.0, 1.0
        for i in range(self.grid.t.shape[0]):
            row = jax.tree.map(lambda leaf, i=i: leaf[i], self.grid)
            x, noise = jnp.array([[0.0], [1.0], [0.0]]), jnp.array([[0.0], [0.0], [1.0]])
            origin, moved, stirred = np.asarray(step(x, self.denoise(x, jnp.full(3, row.t)), row, noise)[0], np.float64)[
                :, 0
            ]
            mean, variance = (moved - origin) * mean + origin, (moved - origin) ** 2 * variance + (stirred - origin) ** 2
        return mean, variance


class Tilt(NamedTuple):
    """The reward -(x - a)^2 / 2 and the tilted law (1)."""

    a: float
    mean: float
    log_z: float

    def reward(self, x, info):
        """One number per particle."""
        return -0.5 * (x[:, 0] - self.a) ** 2


def run(config: ConfigDict, seed: int, workdir: Workdir, devices: jax.sharding.Mesh) -> dict:
    """Compares estimators of the tilted mean and of Z."""
    del devices  # seconds on one
    schedule = schedules.make_schedule("scaled_linear")
    grid = schedules.make_grid(schedule, config.steps, previous="next")
    model = Model(schedule, grid, config.data_mean, config.data_variance)
    step = samplers.ddpm()
    mean, variance = model.law(step)
    rare = tilt(mean, variance, config.lam, mean + config.deviations * variance**0.5)
    mild = tilt(mean, variance, config.lam, mean + 1.5 * variance**0.5)
    kernel = fk.from_sampler(step, model.denoise, grid, (1,))
    key = jax.random.key(seed)

    table = _rare_event(key, kernel, rare, config, workdir)
    deviations = _normaliser(jax.random.fold_in(key, 1), kernel, mild, config, workdir)
    workdir.figure("gaussian", _draw(table, deviations, config.particles))
    return {"claims": _claims(table, deviations, max(config.particles))}


def tilt(mean: float, variance: float, lam: float, a: float) -> Tilt:
    """Equation (1) for the sampler's law N(mean, variance)."""
    spread = 1 + lam * variance
    log_z = -0.5 * np.log(spread) - lam * (mean - a) ** 2 / (2 * spread)
    return Tilt(a, (mean / variance + lam * a) / (1 / variance + lam), log_z)


class Method(NamedTuple):
    """An estimator: where its potential and scheme stand in the lists, and its rule. Traced, so that one program serves all."""

    potential: int  # in `POTENTIALS`
    scheme: int  # in `SCHEMES`
    ess_threshold: float  # 1 resamples whenever the weights differ at all
    r_min: float

    @classmethod
    def of(cls, potential: str, scheme: str = "systematic", ess_threshold: float = 1.0, r_min: float = 0.0) -> "Method":
        return cls(POTENTIALS.index(potential), SCHEMES.index(scheme), ess_threshold, r_min)


METHODS = {
    "importance sampling": Method.of("is"),
    "diff, systematic, always": Method.of("diff"),
    "diff, systematic, ESS < K/2": Method.of("diff", ess_threshold=0.5),
    "diff, multinomial, always": Method.of("diff", "multinomial"),
    "max, systematic, always": Method.of("max", r_min=-100.0),
}


@functools.partial(jax.jit, static_argnames=("kernel", "num_particles", "runs", "every", "reward_at"))
def estimate(
    key, method: Method, tilt: Tilt, lam, *, kernel, num_particles: int, runs: int, every: int, reward_at: str
) -> dict:
    """The tilted mean, log Z, the best particle's reward and the number of surviving lines of many independent runs."""
    config = fk.Config(
        fk_choices.any_potential(POTENTIALS, method.potential),
        lam=lam,
        resample=fk_choices.any_scheme(SCHEMES, method.scheme),
        every=every,
        start=0,
        stop=kernel.num_steps - 2,
        reward_at=reward_at,
        ess_threshold=method.ess_threshold,
        r_min=method.r_min,
        output="weighted",
    )

    def once(key):
        result = fk.run(key, kernel, tilt.reward, num_particles, config)
        log_z = result.log_z + jnp.where(method.potential == POTENTIALS.index("diff"), lam * method.r_min, 0.0)
        mean = result.expectation(lambda x: x[:, 0])
        return {"mean": mean, "log_z": log_z, "best": jnp.max(result.rewards), "ancestors": result.unique_ancestors}

    return jax.vmap(once)(jax.random.split(key, runs))


def _rare_event(key, kernel, rare: Tilt, config: ConfigDict, workdir: Workdir) -> dict:
    """{(method, K): RMSE of the tilted mean, mean best reward, both with standard errors}."""
    table = {}
    cases = [(k, name) for k in config.particles for name in METHODS]
    for k, name in workdir.progress(cases, "rare event"):
        found = estimate(
            jax.random.fold_in(key, k),
            METHODS[name],
            rare,
            config.lam,
            kernel=kernel,
            num_particles=k,
            runs=config.runs,
            every=config.every,
            reward_at=config.reward_at,
        )
        squared = (np.asarray(found["mean"], np.float64) - rare.mean) ** 2
        best = np.asarray(found["best"], np.float64)
        rmse = squared.mean() ** 0.5
        row = {
            "rmse": rmse,
            "rmse_stderr": squared.std() / (2 * rmse * config.runs**0.5),
            "best": best.mean(),
            "best_stderr": best.std() / config.runs**0.5,
            "mean": np.mean(found["mean"]),
            "z_ratio": np.exp(np.asarray(found["log_z"], np.float64) - rare.log_z).mean(),
            "unique_ancestors": np.mean(found["ancestors"]),
        }
        workdir.log({"method": name, "particles": k, **row}, namespace="gaussian")
        table[name, k] = row
    return table


def _normaliser(key, kernel, mild: Tilt, config: ConfigDict, workdir: Workdir) -> dict:
    """{(potential, scheme, adaptive): (mean of the estimated Z over Z, its standard error)}, with 8 particles."""
    deviations = {}
    cases = [(p, s, threshold) for p in ("diff", "is") for s in SCHEMES for threshold in (1.0, 0.5)]
    for number, (potential, scheme, threshold) in enumerate(workdir.progress(cases, "normaliser")):
        found = estimate(
            jax.random.fold_in(key, number),
            Method.of(potential, scheme, threshold),
            mild,
            config.lam,
            kernel=kernel,
            num_particles=8,
            runs=config.runs,
            every=config.every,
            reward_at=config.reward_at,
        )
        ratios = np.exp(np.asarray(found["log_z"], np.float64) - mild.log_z)
        mean, stderr = ratios.mean(), ratios.std() / config.runs**0.5
        rule = "always" if threshold == 1.0 else "ESS < K/2"
        workdir.log(
            {"potential": potential, "scheme": scheme, "rule": rule, "z_ratio": mean, "z_ratio_stderr": stderr},
            namespace="gaussian",
        )
        deviations[potential, scheme, threshold < 1] = (mean, stderr)
    return deviations


def _claims(table: dict, deviations: dict, most: int) -> list[Claim]:
    found = []
    for k in sorted({k for _, k in table if k >= 16}):
        steered, plain = table["diff, systematic, always", k], table["importance sampling", k]
        ratio = steered["rmse"] / plain["rmse"]
        stderr = ratio * np.hypot(steered["rmse_stderr"] / steered["rmse"], plain["rmse_stderr"] / plain["rmse"])
        sentence = f"Rare event: error of `diff` over that of importance sampling, K = {k}"
        found.append(claims.at_most(sentence, paper={16: 0.45, 64: 0.39}[k], measured=ratio, bar=0.6, stderr=stderr))
    steered, other = table["diff, systematic, always", most], table["diff, multinomial, always", most]
    sentence = f"Rare event: error with systematic over that with multinomial resampling, K = {most}"
    found.append(claims.at_most(sentence, paper=0.75, measured=steered["rmse"] / other["rmse"], bar=1.0))
    k = min(16, most)
    # The particles of importance sampling are independent samples, so the best of them is best-of-n.
    steered, independent = table["diff, systematic, always", k], table["importance sampling", k]
    found.append(
        claims.at_least(
            f"Rare event: best reward of `diff` less that of best-of-n, K = {k}",
            paper=1.02,
            measured=steered["best"] - independent["best"],
            bar=0.0,
            stderr=float(np.hypot(steered["best_stderr"], independent["best_stderr"])),
        )
    )
    for potential in ("diff", "is"):
        worst = max(abs(m - 1) / s for (p, _, _), (m, s) in deviations.items() if p == potential)
        sentence = (
            f"E[Z estimate / Z] = 1 with `{potential}`: largest deviation of 10 scheme and rule pairs, in standard errors"
        )
        found.append(claims.at_most(sentence, paper=None, measured=worst, bar=4.0))
    return found


def _draw(table: dict, deviations: dict, particles) -> pyplot.Figure:
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4))
    for name in dict.fromkeys(name for name, _ in table):
        rows = [table[name, k] for k in particles]
        left.errorbar(particles, [r["rmse"] for r in rows], [r["rmse_stderr"] for r in rows], marker="o", label=name)
        middle.errorbar(particles, [r["best"] for r in rows], [r["best_stderr"] for r in rows], marker="o", label=name)
    left.set(xlabel="particles", ylabel="RMSE of the tilted mean", xscale="log", yscale="log", title="A rare event")
    middle.set(
        xlabel="particles",
        ylabel="reward of the best particle",
        xscale="log",
        title="Best particle (importance sampling: best-of-n)",
    )
    for axis in (left, middle):
        axis.set_xticks(particles, [str(k) for k in particles])
        axis.minorticks_off()
        axis.legend(fontsize=7)
    labels = [f"{p}, {s}{', ESS' if adaptive else ''}" for p, s, adaptive in deviations]
    means, errors = zip(*deviations.values(), strict=True)
    right.errorbar(means, range(len(labels)), xerr=4 * np.array(errors), fmt="o")
    right.axvline(1, color="grey")
    right.set(
        yticks=range(len(labels)), xlabel="estimate of Z over Z, 4 standard errors", title="Unbiased, whatever the scheme"
    )
    right.set_yticklabels(labels, fontsize=7)
    figure.tight_layout()
    return figure
