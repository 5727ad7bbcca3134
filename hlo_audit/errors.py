"""Every error that a user can cause or meet: one sentence of what is wrong, one of what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

MOST_LISTED = 12
"""Names that a hint lists in full."""

_LONGEST_NAME = 80
_MOST_COMPARED = 2_000

EXIT_GATE_FAILED = 1
"""The exit code of the command line where all went well and the verdict is no."""


class HloAuditError(Exception):
    """An error to show to the user as a line, never as a traceback.

    Attributes:
        message: what is wrong, one sentence without a full stop.
        hint: what to do about it, or ``None``.
        log: lines to show below it, such as the last that the compiler wrote; most often empty.
        exit_code: the exit code of the command line for it.
        kind: the word for it in JSON (``error.kind``).
    """

    exit_code = 2
    kind = "input"

    def __init__(self, message: str, *, hint: str | None = None, log: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = log

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is made anew from its positional arguments, which is not how these are made.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class UsageError(HloAuditError):
    """A name, setting, flag or option that does not exist or does not fit; a user's program that
    cannot be built, whose ``log`` holds the lines of the user's own that led there."""

    kind = "usage"


class RefusedReshapeError(UsageError):
    """A reshape that jax refuses while it traces a program on an explicit mesh.

    Attributes:
        operand: the type of its operand as jax prints it: ``float32[2,16,4,64@tensor]``.
        sizes: the sizes that it asks for.
        frames: the lines of the program that led there, innermost first: file, line and function.
    """

    def __init__(
        self,
        message: str,
        *,
        operand: str,
        sizes: tuple[int, ...],
        frames: tuple[tuple[str, int, str], ...],
        hint: str | None = None,
        log: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, hint=hint, log=log)
        self.operand = operand
        self.sizes = sizes
        self.frames = frames


class DumpError(HloAuditError):
    """A dump folder or file that cannot be read, or holds no HLO."""

    kind = "dump"


class ParseError(HloAuditError):
    """HLO text that is broken, cut off or no HLO at all.

    Attributes:
        path: the file, or ``None`` for text that came from none.
        line: the line, counted from 1.
        column: the column, counted from 1.
    """

    kind = "parse"

    def __init__(
        self,
        reason: str,
        *,
        line: int,
        column: int,
        path: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(f"{path or '<text>'}:{line}:{column}: {reason}", hint=hint)
        self.reason = reason
        self.path = path
        self.line = line
        self.column = column


class InternalError(HloAuditError):
    """A fault of this tool that one program ran into; the others are audited."""

    exit_code = 70
    kind = "internal"


class CompileError(HloAuditError):
    """A compile that failed, crashed or ran out of time; ``log`` holds the last lines that the
    compiler wrote, oldest first."""

    exit_code = 3
    kind = "compile"


def error_of_kind(
    kind: str, message: str, *, hint: str | None = None, log: tuple[str, ...] = ()
) -> HloAuditError:
    """The error that a report holds, by the word that it has for it there.

    Raises:
        ValueError: for a word that is none of :attr:`HloAuditError.kind`.
    """
    made: HloAuditError
    if kind == ParseError.kind:  # its message says where the text is broken
        made = HloAuditError(message, hint=hint, log=log)
        made.kind = kind
        return made
    kinds = (HloAuditError, UsageError, DumpError, InternalError, CompileError)
    for known in kinds:
        if known.kind == kind:
            return known(message, hint=hint, log=log)
    raise ValueError(f"no error is of the kind {kind[:40]!r}")


def unknown_name(what: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is none of the known ones, with the nearest as a hint.

    Where none is near, the hint lists all, or of more than :data:`MOST_LISTED` some of the nearest.
    """
    choices = list(dict.fromkeys(known))
    shown = f"{name[:_LONGEST_NAME]}..." if len(name) > _LONGEST_NAME else name
    message = f"no {what} is called {shown!r}"
    near = difflib.get_close_matches(name[:_LONGEST_NAME], choices, n=1)
    if near:
        return UsageError(message, hint=f"did you mean {near[0]!r}?")
    if len(choices) <= MOST_LISTED:
        return UsageError(message, hint="one of: " + ", ".join(choices) if choices else None)
    # Comparing is slow: of very many those that start alike are compared.
    some = sorted(choices, key=lambda one: one[:1] != name[:1])[:_MOST_COMPARED]
    nearest = difflib.get_close_matches(name[:_LONGEST_NAME], some, n=4, cutoff=0.0)
    return UsageError(message, hint=f"one of {len(choices):,}, such as {', '.join(nearest)}")
