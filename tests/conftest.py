"""Settings every test shares: the CPU backend and a compilation cache that outlives the run."""

import os
import pathlib

_ROOT = pathlib.Path(__file__).parent.parent

# Set before JAX is imported, so that subprocesses a test starts inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("MPLBACKEND", "agg")
