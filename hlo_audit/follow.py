"""Follows one instruction through the passes: where it came from and what was made of it.

Names are kept by most passes and by no means all. From one snapshot to the next an instruction is
looked for by its name, where opcode and shape are the same; else by op_name and shape, and by what
stands around it where several have those. An instruction that another one of that name accounts
for is never taken. Every step says how it was matched.

Where the instruction is part of a dot whose result is transposed, or copies a buffer that meets
such a transpose, the two are followed as well: at every run of XLA's algebraic simplifier, which
folds ``transpose(dot(a, b))`` into ``dot(b, a)``, the walk says what stood between them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise
from typing import Literal, NamedTuple

from hlo_audit.errors import unknown_name
from hlo_audit.hlo import Computation, Instruction, Module
from hlo_audit.hlo.dataflow import Site, origin
from hlo_audit.hlo.dots import Chain, spared_by_exchange, turns_back
from hlo_audit.passes import Passes
from hlo_audit.rule import Context, Finding, Rule

How = Literal[
    "name",
    "op_name and shape",
    "op_name, shape and neighbours",
    "op_name, shape and order",
    "shape and neighbours",
    "op_name and contraction",
]

FOLDING_PASS = "algsimp"
"""XLA's name for the algebraic simplifier, which folds a transpose into its dot."""

# The simplifier looks past these by itself.
_TRANSPARENT = frozenset({"convert", "copy", "bitcast"})

# What an operation on whole buffers hands on in place: a buffer that is copied meets a gradient
# through these.
_NOT_IN_PLACE = frozenset(
    {
        *("dot", "convolution", "transpose", "while", "conditional", "call", "fusion", "tuple"),
        *("custom-call", "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "reduce"),
        *("collective-permute", "optimization-barrier", "get-tuple-element"),
    }
)

# An optimizer's update of one parameter has some thirty operations.
_MOST_MET = 400

# A pass may rewrite a dot in a way that the next ones take back.
_LONGEST_GAP = 3

# What an instruction was before is asked so often at the most.
_MOST_ORIGINS = 8

# So many of one op_name and shape, each to be compared with each, are not told apart any more.
_MOST_ALIKE = 300


class Match(NamedTuple):
    """An instruction in another snapshot, and how it was recognised."""

    instruction: Instruction
    how: How


@dataclass(frozen=True)
class Identity:
    """What is looked for.

    Attributes:
        opcode: without ``-start``.
        shape: without layouts; one value of what has several.
        op_name: of the finding or the instruction.
        element: which of several values it is.
    """

    opcode: str
    shape: str
    op_name: str
    element: int | None = None


Kind = Literal[
    "stands", "appears", "changes", "was", "goes", "pair", "not-folded", "folded", "copies"
]


@dataclass(frozen=True)
class Step:
    """One thing that happens to what is followed.

    Attributes:
        position: of the snapshot.
        kind: what happens.
        text: in a sentence without a full stop.
        instruction: the instruction's name in the snapshot; ``""`` for none.
        how: how it was matched with the snapshot it is compared with; ``None`` for none.
        times: how often in a row, at other runs of the same pass.
    """

    position: int
    kind: Kind
    text: str
    instruction: str = ""
    how: How | None = None
    times: int = 1


@dataclass(frozen=True)
class Walk:
    """The way of one instruction.

    Attributes:
        position: of the snapshot that it was looked up in.
        instruction: there.
        first: the position since which it stands there without a gap.
        last: the position up to which it does.
        introduced_by: the pass that brought it.
        steps: in the order of the passes.
    """

    position: int
    instruction: Instruction
    first: int
    last: int
    introduced_by: str
    steps: tuple[Step, ...]


class Provenance:
    """Says of each finding of one module which pass brought it."""

    def __init__(
        self,
        passes: Passes,
        rules: Sequence[Rule],
        options: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """Take what the rules found, and the options that they found it with."""
        self._passes = passes
        self._rules = {rule.code: rule for rule in rules}
        self._counted = {
            rule.code: _Counted(passes, rule, (options or {}).get(rule.code)) for rule in rules
        }

    def introduced_by(self, finding: Finding) -> str | None:
        """The pass since which a finding stands there without a gap; ``before_optimizations`` where
        it is the program's own. ``None`` where the dump does not have it.

        What the rule counts in single computations, such as a copy that turns a buffer, has to be
        that in each snapshot: a copy that a pass left plain and another gave its order is the
        latter's. A transpose of a dot's result is as old as the two are.
        """
        place = locate(self._passes, self._rules[finding.rule], finding)
        if place is None:
            return None
        position, instruction = place
        chain = spared_by_exchange(instruction)
        if chain is not None:
            return self._passes.pass_name(min(_pairs(self._passes, position, chain)))
        identity = identity_of_finding(finding)
        counted = self._counted[finding.rule]
        is_counted = counted(position, instruction)
        for earlier in range(position - 1, -1, -1):
            match = find_in(self._passes.modules[earlier], instruction, identity)
            if match is None or (is_counted and not counted(earlier, match.instruction)):
                break
            position, instruction = earlier, match.instruction
            identity = _narrowed(identity, instruction)
        return self._passes.pass_name(position)


class _Counted:
    """Whether a rule that looks at single computations counts an instruction in a snapshot."""

    def __init__(self, passes: Passes, rule: Rule, options: Mapping[str, int] | None) -> None:
        self._passes = passes
        self._watch = rule.watch
        self._context = Context(rule, {}, options)

    def __call__(self, position: int, instruction: Instruction) -> bool:
        watch = self._watch
        return (
            watch is not None
            and watch.reach != "module"
            and self._passes.phases[position] in watch.phases
            and instruction.opcode in watch.opcodes
            and watch.holding in instruction.attribute_text
            and any(watch.sees(instruction, self._context))
        )


def locate(passes: Passes, rule: Rule, finding: Finding) -> tuple[int, Instruction] | None:
    """The snapshot that a finding was made in, and its instruction there."""
    for stage in rule.reads:
        position = passes.stage(stage)
        if position is None:
            continue
        computation = passes.modules[position].computations.get(finding.computation)
        if computation is not None and finding.instruction in computation:
            instruction = computation[finding.instruction]
            shapes = set(_shapes(instruction))
            if instruction.opcode == finding.opcode and (
                finding.shape in shapes or finding.opcode.endswith("-start")
            ):
                return position, instruction
    return None


def look_up(passes: Passes, name: str) -> tuple[int, Instruction]:
    """The last snapshot that has an instruction of this name, and the instruction.

    Raises:
        UsageError: where none has.
    """
    name = name.removeprefix("%")
    for position in range(len(passes) - 1, -1, -1):
        for computation in passes.modules[position].computations.values():
            if name in computation:
                return position, computation[name]
    known = [
        instruction.name
        for module in (passes.modules[0], passes.modules[-1])
        for instruction in module.instructions
    ]
    raise unknown_name("instruction", name, known)


def walk(
    passes: Passes, position: int, instruction: Instruction, identity: Identity | None = None
) -> Walk:
    """Follow an instruction from a snapshot to both ends of the compilation.

    Args:
        identity: of the value that is meant, for an instruction with several.
    """
    identity = identity or identity_of(instruction)
    stands = _stands(passes, position, instruction, identity)
    first, last = stands[0].position, stands[-1].position
    steps = [*_origins(passes, stands[0], identity), *_changes(passes, stands)]
    steps += _end(passes, stands[-1])
    steps += _fold(passes, stands)
    order = sorted(steps, key=lambda step: step.position)
    name = passes.pass_name(first)
    return Walk(position, instruction, first, last, name, tuple(order))


def identity_of_finding(finding: Finding) -> Identity:
    """What the instruction of a finding is recognised by."""
    element = finding.details.get("element")
    return Identity(
        _stem(finding.opcode),
        finding.shape,
        finding.op_name,
        element if isinstance(element, int) else None,
    )


def identity_of(instruction: Instruction) -> Identity:
    """What an instruction is recognised by."""
    return Identity(
        _stem(instruction.opcode), instruction.shape.without_layout, instruction.op_name
    )


def _narrowed(identity: Identity, found: Instruction) -> Identity:
    """What is looked for next: of what has one value, that one, in the type that it has there."""
    if found.shape.is_tuple:
        return identity
    return replace(identity, shape=found.shape.without_layout, element=None)


# -- matching


def find_in(module: Module, instruction: Instruction, identity: Identity) -> Match | None:
    """Recognise an instruction in another snapshot of its module; ``None`` where it is not there or
    several could be it."""
    computation = module.computations.get(instruction.computation.name)
    if computation is instruction.computation:
        return Match(instruction, "name")
    of_its_name = next(_by_name(module, instruction, computation), None)
    if of_its_name is not None:
        return Match(of_its_name, "name")
    candidates = (
        candidate
        for one in module.computations.values()
        if one is not instruction.computation
        for candidate in _with_opcode(one, identity.opcode)
        if identity.shape in _shapes(candidate)
        and candidate.op_name == identity.op_name
        # What stands under its own name in both is not this one.
        and not _persists(candidate, instruction.computation)
    )
    found = list(islice(candidates, _MOST_ALIKE + 1))
    if len(found) > _MOST_ALIKE:
        return None
    if len(found) == 1 and identity.op_name:
        return Match(found[0], "op_name and shape")
    nearest = _nearest(found, instruction, identity.element)
    if nearest is not None:
        return Match(
            nearest,
            "op_name, shape and neighbours" if identity.op_name else "shape and neighbours",
        )
    if not identity.op_name:
        return None
    # A cloned body holds several that only their order tells apart.
    rivals = [
        one
        for one in _with_opcode(instruction.computation, identity.opcode)
        if identity.shape in _shapes(one)
        and one.op_name == instruction.op_name
        and not any(_persists(one, computation) for computation in module.computations.values())
    ]
    if len(rivals) != len(found) or instruction not in rivals:
        return None
    return Match(found[rivals.index(instruction)], "op_name, shape and order")


def _by_name(
    module: Module, instruction: Instruction, same: Computation | None
) -> Iterator[Instruction]:
    """Of the same name, opcode and shape: in the computation of the same name, or wherever it was
    moved to."""
    others = (one for one in module.computations.values() if one is not same)
    for computation in itertools.chain(() if same is None else (same,), others):
        if instruction.name in computation:
            candidate = computation[instruction.name]
            if _alike(candidate, instruction):
                yield candidate


def _alike(one: Instruction, other: Instruction) -> bool:
    """Whether one name can be of one instruction; passes do change the element type of some."""
    return (
        one.opcode == other.opcode
        and one.shape.dimensions == other.shape.dimensions
        and [e.dimensions for e in one.shape.elements]
        == [e.dimensions for e in other.shape.elements]
        and one.custom_call_target == other.custom_call_target
    )


def _persists(candidate: Instruction, computation: Computation) -> bool:
    return candidate.name in computation and _alike(computation[candidate.name], candidate)


def _with_opcode(computation: Computation, opcode: str) -> list[Instruction]:
    spelt = (opcode, f"{opcode}-start")
    return list(computation.of_opcodes(spelt))


def _stem(opcode: str) -> str:
    return opcode.removesuffix("-start")


def _shapes(instruction: Instruction) -> list[str]:
    """The shapes, without layouts, of a result and of the values in it."""
    shape = instruction.shape
    return [shape.without_layout, *(element.without_layout for element in shape.elements)]


def _nearest(
    found: Sequence[Instruction], instruction: Instruction, element: int | None
) -> Instruction | None:
    """The one that has more in common with the instruction's neighbours than any other; ``None``
    where no single one has. Of an instruction with several values the operand of one is meant."""
    around = set(_neighbours(instruction))
    if element is not None and element < len(instruction.operands):
        around = set(_seen_as("reads", instruction.operands[element]))
    scores = sorted(
        ((len(around & set(_neighbours(one))), index) for index, one in enumerate(found)),
        reverse=True,
    )
    if not scores or not scores[0][0] or (len(scores) > 1 and scores[0][0] == scores[1][0]):
        return None
    return found[scores[0][1]]


def _neighbours(instruction: Instruction) -> Iterator[tuple[str, ...]]:
    for side, ones in (("reads", instruction.operands), ("read by", instruction.users)):
        for one in ones:
            yield from _seen_as(side, one)


def _seen_as(side: str, one: Instruction) -> Iterator[tuple[str, ...]]:
    yield side, one.opcode, one.shape.without_layout, one.op_name
    yield side, one.name, one.opcode, one.shape.without_layout


# -- the instruction itself


class _Stand(NamedTuple):
    """Where the instruction stands in one snapshot, and how it was found there."""

    position: int
    instruction: Instruction
    how: How


def _stands(
    passes: Passes, position: int, instruction: Instruction, identity: Identity
) -> list[_Stand]:
    """Every snapshot in which it stands without a gap, in order."""
    start = _Stand(position, instruction, "name")
    before = list(_follow(passes, range(position - 1, -1, -1), instruction, identity))
    after = list(_follow(passes, range(position + 1, len(passes)), instruction, identity))
    return [*reversed(before), start, *after]


def _follow(
    passes: Passes, positions: range, instruction: Instruction, identity: Identity
) -> Iterator[_Stand]:
    for position in positions:
        match = find_in(passes.modules[position], instruction, identity)
        if match is None:
            return
        instruction, identity = match.instruction, _narrowed(identity, match.instruction)
        yield _Stand(position, instruction, match.how)


def _changes(passes: Passes, stands: Sequence[_Stand]) -> Iterator[Step]:
    """Where its name, its computation, its order or what it reads changes for good."""
    kept: list[tuple[_Stand, _Stand]] = []
    for one, other in pairwise(stands):
        if one.instruction is other.instruction:
            continue
        if _state(one.instruction) == _state(other.instruction):
            continue
        if kept and _state(kept[-1][0].instruction) == _state(other.instruction):
            kept.pop()  # a swing: what was changed is as it was
        else:
            kept.append((one, other))
    for one, other in kept:
        before, after = one.instruction, other.instruction
        # The match was made from the side that was looked up first.
        how = other.how if other.how != "name" else one.how
        parts = []
        if before.name != after.name:
            parts.append(f"%{before.name} is now %{after.name}")
        if before.computation.name != after.computation.name:
            parts.append(f"moves from %{before.computation.name} into %{after.computation.name}")
        if _type(before) != _type(after):
            parts.append(f"becomes {_type(after)}, before {_type(before)}")
        if _order(before) and _order(after) and _order(before) != _order(after):
            parts.append(f"its order becomes {{{_order(after)}}}, before {{{_order(before)}}}")
        if _reads(before) != _reads(after):
            parts.append(f"reads {_listed(after.operands)}, before {_listed(before.operands)}")
        yield Step(other.position, "changes", "; ".join(parts), after.name, how)


def _state(instruction: Instruction) -> tuple[object, ...]:
    return (
        instruction.name,
        instruction.computation.name,
        _type(instruction),
        _order(instruction),
        _reads(instruction),
    )


def _type(instruction: Instruction) -> str:
    return instruction.shape.element_type


def _order(instruction: Instruction) -> str:
    return ",".join(
        map(str, () if instruction.shape.is_tuple else instruction.shape.minor_to_major)
    )


def _reads(instruction: Instruction) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (_before_moves(value.instruction).opcode, value.shape.dimensions)
        for value in instruction.operand_values
    ]


def _before_moves(operand: Instruction) -> Instruction:
    """What an operand is of, past a prefetch: those come and go."""
    for _ in range(2):
        if operand.opcode in ("copy-done", "copy-start") and operand.operands:
            operand = operand.operands[0]
    return operand


def _origins(passes: Passes, first: _Stand, identity: Identity) -> Iterator[Step]:
    """Where it first stands, and what it was made of, back to the program."""
    position, instruction, _ = first
    for _ in range(_MOST_ORIGINS):
        if position == 0:
            text = f"{_said(instruction)} stands in the program"
            yield Step(position, "stands", text, instruction.name)
            return
        earlier = passes.modules[position - 1]
        was = _was(earlier, instruction, identity)
        if was is None:
            text = f"{_said(instruction)}{_turn(instruction)} appears; "
            text += _read_before(passes.modules[position], earlier, instruction)
            yield Step(position, "appears", text, instruction.name)
            return
        text = f"{_said(instruction)} takes the place of {_said(was.instruction)}"
        yield Step(position, "was", text, instruction.name, was.how)
        identity = identity_of(was.instruction)
        stands = _stands(passes, position - 1, was.instruction, identity)
        before = [stand for stand in stands if stand.position < position]
        yield from _changes(passes, before)
        position, instruction, _ = before[0]


def _was(earlier: Module, instruction: Instruction, identity: Identity) -> Match | None:
    """What stood in its place one pass before: of its name, or of its op_name and shape."""
    computation = earlier.computations.get(instruction.computation.name)
    if computation is not None and instruction.name in computation:
        namesake = computation[instruction.name]
        if namesake.opcode != "parameter":
            return Match(namesake, "name")
    if not identity.op_name:
        return None
    found = [
        one
        for one in earlier.instructions
        if one.op_name == identity.op_name
        and one.opcode not in ("parameter", "constant")
        and identity.shape in _shapes(one)
        and not _persists(one, instruction.computation)
    ]
    return Match(found[0], "op_name and shape") if len(found) == 1 else None


def _read_before(module: Module, earlier: Module, instruction: Instruction) -> str:
    """What became of its operand before it was there, in words."""
    for value in instruction.operand_values:
        operand = origin(module, Site(value), through=frozenset()).instruction
        match = find_in(earlier, operand, identity_of(operand))
        if match is not None:
            readers = match.instruction.users
            if not readers:
                return f"%{match.instruction.name}, which it reads, was the result before"
            return f"before, %{match.instruction.name} was read by {_listed(readers)}"
    return "nothing of its name or op_name stood there before"


def _end(passes: Passes, last: _Stand) -> Iterator[Step]:
    if last.position + 1 >= len(passes):
        text = f"{_said(last.instruction)} stands in the module that runs"
        yield Step(last.position, "stands", text, last.instruction.name)
        return
    later, position = passes.modules[last.position + 1], last.position + 1
    instruction = last.instruction
    became = _was(later, instruction, identity_of(instruction))
    if became is None:
        yield Step(position, "goes", f"{_said(instruction)} is gone", instruction.name)
    else:
        text = f"%{instruction.name} gives way to {_said(became.instruction)}"
        yield Step(position, "goes", text, instruction.name, became.how)


# -- the dot and its transpose


def _fold(passes: Passes, stands: Sequence[_Stand]) -> list[Step]:
    """The story of the dot and the transpose that the instruction belongs to; empty for none."""
    found = _pair_of(passes, stands)
    if found is None:
        return []
    position, chain = found
    pairs = _pairs(passes, position, chain)
    steps = _between(passes, pairs)
    last = max(pairs)
    steps += _after_pair(passes, last, pairs[last].chain)
    return steps


def _pair_of(passes: Passes, stands: Sequence[_Stand]) -> tuple[int, Chain] | None:
    """The dot and the transpose it is of or stands between; for a copy, those whose result the
    copied buffer meets, where it turns the buffer between the transpose's two orders."""
    layouts = passes.stage("before_layout_assignment")
    for position, instruction, _ in stands:
        if layouts is not None and position > layouts:
            break
        for chain in _chains(instruction.computation):
            if instruction in (chain.dot, chain.transpose, *chain.between):
                return position, chain
    if stands[0].instruction.opcode != "copy" or layouts is None or stands[0].position <= layouts:
        return None
    before = passes.modules[layouts]
    for position, copy, _ in stands:
        source = _source(passes.modules[position], copy)
        match = None if source is None else find_in(before, source, identity_of(source))
        if match is None:
            continue
        for met in _met(match.instruction):
            met_chain = spared_by_exchange(met)
            if met_chain is not None and turns_back(copy, met):
                return layouts, met_chain
        return None
    return None


def _source(module: Module, copy: Instruction) -> Instruction | None:
    """What a copy is of; while layouts are assigned, that may stand in a tuple before it."""
    if not copy.operands:
        return None
    source = origin(module, Site(copy.operand_values[0]), through=frozenset()).instruction
    return source if source.shape.dimensions == copy.shape.dimensions else None


def _chains(computation: Computation) -> Iterator[Chain]:
    for transpose in computation.of_opcodes(("transpose",)):
        chain = spared_by_exchange(transpose)
        if chain is not None:
            yield chain


def _met(start: Instruction) -> Iterator[Instruction]:
    """The transposes whose results meet a buffer in operations that keep its dimensions."""
    waiting, seen = [start], {start}
    while waiting and len(seen) < _MOST_MET:
        one = waiting.pop(0)
        for other in (*one.operands, *one.users):
            if other in seen or other.shape.dimensions != start.shape.dimensions:
                continue
            seen.add(other)
            if other.opcode == "transpose":
                yield other
            elif other.opcode not in _NOT_IN_PLACE:
                waiting.append(other)


class _Pair(NamedTuple):
    """The dot and its transpose in one snapshot, and how the dot was found there."""

    chain: Chain
    how: How


def _pairs(passes: Passes, position: int, chain: Chain) -> dict[int, _Pair]:
    """The pair in each snapshot in which it stands, from the first to the last with no more than a
    short gap: by its dot, as passes move the transpose about."""
    pairs = {position: _Pair(chain, "name")}
    for positions in (range(position - 1, -1, -1), range(position + 1, len(passes))):
        current, missed = chain, 0
        for place in positions:
            found = _same_pair(passes.modules[place], current)
            if found is not None:
                pairs[place] = found
                current, missed = found.chain, 0
            elif missed == _LONGEST_GAP:
                break
            else:
                missed += 1
    return pairs


def _same_pair(module: Module, chain: Chain) -> _Pair | None:
    if module.computations.get(chain.dot.computation.name) is chain.dot.computation:
        return _Pair(chain, "name")
    chains = [one for computation in module.computations.values() for one in _chains(computation)]
    match = find_in(module, chain.dot, identity_of(chain.dot))
    if match is not None:
        same = next((one for one in chains if one.dot is match.instruction), None)
        return same and _Pair(same, match.how)
    # The partitioner changes names and sizes.
    found = _alike_chains(chains, chain.dot)
    rivals = _alike_chains(_chains(chain.dot.computation), chain.dot)
    if len(found) != len(rivals) or not chain.dot.op_name:
        return None
    index = [one.dot for one in rivals].index(chain.dot)
    return _Pair(found[index], "op_name and contraction")


def _alike_chains(chains: Iterable[Chain], dot: Instruction) -> list[Chain]:
    """Those of dots with the op_name, the rank and the contraction of ``dot``, each dot once."""
    found = {
        one.dot: one
        for one in chains
        if one.dot.op_name == dot.op_name
        and one.dot.shape.rank == dot.shape.rank
        and _contraction(one.dot) == _contraction(dot)
    }
    return list(found.values())


def _contraction(dot: Instruction) -> tuple[str, ...]:
    return tuple(
        dot.attributes.get(name, "")
        for name in ("lhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims")
    )


def _between(passes: Passes, pairs: Mapping[int, _Pair]) -> list[Step]:
    """What stands between the two, wherever that changes, and at each run of the simplifier."""
    steps = []
    shown: list[str] | None = None
    runs: list[tuple[int, str, str]] = []
    for position in sorted(pairs):
        chain, how = pairs[position]
        kinds = [_kind(one) for one in chain.between]
        if kinds != shown:
            text = f"{_said(chain.dot)} → {''.join(f'{kind} → ' for kind in kinds)}"
            text += _said(chain.transpose)
            if shown is None:
                text += ": the dot with its operands exchanged would give this at once"
            elif gone := Counter(shown) - Counter(kinds):
                text += f": no longer between them, after {len(runs)} runs of {FOLDING_PASS}: "
                text += ", ".join(gone.elements())
            # The match was made from the side that was looked up first.
            earlier = pairs.get(position - 1)
            if how == "name" and earlier is not None:
                how = earlier.how
            steps.append(
                Step(position, "pair", text, chain.transpose.name, None if shown is None else how)
            )
            shown = kinds
        if passes.snapshots[position].after == FOLDING_PASS:
            in_the_way = [one for one in chain.between if one.opcode not in _TRANSPARENT]
            why = f"{_listed(in_the_way)} between" if in_the_way else "nothing between that hinders"
            runs.append((position, chain.transpose.name, why))
    for (name, why), alike in groupby(runs, key=lambda run: (run[1], run[2])):
        same = list(alike)
        text = f"runs and does not fold %{name} into its dot: {why}"
        steps.append(Step(same[0][0], "not-folded", text, name, times=len(same)))
    return steps


def _kind(instruction: Instruction) -> str:
    if instruction.opcode == "custom-call":
        return f"{instruction.custom_call_target} call"
    return instruction.opcode


def _after_pair(passes: Passes, last: int, chain: Chain) -> Iterator[Step]:
    """What became of the two: one dot with its operands exchanged, or copies."""
    position = last + 1
    if position < len(passes):
        folded = _folded(passes.modules[position], chain)
        name = chain.transpose.name
        if folded is not None:
            text = (
                f"%{name} is folded into its dot: {_said(folded)} has the operands of "
                f"%{chain.dot.name} exchanged"
            )
            yield Step(position, "folded", text, folded.name)
            return
        text = f"%{name} is no longer there as a transpose of %{chain.dot.name}"
        yield Step(position, "goes", text, name)
    layouts = passes.stage("before_layout_assignment")
    if layouts is None or last < layouts or layouts + 1 >= len(passes):
        return
    copies = _turned(passes.modules[layouts + 1], chain.transpose)
    if copies:
        text = (
            f"{len(copies)} copies turn buffers of {chain.transpose.shape.without_layout} between "
            f"the two orders of %{chain.transpose.name}: {_listed(copies)}"
        )
        yield Step(layouts + 1, "copies", text, copies[0].name)


def _folded(module: Module, chain: Chain) -> Instruction | None:
    """A dot of the transposed shape that was not there before, with the operands exchanged."""
    wanted = [one.shape.dimensions for one in reversed(chain.dot.operands)]
    before = chain.dot.computation
    for computation in module.computations.values():
        for dot in _with_opcode(computation, "dot"):
            is_turned = (
                dot.shape.dimensions == chain.transpose.shape.dimensions
                and [one.shape.dimensions for one in dot.operands] == wanted
            )
            if is_turned and not _persists(dot, before):
                return dot
    return None


def _turned(module: Module, transpose: Instruction) -> list[Instruction]:
    return [
        copy
        for computation in module.computations.values()
        for copy in _with_opcode(computation, "copy")
        if copy.opcode == "copy" and copy.operands and turns_back(copy, transpose)
    ]


# -- words


def _said(instruction: Instruction) -> str:
    return f"%{instruction.name} {instruction.shape.without_layout} {_kind(instruction)}"


def _turn(instruction: Instruction) -> str:
    """From which order a copy goes to which, where it changes it."""
    if instruction.opcode != "copy" or not instruction.operands:
        return ""
    before, after = instruction.operand_values[0].shape, instruction.shape
    if before.dimensions != after.dimensions or before.moving_order == after.moving_order:
        return ""
    orders = [",".join(map(str, shape.minor_to_major)) for shape in (before, after)]
    return f" from {{{orders[0]}}} to {{{orders[1]}}}"


def _listed(instructions: Sequence[Instruction]) -> str:
    """Up to four by their names and kinds."""
    names = [f"%{one.name} ({_kind(one)})" for one in instructions[:4]]
    more = f" and {len(instructions) - 4} more" if len(instructions) > 4 else ""
    return ", ".join(names) + more
