"""The pass at which two compiles part ways.

Two snapshots are held to be alike where they do the same in bulk (:func:`bulk`): the products, the
transposes, the copies that turn a buffer, the collectives. Annotations are no part of it, so that a
program under auto and under explicit sharding are alike as long as XLA does the same with both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from hlo_audit.dump import ModuleDump, Snapshot
from hlo_audit.hlo import Computation

BULK_BYTES = 64 << 10
"""What is smaller is left out of :func:`bulk`: the floor of the rules, see HLA002."""

Bulk = Counter[tuple[str, str]]
"""(what, shape) -> how often; see :func:`bulk`."""


@dataclass(frozen=True)
class Parting:
    """Where two compiles part ways.

    Attributes:
        label: the snapshot: ``simplification-1: algsimp``, or ``before_optimizations``.
        pipeline, after: its pipeline and the pass that has just run; ``""`` for a stage.
        step: how many snapshots stand before it in the two dumps, merged.
        only_a, only_b: what each side has there that the other has not, on top of what they
            differed in before.
    """

    label: str
    pipeline: str
    after: str
    step: int
    only_a: Bulk
    only_b: Bulk


_REPEATED = re.compile(r"\b(apply-xla-transforms)-\d+")
_COLLECTIVES = (
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute"),
    *("ragged-all-to-all", "reduce-scatter"),
)
_IN_BULK = frozenset(
    (
        *_COLLECTIVES,
        *(f"{opcode}-start" for opcode in _COLLECTIVES),
        *("convolution", "copy", "custom-call", "dot", "dynamic-update-slice", "gather"),
        *("scatter", "sort", "transpose", "while"),
    )
)


def bulk(computation: Computation) -> Bulk:
    """What a computation does in bulk: products, transposes, copies that turn a buffer, gathers and
    scatters, sorts, kernels, collectives and loops, from :data:`BULK_BYTES` on, by shape.

    Left out are annotations and the copies that stand in for them, all that works element by
    element, names, metadata, and layouts (but those that a copy changes).
    """
    found: Bulk = Counter()
    for instruction in computation.of_opcodes(_IN_BULK):
        opcode, shape = instruction.opcode, instruction.shape
        if opcode == "while":
            found["while", ""] += 1
            continue
        if shape.logical_bytes < BULK_BYTES:
            continue
        what = opcode.removesuffix("-start")
        if opcode == "custom-call":
            if instruction.custom_call_target != "tpu_custom_call":
                continue
            what = "tpu_custom_call"
        elif opcode == "copy":
            source = instruction.operand_values[0].shape if instruction.operands else shape
            if source.is_tuple or shape.is_tuple or source.moving_order == shape.moving_order:
                continue
            what = "copy {} to {}".format(
                *(f"{{{','.join(map(str, one.minor_to_major))}}}" for one in (source, shape))
            )
        elif opcode == "transpose":
            # A dimension of size 1 lies anywhere at no cost; damage may name one that is not there.
            sizes = instruction.operand_values[0].shape.dimensions if instruction.operands else ()
            moved = [d for d in instruction.dimensions if d < len(sizes) and sizes[d] != 1]
            if moved == sorted(moved):
                continue
        elif opcode == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
            what = "reduce-scatter"
        elif opcode.endswith("-start") and shape.is_tuple:
            shape = instruction.operand_values[0].shape if instruction.operands else shape
        found[what, shape.without_layout] += 1
    return found


class _Reader:
    """The snapshots of a dump, one after the other, as what they do in bulk."""

    def __init__(self, dump: ModuleDump) -> None:
        self._snapshots = dump.read_all()
        # A pass leaves most computations as they are, and then they are the same objects.
        self._known: dict[Computation, Bulk] = {}

    def next(self) -> Bulk:
        _, module = next(self._snapshots)
        total: Bulk = Counter()
        known = {}
        for computation in module.computations.values():
            found = self._known.get(computation)
            known[computation] = found = bulk(computation) if found is None else found
            total.update(found)
        self._known = known
        return total


def find_partings(a: ModuleDump | None, b: ModuleDump | None) -> tuple[tuple[Parting, ...], str]:
    """Where they part for good, or why there is no such place.

    Snapshots are put side by side by pipeline and passes, in order; one that only one side has
    stands against the last of the other. A difference that is gone again later does not count.
    """
    if a is None or b is None:
        return (), "a single file shows no passes"
    if not a.passes or not b.passes:
        return (), "the passes are not in the dump"
    readers = _Reader(a), _Reader(b)
    current: tuple[Bulk, Bulk] = (Counter(), Counter())
    states: list[tuple[Snapshot, Bulk, Bulk]] = []
    for one, other in _aligned(a.snapshots, b.snapshots):
        now_a = readers[0].next() if one is not None else current[0]
        now_b = readers[1].next() if other is not None else current[1]
        current = (now_a, now_b)
        snapshot = other or one
        assert snapshot is not None
        states.append((snapshot, now_a - now_b, now_b - now_a))
    differences = [(only_a, only_b) for _, only_a, only_b in states]
    nothing: tuple[Bulk, Bulk] = (Counter(), Counter())
    first = _first_for_good(differences, nothing, 0)
    if first is None:
        return (), "in every pass both do the same in bulk: they differ in details"
    partings = [_parting(states, first, nothing)]
    if first == 0:
        second = _first_for_good(differences, differences[0], 1)
        if second is not None:
            partings.append(_parting(states, second, differences[0]))
    return tuple(partings), ""


def _first_for_good(
    differences: Sequence[tuple[Bulk, Bulk]], usual: tuple[Bulk, Bulk], start: int
) -> int | None:
    """The first place from ``start`` on from which none is ``usual`` any more; ``None`` where the
    last one is."""
    first = None
    for index in range(len(differences) - 1, start - 1, -1):
        if differences[index] == usual:
            break
        first = index
    return first


def _parting(
    states: Sequence[tuple[Snapshot, Bulk, Bulk]], index: int, before: tuple[Bulk, Bulk]
) -> Parting:
    snapshot, only_a, only_b = states[index]
    # What they differed in before may have gone on one side: then the other has it now.
    gone_a, gone_b = before[0] - only_a, before[1] - only_b
    return Parting(
        snapshot.label,
        snapshot.pipeline,
        snapshot.after or snapshot.step,
        index,
        (only_a - before[0]) + gone_b,
        (only_b - before[1]) + gone_a,
    )


def _aligned(
    a: Sequence[Snapshot], b: Sequence[Snapshot]
) -> Iterator[tuple[Snapshot | None, Snapshot | None]]:
    keys = [[_key(snapshot) for snapshot in snapshots] for snapshots in (a, b)]
    blocks = SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_opcodes()
    for tag, a_start, a_end, b_start, b_end in blocks:
        if tag == "equal":
            yield from zip(a[a_start:a_end], b[b_start:b_end], strict=True)
        else:
            yield from ((snapshot, None) for snapshot in a[a_start:a_end])
            yield from ((None, snapshot) for snapshot in b[b_start:b_end])


def _key(snapshot: Snapshot) -> tuple[str, ...]:
    names = (snapshot.pipeline, snapshot.after, snapshot.before, snapshot.step)
    return (snapshot.stage, *(_REPEATED.sub(r"\1", name) for name in names))
