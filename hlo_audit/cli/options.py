"""The options that several commands share, and what is made of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hlo_audit.cli.output import say
from hlo_audit.cli.paths import FOLDER, INPUT_FILE
from hlo_audit.errors import HloAuditError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from hlo_audit.cache import Cache
    from hlo_audit.compiler import Outcome
    from hlo_audit.compiling import Compiling
    from hlo_audit.config import Config
    from hlo_audit.program import Lowering, Platform, Recorded, Subject
    from hlo_audit.report.formats import Format


def completes(
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

        # While an option lacks its value, click leaves the arguments where it found them.
        given = context.params.get("programs") or context.params.get("names") or context.args
        known = getattr(completion, names)
        found = known(given) if of_programs else known()
        items = [CompletionItem(name) for name in found if name.startswith(incomplete)]
        # First: bash starts its list anew at a file.
        return [CompletionItem(incomplete, type="file"), *items] if files else items

    return complete


@dataclass(frozen=True, kw_only=True)
class How:
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


LAYOUT_OPTION = click.option(
    "--layout",
    "layouts",
    multiple=True,
    metavar="NAME|all",
    shell_complete=completes("layouts", of_programs=True),
    help="Layout of the model; may be repeated.  [default: its baseline]",
)
TOPOLOGY_OPTION = click.option(
    "--topology",
    metavar="NAME",
    shell_complete=completes("topologies"),
    help="Chips to compile for, such as v5p:2x2x1; one, of which a config may name several.",
)
MESH_OPTION = click.option(
    "--mesh",
    multiple=True,
    metavar="AXIS=SIZE[,...]",
    help="Mesh to build the program for; -1 takes the devices left. May be repeated.",
)
CACHE_DIR_OPTION = click.option(
    "--cache-dir",
    type=FOLDER,
    envvar="HLO_AUDIT_CACHE_DIR",
    show_envvar=True,
    help="Folder of compiled dumps.  [default: the platform's cache folder]",
)
_HOW_OPTIONS = (
    click.option(
        "--mode",
        "modes",
        multiple=True,
        type=click.Choice(["auto", "explicit"]),
        help="Type of the mesh axes; may be repeated.  [default: both]",
    ),
    LAYOUT_OPTION,
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=completes("settings", of_programs=True),
        help="A size or other setting of the model or function; may be repeated.",
    ),
    TOPOLOGY_OPTION,
    MESH_OPTION,
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
        help="Longest that one program may take to trace and compile; the start of its worker, "
        "which imports jax, is not counted.",
    ),
    CACHE_DIR_OPTION,
    click.option("--no-cache", is_flag=True, help="Compile anew, and keep nothing."),
    click.option("--quiet", "-q", is_flag=True, help="No progress on standard error."),
)


def takes_how_but(*left_out: Callable[..., Any]) -> Callable[..., Callable[..., None]]:
    """Give a command the options of :class:`How` less some, as its argument ``how``."""
    return _takes(How, "how", [option for option in _HOW_OPTIONS if option not in left_out])


def _takes(
    kind: type[How | GateOptions | OutputOptions | RuleChoice],
    name: str,
    options: Sequence[Callable[..., Any]],
) -> Callable[..., Callable[..., None]]:
    """Give a command options, and what is given of them in one argument called ``name``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_options(**arguments: Any) -> None:
            known = [field.name for field in fields(kind) if field.name in arguments]
            given = {each: arguments.pop(each) for each in known}
            command(**{name: kind(**given)}, **arguments)

        for option in reversed(options):
            with_options = option(with_options)
        return with_options

    return decorate


takes_how = takes_how_but()


def cache_in(folder: Path | None) -> Cache:
    """The cache in ``folder``; in the platform's, where none is given."""
    from hlo_audit.cache import Cache, default_folder

    return Cache((folder or default_folder(os.environ)).absolute())


_CONFIG_OPTIONS = (
    click.option(
        "--config",
        "config_file",
        type=INPUT_FILE,
        help="Take this config.  [default: the nearest hlo-audit.toml or pyproject.toml upwards]",
    ),
    click.option("--no-config", is_flag=True, help="Take no config."),
)


def takes_config(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that choose the config, and the config as an argument."""

    @wraps(command)
    def with_config(*, config_file: Path | None, no_config: bool, **arguments: Any) -> None:
        command(config=_config(config_file, no_config), **arguments)

    for option in reversed(_CONFIG_OPTIONS):
        with_config = option(with_config)
    return with_config


def _config(file: Path | None, no_config: bool) -> Config:
    from hlo_audit.config import Config, find_config, read_config
    from hlo_audit.rules import ALL_RULES

    if no_config:
        if file is not None:
            raise UsageError("--config and --no-config exclude each other")
        return Config()
    found = file or find_config(Path.cwd())
    if found is None:
        return Config()
    if file is None:
        found = Path(os.path.relpath(found))  # as a reader here writes it
    return read_config(found, ALL_RULES)


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """The options that say what programs are held against; as on the command line."""

    budgets: tuple[str, ...]
    baseline: Path | None
    update_baseline: bool
    against: str | None
    strict: bool | None
    exit_zero: bool


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The options that say in which forms the report goes where; as on the command line."""

    formats: tuple[Format, ...]
    outputs: tuple[str, ...]
    verbose: bool


@dataclass(frozen=True, kw_only=True)
class RuleChoice:
    """The options that say which rules are applied, and how; as on the command line."""

    select: tuple[str, ...]
    ignore: tuple[str, ...]
    rule_options: tuple[str, ...]


_RULE_OPTIONS = (
    click.option(
        "--select",
        multiple=True,
        metavar="RULE",
        shell_complete=completes("rules"),
        help="Apply this rule; may be repeated.",
    ),
    click.option(
        "--ignore",
        multiple=True,
        metavar="RULE",
        shell_complete=completes("rules"),
        help="Leave it out; may be repeated.",
    ),
    click.option(
        "--rule-option",
        "rule_options",
        multiple=True,
        metavar="RULE.NAME=N",
        shell_complete=completes("rule_options"),
        help="Set a threshold, such as relayout-copy.min_bytes=0; may be repeated.",
    ),
)
_BASELINE_OPTIONS = (
    click.option(
        "--max",
        "budgets",
        multiple=True,
        metavar="RULE=LIMIT",
        shell_complete=completes("rule_budgets"),
        help="Fail where a program has more of a rule, notes too: findings (0), bytes (64MiB), or "
        "more than the baseline has (+1, +8MiB, +10%); may be repeated.",
    ),
    click.option(
        "--baseline",
        type=INPUT_FILE,
        help="Fail on findings that are not in this file.",
    ),
    click.option("--update-baseline", is_flag=True, help="Write what is found to the baseline."),
)
_VERDICT_OPTIONS = (
    click.option(
        "--strict/--no-strict",
        default=None,
        help="Fail too where the baseline could be tightened, or a suppression suppresses nothing.",
    ),
    click.option("--exit-zero", is_flag=True, help="Exit 0 even where the gate fails."),
)

_OUTPUT_OPTIONS = (
    click.option(
        "--format",
        "formats",
        multiple=True,
        type=click.Choice(["text", "json", "sarif", "junit", "markdown", "github"]),
        help="Form of the report; may be repeated.  [default: text]",
    ),
    click.option(
        "--output",
        "-o",
        "outputs",
        multiple=True,
        metavar="[FORMAT=]PATH",
        shell_complete=completes("output_formats", files=True),
        help="Write the report to this file, in the form of --format or in the one named; may be "
        "repeated; - is standard output. With FORMAT=PATH the terminal still shows the text, "
        "unless --quiet.",
    ),
    click.option("--verbose", "-v", is_flag=True, help="List every finding, notes too."),
)


def takes_rule_choice(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :class:`RuleChoice`, as its argument ``choice``."""
    return _takes(RuleChoice, "choice", _RULE_OPTIONS)(command)


def takes_gate(*, compiles: bool) -> Callable[..., Callable[..., None]]:
    """Give a command the options of :class:`GateOptions`, as its argument ``gate``.

    Args:
        compiles: whether the other side may be compiled, and a dump be read.
    """
    other = "this git revision of the programs, or in this dump or JSON report"
    against = click.option(
        "--against",
        metavar="REV|PATH" if compiles else "PATH",
        help=f"Fail on findings that are not in {other if compiles else 'this JSON report'}.",
    )
    return _takes(GateOptions, "gate", (*_BASELINE_OPTIONS, against, *_VERDICT_OPTIONS))


def takes_outputs(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :class:`OutputOptions`, as its argument ``shown``."""
    return _takes(OutputOptions, "shown", _OUTPUT_OPTIONS)(command)


def find_programs(programs: Sequence[str], how: How) -> list[Subject]:
    """What the names on the command line stand for, compiled as ``how`` says."""
    from hlo_audit.models import ALL_MODELS
    from hlo_audit.program import find_subjects, parse_mesh

    platform = platform_of(how)
    subjects = find_subjects(
        programs,
        ALL_MODELS,
        modes=how.modes,
        layouts=how.layouts,
        settings=read_pairs("--set", how.settings),
        platform=platform,
        topology=how.topology,
        mesh=parse_mesh(how.mesh),
        xla_flags=read_pairs("--xla-flag", how.xla_flags),
    )
    say_platform(platform, how)
    return subjects


def platform_of(how: How) -> Platform:
    """The platform asked for, or the one that this machine can compile for."""
    from hlo_audit.compiler import available_platform

    return how.platform or available_platform()


def say_platform(platform: Platform, how: How) -> None:
    """Say so where the platform cpu is taken for want of libtpu."""
    if platform == "cpu" and how.platform is None and not how.quiet:
        click.echo('no libtpu here: compiling for cpu (pip install "jax[tpu]")', err=True)


def read_pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Read ``NAME=VALUE`` texts; the last of two with one name wins."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"{option} {text} is not of the form NAME=VALUE")
        pairs.pop(name, None)  # last in order too: a rule has two names
        pairs[name] = value
    return pairs


def read_count(option: str, name: str, text: str) -> int:
    """Read a number of at least 0."""
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise UsageError(f"{option} {name}={text} is not a number of at least 0")
    return int(text)


@contextmanager
def compiling(subjects: Sequence[Subject], how: How) -> Iterator[Compiling]:
    """Compile as the options say, and show on standard error how far the compiles are: a bar on a
    terminal, else a line each."""
    from hlo_audit.program import Lowering

    total = sum(isinstance(subject, Lowering) for subject in subjects)
    if how.quiet or not total:
        yield _compiling(how, None)
    elif not sys.stderr.isatty():
        started = time.monotonic()

        def report(lowering: Lowering, outcome: Outcome) -> None:
            if isinstance(outcome, HloAuditError):
                did = "failed"
            else:
                did = "cached" if outcome.from_cache else "compiled"
            say(f"{did} {lowering.label} ({time.monotonic() - started:.1f} s)")

        yield _compiling(how, report)
    else:
        with _bar("compiling", total) as advance:
            yield _compiling(how, lambda lowering, _: advance(lowering.label))


@contextmanager
def examining(
    subjects: Sequence[Subject], how: How
) -> Iterator[tuple[Compiling, Callable[[Recorded], None] | None]]:
    """As :func:`compiling`; on a terminal also how far the reading of dumps is, which takes as long
    where they hold a snapshot for each pass.

    Yields:
        how to compile, and what is to be called after a dump or a file.
    """
    from hlo_audit.program import Recorded

    read = any(isinstance(subject, Recorded) for subject in subjects)
    if how.quiet or not read or not sys.stderr.isatty():
        with compiling(subjects, how) as compiles:
            yield compiles, None
        return
    with _bar("examining", len(subjects)) as advance:
        compiles = _compiling(how, lambda lowering, _: advance(lowering.label))
        yield compiles, lambda one: advance(one.label)


def _compiling(how: How, on_compiled: Callable[[Lowering, Outcome], None] | None) -> Compiling:
    from hlo_audit.compiling import Compiling

    return Compiling(
        jobs=how.jobs,
        timeout_seconds=how.timeout_seconds,
        cache=None if how.no_cache else cache_in(how.cache_dir),
        on_compiled=on_compiled,
    )


@contextmanager
def _bar(doing: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that is gone in the end; it advances by the name of what is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from hlo_audit.report.wording import plain

    columns = (
        TextColumn(doing),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda label: progress.update(task, advance=1, description=plain(label))
