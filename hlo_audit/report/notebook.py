"""A report as HTML for a notebook: the counts, the findings, the verdict.

All that stands in it comes out of dumps and is escaped; it has no script and loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from hlo_audit.program_audit import ProgramAudit
from hlo_audit.report import Report
from hlo_audit.report.listed import Listed, alike, listed, offered_fixes, programs_of
from hlo_audit.report.sources import shown
from hlo_audit.report.wording import format_cost, headline, not_audited, plain

MOST_ROWS = 60
"""How many different findings are listed."""


def report_html(report: Report) -> str:
    """The report as a fragment of HTML; notes are counted, and listed where they fail the gate."""
    groups = alike(listed(report))
    parts = [_counts(report), *map(_error, report.programs)]
    if groups:
        heads = ("rule", "finding", "a step", "line", "programs")
        parts.append(_table(heads, [_finding(group) for group in groups[:MOST_ROWS]]))
    if len(groups) > MOST_ROWS:
        parts.append(f"<p>and {len(groups) - MOST_ROWS} more</p>")
    fixes = {fix.name: fix.change for audit in report.programs for fix in offered_fixes(audit)}
    if fixes:
        items = (f"<li><b>{_text(n)}</b>: {_text(change)}</li>" for n, change in fixes.items())
        parts.append(f"<p>fixes</p><ul>{''.join(items)}</ul>")
    parts += [f"<p>{_text(violation.message)}</p>" for violation in report.gate.violations]
    parts += [f"<p>{_text(notice.message)}</p>" for notice in report.gate.notices]
    parts.append(f"<p><b>{_text(headline(report))}</b> {_text(not_audited(report))}</p>")
    return f"<div>{''.join(part for part in parts if part)}</div>"


def _counts(report: Report) -> str:
    audited = [audit for audit in report.programs if audit.error is None]
    if not audited:
        return ""
    codes = [rule.code for rule in audited[0].rules]
    cost = any(audit.cost for audit in audited)
    rows = []
    for audit in audited:
        counts = [_count(audit, code) for code in codes]
        cycles = f"{audit.cost.estimated_cycles:,}" if audit.cost else "-"
        rows.append([_text(audit.label), *counts, *([cycles] if cost else [])])
    return _table(["program", *codes, *(["est. cycles"] if cost else [])], rows)


def _count(audit: ProgramAudit, code: str) -> str:
    count = audit.counts[code]
    if count is None:
        return f'<span title="{_text(audit.skipped[code])}">-</span>'
    warnings = sum(f.rule == code and f.severity == "warning" for f in audit.findings)
    notes = f" (+{count - warnings})" if count > warnings else ""
    return f"<b>{warnings}</b>{notes}" if warnings else f"{warnings}{notes}"


def _error(audit: ProgramAudit) -> str:
    if audit.error is None:
        return ""
    log = "\n".join(plain(line) for line in audit.error.log)
    shown_log = f"<pre>{escape(log)}</pre>" if log else ""
    return f"<p><b>{_text(audit.label)}</b>: {_text(str(audit.error))}</p>{shown_log}"


def _finding(group: Sequence[Listed]) -> list[str]:
    finding = group[0].finding
    times = f"{len(group)} times: " if len(group) > 1 else ""
    return [
        _text(f"{finding.rule} {finding.slug}"),
        times + _text(finding.message),
        _text(format_cost([entry.finding for entry in group])),
        f"<code>{_text(shown(finding.source))}</code>" if finding.source else "",
        _text(programs_of(group)),
    ]


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of headings as text and of cells as HTML."""
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    style = ' style="text-align:left"'
    body = "".join(f"<tr>{''.join(f'<td{style}>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(text: str) -> str:
    return escape(plain(text))
