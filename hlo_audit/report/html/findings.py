"""The findings, with all that is known of each; notes and what is suppressed in short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hlo_audit.cost import NO_TRAFFIC, Traffic
from hlo_audit.examination import Examined, WayStep, finding_key
from hlo_audit.hlo import Instruction
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.report.diff_wording import format_seconds
from hlo_audit.report.hlo_text import HloExcerpt, excerpt_around
from hlo_audit.report.html.limits import MOST_FRAMES, MOST_LISTED, MOST_OF_A_SOURCE_LINE, cut
from hlo_audit.report.html.overview import share_of
from hlo_audit.report.listed import Listed, programs_of
from hlo_audit.report.snippets import Snippet, SourceReader
from hlo_audit.report.sources import Place, Repository
from hlo_audit.report.wording import (
    brought_by,
    clip,
    cost_of,
    format_bytes,
    format_cost,
)
from hlo_audit.rule import Finding, Rule

_STAGES = {
    "before_optimizations": "before optimisation",
    "before_layout_assignment": "before layout assignment",
    "final": "final module",
}


@dataclass(frozen=True)
class FindingView:
    """A finding, or several that differ in nothing but their instruction and program.

    Attributes:
        anchor: its id in the page.
        numbers: the places of its programs in the report, from 1.
        share: of the cost of the most costly one, 0 to 100.
        facts: heading, text, and whether it is of the module or the program, as code.
        others: the instructions of some others of its group.
        others_left_out: how many there are more than these.
    """

    anchor: str
    level: str
    rule: str
    message: str
    times: int
    programs: str
    numbers: tuple[int, ...]
    cost: str
    seconds: str
    share: float | None
    place: str
    introduced: str
    facts: tuple[tuple[str, str, bool], ...]
    others: tuple[str, ...]
    others_left_out: int
    frames: tuple[Place, ...]
    snippet: Snippet | None
    stage: str
    excerpt: HloExcerpt | None
    way: tuple[WayStep, ...]
    fixes: tuple[str, ...]


@dataclass(frozen=True)
class Note:
    """A finding that is only listed."""

    rule: str
    message: str
    times: int
    programs: str
    place: str
    reason: str = ""


def shares_of(groups: Sequence[Sequence[Listed]]) -> list[float | None]:
    """The time of each group as a share of that of the most costly one, 0 to 100: the estimate by
    which findings are sorted. ``None`` for what costs nothing."""
    costs = [sum(one.audit.seconds_of(one.finding) for one in group) for group in groups]
    most = max(costs, default=0.0)
    return [share_of(cost, most) if cost else None for cost in costs]


def finding_view(
    anchor: str,
    group: Sequence[Listed],
    one: Examined,
    numbers: Sequence[int],
    repository: Repository,
    reader: SourceReader,
    share: float | None,
) -> FindingView:
    """All that the page shows of a group of findings that are alike.

    Args:
        anchor: its id in the page.
        one: the program of the first of them.
        numbers: the places of their programs in the report, from 1.
        share: see :func:`shares_of`.
    """
    entry, finding = group[0], group[0].finding
    audit = entry.audit
    rule = next(rule for rule in audit.rules if rule.code == finding.rule)
    found = _instruction(one, finding, rule)
    stage, instruction = found if found else ("", None)
    findings = [other.finding for other in group]
    others = findings[1:MOST_LISTED]
    places = repository.places(finding)
    return FindingView(
        anchor=anchor,
        level=entry.level,
        rule=finding.rule,
        message=cut(finding.message),
        times=len(group),
        programs=programs_of(group),
        numbers=tuple(numbers),
        cost=format_cost(findings),
        seconds=_time_said(findings, audit),
        share=share,
        place=cut(str(places[0])) if places else "",
        introduced=cut(brought_by(finding.introduced_by)) if finding.introduced_by else "",
        facts=tuple(
            (cut(name), cut(text), code) for name, text, code in _facts(finding, audit) if text
        ),
        others=tuple(f"%{other.instruction}" for other in others),
        others_left_out=len(group) - 1 - len(others),
        frames=tuple(
            replace(place, path=cut(place.path), function=cut(place.function))
            for place in places[:MOST_FRAMES]
        ),
        snippet=_clipped(reader.snippet(repository.frames(finding))),
        stage=_STAGES[stage] if stage else "",
        excerpt=excerpt_around(instruction) if instruction else None,
        way=one.ways.get(finding_key(finding), ()),
        fixes=audit.fixes_of(finding),
    )


def _clipped(snippet: Snippet | None) -> Snippet | None:
    if snippet is None:
        return None
    lines = (clip(line.expandtabs(4), MOST_OF_A_SOURCE_LINE) for line in snippet.lines)
    return replace(snippet, lines=tuple(lines))


def _instruction(one: Examined, finding: Finding, rule: Rule) -> tuple[str, Instruction] | None:
    """The instruction of a finding, and the stage of the module that it stands in."""
    for stage in rule.reads:
        module = one.modules.get(stage)
        computation = module.computations.get(finding.computation) if module else None
        if computation is not None and finding.instruction in computation:
            instruction = computation[finding.instruction]
            if instruction.opcode == finding.opcode:
                return stage, instruction
    return None


def _traffic_of(findings: Sequence[Finding]) -> Traffic:
    total = NO_TRAFFIC
    for finding in findings:
        total += (finding.traffic or NO_TRAFFIC).times(finding.executions)
    return total


def _facts(finding: Finding, audit: ProgramAudit) -> Iterator[tuple[str, str, bool]]:
    where = f"%{finding.instruction} ({finding.opcode}) in %{finding.computation}"
    yield "instruction", where, True
    yield "shape", finding.shape, True
    if finding.bytes is not None:
        yield "size", f"{format_bytes(finding.bytes)} ({finding.bytes:,} bytes) once", False
    if finding.executions is None:
        yield "runs in a step", "not known: a loop has no constant trip count", False
    elif finding.executions != 1:
        moved = finding.executed_bytes
        size = f", {format_bytes(moved)} a step" if moved else ""
        yield "runs in a step", f"{finding.executions:,}{size}", False
    for name, text in _traffic_facts(finding):
        yield name, text, False
    if finding.estimated_cycles is not None:
        cycles = cost_of(finding)[0]
        yield "estimated cycles", f"{cycles:,} a step{_of_step(cycles, audit)}", False
    for name, value in finding.details.items():
        if isinstance(value, int) and name.endswith("bytes"):
            yield name.replace("_", " "), format_bytes(value), False
        elif value is not None and not isinstance(value, list | dict):
            yield name.replace("_", " "), str(value), True
    yield "op_name", finding.op_name, True
    yield "fingerprint", finding.fingerprint, True


def _time_said(findings: Sequence[Finding], audit: ProgramAudit) -> str:
    """The time of one, and of all that are alike; ``""`` where it is not known."""
    one, all_ = (_traffic_of(some).seconds(audit.hardware) for some in (findings[:1], findings))
    if not one or not all_:
        return ""
    each = f"about {format_seconds(one)}"
    if len(findings) == 1:
        return each
    return f"{each} each, about {format_seconds(all_)} for all {len(findings):,}"


def _traffic_facts(finding: Finding) -> Iterator[tuple[str, str]]:
    if finding.traffic is None:
        return
    traffic = finding.traffic.times(finding.executions)
    if traffic.hbm_bytes:
        yield "HBM traffic a step", format_bytes(traffic.hbm_bytes)
    if traffic.wire_bytes:
        yield "wire traffic a step", format_bytes(traffic.wire_bytes)
    padding = traffic.moved_bytes - traffic.asked_bytes
    if padding > 0:
        yield "padding", f"{format_bytes(padding)} of {format_bytes(traffic.moved_bytes)}"


def _of_step(cycles: int, audit: ProgramAudit) -> str:
    whole = audit.cost.estimated_cycles if audit.cost else 0
    return f", {100 * cycles / whole:.1f}% of the step" if whole else ""


def note_of(group: Sequence[Listed], repository: Repository, reason: str = "") -> Note:
    finding = group[0].finding
    places = repository.places(finding)
    return Note(
        f"{finding.rule} {finding.slug}",
        cut(finding.message),
        len(group),
        programs_of(group),
        cut(str(places[0])) if places else "",
        reason,
    )


def reason_of(entry: Listed) -> str:
    one = entry.suppressed
    return cut(f"{one.reason} ({one.where})") if one else ""
