"""What an answer about an instruction rests on.

While lookups are recorded, every way from an instruction or a computation to another one notes
where it started. As long as nothing there has changed, the same question has the same answer: in a
later snapshot it need not be asked again (see ``answers.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hlo_audit.hlo.module import Computation, Module

Kind = Literal[
    "instruction", "readers", "existence", "parameters", "callers", "computation", "module"
]


Where = tuple[Kind, str]
"""Where something was looked up by a name: ``instruction``, an instruction, by its ``%name``, or
``readers``, who reads one, with the name of the computation that holds it. The others with ``""``,
by the name of a computation: its ``existence``, its ``parameters``, its ``callers``, or the whole
of it; or ``module`` by no name, for all there is."""


class Lookups:
    """What was looked up.

    Attributes:
        module: that is asked about; others stay the same.
        instructions: computation -> the ``%name`` of each instruction that was looked at.
        readers: computation -> the ``%name`` of each instruction whose readers were asked for.
        others: the names for each other kind.
    """

    __slots__ = ("instructions", "module", "others", "readers")

    def __init__(self, module: Module) -> None:
        self.module = module
        self.instructions: defaultdict[Computation, set[str]] = defaultdict(set)
        self.readers: defaultdict[Computation, set[str]] = defaultdict(set)
        self.others: defaultdict[Kind, set[str]] = defaultdict(set)

    def __iter__(self) -> Iterator[tuple[Where, set[str]]]:
        """Where in the module something was looked up, and by which names."""
        computations = self.module.computations
        for computation, names in self.instructions.items():
            if computations.get(computation.name) is computation:
                yield ("instruction", computation.name), names
        for computation, names in self.readers.items():
            if computations.get(computation.name) is computation:
                yield ("readers", computation.name), names
        for kind, names in self.others.items():
            yield (kind, ""), names


recording: Lookups | None = None
"""Where lookups are noted, in this process; ``None`` while nobody records them."""
