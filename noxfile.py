"""The tests on each Python and jax that the project is held to, each in a fresh environment.

``nox`` runs all three sessions, ``nox -s newest`` one of them; what follows ``--`` goes to pytest,
so that ``nox -- -m "not slow"`` runs the fast part of each.

=======  ======  =================================  ===============================
session  Python  jax                                tests
=======  ======  =================================  ===============================
py311    3.11    0.10, the last that Python has     all
newest   3.13    the newest that the index gives    all
oldest   3.11    0.7.2, the first that is supported  those marked ``oldest_jax``
=======  ======  =================================  ===============================
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from find_python import find_python

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True

# Where there is none, a name that nox does not find either: then it fails, or passes over.
PYTHON = {version: find_python(version) or version for version in ("3.11", "3.13")}

SHOW_VERSIONS = """
import importlib.metadata, platform
names = ("jax", "jaxlib", "libtpu")
found = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}
print("python", platform.python_version(), *(f" {name} {found.get(name)}" for name in names))
"""


def _test(session: nox.Session, jax: str = "jax", only: str = "") -> None:
    """Install this checkout with its test extra and run the tests.

    Args:
        jax: what to require of jax besides.
        only: the marker expression of the tests that the session runs.
    """
    session.install("--quiet", "--editable", ".[test]", jax)
    session.run("python", "-c", SHOW_VERSIONS, silent=False)
    # What the tests compile stays with the environment: the next one compiles anew.
    cache = Path(session.virtualenv.location).resolve() / "pytest-cache"
    arguments = ["-n", "auto", "-o", f"cache_dir={cache}", *session.posargs]
    if only:
        # pytest takes the last -m: one of the caller must not widen the session.
        asked = [value for option, value in pairwise(session.posargs) if option == "-m"]
        arguments += ["-m", f"({only}) and ({asked[-1]})" if asked else only]
    session.run("python", "-m", "pytest", *arguments)


@nox.session(python=PYTHON["3.11"])
def py311(session: nox.Session) -> None:
    """All tests on Python 3.11 and jax 0.10."""
    _test(session, jax="jax==0.10.*")


@nox.session(python=PYTHON["3.13"])
def newest(session: nox.Session) -> None:
    """All tests on Python 3.13 and the newest jax."""
    _test(session)


@nox.session(python=PYTHON["3.11"])
def oldest(session: nox.Session) -> None:
    """The tests of what the compiler writes, on Python 3.11 and jax 0.7.2."""
    _test(session, jax="jax==0.7.2", only="oldest_jax")
