"""Resampling schemes for interacting particles.

Given N unnormalised log-weights with W = w / sum(w), each scheme draws M ancestors whose offspring counts n satisfy

    E[n_j] = M W_j.                                                             (1)

All but `residual` and `ssp` invert the cumulative weights C_j = sum_{l <= j} W_l at M points p_m,

    ancestor(m) = min { j : C_j >= p_m },                                       (2)

and differ in the points: `multinomial` M sorted independent uniforms, `systematic` (u + m) / M with one uniform u,
`stratified` (u_m + m) / M. `residual` gives floor(M W_j) copies and draws the rest multinomially. `ssp`, the Srinivasan
sampling process, walks over the fractional parts of M W in pairs, moving as much as fits from one to the other so that (1)
holds, and leaves n_j in {floor(M W_j), ceil(M W_j)}; so does `systematic`.

Everything is computed from differences of logarithms: weights of 1e+-300 neither overflow nor vanish together. A weight
that is NaN counts as zero; if no weight is positive they all count as equal. No scheme ever returns an index whose weight is
zero. In float32 the cumulative weights carry a second word, so counts stay right for many thousands of particles.

Reference: M. Gerber, N. Chopin and N. Whiteley, "Negative association, ordering and convergence of resampling methods",
Annals of Statistics 47(4), 2019 (arXiv 1707.01845).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxml25.diffusion import checks

Draws = Key[Array, ""] | Float[Array | np.ndarray, "*draws"]  # a key, or the uniforms in [0, 1) that it would have drawn
LogWeights = Float[Array | np.ndarray, "particles"]
_FEW_PAIRS = 2**14


@functools.partial(jax.jit, static_argnames=("num",))
def multinomial(key: Draws, log_weights: LogWeights, num: int) -> Int[Array, "{num}"]:
    """Draws independent ancestors by equation (2).

    Args:
      key: a key, or `num` uniforms, used in the order given (sorted uniforms give sorted ancestors).
      log_weights: unnormalised log-weights of N particles.
      num: number M of ancestors, at least 1.

    Returns:
      M indices below N.
    """
    weights = _relative_weights(log_weights)
    _check_num(num)
    if _is_key(key):
        points = _ordered_uniforms(jax.random.exponential(key, (num + 1,), weights.dtype), num)
    else:
        points = _uniforms("multinomial", key, num, weights.dtype)
    return _invert(points, weights)


@functools.partial(jax.jit, static_argnames=("num",))
def systematic(key: Draws, log_weights: LogWeights, num: int) -> Int[Array, "{num}"]:
    """Draws ancestors at the points (u + m) / M; offspring counts are floor(M W) or ceil(M W).

    Args:
      key: a key, or one uniform u.
      log_weights: unnormalised log-weights of N particles.
      num: number M of ancestors, at least 1.

    Returns:
      M sorted indices below N.
    """
    weights = _relative_weights(log_weights)
    _check_num(num)
    offset = _uniforms("systematic", key, 1, weights.dtype)[0]
    whole, fraction = _scaled_edges(weights, num)
    return _ancestors_below_edges(whole + (offset <= fraction), weights, num)


@functools.partial(jax.jit, static_argnames=("num",))
def stratified(key: Draws, log_weights: LogWeights, num: int) -> Int[Array, "{num}"]:
    """Draws ancestors at the points (u_m + m) / M, one in every stratum.

    Args:
      key: a key, or `num` uniforms.
      log_weights: unnormalised log-weights of N particles.
      num: number M of ancestors, at least 1.

    Returns:
      M sorted indices below N.
    """
    weights = _relative_weights(log_weights)
    _check_num(num)
    offsets = _uniforms("stratified", key, num, weights.dtype)
    whole, fraction = _scaled_edges(weights, num)
    return _ancestors_below_edges(whole + (offsets[jnp.minimum(whole, num - 1)] <= fraction), weights, num)


@functools.partial(jax.jit, static_argnames=("num",))
def residual(key: Draws, log_weights: LogWeights, num: int) -> Int[Array, "{num}"]:
    """Gives floor(M W_j) copies, and draws the S that are left multinomially from the remainders.

    Args:
      key: a key, or raw uniforms of which the first S + 1 are used: the S ordered points are the normalised cumulative
        sums of -log u. S depends on the weights, so M + 1 uniforms always suffice; fewer than S + 1 are undefined.
      log_weights: unnormalised log-weights of N particles.
      num: number M of ancestors, at least 1.

    Returns:
      M indices below N: first the copies in order, then the draws in order.
    """
    weights = _relative_weights(log_weights)
    _check_num(num)
    copies, fractions = _split_expected(weights, num)
    total_copies = jnp.sum(copies)
    num_left = num - total_copies

    if _is_key(key):
        spacings = jax.random.exponential(key, (num + 1,), weights.dtype)
    else:
        uniforms = jnp.asarray(key, weights.dtype).reshape(-1)[: num + 1]
        spacings = -jnp.log(jnp.maximum(uniforms, jnp.finfo(weights.dtype).tiny))
        spacings = jnp.pad(spacings, (0, num + 1 - spacings.size), constant_values=1.0)
    # Without remainders nothing is drawn from them; the weights keep the inversion below well defined.
    drawn = _invert(_ordered_uniforms(spacings, num_left), jnp.where(num_left > 0, fractions, weights))

    slots = jnp.arange(num)
    copied = _search(jnp.cumsum(copies), slots, side="right")
    chosen = jnp.where(slots < total_copies, copied, drawn[jnp.maximum(slots - total_copies, 0)])
    return chosen.astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("num",))
def ssp(key: Draws, log_weights: LogWeights, num: int) -> Int[Array, "{num}"]:
    """Draws ancestors by the Srinivasan sampling process; offspring counts are floor(M W) or ceil(M W).

    The walk keeps one particle open and meets the others in turn. With fractional parts f (open) and g (next), the pair
    becomes (f + g, 0) or (0, f + g) if f + g < 1 and (1, f + g - 1) or (f + g - 1, 1) otherwise, with the probabilities that
    keep the means; the particle that reached 0 or 1 is done and the other stays open. The open fraction is then the
    cumulative sum of all fractions so far modulo 1, whatever the coins say: all coins are thrown at once, and only the
    identity of the open particle is accumulated.

    Args:
      key: a key, or N - 1 uniforms, one for every meeting.
      log_weights: unnormalised log-weights of N particles.
      num: number M of ancestors, at least 1.

    Returns:
      M sorted indices below N.
    """
    weights = _relative_weights(log_weights)
    _check_num(num)
    size = weights.size
    coins = _uniforms("ssp", key, size - 1, weights.dtype)
    copies, fractions = _split_expected(weights, num)

    # Sums that rounding left beside a whole number are that number, and the last one is exactly what the copies leave.
    whole, open_fraction = _split_sum(*_paired_cumsum(fractions))
    tolerance = size * jnp.finfo(weights.dtype).eps
    above = (open_fraction > 1 - tolerance) & (jnp.arange(size) > 0)
    whole = _running_max((whole + above).at[-1].set(num - jnp.sum(copies, dtype=jnp.int32)))
    open_fraction = jnp.where(above | (open_fraction < tolerance), 0, open_fraction)

    is_full = whole[1:] > whole[:-1]  # the meeting fills one of the pair to 1
    before, meets = open_fraction[:-1], fractions[1:]
    # The open particle stands first after a meeting that filled nobody, second after one that did; a coin below `second`
    # raises the second of the pair. The roles decide nothing but which way a given uniform reads.
    is_second = jnp.concatenate([jnp.zeros((1,), bool), is_full[:-1]])[: size - 1]
    raise_next = jnp.minimum(before, 1 - meets)  # how far the next could rise, and so the weight of raising the open one
    raise_open = jnp.minimum(meets, 1 - before)
    span = raise_next + raise_open
    second = jnp.where(span > 0, jnp.where(is_second, raise_next, raise_open) / jnp.where(span > 0, span, 1), 0)
    is_next_raised = (coins < second) != is_second

    next_stays_open = is_next_raised != is_full
    opened = jnp.where(next_stays_open, jnp.arange(1, size), 0)
    is_open = jnp.concatenate([jnp.zeros((1,), opened.dtype), _running_max(opened)])
    filled = jnp.where(is_next_raised, jnp.arange(1, size), is_open[:-1])
    copies = copies.at[filled].add(is_full)
    return _repeat(copies, num)


def none(key: Draws, log_weights: LogWeights, num: int) -> Int[Array, "{num}"]:
    """Keeps every particle: the identity.

    Args:
      key: unused.
      log_weights: of N particles, N equal to `num`.
      num: number of ancestors.

    Returns:
      0, ..., num - 1.
    """
    if num != log_weights.shape[0]:
        raise ValueError(
            f"num must equal the number of particles when nothing is resampled, got {num} and {log_weights.shape[0]}"
        )
    return jnp.arange(num, dtype=jnp.int32)


Scheme = Callable[..., Array]
SCHEMES: dict[str, Scheme] = {
    "multinomial": multinomial,
    "systematic": systematic,
    "stratified": stratified,
    "residual": residual,
    "ssp": ssp,
    "none": none,
}


def get(scheme: str | Scheme) -> Scheme:
    """Looks a scheme up by name, or returns the user's own.

    Raises:
      ValueError: if there is none of that name; the message lists them.
    """
    if callable(scheme):
        return scheme
    checks.one_of("resample", scheme, tuple(SCHEMES))
    return SCHEMES[scheme]


def effective_sample_size(log_weights: LogWeights) -> Float[Array, ""]:
    """Computes (sum w)^2 / sum w^2 in particles, between 1 and N; exactly N for equal weights.

    Args:
      log_weights: unnormalised; NaN counts as zero weight, and no positive weight at all as equal weights.
    """
    weights = _relative_weights(log_weights)
    return jnp.sum(weights) ** 2 / jnp.sum(weights**2)


def log_mean_exp(log_weights: Float[Array, "*batch particles"], axis: int = -1) -> Float[Array, "*rest"]:
    """Computes log mean exp without overflow; -inf when every entry is -inf."""
    return jax.scipy.special.logsumexp(log_weights, axis=axis) - jnp.log(log_weights.shape[axis])


def take(particles: Any, ancestors: Int[Array, "num"], *, axis_name: str | None = None) -> Any:
    """Gathers the ancestors of every per-particle array.

    Args:
      particles: a pytree; leaves with a leading particle axis are gathered, scalar leaves are shared and kept.
      ancestors: indices over all particles, the same on every device.
      axis_name: mapped axis over which the particles' leading axis is split in equal parts, device after device; the
        result is split the same way. The shards travel once around a ring, so a device holds two shards at a time and
        never all particles.

    Returns:
      The pytree of descendants.
    """
    if axis_name is None:
        return jax.tree.map(lambda leaf: leaf[ancestors] if jnp.ndim(leaf) else leaf, particles)

    num_devices = jax.lax.axis_size(axis_name)
    device = jax.lax.axis_index(axis_name)
    num_local = ancestors.shape[0] // num_devices
    wanted = jax.lax.dynamic_slice_in_dim(ancestors, device * num_local, num_local)
    ring = [(source, (source - 1) % num_devices) for source in range(num_devices)]

    def take_leaf(leaf):
        if not jnp.ndim(leaf):
            return leaf
        shard_size = leaf.shape[0]

        def visit(hop, carry):
            shard, taken = carry
            here = wanted // shard_size == (device + hop) % num_devices
            rows = shard[wanted % shard_size]
            taken = jnp.where(here.reshape((-1,) + (1,) * (leaf.ndim - 1)), rows, taken)
            return jax.lax.ppermute(shard, axis_name, ring), taken

        empty = jnp.zeros_like(leaf, shape=(num_local, *leaf.shape[1:]))
        return jax.lax.fori_loop(0, num_devices, visit, vary((leaf, empty), axis_name))[1]

    return jax.tree.map(take_leaf, particles)


def gather_log_weights(log_weights: Float[Array, "local"], axis_name: str | None = None) -> Float[Array, "particles"]:
    """Returns the log-weights of all particles on every device of `axis_name`; the input itself without one."""
    return log_weights if axis_name is None else jax.lax.all_gather(log_weights, axis_name, tiled=True)


def vary(tree: Any, axis_name: str | None) -> Any:
    """Marks arrays as different on every device of `axis_name`, which loop carries under `shard_map` must be told."""
    if axis_name is None:
        return tree

    # `pcast` refuses an array that varies already; a choice that depends on the device takes both kinds and costs nothing.
    is_device = jax.lax.axis_index(axis_name) >= 0
    return jax.tree.map(lambda leaf: jnp.where(is_device, leaf, leaf), tree)


def _is_key(key: Any) -> bool:
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def _running_max(values: Int[Array, "n"]) -> Int[Array, "n"]:
    return jax.lax.cummax(values) if values.size else values


def _check_num(num: int) -> None:
    if num < 1:
        raise ValueError(f"num must be at least 1, got {num}")


def _uniforms(scheme: str, key: Draws, size: int, dtype: Any) -> Float[Array, "{size}"]:
    if _is_key(key):
        return jax.random.uniform(key, (size,), dtype)
    if key.size != size:
        raise ValueError(f"key must be a key or {size} uniforms for {scheme} resampling, got uniforms of shape {key.shape}")
    return jnp.asarray(key, dtype).reshape(size)


def _relative_weights(log_weights: LogWeights) -> Float[Array, "particles"]:
    """Returns weights in [0, 1] whose largest is 1; NaN counts as zero, no positive weight as all equal."""
    log_weights = jnp.asarray(log_weights)
    if log_weights.shape[0] < 1:
        raise ValueError("log_weights must hold at least 1 particle, got 0")
    log_weights = jnp.where(jnp.isnan(log_weights), -jnp.inf, log_weights)
    top = jnp.max(log_weights)
    return jnp.where(jnp.isinf(top), log_weights == top, jnp.exp(log_weights - jnp.where(jnp.isinf(top), 0, top)))


def _ordered_uniforms(spacings: Float[Array, "n"], num: int | Int[Array, ""]) -> Float[Array, "n-1"]:
    """Turns unit exponentials into `num` ordered uniforms on (0, 1), followed by ones."""
    sums = jnp.cumsum(spacings)
    return jnp.minimum(sums[:-1] / sums[num], 1)


def _invert(points: Float[Array, "num"], weights: Float[Array, "particles"]) -> Int[Array, "num"]:
    """Equation (2) for arbitrary points in [0, 1]."""
    edges = jnp.cumsum(weights)
    return _nearest_alive(_search(edges / edges[-1], points, side="left"), weights)


def _search(edges: Array, points: Array, *, side: str) -> Int[Array, "num"]:
    """Finds points among edges: by comparing all pairs while they are few, which saves a loop to compile and to run."""
    method = "compare_all" if edges.size * points.size <= _FEW_PAIRS else "scan"
    return jnp.searchsorted(edges, points, side=side, method=method)


def _nearest_alive(indices: Int[Array, "num"], weights: Float[Array, "particles"]) -> Int[Array, "num"]:
    """Moves an index of zero weight to the closest positive weight before it, or to the first one of all.

    Such an index can only come out of rounding, at the outer edges or where a parallel cumulative sum is not monotone.
    """
    is_alive: Bool[Array, "particles"] = weights > 0
    last_alive = jax.lax.cummax(jnp.where(is_alive, jnp.arange(weights.size), jnp.argmax(is_alive)))
    return last_alive[jnp.minimum(indices, weights.size - 1)].astype(jnp.int32)


def _scaled_edges(weights: Float[Array, "particles"], num: int) -> tuple[Int[Array, "particles"], Float[Array, "particles"]]:
    """Returns M C_j as whole and fractional parts, accurate to one rounding of the weights whatever M."""
    high, low = _paired_cumsum(num * weights / jnp.sum(weights))
    missing = (num - high[-1]) - low[-1]  # the one-word total is off by a relative rounding; spread that evenly
    high, low = _two_sum(high, low + missing * (high / num))
    whole, fraction = _split_sum(high, low)
    is_last = jnp.arange(weights.size) == weights.size - 1
    whole = jnp.where(is_last, num, jnp.minimum(whole, num))
    return whole, jnp.where(is_last | (whole == num), 0, fraction)


def _ancestors_below_edges(
    num_points: Int[Array, "particles"], weights: Float[Array, "particles"], num: int
) -> Int[Array, "{num}"]:
    """Finds the ancestor of every slot from the number of points at or below every edge."""
    edges = jax.lax.cummax(jnp.minimum(num_points, num))
    return _nearest_alive(_search(edges, jnp.arange(num), side="right"), weights)


def _split_expected(
    weights: Float[Array, "particles"], num: int
) -> tuple[Int[Array, "particles"], Float[Array, "particles"]]:
    """Splits M W into whole copies and fractions; a fraction that is only rounding below 1 is a copy."""
    expected = num * weights / jnp.sum(weights)
    slack = 4 * jnp.finfo(weights.dtype).eps * expected
    copies = jnp.floor(expected + slack)
    return copies.astype(jnp.int32), jnp.where(expected - copies > slack, expected - copies, 0)


def _repeat(counts: Int[Array, "particles"], num: int) -> Int[Array, "{num}"]:
    return _search(jnp.cumsum(counts), jnp.arange(num), side="right").astype(jnp.int32)


def _two_sum(a: Float[Array, "n"], b: Float[Array, "n"]) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Returns the rounded sum and its exact error (Knuth)."""
    total = a + b
    shift = total - a
    return total, (a - (total - shift)) + (b - shift)


def _paired_cumsum(values: Float[Array, "n"]) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Returns cumulative sums as unevaluated sums of two words: float32 with 48 bits."""

    def add(left, right):
        high, error = _two_sum(left[0], right[0])
        return _two_sum(high, error + (left[1] + right[1]))

    return jax.lax.associative_scan(add, (values, jnp.zeros_like(values)))


def _split_sum(high: Float[Array, "n"], low: Float[Array, "n"]) -> tuple[Int[Array, "n"], Float[Array, "n"]]:
    """Splits high + low into its floor and a fraction in [0, 1]."""
    whole = jnp.floor(high)
    fraction = (high - whole) + low
    borrow = fraction < 0
    return whole.astype(jnp.int32) - borrow, jnp.where(borrow, fraction + 1, fraction)
