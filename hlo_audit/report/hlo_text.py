"""An instruction in the text that it stands in: what it reads, what reads it, the lines around."""

from __future__ import annotations

from collections.abc import Iterator
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
        skipped: how many instructions stand between it and the line shown before.
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
    roles.update((user.index, "user") for user in users[:MOST_NEIGHBOURS])
    roles.update((operand.index, "operand") for operand in operands[:MOST_NEIGHBOURS])
    # What was left out is still what it is where it stands among the lines around.
    roles.update((one.index, "user") for one in users[MOST_NEIGHBOURS:] if one.index in roles)
    roles.update((one.index, "operand") for one in operands[MOST_NEIGHBOURS:] if one.index in roles)
    roles[here] = "this"
    shown = set(roles)
    return HloExcerpt(
        instruction.computation.name,
        tuple(_lines(instruction, roles)),
        sum(operand.index not in shown for operand in operands),
        sum(user.index not in shown for user in users),
    )


def _lines(instruction: Instruction, roles: dict[int, Role]) -> Iterator[HloLine]:
    instructions = instruction.computation.instructions
    before = -1
    for index in sorted(roles):
        most = MOST_CHARACTERS * (4 if roles[index] == "this" else 1)
        text = clip(short_text(instructions[index], most), most)
        yield HloLine(index + 1, roles[index], text, index - before - 1)
        before = index


def short_text(instruction: Instruction, most: int) -> str:
    """The instruction on one line, without its metadata and the settings of the backend.

    Args:
        most: characters, roughly; a constant may have millions.
    """
    root = "ROOT " if instruction.is_root else ""
    attributes = "".join(
        f", {name}={value}"
        for name, value in instruction.attributes.items()
        if name not in _LEFT_OUT
    )
    return (
        f"{root}%{instruction.name} = {instruction.shape} {instruction.opcode}"
        f"({clip(instruction.literal, most)}){attributes}"
    )
