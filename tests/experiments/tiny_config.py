"""Configuration of the launcher's test experiment."""

from ml_collections import ConfigDict


def get_config(variant: str = "small") -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "tests.experiments.tiny_experiment",
            "variant": variant,
            "seed": 0,
            "mesh": {"data": -1},
            "steps": 40,
            "log_every": 4,
            "checkpoint_every": 10,
            "accumulate": 1,
            "fail_at": 0,
            "poison": 1e6,
            "optimiser": {"name": "adamw", "learning_rate": 1e-2, "schedule": "cosine", "clip_norm": 1.0},
        }
    )
