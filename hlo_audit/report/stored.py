"""Reports that ``--format json`` wrote, read back: whole, or for how long their programs took.

A report comes from another machine, and may be damaged or made up. All of it is checked for its
types; and what is read is written again, and must be the same: so nothing in it contradicts itself.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

from hlo_audit._version import __version__
from hlo_audit.cost import Collective, Cost, Traffic
from hlo_audit.dump import AuditStage
from hlo_audit.errors import UsageError, error_of_kind
from hlo_audit.hlo import SourceLocation
from hlo_audit.hlo.collectives import CollectiveKind
from hlo_audit.own_json import kind_of
from hlo_audit.program_audit import ProgramAudit, Suppressed, Timing
from hlo_audit.report import ShardRecord
from hlo_audit.report.json import SCHEMA_VERSION, program_to_json
from hlo_audit.rule import Finding, Rule
from hlo_audit.shard import MOST_SHARDS, Part, RecordedTime, Shard, name_below, way_of
from hlo_audit.suppressions import Use, UseState

MOST_BYTES = 1 << 30
"""Larger files are no reports."""

_PART_BYTES = 1 << 20
_MOST_DEPTH = 64
_MOST_SECONDS = 1e9

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

    def times(report: _Value) -> list[RecordedTime]:
        if "volatile" not in report.mapping():
            raise UsageError(
                f"{str(path)[:200]} holds no timings (key volatile)",
                hint="give a report as --format json wrote it",
            )
        return list(_times(report, top))

    return _read(path, times)


def _read(path: Path, read: Callable[[_Value], _T]) -> _T:
    name = _name_of(path)
    try:
        text = _text_of(path)
        if not text.strip():
            raise UsageError(f"{name} is empty", hint="did the command that wrote it fail?")
        data = json.loads(text, parse_constant=_refuse_constant)
        kind = kind_of(data)
        if kind not in (None, "a report"):
            hint = "give it by --baseline" if kind == "a baseline" else "--format json writes one"
            raise UsageError(f"{name} is {kind}, not a report", hint=hint)
        top = _Value(data, "")
        version = top.mapping().get("schema_version")
        if version is None or version.value != SCHEMA_VERSION or isinstance(version.value, bool):
            found = "missing" if version is None else repr(version.value)[:40]
            raise ValueError(f"schema_version is {found}, not {SCHEMA_VERSION}")
        return read(top)
    except RecursionError:
        reason = "it is nested too deeply"
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"{name} is no JSON: {error.msg} ({where})", hint="is it whole?") from None
    except UnicodeDecodeError:
        reason = "it is no text"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except ValueError as error:
        reason = str(error)[:200]
    raise UsageError(f"{name} is no report of hlo-audit: {reason}", hint="--format json writes one")


def _name_of(path: Path) -> str:
    return "standard input" if str(path) == "-" else str(path)[:200]


def _text_of(path: Path) -> str:
    if str(path) == "-":
        return _standard_input()
    if not path.exists():
        raise UsageError(f"there is no report {str(path)[:200]}")
    if not path.is_file():
        raise ValueError("it is no file")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 30} GiB")
    return path.read_text(encoding="utf-8")


def _standard_input() -> str:
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    parts: list[bytes] = []
    left_bytes = MOST_BYTES
    while part := sys.stdin.buffer.read(_PART_BYTES):
        left_bytes -= len(part)
        if left_bytes < 0:
            raise ValueError(f"it is larger than {MOST_BYTES >> 30} GiB")
        parts.append(part)
    return b"".join(parts).decode("utf-8")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


class _Value:
    """A value of the report, and where it stands; every access checks its type.

    Raises:
        ValueError: says where the report has what cannot be.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self.where = where

    def refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.where or 'it'} {problem}")

    def _typed(self, *kinds: type) -> Any:
        if type(self.value) not in kinds:  # by exact type: a bool is an int to isinstance
            self.refuse(f"is {repr(self.value)[:40]}")
        return self.value

    def mapping(self) -> dict[str, _Value]:
        prefix = f"{self.where}." if self.where else ""
        return {k: _Value(v, f"{prefix}{k[:80]}") for k, v in self._typed(dict).items()}

    def __getitem__(self, name: str) -> _Value:
        found = self._typed(dict)
        if name not in found:
            self.refuse(f"has no {name!r}")
        return _Value(found[name], f"{self.where}.{name}" if self.where else name)

    def items(self) -> list[_Value]:
        return [_Value(item, f"{self.where}[{n}]") for n, item in enumerate(self._typed(list))]

    def text(self) -> str:
        return str(self._typed(str))

    def text_or_none(self) -> str | None:
        return None if self.value is None else self.text()

    def flag(self) -> bool:
        return bool(self._typed(bool))

    def integer(self, least: int = -(1 << 63)) -> int:
        number: int = self._typed(int)
        if not least <= number < 1 << 63:
            self.refuse(f"is {str(number)[:40]}")
        return number

    def count(self) -> int:
        return self.integer(least=0)

    def count_or_none(self) -> int | None:
        return None if self.value is None else self.count()

    def seconds(self) -> float:
        number = float(self._typed(int, float))
        if not 0 <= number <= _MOST_SECONDS:
            self.refuse(f"is {repr(self.value)[:40]}")
        return number

    def one_of(self, choices: Sequence[str]) -> Any:
        text = self.text()
        if text not in choices:
            self.refuse(f"is {text[:40]!r}, not one of {', '.join(choices)}")
        return text

    def digest(self) -> str:
        text = self.text()
        if not re.fullmatch(r"[0-9a-f]{64}", text):
            self.refuse("is no digest")
        return text

    def plain(self, depth: int = 0) -> Any:
        """Any value, as far as it is printable: no number that is none, no endless nesting."""
        if depth > _MOST_DEPTH:
            self.refuse("is nested too deeply")
        if isinstance(self.value, dict):
            return {name: one.plain(depth + 1) for name, one in self.mapping().items()}
        if isinstance(self.value, list):
            return [one.plain(depth + 1) for one in self.items()]
        if isinstance(self.value, float) and not math.isfinite(self.value):
            self.refuse("is no number")
        if type(self.value) is int:
            return self.integer()
        return self.value


def _texts(value: _Value) -> dict[str, str]:
    return {name: one.text() for name, one in value.mapping().items()}


def _settings(value: _Value) -> dict[str, int | float | bool | str]:
    settings = {}
    for name, one in value.mapping().items():
        if type(one.value) not in (int, float, bool, str):
            one.refuse(f"is {repr(one.value)[:40]}")
        settings[name] = one.plain()
    return settings


# -- a whole report


def _stored(path: Path, top: _Value, rules: Sequence[Rule]) -> StoredReport:
    version = top["tool"]["version"].text()
    if version != __version__:
        raise UsageError(
            f"{_name_of(path)} was written by hlo-audit {version[:40]}, and this is {__version__}",
            hint="take one version for all",
        )
    environment = top["environment"].mapping()
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
        {name: one.text_or_none() for name, one in environment.items()},
        None if shard is None else _shard(shard, len(programs)),
    )


def _shard(value: _Value, programs: int) -> ShardRecord:
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


def _timing(value: _Value) -> Timing | None:
    if value.value is None:
        return None
    compiled = value["compile_seconds"]
    return Timing(
        value["lower_seconds"].seconds(),
        None if compiled.value is None else compiled.seconds(),
        value["cached"].flag(),
    )


def _program(value: _Value, rules: Sequence[Rule]) -> ProgramAudit:
    audit = ProgramAudit(
        value["program"].text(),
        mode=value["mode"].text_or_none(),
        layout=value["layout"].text_or_none(),
        platform=value["platform"].text_or_none(),
        topology=value["topology"].text_or_none(),
        mesh={axis: size.integer() for axis, size in value["mesh"].mapping().items()},
        settings=_settings(value["settings"]),
        xla_flags=_texts(value["xla_flags"]),
        versions={k: one.text_or_none() for k, one in value["versions"].mapping().items()},
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


def _with_findings(audit: ProgramAudit, value: _Value, rules: Sequence[Rule]) -> ProgramAudit:
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
        skipped=_texts(value["skipped"]),
        cost=_cost(value["cost"]),
        devices=value["devices"].count_or_none(),
        files=_files(value["files"]),
        collectives=_collectives(value["traffic"]),
    )


def _files(value: _Value) -> dict[AuditStage, Path]:
    names = _texts(value)
    if unknown := names.keys() - set(get_args(AuditStage)):
        value.refuse(f"has no snapshot {min(unknown)[:40]!r}")
    return {stage: Path(names[stage]) for stage in get_args(AuditStage) if stage in names}


def _cost(value: _Value) -> Cost | None:
    if value.value is None:
        return None
    return Cost(value["estimated_cycles"].count(), value["unknown_loops"].count())


def _collectives(value: _Value) -> tuple[Collective, ...] | None:
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


def _finding(value: _Value, rules: Sequence[Rule]) -> Finding:
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


def _line(value: _Value) -> SourceLocation:
    return SourceLocation(value["file"].text(), value["line"].count(), value["function"].text())


def _traffic(value: _Value) -> Traffic | None:
    if value.value is None:
        return None
    names = ("hbm_bytes", "wire_bytes", "moved_bytes", "asked_bytes")
    return Traffic(*(value[name].count() for name in names))


# -- how long programs took


def _times(report: _Value, top: Path) -> Iterator[RecordedTime]:
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
            "settings": _settings(program["settings"]),
            "xla_flags": _texts(program["xla_flags"]),
        }
        mesh = {axis: size.integer() for axis, size in program["mesh"].mapping().items()}
        seconds = timing.lower_seconds + timing.compile_seconds
        yield RecordedTime(way_of(described), mesh, round(seconds * 1000))
