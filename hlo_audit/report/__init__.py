"""Reports of a run, one file a format. What they report is in :class:`Report`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from hlo_audit.errors import EXIT_GATE_FAILED
from hlo_audit.gate import Gate
from hlo_audit.program_audit import ProgramAudit


@dataclass(frozen=True)
class Report:
    """A run: its programs, its verdict, and the versions it was made with.

    Attributes:
        environment: ``python``, ``jax``, ``jaxlib`` and ``libtpu`` on this machine; ``None`` for
            what is not installed.
    """

    programs: Sequence[ProgramAudit]
    gate: Gate
    environment: Mapping[str, str | None]

    @property
    def exit_code(self) -> int:
        """Of the command: that of the gravest error, else 1 where the gate fails, else 0."""
        errors = [audit.error.exit_code for audit in self.programs if audit.error is not None]
        return max(errors, default=0 if self.gate.passed else EXIT_GATE_FAILED)


def environment() -> dict[str, str | None]:
    """The versions on this machine, found without importing any of them."""
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: _version(name) for name in ("jax", "jaxlib", "libtpu")},
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
