"""A report as GitHub workflow commands, which the runner turns into annotations of a pull request.

The runner keeps 10 errors, 10 warnings and 10 notices of a step, and 50 annotations of a job; this
writes 30 at the most, the most costly first, and says how many it left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

from hlo_audit.report import Report
from hlo_audit.report.listed import Listed, alike, listed, programs_of
from hlo_audit.report.sources import Repository
from hlo_audit.report.wording import clip, format_cost, headline, not_audited, plain

MOST_OF_A_KIND = 10

_MOST_CHARACTERS = 1_000
_MOST_VIOLATIONS = 40

Kind = Literal["error", "warning", "notice"]


def render_github(report: Report, repository: Repository, *, show_all: bool = False) -> str:
    """A workflow command a line: the verdict, programs that failed, findings, what is left out.

    Findings that differ only in their instruction and program share an annotation.

    Args:
        repository: what the Python lines are relative to.
        show_all: lists notes too.
    """
    commands: dict[Kind, list[tuple[str, int]]] = {"error": [], "warning": [], "notice": []}
    failed = bool(not report.gate.passed or not_audited(report))
    commands["error" if failed else "notice"].append((_verdict(report), 0))
    for audit in report.programs:
        if audit.error is not None:
            lines = [plain(str(audit.error)), *map(plain, getattr(audit.error, "log", ()))]
            commands["error"].append(
                (_command("error", f"{plain(audit.label)} was not audited", lines), 0)
            )
    for group in alike(listed(report, show_all=show_all)):
        level = group[0].level
        kind: Kind = "notice" if level == "note" else level
        commands[kind].append((_annotation(kind, group, repository), len(group)))
    return "".join(f"{line}\n" for line in _within_limits(commands))


def _within_limits(commands: dict[Kind, list[tuple[str, int]]]) -> Iterator[str]:
    # The last notice is kept for what is left out.
    room = {kind: MOST_OF_A_KIND - (kind == "notice") for kind in commands}
    left_out = errors = 0
    for kind, of_kind in commands.items():
        yield from (line for line, _ in islice(of_kind, room[kind]))
        rest = [findings for _, findings in of_kind[room[kind] :]]
        left_out += sum(rest)
        errors += rest.count(0)
    parts = [f"{left_out} more findings"] if left_out else []
    parts += [f"{errors} more programs that were not audited"] if errors else []
    if parts:
        text = f"{' and '.join(parts)} are not shown: GitHub keeps {MOST_OF_A_KIND} of a kind"
        yield _command("notice", "hlo-audit", [text])


def _verdict(report: Report) -> str:
    failed = not_audited(report)
    kind: Kind = "error" if not report.gate.passed or failed else "notice"
    violations = [plain(violation.message) for violation in report.gate.violations]
    lines = violations[:_MOST_VIOLATIONS]
    if len(violations) > len(lines):
        lines.append(f"and {len(violations) - len(lines)} more")
    notices = sorted(report.gate.notices, key=lambda notice: not notice.fails)
    lines += [plain(notice.message) for notice in notices[:_MOST_VIOLATIONS]]
    if len(notices) > _MOST_VIOLATIONS:
        lines.append(f"and {len(notices) - _MOST_VIOLATIONS} more to note")
    lines = [*lines, *([failed] if failed else [])]
    if not lines:
        return _command(kind, "hlo-audit", [headline(report)])
    return _command(kind, f"hlo-audit: {headline(report)}", lines)


def _annotation(kind: Kind, group: Sequence[Listed], repository: Repository) -> str:
    finding = group[0].finding
    places = repository.places(finding)
    times = f"{len(group)} times: " if len(group) > 1 else ""
    cost = format_cost([entry.finding for entry in group])
    fixes = list(dict.fromkeys(fix for entry in group for fix in entry.audit.fixes_of(finding)))
    lines = [times + plain(finding.message), f"in {plain(programs_of(group))}"]
    lines += [cost] if cost else []
    lines += [f"fixes: {', '.join(fixes)}"] if fixes else []
    properties = {}
    prepositions = ["at", "from"]
    if places and places[0].in_repository:
        properties = {"file": plain(places[0].path), "line": str(places[0].line)}
        places, prepositions = places[1:], ["from"]
    named = zip(prepositions, places, strict=False)
    lines += [f"{preposition} {plain(str(place))}" for preposition, place in named]
    return _command(kind, f"{finding.rule} {finding.slug}", lines, properties)


def _command(
    kind: Kind, title: str, lines: Sequence[str], properties: dict[str, str] | None = None
) -> str:
    named = {**(properties or {}), "title": clip(title, _MOST_CHARACTERS)}
    options = ",".join(f"{name}={_property(value)}" for name, value in named.items())
    text = "\n".join(clip(line, _MOST_CHARACTERS) for line in lines)
    return f"::{kind} {options}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
