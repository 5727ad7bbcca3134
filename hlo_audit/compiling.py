"""Handle programs one by one: those that are to be compiled as each is done, the others as read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hlo_audit.cache import Cache
from hlo_audit.compiler import DEFAULT_TIMEOUT_SECONDS, Outcome, compile_programs
from hlo_audit.program import Lowering, Recorded, Subject

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Compiling:
    """How programs are compiled, whatever is done with them then.

    Attributes:
        jobs: how many side by side; ``None`` for one a CPU.
        timeout_seconds: how long each may take, the import of jax left out.
        cache: where dumps are kept; ``None`` compiles each program anew.
        on_compiled: called with each program and its outcome, as it has been handled.
    """

    jobs: int | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    cache: Cache | None = None
    on_compiled: Callable[[Lowering, Outcome], None] | None = None

    def told(self, lowering: Lowering, outcome: Outcome) -> None:
        """Call :attr:`on_compiled`, if there is one."""
        if self.on_compiled is not None:
            self.on_compiled(lowering, outcome)


@contextmanager
def handled(
    subjects: Sequence[Subject],
    how: Compiling,
    *,
    compiled: Callable[[Lowering, Outcome], _T],
    recorded: Callable[[Recorded], _T],
) -> Iterator[list[_T]]:
    """What the two functions make of each subject, in the order of ``subjects``.

    Dumps and files are handled first, and a program while others compile. The dumps of programs are
    there until the block ends.

    Raises:
        UsageError, CompileError: as :func:`hlo_audit.compiler.compile_programs`.
    """
    found: dict[int, _T] = {}
    lowerings = [subject for subject in subjects if isinstance(subject, Lowering)]
    places: dict[int, list[int]] = {}
    for index, subject in enumerate(subjects):
        if isinstance(subject, Recorded):
            found[index] = recorded(subject)
        else:
            places.setdefault(id(subject), []).append(index)

    def done(lowering: Lowering, outcome: Outcome) -> None:
        found[places[id(lowering)].pop()] = compiled(lowering, outcome)
        how.told(lowering, outcome)

    if not lowerings:
        yield list(found.values())
        return
    with tempfile.TemporaryDirectory(prefix="hlo-audit-") as folder:
        compile_programs(
            lowerings,
            into=Path(folder),
            jobs=how.jobs,
            timeout_seconds=how.timeout_seconds,
            cache=how.cache,
            on_done=done,
        )
        yield [found[index] for index in range(len(subjects))]
