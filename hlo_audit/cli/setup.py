"""``hlo-audit init`` and ``hlo-audit doctor``: set a repository up, and see what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hlo_audit.cli.options import CACHE_DIR_OPTION, cache_in, takes_config
from hlo_audit.cli.output import put
from hlo_audit.errors import UsageError

if TYPE_CHECKING:
    from hlo_audit.config import Config
    from hlo_audit.doctor import Diagnosis


@click.command()
@click.option("--force", is_flag=True, help="Write over a config that is there.")
def init(force: bool) -> None:
    """Write hlo-audit.toml, a config in which every key stands as a comment."""
    from hlo_audit.config import CONFIG_NAME, TEMPLATE
    from hlo_audit.whole_file import write_text

    path = Path(CONFIG_NAME)
    if not force and (path.exists() or path.is_symlink()):
        raise UsageError(f"{path} is there already", hint="--force writes over it")
    write_text(path, TEMPLATE)
    click.echo(f"wrote {path}: name your programs in it, then run hlo-audit check")


@click.command()
@click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@CACHE_DIR_OPTION
@takes_config
def doctor(format_: str, cache_dir: Path | None, config: Config) -> None:
    """Say what this machine can compile for, with which versions, and what is missing."""
    from hlo_audit.doctor import diagnose
    from hlo_audit.report import environment

    diagnosis = diagnose(cache_in(cache_dir), config, environment())
    if format_ == "json":
        import json

        put(json.dumps(diagnosis.to_json(), indent=2) + "\n", None)
    else:
        put("".join(f"{line}\n" for line in _lines(diagnosis)), None)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    from hlo_audit.report.wording import format_bytes, plain

    for name, version in diagnosis.versions.items():
        yield f"{name:10} {version or 'not installed'}"
    for name, reason in diagnosis.platforms.items():
        yield f"{name:10} {'can be compiled for' if reason is None else 'not here'}"
    yield f"{'jobs':10} {diagnosis.jobs}"
    cache = diagnosis.cache
    used, limit = format_bytes(cache.bytes), format_bytes(cache.limit_bytes)
    yield f"{'cache':10} {plain(str(cache.folder))}, {cache.entries} dumps, {used} of {limit}"
    config = diagnosis.config
    yield f"{'config':10} {plain(str(config.path)) if config.path else 'none'}"
    if config.programs:
        names = ", ".join(program.name for program in config.programs)
        yield f"{'programs':10} {plain(names)}"
    if config.baseline is not None:
        yield f"{'baseline':10} {plain(str(config.baseline))}"
    yield ""
    missing = diagnosis.missing
    yield from (f"missing: {plain(problem)}" for problem in missing)
    if not missing:
        yield "nothing is missing"
