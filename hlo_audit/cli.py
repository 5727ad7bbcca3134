"""The command line: read options, call the layers below, render, exit.

Exit codes: 0 clean, 1 the gate failed, 2 the call or the input is wrong, 3 a compile failed.
What costs time to import is imported by the commands that need it.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from hlo_audit._version import __version__
from hlo_audit.errors import EXIT_GATE_FAILED, HloAuditError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem
    from rich.console import Console

    from hlo_audit.cache import Cache
    from hlo_audit.compiler import Outcome
    from hlo_audit.program import Lowering, Platform, Subject
    from hlo_audit.program_audit import RuleOptions
    from hlo_audit.report import Report
    from hlo_audit.report.formats import Destination, Format
    from hlo_audit.rule import Rule

EXIT_USAGE = 2
EXIT_INTERNAL_ERROR = 70
"""``EX_SOFTWARE`` of sysexits: a fault of this tool is no verdict."""
EXIT_INTERRUPTED = 130

# How click 8.2 and later call for the help; earlier ones print it themselves.
_NO_ARGUMENTS = getattr(click.exceptions, "NoArgsIsHelpError", ())


def main() -> NoReturn:
    """Run the command line. What goes wrong is one line on standard error and an exit code."""
    code: int | str | None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(standalone_mode=False, prog_name="hlo-audit")
    except HloAuditError as error:
        _complain(error)
        code = error.exit_code
    except _NO_ARGUMENTS as error:
        click.echo(error.format_message(), err=True)  # the help
        code = EXIT_USAGE
    except click.ClickException as error:
        click.echo(f"hlo-audit: error: {error.format_message()}", err=True)
        code = EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("hlo-audit: interrupted", err=True)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        code = 0
    except OSError as error:
        click.echo(f"hlo-audit: error: {error.strerror or error}", err=True)
        code = EXIT_USAGE
    except Exception as error:  # a fault of this tool: shown whole, so that it can be reported
        import traceback

        traceback.print_exc()
        click.echo(f"hlo-audit: internal error: {error!r}", err=True)
        code = EXIT_INTERNAL_ERROR
    sys.exit(code)


def _drop_output() -> None:
    """Nobody reads standard output any more: what is still to come must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: HloAuditError) -> None:
    from hlo_audit.report.wording import plain

    click.echo(f"hlo-audit: error: {plain(str(error))}", err=True)
    for line in error.log:
        click.echo(f"  | {plain(line)}", err=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="hlo-audit")
def cli() -> None:
    """Inspect XLA HLO, and stop layout and sharding regressions of JAX programs.

    PROGRAM is a reference model (see "hlo-audit models"), a function that builds a step, as
    path/to/file.py:function or package.module:function, a dump folder, or an HLO file: .txt, .hlo
    or .hlo.pb, each also .gz; "-" reads text from standard input.
    """


def _completes(
    names: str, *, of_programs: bool = False, files: bool = False
) -> Callable[..., list[CompletionItem]]:
    """Complete a parameter by the function ``names`` of :mod:`hlo_audit.completion`.

    Args:
        of_programs: the function takes the programs that are given so far.
        files: let the shell complete files too.
    """

    def complete(
        context: click.Context, _: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from hlo_audit import completion

        given = context.params.get("programs") or context.params.get("names") or ()
        known = getattr(completion, names)
        found = known(given) if of_programs else known()
        items = [CompletionItem(name) for name in found if name.startswith(incomplete)]
        # First: bash starts its list anew at a file.
        return [CompletionItem(incomplete, type="file"), *items] if files else items

    return complete


@dataclass(frozen=True, kw_only=True)
class _How:
    """The options that say how programs are compiled; as on the command line."""

    modes: tuple[Any, ...]
    layouts: tuple[str, ...] = ()
    settings: tuple[str, ...]
    topology: str | None = None
    mesh: tuple[str, ...] = ()
    platform: Any
    xla_flags: tuple[str, ...]
    jobs: int | None
    timeout_seconds: float
    cache_dir: Path | None
    no_cache: bool
    quiet: bool


_LAYOUT_OPTION = click.option(
    "--layout",
    "layouts",
    multiple=True,
    metavar="NAME|all",
    shell_complete=_completes("layouts", of_programs=True),
    help="Layout of the model; may be repeated.  [default: its baseline]",
)
_TOPOLOGY_OPTION = click.option(
    "--topology",
    metavar="NAME",
    shell_complete=_completes("topologies"),
    help="Chips to compile for, such as v5p:2x2x1.",
)
_MESH_OPTION = click.option(
    "--mesh",
    multiple=True,
    metavar="AXIS=SIZE[,...]",
    help="Mesh to build the program for; -1 takes the devices left. May be repeated.",
)
_HOW_OPTIONS = (
    click.option(
        "--mode",
        "modes",
        multiple=True,
        type=click.Choice(["auto", "explicit"]),
        help="Type of the mesh axes; may be repeated.  [default: both]",
    ),
    _LAYOUT_OPTION,
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=_completes("settings", of_programs=True),
        help="A size or other setting of the model or function; may be repeated.",
    ),
    _TOPOLOGY_OPTION,
    _MESH_OPTION,
    click.option(
        "--platform",
        type=click.Choice(["tpu", "cpu"]),
        help="Compiler to use.  [default: tpu where libtpu is installed, else cpu]",
    ),
    click.option(
        "--xla-flag",
        "xla_flags",
        multiple=True,
        metavar="NAME=VALUE",
        help="A compiler option; may be repeated.",
    ),
    click.option(
        "--jobs",
        type=click.IntRange(min=1),
        metavar="N",
        help="Compiles side by side.  [default: one a CPU]",
    ),
    click.option(
        "--timeout",
        "timeout_seconds",
        type=click.FloatRange(min=0, min_open=True),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="Longest that one compile may take.",
    ),
    click.option(
        "--cache-dir",
        type=click.Path(path_type=Path, file_okay=False),
        envvar="HLO_AUDIT_CACHE_DIR",
        show_envvar=True,
        help="Folder of compiled dumps.  [default: the platform's cache folder]",
    ),
    click.option("--no-cache", is_flag=True, help="Compile anew, and keep nothing."),
    click.option("--quiet", "-q", is_flag=True, help="No progress on standard error."),
)


def _takes_how_but(*left_out: Callable[..., Any]) -> Callable[..., Callable[..., None]]:
    """Give a command the options of :class:`_How` less some, as its argument ``how``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_how(**arguments: Any) -> None:
            given = [field.name for field in fields(_How) if field.name in arguments]
            how = _How(**{name: arguments.pop(name) for name in given})
            command(how=how, **arguments)

        for option in reversed(_HOW_OPTIONS):
            if option not in left_out:
                with_how = option(with_how)
        return with_how

    return decorate


_takes_how = _takes_how_but()


@cli.command()
@click.argument(
    "programs",
    nargs=-1,
    metavar="[PROGRAM]...",
    shell_complete=_completes("programs", files=True),
)
@_takes_how
@click.option(
    "--select",
    multiple=True,
    metavar="RULE",
    shell_complete=_completes("rules"),
    help="Apply this rule; may be repeated.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="RULE",
    shell_complete=_completes("rules"),
    help="Leave it out; may be repeated.",
)
@click.option(
    "--rule-option",
    "rule_options",
    multiple=True,
    metavar="RULE.NAME=N",
    shell_complete=_completes("rule_options"),
    help="Set a threshold, such as relayout-copy.min_bytes=0; may be repeated.",
)
@click.option(
    "--max",
    "budgets",
    multiple=True,
    metavar="RULE=N",
    shell_complete=_completes("rule_budgets"),
    help="Fail where a program has more than N findings of a rule, notes too; may be repeated.",
)
@click.option("--exit-zero", is_flag=True, help="Exit 0 even where the gate fails.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["text", "json", "sarif", "junit", "markdown", "github"]),
    help="Form of the report; may be repeated.  [default: text]",
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="[FORMAT=]PATH",
    shell_complete=_completes("output_formats", files=True),
    help="Write the report to this file, in the form of --format or in the one named; may be "
    "repeated. With FORMAT=PATH the terminal still shows the text, unless --quiet.",
)
@click.option("--verbose", "-v", is_flag=True, help="List every finding, notes too.")
def check(
    programs: tuple[str, ...],
    how: _How,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    rule_options: tuple[str, ...],
    budgets: tuple[str, ...],
    exit_zero: bool,
    formats: tuple[Format, ...],
    outputs: tuple[str, ...],
    verbose: bool,
) -> None:
    """Apply the rules to programs, and gate on the counts.

    With no PROGRAM, the reference models. Without --max these are held against the counts that this
    version knows of them, and other programs are only reported.
    """
    from hlo_audit.gate import judge, read_references
    from hlo_audit.models import ALL_MODELS
    from hlo_audit.report import Report, environment
    from hlo_audit.report.formats import plan_outputs
    from hlo_audit.rule import find_rule, select_rules
    from hlo_audit.rules import ALL_RULES
    from hlo_audit.run import audit_subjects

    rules = select_rules(ALL_RULES, select, ignore)
    if not rules:
        raise UsageError("no rule is left to apply", hint="--select and --ignore exclude all")
    options = _read_rule_options(rule_options, ALL_RULES)
    limits = {
        find_rule(ALL_RULES, name).code: _read_count("--max", name, value)
        for name, value in _read_pairs("--max", budgets).items()
    }
    for code in limits.keys() - {rule.code for rule in rules}:
        raise UsageError(f"--max {code}: that rule is not applied", hint="select it, or drop --max")
    destinations = plan_outputs(formats, outputs, quiet=how.quiet)
    subjects = _find_subjects(programs or tuple(model.name for model in ALL_MODELS), how)
    for path in (destination.path for destination in destinations if destination.path):
        if any(_is_input(path, name) for name in programs):
            raise UsageError(f"{path} is what is read", hint="write the report to another file")
    with _progress(subjects, how) as on_compiled:
        audits = audit_subjects(
            subjects,
            rules,
            options,
            jobs=how.jobs,
            timeout_seconds=how.timeout_seconds,
            cache=_cache(how),
            on_compiled=on_compiled,
        )
    report = Report(audits, judge(audits, limits, read_references()), environment())
    errors = {str(audit.error): audit.error for audit in audits if audit.error is not None}
    for error in errors.values():
        _complain(error)
    exit_code = 0 if exit_zero and not errors else report.exit_code
    _render(report, destinations, show_all=verbose, exit_code=exit_code)
    sys.exit(exit_code)


@cli.command()
@click.argument("program", shell_complete=_completes("programs"))
@_takes_how
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the dumps; each program gets one in it.",
)
def lower(program: str, how: _How, folder: Path) -> None:
    """Compile a model and keep the dump of every pass."""
    from hlo_audit.compiler import compile_programs
    from hlo_audit.program import Lowering

    subjects = _find_subjects((program,), how)
    lowerings = [subject for subject in subjects if isinstance(subject, Lowering)]
    if len(lowerings) != len(subjects):
        raise UsageError(f"{program} is a dump already", hint="give a model to compile")
    with _progress(lowerings, how) as on_compiled:
        outcomes = compile_programs(
            lowerings,
            into=folder,
            jobs=how.jobs,
            timeout_seconds=how.timeout_seconds,
            cache=_cache(how),
            on_done=on_compiled,
        )
    errors = [outcome for outcome in outcomes if isinstance(outcome, HloAuditError)]
    for outcome in outcomes:
        if not isinstance(outcome, HloAuditError):
            click.echo(outcome.folder)
    for error in {str(error): error for error in errors}.values():
        _complain(error)
    if errors:
        sys.exit(max(error.exit_code for error in errors))


@cli.command()
@click.argument("rule", shell_complete=_completes("rules"))
def explain(rule: str) -> None:
    """Print the documentation of a rule, given by code or slug."""
    from hlo_audit.report.listing import print_explanation
    from hlo_audit.rule import find_rule
    from hlo_audit.rules import ALL_RULES

    print_explanation(_console(), find_rule(ALL_RULES, rule))


@cli.command()
def rules() -> None:
    """List the rules."""
    from hlo_audit.report.listing import print_rules
    from hlo_audit.rules import ALL_RULES

    print_rules(_console(), ALL_RULES)


@cli.command()
def models() -> None:
    """List the reference models, their layouts and their settings."""
    from hlo_audit.models import ALL_MODELS
    from hlo_audit.report.listing import print_models

    print_models(_console(), ALL_MODELS)


@cli.group()
def cache() -> None:
    """Look at the cache of compiled dumps, or empty it."""


@cache.command("info")
@click.option("--cache-dir", type=click.Path(path_type=Path), envvar="HLO_AUDIT_CACHE_DIR")
def cache_info(cache_dir: Path | None) -> None:
    """Print where the cache is and what it holds."""
    from hlo_audit.report.wording import format_bytes

    info = _cache_in(cache_dir).info()
    used, limit = format_bytes(info.bytes), format_bytes(info.limit_bytes)
    click.echo(f"{info.folder}\n{info.entries} dumps, {used} of at most {limit}")


@cache.command("clear")
@click.option("--cache-dir", type=click.Path(path_type=Path), envvar="HLO_AUDIT_CACHE_DIR")
def cache_clear(cache_dir: Path | None) -> None:
    """Delete every dump in the cache."""
    from hlo_audit.report.wording import format_bytes

    info = _cache_in(cache_dir).clear()
    click.echo(f"deleted {info.entries} dumps, {format_bytes(info.bytes)}")


@cli.command()
@click.argument(
    "names",
    nargs=-1,
    metavar="[RULE|MODEL]...",
    shell_complete=_completes("rules_and_models"),
)
@_takes_how_but(_LAYOUT_OPTION, _TOPOLOGY_OPTION, _MESH_OPTION)
@click.option(
    "--topology",
    "topologies",
    multiple=True,
    metavar="NAME",
    shell_complete=_completes("topologies"),
    help="Chips to compile for, such as v5p:2x2x1; may be repeated.  [default: the model's own]",
)
@click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option("--output", type=click.Path(path_type=Path), help="Write the report to this file.")
def prove(
    names: tuple[str, ...],
    how: _How,
    topologies: tuple[str, ...],
    format_: str,
    output: Path | None,
) -> None:
    """Compile both sides of each layout fix, run both, and hold what the fix claims.

    RULE is a code or a slug, MODEL the name of a reference model; with neither, every fix of every
    rule. For each topology and mode the report says what each fix clears, what it costs, and which
    is best. Fails where a fix claims a target and does not clear there or costs more without saying
    so, and where it changes numbers more than it says.
    """
    from hlo_audit.models import ALL_MODELS
    from hlo_audit.proof import find_cases, make_plan, prove
    from hlo_audit.report import environment
    from hlo_audit.rules import ALL_RULES

    platform = _platform(how)
    plan = make_plan(
        find_cases(names, ALL_RULES, ALL_MODELS),
        modes=how.modes,
        settings=_read_pairs("--set", how.settings),
        platform=platform,
        topologies=topologies,
        xla_flags=_read_pairs("--xla-flag", how.xla_flags),
    )
    _say_platform(platform, how)
    with _progress(plan.lowerings, how) as on_compiled:
        report = prove(
            plan,
            ALL_RULES,
            jobs=how.jobs,
            timeout_seconds=how.timeout_seconds,
            cache=_cache(how),
            on_compiled=on_compiled,
        )
    for error in report.errors:
        _complain(error)
    if format_ == "json":
        from hlo_audit.report.proof_json import render_proof_json

        _put(render_proof_json(report, environment()), output)
    elif report.has_compiled:
        from hlo_audit.report.proof_text import print_proof

        _print(lambda console: print_proof(console, report, environment()), output)
    if report.errors:
        sys.exit(max(error.exit_code for error in report.errors))
    if not report.passed:
        sys.exit(EXIT_GATE_FAILED)


def _cache(how: _How) -> Cache | None:
    return None if how.no_cache else _cache_in(how.cache_dir)


def _cache_in(folder: Path | None) -> Cache:
    from hlo_audit.cache import Cache, default_folder

    return Cache(folder or default_folder(os.environ))


def _find_subjects(programs: Sequence[str], how: _How) -> list[Subject]:
    from hlo_audit.models import ALL_MODELS
    from hlo_audit.program import find_subjects, parse_mesh

    platform = _platform(how)
    subjects = find_subjects(
        programs,
        ALL_MODELS,
        modes=how.modes,
        layouts=how.layouts,
        settings=_read_pairs("--set", how.settings),
        platform=platform,
        topology=how.topology,
        mesh=parse_mesh(how.mesh),
        xla_flags=_read_pairs("--xla-flag", how.xla_flags),
    )
    _say_platform(platform, how)
    return subjects


def _platform(how: _How) -> Platform:
    from hlo_audit.compiler import available_platform

    return how.platform or available_platform()


def _say_platform(platform: Platform, how: _How) -> None:
    if platform == "cpu" and how.platform is None and not how.quiet:
        click.echo('no libtpu here: compiling for cpu (pip install "jax[tpu]")', err=True)


def _is_input(output: Path, program: str) -> bool:
    source = Path(program)
    return source.exists() and output.exists() and output.samefile(source)


def _read_pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Read ``NAME=VALUE`` texts; the last of two with one name wins."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"{option} {text} is not of the form NAME=VALUE")
        pairs.pop(name, None)  # last in order too: a rule has two names
        pairs[name] = value
    return pairs


def _read_count(option: str, name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise UsageError(f"{option} {name}={text} is not a number of at least 0")
    return int(text)


def _read_rule_options(texts: Sequence[str], rules: Sequence[Rule]) -> RuleOptions:
    from hlo_audit.errors import unknown_name
    from hlo_audit.rule import find_rule

    options: dict[str, dict[str, int]] = {}
    for path, value in _read_pairs("--rule-option", texts).items():
        rule_name, dot, name = path.partition(".")
        rule = find_rule(rules, rule_name)
        if not dot or name not in rule.options:
            raise unknown_name(f"option of {rule.slug}", name, rule.options or ["(it has none)"])
        options.setdefault(rule.code, {})[name] = _read_count("--rule-option", path, value)
    return options


@contextmanager
def _progress(
    subjects: Sequence[Subject], how: _How
) -> Iterator[Callable[[Lowering, Outcome], None] | None]:
    """Show on standard error how far the compiles are: a bar on a terminal, else a line each."""
    from hlo_audit.program import Lowering

    total = sum(isinstance(subject, Lowering) for subject in subjects)
    if how.quiet or not total:
        yield None
        return
    if not sys.stderr.isatty():
        started = time.monotonic()

        def report(lowering: Lowering, outcome: Outcome) -> None:
            if isinstance(outcome, HloAuditError):
                did = "failed"
            else:
                did = "cached" if outcome.from_cache else "compiled"
            click.echo(f"{did} {lowering.label} ({time.monotonic() - started:.1f} s)", err=True)

        yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("compiling"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda lowering, _: progress.update(task, advance=1, description=lowering.label)


def _console() -> Console:
    from rich.console import Console

    class ReportConsole(Console):
        """One that leaves the exit code to the verdict where the reader goes early (``| head``)."""

        def on_broken_pipe(self) -> None:
            _drop_output()

    return ReportConsole(highlight=False)


def _render(
    report: Report, destinations: Sequence[Destination], *, show_all: bool, exit_code: int
) -> None:
    from hlo_audit.report.formats import render
    from hlo_audit.report.sources import Repository

    audited = any(audit.error is None for audit in report.programs)
    for destination in destinations:
        if destination.format == "text" and destination.path is None:
            from hlo_audit.report.text import print_report

            if audited:  # else the errors have said it all
                print_report(_console(), report, show_all=show_all)
        else:
            repository = Repository.around(Path.cwd())
            text = render(
                destination.format, report, repository, show_all=show_all, exit_code=exit_code
            )
            _put(text, destination.path)
    if not report.gate.passed and all(destination.path for destination in destinations):
        from hlo_audit.report.text import verdict

        click.echo(verdict(report).plain, err=True)


def _print(print_to: Callable[[Console], None], output: Path | None) -> None:
    """Print to the terminal, or plainly to a file."""
    from rich.console import Console

    if output is None:
        print_to(_console())
        return
    plain_console = Console(file=io.StringIO(), width=100, highlight=False)
    with plain_console.capture() as capture:
        print_to(plain_console)
    _write(output, capture.get())


def _put(text: str, output: Path | None) -> None:
    """Write a text to standard output, or to a file."""
    if output is None:
        try:
            click.echo(text, nl=False)
        except BrokenPipeError:
            _drop_output()
    else:
        _write(output, text)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all; what is no regular file (a device, a pipe) is written to.

    Raises:
        UsageError: where the file cannot be written.
    """
    try:
        # A link keeps pointing where it does: what it points to is replaced.
        target = path.resolve()
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".hlo-audit-")
        temporary = Path(name)
        try:
            os.close(handle)
            temporary.write_text(text, encoding="utf-8")
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {str(path)[:200]}: {error.strerror}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
