"""What is known of the reference models: their counts, as each compiler version was measured.

The structure of what a compiler makes of them did not change over the versions, but for details:
the number of annotations follows JAX. With a version that was not measured, only what is the same
under all that were is compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hlo_audit.program_audit import ProgramAudit

REFERENCE_FILE = "reference_counts.json"
"""The counts that the reference models are held against; part of the package."""

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Entry:
    """The counts of one reference model, compiled in one way.

    Attributes:
        counts: findings by rule code.
    """

    program: str
    mode: str
    layout: str
    platform: str
    topology: str
    settings: Mapping[str, Any]
    counts: Mapping[str, int]

    def describes(self, audit: ProgramAudit) -> bool:
        """Whether ``audit`` is of that model, compiled in that way."""
        return (
            not audit.xla_flags
            and dict(audit.settings) == dict(self.settings)
            and (audit.program, audit.mode, audit.layout, audit.platform, audit.topology)
            == (self.program, self.mode, self.layout, self.platform, self.topology)
        )


@dataclass(frozen=True)
class Known:
    """What is known of one audit.

    Attributes:
        counts: findings by rule code, as they are to be.
        note: what of them was left out, and why; ``""`` where the version was measured.
    """

    counts: Mapping[str, int]
    note: str = ""


@dataclass(frozen=True)
class References:
    """The tables of all versions that were measured.

    Attributes:
        tables: the entries by versions, (jax, libtpu).
    """

    tables: Mapping[tuple[str, str], Sequence[Entry]]

    def of(self, audit: ProgramAudit) -> Known | None:
        """What is known of ``audit``; ``None`` for what is no reference model, or was compiled in
        a way that was not measured."""
        versions = (str(audit.versions.get("jax")), str(audit.versions.get("libtpu")))
        found = {
            measured: entry.counts
            for measured, entries in self.tables.items()
            for entry in entries
            if entry.describes(audit)
        }
        if not found:
            return None
        if versions in found:
            return Known(found[versions])
        first, *others = found.values()
        same = {
            code: count
            for code, count in first.items()
            if all(other.get(code) == count for other in others)
        }
        left_out = sorted(first.keys() - same.keys())
        note = f"jax {versions[0]} with libtpu {versions[1]} was not measured: compared is what is"
        note += " the same under all versions that were"
        if left_out:
            note += f", which leaves out {', '.join(left_out)}"
        return Known(same, note)


def read_references() -> References:
    """The tables that ship with the package."""
    text = resources.files("hlo_audit").joinpath(REFERENCE_FILE).read_text(encoding="utf-8")
    return References(
        {
            (table["jax"], table["libtpu"]): tuple(Entry(**entry) for entry in table["entries"])
            for table in json.loads(text)["tables"]
        }
    )
