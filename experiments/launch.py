"""Runs an experiment: flags, processes, mesh, workdir, summary.

    python experiments/launch.py --config=configs/fk_steering.py:small --workdir=runs/fk_steering --config.digits.train.steps=500

The part behind the colon is the variant: `smoke` (a minute, mostly compilation), `small` (the default; minutes on a CPU) or
`paper` (accelerators). A run that was killed goes on where its last checkpoint stands when the same command is given again; a
finished one is not overwritten without --overwrite. On TPU pods and under Slurm every process starts this same command and finds
the others by itself; elsewhere each is told --coordinator_address, --num_processes and --process_id.
"""

import contextlib
import difflib
import errno
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import runpy
import signal
import sys
import types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from absl import app, flags, logging
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict, config_flags

import jaxml25
from jaxml25.training import claims as claims_lib
from jaxml25.training import loop
from jaxml25.training.workdir import Workdir, WorkdirError

_CONFIG = config_flags.DEFINE_config_file("config", help_string="file[:variant]", lock_config=True)
flags.mark_flag_as_required("config")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace what an earlier run left in the workdir")
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address", None, "host:port of process 0, where it is not found automatically"
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "how many processes run this command", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "number of this process, from 0", lower_bound=0)

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_ENVIRONMENT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def main(arguments) -> None:
    del arguments
    logging.set_verbosity(logging.WARNING)
    config = _CONFIG.value
    _initialise_processes()
    try:
        if jax.process_count() == 1:
            signal.signal(signal.SIGTERM, _terminated)
        experiment = _import(config.experiment)
        workdir = Workdir(_WORKDIR.value, config=_plain(config), overwrite=_OVERWRITE.value)
        outcome = experiment.run(config, workdir)
        summarise(config, workdir, outcome)
    except (WorkdirError, loop.NonFiniteError) as error:
        sys.exit(str(error))
    except Exception as error:
        reason = _environment_error(error)
        if reason is None:
            raise
        sys.exit(f"workdir {_WORKDIR.value}: {reason}; what was written before is kept, run the same command to go on")


def parse(arguments: list[str]) -> list[str]:
    """Parses the flags; what is wrong with them is one line, said before any work."""
    try:
        _check_keys(arguments)
        return flags.FLAGS(arguments)
    except flags.Error as error:
        sys.exit(str(error))
    except Exception as error:  # the config file is any Python
        sys.exit(f"--config: {error if not isinstance(error, KeyError) else f'{error} is not among its variants'}")


def _check_keys(arguments: list[str]) -> None:
    """Checks that every --config.key exists in the config file that is named.

    Raises:
      ValueError: for one that does not, naming the nearest that does.
    """
    named = [re.fullmatch(r"--?config(?:=(.*))?", argument) for argument in arguments]
    position = next((i for i, match in enumerate(named) if match), None)
    if position is None:
        return
    spec = named[position].group(1) or next(iter(arguments[position + 1 :]), "")
    path, _, variant = spec.partition(":")
    if not pathlib.Path(path).is_file():
        raise ValueError(f"there is no file {path!r}")
    get_config = runpy.run_path(path)["get_config"]
    keys = _keys(get_config(variant) if variant else get_config())
    for argument in arguments:
        match = re.match(r"--?config\.([^=\[]+)", argument)
        if match and match.group(1) not in keys:
            nearest = difflib.get_close_matches(match.group(1), keys, n=1, cutoff=0)
            raise ValueError(f"there is no key {match.group(1)!r}; did you mean {nearest[0]!r}?")


def _keys(config: ConfigDict, prefix: str = "") -> list[str]:
    keys = []
    for key, value in config.items():
        keys.append(prefix + key)
        keys += _keys(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else []
    return keys


def summarise(config: ConfigDict, workdir: Workdir, outcome: dict) -> None:
    """Writes summary.json and shows the claims."""
    claims = outcome.get("claims", [])
    if config.get("variant", _variant()) == "smoke":
        claims = claims_lib.unjudged(claims)
    workdir.finish(
        {
            "config": _plain(config),
            "versions": {"python": platform.python_version(), "jaxml25": jaxml25.__version__}
            | {name: importlib.metadata.version(name) for name in _PACKAGES},
            "devices": [str(device) for device in jax.devices()],
            "seconds": round(workdir.seconds, 1),
            "metrics": outcome.get("metrics", {}),
            "params_digest": params_digest(outcome.get("params")),
            "claims": [claim._asdict() for claim in claims],
        }
    )
    if claims:
        workdir.say(claims_lib.table(claims))
    workdir.say(
        f"{workdir.seconds:.0f} s; everything is in {_WORKDIR.value}: summary.json, figures/, metrics.jsonl, checkpoints/"
    )


def params_digest(params) -> str:
    """sha256 over the leaves' bytes in the order of their paths; parameters that are split over processes are gathered."""
    digest = hashlib.sha256()
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    for path, leaf in sorted(leaves, key=lambda item: item[0]):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())
            leaf = jax.jit(lambda x: x, out_shardings=whole)(leaf)
        digest.update(path.encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _initialise_processes() -> None:
    told = {
        "coordinator_address": _COORDINATOR.value,
        "num_processes": _NUM_PROCESSES.value,
        "process_id": _PROCESS_ID.value,
    }
    if any(value is not None for value in told.values()):
        missing = [name for name, value in told.items() if value is None]
        if missing:
            sys.exit(f"--{missing[0]} must be given too: the three flags of several processes belong together")
        jax.distributed.initialize(**told)
    elif _is_slurm_step():
        jax.distributed.initialize()
    elif _is_tpu_host():
        # The hosts of a pod find each other through its metadata; a host that is alone has no coordinator, and needs none.
        with contextlib.suppress(ValueError):
            jax.distributed.initialize()


def _is_slurm_step() -> bool:
    """Whether srun started several of this process; a batch script or a shell of salloc is one process beside its tasks."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    return all(name in os.environ for name in names) and int(os.environ.get("SLURM_NTASKS", "1")) > 1


def _is_tpu_host() -> bool:
    chips = pathlib.Path("/dev/accel0").exists() or pathlib.Path("/dev/vfio/0").exists()
    wanted = os.environ.get("JAX_PLATFORMS", "tpu")
    return chips and "tpu" in wanted and importlib.util.find_spec("libtpu") is not None


def _variant() -> str:
    return flags.FLAGS["config"].config_filename.partition(":")[2]


def _import(experiment: str) -> types.ModuleType:
    name = experiment if "." in experiment else f"experiments.{experiment}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and what it needs is not
        sys.exit(f"there is no experiment {experiment!r}: no module {error.name}")


def _terminated(number, frame) -> None:
    print("stopped by a signal; run the same command to go on", flush=True)
    sys.exit(0)


def _environment_error(error: BaseException) -> str | None:
    """One line for a full disk or a folder that cannot be written, however deep the error is wrapped."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _ENVIRONMENT_ERRORS:
            return error.strerror
        found = re.search("No space left on device|Disk quota exceeded|Read-only file system", str(error))
        if found:
            return found.group()
        error = error.__cause__ or error.__context__
    return None


def _plain(config: ConfigDict) -> dict:
    return json.loads(config.to_json_best_effort())


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
