"""The IR: modules, computations and instructions of HLO, as they stand in one pass snapshot.

Objects are read-only and know their neighbours: an instruction its operands and users, a
computation its callers. Nothing here reads HLO text but the attributes of single instructions,
which are parsed when they are first asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import merge
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hlo_audit.errors import ParseError
from hlo_audit.hlo import attributes as read
from hlo_audit.hlo.attributes import Metadata, Sharding
from hlo_audit.hlo.frames import FrameTables, SourceLocation
from hlo_audit.hlo.shape import Shape, parse_shape

if TYPE_CHECKING:
    import pandas

_FEW_OPERANDS = 8
_FEW_USES = 32

# The compiler's marker for a cost that it does not know is close to the largest int64.
_UNKNOWN_CYCLES = 1e18

# Most of a module calls no computation: skipping these opcodes makes looking for callers fast.
_CALL_NOTHING = frozenset(
    {
        *("parameter", "constant", "iota", "broadcast", "reshape", "bitcast", "transpose", "copy"),
        *("copy-start", "copy-done", "convert", "tuple", "get-tuple-element", "slice", "dot"),
        *("add", "subtract", "multiply", "divide", "negate", "select", "compare"),
    }
)

_FIRST_TARGET = re.compile(r', custom_call_target="([^"\\]*+)"(?=,|$)').match

_INDEX = r"\{((?:\d{1,18}+(?:,\s*+|(?=\})))*+)\}"
_ALIAS = re.compile(rf"{_INDEX}:\s*+\((\d{{1,18}}+),\s*+{_INDEX}(?:,\s*+([a-z-]++))?\)")


class Value(NamedTuple):
    """What an operand reads: the result of ``instruction``, or one element of its tuple."""

    instruction: Instruction
    tuple_index: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape:
        return self.instruction.shape.at(self.tuple_index)


class Alias(NamedTuple):
    """An output that shares the buffer of a parameter (a donated argument)."""

    output_index: tuple[int, ...]
    parameter_number: int
    parameter_index: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class EntryLayout:
    """The shapes and layouts in which the entry computation takes and returns its arrays."""

    parameters: tuple[Shape, ...]
    result: Shape


Row = tuple[str, str, str, str, str, str, Shape, tuple[str, ...]]
"""An instruction as the parser leaves it. First its text in pieces: ``"ROOT "`` or ``""``,
``%name``, shape, opcode, operands, attributes; then what they are read as: the shape, and the
``%name`` of each operand. It says nothing of its place, so that two snapshots can share it."""

ROOT: Final = 0
NAME: Final = 1
OPCODE: Final = 3
OPERANDS: Final = 4
ATTRIBUTES: Final = 5
SHAPE: Final = 6
READS: Final = 7


class Instruction:
    """One instruction; equal only to itself."""

    # A large module has 100,000 of them: few slots, and no __init__; see Computation.instructions.
    __slots__ = (
        *("_attributes", "_computation", "_index", "_operands", "_row"),
        "_wide_operand_values",
    )

    _attributes: dict[str, str]
    _computation: Computation
    _index: int
    _operands: tuple[Instruction, ...]
    _row: Row
    _wide_operand_values: tuple[Value, ...]

    # -- what every instruction has

    @property
    def name(self) -> str:
        """Its name, without the ``%``; unique within the computation."""
        return self._row[NAME][1:]

    @property
    def opcode(self) -> str:
        return self._row[OPCODE]

    @property
    def shape(self) -> Shape:
        return self._row[SHAPE]

    @property
    def computation(self) -> Computation:
        return self._computation

    @property
    def index(self) -> int:
        """Its place in the computation; in a scheduled module, its place in the schedule."""
        return self._index

    @property
    def is_root(self) -> bool:
        return self._computation._root_index == self._index

    @property
    def operands(self) -> tuple[Instruction, ...]:
        """The instructions that it reads, in order."""
        return self._operands

    @property
    def operand_values(self) -> tuple[Value, ...]:
        """The operands with the tuple element that each reads (``%fusion.3#1``)."""
        if len(self._operands) <= _FEW_OPERANDS:
            return self._make_operand_values()
        # The tuple of a loop has thousands, and is asked for each of them.
        try:
            return self._wide_operand_values
        except AttributeError:
            self._wide_operand_values = self._make_operand_values()
            return self._wide_operand_values

    def _make_operand_values(self) -> tuple[Value, ...]:
        if "#" not in self._row[OPERANDS] or not self._operands:
            return tuple(Value(operand) for operand in self._operands)
        return tuple(
            Value(operand, index)
            for operand, (_, index) in zip(
                self._operands, read.parse_operands(self._row[OPERANDS]), strict=True
            )
        )

    @property
    def users(self) -> tuple[Instruction, ...]:
        """The instructions of the same computation that read it, each once, in order."""
        return self._computation.users_of(self)

    def uses(self, element: int | None = None) -> Sequence[tuple[Instruction, int]]:
        """Each operand of the same computation that reads it: the user and the operand's place, in
        order.

        Args:
            element: leave out those that read only another element of its tuple.
        """
        return self._computation.uses_of(self, element)

    @property
    def literal(self) -> str:
        """What stands between the parentheses, as printed: the value of a ``constant``."""
        return self._row[OPERANDS]

    @property
    def parameter_number(self) -> int | None:
        """The number of a ``parameter``; ``None`` for every other opcode."""
        text = self._row[OPERANDS].strip()
        return int(text) if self._row[OPCODE] == "parameter" and read.is_number(text) else None

    # -- attributes

    @property
    def attributes(self) -> Mapping[str, str]:
        """Every attribute as printed, by name."""
        try:
            return self._attributes
        except AttributeError:
            self._attributes = read.split_attributes(self._row[ATTRIBUTES])
            return self._attributes

    @property
    def attribute_text(self) -> str:
        """Every attribute as printed, from the comma on."""
        return self._row[ATTRIBUTES]

    @property
    def metadata(self) -> Metadata:
        text = self.attributes.get("metadata")
        return read.parse_metadata(text) if text else Metadata()

    @property
    def op_name(self) -> str:
        """The JAX operation or argument it comes from, such as ``jit(step)/dot_general``."""
        return self.metadata.op_name

    @property
    def custom_call_target(self) -> str:
        """The target of a ``custom-call``; ``""`` for every other opcode."""
        if self._row[OPCODE] != "custom-call":
            return ""
        # XLA prints it first: the others need not be read for it.
        if first := _FIRST_TARGET(self._row[ATTRIBUTES]):
            return first[1]
        return read.unquote(self.attributes.get("custom_call_target", ""))

    @property
    def called_names(self) -> tuple[str, ...]:
        """The names of the computations that it calls: fusion, while, call, reduce, async, ..."""
        return tuple(
            name
            for key in read.CALLING_ATTRIBUTES
            if key in self.attributes
            for name in read.parse_computation_names(self.attributes[key])
        )

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The ``dimensions`` attribute; ``()`` where it has none, or no list of numbers."""
        try:
            return read.parse_integers(self.attributes.get("dimensions", ""))
        except ValueError:
            return ()

    @property
    def sharding(self) -> Sharding | None:
        text = self.attributes.get("sharding")
        return read.parse_sharding(text) if text else None

    @property
    def backend_config(self) -> Mapping[str, Any]:
        """The backend's settings; empty where there are none, or not as JSON."""
        text = self.attributes.get("backend_config")
        return (read.parse_backend_config(text) or {}) if text else {}

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's own cost; ``None`` where it gives none, or its mark for "not known"."""
        if "estimated_cycles" not in self._row[ATTRIBUTES]:
            return None
        window = self.backend_config.get("window_config")
        try:
            cycles = int(window["estimated_cycles"])  # type: ignore[index]  # errors are caught
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        return cycles if 0 <= cycles < _UNKNOWN_CYCLES else None

    def replica_groups(self, device_count: int) -> tuple[tuple[int, ...], ...] | None:
        """The groups of a collective among ``device_count`` devices; ``None`` if not understood."""
        text = self.attributes.get("replica_groups")
        if text is None:
            return None
        devices = self.attributes.get("device_ids")
        if devices is not None and "mesh[" in text:  # the comma between is one of the form itself
            text = f"{text}, device_ids={devices}"
        try:
            return read.parse_replica_groups(text, device_count)
        except ValueError:
            return None

    @property
    def text(self) -> str:
        """The instruction on one line, as XLA prints it."""
        root = "ROOT " if self.is_root else ""
        return (
            f"{root}%{self.name} = {self.shape} {self._row[OPCODE]}"
            f"({self._row[OPERANDS]}){self._row[ATTRIBUTES]}"
        )

    def __repr__(self) -> str:
        return f"<Instruction %{self.name} = {self.shape} {self._row[OPCODE]}>"


class Computation:
    """A computation: its instructions, in the order of the text; equal only to itself.

    The parser leaves a row for each instruction. The instructions themselves are made when they
    are first asked for, as most computations of a dump are never looked at.
    """

    __slots__ = (
        *("_name", "_rows", "_root_index", "_by_name"),
        *("_instructions", "_users", "_uses", "_element_uses", "_parameters", "_calls"),
    )

    def __init__(self, name: str) -> None:
        self._name = name
        self._rows: Sequence[Row] = ()
        self._root_index = -1
        self._by_name: Mapping[str, Instruction] | None = None
        self._instructions: tuple[Instruction, ...] | None = None
        self._users: tuple[tuple[Instruction, ...], ...] | None = None
        self._calls: tuple[Instruction, ...] | None = None
        self._uses: tuple[tuple[tuple[Instruction, int], ...], ...] | None = None
        self._element_uses: dict[int, _ElementUses] = {}
        self._parameters: tuple[Instruction, ...] | None = None

    def _complete(self, rows: Sequence[Row]) -> None:
        """Take over what the parser has read: at least one row, each name once, and operands only
        of rows above."""
        self._rows = rows
        self._root_index = last = len(rows) - 1
        if not rows[last][ROOT]:
            self._root_index = next((i for i, row in enumerate(rows) if row[ROOT]), last)

    @property
    def name(self) -> str:
        """Its name, without the ``%``."""
        return self._name

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        if self._instructions is None:
            self._instructions = tuple(self._named.values())
        return self._instructions

    @property
    def _named(self) -> Mapping[str, Instruction]:
        """The instructions by ``%name``, in order; made here."""
        if self._by_name is None:
            made: dict[str, Instruction] = {}
            new = Instruction.__new__
            for index, row in enumerate(self._rows):
                instruction = new(Instruction)
                instruction._computation = self
                instruction._index = index
                instruction._row = row
                instruction._operands = tuple([made[operand] for operand in row[READS]])
                made[row[NAME]] = instruction
            self._by_name = made
        return self._by_name

    @property
    def root(self) -> Instruction:
        """The instruction whose value it returns."""
        return self.instructions[self._root_index]

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters, by their number."""
        if self._parameters is None:
            found = [i for i in self.instructions if i.opcode == "parameter"]
            self._parameters = tuple(sorted(found, key=lambda one: one.parameter_number or 0))
        return self._parameters

    def rows(self) -> Iterator[tuple[str, Shape]]:
        """The opcode and the shape of each instruction, in order; makes no instructions."""
        for row in self._rows:
            yield row[OPCODE], row[SHAPE]

    def users_of(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions that read ``instruction``, each once, in order."""
        if self._users is None:
            users: list[list[Instruction]] = [[] for _ in self._rows]
            for user in self.instructions:
                for operand in user._operands:
                    readers = users[operand._index]
                    if not readers or readers[-1] is not user:
                        readers.append(user)
            self._users = tuple(map(tuple, users))
        return self._users[instruction._index]

    @property
    def calls(self) -> tuple[Instruction, ...]:
        """The instructions that call other computations, in order."""
        if self._calls is None:
            may_call = [
                index
                for index, row in enumerate(self._rows)
                if row[OPCODE] not in _CALL_NOTHING and read.MAY_CALL(row[ATTRIBUTES])
            ]
            found = (self.instructions[index] for index in may_call)
            self._calls = tuple(one for one in found if one.called_names)
        return self._calls

    def uses_of(
        self, instruction: Instruction, element: int | None = None
    ) -> Sequence[tuple[Instruction, int]]:
        """As :meth:`Instruction.uses`."""
        index = instruction._index
        if self._uses is None:
            uses: list[list[tuple[Instruction, int]]] = [[] for _ in self._rows]
            for user in self.instructions:
                for number, operand in enumerate(user._operands):
                    uses[operand._index].append((user, number))
            self._uses = tuple(map(tuple, uses))
        if element is None or len(self._uses[index]) <= _FEW_USES:
            return self._uses[index]
        # Of a tuple with a reader for each of its elements, one is not looked for among all.
        if index not in self._element_uses:
            self._element_uses[index] = _ElementUses(self._uses[index])
        return self._element_uses[index].of(element)

    def __getitem__(self, name: str) -> Instruction:
        return self._named["%" + name]

    def __contains__(self, name: object) -> bool:
        return f"%{name}" in self._named

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<Computation %{self._name}, {len(self)} instructions>"


class _ElementUses:
    """The uses of a tuple by the element that they read."""

    def __init__(self, uses: Sequence[tuple[Instruction, int]]) -> None:
        self._of_all: list[tuple[int, tuple[Instruction, int]]] = []
        self._of_one: dict[int, list[tuple[int, tuple[Instruction, int]]]] = {}
        for place, (user, number) in enumerate(uses):
            read_index = user.operand_values[number].tuple_index
            text = user.attributes.get("index", "") if user.opcode == "get-tuple-element" else ""
            if read_index:
                self._of_one.setdefault(read_index[0], []).append((place, (user, number)))
            elif read.is_number(text):
                self._of_one.setdefault(int(text), []).append((place, (user, number)))
            else:
                self._of_all.append((place, (user, number)))

    def of(self, element: int) -> Sequence[tuple[Instruction, int]]:
        return [use for _, use in merge(self._of_all, self._of_one.get(element, ()), key=_place)]


def _place(use: tuple[int, tuple[Instruction, int]]) -> int:
    return use[0]


@dataclass(frozen=True, eq=False)
class Module:
    """A module: its computations, its entry, and what stands at the head of its text.

    Attributes:
        name: such as ``jit_step``.
        computations: by name, in the order of the text.
        entry_name: the name of the entry computation; ``None`` only in a module read in part.
        header_text: what stands after the name in the ``HloModule`` line, as printed.
        frame_tables: the text of the source tables, ``""`` where there are none.
        error: what stopped the parser, in a module read in part.
        lines: the line of each computation's header in the text, by its name, counted from 1.
    """

    name: str
    computations: Mapping[str, Computation]
    entry_name: str | None
    header_text: str = field(repr=False)
    frame_tables: str = field(default="", repr=False)
    error: ParseError | None = None
    lines: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def entry(self) -> Computation:
        """The entry computation.

        Raises:
            KeyError: in a module read in part, whose text ends before it.
        """
        return self.computations[self.entry_name or ""]

    @property
    def instructions(self) -> Iterator[Instruction]:
        """Every instruction, computation by computation."""
        for computation in self.computations.values():
            yield from computation.instructions

    # -- the header

    @cached_property
    def header(self) -> Mapping[str, str]:
        """The attributes of the ``HloModule`` line as printed, by name."""
        return read.split_attributes(self.header_text)

    @property
    def is_scheduled(self) -> bool:
        """Whether the order of the text is the order of execution."""
        return self.header.get("is_scheduled") == "true"

    @property
    def device_count(self) -> int:
        """Partitions times replicas."""
        counts = (self.header.get("num_partitions", "1"), self.header.get("replica_count", "1"))
        return math.prod(int(count) if read.is_number(count) else 1 for count in counts)

    @cached_property
    def entry_layout(self) -> EntryLayout | None:
        """The entry's shapes and layouts; ``None`` where the header has none."""
        text = self.header.get("entry_computation_layout")
        if text is None:
            return None
        parameters, _, result = text[1:-1].rpartition("->")
        try:
            return EntryLayout(parse_shape(parameters).elements, parse_shape(result.strip()))
        except ValueError:
            return None

    @cached_property
    def input_output_aliases(self) -> tuple[Alias, ...]:
        """The outputs that share a parameter's buffer, in the order of the text."""
        return tuple(
            Alias(
                read.parse_integers(output),
                int(number),
                read.parse_integers(index),
                kind or "may-alias",
            )
            for output, number, index, kind in _ALIAS.findall(
                self.header.get("input_output_alias", "")
            )
        )

    @cached_property
    def donated_to(self) -> Mapping[tuple[int, ...], int]:
        """The index of an output -> the number of the parameter whose whole buffer it takes."""
        numbers: dict[tuple[int, ...], int] = {}
        for alias in self.input_output_aliases:
            known = alias.parameter_number < len(self.entry.parameters)
            if known and not alias.parameter_index:
                numbers.setdefault(alias.output_index, alias.parameter_number)
        return numbers

    # -- calls

    def called(self, instruction: Instruction) -> tuple[Computation, ...]:
        """The computations that ``instruction`` calls and this module holds."""
        names = instruction.called_names
        return tuple(self.computations[name] for name in names if name in self.computations)

    def callers(self, computation: Computation) -> tuple[Instruction, ...]:
        """The instructions that call ``computation``, in the order of the text."""
        return self._callers.get(computation.name, ())

    @cached_property
    def _callers(self) -> dict[str, tuple[Instruction, ...]]:
        callers: dict[str, list[Instruction]] = {}
        for computation in self.computations.values():
            for instruction in computation.calls:
                for name in instruction.called_names:
                    callers.setdefault(name, []).append(instruction)
        return {name: tuple(found) for name, found in callers.items()}

    def fusion_kinds(self, computation: Computation) -> frozenset[str]:
        """The kinds (``kLoop``, ``kCustom``, ...) of the fusions that call ``computation``."""
        return self._fusion_kinds.get(computation.name, frozenset())

    @cached_property
    def _fusion_kinds(self) -> dict[str, frozenset[str]]:
        return {
            name: frozenset(
                caller.attributes.get("kind", "") for caller in callers if caller.opcode == "fusion"
            )
            for name, callers in self._callers.items()
        }

    # -- sources

    def frames(self, instruction: Instruction) -> tuple[SourceLocation, ...]:
        """The Python stack that traced ``instruction``, innermost first; ``()`` if not known."""
        metadata = instruction.metadata
        if metadata.stack_frame_id:
            return self._frames.stack(metadata.stack_frame_id)
        if metadata.source_file:
            return (SourceLocation(metadata.source_file, metadata.source_line),)
        return ()

    def source(self, instruction: Instruction) -> SourceLocation | None:
        """The innermost line that traced ``instruction``."""
        return next(iter(self.frames(instruction)), None)

    # -- for notebooks

    def to_frame(self) -> pandas.DataFrame:
        """A row for each instruction: what it is, what it reads, what it costs, where it is from.

        Raises:
            ImportError: where pandas is not installed.
        """
        from hlo_audit.hlo.frame import instructions_frame

        return instructions_frame(self)

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(max_rows=40, max_cols=20))

    @cached_property
    def _frames(self) -> FrameTables:
        return FrameTables.parse(self.frame_tables)

    @property
    def traced_lines(self) -> frozenset[SourceLocation]:
        """Every line in the source tables; empty for a module without them."""
        return self._frames.lines
