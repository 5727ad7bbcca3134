"""What a step costs, estimated: the compiler's cycles, bytes over HBM, bytes over the wire, time.

Nothing here is a measurement. All is per device, and docs/cost.md holds it against measurements.

**Cycles** are the compiler's own, of the scheduled instructions of a TPU module.

**HBM.** A copy that turns a buffer reads all of it and writes all of it: the padded size of its
operand plus that of its result. A buffer that is prefetched or kept in VMEM counts as well: it was
read for the copy, or is written for what the copy made.

**Wire.** What leaves a device that has ``D`` bytes in a group of ``n``, over a ring:

===================================  =====================
all-gather, of ``D/n`` to ``D``      ``(n-1)/n * D``
reduce-scatter, of ``D`` to ``D/n``  ``(n-1)/n * D``
all-reduce                           ``2 (n-1)/n * D``
all-to-all                           ``(n-1)/n * D``
permute, broadcast                   ``D``
===================================  =====================

The first three are the bandwidth-optimal ring algorithms of P. Patarasuk and X. Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69 (2009);
for all-gather and reduce-scatter see also R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of
collective communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005). In an
all-to-all each device sends every part of its data but its own. ``D`` is the padded size: that is
what moves. What was asked for, without the padding, is kept beside it.

**Time** is bytes over bandwidth, see :data:`HARDWARE`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hlo_audit.errors import UsageError
from hlo_audit.hlo import Instruction, Module, Value, element_bits
from hlo_audit.hlo.collectives import COLLECTIVES, CollectiveKind, collective_kind, group_size
from hlo_audit.hlo.dataflow import MOVES, Site, origin
from hlo_audit.hlo.loops import executions, trip_count
from hlo_audit.topology import parse_tpu_topology

COPY_SHARE_OF_HBM = 2.37 / 2.765
"""The share of the HBM bandwidth that relayout copies reach: 2.37 TB/s of the 2.765 TB/s of a v5p
chip, measured on large copies (2.29 to 2.38 TB/s). Taken for other chips too."""


@dataclass(frozen=True)
class Hardware:
    """A TPU chip.

    Attributes:
        version: as topologies name it, such as ``v5p``.
        hbm_bytes_per_second: peak.
        ici_bytes_per_second: over all links of a chip to its neighbours, in one direction.
        ici_links: how many there are.
        clock_hertz: of the TensorCore; ``None`` where no public figure is known to be right.
    """

    version: str
    hbm_bytes_per_second: float
    ici_bytes_per_second: float
    ici_links: int
    clock_hertz: float | None = None

    @property
    def ring_bytes_per_second(self) -> float:
        """What a chip sends in a ring along one axis: to the neighbours on both sides."""
        return self.ici_bytes_per_second * min(2, self.ici_links) / self.ici_links

    @property
    def copy_bytes_per_second(self) -> float:
        """What relayout copies reach, reads and writes together."""
        return self.hbm_bytes_per_second * COPY_SHARE_OF_HBM


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        chip.version: chip
        for chip in (
            Hardware("v4", 1.2e12, 300e9, 6, clock_hertz=1.05e9),
            Hardware("v5e", 0.819e12, 200e9, 4, clock_hertz=1.5e9),
            Hardware("v5p", 2.765e12, 600e9, 6, clock_hertz=1.75e9),
            Hardware("v6e", 1.638e12, 400e9, 4),
            Hardware("tpu7x", 7.38e12, 600e9, 6),
        )
    }
)
"""The chips, by version.

HBM and the bidirectional ICI bandwidth of a chip, of which half is one direction, are those of the
Cloud TPU documentation (docs.cloud.google.com/tpu/docs, pages v4, v5e, v5p, v6e and tpu7x); so is
the number of ICI ports of v5e and v6e. The others are wired as a 3D torus: 6 links. The ICI of v4
and its clock are of N. Jouppi et al., "TPU v4: an optically reconfigurable supercomputer", ISCA
2023, table 4: 6 links of 50 GB/s, 1,050 MHz. The clocks of v5e and v5p follow from the same pages:
peak bf16 FLOP/s (197e12, 459e12) by TensorCores (1, 2), MXUs in each (4), and 2 * 128 * 128
operations in a cycle of an MXU. For v6e and tpu7x the same sum gives no believable clock, so that
there is none.
"""


def hardware_of(topology: str | None, devices: int | None = None) -> Hardware | None:
    """The chip of a topology such as ``v5p:2x2x1``; ``None`` where it is not known.

    Args:
        devices: that the program runs on. Where they are more than the chips, each device has its
            share of the chip.
    """
    try:
        parsed = parse_tpu_topology(topology or "")
    except UsageError:
        return None
    chip = HARDWARE.get(parsed.version)
    if chip is None:
        return None
    share = max(1, (devices or 0) // max(1, parsed.chips))
    return replace(
        chip,
        hbm_bytes_per_second=chip.hbm_bytes_per_second / share,
        ici_bytes_per_second=chip.ici_bytes_per_second / share,
    )


@dataclass(frozen=True)
class Cost:
    """The compiler's own estimate for one step; loops are counted by their trips.

    Attributes:
        estimated_cycles: the sum over scheduled instructions, the compiler's mark for "not known"
            left out.
        unknown_loops: loops without a constant trip count, counted as one trip.
    """

    estimated_cycles: int
    unknown_loops: int

    def seconds(self, hardware: Hardware | None) -> float | None:
        """The cycles as time; ``None`` where the clock is not known."""
        if hardware is None or hardware.clock_hertz is None:
            return None
        return self.estimated_cycles / hardware.clock_hertz


def estimate_cost(module: Module) -> Cost | None:
    """Sum the compiler's own estimates; ``None`` where the module holds none (CPU, GPU, or a
    snapshot from before the code is generated)."""
    runs = executions(module)
    cycles: list[int] = []
    for instruction in module.holding("estimated_cycles"):
        estimate = instruction.estimated_cycles
        if estimate is not None:
            times = runs[instruction.computation.name]
            cycles.append(estimate * (1 if times is None else times))
    unknown = sum(trip_count(module, loop) is None for loop in module.of_opcodes(("while",)))
    return Cost(sum(cycles), unknown) if cycles else None


@dataclass(frozen=True)
class Traffic:
    """What one run of an instruction moves, on each device.

    Attributes:
        hbm_bytes: read and written by a relayout copy; 0 for a collective.
        wire_bytes: sent to other devices by a collective; 0 for a copy.
        moved_bytes: of the values that are copied or sent, padding and all, once.
        asked_bytes: of the same values without what pads them.
    """

    hbm_bytes: int
    wire_bytes: int
    moved_bytes: int
    asked_bytes: int

    def times(self, runs: int | None) -> Traffic:
        """Of several runs; ``None``, where their number is not known, counts as one."""
        by = 1 if runs is None else runs
        return Traffic(
            self.hbm_bytes * by, self.wire_bytes * by, self.moved_bytes * by, self.asked_bytes * by
        )

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.hbm_bytes + other.hbm_bytes,
            self.wire_bytes + other.wire_bytes,
            self.moved_bytes + other.moved_bytes,
            self.asked_bytes + other.asked_bytes,
        )

    def seconds(self, hardware: Hardware | None) -> float | None:
        """How long it takes where nothing else runs; ``None`` where the chip is not known."""
        if hardware is None:
            return None
        return (
            self.hbm_bytes / hardware.copy_bytes_per_second
            + self.wire_bytes / hardware.ring_bytes_per_second
        )


NO_TRAFFIC = Traffic(0, 0, 0, 0)


def traffic_of(
    module: Module, instruction: Instruction, element: int | None = None
) -> Traffic | None:
    """What one run of a copy or of a collective moves.

    Args:
        module: that ``instruction`` is of; the final one.
        element: of a collective of several values, the one that is meant; all by default.

    Returns:
        ``None`` for other instructions, for a copy inside a fusion, which may move nothing of its
        own, and for a collective whose groups are of no known form.
    """
    if instruction.opcode == "copy":
        if not instruction.operands or _is_fused(module, instruction):
            return None
        source = instruction.operand_values[0].shape
        return Traffic(
            source.padded_bytes + instruction.shape.padded_bytes,
            0,
            instruction.shape.padded_bytes,
            instruction.shape.logical_bytes,
        )
    kind = collective_kind(module, instruction)
    return None if kind is None else _collective_traffic(module, instruction, kind, element)


def wire_bytes(kind: CollectiveKind, group: int, held_bytes: int) -> int:
    """What leaves a device over a ring; see the head of this module.

    Args:
        kind: of the collective.
        group: how many devices take part.
        held_bytes: what each holds before: of an all-gather the ``n``-th part of ``D``, else ``D``.
    """
    if group < 2:
        return 0
    if kind == "all-gather":
        return (group - 1) * held_bytes
    if kind in ("collective-permute", "collective-broadcast"):
        return held_bytes
    share = (group - 1) * held_bytes / group
    return round(2 * share if kind == "all-reduce" else share)


def _collective_traffic(
    module: Module, collective: Instruction, kind: CollectiveKind, element: int | None
) -> Traffic | None:
    group = group_size(module, collective)
    if group is None:
        return None
    values = collective.operand_values
    if kind in ("collective-permute", "ragged-all-to-all"):
        values = values[:1]  # the others are buffers to write into, offsets and sizes
    if element is not None:
        values = values[element : element + 1]
    moved = sum(value.shape.padded_bytes for value in values)
    asked = sum(_asked_bytes(module, value) for value in values)
    return Traffic(0, wire_bytes(kind, group, moved), moved, asked)


def _asked_bytes(module: Module, value: Value) -> int:
    """The size of a value without its tiles' padding and without a ``pad`` that made it larger."""
    source = origin(module, Site(value), through=MOVES | {"convert"}).instruction
    if source.opcode != "pad" or not source.operands:
        return value.shape.logical_bytes
    inner = source.operand_values[0].shape
    bits = inner.element_count * element_bits(value.shape.element_type)
    return min(value.shape.logical_bytes, math.ceil(bits / 8))


def _is_fused(module: Module, instruction: Instruction) -> bool:
    return module.is_fused(instruction.computation)


@dataclass(frozen=True)
class Collective:
    """A collective of a module.

    Attributes:
        kind: what it does.
        instruction: its name.
        shape: of what it returns, without layouts.
        group_size: how many devices exchange data with each other.
        executions: how often it runs in a step; ``None`` where that is not known.
        traffic: of one run.
        count: how many it stands for: a report tells those of a kind together.
    """

    kind: CollectiveKind
    instruction: str
    shape: str
    group_size: int
    executions: int | None
    traffic: Traffic
    count: int = 1


def collectives(module: Module) -> Iterator[Collective]:
    """The collectives of a final module whose groups are understood, in its order."""
    for instruction in module.of_opcodes(COLLECTIVES):
        kind = collective_kind(module, instruction)
        group = None if kind is None else group_size(module, instruction)
        if kind is None or group is None:
            continue
        traffic = _collective_traffic(module, instruction, kind, None)
        if traffic is None:
            continue
        times = executions(module)[instruction.computation.name]
        shape = instruction.shape.without_layout
        yield Collective(kind, instruction.name, shape, group, times, traffic)
