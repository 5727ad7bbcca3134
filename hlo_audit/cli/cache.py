"""``hlo-audit cache``: what is kept of compiled programs."""

from __future__ import annotations

from pathlib import Path

import click

from hlo_audit.cli.options import CACHE_DIR_OPTION, cache_in


@click.group()
def cache() -> None:
    """Look at the cache of compiled dumps, or empty it."""


@cache.command("info")
@CACHE_DIR_OPTION
def cache_info(cache_dir: Path | None) -> None:
    """Print where the cache is and what it holds."""
    from hlo_audit.report.wording import format_bytes, plain

    info = cache_in(cache_dir).info()
    used, limit = format_bytes(info.bytes), format_bytes(info.limit_bytes)
    click.echo(f"{plain(str(info.folder))}\n{info.entries} dumps, {used} of at most {limit}")


@cache.command("clear")
@CACHE_DIR_OPTION
def cache_clear(cache_dir: Path | None) -> None:
    """Delete every dump in the cache."""
    from hlo_audit.report.wording import format_bytes

    info = cache_in(cache_dir).clear()
    click.echo(f"deleted {info.entries} dumps, {format_bytes(info.bytes)}")
