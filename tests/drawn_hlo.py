"""HLO modules as data: what each instruction is, how XLA prints it, and what reading it must give.

Every instruction has its shape, what it reads and what each of its attributes means. Reading the
printed text must give that data back. Modules are drawn in ``hlo_modules.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hlo_audit.hlo import (
    Instruction,
    Metadata,
    Module,
    Shape,
    SourceLocation,
)

Groups = tuple[tuple[int, ...], ...]

# -- what is drawn


@dataclass(frozen=True)
class Read:
    """An operand: an instruction's result, or an element of its tuple."""

    name: str
    element: tuple[int, ...] = ()


@dataclass(frozen=True)
class Attribute:
    """An attribute as printed, and what it means where a property of the instruction says so."""

    name: str
    text: str
    means: Any = None


@dataclass(frozen=True)
class Line:
    """An instruction.

    Attributes:
        literal: what a parameter or a constant has between its parentheses.
        oddity: how its text differs from the plain form, one of :data:`ODDITIES`; or ``""``.
    """

    name: str
    shape: Shape
    opcode: str
    reads: tuple[Read, ...] = ()
    literal: str = ""
    attributes: tuple[Attribute, ...] = ()
    is_root: bool = False
    oddity: str = ""

    @property
    def calls(self) -> tuple[str, ...]:
        return tuple(name for a in self.attributes if a.name in _CALLING for name in a.means)


ODDITIES = ("comment inside", "comment before", "blank line before", "operands over lines", "tabs")

_CALLING = ("calls", "to_apply", "condition", "body", "called_computations", "branch_computations")
"""In the order in which the names are listed."""


@dataclass(frozen=True)
class Body:
    """A computation.

    Attributes:
        thread: what is printed after its brace as ``execution_thread``; or ``""``.
    """

    name: str
    lines: tuple[Line, ...]
    thread: str = ""
    is_signed: bool = True

    @property
    def root(self) -> Line:
        """The line that says ``ROOT``, or the last; of several the body's last, or the first."""
        if self.lines[-1].is_root:
            return self.lines[-1]
        return next((line for line in self.lines if line.is_root), self.lines[-1])


@dataclass(frozen=True)
class Frames:
    """The source tables.

    Attributes:
        rows: of each stack frame the place of its location, and of its parent; ``None`` for none.
    """

    files: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    locations: tuple[tuple[int, int, int], ...] = ()
    rows: tuple[tuple[int, int | None], ...] = ()

    def stack(self, place: int) -> tuple[SourceLocation, ...]:
        found: list[SourceLocation] = []
        at: int | None = place
        while at is not None:
            location, at = self.rows[at]
            file, function, line = self.locations[location]
            found.append(SourceLocation(self.files[file], line, self.functions[function]))
        return tuple(found)

    @property
    def text(self) -> str:
        """Ids count from 1, and the parent's is printed one too high."""
        if not self.rows:
            return ""
        tables = {
            "FileNames": [quoted(name) for name in self.files],
            "FunctionNames": [quoted(name) for name in self.functions],
            "FileLocations": [
                f"{{file_name_id={file + 1} function_name_id={function + 1} line={line} "
                f"end_line={line} column=1 end_column=9}}"
                for file, function, line in self.locations
            ],
            "StackFrames": [
                f"{{file_location_id={location + 1} "
                f"parent_frame_id={1 if parent is None else parent + 2}}}"
                for location, parent in self.rows
            ],
        }
        blocks = (
            "\n".join([title, *(f"{number} {row}" for number, row in enumerate(rows, 1))])
            for title, rows in tables.items()
        )
        return "\n".join(f"\n{block}" for block in blocks) + "\n"


@dataclass(frozen=True)
class Text:
    """A module as printed.

    Attributes:
        headers: the line of each computation's header, in order.
        starts: the line and the column at which each instruction of each of them starts.
    """

    text: str
    headers: tuple[int, ...]
    starts: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, repr=False)
class HloModule:
    """A module.

    Attributes:
        entry: the place of the entry among the bodies.
        has_percents: whether names are printed with a ``%``.
        has_operand_shapes: whether operands are printed with their shapes.
    """

    name: str
    bodies: tuple[Body, ...]
    entry: int
    header: tuple[Attribute, ...] = ()
    frames: Frames = field(default_factory=Frames)
    has_percents: bool = True
    has_operand_shapes: bool = False
    header_over_lines: bool = False

    def __repr__(self) -> str:
        return f"<module>\n{self.text}</module>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis shows of a module that fails: its text, which can be tried."""
        printer.text(repr(self))

    @property
    def text(self) -> str:
        return self.printed().text

    def printed(self) -> Text:
        printer = _Printer()
        printer.add(f"HloModule {self.name}")
        separator = ",\n    " if self.header_over_lines else ", "
        for attribute in self.header:
            printer.add(f"{separator}{attribute.name}={attribute.text}")
        printer.add(f"\n{self.frames.text}\n")
        headers, starts = [], []
        for place, body in enumerate(self.bodies):
            headers.append(printer.line)
            starts.append(tuple(self._print_body(printer, body, is_entry=place == self.entry)))
        return Text("".join(printer.pieces), tuple(headers), tuple(starts))

    def _print_body(
        self, printer: _Printer, body: Body, *, is_entry: bool
    ) -> Iterator[tuple[int, int]]:
        percent = "%" if self.has_percents else ""
        signature = ""
        if body.is_signed:
            taken = ", ".join(
                f"{line.name}: {line.shape.without_layout}"
                for line in body.lines
                if line.opcode == "parameter"
            )
            signature = f" ({taken}) -> {body.root.shape.without_layout}"
        printer.add(f"{'ENTRY ' * is_entry}{percent}{body.name}{signature} {{\n")
        shapes: dict[str, Shape] = {}
        for line in body.lines:
            before = {"comment before": "  /* as\nit was */\n", "blank line before": "\n \n"}
            printer.add(before.get(line.oddity, ""))
            printer.add("\t" if line.oddity == "tabs" else "  ")
            yield printer.line, printer.column
            printer.add(self._printed_line(line, percent, shapes) + "\n")
            shapes.setdefault(line.name, line.shape)
        thread = f", execution_thread={quoted(body.thread)}" if body.thread else ""
        printer.add(f"}}{thread}\n\n")

    def _printed_line(self, line: Line, percent: str, shapes: Mapping[str, Shape]) -> str:
        operands = []
        for number, read in enumerate(line.reads):
            comment = f"/*index={number}*/" if number and number % 5 == 0 else ""
            shape = ""
            if self.has_operand_shapes and read.name in shapes:
                shape = printed_shape(shapes[read.name]) + " "
            element = "".join(f"#{index}" for index in read.element)
            operands.append(f"{comment}{shape}{percent}{read.name}{element}")
        between = ",\n      " if line.oddity == "operands over lines" else ", "
        comment = "/* (odd} */ " if line.oddity == "comment inside" else ""
        gap = "\t" if line.oddity == "tabs" else " "
        attributes = "".join(f", {a.name}={a.text}" for a in line.attributes)
        return (
            f"{'ROOT ' * line.is_root}{percent}{line.name}{gap}={gap}{printed_shape(line.shape)} "
            f"{comment}{line.opcode}({line.literal or between.join(operands)}){attributes}"
        )


class _Printer:
    """Pieces of text, and where the next one starts."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.line = self.column = 1

    def add(self, piece: str) -> None:
        self.pieces.append(piece)
        self.line += piece.count("\n")
        after = len(piece) - piece.rfind("\n")
        self.column = after if "\n" in piece else self.column + len(piece)


def printed_shape(shape: Shape) -> str:
    """As XLA prints it, with a comment before every fifth element of a tuple."""
    if not shape.is_tuple:
        return str(shape)
    elements = [
        f"/*index={number}*/{printed_shape(element)}"
        if number and number % 5 == 0
        else printed_shape(element)
        for number, element in enumerate(shape.elements)
    ]
    return f"({', '.join(elements)})"


def quoted(text: str) -> str:
    """A string in double quotes, escaped as in C."""
    escaped = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\x07": "\\007"}
    return '"' + "".join(escaped.get(char, char) for char in text) + '"'


# -- what reading must give


def assert_read(module: Module, drawn: HloModule) -> None:
    """``module`` holds all that was ``drawn``, and nothing else."""
    printed = drawn.printed()
    assert module.error is None
    assert module.name == drawn.name
    assert list(module.computations) == [body.name for body in drawn.bodies]
    assert module.entry_name == drawn.bodies[drawn.entry].name
    assert module.lines == dict(zip(module.computations, printed.headers, strict=True))
    _assert_header(module, {attribute.name: attribute for attribute in drawn.header})
    for computation, body in zip(module.computations.values(), drawn.bodies, strict=True):
        assert [one.name for one in computation] == [line.name for line in body.lines]
        assert computation.root.name == body.root.name
        assert [one.name for one in computation if one.is_root] == [body.root.name]
        users: dict[str, list[str]] = {line.name: [] for line in body.lines}
        for instruction, line in zip(computation, body.lines, strict=True):
            _assert_instruction(instruction, line, module, drawn)
            for name in dict.fromkeys(read.name for read in line.reads):
                users[name].append(line.name)
        for instruction in computation:
            assert [user.name for user in instruction.users] == users[instruction.name]
        parameters = [line for line in body.lines if line.opcode == "parameter"]
        parameters.sort(key=lambda line: int(line.literal))
        assert [one.name for one in computation.parameters] == [line.name for line in parameters]
        callers = [
            (other.name, line.name)
            for other in drawn.bodies
            for line in other.lines
            for called in line.calls
            if called == body.name
        ]
        found = [(one.computation.name, one.name) for one in module.callers(computation)]
        assert found == callers


def _assert_header(module: Module, header: Mapping[str, Attribute]) -> None:
    texts = {name: attribute.text for name, attribute in header.items()}
    assert module.header == texts
    assert module.is_scheduled == ("is_scheduled" in header)
    if layout := header.get("entry_computation_layout"):
        assert module.entry_layout == layout.means
    aliases = header.get("input_output_alias")
    assert module.input_output_aliases == (aliases.means if aliases else ())
    partitions = header.get("num_partitions")
    assert module.device_count == (partitions.means if partitions else 1)


def _assert_instruction(
    instruction: Instruction, line: Line, module: Module, drawn: HloModule
) -> None:
    assert instruction.opcode == line.opcode
    assert instruction.shape == line.shape
    reads = [(value.instruction.name, value.tuple_index) for value in instruction.operand_values]
    assert reads == [(read.name, read.element) for read in line.reads]
    if line.literal:
        assert instruction.literal == line.literal
    number = int(line.literal) if line.opcode == "parameter" else None
    assert instruction.parameter_number == number
    means = {attribute.name: attribute.means for attribute in line.attributes}
    # A list of device ids stands behind a comma, so it looks like an attribute of its own.
    texts = {a.name: a.text for a in line.attributes if "device_ids=" not in a.text}
    for name, text in texts.items():
        assert instruction.attributes[name] == text
    assert instruction.attributes.keys() - means.keys() <= {"device_ids"}
    assert instruction.metadata == means.get("metadata", Metadata())
    assert instruction.custom_call_target == means.get("custom_call_target", "")
    assert instruction.backend_config == means.get("backend_config", {})
    assert instruction.estimated_cycles == _cycles(means.get("backend_config", {}))
    assert instruction.called_names == line.calls
    assert instruction.dimensions == means.get("dimensions", ())
    sharding = instruction.sharding
    found = (sharding.kind, sharding.shards) if sharding is not None else None
    assert found == means.get("sharding")
    assert instruction.replica_groups(module.device_count) == means.get("replica_groups")
    source = means.get("metadata", Metadata())
    if source.stack_frame_id:
        assert module.frames(instruction) == drawn.frames.stack(source.stack_frame_id - 1)
    elif source.source_file:
        location = SourceLocation(source.source_file, source.source_line)
        assert module.frames(instruction) == (location,)
    else:
        assert module.frames(instruction) == ()


def _cycles(config: Mapping[str, Any]) -> int | None:
    window = config.get("window_config")
    cycles = int(window["estimated_cycles"]) if isinstance(window, dict) else 1 << 63
    return cycles if cycles < 1e18 else None
