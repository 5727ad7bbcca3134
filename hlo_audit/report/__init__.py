"""Reports of a run, one file a format. What they report is in :class:`Report`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hlo_audit.errors import EXIT_GATE_FAILED
from hlo_audit.gate import Gate
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.rule import Finding
from hlo_audit.shard import Part
from hlo_audit.suppressions import Use

if TYPE_CHECKING:
    import pandas
    from rich.console import Group


@dataclass(frozen=True)
class ShardRecord:
    """What the report of a shard says, so that it can be merged with those of the others.

    Attributes:
        part: which shard of which matrix it is of.
        positions: for each program of the report, the place in the matrix of what it came from.
        whole: whether all shards together have all programs that there are.
        suppressions: what they were good for in this shard.
    """

    part: Part
    positions: tuple[int, ...]
    whole: bool
    suppressions: tuple[Use, ...] = ()


@dataclass(frozen=True)
class Report:
    """A run: its programs, its verdict, and the versions it was made with.

    Attributes:
        environment: ``python``, ``jax``, ``jaxlib`` and ``libtpu`` on this machine; ``None`` for
            what is not installed.
        shard: of a run that is one of several machines'; else ``None``.
    """

    programs: Sequence[ProgramAudit]
    gate: Gate
    environment: Mapping[str, str | None]
    shard: ShardRecord | None = None

    @property
    def exit_code(self) -> int:
        """Of the command: that of the gravest error, else 1 where the gate fails, else 0."""
        errors = [audit.error.exit_code for audit in self.programs if audit.error is not None]
        return max(errors, default=0 if self.gate.passed else EXIT_GATE_FAILED)

    # -- for notebooks and scripts

    @property
    def counts(self) -> dict[str, int | None]:
        """Findings by rule code, notes too, summed over the programs; ``None`` where a rule could
        not look at one of them."""
        failed = any(audit.error is not None for audit in self.programs)
        counts: dict[str, int | None] = {}
        for audit in self.programs:
            for code, count in audit.counts.items():
                sum_before = counts.get(code, 0)
                if failed or count is None or sum_before is None:
                    counts[code] = None
                else:
                    counts[code] = sum_before + count
        return counts

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all programs, in their order."""
        return tuple(finding for audit in self.programs for finding in audit.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, by the JSON schema that ``--format json`` writes."""
        from hlo_audit.report.json import to_json

        return to_json(self)

    def to_frame(self) -> pandas.DataFrame:
        """A row for each finding: where it is, what it costs, and the line it comes from.

        Raises:
            ImportError: where pandas is not installed.
        """
        from hlo_audit.report.frame import findings_frame

        return findings_frame(self)

    def __str__(self) -> str:
        from hlo_audit.report.formats import as_text

        return as_text(self)

    def __rich__(self) -> Group:
        from rich.console import Group

        from hlo_audit.report.text import report_blocks

        return Group(*report_blocks(self))

    def _repr_html_(self) -> str:
        from hlo_audit.report.notebook import report_html

        return report_html(self)


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
