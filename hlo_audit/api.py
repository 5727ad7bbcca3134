"""The Python interface: audit a program, hold it to budgets, load a dump.

Everything here is to be had as ``hlo_audit.NAME`` too, where it is imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hlo_audit.cache import Cache, default_folder
from hlo_audit.compiler import DEFAULT_TIMEOUT_SECONDS, available_platform
from hlo_audit.compiling import Compiling
from hlo_audit.dump import Dump, read_dump, read_dump_of_file
from hlo_audit.errors import UsageError, unknown_name
from hlo_audit.gate import judge
from hlo_audit.live import How, audit_live, make_mesh
from hlo_audit.models import ALL_MODELS
from hlo_audit.program import MODES, Mode, Platform, Setting, find_subjects
from hlo_audit.program_audit import ProgramAudit, RuleOptions
from hlo_audit.reference import read_references
from hlo_audit.report import Report, environment
from hlo_audit.rule import Rule, find_rule, select_rules
from hlo_audit.rules import ALL_RULES
from hlo_audit.run import audit_subjects

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from jax.sharding import Mesh

__all__ = ["AuditFailure", "Dump", "Report", "audit", "check", "load", "make_mesh"]


class AuditFailure(AssertionError):
    """A program has more findings than it may; the message lists them with their lines.

    Attributes:
        report: what was found.
    """

    __module__ = "hlo_audit"  # the name that is public, and short in a list of failures

    def __init__(self, report: Report) -> None:
        violations = "\n".join(violation.message for violation in report.gate.violations)
        super().__init__(f"{violations}\n\n{report}")
        self.report = report


def audit(
    program: Any,
    *args: Any,
    mesh: Mesh | Mapping[str, int] | None = None,
    mode: Mode | Sequence[Mode] | None = None,
    topology: str | None = None,
    platform: Platform | None = None,
    layout: str | Sequence[str] = (),
    settings: Mapping[str, Setting] | None = None,
    xla_flags: Mapping[str, str | bool | float] | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    rule_options: Mapping[str, Mapping[str, int]] | None = None,
    max: Mapping[str, int] | None = None,
    name: str | None = None,
    jobs: int | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    cache: Path | str | Literal[False] | None = None,
    executor: Executor | None = None,
) -> Report:
    """Apply the rules to a program.

    What has a name is compiled in a worker process, as ``hlo-audit check`` does; functions and jax
    objects are compiled in this one, and what they raise goes through.

    Args:
        program: one of

            - a name as on the command line, or a path: a reference model, ``file.py:function``,
              ``package.module:function``, a dump folder, an HLO file;
            - a function, jitted or not, with its arguments;
            - a function that takes a mesh and returns its jitted step and arguments, where ``mesh``
              is given and no arguments are;
            - the result of ``.lower()`` or of ``.compile()``. A compiled one shows its final module
              only: the rules that read others do not count (``None``).
        args: of the function: arrays, ``jax.ShapeDtypeStruct``, or trees of them.
        mesh: axis name -> size, to make a mesh; the shardings of ``args`` are moved onto it. Or a
            ``jax.sharding.Mesh``. By default that of ``args``.
        mode: the type of the axes of a mesh that is made, or several. By default both; for a
            function with arguments the one of their mesh.
        topology: TPU chips to compile for, such as ``v5p:2x2x1``, which need not be there. By
            default, for a name what ``hlo-audit check`` takes; else the devices of this process.
        platform: ``tpu`` or ``cpu``, for a name; by default tpu where the TPU compiler is there.
        layout: of a model, or several; ``all`` for each.
        settings: of a model, or of a function that takes a mesh.
        xla_flags: compile options by flag name without dashes.
        select, ignore: the rules to apply, by code or slug; all by default.
        rule_options: rule -> option -> value.
        max: rule -> the most findings that a program may have, notes too; decides
            ``report.gate``, and no more: see :func:`check`.
        name: what the report calls a program of this process.
        jobs: how many programs to compile side by side, of those with names.
        timeout_seconds: how long each of these may take.
        cache: the folder of compiled dumps; ``False`` for none.
        executor: where programs with names are compiled, each in a process of its own: any
            executor of ``concurrent.futures``, such as that of a dask client. What it runs on needs
            hlo-audit, jax and the program's code, and no file system in common. It is left open.

    Raises:
        UsageError: for what cannot be.
        HloAuditError: where no program could be audited; one of several is an error in the report.
    """
    rules = select_rules(ALL_RULES, select, ignore)
    options = _options(rule_options or {})
    limits = {find_rule(ALL_RULES, rule).code: count for rule, count in (max or {}).items()}
    for code in limits:
        if all(rule.code != code for rule in rules):
            raise UsageError(f"the rule {code} has a budget and is not applied")
    modes = (mode,) if isinstance(mode, str) else tuple(mode or ())
    for one in modes:
        if one not in MODES:
            raise unknown_name("mode", one, MODES)
    flags = {flag: _flag(value) for flag, value in (xla_flags or {}).items()}
    kept = None if cache is False else Cache(Path(cache) if cache else default_folder(os.environ))
    audits: list[ProgramAudit]
    if isinstance(program, str | os.PathLike):
        if args:
            raise UsageError(f"{program} is a name, and takes no arguments")
        if mesh is not None and not isinstance(mesh, Mapping):
            raise UsageError(
                "a program with a name is compiled in another process, where this mesh is not",
                hint='give its axes, such as mesh={"fsdp": 4}',
            )
        subjects = find_subjects(
            [os.fspath(program)],
            ALL_MODELS,
            modes=modes,
            layouts=(layout,) if isinstance(layout, str) else layout,
            settings={key: str(value) for key, value in (settings or {}).items()},
            platform=platform or available_platform(),
            topology=topology,
            mesh=mesh,
            xla_flags=flags,
        )
        audits = audit_subjects(
            subjects,
            rules,
            options,
            Compiling(jobs=jobs, timeout_seconds=timeout_seconds, cache=kept),
            executor=executor,
        )
    else:
        if executor is not None:
            raise UsageError(
                "executor is for programs with a name: others are compiled in this process"
            )
        if platform is not None or layout:
            raise UsageError("platform and layout are for programs with a name")
        how = How(rules, options, mesh, modes, topology, settings or {}, flags, kept)
        audits = audit_live(program, args, how, name=name or _name_of(program))
    errors = [found.error for found in audits if found.error is not None]
    if errors and len(errors) == len(audits):
        raise errors[0]
    return Report(audits, judge(audits, limits, read_references()), environment())


def check(program: Any, *args: Any, max: Mapping[str, int], **options: Any) -> Report:
    """Audit a program and hold it to budgets; for tests.

    Args:
        program, args: as for :func:`audit`.
        max: rule by code or slug -> the most findings that it may have, notes too.
        options: the others of :func:`audit`.

    Raises:
        AuditFailure: where it has more of a rule, or they could not be counted.
        HloAuditError: where a program could not be audited.
    """
    __tracebackhide__ = True
    if not max:
        raise UsageError("there is no budget", hint='such as max={"relayout-copy": 0}')
    report = audit(program, *args, max=max, **options)
    for found in report.programs:
        if found.error is not None:
            raise found.error
    if not report.gate.passed:
        raise AuditFailure(report)
    return report


def load(path: Path | str) -> Dump:
    """Read what a dump folder holds: its modules and their snapshots, which are parsed on demand.
    An HLO file is a dump of one snapshot.

    ``load(folder).modules[-1].final.read().to_frame()`` is the module that runs, as a data frame.

    Raises:
        DumpError: for what is missing, cannot be read or holds no module.
        ParseError: for a file that holds no whole module.
    """
    path = Path(path)
    return read_dump_of_file(path) if path.is_file() else read_dump(path)


def _options(given: Mapping[str, Mapping[str, int]]) -> RuleOptions:
    options: dict[str, dict[str, int]] = {}
    for rule_name, values in given.items():
        rule: Rule = find_rule(ALL_RULES, rule_name)
        for option, value in values.items():
            if option not in rule.options:
                known = rule.options or ["(it has none)"]
                raise unknown_name(f"option of {rule.slug}", option, known)
            options.setdefault(rule.code, {})[option] = value
    return options


def _flag(value: str | bool | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name_of(program: Any) -> str:
    function = getattr(program, "__wrapped__", program)
    return str(getattr(function, "__name__", None) or type(program).__name__.lower())
