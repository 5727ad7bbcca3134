"""Shapes and layouts: ``f32[128,32000]{1,0:T(8,128)S(1)}`` as data.

Sizes follow XLA: an element takes its whole bits (``pred`` a byte), an array without a layout is
row-major, and a tiled array is padded up to whole tiles in its physical order of dimensions
(https://openxla.org/xla/tiled_layout).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

# Real modules nest tuples a few deep; what walks a shape may recurse that far.
_MAX_TUPLE_DEPTH = 100

# Bits of one element as stored; what is not here (token, opaque) takes no space.
_BITS = {
    "pred": 8,
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
}
_SMALL_FLOAT = re.compile(r"f([1-9])e\d+m\d+[a-z0-9]*")
_ARRAY = re.compile(
    r"(?P<type>[a-z][a-z0-9]*+)"
    r"\[(?P<dimensions>[0-9,<=? ]*+)\]"
    r"(?:\{(?P<layout>(?:[^{}]++|\{[^{}]*+\})*+)\})?"
)
_LAYOUT = re.compile(r"(?P<order>[0-9, ]*+)(?P<level_types>D\([^()]*+\))?(?::(?P<suffixes>.*))?")
_SUFFIX = re.compile(r"(?P<name>[A-Z]+|#|\*)(?P<values>(?:\((?:[^()]++|\([^()]*+\))*+\))*+)")
_GROUP = re.compile(r"\(([^()]*+)\)")


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array lies in memory.

    Attributes:
        minor_to_major: dimension numbers, the fastest-moving first.
        tiles: tile sizes from the outermost tiling in; ``-1`` stands for ``*``, a dimension
            combined with the next.
        memory_space: 0 is the device's main memory (HBM).
        other: what else was printed (``E(4)``, ``SC(...)`` and so on), as text.
    """

    minor_to_major: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...] = ()
    memory_space: int = 0
    other: str = ""

    def __str__(self) -> str:
        order = ",".join(map(str, self.minor_to_major))
        tiles = "".join(
            "(" + ",".join("*" if size < 0 else str(size) for size in tile) + ")"
            for tile in self.tiles
        )
        suffix = ("T" + tiles if tiles else "") + self.other
        if self.memory_space:
            suffix += f"S({self.memory_space})"
        return "{" + order + (":" + suffix if suffix else "") + "}"


@dataclass(frozen=True)
class Shape:
    """An array, a tuple of shapes, or a type without elements such as ``token``.

    Attributes:
        element_type: ``f32``, ``bf16``, ...; ``tuple`` for a tuple.
        dimensions: the sizes; a bounded dynamic one by its bound, an unbounded one as ``-1``.
        layout: ``None`` where none is printed.
        elements: the shapes of a tuple.
    """

    element_type: str
    dimensions: tuple[int, ...] = ()
    layout: Layout | None = None
    elements: tuple[Shape, ...] = ()

    @property
    def is_tuple(self) -> bool:
        return self.element_type == "tuple"

    @property
    def rank(self) -> int:
        return len(self.dimensions)

    @cached_property
    def element_count(self) -> int:
        """Elements of an array; 0 for a tuple or where a dimension has no bound."""
        return 0 if self.is_tuple or -1 in self.dimensions else math.prod(self.dimensions)

    @cached_property
    def minor_to_major(self) -> tuple[int, ...]:
        """The order of the dimensions; row-major where no layout is printed."""
        if self.layout is not None and self.layout.minor_to_major:
            return self.layout.minor_to_major
        return tuple(reversed(range(self.rank)))

    @cached_property
    def moving_order(self) -> tuple[int, ...]:
        """``minor_to_major`` without the dimensions of size 1, which lie anywhere at no cost."""
        return tuple(d for d in self.minor_to_major if self.dimensions[d] != 1)

    @property
    def is_row_major(self) -> bool:
        """Whether the last dimension moves fastest, and so on; those of size 1 do not count."""
        return self.moving_order == tuple(sorted(self.moving_order, reverse=True))

    @cached_property
    def logical_bytes(self) -> int:
        """Bytes of the elements alone, rounded up; of a tuple, the sum of its elements'."""
        if self.is_tuple:
            return sum(element.logical_bytes for element in self.elements)
        return (self.element_count * element_bits(self.element_type) + 7) // 8

    @cached_property
    def padded_bytes(self) -> int:
        """Bytes in memory, with the padding to whole tiles; of a tuple, the sum."""
        if self.is_tuple:
            return sum(element.padded_bytes for element in self.elements)
        if self.layout is None or not self.layout.tiles or not self.element_count:
            return self.logical_bytes
        tile = self.layout.tiles[0]
        physical = [self.dimensions[d] for d in reversed(self.minor_to_major)]
        # A tile of more dimensions than the array tiles it as if there were leading ones of size 1.
        physical = [1] * (len(tile) - len(physical)) + physical
        untiled, tiled = (
            physical[: len(physical) - len(tile)],
            physical[len(physical) - len(tile) :],
        )
        count, combined = math.prod(untiled), 1
        for size, tile_size in zip(tiled, tile, strict=True):
            if tile_size < 0:  # "*": this dimension joins the next
                combined *= size
                continue
            count *= -(-size * combined // tile_size) * tile_size
            combined = 1
        return (count * combined * element_bits(self.element_type) + 7) // 8

    @cached_property
    def without_layout(self) -> str:
        """As printed, less the layouts: ``f32[128,32000]``."""
        if self.is_tuple:
            return "(" + ", ".join(element.without_layout for element in self.elements) + ")"
        if self.element_type in ("token", "opaque"):
            return f"{self.element_type}[]"
        return (
            f"{self.element_type}[{','.join(str(d) if d >= 0 else '?' for d in self.dimensions)}]"
        )

    def in_memory_space(self, memory_space: int) -> Shape:
        """The same array in another memory space."""
        if self.layout is None or self.layout.memory_space == memory_space:
            return self
        return replace(self, layout=replace(self.layout, memory_space=memory_space))

    def at(self, index: tuple[int, ...]) -> Shape:
        """The element of a (nested) tuple at ``index``; the shape itself for ``()``."""
        shape = self
        for position in index:
            shape = shape.elements[position]
        return shape

    def __str__(self) -> str:
        if self.is_tuple:
            return "(" + ", ".join(map(str, self.elements)) + ")"
        return self.without_layout + (str(self.layout) if self.layout is not None else "")


def element_bits(element_type: str) -> int:
    """Bits of one stored element; 0 for types without elements or not known."""
    small = _SMALL_FLOAT.fullmatch(element_type)
    return int(small[1]) if small else _BITS.get(element_type, 0)


@lru_cache(maxsize=1 << 16)
def parse_shape(text: str) -> Shape:
    """Read a shape as any XLA prints it.

    Raises:
        ValueError: what is wrong, for text that is no shape.
    """
    open_tuples: list[list[Shape]] = []
    position, end = 0, len(text)
    while True:
        position = _skip_space(text, position)
        shape: Shape | None
        if text.startswith("(", position):
            if len(open_tuples) == _MAX_TUPLE_DEPTH:
                raise ValueError(f"tuple shapes are nested more than {_MAX_TUPLE_DEPTH} deep")
            open_tuples.append([])
            position = _skip_space(text, position + 1)
            if not text.startswith(")", position):
                continue
            shape = None
        else:
            shape, position = _parse_array(text, position)
        while True:
            if shape is not None:
                if not open_tuples:
                    if position != end:
                        raise ValueError(f"{text[position : position + 20]!r} after the shape")
                    return shape
                open_tuples[-1].append(shape)
            position = _skip_space(text, position)
            if text.startswith(",", position):
                position += 1
                break
            if not text.startswith(")", position):
                raise ValueError("tuple shape is not closed")
            position += 1
            shape = Shape("tuple", elements=tuple(open_tuples.pop()))


def _parse_array(text: str, position: int) -> tuple[Shape, int]:
    # A buffer, b(f32[8]): the same array, pinned in place.
    is_buffer = text.startswith("b(", position)
    position += 2 * is_buffer
    match = _ARRAY.match(text, position)
    if match is None:
        raise ValueError(f"{text[position : position + 20]!r} is not a shape")
    dimensions_text = match["dimensions"].strip()
    dimensions = tuple(map(_dimension, dimensions_text.split(","))) if dimensions_text else ()
    layout = None if match["layout"] is None else _parse_layout(match["layout"])
    if not _is_countable(dimensions):
        raise ValueError(f"{match['type']}[...] has more elements than an int64 can count")
    order = layout.minor_to_major if layout is not None else ()
    if order and sorted(order) != list(range(len(dimensions))):
        raise ValueError(
            f"layout {_shorten(match['layout'])} does not order {len(dimensions)} dimensions"
        )
    end = match.end()
    if is_buffer:
        if not text.startswith(")", end):
            raise ValueError("buffer shape is not closed")
        end += 1
    return Shape(match["type"], dimensions, layout), end


def _skip_space(text: str, position: int) -> int:
    """Step over white space and ``/*index=5*/``."""
    while position < len(text):
        if text[position].isspace():
            position += 1
        elif text.startswith("/*", position):
            close = text.find("*/", position)
            if close < 0:
                raise ValueError("comment is not closed")
            position = close + 2
        else:
            break
    return position


def _dimension(text: str) -> int:
    text = text.strip()
    return -1 if text == "?" else _number(text.removeprefix("<="))


def _number(text: str) -> int:
    text = text.strip()
    # No number of a shape has more digits than an int64.
    if not text.isdecimal() or len(text) > 19:
        raise ValueError(f"{_shorten(text)} is not a number")
    return int(text)


def _is_countable(sizes: tuple[int, ...]) -> bool:
    """Whether an int64 can hold the product of sizes, those that are 0 or not known left out."""
    product = 1
    for size in sizes:
        product *= max(size, 1)
        if product >= 1 << 63:
            return False
    return True


def _tile_size(text: str) -> int:
    size = -1 if text.strip() == "*" else _number(text)
    if size == 0:
        raise ValueError("a tile has no size 0")
    return size


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")


@lru_cache(maxsize=1 << 14)
def _parse_layout(text: str) -> Layout:
    match = _LAYOUT.fullmatch(text)
    if match is None:
        raise ValueError(f"{_shorten(text)} is not a layout")
    order = tuple(map(_number, match["order"].split(","))) if match["order"].strip() else ()
    tiles: tuple[tuple[int, ...], ...] = ()
    memory_space = 0
    other = match["level_types"] or ""
    suffixes = match["suffixes"] or ""
    position = 0
    while position < len(suffixes):
        suffix = _SUFFIX.match(suffixes, position)
        if suffix is None or suffix.end() == position:
            raise ValueError(f"{_shorten(text)} is not a layout")
        position = suffix.end()
        groups = _GROUP.findall(suffix["values"])
        if suffix["name"] == "T":
            tiles = tuple(tuple(map(_tile_size, group.split(","))) for group in groups)
            if not all(map(_is_countable, tiles)):
                raise ValueError(f"a tile of {_shorten(text)} is larger than an int64 can count")
        elif suffix["name"] == "S" and len(groups) == 1:
            memory_space = _number(groups[0])
        else:
            other += suffix[0]
    return Layout(order, tiles, memory_space, other)
