"""Where the Pythons of this machine are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

# Says the version, or fails: as a shim of pyenv does for a Python that is not switched on, or one
# that cannot make an environment. Wheels of jaxlib for a Python without the GIL are others.
_PROBE = (
    "import sys, sysconfig, venv; assert not sysconfig.get_config_var('Py_GIL_DISABLED'); "
    "print('%d.%d' % sys.version_info[:2])"
)


def find_python(version: str) -> str | None:
    """Return the path of a Python of a ``version`` such as ``3.13`` that runs.

    The first on ``PATH``, else the newest that pyenv has installed; ``None`` where there is none.
    """
    found = [Path(folder) / f"python{version}" for folder in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    patches = {path: path.name.rpartition(".")[2] for path in pyenv.glob(f"{version}.*")}
    found += [
        path / "bin" / "python"
        for path in sorted(
            (path for path, patch in patches.items() if patch.isdecimal()),
            key=lambda path: int(patches[path]),
            reverse=True,
        )
    ]
    return next((str(path) for path in found if _is_python(path, version)), None)


def _is_python(path: Path, version: str) -> bool:
    if shutil.which(path) is None:
        return False
    probe = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, check=False)
    return probe.returncode == 0 and probe.stdout.strip() == version
