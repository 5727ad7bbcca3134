"""An instruction in the text that it stands in: what it reads, what reads it, the lines around."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hlo_audit.hlo import Instruction
from hlo_audit.report.wording import clip

LINES_AROUND = 2
"""How many lines before and after an instruction are shown, whatever they are."""

MOST_NEIGHBOURS = 6
"""How many of its operands are shown, and how many of its users."""

MOST_CHARACTERS = 360
"""Of a line; of the instruction itself four times as many."""

_LEFT_OUT = ("metadata", "backend_config", "frontend_attributes", "sharding", "origin")

Role = Literal["this", "operand", "user", "around"]


@dataclass(frozen=True)
class HloLine:
    """A line of a computation.

    Attributes:
        number: of the instruction in its computation, from 1.
        role: what it is to the instruction that is shown.
        text: as XLA prints it, less what tells nothing here, and cut where it is long.
        skipped: how many instructions stand between it and the line shown before; 0 for the first.
    """

    number: int
    role: Role
    text: str
    skipped: int


@dataclass(frozen=True)
class HloExcerpt:
    """Some lines of a computation.

    Attributes:
        computation: its name.
        lines: in the order of the text.
        operands_left_out, users_left_out: how many there are more than are shown.
    """

    computation: str
    lines: tuple[HloLine, ...]
    operands_left_out: int
    users_left_out: int


def excerpt_around(instruction: Instruction) -> HloExcerpt:
    """The instruction with its neighbours."""
    operands = list(dict.fromkeys(instruction.operands))
    users = instruction.users
    roles: dict[int, Role] = {}
    here = instruction.index
    last = len(instruction.computation) - 1
    for index in range(max(0, here - LINES_AROUND), min(last, here + LINES_AROUND) + 1):
        roles[index] = "around"
    neighbours: tuple[tuple[Role, Sequence[Instruction]], ...] = (
        ("operand", operands),
        ("user", users),
    )
    for role, found in neighbours:
        for number, one in enumerate(found):
            # What is left out is still what it is where it stands among the lines around.
            if number < MOST_NEIGHBOURS or one.index in roles:
                roles[one.index] = role
    roles[here] = "this"
    return HloExcerpt(
        instruction.computation.name,
        tuple(_lines(instruction, roles)),
        sum(operand.index not in roles for operand in operands),
        sum(user.index not in roles for user in users),
    )


def _lines(instruction: Instruction, roles: dict[int, Role]) -> Iterator[HloLine]:
    instructions = instruction.computation.instructions
    before: int | None = None
    for index in sorted(roles):
        most = MOST_CHARACTERS * (4 if roles[index] == "this" else 1)
        text = short_text(instructions[index], most)
        skipped = 0 if before is None else index - before - 1
        yield HloLine(index + 1, roles[index], text, skipped)
        before = index


def short_text(instruction: Instruction, most: int) -> str:
    """The instruction on one line, without its metadata and the settings of the backend.

    Args:
        most: characters; what is longer is cut.
    """
    root = "ROOT " if instruction.is_root else ""
    attributes = "".join(
        f", {name}={value}"
        for name, value in instruction.attributes.items()
        if name not in _LEFT_OUT
    )
    literal = clip(instruction.literal, most)  # a constant's may have millions of characters
    text = f"{root}%{instruction.name} = {instruction.shape} {instruction.opcode}({literal})"
    return clip(text + attributes, most)
