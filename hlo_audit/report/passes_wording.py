"""What reports of the passes say alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hlo_audit.report.wording import format_bytes
from hlo_audit.timeline import Series


def snapshots_said(count: int, changing: int) -> str:
    """How many snapshots there are, and how many of them differ from the one before."""
    return f"{count:,} snapshots, {changing:,} of them change the module"


def not_counted(all_series: Iterable[Series]) -> dict[str, Sequence[str]]:
    """Each reason for which a snapshot was not counted, and the names of the series it is of."""
    names: dict[str, list[str]] = {}
    for series in all_series:
        for reason in dict.fromkeys(series.reasons.values()):
            names.setdefault(reason, []).append(series.name)
    return dict(names)


def format_byte_change(count: int) -> str:
    """Bytes with their sign; ``""`` for none."""
    return f"{'+' if count > 0 else '-'}{format_bytes(abs(count))}" if count else ""
