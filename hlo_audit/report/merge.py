"""The reports of all shards of a matrix, joined into what one run would have found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hlo_audit.errors import UsageError
from hlo_audit.program_audit import ProgramAudit, tell_apart
from hlo_audit.report import ShardRecord
from hlo_audit.report.stored import StoredReport
from hlo_audit.suppressions import Use


@dataclass(frozen=True)
class Merged:
    """What all shards found together.

    Attributes:
        audits: in the order of the matrix.
        environment: the versions that all were made with.
        whole: whether these are all programs that there are.
        suppressions: what they were good for, in each shard.
    """

    audits: tuple[ProgramAudit, ...]
    environment: Mapping[str, str | None]
    whole: bool
    suppressions: tuple[Use, ...]


def merge(reports: Sequence[StoredReport]) -> Merged:
    """Join the reports of shards, given in any order.

    Raises:
        UsageError: where one is of no shard, is missing or doubled, or they do not fit together.
    """
    shards = [_shard_of(report) for report in reports]
    first, *others = zip(reports, shards, strict=True)
    for report, shard in others:
        _refuse_misfit(*first, report, shard)
    _refuse_missing(reports, shards)
    placed = [
        (position, audit)
        for report, shard in zip(reports, shards, strict=True)
        for position, audit in zip(shard.positions, report.audits, strict=True)
    ]
    placed.sort(key=lambda pair: pair[0])  # stable: the modules of a dump stay in their order
    return Merged(
        tuple(tell_apart([audit for _, audit in placed])),
        reports[0].environment,
        shards[0].whole,
        tuple(use for shard in shards for use in shard.suppressions),
    )


def _shard_of(report: StoredReport) -> ShardRecord:
    if report.shard is None:
        raise UsageError(
            f"{report.path} is the report of a whole run, not of a shard",
            hint="hlo-audit check --shard I/N --format json writes those of shards",
        )
    return report.shard


def _refuse_misfit(
    first: StoredReport, shard: ShardRecord, other: StoredReport, other_shard: ShardRecord
) -> None:
    both = f"{first.path} and {other.path}"
    versions = {
        name: (first.environment.get(name), other.environment.get(name))
        for name in {**first.environment, **other.environment}
    }
    for name, (version, other_version) in versions.items():
        if version != other_version:
            raise UsageError(
                f"{both} were made with different versions: {name} {version} and {other_version}",
                hint="merge what one environment has made",
            )
    one, another = shard.part, other_shard.part
    if one.shard.count != another.shard.count:
        raise UsageError(f"{both} are of {one.shard.count} and of {another.shard.count} shards")
    if (one.matrix, one.size) != (another.matrix, another.size) or (
        shard.whole != other_shard.whole
    ):
        raise UsageError(
            f"{both} are of different matrices",
            hint="run every shard with the same programs, options and config, in the same order",
        )
    if one.plan != another.plan:
        raise UsageError(
            f"{both} were parted in different ways",
            hint="give every shard the same --timings FILE, or none",
        )


def _refuse_missing(reports: Sequence[StoredReport], shards: Sequence[ShardRecord]) -> None:
    files: dict[int, Path] = {}
    for report, shard in zip(reports, shards, strict=True):
        index = shard.part.shard.index
        if index in files:
            both = f"{files[index]} and {report.path}"
            raise UsageError(f"{both} are both of shard {shard.part.shard}")
        files[index] = report.path
    count = shards[0].part.shard.count
    missing = [str(index) for index in range(1, count + 1) if index not in files]
    if missing:
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        verb = "are" if len(missing) > 1 else "is"
        raise UsageError(
            f"{len(missing)} of {count} shards {verb} missing: {shown}",
            hint="did their jobs fail before they wrote a report?",
        )
    owners: dict[int, Path] = {}
    for report, shard in zip(reports, shards, strict=True):
        for position in shard.part.positions:
            if position in owners:
                raise UsageError(f"{owners[position]} and {report.path} hold the same program")
            owners[position] = report.path
    if len(owners) != shards[0].part.size:
        count = shards[0].part.size - len(owners)
        raise UsageError(f"{count} of the {shards[0].part.size} programs are in no report")
