"""Write files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hlo_audit.errors import UsageError


def write_text(path: Path, text: str) -> None:
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
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {str(path)[:200]}: {error.strerror}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
