"""What a diff says in words, alike in all its formats: plain sentences, the gravest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hlo_audit.cost import Hardware
from hlo_audit.diff import Both, Diff
from hlo_audit.hlo import Instruction, Shape
from hlo_audit.parting import BULK_BYTES, Bulk, Parting
from hlo_audit.report.listed import OfferedFix, offered_fixes

_PLACES = {
    "entry": "relayout {} of entry parameters and results",
    "inner": "inner relayout {}",
    "fused": "relayout {} inside fusions",
}
_MOST_BULK = 3

_PLUMBING = frozenset(
    ("bitcast", "constant", "get-tuple-element", "parameter", "partition-id", "tuple")
)


def summary(diff: Diff) -> list[str]:
    """What differs, a sentence each; what costs most time first."""
    if diff.obstacles and not diff.rules:
        return ["not comparable"]
    if diff.identical:
        same = "the same program: the final modules differ at most in names and metadata"
        return [same, *_not_counted(diff)]
    hardware = _hardware(diff)
    weighted = [*_copies(diff, hardware), *_collectives(diff, hardware)]
    weighted.sort(key=lambda one: -one[0])
    said = [text for _, text in weighted]
    said += [*_rules(diff), *_in_both(diff), *_not_counted(diff)]
    if cycles := _cycles(diff):
        said.append(cycles)
    return said or ["the rules find the same in both; the modules differ in details"]


def _not_counted(diff: Diff) -> Iterator[str]:
    """What one side could not show and the other does: it is no difference between them."""
    for side, other in ((diff.a, diff.b), (diff.b, diff.a)):
        reasons: dict[str, list[str]] = {}
        for code, reason in side.audit.skipped.items():
            if code not in other.audit.skipped:
                reasons.setdefault(reason, []).append(code)
        for reason, codes in reasons.items():
            yield f"not counted in {side.name}: {', '.join(codes)} {reason}"


def exact_bytes(count: int) -> str:
    """Bytes in decimal units, four digits: a difference is of numbers close together."""
    value, units = float(abs(count)), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:
        value /= 1000
        units.pop(0)
    sign = "-" if count < 0 else ""
    return f"{sign}{value:.0f} B" if units[0] == "B" else f"{sign}{value:,.1f} {units[0]}"


def format_seconds(seconds: float) -> str:
    """A time in two or three digits: ``83 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _about(seconds: float | None) -> str:
    return "" if not seconds else f", about {format_seconds(abs(seconds))}"


def _hardware(diff: Diff) -> Hardware | None:
    return diff.a.audit.hardware or diff.b.audit.hardware


def _copies(diff: Diff, hardware: Hardware | None) -> Iterator[tuple[float, str]]:
    for place, (a, b) in diff.copies.items():
        change = b.count - a.count
        moved = b.traffic.hbm_bytes - a.traffic.hbm_bytes
        if not change:
            continue
        what = _PLACES.get(place, "relayout {}").format("copies" if abs(change) > 1 else "copy")
        more = moved > 0 or (not moved and change > 0)
        of = "of" if more else "less"
        sizes = f": {exact_bytes(abs(moved))} {of} HBM traffic" if moved else ""
        seconds = moved / hardware.copy_bytes_per_second if hardware else None
        verb = "adds" if change > 0 else "no longer has"
        yield (
            float(abs(moved)),
            f"{diff.b.name} {verb} {abs(change):,} {what}{sizes}{_about(seconds)}",
        )


def _collectives(diff: Diff, hardware: Hardware | None) -> Iterator[tuple[float, str]]:
    """One sentence for all kinds: a lost reduce-scatter is an all-reduce more."""
    lost: list[str] = []
    gained: list[str] = []
    wire = Counter[str]()
    for kind, (a, b) in diff.collectives.items():
        wire["a"] += a.traffic.wire_bytes
        wire["b"] += b.traffic.wire_bytes
        change = b.count - a.count
        if change:
            (gained if change > 0 else lost).append(f"{abs(change):,} {kind}")
    if not lost and not gained and wire["a"] == wire["b"]:
        return
    did = [f"loses {', '.join(lost)}"] if lost else []
    did += [f"adds {', '.join(gained)}"] if gained else []
    moved = wire["b"] - wire["a"]
    seconds = moved / hardware.ring_bytes_per_second if hardware else None
    carried = exact_bytes(wire["b"]), exact_bytes(wire["a"])
    sends = (
        f"the wire carries {exact_bytes(wire['b'])}, not {exact_bytes(wire['a'])}{_about(seconds)}"
        + ("" if not seconds else " more" if moved > 0 else " less")
        if carried[0] != carried[1]
        else f"the wire carries {exact_bytes(wire['b'])} in both"
    )
    yield float(abs(moved)), f"{diff.b.name} {' and '.join(did) or 'sends other sizes'}: {sends}"


def _rules(diff: Diff) -> Iterator[str]:
    """Rules other than that on copies, which are told with what they move."""
    changes = [
        (one.counts.difference or 0, f"{one.rule.code} {one.rule.slug}")
        for one in diff.rules
        if one.rule.code != "HLA002"
    ]
    for verb, sign in (("adds", 1), ("no longer has", -1)):
        listed = [f"{abs(change):,} {name}" for change, name in changes if change * sign > 0]
        if listed:
            yield f"{diff.b.name} {verb} {', '.join(listed)}"


def _in_both(diff: Diff) -> Iterator[str]:
    """What a difference does not show: the faults that both have."""
    listed = [
        f"{len(found):,} {one.rule.code} {one.rule.slug}"
        for one in diff.rules
        if (found := [f for f in one.in_both if f.severity == "warning"])
    ]
    if listed:
        yield f"both alike have {', '.join(listed)}"


def _cycles(diff: Diff) -> str:
    costs = diff.a.audit.cost, diff.b.audit.cost
    if costs[0] is None or costs[1] is None:
        return ""
    a, b = costs[0].estimated_cycles, costs[1].estimated_cycles
    if a == b:
        return f"the compiler estimates {a:,} cycles for both"
    share = f" ({100 * (b - a) / a:+.1f}%)" if a else ""
    return f"the compiler estimates {b:,} cycles for {diff.b.name}, {a:,} for {diff.a.name}{share}"


@dataclass(frozen=True)
class NumberRow:
    """A number of both sides, as text.

    Attributes:
        name: of what.
        change: with its sign; ``""`` for none.
        worse: whether it is more than before.
    """

    name: str
    a: str
    b: str
    change: str
    worse: bool


def number_rows(diff: Diff) -> Iterator[NumberRow]:
    """The estimated cycles, the rules, what is copied and what is sent, on both sides."""
    cost = [side.audit.cost for side in (diff.a, diff.b)]
    if cost[0] or cost[1]:
        yield _row("est. cycles", Both(*(one.estimated_cycles if one else None for one in cost)))
    for rule in diff.rules:
        yield _row(f"{rule.rule.code} {rule.rule.slug}", rule.counts)
        if rule.bytes.a or rule.bytes.b:
            yield _row("  bytes", rule.bytes, as_bytes=True)
    for place, (a, b) in diff.copies.items():
        moved = Both(a.traffic.hbm_bytes, b.traffic.hbm_bytes)
        yield _row(f"HBM, {place} relayouts", moved, as_bytes=True)
    for kind, (a, b) in diff.collectives.items():
        yield _row(kind, Both(a.count, b.count))
        wire = Both(a.traffic.wire_bytes, b.traffic.wire_bytes)
        yield _row("  wire", wire, as_bytes=True)
        padding = [one.traffic.moved_bytes - one.traffic.asked_bytes for one in (a, b)]
        if max(padding) >= BULK_BYTES:
            yield _row("  padding", Both(*padding), as_bytes=True)


def _row(name: str, both: Both, *, as_bytes: bool = False) -> NumberRow:
    def form(value: int | None) -> str:
        if value is None:
            return "-"
        return exact_bytes(value) if as_bytes else f"{value:,}"

    change = both.difference or 0
    text = f"{'+' if change > 0 else ''}{form(change)}" if change else ""
    return NumberRow(name, form(both.a), form(both.b), text, change > 0)


def parted(diff: Diff) -> list[str]:
    """Where they part ways, a sentence for each place."""
    if not diff.partings:
        return [f"no pass parts them: {diff.no_parting}"] if diff.no_parting else []
    return [_parted(diff, one, number) for number, one in enumerate(diff.partings)]


def _parted(diff: Diff, parting: Parting, number: int) -> str:
    where = f"{parting.pipeline}, {parting.after}" if parting.after else parting.label
    if number:
        start = f"and from {where} on more differs"
    elif parting.step == 0:
        start = "they differ from the start"
    else:
        start = f"they part at {where}"
    sides = [
        f"{side.name} has {listed}"
        for side, only in ((diff.a, parting.only_a), (diff.b, parting.only_b))
        if (listed := bulk_listed(only))
    ]
    return f"{start}: {'; '.join(sides)}"


def bulk_listed(found: Bulk, most: int = _MOST_BULK) -> str:
    """What is done in bulk: ``transpose f32[512,32000], 2 dot f32[512,512]``."""
    parts = [
        " ".join(part for part in ("" if count == 1 else str(count), what, shape) if part)
        for (what, shape), count in sorted(found.items())
    ]
    rest = len(parts) - most
    return ", ".join(parts[:most]) + (f" and {rest} more" if rest > 0 else "")


def fixes(diff: Diff) -> list[tuple[str, OfferedFix]]:
    """The fixes for the findings that one side alone has, else for those that both have; those of
    most findings first, each with the name of the side."""
    found: list[tuple[str, OfferedFix]] = []
    for name, side, findings in (
        (diff.b.name, diff.b, [f for one in diff.rules for f in one.only_b]),
        (diff.a.name, diff.a, [f for one in diff.rules for f in one.only_a]),
        ("both", diff.a, [f for one in diff.rules for f in one.in_both]),
    ):
        if name == "both" and found:
            break
        mine = replace(side.audit, findings=tuple(findings))
        found += [(name, fix) for fix in offered_fixes(mine)]
    return sorted(found, key=lambda one: -one[1].findings)


def stored(shape: Shape | None) -> str:
    """Shape and layout of an entry row; ``""`` where a side has none."""
    return "" if shape is None else str(shape)


def largest(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Those that do something, the largest result first."""
    return sorted(
        (one for one in instructions if one.opcode not in _PLUMBING),
        key=lambda one: -one.shape.logical_bytes,
    )
