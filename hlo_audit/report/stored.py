"""Reports that ``--format json`` wrote, read back: whole, or for how long their programs took.

A report comes from another machine, and may be damaged or made up. All of it is checked for its
types; and what is read is written again, and must be the same: so nothing in it contradicts itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from hlo_audit._version import __version__
from hlo_audit.cost import Collective, Cost, Traffic
from hlo_audit.dump import AuditStage
from hlo_audit.errors import UsageError, error_of_kind
from hlo_audit.hlo import SourceLocation
from hlo_audit.hlo.collectives import CollectiveKind
from hlo_audit.own_json import MOST_REPORT_BYTES, Value, kind_of, parse
from hlo_audit.program_audit import ProgramAudit, Suppressed, Timing
from hlo_audit.report import ShardRecord
from hlo_audit.report.json import SCHEMA_VERSION, program_to_json
from hlo_audit.rule import Finding, Rule
from hlo_audit.shard import MOST_SHARDS, Part, RecordedTime, Shard, name_below, way_of
from hlo_audit.suppressions import Use, UseState
from hlo_audit.whole_file import read_text_within, read_up_to, text_within

_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredReport:
    """What a report holds; its gate is left out, as it is judged anew.

    Attributes:
        path: the file.
        audits: without their variants, which depend on the others that they stand among.
        environment: see :class:`hlo_audit.report.Report`.
        shard: see :class:`hlo_audit.report.Report`.
    """

    path: Path
    audits: tuple[ProgramAudit, ...]
    environment: Mapping[str, str | None]
    shard: ShardRecord | None


def read_stored(path: Path, rules: Sequence[Rule]) -> StoredReport:
    """Read a report of this version of hlo-audit; the path ``-`` is standard input.

    Args:
        rules: all that there are.

    Raises:
        UsageError: where it is not there, no such report, damaged, or of another version.
    """
    return _read(path, lambda top: _stored(path, top, rules))


def read_times(path: Path, top: Path) -> list[RecordedTime]:
    """How long the programs of a report took, as far as it says so; of any version of hlo-audit.

    Args:
        top: see :func:`hlo_audit.shard.take_part`.

    Raises:
        UsageError: where it is not there, no report, or one whose timings were taken out.
    """

    def times(report: Value) -> list[RecordedTime]:
        if "volatile" not in report.mapping():
            raise UsageError(
                f"{str(path)[:200]} holds no timings (key volatile)",
                hint="give a report as --format json wrote it",
            )
        return list(_times(report, top))

    return _read(path, times)


def _read(path: Path, read: Callable[[Value], _T]) -> _T:
    name = _name_of(path)
    try:
        text = _text_of(path)
        if not text.strip():
            raise UsageError(f"{name} is empty", hint="did the command that wrote it fail?")
        top = parse(text)
        kind = kind_of(top.value)
        if kind not in (None, "a report"):
            hint = "give it by --baseline" if kind == "a baseline" else "--format json writes one"
            raise UsageError(f"{name} is {kind}, not a report", hint=hint)
        top.refuse_other_version(SCHEMA_VERSION)
        return read(top)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"{name} is no JSON: {error.msg} ({where})", hint="is it whole?") from None
    except FileNotFoundError:
        raise UsageError(f"there is no report {name}") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except ValueError as error:
        reason = str(error)[:200]
    raise UsageError(f"{name} is no report of hlo-audit: {reason}", hint="--format json writes one")


def _name_of(path: Path) -> str:
    return "standard input" if str(path) == "-" else str(path)[:200]


def _text_of(path: Path) -> str:
    if str(path) != "-":
        return read_text_within(path, MOST_REPORT_BYTES)
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    return text_within(read_up_to(sys.stdin.buffer.read, MOST_REPORT_BYTES + 1), MOST_REPORT_BYTES)


# -- a whole report


def _stored(path: Path, top: Value, rules: Sequence[Rule]) -> StoredReport:
    version = top["tool"]["version"].text()
    if version != __version__:
        raise UsageError(
            f"{_name_of(path)} was written by hlo-audit {version[:40]}, and this is {__version__}",
            hint="take one version for all",
        )
    programs, timings = top["programs"].items(), top["volatile"]["timings"].items()
    if len(programs) != len(timings):
        raise ValueError(f"it has {len(programs)} programs and {len(timings)} timings")
    shard = top.mapping().get("shard")
    return StoredReport(
        path,
        tuple(
            replace(_program(program, rules), timing=_timing(timing))
            for program, timing in zip(programs, timings, strict=True)
        ),
        top["environment"].texts_or_none(),
        None if shard is None else _shard(shard, len(programs)),
    )


def _shard(value: Value, programs: int) -> ShardRecord:
    shard = Shard(value["index"].integer(least=1), value["count"].integer(least=1))
    if not shard.index <= shard.count <= MOST_SHARDS:
        value.refuse(f"is {shard}")
    size = value["size"].count()
    positions = tuple(one.count() for one in value["positions"].items())
    if len(positions) != programs:
        value.refuse(f"has {len(positions)} positions for {programs} programs")
    if any(position >= size for position in positions) or list(positions) != sorted(positions):
        value.refuse(f"has positions that {size} programs do not have")
    part = Part(
        shard,
        matrix=value["matrix"].digest(),
        plan=value["plan"].digest(),
        size=size,
        positions=tuple(dict.fromkeys(positions)),
    )
    uses = tuple(
        Use(
            by=use["by"].one_of(("config", "source")),
            where=use["where"].text(),
            state=use["state"].one_of(get_args(UseState)),
            message=use["message"].text(),
            number=use["number"].count(),
        )
        for use in value["suppressions"].items()
    )
    return ShardRecord(part, positions, value["whole"].flag(), uses)


def _timing(value: Value) -> Timing | None:
    if value.value is None:
        return None
    compiled = value["compile_seconds"]
    return Timing(
        value["lower_seconds"].seconds(),
        None if compiled.value is None else compiled.seconds(),
        value["cached"].flag(),
    )


def _program(value: Value, rules: Sequence[Rule]) -> ProgramAudit:
    audit = ProgramAudit(
        value["program"].text(),
        mode=value["mode"].text_or_none(),
        layout=value["layout"].text_or_none(),
        platform=value["platform"].text_or_none(),
        topology=value["topology"].text_or_none(),
        mesh=value["mesh"].integers(),
        settings=value["settings"].settings(),
        xla_flags=value["xla_flags"].texts(),
        versions=value["versions"].texts_or_none(),
    )
    error = value.mapping().get("error")
    if error is not None:
        found = error_of_kind(
            error["kind"].text(),
            error["message"].text(),
            hint=error["hint"].text_or_none(),
            log=tuple(line.text() for line in error["log"].items()),
        )
        audit = replace(audit, error=found)
    else:
        audit = _with_findings(audit, value, rules)
    written = program_to_json(audit)
    for name, one in value.mapping().items():
        if name not in written or written[name] != one.value:
            one.refuse("contradicts the rest of it, or was changed")
    return audit


def _with_findings(audit: ProgramAudit, value: Value, rules: Sequence[Rule]) -> ProgramAudit:
    codes = value["counts"].mapping()
    applied = tuple(rule for rule in rules if rule.code in codes)
    for code, count in codes.items():
        if all(rule.code != code for rule in applied):
            count.refuse("is of a rule that this hlo-audit does not have")
    findings: list[Finding] = []
    suppressed: list[Suppressed] = []
    for one in value["findings"].items():
        finding = _finding(one, applied)
        reason = one["suppressed"]
        if reason.value is None:
            findings.append(finding)
        else:
            by = reason["by"].one_of(("config", "source"))
            said = (reason["reason"].text(), reason["where"].text())
            suppressed.append(Suppressed(finding, by, *said))
    return replace(
        audit,
        module=value["module"].text_or_none(),
        while_loops=value["while_loops"].count_or_none(),
        rules=applied,
        findings=tuple(findings),
        suppressed=tuple(suppressed),
        skipped=value["skipped"].texts(),
        cost=_cost(value["cost"]),
        devices=value["devices"].count_or_none(),
        files=_files(value["files"]),
        collectives=_collectives(value["traffic"]),
    )


def _files(value: Value) -> dict[AuditStage, Path]:
    names = value.texts()
    if unknown := names.keys() - set(get_args(AuditStage)):
        value.refuse(f"has no snapshot {min(unknown)[:40]!r}")
    return {stage: Path(names[stage]) for stage in get_args(AuditStage) if stage in names}


def _cost(value: Value) -> Cost | None:
    if value.value is None:
        return None
    return Cost(value["estimated_cycles"].count(), value["unknown_loops"].count())


def _collectives(value: Value) -> tuple[Collective, ...] | None:
    """One for all of a kind: a report does not tell them apart."""
    if value.value is None:
        return None
    found = []
    for name, one in value.mapping().items():
        kind: CollectiveKind | None = next(
            (known for known in get_args(CollectiveKind) if known == name), None
        )
        if kind is None:
            value.refuse(f"has no kind of collective: {name[:40]!r}")
        total = Traffic(
            0, *(one[key].count() for key in ("wire_bytes", "moved_bytes", "asked_bytes"))
        )
        found.append(Collective(kind, "", "", 0, 1, total, count=one["count"].count()))
    return tuple(found)


def _finding(value: Value, rules: Sequence[Rule]) -> Finding:
    code, source = value["rule"], value["source"]
    rule = next((rule for rule in rules if rule.code == code.text()), None)
    if rule is None:
        code.refuse(f"is {code.text()[:40]!r}, a rule that is not counted")
    details: dict[str, Any] = {k: one.plain() for k, one in value["details"].mapping().items()}
    return Finding(
        rule=rule.code,
        slug=value["slug"].one_of((rule.slug,)),
        severity=value["severity"].one_of(("warning", "note")),
        message=value["message"].text(),
        instruction=value["instruction"].text(),
        computation=value["computation"].text(),
        opcode=value["opcode"].text(),
        shape=value["shape"].text(),
        bytes=value["bytes"].count_or_none(),
        executions=value["executions"].count_or_none(),
        estimated_cycles=value["estimated_cycles"].count_or_none(),
        op_name=value["op_name"].text(),
        source=None if source.value is None else _line(source),
        stack=tuple(map(_line, value["stack"].items())),
        details=details,
        fixes=tuple(one.text() for one in value["fixes"].items()),
        traffic=_traffic(value["cost"]),
        introduced_by=value["introduced_by"].text_or_none(),
    )


def _line(value: Value) -> SourceLocation:
    return SourceLocation(value["file"].text(), value["line"].count(), value["function"].text())


def _traffic(value: Value) -> Traffic | None:
    if value.value is None:
        return None
    names = ("hbm_bytes", "wire_bytes", "moved_bytes", "asked_bytes")
    return Traffic(*(value[name].count() for name in names))


# -- how long programs took


def _times(report: Value, top: Path) -> Iterator[RecordedTime]:
    timings, programs = report["volatile"]["timings"].items(), report["programs"].items()
    if len(programs) != len(timings):
        raise ValueError(f"it has {len(programs)} programs and {len(timings)} timings")
    for program, one in zip(programs, timings, strict=True):
        timing = _timing(one)
        if timing is None or timing.compile_seconds is None:
            continue
        name = program["program"].text()
        described: dict[str, Any] = {
            **{
                key: program[key].text_or_none()
                for key in ("mode", "layout", "platform", "topology")
            },
            "program": name_below(top, name) if ".py:" in name else name,
            "settings": program["settings"].settings(),
            "xla_flags": program["xla_flags"].texts(),
        }
        mesh = program["mesh"].integers()
        seconds = timing.lower_seconds + timing.compile_seconds
        yield RecordedTime(way_of(described), mesh, round(seconds * 1000))
