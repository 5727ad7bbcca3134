"""The compile cache: dumps of programs that were compiled before.

Two lookups lead to a dump. The *request* (program, mode, layout, settings, topology, flags,
versions, the environment that jax reads) names the source files that took part when it was
compiled; while each still has its digest, nothing needs to be lowered, and jax is not imported.
Else the worker lowers the program and looks for the *entry* keyed on the StableHLO, source
positions included, so that the lines in a cached dump are never outdated.

An entry is a zip archive: compressed, and with a checksum of each file, so that a damaged one is
found out, deleted and made again. Files appear by renaming, so several processes may share a
folder. The entries unused for longest are deleted when all together are over the limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlo_audit.dump import parse_file_name
from hlo_audit.errors import UsageError
from hlo_audit.manifest import Manifest
from hlo_audit.program import Lowering
from hlo_audit.whole_file import replacing

CACHE_DIR_VARIABLE = "HLO_AUDIT_CACHE_DIR"

DEFAULT_LIMIT_BYTES = 4 << 30

# The layout of the folder and of its files: another number, another folder.
_VERSION = "v1"

# Text shrinks to a tenth at the fastest level; a compile is not to wait for more.
_COMPRESS_LEVEL = 1

Environment = Mapping[str, str | None]
"""Versions and settings that decide what is compiled, by name."""

_DAMAGED = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError)


class _NotWrittenError(Exception):
    """A file of an entry could not be written to where it was to be."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class CacheInfo:
    """What a cache holds: entries, their bytes on disk, and the limit in bytes."""

    folder: Path
    entries: int
    bytes: int
    limit_bytes: int


class Cache:
    """A cache folder; nothing in it is made before something is stored."""

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._requests = folder / _VERSION / "requests"
        self.entries_folder = folder / _VERSION / "entries"

    def entry_path(self, key: str) -> Path:
        """Where the entry called ``key`` is, if there is one."""
        return self.entries_folder / f"{key}.zip"

    # -- reading

    def find(self, lowering: Lowering, environment: Environment) -> tuple[str, Manifest] | None:
        """The key of the entry for a program whose source has not changed, and the manifest of its
        dump; ``None`` for a program that has to be lowered.

        Args:
            environment: the versions and settings that a worker would have.
        """
        try:
            record = json.loads(self._request_path(lowering, environment).read_text("utf-8"))
            key, files = str(record["entry"]), dict(record["files"])
            manifest = Manifest.from_json(record["manifest"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        unchanged = all(file_digest(name) == digest for name, digest in files.items())
        return (key, manifest) if unchanged else None

    def extract(self, key: str, into: Path) -> bool:
        """Unpack an entry into the empty folder ``into``; whether there was one.

        A damaged one is deleted, and is none.

        Raises:
            OSError: where ``into`` cannot be written; nothing is left in it.
        """
        path = self.entry_path(key)
        try:
            with zipfile.ZipFile(path) as archive:
                _extract_files(archive, into)
            os.utime(path)  # used: the last to be deleted
        except FileNotFoundError:
            return False
        except _NotWrittenError as error:  # a full disk: the entry is as good as before
            _empty(into)
            raise error.reason from None
        except _DAMAGED:
            _empty(into)
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        return True

    # -- writing

    def store(self, key: str, dump: Path) -> bool:
        """Keep the modules of a dump folder under ``key``; whether that was done.

        A cache that cannot be written (full, read-only) is no reason to stop.
        """
        try:
            self.entries_folder.mkdir(parents=True, exist_ok=True)
            with replacing(self.entry_path(key)) as temporary:
                _write_archive(dump, temporary)
            self._shrink()
        except OSError:
            return False
        return True

    def record(
        self,
        lowering: Lowering,
        environment: Environment,
        key: str,
        manifest: Manifest,
        files: Mapping[str, str],
    ) -> None:
        """Remember which entry a request led to, and the digests of the source that took part."""
        path = self._request_path(lowering, environment)
        record = {"entry": key, "manifest": manifest.to_json(), "files": dict(files)}
        text = json.dumps(record, indent=1)
        with contextlib.suppress(OSError):
            self._requests.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_text(text, encoding="utf-8")

    # -- keeping house

    def info(self) -> CacheInfo:
        """Count what is there."""
        sizes = [size for _, size, _ in self._by_age()]
        return CacheInfo(self.folder, len(sizes), sum(sizes), self.limit_bytes)

    def clear(self) -> CacheInfo:
        """Delete every entry and request; return what there was.

        Raises:
            UsageError: where the folder cannot be changed.
        """
        before = self.info()
        try:
            for folder in (self._requests, self.entries_folder):
                for path in folder.glob("*") if folder.is_dir() else ():
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"cannot clear {self.folder}: {error.strerror}") from None
        return before

    def _request_path(self, lowering: Lowering, environment: Environment) -> Path:
        return self._requests / f"{request_digest(lowering, environment)}.json"

    def _by_age(self) -> list[tuple[float, int, Path]]:
        """(time of the last use, bytes, path) of each entry, oldest first."""
        found = []
        for path in self.entries_folder.glob("*.zip"):
            with contextlib.suppress(OSError):  # another process may have deleted it
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    def _shrink(self) -> None:
        entries = self._by_age()
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries[:-1]:  # the newest stays, however large
            if total <= self.limit_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def default_folder(environ: Mapping[str, str]) -> Path:
    """Where the cache is: ``HLO_AUDIT_CACHE_DIR``, or ``hlo-audit`` in the platform's folder."""
    named = environ.get(CACHE_DIR_VARIABLE)
    if named:
        return Path(named)
    from platformdirs import user_cache_path

    return user_cache_path("hlo-audit", appauthor=False)


def request_digest(lowering: Lowering, environment: Environment) -> str:
    """Names a request: everything but the source that decides what is compiled."""
    plain = {
        field.name: _plain(getattr(lowering, field.name)) for field in dataclasses.fields(lowering)
    }
    text = json.dumps([plain, dict(environment)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(name: str) -> str | None:
    """SHA-256 of a file; ``None`` where it cannot be read."""
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:
        return None


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _write_archive(dump: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESS_LEVEL) as archive:
        for file in sorted(dump.iterdir()):
            if parse_file_name(file.name) is not None:
                # A fixed time: the same dump makes the same archive.
                info = zipfile.ZipInfo(file.name)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, file.read_bytes(), compresslevel=_COMPRESS_LEVEL)


def _extract_files(archive: zipfile.ZipFile, into: Path) -> None:
    for name in archive.namelist():
        if Path(name).name != name:
            raise ValueError(f"{name} leads out of the folder")
        content = archive.read(name)
        try:
            into.joinpath(name).write_bytes(content)
        except OSError as error:
            raise _NotWrittenError(error) from None


def _empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            file.unlink()
