"""A report as SARIF 2.1.0, for code scanning: a result a finding, at the user's Python line.

Within GitHub's limits (docs.github.com, "SARIF support for code scanning"): it stores the first
5,000 results of a run, shows 1,024 characters of a rule's description, takes 10 locations a result
and 10 MB once compressed, and refuses a result without a location. What does not fit is left out
from the end, where the least costly stand, and a notification says how much.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hlo_audit._version import __version__
from hlo_audit.report import Report
from hlo_audit.report.explanation import explanation
from hlo_audit.report.json import gate_to_json
from hlo_audit.report.listed import Listed, listed, suppressed
from hlo_audit.report.sources import DumpLines, Place, Repository
from hlo_audit.report.wording import clip, format_cost, plain
from hlo_audit.rule import Rule

SCHEMA_URI = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)

MOST_RESULTS = 5_000
MOST_COMPRESSED_BYTES = 10_000_000
MOST_LOCATIONS = 10
MOST_CHARACTERS = 1_024
"""Of a message, and of each other text that comes out of a dump."""

_ROOT = "%SRCROOT%"


def render_sarif(
    report: Report,
    repository: Repository,
    *,
    show_all: bool = False,
    exit_code: int | None = None,
    most_bytes: int = MOST_COMPRESSED_BYTES,
) -> str:
    """The report as text, two spaces a level, with a line end.

    Args:
        repository: what the locations are relative to.
        show_all: lists notes too.
        exit_code: of the command, where it is another than the report's.
        most_bytes: the most that it may take once compressed by gzip.
    """
    entries = [*listed(report, show_all=show_all), *suppressed(report)]
    code = report.exit_code if exit_code is None else exit_code
    lines = DumpLines()
    count = min(len(entries), MOST_RESULTS)
    while True:
        log = _log(report, entries[:count], len(entries) - count, repository, lines, code)
        text = dumps(log, indent=2, allow_nan=False) + "\n"
        size_bytes = len(gzip.compress(text.encode()))
        if size_bytes <= most_bytes or not count:
            return text
        count = min(count - 1, count * most_bytes // size_bytes)


def _log(
    report: Report,
    entries: Sequence[Listed],
    left_out: int,
    repository: Repository,
    lines: DumpLines,
    exit_code: int,
) -> dict[str, Any]:
    rules = {rule.code: rule for audit in report.programs for rule in audit.rules}
    codes = sorted(rules)
    seen: Counter[tuple[str, ...]] = Counter()
    return {
        "$schema": SCHEMA_URI,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "hlo-audit",
                        "version": __version__,
                        "semanticVersion": __version__,
                        "rules": [_rule(rules[code]) for code in codes],
                    }
                },
                "invocations": [_invocation(report, left_out, repository, codes, exit_code)],
                "originalUriBaseIds": {
                    _ROOT: {
                        "uri": _folder_uri(repository),
                        "description": {"text": "The top of the repository."},
                    }
                },
                "results": [
                    _result(entry, codes.index(entry.finding.rule), repository, lines, seen)
                    for entry in entries
                ],
                "properties": {
                    "environment": dict(report.environment),
                    "gate": _clipped(gate_to_json(report.gate)),
                },
            }
        ],
    }


def _folder_uri(repository: Repository) -> str:
    return _file_uri(str(repository.root)).rstrip("/") + "/"


def _file_uri(path: str) -> str:
    return "file://" + _quoted(path)


def _quoted(path: str) -> str:
    return quote(path, safe="/", errors="replace")


def _rule(rule: Rule) -> dict[str, Any]:
    first_paragraph = " ".join(rule.documentation.strip().split("\n\n")[0].split())
    text = explanation(rule)
    return {
        "id": rule.code,
        "name": rule.slug,
        "shortDescription": {"text": clip(rule.summary, MOST_CHARACTERS)},
        "fullDescription": {"text": clip(first_paragraph or rule.summary, MOST_CHARACTERS)},
        "help": {"text": text, "markdown": text},
        "defaultConfiguration": {"level": "warning"},
        "properties": {"tags": ["performance", "xla"], "problem.severity": "warning"},
    }


# -- what went wrong


def _invocation(
    report: Report,
    left_out: int,
    repository: Repository,
    codes: Sequence[str],
    exit_code: int,
) -> dict[str, Any]:
    failed = any(audit.error is not None for audit in report.programs)
    return {
        "executionSuccessful": not failed,
        "exitCode": exit_code,
        "workingDirectory": {"uri": _folder_uri(repository)},
        "toolExecutionNotifications": [*_notifications(report, codes), *_truncated(left_out)],
    }


def _notifications(report: Report, codes: Sequence[str]) -> Iterator[dict[str, Any]]:
    for audit in report.programs:
        if audit.error is not None:
            log = "".join(f"\n{plain(line)}" for line in getattr(audit.error, "log", ()))
            yield {
                "level": "error",
                "descriptor": {"id": audit.error.kind},
                "message": _message(plain(f"{audit.label}: {audit.error}"), log),
            }
        for code, reason in audit.skipped.items():
            yield {
                "level": "note",
                "associatedRule": {"id": code, "index": codes.index(code)},
                "message": _message(plain(f"{audit.label}: {code} was not counted: {reason}")),
            }

    for notice in report.gate.notices:
        yield {
            "level": "error" if notice.fails else "note",
            "descriptor": {"id": notice.kind},
            "message": _message(plain(notice.message)),
        }


def _truncated(left_out: int) -> Iterator[dict[str, Any]]:
    if left_out:
        yield {
            "level": "warning",
            "descriptor": {"id": "truncated"},
            "message": _message(f"{left_out} more findings, of less cost, were left out"),
        }


# -- the findings


def _result(
    entry: Listed,
    rule_index: int,
    repository: Repository,
    lines: DumpLines,
    seen: Counter[tuple[str, ...]],
) -> dict[str, Any]:
    audit, finding = entry.audit, entry.finding
    places = repository.places(finding)
    dumped = _dump_location(entry, repository, lines)
    primary = _location(places[0]) if places else dumped or _nowhere(entry)
    callers = [_location(place, "traced from here") for place in places[1:MOST_LOCATIONS]]
    related = ([dumped] if dumped else []) + callers
    uri = primary["physicalLocation"]["artifactLocation"]["uri"]
    cost = format_cost([finding])
    fixes = ", ".join(audit.fixes_of(finding))
    facts = [plain(audit.label), f"%{plain(finding.instruction)}", *([cost] if cost else [])]
    facts += [f"fixes: {fixes}"] if fixes else []
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "level": entry.level,
        "message": _message(plain(finding.message), f" ({'; '.join(facts)})"),
        "locations": [{**primary, "logicalLocations": [_logical_location(entry)]}],
        "relatedLocations": [
            {"id": number, **location}
            for number, location in enumerate(related[: MOST_LOCATIONS - 1], start=1)
        ],
        "partialFingerprints": _fingerprints(entry, uri, seen),
        **_suppressions(entry),
        "properties": _clipped(
            {
                "program": audit.program,
                "mode": audit.mode,
                "layout": audit.layout,
                "topology": audit.topology,
                "module": audit.module,
                "instruction": finding.instruction,
                "computation": finding.computation,
                "opcode": finding.opcode,
                "shape": finding.shape,
                "bytes": finding.bytes,
                "executions": finding.executions,
                "executedBytes": finding.executed_bytes,
                "estimatedCycles": finding.estimated_cycles,
                "opName": finding.op_name,
                "details": dict(finding.details),
                "fixes": list(audit.fixes_of(finding)),
            }
        ),
    }


def _suppressions(entry: Listed) -> dict[str, Any]:
    """GitHub closes the alert of a suppressed result."""
    if entry.suppressed is None:
        return {}
    kind = {"source": "inSource", "config": "external"}[entry.suppressed.by]
    reason = clip(plain(entry.suppressed.reason), MOST_CHARACTERS)
    return {"suppressions": [{"kind": kind, "status": "accepted", "justification": reason}]}


def _message(text: str, rest: str = "") -> dict[str, str]:
    """Plain text, free of what SARIF gives a meaning: ``{0}`` is a placeholder, ``[a](b)`` a link.

    Viewers differ in whether they undo the escapes for these, so the text does without them.
    """
    whole = clip(text, MOST_CHARACTERS) + clip(rest, MOST_CHARACTERS)
    return {"text": whole.replace("{", "(").replace("}", ")").replace("](", "] (")}


def _location(place: Place, message: str = "") -> dict[str, Any]:
    path = clip(place.path, MOST_CHARACTERS)
    artifact = {"uri": _file_uri(path) if path.startswith("/") else _quoted(path)}
    if place.in_repository:
        artifact["uriBaseId"] = _ROOT
    located: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": artifact,
            "region": {"startLine": place.line, "startColumn": 1},
        }
    }
    if place.function or message:
        within = f"in {plain(place.function)}" if place.function else ""
        located["message"] = _message(": ".join(part for part in (message, within) if part))
    return located


def _dump_location(
    entry: Listed, repository: Repository, lines: DumpLines
) -> dict[str, Any] | None:
    """The instruction's line in the dump, where that is a file of text."""
    audit, finding = entry.audit, entry.finding
    rule = next(rule for rule in audit.rules if rule.code == finding.rule)
    for stage in rule.reads:
        path = audit.files.get(stage)
        line = path and lines.line_of(path, finding.computation, finding.instruction)
        if path and line:
            relative = repository.relative(path)
            shown = relative if relative is not None else str(path.absolute())
            place = Place(Path(shown).as_posix(), line, "", relative is not None)
            return _location(place, f"%{plain(finding.instruction)} in the dump")
    return None


def _nowhere(entry: Listed) -> dict[str, Any]:
    """Neither a Python line nor a dump is known: the module, under a name that is no file's."""
    return _location(Place(f"{plain(entry.audit.module or 'module')}.hlo", 1, "", False))


def _logical_location(entry: Listed) -> dict[str, str]:
    finding = entry.finding
    names = (entry.audit.module or "", finding.computation, finding.instruction)
    return {
        "name": clip(plain(finding.instruction), MOST_CHARACTERS),
        "fullyQualifiedName": clip(plain("/".join(filter(None, names))), MOST_CHARACTERS),
        "kind": "instruction",
    }


def _fingerprints(entry: Listed, uri: str, seen: Counter[tuple[str, ...]]) -> dict[str, str]:
    """GitHub goes by ``primaryLocationLineHash`` alone, within a file and a rule.

    So it also tells programs apart, but not by where a dump lies; equal findings are numbered.
    """
    audit, finding = entry.audit, entry.finding
    named = (audit.program if audit.mode else "", audit.mode, audit.layout, audit.topology)
    identity = "\0".join([*(part or "" for part in named), audit.module or "", finding.fingerprint])
    digest = sha256(identity.encode("utf-8", "replace")).hexdigest()[:16]
    seen[uri, finding.rule, digest] += 1
    return {
        "primaryLocationLineHash": f"{digest}:{seen[uri, finding.rule, digest]}",
        "hloAuditFinding/v1": finding.fingerprint,
    }


def _clipped(value: Any) -> Any:
    """``value`` with every text in it made printable and cut; what it holds comes out of a dump."""
    if isinstance(value, str):
        return clip(plain(value), MOST_CHARACTERS)
    if isinstance(value, Mapping):
        return {plain(str(key)): _clipped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clipped(item) for item in value]
    return value
