"""Assembles the FK steering experiment: the parts that the configuration names, one after the other."""

import importlib

from ml_collections import ConfigDict

from jaxml25.training import mesh
from jaxml25.training.workdir import Workdir


def run(config: ConfigDict, workdir: Workdir) -> dict:
    """Runs every part of `config.parts` and gathers its claims, metrics and parameters."""
    devices = mesh.make_mesh(config.mesh)
    claims, metrics, params = [], {}, {}
    for part in config.parts:
        workdir.say(f"--- {part}")
        outcome = importlib.import_module(f"experiments.fk_{part}").run(config[part], config.seed, workdir, devices)
        claims += outcome["claims"]
        metrics |= {f"{part}/{name}": value for name, value in outcome.get("metrics", {}).items()}
        params |= {part: outcome["params"]} if "params" in outcome else {}
    return {"claims": claims, "metrics": metrics, "params": params}
