"""Rules x module -> what one program is reported to hold.

The rules come as an argument, so that this layer knows none of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from hlo_audit.cost import (
    HARDWARE,
    Collective,
    Cost,
    Hardware,
    collectives,
    estimate_cost,
    hardware_of,
)
from hlo_audit.dump import (
    AuditStage,
    Dump,
    ModuleDump,
    read_dump,
    read_module,
    stage_of_file,
)
from hlo_audit.errors import HloAuditError, InternalError, RefusedReshapeError
from hlo_audit.hlo import Module, SourceLocation
from hlo_audit.hlo.collector import collected_at_the_end
from hlo_audit.manifest import Manifest, read_manifest
from hlo_audit.program import Lowering, Setting
from hlo_audit.rule import Context, Finding, LayoutFix, Rule

RuleOptions = Mapping[str, Mapping[str, int]]
"""Rule code -> option -> value; what is not named keeps its default."""


@dataclass(frozen=True)
class Timing:
    """How long a program took; differs from run to run.

    Attributes:
        lower_seconds: wall time to build and trace it.
        compile_seconds: wall time of the compiler; ``None`` where the dump was in the cache and
            nobody knows how long it took to make.
        cached: whether these are the times of the run that put the dump into the cache.
    """

    lower_seconds: float
    compile_seconds: float | None
    cached: bool


@dataclass(frozen=True)
class Suppressed:
    """A finding that somebody has given a reason to leave.

    Attributes:
        by: ``config``, or ``source`` for a comment on the line.
        reason: as it was given.
        where: file and line of the suppression.
    """

    finding: Finding
    by: Literal["config", "source"]
    reason: str
    where: str


@dataclass(frozen=True)
class ProgramAudit:
    """What the rules found in one program, or the error that kept them from looking.

    Attributes:
        program: the name on the command line.
        mode, layout, platform, topology: ``None`` where a dump or a file does not say.
        mesh, settings, xla_flags: what it was compiled with.
        variant: tells it from others of the same program, mode and layout: see :func:`tell_apart`.
        versions: of python, jax, jaxlib and libtpu, where the dump says.
        module: the HLO module's name.
        while_loops: in the final module; dumps with other numbers of loops are not comparable.
        findings: by rule, in the order of the module; those that are suppressed left out.
        suppressed: those; neither counted nor held against anything.
        skipped: rule code -> why the rule could not look.
        cost: ``None`` where the module holds no estimates.
        devices: that the module runs on; ``None`` where it is not known.
        collectives: of the final module; ``None`` where that is not here.
        files: the files that the snapshots were read from, where those stay: not of a program that
            was compiled.
        traced: the Python lines that the module comes from, where it says so in tables.
        timing: of a program that was compiled; no part of what was found.
    """

    program: str
    mode: str | None = None
    layout: str | None = None
    platform: str | None = None
    topology: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Setting] = field(default_factory=dict)
    xla_flags: Mapping[str, str] = field(default_factory=dict)
    variant: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    module: str | None = None
    while_loops: int | None = None
    rules: tuple[Rule, ...] = ()
    findings: tuple[Finding, ...] = ()
    suppressed: tuple[Suppressed, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    cost: Cost | None = None
    devices: int | None = None
    collectives: tuple[Collective, ...] | None = None
    files: Mapping[AuditStage, Path] = field(default_factory=dict)
    traced: frozenset[SourceLocation] = frozenset()
    error: HloAuditError | None = None
    timing: Timing | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        """Names it among others: ``lm-head/explicit/embed-vocab``."""
        parts = (self.program, self.mode, self.layout, self.variant)
        return "/".join(part for part in parts if part)

    @property
    def target(self) -> str:
        """The chips that it is for, or the number of CPU devices, for a reader; ``""`` where it is
        not known."""
        if self.topology and self.platform == "cpu":
            return f"{self.topology} CPU {'device' if self.topology == '1' else 'devices'}"
        return self.topology or ""

    @cached_property  # asked for by each of its findings
    def hardware(self) -> Hardware | None:
        """One of its devices, where its topology says which chip it is of."""
        return hardware_of(self.topology, self.devices)

    def seconds_of(self, finding: Finding) -> float:
        """An estimate of the time that all runs of a finding in a step take alone, to order by.

        By the compiler's cycles; what has none, as collectives, by what it moves over HBM and over
        the wire; what is no instruction of the final module by its size, read and written. On a
        chip that is not known, or whose clock is not, as on v5p: an order needs ratios only.
        """
        usual = HARDWARE["v5p"]
        chip = self.hardware or usual
        runs = 1 if finding.executions is None else finding.executions
        if finding.estimated_cycles:
            return runs * finding.estimated_cycles / (chip.clock_hertz or usual.clock_hertz or 1)
        moved = finding.traffic.seconds(chip) if finding.traffic else None
        return runs * (moved or 2 * (finding.bytes or 0) / chip.copy_bytes_per_second)

    @property
    def counts(self) -> dict[str, int | None]:
        """Findings by rule code; ``None`` for a rule that could not look."""
        found = Counter(finding.rule for finding in self.findings)
        return {r.code: None if r.code in self.skipped else found[r.code] for r in self.rules}

    def fixes_of(self, finding: Finding) -> tuple[str, ...]:
        """The fixes of a finding, less those that are in place or known not to help here.

        A reference model is offered its own layouts alone, any other program those of all models.
        """
        rule = next(rule for rule in self.rules if rule.code == finding.rule)
        models = {fix.model for known in self.rules for fix in known.fixes}
        helps = {
            fix.name
            for fix in rule.fixes
            if self._may_help(fix, rule)
            and (fix.model == self.program or self.program not in models)
        }
        return tuple(name for name in finding.fixes if name in helps and name != self.layout)

    def _may_help(self, fix: LayoutFix, rule: Rule) -> bool:
        if self.mode is None:
            return True
        topology = self.topology or ""
        if any(other.answers_for(topology) for other in rule.fixes):
            # Measured there: a fix that does not claim to clear does not.
            return any(target.covers(self.mode, topology) for target in fix.clears)
        return any(target.mode == self.mode for target in fix.clears)

    @property
    def tallies(self) -> dict[str, dict[str, int]]:
        """Findings by rule code and by the class that the rule tells apart."""
        tallies: dict[str, Counter[str]] = {}
        keys = {rule.code: rule.tally for rule in self.rules}
        for finding in self.findings:
            tally = tallies.setdefault(finding.rule, Counter())
            tally[str(finding.details.get(keys[finding.rule]))] += 1
        return {code: dict(tally) for code, tally in tallies.items()}

    @property
    def bytes(self) -> dict[str, int]:
        """The findings' bytes, summed by rule code; rules whose findings move none left out."""
        totals: dict[str, int] = {}
        for finding in self.findings:
            if finding.bytes is not None:
                totals[finding.rule] = totals.get(finding.rule, 0) + finding.bytes
        return totals


def audit_recorded(path: Path, rules: Sequence[Rule], options: RuleOptions) -> list[ProgramAudit]:
    """Audit each module of a dump folder, or the one module of an HLO file.

    A module that cannot be read is an audit with an error; the others are audited.

    Raises:
        DumpError: where there is nothing to audit.
        ParseError: for a file that holds no whole module.
    """
    if path.is_dir():
        return [
            replace(
                audit_module_dump(str(module.folder), module, _manifest_of(module), rules, options),
                files={stage: snapshot.path for stage, snapshot in module.audited.items()},
            )
            for module in read_dump(path).modules
        ]
    return [audit_single(path, read_module(path), rules, options)]


def audit_single(
    path: Path, module: Module, rules: Sequence[Rule], options: RuleOptions
) -> ProgramAudit:
    """Audit the module that was read from the file ``path``; the rules that read a snapshot which
    it is not are skipped."""
    stage = stage_of_file(path, module)
    readers: dict[AuditStage, Callable[[], Module]] = {stage: lambda: module} if stage else {}
    files = {stage: path} if stage else {}
    subject = ProgramAudit(str(path), module=module.name, files=files)
    return _audit(subject, readers, rules, options)


def audit_final(
    program: str, module: Module, rules: Sequence[Rule], options: RuleOptions
) -> ProgramAudit:
    """Audit a final module at hand; the rules that read other snapshots are skipped."""
    return _audit(ProgramAudit(program), {"final": lambda: module}, rules, options)


def _manifest_of(module: ModuleDump) -> Manifest | None:
    """The manifest of the folder that a module lies in, where it is of this module: the compile of
    a program may dump others beside it."""
    manifest = read_manifest(module.folder)
    return manifest if manifest is not None and manifest.module == module.name else None


def described_by(compiled: Lowering | Manifest) -> ProgramAudit:
    """An audit that says what was compiled and how, and nothing of what was found yet."""
    return ProgramAudit(
        compiled.program,
        mode=compiled.mode,
        layout=compiled.layout,
        platform=compiled.platform,
        topology=compiled.topology,
        mesh=compiled.mesh,
        settings=compiled.settings,
        xla_flags=compiled.xla_flags,
    )


def audit_lowered(
    lowering: Lowering, folder: Path, rules: Sequence[Rule], options: RuleOptions
) -> ProgramAudit:
    """Audit the dump that ``lowering`` was compiled to."""
    dump = read_dump(folder)
    return audit_module_dump(lowering.program, step_of(dump), dump.manifest, rules, options)


def step_of(dump: Dump) -> ModuleDump:
    """The module of the program that a dump was made for: the compile may dump others beside."""
    return next(
        (m for m in dump.modules if dump.manifest and m.name == dump.manifest.module),
        dump.modules[-1],
    )


def audit_refused(
    lowering: Lowering, error: RefusedReshapeError, rules: Sequence[Rule]
) -> ProgramAudit:
    """Audit a program that jax refuses to trace: a finding, where a rule knows the fault; else the
    error itself."""
    subject = replace(described_by(lowering), rules=tuple(rules))
    found = {
        rule.code: tuple(rule.check_refused(error))
        for rule in rules
        if rule.check_refused is not None
    }
    if not any(found.values()):
        return replace(subject, error=error)
    return replace(
        subject,
        findings=tuple(finding for findings in found.values() for finding in findings),
        skipped={
            rule.code: "the program was refused while it was traced: there is no module"
            for rule in rules
            if not found.get(rule.code)
        },
    )


def audit_module_dump(
    program: str,
    dump: ModuleDump,
    manifest: Manifest | None,
    rules: Sequence[Rule],
    options: RuleOptions,
) -> ProgramAudit:
    """Audit one module of a dump, from the snapshots that the rules read."""
    readers: dict[AuditStage, Callable[[], Module]] = {
        stage: snapshot.read for stage, snapshot in dump.audited.items()
    }
    subject = ProgramAudit(program, platform=dump.platform, module=dump.name or None)
    if manifest is not None:
        compiled = described_by(manifest)
        subject = replace(compiled, versions=manifest.versions, module=dump.name or None)
    return _audit(subject, readers, rules, options)


def _audit(
    subject: ProgramAudit,
    readers: Mapping[AuditStage, Callable[[], Module]],
    rules: Sequence[Rule],
    options: RuleOptions,
) -> ProgramAudit:
    with collected_at_the_end():  # the modules of program after program would stay
        return _judge(subject, readers, rules, options)


def _judge(
    subject: ProgramAudit,
    readers: Mapping[AuditStage, Callable[[], Module]],
    rules: Sequence[Rule],
    options: RuleOptions,
) -> ProgramAudit:
    subject = replace(subject, rules=tuple(rules))
    modules: dict[AuditStage, Module] = {}
    findings: list[Finding] = []
    skipped: dict[str, str] = {}
    try:
        for stage in _needed(rules, readers):
            modules[stage] = readers[stage]()
    except HloAuditError as error:
        return replace(subject, error=error)
    for rule in rules:
        missing = [stage for stage in rule.reads if stage not in readers]
        if missing:
            skipped[rule.code] = f"needs the snapshot {_NAMES[missing[0]]}, which is not here"
            continue
        context = Context(rule, modules, options.get(rule.code))
        # A rule that fails on a module no dump has shown before must not take the other programs
        # with it: whatever it raises is the error of this one.
        try:
            findings.extend(rule.check(modules[rule.reads[0]], context))
        except Exception as error:
            return replace(subject, error=_internal_error(rule.code, error))
    final = modules.get("final")
    return replace(
        subject,
        module=next((module.name for module in modules.values()), subject.module),
        while_loops=None if final is None else _while_loops(final),
        findings=tuple(findings),
        skipped=skipped,
        cost=None if final is None else estimate_cost(final),
        devices=None if final is None else final.device_count,
        collectives=None if final is None else tuple(collectives(final)),
        traced=frozenset() if final is None else final.traced_lines,
    )


def tell_apart(audits: Sequence[ProgramAudit]) -> list[ProgramAudit]:
    """Give those that have a label in common what differs between them as their ``variant``: the
    topology, the mesh, the settings, the flags, the module, in this order."""
    alike: dict[str, list[int]] = {}
    for index, audit in enumerate(audits):
        alike.setdefault(audit.label, []).append(index)
    variants = list(audits)
    for indices in alike.values():
        same = [audits[index] for index in indices]
        if len(same) > 1:
            for index, variant in zip(indices, _variants(same), strict=True):
                variants[index] = replace(audits[index], variant=variant)
    return variants


def _variants(audits: Sequence[ProgramAudit]) -> list[str]:
    facts = [_facts(audit) for audit in audits]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    differing = [name for name in names if len({fact.get(name) for fact in facts}) > 1]
    return [" ".join(fact[name] for name in differing if name in fact) for fact in facts]


def _facts(audit: ProgramAudit) -> dict[str, str]:
    mesh = ",".join(f"{axis}={size}" for axis, size in audit.mesh.items())
    pairs = {**audit.settings, **audit.xla_flags}
    return {
        "topology": audit.topology or "",
        "mesh": mesh,
        **{f"={name}": f"{name}={value}" for name, value in pairs.items()},
        "module": audit.module or "",
    }


def _internal_error(code: str, error: Exception) -> InternalError:
    return InternalError(
        f"the rule {code} failed on this module: {type(error).__name__}: {str(error)[:200]}",
        hint=f"please report it with the module; --ignore {code} leaves the rule out",
    )


_NAMES: Mapping[AuditStage, str] = {
    "before_optimizations": "before optimisation",
    "before_layout_assignment": "before layout assignment",
    "final": "of the final module",
}


def _needed(rules: Iterable[Rule], there: Iterable[AuditStage]) -> list[AuditStage]:
    """The snapshots to read, each once: the final one for its costs, and what the rules can use."""
    available = set(there)
    wanted: dict[AuditStage, None] = {"final": None}
    for rule in rules:
        if available.issuperset(rule.reads):
            wanted.update(dict.fromkeys(rule.reads))
    return [stage for stage in wanted if stage in available]


def _while_loops(module: Module) -> int:
    return sum(len(one.places.get("while", ())) for one in module.computations.values())
