"""Feynman-Kac steering: interacting particles that sample a diffusion model tilted by a reward.

K trajectories of any sampler p(x_T) prod_t p(x_t | x_{t+1}) run together. At scored steps the reward r_t of what the state
promises gives a potential G_t (`potentials`); the particles are weighted, and resampled in proportion to their weights:

    log w <- log w + log G_t + sum log p(x_t | x_{t+1}) / tau(x_t | x_{t+1}),                    (1)
    log Z <- log Z + log mean w,  then w <- 1,  where the particles are resampled.               (2)

The last potential makes prod_t G_t = exp(lambda r(x_0)), so the weighted particles target

    p_tar(x_0) = p(x_0) exp(lambda r(x_0)) / Z,    E[estimate of Z] = Z = E_p exp(lambda r(x_0)),    (3)

for any number of particles and any resampling scheme, fixed or adaptive (a step that does not resample keeps its weights).
p is the law of the sampler with its number of steps, not of the data. As lambda -> inf with r = 0 where an event
happens and -1 elsewhere, Z is the probability of the event.

    kernel = fk.from_sampler(samplers.ddim(eta=1.0), denoise, grid, sample_shape)
    result = jax.jit(lambda key: fk.run(key, kernel, reward, 16, fk.Config(lam=10.0, every=20)))(key)
    result.best, result.expectation(lambda x: x), result.log_z

Cost: K num_steps network calls, and K rewards at every scored step and at the end. Memory: the K particles, and a copy of
them while they are gathered. Particles interact, so a result cannot be extended by more of them: run again.

Reference: R. Singhal, Z. Horvitz, R. Teehan, M. Ren, Z. Yu, K. McKeown and R. Ranganath, "A General Framework for
Inference-time Scaling and Steering of Diffusion Models", ICML 2025 (arXiv 2501.06848).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxml25.diffusion import fk_reference, potentials, resampling
from jaxml25.diffusion.fk_config import Config, scored_steps
from jaxml25.diffusion.fk_rewards import RewardInfo, combine, evaluator, look_ahead, value_loss, value_reward
from jaxml25.diffusion.particle_kernels import (
    CleanTokens,
    Kernel,
    base_sample,
    from_masked,
    from_sampler,
    particle_keys,
    run_noise,
    split_keys,
)

__all__ = [
    "CleanTokens",
    "Config",
    "Info",
    "Kernel",
    "Result",
    "RewardInfo",
    "base_sample",
    "best_of_n",
    "from_masked",
    "from_sampler",
    "guided",
    "look_ahead",
    "output",
    "particle_keys",
    "potentials",
    "resampling",
    "run",
    "run_noise",
    "scored_steps",
    "split_keys",
    "value_loss",
    "value_reward",
]


class Info(NamedTuple):
    """What a person wants to know of a run besides its result."""

    nan_rewards: Int[Array, "steps"]  # rewards that were NaN, and counted as -inf, at every step
    degenerate: Bool[Array, "steps"]  # no particle had positive weight: all were taken as equal, and log_z is -inf


class Result(NamedTuple):
    """K weighted particles and their history; arrays over all `num_steps` steps, of which some were scored."""

    x: Any  # final samples, leading axis K
    log_weights: Float[Array, "particles"]  # normalised: their exponentials sum to 1
    log_z: Float[Array, ""]  # estimate of log Z of equation (3); NaN in the reference variants, which define none
    rewards: Float[Array, "particles"]  # of x
    ess: Float[Array, "steps"]  # effective sample size in particles, before resampling
    ancestors: Int[Array, "steps particles"]  # parents drawn after a step; the identity where nothing was drawn
    resampled: Bool[Array, "steps"]  # whether a draw happened after the step
    info: Info | None = None

    @property
    def best(self) -> Any:
        """The particle of largest reward."""
        return self._particle(jnp.argmax(self.rewards))

    def sample(self, key: Key[Array, ""]) -> Any:
        """One particle, drawn by weight."""
        return self._particle(jax.random.categorical(key, self.log_weights))

    def expectation(self, f: Callable[[Any], Any]) -> Any:
        """The self-normalised estimate of E f(x_0) under the tilted law; `f` takes the batch x, and may return a pytree."""
        weights = jnp.exp(self.log_weights)
        return jax.tree.map(lambda value: jnp.tensordot(weights.astype(value.dtype), value, 1), f(self.x))

    @property
    def lineage(self) -> Int[Array, "steps particles"]:
        """The initial particle from which every slot descends, after every step."""

        def compose(origins, parents):
            origins = origins[parents]
            return origins, origins

        return jax.lax.scan(compose, jnp.arange(self.ancestors.shape[1]), self.ancestors)[1]

    @property
    def unique_ancestors(self) -> Int[Array, ""]:
        """How many initial particles have a descendant at the end; 1 means that the run has collapsed."""
        return jnp.sum(jnp.bincount(self.lineage[-1], length=self.ancestors.shape[1]) > 0)

    def _particle(self, index: Int[Array, ""]) -> Any:
        return jax.tree.map(lambda leaf: leaf[index], self.x)


class _Particles(NamedTuple):
    """What one step hands to the next."""

    state: Any
    log_weights: Float[Array, "particles"]
    potential: Any
    log_z: Float[Array, ""]
    ess: Float[Array, ""]


class _Record(NamedTuple):
    """What a step leaves in the history."""

    ess: Float[Array, ""]
    ancestors: Int[Array, "particles"]
    resampled: Bool[Array, ""]
    nan_rewards: Int[Array, ""]
    degenerate: Bool[Array, ""]


def run(
    key: Key[Array, ""],
    kernel: Kernel,
    reward: Callable[[Any, RewardInfo], Any],
    num_particles: int,
    config: Config | None = None,
    *,
    draws: Int[Array | np.ndarray, "steps particles"] | None = None,
    reward_host: bool = False,
    microbatch: int | None = None,
    lambda_schedule: Callable[[Int[Array, ""]], Any] | None = None,
    axis_name: str | None = None,
) -> Result:
    """Runs K interacting particles through a kernel.

    Works under `jit`, and under `vmap` for a batch of particle systems (say, one for every prompt). lambda, rewards and the
    model's parameters may be traced; K, the kernel and every other option are static.

    Args:
      key: see `split_keys` for what is derived from it. Keys belong to slots and steps, so particles that were copies of
        one another go on with different noise.
      kernel: moves the particles; see `particle_kernels`.
      reward: `(x0, info) -> (K,)`, of a batch of predicted clean samples (at the end, of the final ones) and a `RewardInfo`.
        A NaN counts as -inf.
      num_particles: K, at least 1; of all devices together.
      config: options; `Config()` by default.
      draws: recorded ancestors, for a replay: one row per step, or one per scored step. A row is used where a draw happens.
      reward_host: `reward` is a function of NumPy arrays and runs on the host (it may call anything); its info has no state.
      microbatch: rewards are computed on this many particles at a time; it must divide K (on a device). A kernel's own
        `microbatch` does the same for the network.
      lambda_schedule: lambda at a step before the last, which always has `config.lam`: the target stays the same.
      axis_name: mapped axis of a `shard_map` over whose devices the particles are split in equal parts. Give the kernel the
        same. `x`, `log_weights` and `rewards` are then the device's part and all else is the same everywhere; the numbers
        are those of one device. `result_specs` gives the out_specs.

    Returns:
      The particles, their weights and their history.

    Raises:
      ValueError: if `num_particles` is below 1 or the devices do not divide it, a scored step lies outside the run, a reward
        has not the shape (K,), `draws` does not fit, or particles are resampled on the way of a deterministic kernel.
    """
    config = Config() if config is None else config
    scored = scored_steps(config, kernel.num_steps)
    num_local = _check_run(kernel, num_particles, config, scored, axis_name)
    recorded = _expand_draws(draws, scored, num_particles)
    keys = split_keys(key, kernel.num_steps)
    evaluate = evaluator(reward, num_local, host=reward_host, microbatch=microbatch)
    options = {"config": config, "num_particles": num_particles, "axis_name": axis_name, "replay": draws is not None}
    score = functools.partial(_score, **options)
    lam = jnp.asarray(0.0 if config.potential == "bon" else config.lam, jnp.result_type(float))

    def score_step(particles, x0_info, step, reward_key, key, parents):
        if config.reward_at == "current":
            _, x0_info, _ = kernel.propose(reward_key, particles.state, step + 1)
        step_lam = lam if lambda_schedule is None else jnp.asarray(lambda_schedule(step), lam.dtype)
        info = RewardInfo(particles.state, step, False)
        if hasattr(x0_info, "draw"):
            x0 = x0_info.draw(particle_keys(reward_key, num_local, axis_name), config.num_x0_samples)
            rewards = combine(evaluate(x0, info, num_draws=config.num_x0_samples), step_lam, config.logmeanexp_lambda)
        else:
            rewards = evaluate(x0_info, info)
        particles, record, parents = score(particles, rewards, step_lam, key, parents, last=False)
        state = resampling.take(particles.state, parents, axis_name=axis_name)
        return resampling.vary((particles._replace(state=state), record), axis_name)

    def skip_step(particles, x0_info, step, reward_key, key, parents):
        nothing = jnp.zeros((), jnp.int32), jnp.asarray(False)
        record = _Record(particles.ess, jnp.arange(num_particles, dtype=jnp.int32), jnp.asarray(False), *nothing)
        return resampling.vary((particles, record), axis_name)

    def body(particles, inputs):
        step, is_scored, step_key, *rest = inputs
        state, x0_info, log_ratio = kernel.propose(step_key, particles.state, step)
        particles = particles._replace(state=state, log_weights=particles.log_weights + log_ratio)
        if not np.any(scored[:-1]):
            return skip_step(particles, x0_info, step, *rest)
        return jax.lax.cond(is_scored, score_step, skip_step, particles, x0_info, step, *rest)

    # The last step is scored after the loop, on the true final samples.
    in_loop = jnp.asarray(np.append(scored[:-1], False))
    steps = jnp.arange(kernel.num_steps)
    inputs = (steps, in_loop, keys.steps, keys.rewards, keys.ancestors, recorded)
    start = resampling.vary(_start(kernel, keys.init, num_local, num_particles, config), axis_name)
    particles, history = jax.lax.scan(body, start, inputs)

    x = kernel.finish(particles.state)
    rewards = evaluate(x, RewardInfo(particles.state, steps[-1], True))
    particles, record, parents = score(particles, rewards, lam, keys.ancestors[-1], recorded[-1], last=True)
    rewards = jnp.where(jnp.isnan(rewards), -jnp.inf, rewards)
    x, rewards = resampling.take((x, rewards), parents, axis_name=axis_name)
    history = jax.tree.map(lambda rows, row: rows.at[-1].set(row), history, record)
    return _result(x, rewards, particles, history, lam, config, axis_name)


def best_of_n(
    key: Key[Array, ""],
    kernel: Kernel,
    reward: Callable[[Any, RewardInfo], Any],
    num_particles: int,
    *,
    reward_host: bool = False,
    microbatch: int | None = None,
) -> Result:
    """Draws independent samples of the base model and sorts them by reward, best first; see `run`."""
    config = Config(potential="bon", every=-1)
    return run(key, kernel, reward, num_particles, config, reward_host=reward_host, microbatch=microbatch)


def guided(
    key: Key[Array, ""],
    kernel: Kernel,
    reward: Callable[[Any, RewardInfo], Any],
    num_particles: int,
    *,
    reward_host: bool = False,
    microbatch: int | None = None,
) -> Result:
    """Plain gradient guidance, the baseline: follows the kernel's proposals and forgets their weights.

    Biased: with finitely many steps the samples follow no tilted law exactly. Give it `from_sampler(..., guidance=...)`;
    `run` with the same kernel corrects by the weights. The result has equal weights, in the order of the slots, and log_z 0.
    """

    def propose(key, state, i):
        state, x0_info, log_ratio = kernel.propose(key, state, i)
        return state, x0_info, jnp.zeros_like(log_ratio)

    unweighted = kernel._replace(propose=propose)
    config = Config(potential="is", lam=0.0, every=-1)
    return run(key, unweighted, reward, num_particles, config, reward_host=reward_host, microbatch=microbatch)


def output(key: Key[Array, ""], result: Result, config: Config) -> Any:
    """Reads a result by `config.output`: one sample (`best`, `sample`), or (x, normalised log-weights) of all particles."""
    if config.output == "best":
        return result.best
    if config.output == "sample":
        return result.sample(key)
    return result.x, result.log_weights


def result_specs(axis_name: str) -> Result:
    """The `out_specs` of a `run` in `shard_map` over `axis_name`."""
    split, same = jax.sharding.PartitionSpec(axis_name), jax.sharding.PartitionSpec()
    return Result(split, split, same, split, same, same, same, Info(same, same))


def _check_run(kernel: Kernel, num_particles: int, config: Config, scored: np.ndarray, axis_name: str | None) -> int:
    """Checks what `Config` alone cannot know, and returns the number of particles on this device."""
    if num_particles < 1:
        raise ValueError(f"num_particles must be at least 1, got {num_particles}")
    if not kernel.stochastic and np.any(scored[:-1]) and config.resample != "none":
        raise ValueError(
            "kernel must be stochastic where particles are resampled before the last step: copies of a particle would stay "
            "the same for ever. Use a step that adds noise (eta > 0, an SDE solver), jitter, or every=-1; got a "
            "deterministic sampler"
        )
    num_devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    if num_particles % num_devices:
        raise ValueError(f"num_particles must be divided by the {num_devices} devices of {axis_name!r}, got {num_particles}")
    return num_particles // num_devices


def _expand_draws(draws: Any, scored: np.ndarray, num_particles: int) -> Int[Array, "steps particles"]:
    """Lays recorded ancestors out over all steps."""
    num_steps, num_scored = scored.size, int(scored.sum())
    identity = jnp.broadcast_to(jnp.arange(num_particles, dtype=jnp.int32), (num_steps, num_particles))
    if draws is None:
        return identity
    if draws.shape not in ((num_steps, num_particles), (num_scored, num_particles)):
        raise ValueError(
            f"draws must have shape {(num_steps, num_particles)}, or {(num_scored, num_particles)} for the scored steps "
            f"alone, got {draws.shape}"
        )
    draws = jnp.asarray(draws, jnp.int32)
    return draws if draws.shape[0] == num_steps else identity.at[np.flatnonzero(scored)].set(draws)


def _start(kernel: Kernel, key: Key[Array, ""], num_local: int, num_particles: int, config: Config) -> _Particles:
    if config.variant == "smc":
        potential = potentials.get(config.potential).init(num_local, config.r_min)
    else:
        potential = fk_reference.init(num_local, config.r_min)
    dtype = jnp.result_type(float)
    return _Particles(
        state=kernel.init(key, num_local),
        log_weights=jnp.zeros(num_local, dtype),
        potential=potential,
        log_z=jnp.zeros((), dtype),
        ess=jnp.asarray(num_particles, dtype),
    )


def _score(particles, rewards, lam, key, recorded, *, config, num_particles, axis_name, replay, last):
    """Equations (1) and (2). Returns the particles with all but `state` gathered, the record, and the parents."""
    is_nan = jnp.isnan(rewards)
    rewards = jnp.where(is_nan, -jnp.inf, rewards)
    log_weights, potential = _weigh(particles, rewards, is_nan, lam, last, config)
    everyone = resampling.gather_log_weights(log_weights, axis_name)
    total = resampling.log_mean_exp(everyone)
    degenerate = jnp.isneginf(total)
    ess = resampling.effective_sample_size(everyone)

    decision = _decide(ess, num_particles, config, last)
    resampled = jnp.asarray(decision)
    parents = jnp.arange(num_particles, dtype=jnp.int32)
    if decision is not False:  # what is known while tracing never to resample draws nothing
        drawn = recorded if replay else _draw(key, everyone, num_particles, config)
        parents = jnp.where(resampled, drawn, parents)
    if last and config.potential == "bon":
        all_rewards = resampling.gather_log_weights(rewards, axis_name)
        parents = jnp.argsort(-all_rewards).astype(jnp.int32)

    if config.variant == "smc":
        # Without one positive weight there is nothing to carry on: the weights start afresh.
        starts_afresh = resampled | degenerate
        log_z = particles.log_z + jnp.where(starts_afresh, total, 0)
        log_weights = jnp.where(starts_afresh, 0, log_weights)
    else:
        potential = fk_reference.settle(particles.potential, potential, resampled)
        log_z, log_weights = jnp.full_like(total, jnp.nan), jnp.zeros_like(log_weights)

    record = _Record(ess, parents, resampled, _sum_all(is_nan, axis_name), degenerate)
    potential = resampling.take(potential, parents, axis_name=axis_name)
    ess = jnp.where(resampled | degenerate, num_particles, ess).astype(ess.dtype)
    return _Particles(particles.state, log_weights, potential, log_z, ess), record, parents


def _weigh(particles, rewards, is_nan, lam, last, config):
    """Returns the log-weights that a draw would use, and the potential's next state."""
    if config.variant != "smc":
        weights, potential = fk_reference.weigh(particles.potential, rewards, potential=config.potential, lam=lam, last=last)
        return jnp.log(weights), potential
    log_g, potential = potentials.get(config.potential).update(particles.potential, rewards, lam, last)
    log_g = jnp.where(is_nan & (lam != 0), -jnp.inf, log_g)  # -inf times a negative lambda must not revive it
    log_weights = particles.log_weights + log_g
    return jnp.where(jnp.isnan(log_weights), -jnp.inf, log_weights), potential


def _decide(ess, num_particles, config, last):
    """Whether the particles are resampled now: a Python bool where the options alone decide."""
    if config.potential == "bon" or config.resample == "none":
        return False
    if config.variant != "smc":
        options = {"variant": config.variant, "ess_threshold": config.ess_threshold, "last": last}
        return fk_reference.should_resample(ess, num_particles, **options)
    if config.ess_threshold is None or (last and config.output == "resampled"):
        return True
    return False if last else ess < config.ess_threshold * num_particles


def _draw(key, log_weights, num_particles, config):
    """Draws ancestors; the published code draws them unsorted."""
    if config.variant == "smc":
        return resampling.get(config.resample)(key, log_weights, num_particles)
    uniforms = jax.random.uniform(key, (num_particles,), log_weights.dtype)
    return resampling.multinomial(uniforms, log_weights, num_particles)


def _sum_all(flags: Bool[Array, "particles"], axis_name: str | None) -> Int[Array, ""]:
    count = jnp.sum(flags, dtype=jnp.int32)
    return count if axis_name is None else jax.lax.psum(count, axis_name)


def _result(x, rewards, particles, history, lam, config, axis_name):
    """Folds the leftover weights into log Z and normalises them."""
    everyone = resampling.gather_log_weights(particles.log_weights, axis_name)
    leftover = resampling.log_mean_exp(everyone)
    log_z = particles.log_z + leftover
    if config.potential == "diff" and config.variant == "smc":
        # `diff` telescopes to lambda (r - r_min): the constant belongs to Z.
        log_z = log_z + potentials.tilt(lam, jnp.asarray(config.r_min, lam.dtype))
    log_weights = particles.log_weights - leftover - jnp.log(everyone.size).astype(everyone.dtype)
    if axis_name is not None:  # the same on every device, which only a collective can tell `shard_map`
        replicate = lambda leaf: jax.lax.pmax(leaf.astype(jnp.int32) if leaf.dtype == bool else leaf, axis_name)
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, history)
        log_z = replicate(log_z)
        history = jax.tree.map(lambda leaf, dtype: replicate(leaf).astype(dtype), history, dtypes)
    info = Info(history.nan_rewards, history.degenerate)
    return Result(x, log_weights, log_z, rewards, history.ess, history.ancestors, history.resampled, info)
