"""The layouts in which programs take and return their arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hlo_audit.diff import EntryRow, results_of
from hlo_audit.examination import Examined, Pair
from hlo_audit.hlo import Module
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.report.diff_wording import stored
from hlo_audit.report.html.limits import MOST_PAIRS, MOST_PROGRAMS, MOST_ROWS, cut


@dataclass(frozen=True)
class EntryLine:
    """A parameter or result; ``b`` is ``None`` where there is one side alone."""

    kind: str
    name: str
    a: str
    b: str | None
    differs: bool


@dataclass(frozen=True)
class Entry:
    """The entry layouts of a program, or of two side by side."""

    title: str
    sides: tuple[str, ...]
    differing: tuple[EntryLine, ...]
    alike: tuple[EntryLine, ...]
    said: str
    left_out: int


def entries_of(
    audits: Sequence[ProgramAudit], examined: Sequence[Examined], pairs: Sequence[Pair]
) -> Iterator[Entry]:
    """Of each compared pair side by side, then of the programs that stand in none."""
    done: set[int] = set()
    for pair in pairs[:MOST_PAIRS]:
        if pair.diff is None or not pair.diff.entry:
            continue
        done.update((pair.a, pair.b))
        a, b = pair.diff.a.name, pair.diff.b.name
        audit = audits[pair.a]
        same = audit.program == audits[pair.b].program
        what = " ".join(part for part in (audit.program, audit.layout) if part) if same else ""
        lines = [_entry_line(row) for row in pair.diff.entry]
        yield _entry(f"{what or 'entry'}: {a} against {b}", (a, b), lines)
    for index, (audit, one) in enumerate(zip(audits[:MOST_PROGRAMS], examined, strict=False)):
        module = one.modules.get("final")
        if index not in done and audit.error is None and module is not None:
            yield _entry(audit.label, ("layout",), list(_entry_of(module)))


def _entry(title: str, sides: tuple[str, ...], lines: Sequence[EntryLine]) -> Entry:
    differing = [line for line in lines if line.differs]
    rest = [line for line in lines if not line.differs]
    if len(sides) == 1:
        said = f"{len(lines):,} parameters and results"
    elif differing:
        said = f"{len(differing):,} of {len(lines):,} parameters and results differ"
    else:
        said = f"{len(lines):,} parameters and results, in the same layouts"
    left_out = sum(max(0, len(some) - MOST_ROWS) for some in (differing, rest))
    return Entry(
        title, sides, tuple(differing[:MOST_ROWS]), tuple(rest[:MOST_ROWS]), said, left_out
    )


def _entry_line(row: EntryRow) -> EntryLine:
    a, b = stored(row.a), stored(row.b)
    return EntryLine(row.kind, cut(row.name), a or "not there", b or "not there", a != b)


def _entry_of(module: Module) -> Iterator[EntryLine]:
    for parameter in module.entry.parameters:
        yield EntryLine("parameter", cut(parameter.op_name), str(parameter.shape), None, False)
    for name, shape in results_of(module):
        yield EntryLine("result", cut(name), str(shape), None, False)
