"""jaxml25: ICML 2025 methods as pure JAX functions."""

from jaxml25._version import __version__

__all__ = ["__version__"]
