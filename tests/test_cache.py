"""The compile cache: what is found again, what is not, and what happens to damage."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hlo_audit.cache import Cache, default_folder, request_digest
from hlo_audit.compiler import Compiled, Outcome, compile_environment, compile_programs
from hlo_audit.manifest import MANIFEST_NAME, Manifest
from hlo_audit.program import Lowering

PROGRAM = Path(__file__).parent / "programs" / "matmul.py"
ENVIRONMENT = {"jax": "1.0", "JAX_ENABLE_X64": None}


def lowering(build: str = "p.py:build", **changes: Any) -> Lowering:
    plain = Lowering(
        program="p",
        build=build,
        mode="auto",
        layout=None,
        settings={},
        mesh={"fsdp": -1},
        platform="cpu",
        topology="2",
    )
    return replace(plain, **changes)


def manifest(**changes: Any) -> Manifest:
    plain = Manifest(
        program="p",
        mode="auto",
        layout=None,
        platform="cpu",
        topology="2",
        mesh={"fsdp": 2},
        settings={},
        xla_flags={},
        versions={},
        module="jit_step",
        devices=2,
        lower_seconds=0.1,
        compile_seconds=0.2,
        digest="0",
    )
    return replace(plain, **changes)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "module_0001.jit_step.before_optimizations.txt").write_text("HloModule a\n" * 500)
    (folder / "module_0001.jit_step.cpu_after_optimizations.txt").write_text("HloModule b\n")
    (folder / "module_0001.jit_step.debug_options").write_text("not a module")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "p.py"
    path.write_text("def build(): ...\n")
    return path


def digests(*paths: Path) -> Mapping[str, str]:
    from hlo_audit.cache import file_digest

    return {str(path): file_digest(str(path)) or "" for path in paths}


def empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def test_modules_come_back_as_they_were_and_take_less_space(tmp_path: Path, dump: Path) -> None:
    cache = Cache(tmp_path / "cache")
    assert cache.store("key", dump)
    out = empty(tmp_path / "out")
    assert cache.extract("key", out)
    modules = [path for path in dump.iterdir() if path.suffix == ".txt"]
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in modules)
    for path in modules:
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert cache.info().bytes < sum(path.stat().st_size for path in modules) / 4


def test_a_request_is_found_while_its_source_is_unchanged(tmp_path: Path, source: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.record(lowering(), ENVIRONMENT, "key", manifest(), digests(source))
    assert cache.find(lowering(), ENVIRONMENT) == ("key", manifest())
    source.write_text("def build(): return 1\n")
    assert cache.find(lowering(), ENVIRONMENT) is None
    source.unlink()
    assert cache.find(lowering(), ENVIRONMENT) is None


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "explicit"},
        {"layout": "split"},
        {"settings": {"embed": 8}},
        {"mesh": {"tensor": -1}},
        {"topology": "4"},
        {"xla_flags": {"xla_x": "1"}},
        {"build": "q.py:build"},
    ],
)
def test_whatever_changes_the_program_is_another_request(change: dict[str, Any]) -> None:
    assert request_digest(lowering(**change), ENVIRONMENT) != request_digest(
        lowering(), ENVIRONMENT
    )


def test_other_versions_and_settings_are_another_request() -> None:
    assert request_digest(lowering(), {**ENVIRONMENT, "jax": "1.1"}) != request_digest(
        lowering(), ENVIRONMENT
    )


def test_settings_of_jax_in_the_environment_are_part_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = compile_environment(lowering())
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("EDITOR", "ed")
    after = compile_environment(lowering())
    assert {key for key in after if after[key] != before.get(key)} == {"JAX_ENABLE_X64"}


def test_a_program_of_the_same_name_elsewhere_is_another_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        environments.append(compile_environment(lowering("p.py:build")))
    assert environments[0] != environments[1]
    here = compile_environment(lowering("package.module:build"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert compile_environment(lowering("package.module:build")) != here


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "prose"])
def test_a_damaged_entry_is_deleted_and_none(tmp_path: Path, dump: Path, damage: str) -> None:
    cache = Cache(tmp_path / "cache")
    cache.store("key", dump)
    path = cache.entry_path("key")
    data = bytearray(path.read_bytes())
    whole = bytes(data)
    data[60] ^= 0xFF
    damaged = {"cut": whole[:-30], "flip": bytes(data), "empty": b"", "prose": b"Dear all"}
    path.write_bytes(damaged[damage])
    out = empty(tmp_path / "out")
    assert not cache.extract("key", out)
    assert list(out.iterdir()) == []
    assert not path.exists()


def test_an_entry_that_leads_out_of_the_folder_is_refused(tmp_path: Path, dump: Path) -> None:
    import zipfile

    cache = Cache(tmp_path / "cache")
    cache.store("key", dump)
    with zipfile.ZipFile(cache.entry_path("key"), "w") as archive:
        archive.writestr("../outside.txt", "x")
    assert not cache.extract("key", empty(tmp_path / "out"))
    assert not (tmp_path / "outside.txt").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"entry": "k"}', '{"entry": 1, "files": 2}'])
def test_a_damaged_request_is_none(tmp_path: Path, source: Path, text: str) -> None:
    cache = Cache(tmp_path / "cache")
    cache.record(lowering(), ENVIRONMENT, "key", manifest(), digests(source))
    (path,) = (tmp_path / "cache" / "v1" / "requests").iterdir()
    path.write_text(text)
    assert cache.find(lowering(), ENVIRONMENT) is None


def test_the_entries_unused_for_longest_go_first(tmp_path: Path, dump: Path) -> None:
    cache = Cache(tmp_path / "cache")
    for age, key in enumerate(("new", "used", "old", "oldest")):
        cache.store(key, dump)
        os.utime(cache.entry_path(key), (1e9 - age, 1e9 - age))
    size = cache.info().bytes // 4
    assert cache.extract("used", empty(tmp_path / "out"))
    cache.limit_bytes = 3 * size
    cache.store("newest", dump)
    kept = {path.stem for path in cache.entries_folder.glob("*.zip")}
    assert kept == {"newest", "used", "new"}


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path, dump: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    cache = Cache(blocked / "cache")
    assert not cache.store("key", dump)
    cache.record(lowering(), ENVIRONMENT, "key", manifest(), {})
    assert cache.find(lowering(), ENVIRONMENT) is None
    assert not cache.extract("key", empty(tmp_path / "out"))
    assert cache.info().entries == 0


def _store_often(folder: Path, dump: Path, out: Path) -> None:
    cache = Cache(folder)
    for _ in range(30):
        assert cache.store("key", dump)
        if cache.extract("key", empty(out)):
            assert len(list(out.iterdir())) == 2


@pytest.mark.slow
def test_several_processes_share_a_folder(tmp_path: Path, dump: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_store_often, args=(tmp_path / "cache", dump, tmp_path / f"o{i}"))
        for i in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert [path.name for path in Cache(tmp_path / "cache").entries_folder.iterdir()] == ["key.zip"]


def test_the_folder_is_named_by_the_environment_or_the_platform() -> None:
    assert default_folder({"HLO_AUDIT_CACHE_DIR": "/somewhere"}) == Path("/somewhere")
    assert default_folder({}).name == "hlo-audit"


def compile_one(tmp_path: Path, cache: Cache, program: Path) -> Compiled:
    one = lowering(f"{program}:build")
    into = empty(tmp_path / "into")
    outcomes: list[Outcome] = compile_programs([one], into=into, jobs=1, cache=cache)
    (outcome,) = outcomes
    assert isinstance(outcome, Compiled), outcome
    return outcome


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name.startswith("module_")}


@pytest.mark.slow
def test_a_program_is_compiled_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    program = tmp_path / "program.py"
    shutil.copy(PROGRAM, program)

    first = compile_one(tmp_path, cache, program)
    assert not first.from_cache
    modules = {name for name in contents(first.folder) if name.endswith("optimizations.txt")}
    texts = {name: contents(first.folder)[name] for name in modules}
    assert cache.info().entries == 1

    second = compile_one(tmp_path, cache, program)
    assert second.from_cache
    assert second.manifest == first.manifest
    assert {name: contents(second.folder)[name] for name in modules} == texts
    assert (second.folder / MANIFEST_NAME).exists()

    # A line at the end changes the source and nothing that is lowered: no compile, but a look.
    program.write_text(program.read_text() + "\n# the end\n")
    third = compile_one(tmp_path, cache, program)
    assert third.from_cache
    assert cache.info().entries == 1

    # A line at the top moves every source position: those of the cached dump would be wrong.
    program.write_text("# the start\n" + program.read_text())
    fourth = compile_one(tmp_path, cache, program)
    assert not fourth.from_cache
    assert cache.info().entries == 2

    # Damage is found and made good, both with and without a change of the source.
    for path in cache.entries_folder.iterdir():
        path.write_bytes(path.read_bytes()[:-50])
    program.write_text(program.read_text() + "# more\n")
    fifth = compile_one(tmp_path, cache, program)
    assert not fifth.from_cache
    assert compile_one(tmp_path, cache, program).from_cache


def test_a_hit_imports_no_jax(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    compile_one(tmp_path, cache, PROGRAM)
    code = (
        "import sys, subprocess\n"
        "from pathlib import Path\n"
        "import hlo_audit.compiler as compiler\n"
        "from hlo_audit.cache import Cache\n"
        "from hlo_audit.program import Lowering\n"
        "def refuse(*args, **kwargs): raise AssertionError('a worker was started')\n"
        "compiler.subprocess.Popen = refuse\n"
        f"one = Lowering('p', {str(PROGRAM) + ':build'!r}, 'auto', None, {{}}, "
        "{'fsdp': -1}, 'cpu', '2')\n"
        f"(found,) = compiler.compile_programs([one], into=Path({str(tmp_path / 'hit')!r}), "
        f"cache=Cache(Path({str(tmp_path / 'cache')!r})))\n"
        "assert found.from_cache, found\n"
        "assert not {'jax', 'numpy'} & set(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_command_line_tells_of_the_cache_and_empties_it(tmp_path: Path, dump: Path) -> None:
    from command_line import run  # not for the processes that import this file

    def told(command: str) -> str:
        done = run("cache", command, env={"HLO_AUDIT_CACHE_DIR": str(tmp_path / "cache")})
        assert done.returncode == 0, done.stderr
        return done.stdout

    Cache(tmp_path / "cache").store("key", dump)
    assert told("info").startswith(f"{tmp_path / 'cache'}\n1 dumps, ")
    assert told("clear").startswith("deleted 1 dumps, ")
    assert "\n0 dumps, 0 B" in told("info")
