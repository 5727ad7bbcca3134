"""Inspect XLA HLO and stop layout and sharding regressions of JAX programs.

The names of :data:`__all__` are imported on first use: to import the package costs next to nothing,
and needs no jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hlo_audit._version import __version__

if TYPE_CHECKING:
    from hlo_audit.api import AuditFailure, audit, check, load, make_mesh
    from hlo_audit.dump import Dump, ModuleDump, Snapshot
    from hlo_audit.errors import CompileError, DumpError, HloAuditError, ParseError, UsageError
    from hlo_audit.hlo import Computation, Instruction, Module, parse_module
    from hlo_audit.report import Report
    from hlo_audit.rule import Finding

__all__ = [
    "AuditFailure",
    "CompileError",
    "Computation",
    "Dump",
    "DumpError",
    "Finding",
    "HloAuditError",
    "Instruction",
    "Module",
    "ModuleDump",
    "ParseError",
    "Report",
    "Snapshot",
    "UsageError",
    "__version__",
    "audit",
    "check",
    "load",
    "make_mesh",
    "parse_module",
]

_FOUND_IN = {
    "api": ("AuditFailure", "audit", "check", "load", "make_mesh"),
    "dump": ("Dump", "ModuleDump", "Snapshot"),
    "errors": ("CompileError", "DumpError", "HloAuditError", "ParseError", "UsageError"),
    "hlo": ("Computation", "Instruction", "Module", "parse_module"),
    "report": ("Report",),
    "rule": ("Finding",),
}
_MODULES = {name: module for module, names in _FOUND_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
