"""The baseline: what was found before, by which new findings are told from known ones.

A file of JSON, sorted, so that two runs write the same bytes and two branches merge by lines. Each
finding stands on a line of its own, named by its fingerprint: no instruction's name and no line
number is in it.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import Any

from hlo_audit._version import __version__
from hlo_audit.errors import HloAuditError
from hlo_audit.manifest import Setting
from hlo_audit.own_json import Value, kind_of, parse
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.whole_file import read_text_within, write_text

SCHEMA_FILE = "baseline.schema.json"
"""The JSON Schema of the file; part of the package."""

SCHEMA_VERSION = 1

_MOST_BYTES = 256 << 20

_CONFLICT = re.compile(r"^(<{7}|={7}|>{7}|\|{7})( |$)", re.MULTILINE)
_FUNCTION = re.compile(r"(.+\.py)(:\w+)")
_COMPILERS = ("jax", "jaxlib", "libtpu", "hlo-audit")


class BaselineError(HloAuditError):
    """A baseline that cannot be read."""


@dataclass(frozen=True, order=True)
class KnownFinding:
    """Findings that have a fingerprint in common.

    Attributes:
        rule: the code.
        fingerprint: see :attr:`hlo_audit.rule.Finding.fingerprint`.
        count: how many they are.
        bytes: all of them together; ``None`` where nothing moves.
        message: of the first, for a reader; without a part in comparisons.
    """

    rule: str
    fingerprint: str
    count: int
    bytes: int | None = field(compare=False)
    message: str = field(compare=False)


@dataclass(frozen=True)
class Entry:
    """What is known of one program, compiled in one way.

    Attributes:
        program: its name; a path is relative to the folder of the file, with ``/``.
        module: of a dump that does not say how it was compiled; else ``None``.
        versions: of jax, jaxlib, libtpu and hlo-audit, as far as they are known.
        counts: rule code -> findings; ``None`` for a rule that could not look.
    """

    program: str
    mode: str | None
    layout: str | None
    platform: str | None
    topology: str | None
    module: str | None
    mesh: Mapping[str, int]
    settings: Mapping[str, Setting]
    xla_flags: Mapping[str, str]
    versions: Mapping[str, str]
    counts: Mapping[str, int | None]
    findings: tuple[KnownFinding, ...]

    @property
    def label(self) -> str:
        """Names it for a reader."""
        parts = (self.program, self.mode, self.layout, self.topology, self.module)
        return "/".join(part for part in parts if part)

    @property
    def key(self) -> str:
        """The same for the same program, compiled in the same way; entries are sorted by it."""
        how = (self.mode, self.layout, self.platform, self.topology, self.module)
        chosen = (dict(self.mesh), dict(self.settings), dict(self.xla_flags))
        return json.dumps([self.program, *how, *chosen], sort_keys=True)

    @property
    def bytes(self) -> dict[str, int]:
        """Rule code -> bytes of its findings; rules whose findings move none left out."""
        totals: dict[str, int] = {}
        for finding in self.findings:
            if finding.bytes is not None:
                totals[finding.rule] = totals.get(finding.rule, 0) + finding.bytes
        return totals

    def fingerprints(self, rule: str) -> Counter[str]:
        """How often each fingerprint occurs among the findings of a rule."""
        found = (finding for finding in self.findings if finding.rule == rule)
        return Counter({finding.fingerprint: finding.count for finding in found})

    def of_other_versions(self, versions: Mapping[str, str | None]) -> dict[str, tuple[str, str]]:
        """Name -> (version then, version now), for those that are known and differ."""
        now = {**versions, "hlo-audit": __version__}
        pairs = {name: (self.versions.get(name), now.get(name)) for name in _COMPILERS}
        return {
            name: (before, after)
            for name, (before, after) in pairs.items()
            if before and after and before != after
        }


@dataclass(frozen=True)
class Baseline:
    """What is known of the programs of a run.

    Attributes:
        name: what it is called in reports: the file, or the revision.
        entries: sorted by their keys; of equal keys the order is that of the run.
    """

    name: str
    entries: tuple[Entry, ...] = ()

    def match(self, current: Sequence[Entry]) -> list[Entry | None]:
        """The entry for each of ``current``, the n-th of a key for the n-th of that key."""
        waiting: dict[str, list[Entry]] = {}
        for entry in self.entries:
            waiting.setdefault(entry.key, []).append(entry)
        return [next(iter(_taken(waiting.get(entry.key))), None) for entry in current]


def _taken(entries: list[Entry] | None) -> list[Entry]:
    return [entries.pop(0)] if entries else []


def entry_of(audit: ProgramAudit, folder: Path) -> Entry:
    """What a baseline keeps of an audit without an error.

    Args:
        folder: where the baseline is; names that are paths are made relative to it.
    """
    compiled = audit.mode is not None
    versions = {name: version for name, version in audit.versions.items() if version}
    groups: dict[tuple[str, str], list[tuple[int | None, str]]] = {}
    for finding in audit.findings:
        group = groups.setdefault((finding.rule, finding.fingerprint), [])
        group.append((finding.bytes, finding.message))
    return Entry(
        program=portable_name(audit.program, folder, compiled=compiled),
        mode=audit.mode,
        layout=audit.layout,
        platform=audit.platform,
        topology=audit.topology,
        module=None if compiled else audit.module,
        mesh=dict(audit.mesh),
        settings=dict(audit.settings),
        xla_flags=dict(audit.xla_flags),
        versions={
            **{name: versions[name] for name in _COMPILERS if name in versions},
            "hlo-audit": __version__,
        },
        counts=audit.counts,
        findings=tuple(sorted(starmap(_known, groups.items()))),
    )


def _known(name: tuple[str, str], group: Sequence[tuple[int | None, str]]) -> KnownFinding:
    rule, fingerprint = name
    sizes, messages = zip(*group, strict=True)
    return KnownFinding(rule, fingerprint, len(group), _sum(sizes), min(messages))


def _sum(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def portable_name(program: str, folder: Path, *, compiled: bool) -> str:
    """The name of a program, if it is a path relative to ``folder``, with ``/``.

    Args:
        compiled: whether it is the name of a model or a function, and not of a dump or a file.
    """
    function = _FUNCTION.fullmatch(program)
    if function is not None and compiled:
        return _relative(function[1], folder) + function[2]
    return program if compiled or program == "-" else _relative(program, folder)


def _relative(path: str, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


# -- the file


def read_baseline(path: Path) -> Baseline:
    """Read a baseline file.

    Raises:
        BaselineError: where it is not there, holds the marks of a merge conflict, or is damaged.
    """
    try:
        text = read_text_within(path, _MOST_BYTES)
    except FileNotFoundError:
        raise BaselineError(
            f"there is no baseline {path}", hint="--update-baseline writes it"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BaselineError(f"cannot read the baseline {path}: {reason}") from None
    if conflict := _CONFLICT.search(text):
        line = text.count("\n", 0, conflict.start()) + 1
        raise BaselineError(
            f"{path}:{line}: the baseline holds a merge conflict",
            hint="take either side, then run with --update-baseline",
        )
    try:
        top = parse(text)
        if kind_of(top.value) == "a report":
            raise BaselineError(f"{path} is a report, not a baseline", hint="give it by --against")
        return Baseline(str(path), _entries(top))
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise BaselineError(
            f"{where}: the baseline is damaged: {error.msg}", hint=_MAKE_ANEW
        ) from None
    except ValueError as error:
        reason = str(error)[:200]
        raise BaselineError(f"{path} is no baseline: {reason}", hint=_MAKE_ANEW) from None


_MAKE_ANEW = "restore it, or delete it and run with --update-baseline"


def write_baseline(baseline: Baseline, path: Path) -> bool:
    """Write a baseline file whole or not at all; return whether it was changed.

    Raises:
        UsageError: where it cannot be written.
    """
    text = render_baseline(baseline)
    try:
        if path.read_bytes() == text.encode():
            return False
    except OSError:
        pass  # written below, or the error is told there
    write_text(path, text)
    return True


def render_baseline(baseline: Baseline) -> str:
    """The text of a baseline file: a line a finding, so that branches merge."""
    entries = sorted(baseline.entries, key=lambda entry: entry.key)
    blocks = [_render_entry(entry) for entry in entries]
    body = ",\n".join(blocks)
    inner = f"\n{body}\n  " if body else ""
    return f'{{\n  "schema_version": {SCHEMA_VERSION},\n  "entries": [{inner}]\n}}\n'


def _render_entry(entry: Entry) -> str:
    named: dict[str, Any] = {
        "program": entry.program,
        "mode": entry.mode,
        "layout": entry.layout,
        "platform": entry.platform,
        "topology": entry.topology,
        "module": entry.module,
        "mesh": dict(entry.mesh),
        "settings": dict(entry.settings),
        "xla_flags": dict(entry.xla_flags),
        "versions": dict(entry.versions),
        "counts": dict(entry.counts),
        "bytes": entry.bytes,
    }
    lines = [f"      {json.dumps(name)}: {_line(value)}," for name, value in named.items()]
    findings = [
        "        "
        + json.dumps(
            {
                "rule": finding.rule,
                "fingerprint": finding.fingerprint,
                "count": finding.count,
                "bytes": finding.bytes,
                "message": finding.message,
            }
        )
        for finding in sorted(entry.findings)
    ]
    listed = "[\n" + ",\n".join(findings) + "\n      ]" if findings else "[]"
    return "\n".join(["    {", *lines, f'      "findings": {listed}', "    }"])


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _entries(top: Value) -> tuple[Entry, ...]:
    top.refuse_other_version(SCHEMA_VERSION)
    return tuple(map(entry_of_json, top["entries"].items()))


def entry_of_json(value: Value) -> Entry:
    """The entry that a file holds.

    Raises:
        ValueError: says what is missing or of the wrong type.
    """
    counts = {rule: count.count_or_none() for rule, count in value["counts"].mapping().items()}
    entry = Entry(
        program=value["program"].text(),
        mode=value.get("mode").text_or_none(),
        layout=value.get("layout").text_or_none(),
        platform=value.get("platform").text_or_none(),
        topology=value.get("topology").text_or_none(),
        module=value.get("module").text_or_none(),
        mesh=value["mesh"].integers(),
        settings=value["settings"].settings(),
        xla_flags=value["xla_flags"].texts(),
        versions=value["versions"].texts(),
        counts=counts,
        findings=tuple(map(_known_finding, value["findings"].items())),
    )
    for rule, count in counts.items():
        found = entry.fingerprints(rule).total()
        if found != (count or 0):
            value["counts"][rule].refuse(f"is {count}, and it lists {found} findings")
    if unknown := {finding.rule for finding in entry.findings} - counts.keys():
        value.refuse(f"lists findings of {min(unknown)}, which it does not count")
    return entry


def _known_finding(value: Value) -> KnownFinding:
    return KnownFinding(
        rule=value["rule"].text(),
        fingerprint=value["fingerprint"].text(),
        count=value["count"].integer(least=1),
        bytes=value.get("bytes").count_or_none(),
        message=value.get("message").text_or_none() or "",
    )


# -- updating it


def updated(
    baseline: Baseline, current: Sequence[Entry], *, whole: bool
) -> tuple[Baseline, list[str]]:
    """``baseline`` with ``current`` in the place of what it has, and what that changes, in words.

    Rules that were not applied keep what is known of them, and so do programs that are not in
    ``current``, unless that is the ``whole`` of the programs.
    """
    known = baseline.match(current)
    matched = {id(entry) for entry in known if entry is not None}
    rest = [entry for entry in baseline.entries if id(entry) not in matched]
    entries: list[Entry] = []
    changes: list[str] = []
    for entry, before in zip(current, known, strict=True):
        merged = entry if before is None else _with_rules_left_out(entry, before)
        entries.append(merged)
        changes += _changes(merged, before)
    if whole:
        changes += [f"{entry.label}: removed" for entry in rest]
    else:  # behind: of equal keys those that were matched came first, and are to be matched again
        entries += rest
    return replace(baseline, entries=tuple(sorted(entries, key=lambda e: e.key))), changes


def _with_rules_left_out(entry: Entry, before: Entry) -> Entry:
    kept = [finding for finding in before.findings if finding.rule not in entry.counts]
    counts = {**before.counts, **entry.counts}
    return replace(
        entry,
        counts={rule: counts[rule] for rule in sorted(counts)},
        findings=tuple(sorted((*kept, *entry.findings))),
    )


def _changes(entry: Entry, before: Entry | None) -> Iterator[str]:
    if before is None:
        counts = ", ".join(f"{count} {rule}" for rule, count in entry.counts.items() if count)
        yield f"{entry.label}: added, {counts or 'nothing found'}"
        return
    for rule, count in entry.counts.items():
        new = entry.fingerprints(rule) - before.fingerprints(rule)
        gone = before.fingerprints(rule) - entry.fingerprints(rule)
        if new or gone:
            parts = [f"{new.total()} new"] if new else []
            parts += [f"{gone.total()} gone"] if gone else []
            known = before.counts.get(rule)
            yield f"{entry.label}: {rule} {_said(known)} -> {_said(count)} ({', '.join(parts)})"
        elif rule not in before.counts or before.counts[rule] != count:
            yield f"{entry.label}: {rule} {_said(before.counts.get(rule))} -> {_said(count)}"
    versions = {name: (before.versions.get(name), v) for name, v in entry.versions.items()}
    for name, (old, version) in versions.items():
        if old != version:
            yield f"{entry.label}: {name} {old or 'not known'} -> {version}"


def _said(count: int | None) -> str:
    return "not counted" if count is None else str(count)
