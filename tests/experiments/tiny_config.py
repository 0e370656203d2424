"""Configuration of the launcher's test experiment.

`small` takes a second once everything is compiled; `long` has enough steps and checkpoints to be killed in the middle of.
"""

from ml_collections import ConfigDict


def get_config(variant: str = "small") -> ConfigDict:
    if variant not in ("small", "long"):
        raise ValueError(f"variant must be small or long, got {variant!r}")
    return ConfigDict(
        {
            "experiment": "tests.experiments.tiny_experiment",
            "variant": variant,
            "seed": 0,
            "mesh": {"data": -1, "model": 1},
            "steps": {"small": 40, "long": 300}[variant],
            "log_every": 4,
            "checkpoint_every": 10,
            "accumulate": 1,
            "fail_at": 0,
            "poison": 1e6,
            "optimiser": {"name": "adamw", "learning_rate": 1e-2, "schedule": "cosine", "clip_norm": 1.0},
        }
    )
