"""Compile or read programs, and keep of each all that a page about it shows.

An audit holds no module, a timeline holds all of them, and the dump of a compiled program is gone
with its folder. Here each program is looked at while its dump is there: what the rules find and
which pass brought it, the counts of every snapshot, the ways of the most costly findings, and the
three modules that findings stand in. The auto and the explicit mode of a program are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

from hlo_audit.compiler import Outcome
from hlo_audit.compiling import Compiling, handled
from hlo_audit.diff import Diff, Side, compare, side_names
from hlo_audit.dump import AuditStage, ModuleDump, read_dump, read_module, stage_of_file
from hlo_audit.errors import HloAuditError, RefusedReshapeError
from hlo_audit.follow import Kind, identity_of_finding, locate, walk
from hlo_audit.history import traced
from hlo_audit.hlo import Module
from hlo_audit.hlo.collector import no_collection
from hlo_audit.passes import Passes
from hlo_audit.program import Lowering, Recorded, Subject
from hlo_audit.program_audit import (
    ProgramAudit,
    RuleOptions,
    audit_lowered,
    audit_recorded,
    audit_refused,
    audit_single,
    described_by,
    step_of,
)
from hlo_audit.rule import Finding, Rule
from hlo_audit.timeline import DEFAULT_OPCODES, Series, make_timeline

MOST_WAYS = 12
"""The ways of how many findings of a program are told; it takes longer than finding them."""

_SINGLE_FILE = "a single file shows no passes"


@dataclass(frozen=True)
class PassLine:
    """A snapshot of the timeline.

    Attributes:
        number: of the pass in the dump; ``None`` for the stages at either end.
        name: of the pass that made it what it is.
        changes_module: whether it differs from the one before.
    """

    number: int | None
    name: str
    changes_module: bool


@dataclass(frozen=True)
class WayStep:
    """What happens to a finding's instruction at one pass: see :class:`hlo_audit.follow.Step`."""

    number: int | None
    pass_name: str
    kind: Kind
    text: str
    times: int


FindingKey = tuple[str, str, str, str]


def finding_key(finding: Finding) -> FindingKey:
    """Names a finding within its program, also where it has been copied with more known of it."""
    return finding.rule, finding.computation, finding.instruction, finding.message


@dataclass(frozen=True)
class Examined:
    """One program.

    Attributes:
        audit: what was found, each finding with the pass that brought it; or the error.
        modules: those that findings stand in, by stage, as far as they are here.
        dump: ``None`` for a single file and where there is an error.
        passes: every snapshot; empty where there are none.
        series: what was counted in them.
        why_no_passes: why there are none; else ``""``.
        damage: the error of the snapshot for which there are none: what the rules read was whole.
        ways: the ways of the :data:`MOST_WAYS` most costly warnings through the passes.
    """

    audit: ProgramAudit
    modules: Mapping[AuditStage, Module] = field(default_factory=dict)
    dump: ModuleDump | None = None
    passes: tuple[PassLine, ...] = ()
    series: tuple[Series, ...] = ()
    why_no_passes: str = ""
    damage: HloAuditError | None = None
    ways: Mapping[FindingKey, tuple[WayStep, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """Two programs side by side.

    Attributes:
        a, b: their places among the examined ones.
        diff: ``None`` where a snapshot of one cannot be read.
        error: that of reading it.
    """

    a: int
    b: int
    diff: Diff | None
    error: HloAuditError | None = None


def examine_subjects(
    subjects: Sequence[Subject],
    rules: Sequence[Rule],
    options: RuleOptions | None = None,
    how: Compiling | None = None,
    *,
    on_read: Callable[[Recorded], None] | None = None,
) -> tuple[list[Examined], list[Pair]]:
    """Examine each subject, and compare those that belong together.

    A dump folder gives one for each of its modules; otherwise the order is that of ``subjects``.
    What cannot be compiled or read is one with an error. Compared are the auto and the explicit
    mode of what is otherwise the same program; of just two programs, these, whatever they are.

    Args:
        rules, options, how: as for :func:`hlo_audit.run.audit_each`.
        on_read: called after each dump or file, whether it could be read or not.
    """
    options, how = options or {}, how or Compiling()

    def compiled(lowering: Lowering, outcome: Outcome) -> list[Examined]:
        return [_lowered(lowering, outcome, rules, options)]

    def recorded(subject: Recorded) -> list[Examined]:
        try:
            found = _recorded(subject.path, rules, options)
        except HloAuditError as error:
            found = [Examined(ProgramAudit(subject.label, error=error))]
        if on_read is not None:
            on_read(subject)
        return found

    with handled(subjects, how, compiled=compiled, recorded=recorded) as groups:
        examined = [one for group in groups for one in group]
        return examined, [_compared(examined, a, b) for a, b in _pairs(examined)]


def _lowered(
    lowering: Lowering, outcome: Outcome, rules: Sequence[Rule], options: RuleOptions
) -> Examined:
    if isinstance(outcome, RefusedReshapeError):
        refused = audit_refused(lowering, outcome, rules)
        return Examined(refused, why_no_passes="the program was refused while it was traced")
    try:
        if isinstance(outcome, HloAuditError):
            raise outcome
        audit = audit_lowered(lowering, outcome.folder, rules, options)
        return _examined(audit, step_of(read_dump(outcome.folder)), options)
    except HloAuditError as error:
        return Examined(replace(described_by(lowering), error=error))


def _recorded(path: Path, rules: Sequence[Rule], options: RuleOptions) -> list[Examined]:
    if path.is_dir():
        audits = audit_recorded(path, rules, options)
        modules = read_dump(path).modules
        return [
            _examined(audit, module, options) for audit, module in zip(audits, modules, strict=True)
        ]
    module = read_module(path)  # once: it may be standard input
    stage = stage_of_file(path, module)
    audit = audit_single(path, module, rules, options)
    return [Examined(audit, {stage: module} if stage else {}, why_no_passes=_SINGLE_FILE)]


@no_collection()
def _examined(audit: ProgramAudit, dump: ModuleDump, options: RuleOptions) -> Examined:
    if audit.error is not None:
        return Examined(audit)
    try:
        passes = Passes(dump)
    except HloAuditError as error:
        # What the rules read was fine: this costs the timeline alone.
        modules = {stage: one.read() for stage, one in dump.audited.items()}
        damage = error if dump.passes else None
        return Examined(audit, modules, dump, why_no_passes=error.message, damage=damage)
    timeline = make_timeline(passes, audit.rules, DEFAULT_OPCODES, options)
    audit = traced(audit, passes, options)
    lines = tuple(
        PassLine(snapshot.number, passes.pass_name(position), passes.changes_module(position))
        for position, snapshot in enumerate(passes.snapshots)
    )
    ways = dict(_ways(audit, passes, lines))
    places = {stage: passes.stage(stage) for stage in dump.audited}
    modules = {stage: passes.modules[at] for stage, at in places.items() if at is not None}
    return Examined(audit, modules, dump, lines, timeline.series, ways=ways)


def _ways(
    audit: ProgramAudit, passes: Passes, lines: Sequence[PassLine]
) -> Iterator[tuple[FindingKey, tuple[WayStep, ...]]]:
    rules = {rule.code: rule for rule in audit.rules}
    warnings = [finding for finding in audit.findings if finding.severity == "warning"]
    for finding in sorted(warnings, key=audit.seconds_of, reverse=True)[:MOST_WAYS]:
        place = locate(passes, rules[finding.rule], finding)
        if place is None:
            continue
        way = walk(passes, *place, identity_of_finding(finding))
        yield (
            finding_key(finding),
            tuple(
                WayStep(
                    lines[step.position].number,
                    lines[step.position].name,
                    step.kind,
                    step.text,
                    step.times,
                )
                for step in way.steps
            ),
        )


# -- what belongs together


def _pairs(examined: Sequence[Examined]) -> list[tuple[int, int]]:
    whole = [index for index, one in enumerate(examined) if _final(one) is not None]
    of_modes = [
        (a, b) if examined[a].audit.mode == "auto" else (b, a)
        for a, b in combinations(whole, 2)
        if {examined[a].audit.mode, examined[b].audit.mode} == {"auto", "explicit"}
        and _made_alike(examined[a].audit, examined[b].audit)
    ]
    if of_modes or len(whole) != 2 or len(examined) != 2:
        return of_modes
    return [(whole[0], whole[1])]


def _made_alike(a: ProgramAudit, b: ProgramAudit) -> bool:
    """Whether two audits are of the same program, compiled in the same way but for the mode."""
    return all(
        getattr(a, name) == getattr(b, name)
        for name in (
            *("program", "layout", "platform", "topology", "mesh", "settings", "xla_flags"),
            *("versions", "module"),
        )
    )


def _final(one: Examined) -> Module | None:
    """The final module; of a single file the one that it holds."""
    if one.audit.error is not None or not one.modules:
        return None
    return one.modules.get("final") or list(one.modules.values())[-1]


def _compared(examined: Sequence[Examined], a: int, b: int) -> Pair:
    one, other = examined[a], examined[b]
    names = side_names(one.audit, other.audit)
    modules = _final(one), _final(other)
    assert modules[0] is not None
    assert modules[1] is not None
    try:
        diff = compare(
            Side(names[0], one.audit, modules[0], one.dump),
            Side(names[1], other.audit, modules[1], other.dump),
        )
    except HloAuditError as error:
        return Pair(a, b, None, error)
    return Pair(a, b, diff)
