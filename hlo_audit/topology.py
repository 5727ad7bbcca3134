"""The topologies that programs are compiled for, as they are written on the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hlo_audit.errors import UsageError

MOST_TPU_CHIPS = 65_536
"""Seven times the largest pod there is; libtpu takes all memory for shapes far beyond it."""

MOST_CPU_DEVICES = 4_096

# Cloud TPU names a slice by a count of TensorCores or of chips; libtpu by the version and shape.
_CORES_COUNTED_PER_CHIP = {
    "v2": 2,
    "v3": 2,
    "v4": 2,
    "v5litepod": 1,
    "v5e": 1,
    "v5p": 2,
    "v6e": 1,
    "tpu7x": 2,
}
_THREE_DIMENSIONAL = ("v4", "v5p", "tpu7x")


@dataclass(frozen=True)
class TpuTopology:
    """A slice of TPU chips, such as ``v5p:2x2x1``.

    Attributes:
        version: of the chip, such as ``v5p``.
        shape: chips along each dimension of the slice.
    """

    version: str
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def chips_per_host_bounds(self) -> tuple[int, int, int] | None:
        """How many chips a host has along x, y, z, where libtpu's default of 2x2x1 cannot be."""
        x, y = self.shape[:2]
        return (math.gcd(x, 2), math.gcd(y, 2), 1) if 1 in (x, y) else None


def parse_tpu_topology(text: str) -> TpuTopology:
    """Read ``VERSION:SHAPE``; which versions and shapes there are is libtpu's to know.

    Raises:
        UsageError: for anything else; for the name of a Cloud TPU accelerator type, such as
            ``v5p-8``, the hint says the topology it stands for.
    """
    version, colon, shape = text.partition(":")
    sizes = shape.split("x")
    if not (
        colon
        and version.isascii()
        and version.isalnum()
        and version == version.lower()
        and 2 <= len(sizes) <= 3
        and all(_is_size(size) for size in sizes)
    ):
        raise UsageError(f"{text!r} is no TPU topology", hint=_topology_hint(text))
    topology = TpuTopology(version, tuple(int(size) for size in sizes))
    if topology.chips > MOST_TPU_CHIPS:
        raise UsageError(f"{text} has {topology.chips:,} chips, more than any TPU pod")
    return topology


def parse_cpu_devices(text: str) -> int:
    """Read the topology of the platform cpu: the number of devices.

    Raises:
        UsageError: where it is no number from 1 to ``MOST_CPU_DEVICES``.
    """
    if not _is_size(text) or int(text) > MOST_CPU_DEVICES:
        raise UsageError(
            f"{text!r} is no number of CPU devices",
            hint=f"the topology of the platform cpu is a number from 1 to {MOST_CPU_DEVICES}",
        )
    return int(text)


def _topology_hint(text: str) -> str:
    name, _, count = text.lower().partition("-")
    per_chip = _CORES_COUNTED_PER_CHIP.get(name)
    if per_chip is None or not _is_size(count):
        return "write VERSION:SHAPE, such as v5p:2x2x1 or v6e:2x4"
    counts = "TensorCores, two a chip" if per_chip == 2 else "chips"
    start = f"{text} is a Cloud TPU accelerator type, which counts {counts}"
    shape = _usual_shape(int(count) // per_chip, three=name in _THREE_DIMENSIONAL)
    version = {"v5litepod": "v5e"}.get(name, name)
    return f"{start}: write {version}:{shape}" if shape else f"{start}: write VERSION:SHAPE"


def _usual_shape(chips: int, *, three: bool) -> str | None:
    """Return the shape that Cloud TPU gives a slice of so many chips, where it is a power of 2."""
    power = chips.bit_length() - 1
    if chips < 1 or chips != 1 << power:
        return None
    if not three or power <= 2:
        sizes = [1 << power // 2, 1 << (power + 1) // 2] + [1] * three
    else:
        sizes = [1 << (power + extra) // 3 for extra in range(3)]
    return "x".join(map(str, sizes))


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and not text.startswith("0")
