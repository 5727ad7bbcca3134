"""Write files whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hlo_audit.errors import UsageError

_READ_BYTES = 1 << 20

_PREFIX, _SUFFIX = ".hlo-audit-", ".tmp"

_YOUNG_SECONDS = 60.0
"""A temporary file that is younger may be one that its process has not locked yet."""


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; what is no regular file (a device, a pipe) is written to.

    Raises:
        UsageError: where the file cannot be written.
    """
    try:
        # A link keeps pointing where it does: what it points to is replaced.
        target = path.resolve()
        if target.is_symlink():  # Python 3.13 gives it back
            raise RuntimeError
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        with replacing(target, mode_if_new=0o666 & ~_umask()) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except (OSError, RuntimeError) as error:  # of a loop of links, before Python 3.13
        reason = getattr(error, "strerror", None) or "it is a loop of links"
        raise UsageError(f"cannot write {str(path)[:200]}: {reason}") from None


@contextlib.contextmanager
def replacing(path: Path, *, mode_if_new: int = 0o600) -> Iterator[Path]:
    """Give a temporary file beside ``path`` that takes its place when the block ends well.

    Nobody else can read it before that; then it has the permissions of the file that it replaces.
    A process that is killed leaves it there; the next one that writes into the folder deletes it.

    Args:
        mode_if_new: the permissions where there is no such file.

    Raises:
        OSError: where it cannot be made, or cannot take the place of ``path``.
    """
    delete_left_over(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_PREFIX, suffix=_SUFFIX)
    temporary = Path(name)
    try:
        # The system lets go of it when this process ends, whatever ends it.
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary
        _allow_as(temporary, path, mode_if_new)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def _allow_as(temporary: Path, path: Path, mode_if_new: int) -> None:
    """Let those read and write ``temporary`` that may do so with ``path``, and nobody else."""
    mode = mode_if_new
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            mode = status.st_mode & 0o777
            try:
                os.chown(temporary, -1, status.st_gid)
            except OSError:  # the group would be another: it may do what all others may
                mode = mode & 0o707 | (mode & 0o007) << 3
    temporary.chmod(mode)


def delete_left_over(folder: Path) -> None:
    """Delete the temporary files in ``folder`` of processes that were killed while they wrote."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
            _delete_unless_in_use(path)


def _delete_unless_in_use(path: Path) -> None:
    with contextlib.suppress(OSError):  # locked, another's, or gone by now
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            is_old = time.time() - status.st_mtime > _YOUNG_SECONDS
            if is_old and stat.S_ISREG(status.st_mode):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        finally:
            os.close(handle)


def read_text_within(path: Path, most_bytes: int) -> str:
    """Read a file of UTF-8, unless it is no regular file or larger than ``most_bytes``: a pipe may
    never end, and a device neither.

    Raises:
        OSError: where it cannot be read.
        ValueError: says what else is wrong.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        data = read_up_to(file.read, most_bytes + 1, first_bytes=status.st_size + 1)
    return text_within(data, most_bytes)


def text_within(data: bytes, most_bytes: int) -> str:
    """The text of UTF-8, unless it is larger than ``most_bytes``.

    Raises:
        ValueError: says what is wrong.
    """
    if len(data) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8 text") from None


def read_up_to(
    read: Callable[[int], bytes], most_bytes: int, *, first_bytes: int = _READ_BYTES
) -> bytes:
    """Read ``most_bytes`` at the most, ``first_bytes`` of them at once: Python takes memory for all
    that it is asked to read, whether that is there or not."""
    parts = []
    size = first_bytes
    while most_bytes > 0 and (part := read(min(size, most_bytes))):
        parts.append(part)
        most_bytes -= len(part)
        size = _READ_BYTES
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
