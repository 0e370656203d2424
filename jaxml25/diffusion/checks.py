"""Checks of arguments that the diffusion modules share."""

import difflib
from collections.abc import Sequence
from typing import Any

import jax


def is_concrete(value: Any) -> bool:
    """Whether the value of `value` is known now, so that a check of it can raise."""
    return not isinstance(value, jax.core.Tracer)


def one_of(name: str, value: str, valid: Sequence[str]) -> None:
    """Checks a choice by name.

    Raises:
      ValueError: if `value` is not in `valid`; the message lists them and suggests the nearest.
    """
    if value in valid:
        return
    near = difflib.get_close_matches(value, valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}{hint}")


def between(name: str, value: Any, low: float | int, high: float | int) -> None:
    """Checks a number that is known at trace time; a traced one passes.

    Raises:
      ValueError: if `value` lies outside [low, high] or is not a number.
    """
    if not is_concrete(value) or getattr(value, "ndim", 0):
        return
    if not low <= float(value) <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
