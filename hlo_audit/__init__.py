"""Inspect XLA HLO and stop layout and sharding regressions of JAX programs."""

from hlo_audit._version import __version__

__all__ = ["__version__"]
