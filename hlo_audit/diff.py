"""Two programs side by side: whether they can be compared, what differs, and from which pass on.

The names of instructions say nothing across two compiles. What is compared instead:

- findings by their fingerprints, each as often as it is there;
- instructions by :func:`hlo_audit.matching.match`;
- snapshots of passes by what they do in bulk: see :mod:`hlo_audit.parting`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hlo_audit.compiling import Compiling, handled
from hlo_audit.cost import NO_TRAFFIC, Traffic
from hlo_audit.dump import ModuleDump, read_dump, read_module
from hlo_audit.errors import UsageError, unknown_name
from hlo_audit.hlo import Module, Shape
from hlo_audit.manifest import read_manifest
from hlo_audit.matching import Matching, match
from hlo_audit.parting import Parting, find_partings
from hlo_audit.program import Lowering, Subject
from hlo_audit.program_audit import (
    ProgramAudit,
    RuleOptions,
    audit_final,
    audit_module_dump,
    audit_recorded,
)
from hlo_audit.rule import Finding, Rule

_MOST_LABELS = 6


@dataclass(frozen=True)
class Side:
    """One of the two programs.

    Attributes:
        name: tells it from the other in a few letters: ``explicit``, or ``B``.
        audit: what the rules found in it.
        module: the final module; of a single file the one that it holds.
        dump: its snapshots; ``None`` for a single file.
    """

    name: str
    audit: ProgramAudit
    module: Module
    dump: ModuleDump | None = None


@dataclass(frozen=True)
class Both:
    """The same number of both sides; ``None`` for one that was not counted."""

    a: int | None
    b: int | None

    @property
    def difference(self) -> int | None:
        """Of the second to the first."""
        return None if self.a is None or self.b is None else self.b - self.a


@dataclass(frozen=True)
class RuleDiff:
    """A rule on both sides.

    Attributes:
        counts: of findings, notes too.
        bytes: of the findings, each run of them counted once; ``None`` as in ``counts``.
        only_a, only_b: the findings that the other side does not have, by fingerprint.
        in_both: those of ``a`` that it has.
    """

    rule: Rule
    counts: Both
    bytes: Both
    only_a: tuple[Finding, ...]
    only_b: tuple[Finding, ...]
    in_both: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Total:
    """How many there are of something in a step, and what they move; loops by their trips."""

    count: int = 0
    traffic: Traffic = NO_TRAFFIC


@dataclass(frozen=True)
class EntryRow:
    """A parameter or a result of the entry, on both sides; ``None`` where a side has none.

    Attributes:
        kind: which of the two.
        name: of the argument; of a result that of the argument whose buffer it takes; ``""`` for
            none.
        a, b: shape and layout.
    """

    kind: Literal["parameter", "result"]
    name: str
    a: Shape | None
    b: Shape | None


@dataclass(frozen=True)
class Diff:
    """What differs between two programs.

    Attributes:
        obstacles: why they are not comparable; empty where they are.
        notes: what else a reader should know of them.
        identical: whether the final modules are the same but for names and metadata, and the rules
            find as much.
        rules: each rule on both sides.
        copies: the relayout copies by where they stand: ``entry`` for those of parameters and
            results, else the ``place`` of HLA002.
        collectives: by kind.
        opcodes: instructions of the final modules by opcode.
        entry: every parameter and result.
        matching: of the final modules; ``None`` where they are not compared.
        partings: where they part for good. Two where they differ from the start: that, and the
            first pass that changes in what.
        no_parting: why there is none.
    """

    a: Side
    b: Side
    obstacles: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    identical: bool = False
    rules: tuple[RuleDiff, ...] = ()
    copies: Mapping[str, tuple[Total, Total]] = field(default_factory=dict)
    collectives: Mapping[str, tuple[Total, Total]] = field(default_factory=dict)
    opcodes: Mapping[str, Both] = field(default_factory=dict)
    entry: tuple[EntryRow, ...] = ()
    matching: Matching | None = None
    partings: tuple[Parting, ...] = ()
    no_parting: str = ""

    @property
    def comparable(self) -> bool:
        return not self.obstacles


def diff_subjects(
    subjects: Sequence[Subject],
    rules: Sequence[Rule],
    options: RuleOptions | None = None,
    how: Compiling | None = None,
    *,
    module: str | None = None,
    force: bool = False,
) -> Diff:
    """Compare two programs; those that are to be compiled are compiled first.

    Args:
        subjects: two of them; of more, those that are there again do not count.
        module: the name of the module to take from a dump folder that holds several.
        force: compare what is not comparable too.

    Raises:
        UsageError: where there are not two, or a dump folder holds several modules.
        HloAuditError: for what cannot be compiled or read.
    """
    if len(subjects) != 2:
        subjects = _distinct(subjects)
    if len(subjects) != 2:
        raise _not_two(subjects)
    with handled(
        subjects,
        how or Compiling(),
        compiled=lambda _, outcome: outcome if isinstance(outcome, Exception) else outcome.folder,
        recorded=lambda subject: subject.path,
    ) as found:
        sides = []
        for subject, path in zip(subjects, found, strict=True):
            if isinstance(path, Exception):
                raise path
            sides.append(_read_side(subject.label, path, rules, options or {}, module))
        names = side_names(*(side.audit for side in sides))
        a, b = (
            Side(name, side.audit, side.module, side.dump)
            for name, side in zip(names, sides, strict=True)
        )
        return compare(a, b, force=force)


def _distinct(subjects: Sequence[Subject]) -> list[Subject]:
    """Each once: a name that is given twice stands for no more programs than one."""
    found: list[Subject] = []
    for subject in subjects:
        if subject not in found:
            found.append(subject)
    return found


def _not_two(subjects: Sequence[Subject]) -> UsageError:
    labels = [subject.label for subject in subjects]
    more = f" and {len(labels) - _MOST_LABELS} more" if len(labels) > _MOST_LABELS else ""
    these = "this is one" if len(labels) == 1 else f"these are {len(labels)}"
    if any(isinstance(subject, Lowering) for subject in subjects):
        hint = "choose by --mode, --layout or --topology"
    elif len(labels) == 1:
        hint = "give a second dump or file"
    else:
        hint = "give two of them"
    return UsageError(
        f"a diff is of two programs, and {these}: {', '.join(labels[:_MOST_LABELS])}{more}",
        hint=hint,
    )


def _read_side(
    label: str, path: Path, rules: Sequence[Rule], options: RuleOptions, module: str | None
) -> Side:
    if not path.is_dir():
        held = read_module(path)
        if str(path) == "-":
            audit = audit_final(label, held, rules, options)
        else:
            (audit,) = audit_recorded(path, rules, options)
        return Side("", _checked(audit), held)
    dump = _chosen(path, module)
    manifest = read_manifest(dump.folder)
    of_this = manifest if manifest is not None and manifest.module == dump.name else None
    program = of_this.program if of_this is not None else label
    audit = _checked(audit_module_dump(program, dump, of_this, rules, options))
    last = dump.final or dump.snapshots[-1]
    return Side("", audit, last.read(), dump)


def _checked(audit: ProgramAudit) -> ProgramAudit:
    if audit.error is not None:
        raise audit.error
    return audit


def _chosen(folder: Path, name: str | None) -> ModuleDump:
    """The module of a dump folder: the named one, the one that its manifest is of, the only one."""
    modules = read_dump(folder).modules
    if name is None:
        manifests = {module.folder: read_manifest(module.folder) for module in modules}
        of_manifest = [
            module
            for module in modules
            if (manifest := manifests[module.folder]) and manifest.module == module.name
        ]
        modules = tuple(of_manifest[-1:]) or modules
    else:
        named = tuple(module for module in modules if name in (module.name, module.prefix))
        if not named:
            raise unknown_name(f"module in {folder}", name, [module.name for module in modules])
        modules = named
    if len(modules) > 1:
        raise UsageError(
            f"{folder} holds {len(modules)} modules: "
            + ", ".join(module.prefix for module in modules[:6]),
            hint=f"choose one by --module, such as --module {modules[-1].prefix}",
        )
    return modules[0]


def side_names(a: ProgramAudit, b: ProgramAudit) -> tuple[str, str]:
    """The mode, layout or topology of each, whichever tells them apart; else A and B."""
    for one, other in ((a.mode, b.mode), (a.layout, b.layout), (a.target, b.target)):
        if one and other and one != other:
            return one, other
    return "A", "B"


def compare(a: Side, b: Side, *, force: bool = False) -> Diff:
    """Compare two programs that are there.

    Args:
        force: compare them even where they are not comparable.

    Raises:
        DumpError, ParseError: for a snapshot that cannot be read.
    """
    obstacles, notes = _obstacles(a, b), _notes(a, b)
    if obstacles and not force:
        return Diff(a, b, obstacles, notes)
    rules = tuple(_rule_diff(rule, a.audit, b.audit) for rule in a.audit.rules)
    differ = any(one.counts.difference or one.bytes.difference for one in rules)
    identical = not obstacles and not differ and _digest(a.module) == _digest(b.module)
    partings: tuple[Parting, ...] = ()
    no_parting = "they are the same"
    if not identical:
        partings, no_parting = find_partings(a.dump, b.dump)
    opcodes = [Counter(i.opcode for i in side.module.instructions) for side in (a, b)]
    return Diff(
        a,
        b,
        obstacles,
        notes,
        identical,
        rules,
        _side_by_side(_copies(a.audit), _copies(b.audit)),
        _side_by_side(_collectives(a.audit), _collectives(b.audit)),
        {
            name: Both(opcodes[0][name], opcodes[1][name])
            for name in sorted({*opcodes[0], *opcodes[1]})
        },
        tuple(_entry(a.module, b.module)),
        match(a.module, b.module),
        partings,
        no_parting,
    )


# -- whether they can be compared


def _obstacles(a: Side, b: Side) -> tuple[str, ...]:
    facts: list[tuple[str, object, object]] = [
        ("platform", a.audit.platform, b.audit.platform),
        ("topology", a.audit.topology, b.audit.topology),
        ("number of devices", a.module.device_count, b.module.device_count),
        ("number of while loops", a.audit.while_loops, b.audit.while_loops),
    ]
    found = [
        f"the {what} differs: {one} and {other}"
        for what, one, other in facts
        if one != other and one is not None and other is not None
    ]
    flags = sorted({*a.audit.xla_flags.items(), *b.audit.xla_flags.items()})
    for name in dict.fromkeys(name for name, _ in flags):
        one, other = (side.audit.xla_flags.get(name, "not set") for side in (a, b))
        if one != other:
            found.append(f"the flag {name} differs: {one} and {other}")
    if a.module.is_scheduled != b.module.is_scheduled:
        found.append("one is a final module and the other is not")
    arguments = [[one.shape for one in side.module.entry.parameters] for side in (a, b)]
    only = [_others(arguments[i], arguments[1 - i]) for i in (0, 1)]
    if only[0] or only[1]:
        found.append(
            f"they take other arguments: {a.name} {_listed(only[0])}, {b.name} {_listed(only[1])}"
            + ("" if a.module.name == b.module.name else f" ({a.module.name}, {b.module.name})")
        )
    return tuple(found)


def _others(mine: Sequence[Shape], others: Sequence[Shape]) -> Counter[str]:
    """The arguments whose like the other side lacks: a layout may store an array in another shape,
    but it has as many elements."""
    left = Counter((shape.element_type, _elements(shape)) for shape in others)
    lacking: Counter[str] = Counter()
    for shape in mine:
        like = (shape.element_type, _elements(shape))
        left[like] -= 1
        if left[like] < 0:
            lacking[shape.without_layout] += 1
    return lacking


def _elements(shape: Shape) -> int:
    return sum(map(_elements, shape.elements)) if shape.is_tuple else shape.element_count


def _listed(counts: Counter[str], most: int = 3) -> str:
    parts = [f"{count} of {name}" for name, count in list(counts.items())[:most]]
    more = len(counts) - most
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "") if parts else "no others"


def _notes(a: Side, b: Side) -> tuple[str, ...]:
    found = []
    if a.module.name != b.module.name:
        found.append(f"the modules have other names: {a.module.name} and {b.module.name}")
    for name in dict.fromkeys((*a.audit.versions, *b.audit.versions)):
        one, other = (side.audit.versions.get(name) for side in (a, b))
        if one and other and one != other:
            found.append(f"the {name} differs: {one} and {other}")
    if any(side.audit.topology is None for side in (a, b)):
        found.append("a dump without a manifest says neither its topology nor its flags")
    return tuple(found)


# -- findings


def _rule_diff(rule: Rule, a: ProgramAudit, b: ProgramAudit) -> RuleDiff:
    mine = [[f for f in audit.findings if f.rule == rule.code] for audit in (a, b)]
    counts = Both(*(audit.counts.get(rule.code) for audit in (a, b)))
    sizes = Both(
        *(
            None if count is None else sum(_bytes(finding) for finding in found)
            for count, found in zip((counts.a, counts.b), mine, strict=True)
        )
    )
    if counts.difference is None:  # what was not looked for is not missing
        return RuleDiff(rule, counts, sizes, (), ())
    only_a, only_b = _lacking(*mine), _lacking(*reversed(mine))
    lacking = {id(finding) for finding in only_a}
    in_both = tuple(finding for finding in mine[0] if id(finding) not in lacking)
    return RuleDiff(rule, counts, sizes, only_a, only_b, in_both)


def _bytes(finding: Finding) -> int:
    return (finding.bytes or 0) * (1 if finding.executions is None else finding.executions)


def _lacking(mine: Sequence[Finding], others: Sequence[Finding]) -> tuple[Finding, ...]:
    left = Counter(finding.fingerprint for finding in others)
    lacking = []
    for finding in mine:
        left[finding.fingerprint] -= 1
        if left[finding.fingerprint] < 0:
            lacking.append(finding)
    return tuple(lacking)


def _copies(audit: ProgramAudit) -> dict[str, Total]:
    totals: dict[str, Total] = {}
    for finding in audit.findings:
        if finding.rule == "HLA002":
            place = str(finding.details.get("place", ""))
            _add(
                totals,
                "entry" if place in ("parameter", "result") else place,
                finding.traffic,
                finding.executions,
            )
    return totals


def _collectives(audit: ProgramAudit) -> dict[str, Total]:
    totals: dict[str, Total] = {}
    for one in audit.collectives or ():
        _add(totals, one.kind, one.traffic, one.executions)
    return totals


def _add(totals: dict[str, Total], name: str, traffic: Traffic | None, runs: int | None) -> None:
    before = totals.get(name, Total())
    moved = (traffic or NO_TRAFFIC).times(runs)
    totals[name] = Total(before.count + 1, before.traffic + moved)


def _side_by_side(a: Mapping[str, Total], b: Mapping[str, Total]) -> dict[str, tuple[Total, Total]]:
    return {name: (a.get(name, Total()), b.get(name, Total())) for name in sorted({*a, *b})}


# -- the entry


def _entry(a: Module, b: Module) -> Iterator[EntryRow]:
    """Parameters by the names of their arguments where these are there once, else by number."""
    sides = [module.entry.parameters for module in (a, b)]
    names = [[parameter.op_name for parameter in parameters] for parameters in sides]
    once = [
        {name for name, count in Counter(found).items() if name and count == 1} for found in names
    ]
    common = once[0] & once[1]
    by_name = {p.op_name: p.shape for p in sides[1] if p.op_name in common}
    rest = [p for p in sides[1] if p.op_name not in common]
    for parameter in sides[0]:
        if parameter.op_name in common:
            shape: Shape | None = by_name[parameter.op_name]
        else:
            shape = rest.pop(0).shape if rest else None
        yield EntryRow("parameter", parameter.op_name, parameter.shape, shape)
    for parameter in rest:
        yield EntryRow("parameter", parameter.op_name, None, parameter.shape)
    results = [results_of(module) for module in (a, b)]
    for number in range(max(map(len, results))):
        rows = [found[number] if number < len(found) else None for found in results]
        name = next((row[0] for row in rows if row is not None and row[0]), "")
        yield EntryRow("result", name, *(row[1] if row is not None else None for row in rows))


def results_of(module: Module) -> list[tuple[str, Shape]]:
    """The results of the entry: see :attr:`EntryRow.name` for their names."""
    shape = module.entry.root.shape
    parameters = module.entry.parameters
    donated = {
        alias.output_index: parameters[alias.parameter_number].op_name
        for alias in module.input_output_aliases
        if alias.parameter_number < len(parameters) and not alias.parameter_index
    }
    if not shape.is_tuple:
        return [(donated.get((), ""), shape)]
    return [(donated.get((n,), ""), one) for n, one in enumerate(shape.elements)]


# -- the same module

_NAME = re.compile(r"%([\w.-]++)")
_UNSTABLE = ("metadata", "channel_id", "frontend_attributes", "origin")


def _digest(module: Module) -> Hashable:
    """The same for two modules that differ in names and metadata only."""
    known: dict[str, int] = {}
    for name, computation in module.computations.items():
        places = {instruction.name: n for n, instruction in enumerate(computation)}

        def place(
            match: re.Match[str], places: Mapping[str, int] = places
        ) -> str:  # of what it names, not its name
            return f"%{known.get(match[1], places.get(match[1], 0))}"

        known[name] = hash(
            tuple(
                (
                    i.opcode,
                    str(i.shape),
                    i.is_root,
                    _NAME.sub(place, i.literal),
                    tuple(operand.index for operand in i.operands),
                    tuple(value.tuple_index for value in i.operand_values),
                    tuple(
                        (key, _NAME.sub(place, text))
                        for key, text in sorted(i.attributes.items())
                        if key not in _UNSTABLE
                    ),
                )
                for i in computation
            )
        )
    header = [module.header.get(key) for key in ("entry_computation_layout", "input_output_alias")]
    return (tuple(header), known.get(module.entry_name or ""), module.device_count)
