"""What a rule is: its documentation, its check, its examples and its layout fixes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, takewhile
from typing import Any, Literal, NamedTuple, get_args

from hlo_audit.cost import Traffic, traffic_of
from hlo_audit.dump import AuditStage
from hlo_audit.errors import RefusedReshapeError, unknown_name
from hlo_audit.hlo import Instruction, Module, Shape, SourceLocation
from hlo_audit.hlo.loops import executions

Severity = Literal["warning", "note"]
"""``warning``: a fault that costs time. ``note``: a number to watch, or what the user asked for."""

_TRACERS = ("hlo_audit/compile_worker.py", "hlo_audit/live.py")

MOST_FRAMES = 10
"""How many callers of its line a finding keeps: enough to leave the layers that all code shares."""

_IDENTIFYING = ("from", "to", "place", "kind", "argument", "sharding", "operand_sharding")

Detail = str | int | float | bool | None | list[Any] | dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """One thing that a rule reports, with all that its reader needs; holds no module.

    Attributes:
        rule: the code, such as ``HLA002``.
        slug: such as ``relayout-copy``.
        severity: see :data:`Severity`.
        message: one sentence, for the reader of a terminal.
        instruction: the name in the snapshot; not stable from one compile to the next.
        computation: the name of the computation that holds it.
        opcode: its opcode.
        shape: its shape without layouts.
        bytes: the logical size of what the finding is about, once; ``None`` where nothing moves.
        executions: how often it runs in one step; ``None`` where a loop's trip count is not known.
        estimated_cycles: the compiler's own cost of one run; ``None`` where it gives none.
        op_name: the JAX operation or argument that it comes from.
        source: the Python line that traced it, where the compiler gives it.
        stack: the callers of that line, innermost first, :data:`MOST_FRAMES` at the most.
        details: what else the rule knows, by the names that its documentation gives.
        fixes: the names of the layout fixes that clear such a finding.
        traffic: what one run of it moves, by estimate; ``None`` where it is neither a copy nor a
            collective.
        introduced_by: the pass that brought it, such as ``Layout_assignment: layout-assignment``;
            ``None`` where the passes were not looked through.
    """

    rule: str
    slug: str
    severity: Severity
    message: str
    instruction: str
    computation: str
    opcode: str
    shape: str
    bytes: int | None
    executions: int | None
    estimated_cycles: int | None
    op_name: str
    source: SourceLocation | None
    stack: tuple[SourceLocation, ...]
    details: Mapping[str, Detail]
    fixes: tuple[str, ...]
    traffic: Traffic | None = None
    introduced_by: str | None = None

    @property
    def executed_bytes(self) -> int | None:
        """``bytes`` of all runs in one step; ``None`` where these or their number are not known."""
        if self.bytes is None or self.executions is None:
            return None
        return self.bytes * self.executions

    @property
    def fingerprint(self) -> str:
        """Names the same finding in another compile: of rule, opcode, shape, layouts, op_name,
        function and what tells alike ones apart (the argument, the sharding); never of an
        instruction's name or a line. 16 hexadecimal digits.
        """
        layouts = [str(self.details.get(key, "")) for key in _IDENTIFYING]
        function = self.source.function if self.source else ""
        identity = (self.rule, self.opcode, self.shape, *layouts, self.op_name, function)
        return hashlib.sha256("\0".join(identity).encode("utf-8", "replace")).hexdigest()[:16]


@dataclass(frozen=True)
class Target:
    """Where a layout fix says something of itself: one mode, on some topologies.

    Attributes:
        mode: the type of the mesh axes.
        topologies: such as ``v5p:2x2x1``; those that were compiled, never more.
    """

    mode: Literal["auto", "explicit"]
    topologies: tuple[str, ...]

    def covers(self, mode: str, topology: str) -> bool:
        """Whether ``topology`` in ``mode`` is one of these."""
        return mode == self.mode and topology in self.topologies

    def __str__(self) -> str:
        return f"{self.mode} mode on {', '.join(self.topologies)}"


Inputs = Literal["exact", "random"]
"""What two layouts are run on: ``exact``, where no sum rounds, so that its order cannot matter;
``random``, drawn from a normal distribution."""


@dataclass(frozen=True)
class Agreement:
    """How closely the results of two layouts agree on the same inputs.

    Attributes:
        inputs: the kind of the inputs.
        tolerance: the largest difference allowed in an array, as a share of the largest magnitude
            in it; 0 for bit for bit.
        reason: why they agree so closely, or no closer.
    """

    inputs: Inputs
    tolerance: float
    reason: str

    @property
    def closely(self) -> str:
        """``bit for bit`` or ``within 1e-05``."""
        return f"within {self.tolerance:g}" if self.tolerance else "bit for bit"


def bit_for_bit(reason: str) -> tuple[Agreement, ...]:
    """Agreement without any tolerance, on all kinds of inputs."""
    return tuple(Agreement(inputs, 0.0, reason) for inputs in get_args(Inputs))


@dataclass(frozen=True)
class LayoutFix:
    """A change of layout that clears a rule's findings, shown by a reference model in two layouts.

    What it claims is held by ``hlo-audit prove``: for the model's own sizes, on the topologies that
    ``clears`` and ``slower`` name, in both modes.

    Attributes:
        name: the layout after the change; findings name their fixes by it.
        change: what to change in one's own program, in words.
        model: the reference model that shows it.
        before: the layout that shows the fault.
        numerics: how closely both layouts agree, for each kind of inputs.
        cost: what it costs, and where it does not help, in words.
        clears: where it clears the findings that name it.
        slower: where it costs more estimated cycles than it saves.
    """

    name: str
    change: str
    model: str
    before: str
    numerics: tuple[Agreement, ...]
    cost: str
    clears: tuple[Target, ...] = ()
    slower: tuple[Target, ...] = ()

    @property
    def claims(self) -> dict[str, str]:
        """What is held of it, in words: for the model's own sizes, each under a heading."""
        claims = {
            "Clears at default sizes": "; ".join(map(str, self.clears)),
            "Slower at default sizes": "; ".join(map(str, self.slower)),
            "Numerics": self.agreement,
        }
        return {name: text for name, text in claims.items() if text}

    @property
    def agreement(self) -> str:
        """How closely both layouts agree, in words."""
        alike: dict[tuple[str, str], list[str]] = {}
        for one in self.numerics:
            alike.setdefault((one.closely, one.reason), []).append(one.inputs)
        return "; ".join(
            f"{closely} on {' and '.join(inputs)} inputs ({reason})"
            for (closely, reason), inputs in alike.items()
        )

    def answers_for(self, topology: str) -> bool:
        """Whether it says anything of ``topology``."""
        return any(topology in target.topologies for target in (*self.clears, *self.slower))


@dataclass(frozen=True)
class Example:
    """HLO text that a rule must report, or a near miss that it must not.

    Attributes:
        title: what the example shows, as a phrase.
        reports: the number of findings.
        hlo: the module text for each snapshot that the rule reads.
        tallies: where given, how many findings there are of each class of the rule's ``tally``.
    """

    title: str
    reports: int
    hlo: Mapping[AuditStage, str]
    tallies: Mapping[str, int] | None = None


Phase = Literal["unpartitioned", "partitioned", "laid-out"]
"""The parts of a compilation: until the program is partitioned, from then on until layouts are
assigned, and from then on."""


class Seen(NamedTuple):
    """Something that is counted in a snapshot.

    Attributes:
        shape: of what is counted.
        once: where several instructions are seen for one thing, which is counted once: what that
            is called.
    """

    shape: Shape
    once: str | None = None


@dataclass(frozen=True)
class Watch:
    """How a rule is counted in any snapshot of a dump, for the timeline of the passes.

    Attributes:
        counts: what is counted, in words.
        phases: where that means anything.
        elsewhere: why it means nothing in the others; ``""`` where there are none.
        opcodes: of the instructions that are looked at, one by one.
        sees: yields what is counted of one of them, with its snapshot in the context in the place
            of the first that the rule reads. It may look at whatever it gets to from the
            instruction; what it sees must rest on nothing else, as it is not asked again before any
            of that changes.
        reach: what it looks at: no other instruction, none outside the instruction's computation,
            or any of the module.
        holding: leave out instructions whose attributes, as printed, do not hold this text.
    """

    counts: str
    phases: tuple[Phase, ...]
    elsewhere: str
    opcodes: tuple[str, ...]
    sees: Callable[[Instruction, Context], Iterable[Seen]]
    reach: Literal["instruction", "computation", "module"]
    holding: str = ""


@dataclass(frozen=True)
class Rule:
    """A rule. A file in ``rules/`` makes one, as its ``RULE``.

    Attributes:
        code: such as ``HLA002``; never reused.
        slug: names the problem.
        summary: one line for listings.
        documentation: what it reports, why it matters, its limits, the source of each threshold.
        reads: the snapshots it needs; the first is the module that ``check`` is given.
        check: yields the findings of one program.
        tally: the key of ``Finding.details`` by which findings are counted apart.
        options: thresholds, with their defaults; those in bytes end in ``_bytes``.
        examples: each is a test.
        fixes: each is proven by compiling both layouts.
        check_refused: yields the findings of a program that jax refuses to trace for a reshape, so
            that there is no module to look at; ``None`` for a rule that has nothing to say of it.
        watch: how it is counted in any snapshot; ``None`` where it is not.
    """

    code: str
    slug: str
    summary: str
    documentation: str
    reads: tuple[AuditStage, ...]
    check: Callable[[Module, Context], Iterator[Finding]]
    tally: str
    examples: tuple[Example, ...]
    fixes: tuple[LayoutFix, ...]
    options: Mapping[str, int] = field(default_factory=dict)
    check_refused: Callable[[RefusedReshapeError], Iterator[Finding]] | None = None
    watch: Watch | None = None


# Many instructions are traced by few lines.
@lru_cache(maxsize=1 << 10)
def _source_and_callers(
    stack: tuple[SourceLocation, ...],
) -> tuple[SourceLocation | None, tuple[SourceLocation, ...]]:
    """The innermost frame, and those around it that are of the program that was traced: not of the
    code of ours that traced it."""
    callers = takewhile(lambda frame: not frame.file.endswith(_TRACERS), stack[1:])
    return (stack[0] if stack else None), tuple(islice(callers, MOST_FRAMES))


class Context:
    """What a check can ask for beside its module: other snapshots, options, and findings."""

    def __init__(
        self,
        rule: Rule,
        modules: Mapping[AuditStage, Module],
        options: Mapping[str, int] | None = None,
    ) -> None:
        self._rule = rule
        self._modules = modules
        self._options = {**rule.options, **(options or {})}

    def module(self, stage: AuditStage) -> Module:
        """The snapshot of one of the stages that the rule reads."""
        return self._modules[stage]

    def option(self, name: str) -> int:
        """The value of one of the rule's options."""
        return self._options[name]

    def executions(self, module: Module, instruction: Instruction) -> int | None:
        """How often ``instruction`` runs in one step; ``None`` where that is not known."""
        return executions(module)[instruction.computation.name]

    def finding(
        self,
        module: Module,
        instruction: Instruction,
        message: str,
        *,
        bytes: int | None,
        details: Mapping[str, Detail],
        severity: Severity = "warning",
        fixes: tuple[str, ...] = (),
        charged_to: tuple[Instruction, ...] = (),
        charged_in: Module | None = None,
        shape: str | None = None,
        element: int | None = None,
    ) -> Finding:
        """Report ``instruction`` of ``module``.

        Much that the compiler makes carries no op_name or source line: ``charged_to`` are the
        instructions that have a say in them, the first with one giving it; by default the reported
        one alone. They are of the module ``charged_in``, by default of ``module``.

        ``element`` is the value that is meant of a collective of several.
        """
        charged = charged_to or (instruction,)
        stacks = ((charged_in or module).frames(one) for one in charged)
        source, callers = _source_and_callers(next((stack for stack in stacks if stack), ()))
        return Finding(
            rule=self._rule.code,
            slug=self._rule.slug,
            severity=severity,
            message=message,
            instruction=instruction.name,
            computation=instruction.computation.name,
            opcode=instruction.opcode,
            shape=shape or instruction.shape.without_layout,
            bytes=bytes,
            executions=self.executions(module, instruction),
            estimated_cycles=instruction.estimated_cycles,
            op_name=next((one.op_name for one in charged if one.op_name), ""),
            source=source,
            stack=callers,
            details=details,
            fixes=fixes,
            traffic=traffic_of(module, instruction, element),
        )


def find_rule(rules: Sequence[Rule], name: str) -> Rule:
    """The rule with code or slug ``name``; case does not matter.

    Raises:
        UsageError: for what is neither.
    """
    for rule in rules:
        if name.lower() in (rule.code.lower(), rule.slug):
            return rule
    raise unknown_name("rule", name, [known for r in rules for known in (r.code, r.slug)])


def select_rules(
    rules: Sequence[Rule], select: Sequence[str] = (), ignore: Sequence[str] = ()
) -> tuple[Rule, ...]:
    """The rules to run: those in ``select`` (all, if empty) less those in ``ignore``.

    Raises:
        UsageError: for what is neither a code nor a slug.
    """
    chosen = {find_rule(rules, name).code for name in select} or {r.code for r in rules}
    chosen -= {find_rule(rules, name).code for name in ignore}
    return tuple(rule for rule in rules if rule.code in chosen)
