"""Whether a run passes: findings against budgets, and reference models against what is known.

With neither budget nor reference, programs are reported and pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hlo_audit.audit import ProgramAudit
from hlo_audit.reference import Known, References


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
        notes: what a reader of the verdict has to know beside it.
    """

    violations: tuple[Violation, ...] = ()
    held: int = 0
    against: str = "reference"
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.violations


def judge(
    audits: Iterable[ProgramAudit],
    budgets: Mapping[str, int],
    references: References | None = None,
) -> Gate:
    """Hold each audit against the budgets, or, where there are none, against its reference.

    Args:
        audits: the programs; one that failed to compile is held against nothing.
        budgets: rule code -> the most findings that a program may have.
        references: what is known of the reference models.
    """
    violations: list[Violation] = []
    notes: dict[str, None] = {}  # each once, in order
    held = 0
    for audit in audits:
        if audit.error is not None:
            continue
        if budgets:
            held += 1
            violations += _over_budget(audit, budgets)
        elif references is not None and (known := references.of(audit)) is not None:
            held += 1
            violations += _unlike(audit, known)
            if known.note:
                notes[known.note] = None
    return Gate(tuple(violations), held, "budget" if budgets else "reference", tuple(notes))


def _over_budget(audit: ProgramAudit, budgets: Mapping[str, int]) -> Iterable[Violation]:
    for code, limit in budgets.items():
        if code in audit.counts:
            count = audit.counts[code]
            if count is None or count > limit:
                yield Violation(audit.label, code, limit, count, "budget")


def _unlike(audit: ProgramAudit, known: Known) -> Iterable[Violation]:
    for code, count in known.counts.items():
        if code in audit.counts and audit.counts[code] != count:
            yield Violation(audit.label, code, count, audit.counts[code], "reference")
