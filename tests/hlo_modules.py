"""HLO modules drawn from nothing.

A module is drawn as data, see ``drawn_hlo.py``. Shapes fit together as XLA's do, so that rules
follow the values as far as they would in a real module.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from drawn_hlo import (
    ODDITIES,
    Attribute,
    Body,
    Frames,
    Groups,
    HloModule,
    Line,
    Read,
    printed_shape,
    quoted,
)
from hlo_audit.hlo import (
    Alias,
    EntryLayout,
    Layout,
    Metadata,
    Shape,
)

_T = TypeVar("_T")
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Choices:
    """Choices made by bytes that hypothesis has drawn: each byte or two is one.

    To draw every choice by itself takes a hundred times as long. Where no byte is left, and for
    zeros, each choice is the first and the least: that is where hypothesis takes what fails.
    """

    def __init__(self, data: bytes, texts: Sequence[str] = ()) -> None:
        self._left = iter(data)
        self.texts = (*_TEXTS, *texts)

    def number(self, least: int, most: int) -> int:
        span = most - least + 1
        found = next(self._left, 0)
        if span > 256:
            found = found << 8 | next(self._left, 0)
        return least + found % span

    def one_in(self, count: int) -> bool:
        """True in one of ``count`` cases."""
        return self.number(0, count - 1) == count - 1

    def choose(self, choices: Sequence[_T]) -> _T:
        return choices[self.number(0, len(choices) - 1)]

    def order(self, count: int) -> tuple[int, ...]:
        """The numbers from 0 on in any order."""
        left = list(range(count))
        return tuple(left.pop(self.number(0, len(left) - 1)) for _ in range(count))

    def text(self) -> str:
        return self.choose(("", "/")).join(
            self.choose(self.texts) for _ in range(self.number(0, 4))
        )


_TEXTS = (
    *("jit(step)", "transpose(jvp())", "dot_general", "while/body", "é", "a b", "x.1", ""),
    *('"', "\\", "{", "}", "(", ")", ",", "=", "#", "/*", "*/", "%p", "\n", "\x07", " ROOT "),
)

# -- shapes

ARRAY_TYPES = ("f32", "bf16", "s32", "pred", "u8", "s4", "f8e4m3fn", "c64")
_SIZES = (1, 2, 8, 128, 512, 3, 0, 4096)
_TILES = ((), ((8, 128),), ((8, 128), (2, 1)), ((128,),), ((-1, 4),))
_OTHER = ("", "", "", "L(1024)", "E(4)", "SC(0:128,256)", "P(f32[2]{0:T(128)})", "#(u32)")


def draw_layout(c: Choices, rank: int) -> Layout | None:
    kind = c.number(0, 5)
    if kind == 0:
        return None
    order = tuple(range(rank))[::-1] if kind < 4 else c.order(rank)
    if kind in (1, 2):
        return Layout(order)
    return Layout(order, c.choose(_TILES), c.choose((0, 0, 1, 5, 6)), c.choose(_OTHER))


def draw_array(c: Choices, least_rank: int = 0) -> Shape:
    sizes = tuple(c.choose(_SIZES) for _ in range(c.number(least_rank, 4)))
    return Shape(c.choose(ARRAY_TYPES), sizes, draw_layout(c, len(sizes)))


def draw_shape(c: Choices, depth: int = 0) -> Shape:
    """An array, a token or a tuple of these, a few deep."""
    kind = c.number(0, 15)
    if kind == 15:
        return Shape("token")
    if kind < 11 or depth == 3:
        return draw_array(c)
    return tuple_of([draw_shape(c, depth + 1) for _ in range(c.choose((0, 1, 2, 2, 3, 6)))])


def tuple_of(elements: Sequence[Shape]) -> Shape:
    return Shape("tuple", elements=tuple(elements))


# -- attributes


def draw_metadata(c: Choices, frames: Frames) -> Attribute:
    op_name = c.text()
    text = f"op_name={quoted(op_name)}"
    kind = c.number(0, 3)
    if kind == 0:
        found = Metadata(op_name)
    elif kind < 3 and frames.rows:
        frame_id = c.number(1, len(frames.rows))
        found = Metadata(op_name, stack_frame_id=frame_id)
        text += f" stack_frame_id={frame_id}"
    else:
        file, line = c.text(), c.number(1, 10_000)
        found = Metadata(op_name, "mul", source_file=file, source_line=line)
        text = f'op_type="mul" {text} source_file={quoted(file)} source_line={line}'
        text += f" source_end_line={line} source_column=1 source_end_column=9"
    return Attribute("metadata", f"{{{text}}}", found)


_UNKNOWN_CYCLES = 9223372036854775807
"""The compiler's mark for a cost that it does not know."""


def draw_backend_config(c: Choices) -> Attribute:
    """JSON, plain or as an escaped string."""
    cycles = c.choose((0, 7, 700, 123_456_789, _UNKNOWN_CYCLES))
    config: dict[str, Any] = {"flag_configs": []}
    if not c.one_in(3):
        config["window_config"] = {"kernel_bounds": ["1"], "estimated_cycles": str(cycles)}
    if c.one_in(2):
        config[c.text()] = c.choose((None, True, 1.5, -1, c.text(), [c.text()], {c.text(): {}}))
    text = json.dumps(config, separators=(",", ":"), ensure_ascii=c.one_in(2))
    return Attribute("backend_config", quoted(text) if c.one_in(3) else text, config)


def draw_sharding(c: Choices) -> Attribute:
    kind, shards = "tiled", tuple(c.choose((1, 2, 4)) for _ in range(c.number(1, 3)))
    printed = ",".join(map(str, shards))
    count = math.prod(shards)
    match c.number(0, 7):
        case 0:
            text = f"devices=[{printed}]<=[{count}]"
        case 1:
            text = f"devices=[{printed},2]<=[2,{count}]T(1,0) last_tile_dim_replicate"
        case 2:
            text = f"devices=[{printed}]{','.join(map(str, range(count)))}"
        case 3:
            text = f"devices=[{printed},2,1]<=[{count * 2}] last_tile_dims={{manual, replicated}}"
        case 4:
            axes = [f"'a{number}'={size}" for number, size in enumerate(shards)]
            cut = ", ".join(f"{{'a{number}'}}" for number in range(len(shards)))
            text = f"mesh[{','.join(axes)}], [{cut}]"
        case 5:
            kind, text = "tuple", "{replicated}, {devices=[2]<=[2]}, {manual}"
        case _:
            kind = c.choose(("replicated", "manual", "maximal"))
            text = kind + (" device=0" if kind == "maximal" else "")
    if kind == "tiled" and count == 1:
        kind = "replicated"
    return Attribute("sharding", f"{{{text}}}", (kind, shards if kind == "tiled" else ()))


def _as_groups(devices: np.ndarray[Any, Any]) -> Groups:
    return tuple(tuple(map(int, row)) for row in devices)


def draw_replica_groups(c: Choices, device_count: int) -> Attribute:
    """In any of the printed forms; what is meant is worked out by numpy's reshape and transpose."""
    devices = np.arange(device_count)
    sizes = [n for n in range(1, device_count + 1) if device_count % n == 0]
    size = c.choose(sizes)
    outer = device_count // size
    match c.number(0, 6):
        case 0:
            found = _as_groups(np.array(c.order(device_count)).reshape(outer, size))
            listed = ",".join(f"{{{','.join(map(str, group))}}}" for group in found)
            return Attribute("replica_groups", f"{{{listed}}}", found)
        case 1:
            return Attribute("replica_groups", "{}", (tuple(range(device_count)),))
        case 2:
            text = f"[{outer},{size}]<=[{device_count}]"
            return Attribute("replica_groups", text, _as_groups(devices.reshape(outer, size)))
        case 3:
            groups = _as_groups(devices.reshape(size, outer).T)
            text = f"[{outer},{size}]<=[{size},{outer}]T(1,0)"
            return Attribute("replica_groups", text, groups)
        case 4:  # a part of an axis
            text = f"mesh['a'={device_count}] {{'a':({outer}){size}}}"
            return Attribute("replica_groups", text, _as_groups(devices.reshape(outer, size)))
        case _:
            mesh = devices.reshape(outer, size)
            ids = ""
            if c.one_in(3):
                mesh = devices.reshape(size, outer).T
                ids = f", device_ids=([{size},{outer}]T(1,0))"
            named = c.choose((("y",), ("x",), ("x", "y"), ("y", "x")))
            rest = [axis for axis in ("x", "y") if axis not in named]
            turned = mesh.transpose(["xy".index(axis) for axis in (*rest, *named)])
            grouped = math.prod({"x": outer, "y": size}[axis] for axis in named)
            names = ",".join(f"'{axis}'" for axis in named)
            text = f"mesh['x'={outer},'y'={size}]{ids} {{{names}}}"
            return Attribute("replica_groups", text, _as_groups(turned.reshape(-1, grouped)))


_KERNEL_METADATA = (
    "{kernel_metadata={}}",
    '{kernel_metadata={\n"xprof_metadata":"{\\"tile_m\\": 512}"\n}}',
    '{kernel_metadata={\n"a":"}",\n"b":"{",\n"c":"%x = f32[] add(%x)"\n}}',
    '{is_spmd_generated="true"}',
    '{xla.sdy.sharding="#sdy.sharding_per_value<[<@mesh, [{\\"x\\"}, {}]>]>"}',
)


# -- computations

_ODD_NAMES = (
    *("x", "p0", "param_0.132", "ROOT", "ENTRY", "HloModule", "_", "a__b--c..d", "f32", "index"),
    *("metadata", "calls", "fusion.1.clone.2.remat", "größe", "A" * 90, "parameter", "body"),
)


def unused(name: str, taken: Mapping[str, Any]) -> str:
    """``name``, with the first number that makes it one that is not ``taken``."""
    if name not in taken:
        return name
    return next(one for n in itertools.count(1) if (one := f"{name}.{n}") not in taken)


_ELEMENTWISE = ("add", "subtract", "multiply", "maximum", "and")
_UNARY = ("negate", "copy", "convert", "bitcast", "transpose", "reshape", "all-reduce-done")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "all-gather-start")
_LITERALS = ("0", "-inf", "nan", "{...}", "{1, 2, 3}", "{ { 1, 2 }, { 3, 4 } }", "(1, -2)", "true")

_SIMPLE = ("elementwise", "unary", "constant", "tuple", "element", "custom-call", "dot", "iota")
_KINDS = (*_SIMPLE, "elementwise", "unary", "unary", "tuple", "collective", "permute", "copy-start")


class _BodyDrawing:
    """A computation in the drawing."""

    def __init__(self, frames: Frames, device_count: int, *, is_plain: bool) -> None:
        self.c = Choices(b"")
        self.frames = frames
        self.device_count = device_count
        self.is_plain = is_plain
        self.lines: dict[str, Line] = {}
        self.values: list[tuple[Read, Shape]] = []

    def add(
        self,
        opcode: str,
        shape: Shape,
        reads: Sequence[Read] = (),
        *attributes: Attribute,
        literal: str = "",
    ) -> Read:
        c = self.c
        base = c.choose(_ODD_NAMES) if c.one_in(16) else opcode
        name = unused(base, self.lines)
        extra: list[Attribute] = []
        chance = c.number(0, 15)
        if chance in (4, 5, 6, 7):
            extra.append(draw_metadata(c, self.frames))
        elif chance == 8:
            extra += [draw_sharding(c), draw_metadata(c, self.frames)]
        elif chance in (9, 10) and not any(a.name == "backend_config" for a in attributes):
            extra.append(draw_backend_config(c))
        elif chance == 11:
            extra.append(Attribute("frontend_attributes", c.choose(_KERNEL_METADATA)))
        oddity = c.choose(ODDITIES) if not self.is_plain and c.one_in(16) else ""
        if oddity == "operands over lines" and len(reads) < 2:
            oddity = "tabs"
        line = Line(
            name,
            shape,
            opcode,
            tuple(reads),
            literal,
            attributes=(*attributes, *extra),
            oddity=oddity,
        )
        self.lines[name] = line
        self.values += _elements(Read(name), shape)
        return Read(name)

    def value(self) -> tuple[Read, Shape]:
        """Any, most often one of the last few; where there is none, a constant is made."""
        return self._one_of(self.values, 0, 4)

    def array(self, least_rank: int = 0, most_rank: int = 9) -> tuple[Read, Shape]:
        fitting = [
            (read, shape)
            for read, shape in self.values
            if _is_array(shape) and least_rank <= shape.rank <= most_rank
        ]
        return self._one_of(fitting, least_rank, most_rank)

    def _one_of(
        self, fitting: Sequence[tuple[Read, Shape]], least_rank: int, most_rank: int
    ) -> tuple[Read, Shape]:
        if not fitting:
            shape = draw_array(self.c, least_rank)
            shape = replace(shape, dimensions=shape.dimensions[:most_rank], layout=None)
            return self.add("constant", shape, literal="{...}"), shape
        last = len(fitting) - 1
        reach = last if self.c.one_in(4) else min(5, last)
        return fitting[last - self.c.number(0, reach)]

    def value_of(self, shape: Shape) -> Read:
        """One of this very shape; where there is none, it is made."""
        for read, other in reversed(self.values):
            if other == shape:
                return read
        if not shape.is_tuple:
            return self.add("constant", shape, literal="{...}")
        return self.add("tuple", shape, [self.value_of(element) for element in shape.elements])

    def add_one(self, known: Sequence[Body]) -> None:
        kind = self.c.choose((*_KINDS, "call") if known else _KINDS)
        match kind:
            case "elementwise":
                read, shape = self.array()
                others = [other for other, one in self.values if one == shape]
                other = self.c.choose(others[-8:])
                self.add(self.c.choose(_ELEMENTWISE), shape, [read, other])
            case "unary":
                self.add_unary()
            case "constant":
                literal = self.c.choose(_LITERALS)
                shape = draw_array(self.c)
                self.add("constant", shape, literal=literal)
            case "iota":
                self.add("iota", draw_array(self.c), (), Attribute("iota_dimension", "0"))
            case "tuple":
                parts = [self.value() for _ in range(self.c.choose((0, 1, 2, 2, 3, 5, 6, 11)))]
                shape = tuple_of([shape for _, shape in parts])
                if _depth(shape) < 5:
                    self.add("tuple", shape, [read for read, _ in parts])
            case "element":
                self.add_element()
            case "custom-call":
                self.add_custom_call()
            case "dot":
                self.add_dot()
            case "collective":
                self.add_collective()
            case "permute":
                read, shape = self.array()
                pairs = Attribute("source_target_pairs", "{{0,1},{1,0}}")
                self.add("collective-permute", shape, [read], Attribute("channel_id", "1"), pairs)
            case "copy-start":
                read, shape = self.array()
                started = tuple_of([shape, shape, Shape("u32", (), Layout(()))])
                start = self.add("copy-start", started, [read])
                self.add("copy-done", shape, [start])
            case _:
                self.add_call(self.c.choose(known), known)

    def add_unary(self) -> None:
        read, shape = self.array()
        opcode = self.c.choose(_UNARY)
        layout = draw_layout(self.c, shape.rank)
        match opcode:
            case "transpose":
                order = self.c.order(shape.rank)
                sizes = tuple(shape.dimensions[d] for d in order)
                turned = Attribute("dimensions", f"{{{','.join(map(str, order))}}}", order)
                self.add(opcode, Shape(shape.element_type, sizes, layout), [read], turned)
            case "reshape":
                flat = Shape(shape.element_type, (math.prod(shape.dimensions),), None)
                self.add(opcode, flat, [read])
            case "convert":
                self.add(opcode, replace(shape, element_type=self.c.choose(ARRAY_TYPES)), [read])
            case "copy" | "bitcast":
                self.add(opcode, replace(shape, layout=layout), [read])
            case _:
                self.add(opcode, shape, [read])

    def add_element(self) -> None:
        tuples = [(read, shape) for read, shape in self.values if shape.elements]
        if not tuples:
            return
        read, shape = self.c.choose(tuples[-8:])
        index = self.c.number(0, len(shape.elements) - 1)
        self.add("get-tuple-element", shape.elements[index], [read], Attribute("index", str(index)))

    def add_custom_call(self) -> None:
        parts = [self.value()[0] for _ in range(self.c.choose((0, 1, 1, 2, 7)))]
        target = self.c.choose(("tpu_custom_call", "Sharding", "xla.sdy.FuncResultSharding", 'a"b'))
        self.add(
            "custom-call",
            draw_shape(self.c),
            parts,
            Attribute("custom_call_target", quoted(target), target),
            Attribute("operand_layout_constraints", "{f32[8]{0}, (s32[], token[])}"),
        )

    def add_dot(self) -> None:
        left, one = self.array(2, 2)
        right, other = self.array(2, 2)
        contracted = self.c.number(0, 1), self.c.number(0, 1)
        sizes = one.dimensions[1 - contracted[0]], other.dimensions[1 - contracted[1]]
        self.add(
            "dot",
            Shape("f32", sizes, draw_layout(self.c, 2)),
            [left, right],
            Attribute("lhs_contracting_dims", f"{{{contracted[0]}}}"),
            Attribute("rhs_contracting_dims", f"{{{contracted[1]}}}"),
        )

    def add_collective(self) -> None:
        read, shape = self.array(1)
        opcode = self.c.choose(_COLLECTIVES)
        groups = draw_replica_groups(self.c, self.device_count)
        size = len(groups.means[0])
        dimension = self.c.number(0, shape.rank - 1)
        sizes = list(shape.dimensions)
        if opcode == "reduce-scatter":
            sizes[dimension] //= size
        elif opcode.startswith("all-gather"):
            sizes[dimension] *= size
        result = replace(shape, dimensions=tuple(sizes))
        attributes = [Attribute("channel_id", "1"), groups]
        if opcode != "all-reduce":
            attributes.append(Attribute("dimensions", f"{{{dimension}}}", (dimension,)))
        attributes.append(Attribute("use_global_device_ids", "true"))
        if opcode == "all-gather-start":
            start = self.add(opcode, tuple_of([shape, result]), [read], *attributes)
            self.add("all-gather-done", result, [start])
        else:
            self.add(opcode, result, [read], *attributes)

    def add_call(self, callee: Body, known: Sequence[Body]) -> None:
        """Call ``callee`` with a value of the right shape for each of its parameters."""
        parameters = {
            int(line.literal): line.shape for line in callee.lines if line.opcode == "parameter"
        }
        operands = [self.value_of(parameters[number]) for number in sorted(parameters)]
        result = callee.root.shape
        name = callee.name

        def called(key: str, *names: str) -> Attribute:
            percents = [f"%{one}" for one in names]
            listed = percents[0] if len(names) == 1 else f"{{{', '.join(percents)}}}"
            return Attribute(key, listed, names)

        choices = ["fusion", "fusion", "call", "async", "conditional", "map"]
        if len(operands) == 1 and result == next(iter(parameters.values())):
            choices += ["while"] * 6
        match self.c.choose(choices):
            case "fusion":
                kind = Attribute("kind", self.c.choose(("kLoop", "kOutput", "kCustom", "kInput")))
                self.add("fusion", result, operands, kind, called("calls", name))
            case "while":
                condition = self.c.choose(known).name
                trips = {"known_trip_count": {"n": str(self.c.number(0, 9))}}
                self.add(
                    "while",
                    result,
                    operands,
                    called("condition", condition),
                    called("body", name),
                    Attribute("backend_config", json.dumps(trips), trips),
                )
            case "async":
                thread = Attribute("async_execution_thread", quoted(callee.thread or "main"))
                started = tuple_of(
                    [tuple_of([parameters[n] for n in sorted(parameters)]), result, Shape("u32")]
                )
                start = self.add("async-start", started, operands, thread, called("calls", name))
                if self.c.number(0, 2) == 0:
                    start = self.add("async-update", started, [start])
                self.add("async-done", result, [start])
            case "conditional":
                names = [
                    name,
                    *(self.c.choose(known).name for _ in range(self.c.number(0, 2))),
                ]
                self.add("conditional", result, operands, called("branch_computations", *names))
            case "map":
                reducer = called("to_apply", name)
                self.add("map", result, operands, Attribute("dimensions", "{0}", (0,)), reducer)
            case opcode:
                self.add(opcode, result, operands, called("to_apply", name))


def _elements(read: Read, shape: Shape) -> Iterator[tuple[Read, Shape]]:
    yield read, shape
    for index, element in enumerate(shape.elements):
        yield from _elements(Read(read.name, (*read.element, index)), element)


def _is_array(shape: Shape) -> bool:
    return not shape.is_tuple and shape.element_type != "token"


def _depth(shape: Shape) -> int:
    return 1 + max(map(_depth, shape.elements), default=0)


@dataclass(frozen=True)
class _Seeds:
    """What a computation is made by: bytes for itself, and some for each of its lines."""

    whole: bytes
    lines: list[bytes]


def _seeds(most_lines: int) -> st.SearchStrategy[_Seeds]:
    line = st.binary(min_size=40, max_size=40)
    lines = st.lists(line, min_size=most_lines // 2, max_size=most_lines)
    return st.builds(_Seeds, st.binary(min_size=80, max_size=80), lines)


def _draw_body(
    name: str, seeds: _Seeds, known: Sequence[Body], drawing: _BodyDrawing, texts: Sequence[str]
) -> Body:
    c = drawing.c = Choices(seeds.whole, texts)
    is_loop = c.one_in(3)
    place, says_root = c.number(0, 7), not c.one_in(8)
    thread = c.choose(("",) * 8 + ("sparsecore", "host"))
    is_signed = not c.one_in(5)
    for number in range(1 if is_loop else c.number(0, 3)):
        drawing.add("parameter", draw_shape(c), literal=str(number))
    for data in seeds.lines:
        drawing.c = Choices(data, texts)
        drawing.add_one(known)
    drawing.c = c
    if is_loop:  # what it returns is of the shape that it takes: it may be a loop's body
        first = next(iter(drawing.lines.values()))
        if first.shape.is_tuple:
            parts = [drawing.value_of(shape) for shape in first.shape.elements]
            drawing.add("tuple", first.shape, parts)
        else:
            drawing.add("opt-barrier", first.shape, [drawing.value_of(first.shape)])
    if not drawing.lines:
        drawing.value()
    lines = list(drawing.lines.values())
    # The root is most often the last; then the text may leave that unsaid.
    root = {6: 0, 7: len(lines) // 2}.get(place, len(lines) - 1)
    lines[root] = replace(lines[root], is_root=says_root or root < len(lines) - 1)
    if c.one_in(16):  # no compiler prints that
        lines[0] = replace(lines[0], is_root=True)
    return Body(name, tuple(lines), thread, is_signed)


# -- modules


def _draw_frames(c: Choices) -> Frames:
    if not c.one_in(2):
        return Frames()
    files = tuple(c.text() for _ in range(c.number(1, 3)))
    functions = tuple(c.text() for _ in range(c.number(1, 3)))
    locations = tuple(
        (c.number(0, len(files) - 1), c.number(0, len(functions) - 1), c.number(1, 9_999))
        for _ in range(c.number(1, 4))
    )
    rows: list[tuple[int, int | None]] = []
    for place in range(c.number(1, 5)):
        parent = c.number(-1, place - 1)
        rows.append((c.number(0, len(locations) - 1), None if parent < 0 else parent))
    return Frames(files, functions, locations, tuple(rows))


_BODY_NAMES = (
    *("fused_computation", "region_0.1", "body", "cond.2_spmd", "ENTRY", "add.clone", "größe"),
    *("all-reduce-scatter.1", "async_wrapped"),
)


@st.composite
def modules(draw: Draw, *, most_bodies: int = 5, most_lines: int = 8) -> HloModule:
    """Whole modules, all of whose text is well-formed."""
    texts = draw(_ODD_TEXTS)
    c = Choices(draw(st.binary(min_size=160, max_size=160)), texts)
    drawn = draw(st.lists(_seeds(most_lines), min_size=1, max_size=most_bodies))
    device_count = c.choose((1, 2, 4, 6, 8))
    frames = _draw_frames(c)
    is_plain = c.one_in(2)
    known: list[Body] = []
    for seeds in drawn:
        base = "main.7_spmd" if seeds is drawn[-1] else c.choose(_BODY_NAMES)
        name = unused(base, {body.name: body for body in known})
        drawing = _BodyDrawing(frames, device_count, is_plain=is_plain)
        known.append(_draw_body(name, seeds, known, drawing, texts))
    return HloModule(
        c.choose(("jit_step", "jit__lambda_.3", "m-1", "größe")),
        tuple(known),
        len(known) - 1,
        tuple(_draw_header(c, known[-1], device_count)),
        frames,
        has_percents=not c.one_in(8),
        has_operand_shapes=c.one_in(6),
        header_over_lines=c.one_in(8),
    )


_ODD_TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=6),
    max_size=2,
)


def _draw_header(c: Choices, entry: Body, device_count: int) -> list[Attribute]:
    taken = [line.shape for line in entry.lines if line.opcode == "parameter"]
    result = entry.root.shape
    found = [
        Attribute("is_scheduled", "true"),
        Attribute(
            "entry_computation_layout",
            f"{{({', '.join(map(printed_shape, taken))})->{printed_shape(result)}}}",
            EntryLayout(tuple(taken), result),
        ),
    ]
    if taken and c.one_in(2):
        aliases = tuple(
            Alias(
                output,
                c.number(0, len(taken) - 1),
                c.choose(((), (0,), (1, 1))),
                c.choose(("may-alias", "must-alias")),
            )
            for output in ((), (0,), (1, 2))[: c.number(0, 3)]
        )
        listed = ", ".join(
            f"{_index(a.output_index)}: "
            f"({a.parameter_number}, {_index(a.parameter_index)}, {a.kind})"
            for a in aliases
        )
        found.append(Attribute("input_output_alias", f"{{ {listed} }}", aliases))
    if device_count > 1:
        found.append(Attribute("num_partitions", str(device_count), device_count))
    if c.one_in(2):
        found.append(Attribute("frontend_attributes", f"{{arg_layout_modes={quoted(c.text())}}}"))
    return [found[place] for place in c.order(len(found))]


def _index(path: Sequence[int]) -> str:
    return f"{{{', '.join(map(str, path))}}}"
