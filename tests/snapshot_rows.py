"""Drawn snapshots in a row: a drawn module, and what edits make of it.

Each further snapshot is the one before after some drawn edits, near one another or far apart. Edits
may break the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from drawn_hlo import ODDITIES, Body, Frames, HloModule, Line, Read
from hlo_audit.errors import ParseError
from hlo_audit.hlo import Memo, Module, parse_module
from hlo_modules import (
    Choices,
    Draw,
    draw_array,
    draw_metadata,
    draw_shape,
    modules,
    tuple_of,
    unused,
)

# -- edits of the lines of a computation

Lines = list[Line]


def insert(lines: Lines, c: Choices) -> None:
    """A line more; it may stand between another and what reads that."""
    source = c.choose(lines)
    name = unused(c.choose((source.name, "new", "copy")), {line.name: line for line in lines})
    new = Line(name, source.shape, c.choose(("negate", "copy")), (Read(source.name),))
    if c.one_in(2):
        reread(lines, source.name, name)
    lines.insert(c.number(lines.index(_named(lines, source.name)) + 1, len(lines)), new)


def delete(lines: Lines, c: Choices) -> None:
    """A line less; what reads it reads its operand, another line, or what is no more."""
    if len(lines) == 1:
        return
    gone = lines.pop(c.number(0, len(lines) - 1))
    if gone.reads and not c.one_in(4):
        reread(lines, gone.name, gone.reads[0].name)
    elif c.one_in(2):
        reread(lines, gone.name, c.choose(lines).name)


def change(lines: Lines, c: Choices) -> None:
    place = c.number(0, len(lines) - 1)
    line = lines[place]
    match c.number(0, 7):
        case 0:
            line = replace(line, shape=draw_shape(c))
        case 1 | 2:
            line = replace(line, shape=draw_array(c))
        case 3:
            line = replace(line, opcode=c.choose(("tanh", "exponential", "add", "custom-call")))
        case 4:
            line = replace(line, attributes=(draw_metadata(c, NO_FRAMES),))
        case 5:
            line = replace(line, is_root=not line.is_root)
        case 6:
            line = replace(line, oddity=c.choose(("", *ODDITIES)))
        case _ if line.reads:
            reads = list(line.reads)
            # Most often of a line before it, sometimes of its own or of one behind.
            other = c.choose(lines if c.one_in(6) else lines[: max(place, 1)])
            reads[c.number(0, len(reads) - 1)] = Read(other.name)
            line = replace(line, reads=tuple(reads))
    lines[place] = line


def shrink(lines: Lines, c: Choices) -> None:
    """A tuple loses its last elements, which lines that stay as they are may still read."""
    read = {r.name for line in lines for r in line.reads if r.element}
    places = [n for n, line in enumerate(lines) if line.shape.is_tuple and line.name in read]
    if places:
        place = c.choose(places)
        elements = lines[place].shape.elements
        kept = tuple_of(elements[: c.number(0, max(0, len(elements) - 1))])
        lines[place] = replace(lines[place], shape=kept)


def move(lines: Lines, c: Choices) -> None:
    """A line or some in a row, to a place nearby or any."""
    start = c.number(0, len(lines) - 1)
    block = lines[start : start + c.choose((1, 1, 2, 5))]
    del lines[start : start + len(block)]
    near = max(0, start - 2), min(len(lines), start + 2)
    to = c.number(0, len(lines)) if c.one_in(2) else c.number(*near)
    lines[to:to] = block


def rename(lines: Lines, c: Choices) -> None:
    """A line gets another name, and what reads it follows, or does not."""
    place = c.number(0, len(lines) - 1)
    before = lines[place].name
    taken = {line.name: line for line in lines}
    name = c.choose(lines).name if c.one_in(5) else unused(c.choose((before, "x")), taken)
    lines[place] = replace(lines[place], name=name)
    if not c.one_in(4):
        reread(lines, before, name, start=place)


def swap_names(lines: Lines, c: Choices) -> None:
    """Two lines take each other's names: those that read them stay as they are, to the letter."""
    one, other = c.number(0, len(lines) - 1), c.number(0, len(lines) - 1)
    names = lines[one].name, lines[other].name
    lines[one], lines[other] = (
        replace(lines[one], name=names[1]),
        replace(lines[other], name=names[0]),
    )


def renumber(lines: Lines, c: Choices) -> None:
    """All names from a line on change, as where a computation is cloned."""
    ending = c.choose((".clone", ".1", ".remat"))
    for place in range(c.number(0, len(lines) - 1), len(lines)):
        name = lines[place].name
        lines[place] = replace(lines[place], name=name + ending)
        reread(lines, name, name + ending, start=place)


def double(lines: Lines, c: Choices) -> None:
    """A line again, under its own name or under a new one."""
    line = c.choose(lines)
    taken = {one.name: one for one in lines}
    name = line.name if c.one_in(4) else unused(line.name, taken)
    lines.insert(c.number(0, len(lines)), replace(line, name=name))


def reread(lines: Lines, before: str, after: str, start: int = 0) -> None:
    for place in range(start, len(lines)):
        reads = [replace(r, name=after) if r.name == before else r for r in lines[place].reads]
        lines[place] = replace(lines[place], reads=tuple(reads))


def _named(lines: Lines, name: str) -> Line:
    return next(line for line in lines if line.name == name)


LINE_EDITS: Sequence[Callable[[Lines, Choices], None]] = (
    *(insert, delete, change, move, rename, insert, delete, change, change),
    *(swap_names, renumber, double, shrink, shrink),
)

# -- edits of a whole module

NO_FRAMES = Frames()


def edit_bodies(module: HloModule, c: Choices) -> HloModule:
    """Computations lost, doubled, moved, renamed, or printed in another way; another entry."""
    bodies = list(module.bodies)
    place, other = c.number(0, len(bodies) - 1), c.number(0, len(bodies) - 1)
    body = bodies[place]
    match c.number(0, 11):
        case 0 if len(bodies) > 1:
            del bodies[place]
        case 0 | 1 | 9 | 10:
            bodies.insert(other, body)
        case 2:
            bodies[place], bodies[other] = bodies[other], body
        case 3:
            bodies[place] = replace(body, name=c.choose((f"{body.name}.1", bodies[other].name)))
        case 4:
            bodies[place] = replace(body, thread="" if body.thread else "sparsecore")
        case 5:
            bodies[place] = replace(body, is_signed=not body.is_signed)
        case 6:
            bodies.append(bodies.pop(place))
        case 7:
            bodies[place] = replace(body, lines=bodies[other].lines)
        case _:
            return replace(module, entry=other)
    return replace(module, bodies=tuple(bodies), entry=min(module.entry, len(bodies) - 1))


def edit_head(module: HloModule, c: Choices) -> HloModule:
    """What stands before the computations: so all of them are on other lines."""
    match c.number(0, 3):
        case 0:
            return replace(module, header_over_lines=not module.header_over_lines)
        case 1:
            return replace(module, header=module.header[1:])
        case 2:
            return replace(module, frames=NO_FRAMES)
        case _:
            return replace(module, has_percents=not module.has_percents)


def edited(module: HloModule, data: bytes) -> HloModule:
    c = Choices(data)
    kind = c.number(0, 15)
    if kind == 15:
        return edit_head(module, c)
    if kind > 12:
        return edit_bodies(module, c)
    place = c.number(0, len(module.bodies) - 1)
    body: Body = module.bodies[place]
    lines = list(body.lines)
    c.choose(LINE_EDITS)(lines, c)
    bodies = list(module.bodies)
    bodies[place] = replace(body, lines=tuple(lines))
    return replace(module, bodies=tuple(bodies))


_EDIT = st.binary(min_size=24, max_size=24)


@st.composite
def rows(draw: Draw) -> list[str]:
    """The texts of two to five snapshots."""
    module = draw(modules(most_bodies=4, most_lines=14))
    texts = [module.text]
    for edits in draw(st.lists(st.lists(_EDIT, min_size=1, max_size=7), min_size=1, max_size=4)):
        start = module
        for data in edits:
            module = edited(module, data)
        text = module.text
        c = Choices(edits[0][::-1])
        if c.one_in(12):
            text = text[: c.number(0, len(text))]
        texts.append(text)
        if c.one_in(4):  # one that goes back to what was before
            module = start
    return texts


# -- reading


def read(text: str, memo: Memo | None, *, partial: bool = False) -> Module | str:
    """The module, or what is wrong with it."""
    try:
        return parse_module(text, memo=memo, partial=partial)
    except ParseError as error:
        return str(error)
