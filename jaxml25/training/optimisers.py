"""Optax optimisers from the plain values of a config."""

import difflib
from collections.abc import Mapping
from typing import Any

import optax
from ml_collections import ConfigDict

OPTIMISERS = {"adam": optax.adam, "adamw": optax.adamw, "lion": optax.lion, "sgd": optax.sgd, "adafactor": optax.adafactor}
SCHEDULES = ("constant", "cosine", "linear")
_DEFAULTS = {
    "name": "adamw",
    "learning_rate": 1e-3,
    "schedule": "constant",
    "warmup_steps": 0,
    "clip_norm": 0.0,
    "weight_decay": 0.0,
    "b2": 0.0,
}


def make_optimiser(config: Mapping[str, Any] | ConfigDict, num_steps: int) -> optax.GradientTransformation:
    """Chains gradient clipping and an optimiser with a learning-rate schedule.

    Args:
      config: any of `name` (one of `OPTIMISERS`), `learning_rate` (the peak), `schedule` (one of `SCHEDULES`; after the
        warm-up it stays, or falls to 0 at `num_steps`), `warmup_steps` (linear from 0), `clip_norm` (of the whole gradient;
        0 for none), `weight_decay` (adamw, lion and adafactor) and `b2` (decay of the second moment in adam, adamw and lion;
        0 for optax's own).
      num_steps: length of the run.

    Raises:
      ValueError: for an unknown key or name, a value out of range, or a warm-up longer than the run.
    """
    for key in config:
        _one_of("optimiser key", key, tuple(_DEFAULTS))
    values = {**_DEFAULTS, **config}
    _one_of("name", values["name"], tuple(OPTIMISERS))
    for key in ("learning_rate", "warmup_steps", "clip_norm", "weight_decay", "b2"):
        if not values[key] >= 0:
            raise ValueError(f"{key} must be at least 0, got {values[key]}")
    rate = make_schedule(values["schedule"], values["learning_rate"], values["warmup_steps"], num_steps)
    optimiser = _optimiser(values["name"], rate, values["weight_decay"], values["b2"])
    return optax.chain(optax.clip_by_global_norm(values["clip_norm"]), optimiser) if values["clip_norm"] else optimiser


def make_schedule(name: str, peak: float, warmup_steps: int, num_steps: int) -> optax.Schedule:
    """The learning rate at every step; see `make_optimiser`."""
    _one_of("schedule", name, SCHEDULES)
    if warmup_steps > num_steps:
        raise ValueError(f"warmup_steps must be at most the {num_steps} steps of the run, got {warmup_steps}")
    rest = max(num_steps - warmup_steps, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
    }[name]
    if not warmup_steps:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_steps), after], [warmup_steps])


def _optimiser(name: str, rate: optax.Schedule, decay: float, b2: float) -> optax.GradientTransformation:
    moments = {"b2": b2} if b2 else {}
    if b2 and name not in ("adam", "adamw", "lion"):
        raise ValueError(f"b2 must be 0 for {name}, got {b2}")
    if name in ("adamw", "lion"):
        return OPTIMISERS[name](rate, weight_decay=decay, **moments)
    if name == "adafactor":
        return optax.adafactor(rate, weight_decay_rate=decay or None)
    if decay:
        raise ValueError(f"weight_decay must be 0 for {name}, got {decay}")
    return OPTIMISERS[name](rate, **moments)


def _one_of(argument: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        near = difflib.get_close_matches(str(value), valid, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{argument} must be one of {', '.join(valid)}, got {value!r}{hint}")
