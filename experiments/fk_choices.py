"""Potentials and resampling schemes that are chosen while a program runs: one compilation then serves a whole comparison."""

import functools
from collections.abc import Sequence

import jax
from jaxtyping import Array, Int

from jaxml25.diffusion import potentials, resampling


def any_scheme(names: Sequence[str], index: Int[Array, ""] | int) -> resampling.Scheme:
    """The scheme at a traced index of `names`."""

    def resample(key, log_weights, num):
        branches = [functools.partial(resampling.get(name), num=num) for name in names]
        return jax.lax.switch(index, branches, key, log_weights)

    return resample


def any_potential(names: Sequence[str], index: Int[Array, ""] | int) -> potentials.Potential:
    """The potential at a traced index of `names`; those of `potentials` all keep the same state.

    `fk_steering.run` knows `diff` by name, and adds lambda r_min to its log Z; with this one that is left to the caller.
    """

    def update(state, rewards, lam, last):
        branches = [functools.partial(potentials.get(name).update, lam=lam, last=last) for name in names]
        return jax.lax.switch(index, branches, state, rewards)

    return potentials.Potential(potentials.diff.init, update)
