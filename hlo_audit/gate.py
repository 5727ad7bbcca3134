"""Whether a run passes: findings against a baseline, budgets, or what reference models hold.

With none of them, programs are reported and pass. A baseline is one of findings, so that a new one
fails even where an old one went away at the same time; budgets are of counts or bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Literal

from hlo_audit.baseline import Baseline, Entry, entry_of
from hlo_audit.budget import Budget
from hlo_audit.errors import UsageError
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.reference import Known, References

Against = Literal["budget", "reference", "baseline"]

Source = Literal["baseline", "revision", "report", "dump"]
"""What a :class:`Comparison` is with, in a word."""

NoticeKind = Literal[
    "slack", "versions", "not-in-baseline", "not-audited", "unused-suppression", "bad-suppression"
]


@dataclass(frozen=True)
class Violation:
    """One count that is not as it must be.

    Attributes:
        program: the label of the program.
        rule: the code of the rule.
        limit: the count allowed, or, against the reference or the baseline, the count known.
        count: the count found; ``None`` where the rule could not look.
        against: what it is held against.
        unit: of ``limit`` and ``count``.
        new: against a baseline, the fingerprints of the findings that it does not have, sorted; one
            that it lacks twice stands twice.
        gone: against a baseline, how many of its findings are no more.
        baseline: the name of the baseline, where it has a part in the limit.
        remark: what else to know, such as other versions of the compiler.
    """

    program: str
    rule: str
    limit: int
    count: int | None
    against: Against
    unit: Literal["findings", "bytes"] = "findings"
    new: tuple[str, ...] = ()
    gone: int = 0
    baseline: str = ""
    remark: str = ""

    @property
    def message(self) -> str:
        if self.count is None:
            found = "could not be counted"
        else:
            found = f"is {format_amount(self.count, self.unit)}"
            if self.new:
                found += f", {len(self.new)} of them new"
                found += f" and {self.gone} gone" if self.gone else ""
        remark = f" ({self.remark})" if self.remark else ""
        return f"{self.program}: {self.rule} {found}, {self.expected}{remark}"

    @property
    def expected(self) -> str:
        """What it should be, in words."""
        limit = format_amount(self.limit, self.unit)
        match self.against:
            case "budget":
                return f"at most {limit}"
            case "reference":
                return f"the reference says {limit}"
            case "baseline":
                return f"{self.baseline} has {limit}"


def format_amount(amount: int, unit: Literal["findings", "bytes"]) -> str:
    """A number of findings, or of bytes with their unit, exactly."""
    return f"{amount:,} bytes" if unit == "bytes" else str(amount)


@dataclass(frozen=True)
class Notice:
    """Something of the run's settings to put right; the programs are as they must be.

    Attributes:
        program: the label of the program, ``""`` where it is about none.
        rule: the code of the rule, ``""`` likewise.
        fails: whether it fails the gate, as the strict gate asks for.
    """

    kind: NoticeKind
    message: str
    program: str = ""
    rule: str = ""
    fails: bool = False


@dataclass(frozen=True)
class Gate:
    """The verdict of a run.

    Attributes:
        held: how many programs were held against something.
        against: what that was; ``baseline`` where that and budgets were.
        baseline: the name of the baseline, ``""`` where there was none.
        notices: what does not count as a violation.
        source: what the baseline is.
    """

    violations: tuple[Violation, ...] = ()
    held: int = 0
    against: Against = "reference"
    baseline: str = ""
    notices: tuple[Notice, ...] = ()
    source: Source = "baseline"

    @property
    def passed(self) -> bool:
        return not self.violations and not any(notice.fails for notice in self.notices)

    @property
    def gated_against(self) -> Against | None:
        """What programs were held against; ``None`` for a run without any gate."""
        return self.against if self.held or self.baseline else None

    def violations_of(self, audit: ProgramAudit) -> Sequence[Violation]:
        """Those of one program."""
        return self._by_program.get(audit.label, ())

    @cached_property
    def _by_program(self) -> Mapping[str, Sequence[Violation]]:
        found: dict[str, list[Violation]] = {}
        for violation in self.violations:
            found.setdefault(violation.program, []).append(violation)
        return found


BudgetsOf = Callable[[ProgramAudit], Sequence[Budget]]
"""The budgets of a program."""

Pair = Callable[[Sequence[ProgramAudit]], Sequence[Entry | None]]
"""The entry that each audit is held against; ``None`` for one that has none."""


@dataclass(frozen=True)
class Comparison:
    """What was found before, and how programs are found in it.

    Attributes:
        baseline: what was found before.
        folder: what paths in the baseline are relative to.
        pair: where it is not the entry of the same program, compiled in the same way.
        strict: whether it fails the gate where the baseline has more than there is.
        whole: whether the run is of all programs: then those that only the baseline has are told.
        source: what the baseline is.
    """

    baseline: Baseline
    folder: Path = Path()
    pair: Pair | None = None
    strict: bool = False
    whole: bool = False
    source: Source = "baseline"

    def entries_for(self, audits: Sequence[ProgramAudit]) -> Sequence[Entry | None]:
        """The entry for each of ``audits``."""
        if self.pair is not None:
            return self.pair(audits)
        return self.baseline.match([entry_of(audit, self.folder) for audit in audits])


def judge(
    audits: Sequence[ProgramAudit],
    budgets: Mapping[str, int] | BudgetsOf,
    references: References | None = None,
    comparison: Comparison | None = None,
) -> Gate:
    """Hold each audit against its budgets and the baseline, or, with neither, its reference.

    Args:
        audits: the programs; one with an error is held against nothing.
        budgets: of each program; or rule code -> the most findings that any program may have.
        references: what is known of the reference models.
        comparison: with what was found before; ``None`` for no baseline.

    Raises:
        UsageError: for a budget on top of a baseline, where there is none.
    """
    budgets_of = budgets if callable(budgets) else _the_same_for_all(budgets)
    audited = [audit for audit in audits if audit.error is None]
    violations: list[Violation] = []
    notices: list[Notice] = []
    held = budgeted = 0
    entries = comparison.entries_for(audited) if comparison else [None] * len(audited)
    for audit, entry in zip(audited, entries, strict=True):
        mine = budgets_of(audit)
        if comparison is None:
            refuse_relative(mine)
        budgeted += bool(mine)
        if comparison is not None:
            held += 1
            compared = _Compared(audit, entry_of(audit, comparison.folder), entry, comparison)
            violations += compared.violations({b.rule for b in mine if b.relative})
            notices += compared.notices()
        elif mine:
            held += 1
        elif references is not None and (known := references.of(audit)) is not None:
            held += 1
            violations += _unlike(audit, known)
            if known.note:
                notices.append(Notice("versions", known.note))
        name = comparison.baseline.name if comparison else ""
        violations += _over_budget(audit, entry, mine, name)
    if comparison is None:
        against: Against = "budget" if budgeted else "reference"
        return Gate(tuple(violations), held, against, notices=tuple(dict.fromkeys(notices)))
    notices += _other_versions(audited, entries, comparison.baseline.name)
    if comparison.whole and len(audited) == len(audits):
        notices += _not_audited(entries, comparison)
    name = comparison.baseline.name
    return Gate(tuple(violations), held, "baseline", name, tuple(notices), comparison.source)


# -- budgets


def _the_same_for_all(counts: Mapping[str, int]) -> BudgetsOf:
    budgets = [
        Budget(code, Decimal(count), "findings", relative=False) for code, count in counts.items()
    ]
    return lambda audit: budgets


def refuse_relative(budgets: Iterable[Budget]) -> None:
    """Refuse budgets on top of a baseline where there is none.

    Raises:
        UsageError: names the first, and says what to give.
    """
    for budget in budgets:
        if budget.relative:
            raise UsageError(
                f"the budget {budget.rule}={budget} is on top of a baseline, and there is none",
                hint="give --baseline FILE or --against REV, or a budget without +",
            )


def _over_budget(
    audit: ProgramAudit, entry: Entry | None, budgets: Iterable[Budget], baseline: str
) -> Iterator[Violation]:
    for budget in budgets:
        code = budget.rule
        if code not in audit.counts:
            continue
        moves_bytes = code in audit.bytes or (entry is not None and code in entry.bytes)
        in_bytes = budget.unit == "bytes" or (budget.unit == "percent" and moves_bytes)
        count = audit.counts[code]
        if count is not None and in_bytes:
            count = audit.bytes.get(code, 0)
        known = 0
        if entry is not None:
            known = (entry.bytes.get(code, 0) if in_bytes else entry.counts.get(code)) or 0
        limit = budget.limit(known)
        if count is None or count > limit:
            yield Violation(
                audit.label,
                code,
                limit,
                count,
                "budget",
                unit="bytes" if in_bytes else "findings",
                baseline=baseline if budget.relative else "",
                remark=f"{budget} on top of {baseline}" if budget.relative else "",
            )


# -- the baseline


@dataclass(frozen=True)
class _Compared:
    """A program as it is, and as the baseline has it."""

    audit: ProgramAudit
    current: Entry
    known: Entry | None
    comparison: Comparison

    def violations(self, free: set[str]) -> Iterator[Violation]:
        """Findings that the baseline lacks; rules in ``free`` have a budget for them."""
        for code, count in self.audit.counts.items():
            if code in free or self._was_not_looked_for(code):
                continue
            limit = (self.known.counts[code] if self.known is not None else None) or 0
            new, gone = self._differences(code)
            if count is None and self.known is not None:
                yield self._violation(code, limit, None)
            elif new:
                ones = tuple(sorted(new.elements()))
                yield self._violation(code, limit, count, ones, gone.total())

    def _violation(
        self, code: str, limit: int, count: int | None, new: tuple[str, ...] = (), gone: int = 0
    ) -> Violation:
        remark = "it does not have this program"
        if self.known is not None:
            versions = _said(self.known.of_other_versions(self.audit.versions))
            remark = f"made under {versions}" if versions else ""
        return Violation(
            self.audit.label,
            code,
            limit,
            count,
            "baseline",
            new=new,
            gone=gone,
            baseline=self.comparison.baseline.name,
            remark=remark,
        )

    def notices(self) -> Iterator[Notice]:
        """Where the baseline has more than there is, or cannot say."""
        name = self.comparison.baseline.name
        if self.known is None:
            if not any(self.audit.counts.values()):
                yield self._notice("not-in-baseline", f"{name} does not have this program")
            return
        for code, count in self.audit.counts.items():
            if count is None:
                continue
            if self._was_not_looked_for(code):
                why = "could not count it" if code in self.known.counts else "lacks this rule"
                message = f"{code} is {count}, {name} {why}: it is not held"
                yield self._notice("not-in-baseline", message, code)
                continue
            new, gone = self._differences(code)
            if gone and not new:
                message = (
                    f"{code} is {count}, {name} has {self.known.counts[code]}: "
                    f"{gone.total()} gone, the baseline can be tightened"
                )
                yield self._notice("slack", message, code)

    def _notice(self, kind: NoticeKind, message: str, rule: str = "") -> Notice:
        label = self.audit.label
        return Notice(kind, f"{label}: {message}", label, rule, fails=self.comparison.strict)

    def _was_not_looked_for(self, code: str) -> bool:
        return self.known is not None and self.known.counts.get(code) is None

    def _differences(self, code: str) -> tuple[Counter[str], Counter[str]]:
        """Fingerprints that are new, and those that are gone."""
        now = self.current.fingerprints(code)
        before: Counter[str] = Counter() if self.known is None else self.known.fingerprints(code)
        return now - before, before - now


def _said(versions: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(f"{name} {old}, now {new}" for name, (old, new) in versions.items())


def _other_versions(
    audits: Sequence[ProgramAudit], entries: Sequence[Entry | None], baseline: str
) -> Iterator[Notice]:
    differences = [
        _said(entry.of_other_versions(audit.versions)) if entry is not None else ""
        for audit, entry in zip(audits, entries, strict=True)
    ]
    for said in dict.fromkeys(filter(None, differences)):
        count = differences.count(said)
        programs = "1 program" if count == 1 else f"{count} programs"
        yield Notice(
            "versions",
            f"{baseline} was made under other versions ({programs}: {said}): what differs may be "
            "their doing",
        )


def _not_audited(entries: Sequence[Entry | None], comparison: Comparison) -> Iterator[Notice]:
    seen = {id(entry) for entry in entries}
    name = comparison.baseline.name
    for entry in comparison.baseline.entries:
        if id(entry) not in seen:
            message = f"{name} has {entry.label}, which is not audited any more"
            yield Notice("not-audited", message, fails=comparison.strict)


# -- the reference


def _unlike(audit: ProgramAudit, known: Known) -> Iterator[Violation]:
    for code, count in known.counts.items():
        if code in audit.counts and audit.counts[code] != count:
            yield Violation(audit.label, code, count, audit.counts[code], "reference")
