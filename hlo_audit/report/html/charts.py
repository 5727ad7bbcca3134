"""The numbers that the charts are drawn from, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hlo_audit.examination import Examined
from hlo_audit.report import Report
from hlo_audit.report.html.limits import MOST_PROGRAMS, cut
from hlo_audit.report.wording import cost_of
from hlo_audit.rule import Rule
from hlo_audit.timeline import Series


def chart_data(
    report: Report, examined: Sequence[Examined], rules: Mapping[str, Rule]
) -> dict[str, Any]:
    """Plain data: for each program the passes' counts where they change, and its costs."""
    timelines = {}
    for number, (audit, one) in enumerate(
        zip(report.programs[:MOST_PROGRAMS], examined, strict=False), start=1
    ):
        if audit.error is None and one.series:
            timelines[f"passes-{number}"] = {
                "passes": [cut(line.name) for line in one.passes],
                "series": [_chart_series(series) for series in one.series],
            }
    return {"timelines": timelines, "costs": list(_chart_costs(report, rules))}


def _chart_series(series: Series) -> dict[str, Any]:
    points: list[list[int | None]] = []
    last: tuple[int | None, int | None] | None = None
    for position, reading in enumerate(series.readings):
        now = (reading.count, reading.bytes) if reading is not None else (None, None)
        if now != last:
            points.append([position, *now])
        last = now
    return {
        "name": cut(series.name),
        "title": "" if series.title == series.name else cut(series.title),
        "points": points,
        "lasting": [
            [change.position, change.lasting_added, change.lasting_removed]
            for change in series.changes
            if change.lasting
        ],
    }


def _chart_costs(report: Report, rules: Mapping[str, Rule]) -> Iterator[dict[str, Any]]:
    """What the warnings of each rule take in a step: cycles, and bytes copied or sent."""
    for audit in report.programs[:MOST_PROGRAMS]:
        for code in rules:
            mine = [f for f in audit.findings if f.rule == code and f.severity == "warning"]
            if not mine:
                continue
            yield {
                "program": cut(audit.label),
                "rule": code,
                "count": len(mine),
                "cycles": sum(cost_of(finding)[0] for finding in mine),
                "bytes": sum(cost_of(finding)[1] for finding in mine),
            }
