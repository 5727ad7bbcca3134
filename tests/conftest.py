"""What every test may use: real compiler dumps, unpacked once a run."""

from __future__ import annotations

import fcntl
import importlib
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hlo_audit.cache import CACHE_DIR_VARIABLE

_ARCHIVES = Path(__file__).parent / "data"

# For the test files to import. The folder does not stay on the path: the path reaches the compile
# workers, and decides what is found in their cache.
_SHARED = (
    *("command_line", "drawn_hlo", "fuzz_cases", "hlo_modules", "html_pages", "snapshot_rows"),
)
pytest.register_assert_rewrite(*_SHARED)
sys.path.insert(0, str(Path(__file__).parent))
for _name in _SHARED:
    importlib.import_module(_name)
sys.path.pop(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no worker is left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hlo-audit")
    group.addoption(
        "--all-snapshots",
        action="store_true",
        help="compare every snapshot with XLA's own parser, not a sample of them",
    )
    group.addoption(
        "--full-size",
        action="store_true",
        help="compile at the sizes of the trainers, and read the longest lines and graphs",
    )
    group.addoption(
        "--fuzz-cases",
        type=int,
        default=400,
        metavar="N",
        help="how many damaged inputs to try, and nearly twice as many generated ones "
        "(default: %(default)s; the whole suite is 10000)",
    )
    group.addoption(
        "--fuzz-seed",
        type=int,
        default=0,
        metavar="N",
        help="what the inputs are drawn by",
    )
    group.addoption(
        "--fuzz-only",
        metavar="KIND:N",
        help="try this one damaged input, as a failure names it, and keep its files",
    )
    group.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files of the reports anew, to be read in the diff",
    )
    group.addoption(
        "--dumps",
        type=Path,
        metavar="DIR",
        help="compare the snapshots below DIR with XLA's own parser, not those of the archives",
    )


@pytest.fixture(scope="session", autouse=True)
def compile_cache(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Keep what the tests compile in pytest's own cache: a second run of unchanged code is fast,
    ``--cache-clear`` compiles all anew, and the user's cache is left alone.
    """
    before = os.environ.get(CACHE_DIR_VARIABLE)
    kept = getattr(pytestconfig, "cache", None)  # there is none under -p no:cacheprovider
    folder = kept.mkdir("compiled") if kept else tmp_path_factory.mktemp("compiled")
    os.environ[CACHE_DIR_VARIABLE] = str(folder)
    yield
    if before is None:
        del os.environ[CACHE_DIR_VARIABLE]
    else:
        os.environ[CACHE_DIR_VARIABLE] = before


@pytest.fixture(scope="session")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the folder of an archive of ``tests/data``; the first to ask unpacks it.

    The workers of pytest-xdist share one copy, which no test may change.
    """
    run_folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run_folder = run_folder.parent  # each worker has a folder of its own below the run's
    folder = run_folder / "dumps"
    folder.mkdir(exist_ok=True)

    def unpack(name: str) -> Path:
        target = folder / name
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                with (
                    tempfile.TemporaryDirectory(dir=folder) as staging,
                    tarfile.open(_ARCHIVES / f"{name}.tar.xz") as archive,
                ):
                    archive.extractall(staging, filter="data")
                    (Path(staging) / name).rename(target)
        return target

    return unpack


@pytest.fixture(scope="session")
def both_modes(dumps: Callable[[str], Path]) -> list[Path]:
    """Dumps of the LM head by the newest jax there is one of: in auto, then in explicit mode."""
    return [dumps("lm_head_versions") / f"jax-0.12.0-{mode}" for mode in ("auto", "explicit")]


@pytest.fixture
def empty_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository of its own as the working directory."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "train.py").write_text(
        "def step(x):\n    # hlo-audit: ignore[HLA002] known\n    pass\n" * 3
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


@pytest.fixture(scope="module")
def unoptimized() -> Iterator[None]:
    """Compile for CPU devices without most of XLA's optimisations: for the small arrays of tests
    they take longer than what they save. Programs that are audited compile in workers of their
    own, and with all of them."""
    import jax

    update: Callable[[str, bool], None] = jax.config.update
    update("jax_disable_most_optimizations", True)
    yield
    update("jax_disable_most_optimizations", False)
