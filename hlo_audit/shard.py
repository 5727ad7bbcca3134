"""One machine's part of a matrix of programs: ``--shard 2/8``.

The machines do not talk to each other. Each works out how the whole matrix is parted, and takes its
own part, so that all must come to the same result: it follows from the programs, how they are
compiled, and the timings that all are given, and from nothing that a machine has for itself (a
cache, a clock, the order of a set). What a report says of its shard lets ``hlo-audit merge`` find
out where they did not.

Programs are dealt out the longest first, each to the shard that has least so far: R. L. Graham,
"Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969), by which no shard takes
more than 4/3 of the time of the best partition, as far as the times are right.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median_low
from typing import Any

from hlo_audit.errors import UsageError
from hlo_audit.program import Lowering, Platform, Subject

MOST_SHARDS = 10_000

GUESSED_MILLISECONDS: Mapping[Platform | None, int] = {"tpu": 10_000, "cpu": 2_000, None: 1_000}
"""How long a program is taken to need that is in no timings, by platform; ``None`` for a dump,
which is only read. Only their ratios matter."""


@dataclass(frozen=True)
class Shard:
    """One of ``count`` parts, counted from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str) -> Shard:
    """Read a text such as ``2/8``.

    Raises:
        UsageError: for anything else.
    """
    if not text:
        raise UsageError("--shard is empty", hint="is a variable not set?")
    found = re.fullmatch(r"([0-9]{1,40})/([0-9]{1,40})", text)
    if found is None:
        raise UsageError(
            f"--shard {text[:40]} is not of the form I/N",
            hint="such as 2/8, from 1/8 to 8/8",
        )
    shard = Shard(*map(int, found.groups()))
    if shard.count > MOST_SHARDS:
        raise UsageError(f"--shard {text}: at most {MOST_SHARDS:,} shards")
    if shard.count < 1:
        raise UsageError(f"--shard {text}: N must be at least 1")
    if not 1 <= shard.index <= shard.count:
        raise UsageError(f"--shard {text}: I must be from 1 to {shard.count}")
    return shard


@dataclass(frozen=True)
class RecordedTime:
    """How long a program took once.

    Attributes:
        way: what was compiled and how, its mesh left out; see :func:`way_of`.
        mesh: axis name -> size.
        milliseconds: to trace and compile it.
    """

    way: str
    mesh: Mapping[str, int]
    milliseconds: int


def way_of(described: Mapping[str, Any]) -> str:
    """What tells a program, compiled in one way, from others.

    Args:
        described: at least ``program``, ``mode``, ``layout``, ``platform``, ``topology``,
            ``settings`` and ``xla_flags``, as a report has them.
    """
    names = ("program", "mode", "layout", "platform", "topology", "settings", "xla_flags")
    return json.dumps([described[name] for name in names], sort_keys=True)


@dataclass(frozen=True)
class Part:
    """What one shard has of a matrix.

    Attributes:
        shard: which one.
        matrix: digest of all programs in their order, and of what they are audited for.
        plan: digest of which program is whose; the same for all shards that fit together.
        size: of the matrix.
        positions: the programs of this shard, by their places in the matrix, in rising order.
    """

    shard: Shard
    matrix: str
    plan: str
    size: int
    positions: tuple[int, ...]


def take_part(
    subjects: Sequence[Subject],
    shard: Shard,
    *,
    top: Path,
    asked: object = None,
    times: Sequence[RecordedTime] = (),
) -> Part:
    """What ``shard`` has of ``subjects``.

    Which programs that are depends neither on their order nor on the machine.

    Args:
        top: the checkout that they lie in: names that are paths count from there.
        asked: what they are audited for, as plain data: shards with another one do not fit.
        times: how long programs took before, the same for all shards.
    """
    keys = [_key(subject, top) for subject in subjects]
    owners = deal(keys, _milliseconds(subjects, times, top), shard.count)
    return Part(
        shard,
        matrix=_digest([keys, asked]),
        plan=_digest([shard.count, owners]),
        size=len(subjects),
        positions=tuple(n for n, owner in enumerate(owners) if owner == shard.index),
    )


def deal(keys: Sequence[str], costs: Sequence[int], count: int) -> list[int]:
    """Which of ``count`` shards, from 1, has each item: the most costly first, each to the shard
    with the least cost, then with the fewest items, then the first.

    Args:
        keys: what items of one cost are ordered by.
    """
    loads = [(0, 0)] * count
    owners = [0] * len(keys)
    for item in sorted(range(len(keys)), key=lambda n: (-costs[n], keys[n], n)):
        least = min(range(count), key=loads.__getitem__)
        cost, items = loads[least]
        loads[least] = (cost + costs[item], items + 1)
        owners[item] = least + 1
    return owners


def name_below(top: Path, name: str) -> str:
    """The name of a program that is a path, or a function in a file, the same in all checkouts."""
    path, colon, function = name.rpartition(":")
    if not (colon and path.endswith(".py")):
        path, colon, function = name, "", ""
    whole = Path(os.path.abspath(path))  # noqa: PTH100  (links stay as they are)
    return (
        whole.relative_to(top).as_posix() + colon + function if whole.is_relative_to(top) else name
    )


def _key(subject: Subject, top: Path) -> str:
    """Names a program and how it is compiled, alike on all machines."""
    if not isinstance(subject, Lowering):
        return json.dumps({"path": name_below(top, str(subject.path))})
    return json.dumps({"way": _way(subject, top), "mesh": list(subject.mesh.items())})


def _way(lowering: Lowering, top: Path) -> str:
    is_file = lowering.build.rpartition(":")[0].endswith(".py")
    return way_of(
        {
            "program": name_below(top, lowering.program) if is_file else lowering.program,
            "mode": lowering.mode,
            "layout": lowering.layout,
            "platform": lowering.platform,
            "topology": lowering.topology,
            "settings": dict(lowering.settings),
            "xla_flags": dict(lowering.xla_flags),
        }
    )


def _milliseconds(
    subjects: Sequence[Subject], times: Iterable[RecordedTime], top: Path
) -> list[int]:
    """How long each takes: as recorded; else the median of the same program, else of the same
    platform; else a guess."""
    recorded: dict[str, list[RecordedTime]] = {}
    for time in times:
        recorded.setdefault(time.way, []).append(time)
    known: dict[int, int] = {}
    alike: dict[tuple[str | None, str], list[int]] = {}
    for number, subject in enumerate(subjects):
        if isinstance(subject, Lowering):
            for time in recorded.get(_way(subject, top), ()):
                if _is_mesh(subject.mesh, time.mesh):
                    known[number] = time.milliseconds
                    for group in _groups(subject):
                        alike.setdefault(group, []).append(time.milliseconds)
                    break
    costs = []
    for number, subject in enumerate(subjects):
        platform = subject.platform if isinstance(subject, Lowering) else None
        cost = known.get(number, GUESSED_MILLISECONDS[platform])
        if number not in known and isinstance(subject, Lowering):
            groups = (alike[group] for group in _groups(subject) if group in alike)
            cost = next(map(median_low, groups), cost)
        costs.append(max(1, cost))
    return costs


def _groups(lowering: Lowering) -> tuple[tuple[str | None, str], ...]:
    """What is alike to a program, the nearest first."""
    return (lowering.program, lowering.platform), (None, lowering.platform)


def _is_mesh(asked: Mapping[str, int], found: Mapping[str, int]) -> bool:
    """Whether ``found`` is what became of a mesh in which a size may be -1."""
    return list(asked) == list(found) and all(
        size in (-1, found[axis]) for axis, size in asked.items()
    )


def _digest(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
