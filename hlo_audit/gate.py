"""Whether a run passes: findings against budgets, and reference models against what is known.

With neither budget nor reference, programs are reported and pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hlo_audit.program_audit import ProgramAudit

REFERENCE_FILE = "reference_counts.json"
"""The counts that the reference models are held against; part of the package."""


@dataclass(frozen=True)
class Violation:
    """One count that is not as it must be.

    Attributes:
        program: the label of the program.
        rule: the code of the rule.
        limit: the count allowed, or, against the reference, the count known.
        count: the count found; ``None`` where the rule could not look.
        against: ``budget`` or ``reference``.
    """

    program: str
    rule: str
    limit: int
    count: int | None
    against: str

    @property
    def message(self) -> str:
        found = "could not be counted" if self.count is None else f"is {self.count}"
        allowed = "at most " if self.against == "budget" else "the reference says "
        return f"{self.program}: {self.rule} {found}, {allowed}{self.limit}"


@dataclass(frozen=True)
class Gate:
    """The verdict of a run.

    Attributes:
        held: how many programs were held against something.
        against: what that was, ``budget`` or ``reference``.
    """

    violations: tuple[Violation, ...] = ()
    held: int = 0
    against: str = "reference"

    @property
    def passed(self) -> bool:
        return not self.violations


@dataclass(frozen=True)
class Reference:
    """The counts of one reference model, compiled in one way.

    HLA001 is left out: the number of annotations changes with the version of JAX.
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


def read_references() -> tuple[Reference, ...]:
    """The table that ships with the package."""
    text = resources.files("hlo_audit").joinpath(REFERENCE_FILE).read_text(encoding="utf-8")
    return tuple(Reference(**entry) for entry in json.loads(text)["entries"])


def judge(
    audits: Iterable[ProgramAudit],
    budgets: Mapping[str, int],
    references: Sequence[Reference] = (),
) -> Gate:
    """Hold each audit against the budgets, or, where there are none, against its reference.

    Args:
        audits: the programs; one that failed to compile is held against nothing.
        budgets: rule code -> the most findings that a program may have.
        references: see :func:`read_references`.
    """
    violations: list[Violation] = []
    held = 0
    for audit in audits:
        if audit.error is not None:
            continue
        if budgets:
            held += 1
            violations += _over_budget(audit, budgets)
        elif reference := next((r for r in references if r.describes(audit)), None):
            held += 1
            violations += _unlike(audit, reference)
    return Gate(tuple(violations), held, "budget" if budgets else "reference")


def _over_budget(audit: ProgramAudit, budgets: Mapping[str, int]) -> Iterable[Violation]:
    for code, limit in budgets.items():
        if code in audit.counts:
            count = audit.counts[code]
            if count is None or count > limit:
                yield Violation(audit.label, code, limit, count, "budget")


def _unlike(audit: ProgramAudit, reference: Reference) -> Iterable[Violation]:
    for code, known in reference.counts.items():
        if code in audit.counts and audit.counts[code] != known:
            yield Violation(audit.label, code, known, audit.counts[code], "reference")
