"""What this machine can compile for, and with what: the answers that a report of a fault needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hlo_audit._version import __version__
from hlo_audit.cache import Cache, CacheInfo
from hlo_audit.compiler import check_can_compile, default_jobs
from hlo_audit.config import Config
from hlo_audit.errors import UsageError

SCHEMA_VERSION = 1
"""Keys are added within a version, never changed or removed."""

_VERSION_SECONDS = 10.0


@dataclass(frozen=True)
class Diagnosis:
    """The state of this machine.

    Attributes:
        versions: ``hlo-audit``, ``python``, ``jax``, ``jaxlib``, ``libtpu``, ``git``; ``None`` for
            what is not there.
        platforms: ``tpu`` and ``cpu`` -> ``None`` where it can be compiled for, else why not.
        jobs: how many compiles run side by side by default.
        cache: of compiled dumps.
        cache_writable: whether dumps can be kept there.
        config: the config found, and what it names.
    """

    versions: Mapping[str, str | None]
    platforms: Mapping[str, str | None]
    jobs: int
    cache: CacheInfo
    cache_writable: bool
    config: Config

    @property
    def missing(self) -> list[str]:
        """What to do something about, a sentence each."""
        problems = [
            f"cannot compile for {platform}: {reason}"
            for platform, reason in self.platforms.items()
            if reason is not None
        ]
        if not self.cache_writable:
            problems.append(
                f"the cache {self.cache.folder} cannot be written, so that nothing is kept: "
                "--cache-dir or HLO_AUDIT_CACHE_DIR moves it"
            )
        if self.versions["git"] is None:
            problems.append("git is not installed, which check --against needs for a revision")
        baseline = self.config.baseline
        if baseline is not None and not baseline.is_file():
            problems.append(f"there is no baseline {baseline}: check --update-baseline writes it")
        return problems

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        config = self.config
        return {
            "schema_version": SCHEMA_VERSION,
            "versions": dict(self.versions),
            "platforms": {
                name: {"available": reason is None, "reason": reason}
                for name, reason in self.platforms.items()
            },
            "jobs": self.jobs,
            "cache": {
                "folder": str(self.cache.folder),
                "writable": self.cache_writable,
                "dumps": self.cache.entries,
                "bytes": self.cache.bytes,
                "limit_bytes": self.cache.limit_bytes,
            },
            "config": None if config.path is None else str(config.path.absolute()),
            "programs": [program.name for program in config.programs],
            "baseline": None if config.baseline is None else str(config.baseline.absolute()),
            "missing": self.missing,
        }


def diagnose(cache: Cache, config: Config, versions: Mapping[str, str | None]) -> Diagnosis:
    """Look around; imports neither jax nor a program, and writes nothing.

    Args:
        versions: of python, jax, jaxlib and libtpu.
    """
    no_jax = None if find_spec("jax") and find_spec("jaxlib") else "jax is not installed"
    return Diagnosis(
        versions={"hlo-audit": __version__, **versions, "git": _git_version()},
        platforms={"tpu": no_jax or _why_not_tpu(), "cpu": no_jax},
        jobs=default_jobs(),
        cache=cache.info(),
        cache_writable=_can_be_written(cache.folder),
        config=config,
    )


def _why_not_tpu() -> str | None:
    try:
        check_can_compile("tpu")
    except UsageError as error:
        return str(error)
    return None


def _can_be_written(folder: Path) -> bool:
    """Whether files can be made in a folder, or the folder itself can be made."""
    for parent in (folder, *folder.parents):
        if parent.exists():
            return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    return False


def _git_version() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    try:
        said = subprocess.run(
            [git, "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.strip().removeprefix("git version ") or None
