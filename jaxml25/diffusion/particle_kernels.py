"""Markov kernels that move K particles through the steps of a diffusion sampler.

A kernel is four pure functions of everything that `fk_steering.run` needs to know of a model:

    init(key, K) -> state                              particles before the first step
    propose(key, state, i) -> (state, x0_info, log_ratio)      step i, counted from 0 in running order
    finish(state) -> x0                                the final samples
    num_steps

`state` is any pytree whose arrays have a leading particle axis (scalars are shared by all particles). `x0_info` is what the
kernel knows of the clean samples *from the state before the step*: their prediction, a batch, or an object with
`draw(keys, num)` that draws from their law. `log_ratio`, shape (K,), is log p(x_t | x_{t+1}) - log tau(x_t | x_{t+1}) of the
model's own transition p and the proposal tau that was used; zeros where they are the same.

Here: `from_sampler` makes a kernel of any sampler of the substrate, with proposals drawn along a reward's gradient on
request; `from_masked` of a masked diffusion model. Both give every particle its own key, from `particle_keys`.

For a sampler whose step is mu(x) + s(x) z, z ~ N(0, I), the gradient proposal shifts the mean along g, the gradient of the
reward of the predicted clean sample with respect to x,

    mu' = mu + s^2 gamma g,    log p/tau = -(gamma s g . z + |gamma s g|^2 / 2).    (1)

References: R. Singhal et al., "A General Framework for Inference-time Scaling and Steering of Diffusion Models", ICML 2025
(arXiv 2501.06848); L. Wu et al., "Practical and Asymptotically Exact Conditional Sampling in Diffusion Models", 2023
(arXiv 2306.17775), for (1).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxml25.diffusion import checks, masked, samplers, trajectories
from jaxml25.diffusion.schedules import Scalar


class Kernel(NamedTuple):
    """How particles move; see the module's docstring."""

    init: Callable[[Array, int], Any]
    propose: Callable[[Array, Any, Array], tuple[Any, Any, Array]]
    finish: Callable[[Any], Any]
    num_steps: int
    stochastic: bool = True  # False: copies of a particle never separate, so resampling before the end is refused


class RunKeys(NamedTuple):
    """The keys of a run. `run(key, ...)` uses those of `split_keys(key, num_steps)`, whatever K is."""

    init: Key[Array, ""]  # for `Kernel.init`
    steps: Key[Array, "steps"]  # for `Kernel.propose`
    rewards: Key[Array, "steps"]  # for drawing clean samples
    ancestors: Key[Array, "steps"]  # for resampling after a step


def split_keys(key: Key[Array, ""], num_steps: int) -> RunKeys:
    """Derives the keys of a run."""
    init, steps, rewards, ancestors = jax.random.split(key, 4)
    return RunKeys(init, *(jax.random.split(each, num_steps) for each in (steps, rewards, ancestors)))


def particle_keys(key: Key[Array, ""], num_particles: int, axis_name: str | None = None) -> Key[Array, "{num_particles}"]:
    """Derives one key for each of the particles held here; particle j of all always gets `fold_in(key, j)`.

    Args:
      key: one key for all particles.
      num_particles: held on this device.
      axis_name: mapped axis over which the particles are split, if they are.
    """
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * num_particles
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, first + jnp.arange(num_particles))


def run_noise(
    key: Key[Array, ""], num_steps: int, num_particles: int, sample_shape: Sequence[int], dtype: Any = None
) -> tuple[Float[Array, "particles *dims"], Float[Array, "steps particles *dims"]]:
    """Returns the normals that a run of `from_sampler` uses slot by slot: (z_T, noise).

    Without resampling `run(key, from_sampler(step_fn, denoise, grid, sample_shape), ...)` is
    `trajectories.sample(step_fn, denoise, grid, z_T, noise)` with these (in sigma space, with `z_T * grid.sigma[0]`); so it
    is for one particle in any case, up to how the two compiled programs round (the same, for DDPM and for DDIM at eta 1).
    `base_sample` is the same to the last bit for every kernel.
    """
    keys = split_keys(key, num_steps)
    normals = lambda key: _normals(particle_keys(key, num_particles), sample_shape, dtype)
    return normals(keys.init), jax.lax.map(normals, keys.steps)


def base_sample(key: Key[Array, ""], kernel: Kernel, num_particles: int) -> Any:
    """Runs a kernel alone, with the keys that `fk_steering.run` would give it: K independent samples of the base model."""
    keys = split_keys(key, kernel.num_steps)

    def body(state, inputs):
        return kernel.propose(inputs[0], state, inputs[1])[0], None

    state, _ = jax.lax.scan(body, kernel.init(keys.init, num_particles), (keys.steps, jnp.arange(kernel.num_steps)))
    return kernel.finish(state)


class SamplerState(NamedTuple):
    """Particles of `from_sampler`."""

    x: Float[Array, "particles *dims"]
    solver: Any  # what a multistep solver remembers, particle by particle; None for a one-step sampler


def from_sampler(
    step_fn: Callable,
    denoise: Callable[..., Array],
    grid: Any,
    sample_shape: Sequence[int],
    cond: Any = None,
    *,
    guidance: Callable[[Float[Array, "particles *dims"]], Float[Array, "particles"]] | None = None,
    guidance_scale: Scalar = 1.0,
    jitter: Scalar = 0.0,
    microbatch: int | None = None,
    axis_name: str | None = None,
    dtype: Any = None,
) -> Kernel:
    """Makes a kernel of a sampler: one network call per particle and step, two with `guidance` (a backward pass).

    Its `x0_info` is the prediction x0_hat that the step makes on the way, at no extra call.

    Args:
      step_fn: from a factory of `samplers` or `dpm_solver`, or any function `(x, pred, row, noise) -> (x_next, x0_hat)`
        that is affine in the noise.
      denoise: `(x, t, cond) -> pred`, any closure.
      grid: a `Grid` or `SigmaGrid`, noisiest first.
      sample_shape: shape of one sample.
      cond: handed to every call of `denoise`.
      guidance: a differentiable reward of predicted clean samples; proposals then follow its gradient by equation (1),
        and the weights make up for it. A step without noise is left as it is: there nothing can make up for a shift.
      guidance_scale: gamma lambda of equation (1); may be traced.
      jitter: standard deviation of extra noise after every step but the last, which lets copies separate under a
        deterministic sampler. It changes the law of the base model.
      microbatch: call the network on this many particles at a time; it must divide the number of particles.
      axis_name: mapped axis over which the particles are split.
      dtype: of the particles; by default JAX's default float.

    Raises:
      ValueError: if `guidance` is given for a `step_fn` that adds no noise or adds it before the network's call (churn), if
        `step_fn` calls the network twice (Heun), or if `grid` is of the wrong kind for it.
    """
    is_stochastic = getattr(step_fn, "stochastic", True)
    if guidance is not None and not is_stochastic:
        raise ValueError(f"guidance needs a step_fn that adds noise: without it the weights are undefined, got {step_fn}")
    if guidance is not None and hasattr(step_fn, "perturb"):
        raise ValueError(f"guidance needs a step_fn that adds its noise after the network's call, got {step_fn}")
    if hasattr(step_fn, "correct"):
        raise ValueError(f"step_fn must call the network once per step, got {step_fn}")
    if hasattr(step_fn, "check"):
        step_fn.check(grid)
    num_steps = grid.t.shape[0]
    is_multistep = hasattr(step_fn, "init")
    network = in_chunks(denoise, microbatch, "microbatch")

    def init(key, num_particles):
        x = _normals(particle_keys(key, num_particles, axis_name), sample_shape, dtype)
        if hasattr(grid, "sigma") and not isinstance(step_fn, samplers.Flow):
            x = (x * grid.sigma[0]).astype(x.dtype)
        return SamplerState(x, jax.vmap(lambda x: step_fn.init(x, num_steps))(x) if is_multistep else None)

    def step(state, row, noise):
        """Returns x_next and (x0_hat, solver state); solvers lay their memory out themselves, so they see one particle."""
        pred = trajectories.predict(step_fn, network, state.x, row, cond)
        if not is_multistep:
            x_next, x0_hat = step_fn(state.x, pred, row, noise)
            return x_next, (x0_hat, None)
        advance = jax.vmap(step_fn, in_axes=(0, 0, None, 0, 0))
        x_next, solver, x0_hat = advance(state.x, pred, row, noise, state.solver)
        return x_next, (x0_hat, solver)

    def propose(key, state, i):
        row = jax.tree.map(lambda leaf: leaf[i], grid)
        noise = _normals(particle_keys(key, state.x.shape[0], axis_name), sample_shape, dtype)
        # Drawn noise fused into the step would round differently from noise that is given, as to `trajectories.sample`.
        noise = jax.lax.optimization_barrier(noise)
        if hasattr(step_fn, "perturb"):
            x, row = step_fn.perturb(state.x, row, noise)
            state = state._replace(x=x)
        if guidance is None:
            x_next, (x0_hat, solver) = step(state, row, noise)
            log_ratio = jnp.zeros(noise.shape[0])
        else:
            x_next, x0_hat, solver, log_ratio = _guided_step(step, state, row, noise, guidance, guidance_scale)
        if not _is_zero(jitter):
            x_next = (x_next + jnp.where(i < num_steps - 1, jitter, 0) * noise).astype(x_next.dtype)
        return SamplerState(x_next, solver), x0_hat, log_ratio

    return Kernel(init, propose, lambda state: state.x, num_steps, is_stochastic or not _is_zero(jitter))


def _guided_step(step, state, row, noise, guidance, scale):
    """Equation (1). The step is affine in the noise, so its derivative along ones is the noise scale s."""

    def value(x):
        _, (x0_hat, solver) = step(state._replace(x=x), row, noise)
        return jnp.sum(guidance(x0_hat)), (x0_hat, solver)

    gradient, (x0_hat, solver) = jax.grad(value, has_aux=True)(state.x)
    x_next, noise_scale = jax.jvp(lambda z: step(state, row, z)[0], (noise,), (jnp.ones_like(noise),))
    shift = noise_scale * scale * gradient  # in units of the noise
    log_ratio = -jnp.sum((shift * noise + shift**2 / 2).reshape(noise.shape[0], -1), axis=1)
    return (x_next + noise_scale * shift).astype(x_next.dtype), x0_hat, solver, log_ratio


class CleanTokens(NamedTuple):
    """The law of clean sequences given masked ones: independent tokens, visible ones with probability one."""

    log_probs: Float[Array, "particles length vocab"]

    def draw(self, keys: Key[Array, "particles"], num: int) -> Int[Array, "{num} particles length"]:
        """Draws `num` sequences for every particle, from the particle's own key."""
        draws = jax.vmap(lambda key, log_probs: masked.draw_clean(key, log_probs, num))(keys, self.log_probs)
        return jnp.swapaxes(draws, 0, 1)


def from_masked(
    schedule: masked.MaskedSchedule,
    denoise: Callable[..., Array],
    length: int,
    num_steps: int,
    mask_index: int,
    prefix: Int[Array, "..."] | None = None,
    *,
    cond: Any = None,
    microbatch: int | None = None,
    axis_name: str | None = None,
) -> Kernel:
    """Makes a kernel of a masked diffusion model: one network call per particle and step.

    Its `x0_info` is the law of the clean sequences, `CleanTokens`, from which draws are cheap; they never enter the state.
    The steps are those of `masked.masked_sample`, and the last one draws every mask that is left.

    Args:
      schedule: gives the probability of a mask.
      denoise: `(x_t, t, cond) -> logits`, any closure.
      length: of the sequences, with the prefix.
      num_steps: at least 1.
      mask_index: the mask token.
      prefix: tokens (p,) that every sequence begins with, or (K, p); they are kept, except for masks among them.
      cond: handed to every call of `denoise`.
      microbatch: call the network on this many particles at a time; it must divide the number of particles.
      axis_name: mapped axis over which the particles are split; the prefix must then be (p,).

    Raises:
      ValueError: if `num_steps` or `length` is below 1, or the prefix is longer than `length`.
    """
    for name, value in (("num_steps", num_steps), ("length", length)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if prefix is not None and prefix.shape[-1] > length:
        raise ValueError(f"prefix must not be longer than length {length}, got shape {prefix.shape}")
    network = in_chunks(denoise, microbatch, "microbatch")
    times = jnp.linspace(1.0, masked.SMALLEST_SAMPLING_TIME, num_steps + 1)

    def init(key, num_particles):
        tokens = jnp.full((num_particles, length), mask_index, jnp.int32)
        return tokens if prefix is None else tokens.at[:, : prefix.shape[-1]].set(prefix.astype(jnp.int32))

    def propose(key, tokens, i):
        size = tokens.shape[0]
        t, s = times[i], times[i + 1]
        log_probs = masked.subs_log_probs(network(tokens, jnp.full((size,), t), cond), tokens, mask_index)
        keys = particle_keys(key, size, axis_name)

        def move(key, log_probs, tokens):
            move_key, fill_key = jax.random.split(key)
            moved = masked.masked_step(move_key, log_probs, tokens, t, s, schedule, mask_index)
            left = (moved == mask_index) & (i == num_steps - 1)
            return jnp.where(left, jax.random.categorical(fill_key, log_probs).astype(moved.dtype), moved)

        return jax.vmap(move)(keys, log_probs, tokens), CleanTokens(log_probs), jnp.zeros(size)

    return Kernel(init, propose, lambda tokens: tokens, num_steps)


def in_chunks(function: Callable, size: int | None, name: str) -> Callable:
    """Applies a function of batches to `size` rows at a time, one chunk after the other; None for all at once.

    The arrays of every argument that have the batch's leading axis are cut; other arguments go to every chunk whole.

    Raises:
      ValueError: (by the result) if `size` is below 1 or does not divide the batch.
    """
    if size is None:
        return function

    def chunked(batch, *rest):
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        if size < 1 or num_rows % size:
            raise ValueError(f"{name} must be at least 1 and divide the {num_rows} particles, got {size}")
        leaves, treedef = jax.tree.flatten((batch, *rest))
        is_cut = [jnp.ndim(leaf) > 0 and jnp.shape(leaf)[0] == num_rows for leaf in leaves]
        cut = [leaf.reshape(-1, size, *leaf.shape[1:]) for leaf, yes in zip(leaves, is_cut, strict=True) if yes]

        def apply(chunk):
            parts = iter(chunk)
            arguments = [next(parts) if yes else leaf for leaf, yes in zip(leaves, is_cut, strict=True)]
            return function(*jax.tree.unflatten(treedef, arguments))

        outputs = jax.lax.map(apply, cut)
        return jax.tree.map(lambda leaf: leaf.reshape(num_rows, *leaf.shape[2:]), outputs)

    return chunked


def _normals(keys: Key[Array, "particles"], sample_shape: Sequence[int], dtype: Any) -> Float[Array, "particles *dims"]:
    dtype = jnp.result_type(float) if dtype is None else dtype
    return jax.vmap(lambda key: jax.random.normal(key, tuple(sample_shape), dtype))(keys)


def _is_zero(value: Any) -> bool:
    return checks.is_concrete(value) and float(value) == 0
