"""Compiling in worker processes: what comes out, what is told of a failure, what is left behind."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hlo_audit import compile_worker, compiler
from hlo_audit.compile_worker import as_audit_error, load_build, option_value, resolve_mesh
from hlo_audit.compiler import Compiled, Outcome, compile_programs
from hlo_audit.errors import CompileError, DumpError, HloAuditError, UsageError
from hlo_audit.manifest import MANIFEST_NAME, Manifest, read_manifest, write_manifest
from hlo_audit.program import Lowering, Mode
from hlo_audit.topology import parse_cpu_devices, parse_tpu_topology

pytestmark = [pytest.mark.slow, pytest.mark.oldest_jax]

PROGRAMS = Path(__file__).parent / "programs"

PATIENCE_SECONDS = 30.0
"""How long a test waits for something that takes a moment."""

HANG_TIMEOUT_SECONDS = 3.0
"""Long enough for a tiny compile on a busy machine."""


def a_program(build: str = "matmul.py:build", **changes: Any) -> Lowering:
    """A tiny program for two CPU devices, with ``changes``."""
    file, _, function = build.partition(":")
    lowering = Lowering(
        program=function if function != "build" else Path(file).stem,
        build=build if "/" in build or ".py:" not in build else f"{PROGRAMS / file}:{function}",
        mode="auto",
        layout=None,
        settings={},
        mesh={"data": -1},
        platform="cpu",
        topology="2",
    )
    return dataclasses.replace(lowering, **changes)


def a_tpu_program(**changes: Any) -> Lowering:
    return a_program(**{"platform": "tpu", "topology": "v5p:2x2x1", **changes})


def compiled(outcome: Outcome) -> Compiled:
    assert isinstance(outcome, Compiled), repr(outcome)
    return outcome


def error(outcome: Outcome) -> HloAuditError:
    assert isinstance(outcome, HloAuditError), repr(outcome)
    return outcome


def first_module(folder: Path) -> str:
    (path,) = folder.glob("*.before_optimizations.txt")
    return path.read_text(encoding="utf-8")


def final_module(folder: Path) -> str:
    """The compiled module without the tables that hold paths."""
    (path,) = (p for p in folder.iterdir() if p.name.endswith("after_optimizations.txt"))
    text = path.read_text(encoding="utf-8")
    return text[text.index("ENTRY") :]


# --- compiling ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Session:
    """A call of ``compile_programs`` and what it left."""

    lowerings: list[Lowering]
    outcomes: list[Outcome]
    reported: list[tuple[Lowering, Outcome]]
    into: Path

    def __getitem__(self, index: int) -> Outcome:
        return self.outcomes[index]


def run(lowerings: list[Lowering], into: Path, **options: Any) -> Session:
    reported: list[tuple[Lowering, Outcome]] = []
    outcomes = compile_programs(
        lowerings, into=into, on_done=lambda *done: reported.append(done), **options
    )
    return Session(lowerings, outcomes, reported, into)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A tiny program for both platforms in both modes, and on small slices of TPU chips."""
    lowerings = [
        a_tpu_program(mode="auto"),
        a_program(mode="explicit", topology="4"),
        a_tpu_program(mode="explicit", settings={"rows": 512}),
        a_program(mode="auto", topology="4", layout="plain"),
        a_tpu_program(topology="v5p:1x1"),
        a_tpu_program(topology="v5p:2x1x1"),
        a_tpu_program(topology="v5e:1x4"),
        a_tpu_program(topology="v4:2x2x1", mesh={"data": 2, "model": -1}),
    ]
    return run(lowerings, tmp_path_factory.mktemp("tiny") / "made" / "here", jobs=2)


def test_every_program_is_compiled_in_the_order_given(tiny: Session) -> None:
    assert [compiled(outcome).lowering for outcome in tiny.outcomes] == tiny.lowerings


def test_each_outcome_is_reported_once_as_it_is_done(tiny: Session) -> None:
    assert sorted(map(repr, tiny.reported)) == sorted(
        map(repr, zip(tiny.lowerings, tiny.outcomes, strict=True))
    )


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_a_dump_holds_the_module_before_and_after_every_pass(tiny: Session, index: int) -> None:
    folder = compiled(tiny[index]).folder
    assert "ENTRY" in first_module(folder)
    assert len(list(folder.glob("*.after_*.txt"))) > 5
    assert "ENTRY" in final_module(folder)


def test_the_mode_is_the_type_of_the_mesh_axes(tiny: Session) -> None:
    auto, explicit = (first_module(compiled(tiny[index]).folder) for index in (3, 1))
    assert auto.count('custom_call_target="Sharding"') == 0
    assert explicit.count('custom_call_target="Sharding"') > 0


def test_dump_folders_are_named_after_their_programs(tiny: Session) -> None:
    assert sorted(path.name for path in tiny.into.iterdir()) == [
        "matmul.auto.plain.cpu-4",
        "matmul.auto.v4-2x2x1",
        "matmul.auto.v5e-1x4",
        "matmul.auto.v5p-1x1",
        "matmul.auto.v5p-2x1x1",
        "matmul.auto.v5p-2x2x1",
        "matmul.explicit.cpu-4",
        "matmul.explicit.v5p-2x2x1",
    ]


@pytest.mark.parametrize("index", range(8))
def test_the_manifest_lies_in_the_dump(tiny: Session, index: int) -> None:
    outcome = compiled(tiny[index])
    assert read_manifest(outcome.folder) == outcome.manifest


def test_the_manifest_says_how_the_dump_was_made(tiny: Session) -> None:
    manifest = compiled(tiny[2]).manifest
    assert manifest.program == "matmul"
    assert manifest.mode == "explicit"
    assert manifest.layout is None
    assert (manifest.platform, manifest.topology) == ("tpu", "v5p:2x2x1")
    assert (manifest.mesh, manifest.devices) == ({"data": 4}, 4)
    assert manifest.settings == {"rows": 512}
    assert manifest.module == "jit_product"
    assert manifest.lower_seconds > 0
    assert manifest.compile_seconds > 0
    assert manifest.versions == {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
    }


def test_libtpu_has_no_part_in_a_compile_for_cpu(tiny: Session) -> None:
    assert compiled(tiny[1]).manifest.versions["libtpu"] is None


@pytest.mark.parametrize(("index", "devices"), [(4, 1), (5, 2), (6, 4)])
def test_slices_smaller_than_a_host_compile(tiny: Session, index: int, devices: int) -> None:
    assert compiled(tiny[index]).manifest.devices == devices


def test_a_v4_chip_is_two_devices(tiny: Session) -> None:
    assert compiled(tiny[7]).manifest.mesh == {"data": 2, "model": 4}


def test_the_same_name_twice_gets_a_number_and_nothing_is_overwritten(tmp_path: Path) -> None:
    taken = tmp_path / "matmul.auto.cpu-2"
    taken.mkdir()
    (taken / "mine").touch()
    twice = run([a_program(), a_program()], tmp_path, jobs=1)
    assert [compiled(outcome).folder.name for outcome in twice.outcomes] == [
        "matmul.auto.cpu-2.2",
        "matmul.auto.cpu-2.3",
    ]
    assert [path.name for path in taken.iterdir()] == ["mine"]


def test_no_programs_are_no_work(tmp_path: Path) -> None:
    assert compile_programs([], into=tmp_path) == []


# --- the digest ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    """One program, unchanged, moved down in its file, and with one thing changed each."""
    folder = tmp_path_factory.mktemp("digests")
    text = (PROGRAMS / "matmul.py").read_text(encoding="utf-8")
    moved = folder / "moved.py"
    moved.write_text(text.replace("import jax\n", "\n\n# Moved.\nimport jax\n", 1), "utf-8")
    here = a_program()
    lowerings = {
        "as is": here,
        "moved": a_program(f"{moved}:build"),
        "other size": dataclasses.replace(here, settings={"rows": 128}),
        "other layout": dataclasses.replace(here, layout="turned"),
        "other flag": dataclasses.replace(here, xla_flags={"xla_disable_hlo_passes": "algsimp"}),
        "again": here,
    }
    session = run(list(lowerings.values()), folder / "dumps", jobs=2)
    return {name: compiled(o) for name, o in zip(lowerings, session.outcomes, strict=True)}


@pytest.mark.parametrize("same", ["moved", "again"])
def test_the_digest_is_that_of_the_program_not_of_its_lines(
    digests: dict[str, Compiled], same: str
) -> None:
    assert digests[same].manifest.digest == digests["as is"].manifest.digest


@pytest.mark.parametrize("other", ["other size", "other layout", "other flag"])
def test_the_digest_tells_what_the_compiler_is_given(
    digests: dict[str, Compiled], other: str
) -> None:
    assert digests[other].manifest.digest != digests["as is"].manifest.digest


def test_what_a_worker_compiled_before_does_not_show(digests: dict[str, Compiled]) -> None:
    first, last = digests["as is"].folder, digests["again"].folder
    assert final_module(last) == final_module(first)
    assert len(list(last.glob("*.txt"))) == len(list(first.glob("*.txt")))


# --- flags and topologies -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Session:
    lowerings = [
        a_tpu_program(xla_flags={"xla_nope": "true"}),
        a_tpu_program(xla_flags={"xla_tpu_scoped_vmem_limit_kib": "much"}),
        a_tpu_program(xla_flags={"xla_backend_optimization_level": "high"}),
        a_tpu_program(xla_flags={"xla_tpu_rwb_fusion": "perhaps"}),
        a_tpu_program(xla_flags={"xla_allow_excess_precision": "perhaps"}),
        a_tpu_program(topology="v99:2x2"),
        a_tpu_program(topology="v6e:3x3"),
        a_tpu_program(topology="v5p-8"),
        a_tpu_program(topology=""),
        a_tpu_program(mesh={"data": 3, "model": 2}),
        a_tpu_program(mesh={"data": -1, "model": 8}),
        a_program(xla_flags={"xla_tpu_rwb_fusion": "true"}),
        a_program(xla_flags={"xla_dump_to": "elsewhere"}),
        a_program(topology="none"),
        a_tpu_program(topology="v5e:1x1", settings={"rows": 1 << 26}),
        a_tpu_program(
            xla_flags={
                "xla_tpu_rwb_fusion": "FALSE",
                "xla_allow_excess_precision": "true",
                "xla_disable_hlo_passes": "5",
                "xla_tpu_scoped_vmem_limit_kib": "65536",
                "xla_backend_optimization_level": "1",
                "xla_tpu_async_copy_bandwidth_scaling_factor": "1",
            }
        ),
    ]
    return run(lowerings, tmp_path_factory.mktemp("refused"), jobs=2)


@pytest.mark.parametrize(
    ("index", "message", "hint"),
    [
        (0, "the tpu compiler has no flag 'xla_nope'", None),
        (1, "the flag xla_tpu_scoped_vmem_limit_kib cannot be 'much'", "Failed to parse"),
        (2, "the flag xla_backend_optimization_level cannot be 'high'", "not a valid int32"),
        (3, "the flag xla_tpu_rwb_fusion cannot be 'perhaps'", "Failed to parse"),
        (4, "the flag xla_allow_excess_precision cannot be 'perhaps'", "not a valid bool"),
        (5, "knows no TPU 'v99'", "v5p, v6e"),
        (6, "refuses v6e:3x3: Topology layout", "multiples of 2x2"),
        (7, "'v5p-8' is no TPU topology", "write v5p:2x2x1"),
        (8, "'' is no TPU topology", "write VERSION:SHAPE"),
        (9, "takes 6 devices, but the topology v5p:2x2x1 has 4", "-1"),
        (10, "takes a multiple of 8 devices, but the topology v5p:2x2x1 has 4", "-1"),
        (11, "the cpu compiler has no flag 'xla_tpu_rwb_fusion'", "of the TPU compiler"),
        (12, "the flag xla_dump_to is set by hlo-audit", None),
        (13, "'none' is no number of CPU devices", "a number from 1"),
    ],
)
def test_what_the_compiler_cannot_take_is_an_error_of_usage(
    refused: Session, index: int, message: str, hint: str | None
) -> None:
    raised = error(refused[index])
    assert type(raised) is UsageError
    assert message in raised.message
    assert (hint in raised.hint) if hint and raised.hint else raised.hint == hint


def test_what_the_compiler_fails_at_is_a_compile_error(refused: Session) -> None:
    raised = error(refused[14])
    assert type(raised) is CompileError
    assert raised.message.startswith("the compiler failed: RESOURCE_EXHAUSTED: ")
    assert "\n" not in raised.message


def test_flags_of_every_type_are_taken_as_text(refused: Session) -> None:
    assert compiled(refused[15]).manifest.xla_flags == refused.lowerings[15].xla_flags


def test_a_refused_program_leaves_no_folder(refused: Session) -> None:
    assert list(refused.into.iterdir()) == [compiled(refused[15]).folder]


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("False", False), ("1", "1"), ("1.5", "1.5"), ("algsimp", "algsimp")],
)
def test_only_truth_values_are_not_given_as_text(text: str, value: str | bool) -> None:
    assert option_value(text) == value


@pytest.mark.parametrize(
    ("text", "chips"), [("v5p:2x2x1", 4), ("v6e:8x16", 128), ("tpu7x:4x4x4", 64), ("v5e:1x1", 1)]
)
def test_a_tpu_topology_is_read(text: str, chips: int) -> None:
    topology = parse_tpu_topology(text)
    assert topology.chips == chips
    assert f"{topology.version}:{'x'.join(map(str, topology.shape))}" == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "v5p",
        "v5p:",
        "v5p:4",
        "v5p:2x2x",
        "v5p:2x2x2x2",
        "v5p:axb",
        "v5p:0x2x1",
        "v5p:02x2x1",
        "v5p:-1x2",
        "V5P:2x2x1",
        "v5p:2X2X1",
        ":2x2",
        "v5p 2x2",
        "v5p:\N{ARABIC-INDIC DIGIT TWO}x2",
        "v5p:999x999x999",
    ],
)
def test_what_is_no_tpu_topology_never_reaches_libtpu(text: str) -> None:
    with pytest.raises(UsageError):
        parse_tpu_topology(text)


@pytest.mark.parametrize(
    ("accelerator", "topology"),
    [
        ("v2-8", "v2:2x2"),
        ("v3-32", "v3:4x4"),
        ("v4-8", "v4:2x2x1"),
        ("v5litepod-16", "v5e:4x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-16", "v5p:2x2x2"),
        ("v5p-32", "v5p:2x2x4"),
        ("v5p-64", "v5p:2x4x4"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-2048", "v5p:8x8x16"),
        ("v6e-1", "v6e:1x1"),
        ("v6e-8", "v6e:2x4"),
        ("v6e-256", "v6e:16x16"),
        ("tpu7x-8", "tpu7x:2x2x1"),
    ],
)
def test_a_cloud_accelerator_type_is_translated(accelerator: str, topology: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_tpu_topology(accelerator)
    assert raised.value.hint is not None
    assert raised.value.hint.endswith(f"write {topology}")


def test_a_cloud_accelerator_type_of_no_usual_shape_is_explained() -> None:
    with pytest.raises(UsageError, match="two a chip: write VERSION:SHAPE"):
        parse_tpu_topology("v5p-24")


@pytest.mark.parametrize("text", ["", "0", "-1", "2.5", "1x4", "100000"])
def test_what_is_no_number_of_devices_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_cpu_devices(text)


@pytest.mark.parametrize(
    ("mesh", "devices", "resolved"),
    [
        ({"a": 4}, 4, {"a": 4}),
        ({"a": -1}, 4, {"a": 4}),
        ({"a": 2, "b": -1, "c": 2}, 16, {"a": 2, "b": 4, "c": 2}),
        ({}, 1, {}),
    ],
)
def test_an_open_axis_takes_the_devices_left(
    mesh: Mapping[str, int], devices: int, resolved: Mapping[str, int]
) -> None:
    assert resolve_mesh(mesh, devices, "v5p:2x2x1") == resolved


@pytest.mark.parametrize("mesh", [{"a": 0}, {"a": -2}, {"a": -1, "b": -1}, {"a": 8}, {"a": 3}, {}])
def test_a_mesh_that_does_not_fit_is_refused(mesh: Mapping[str, int]) -> None:
    with pytest.raises(UsageError):
        resolve_mesh(mesh, 4, "v5p:2x2x1")


# --- the user's programs ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_code(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Programs that raise, that are not there, and that lie in unusual places."""
    folder = tmp_path_factory.mktemp("own_code")
    (folder / "beside.py").write_text("from faulty import healthy\n", "utf-8")
    (folder / "faulty.py").write_text((PROGRAMS / "faulty.py").read_text("utf-8"), "utf-8")
    (folder / "jax.py").write_text("from beside import healthy as build\n", "utf-8")
    package = folder / "root" / "a_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "step.py").write_text((PROGRAMS / "matmul.py").read_text("utf-8"), "utf-8")
    builds = [
        "faulty.py:raises",
        "faulty.py:refuses",
        "faulty.py:returns_no_pair",
        "faulty.py:leaves_by_sys_exit",
        "faulty.py:helthy",
        f"{folder}/jax.py:build",
        "a_package.step:build",
    ]
    lowerings = [
        *map(a_program, builds),
        a_program("faulty.py:healthy", settings={"columns": 8}),
        a_program("faulty.py:merges_a_sharded_axis", mode="explicit"),
        a_program("faulty.py:runs_on_the_mesh", platform="tpu", topology="v5p:2x2x1"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder / "root")
        patch.chdir(PROGRAMS)
        return run(lowerings, folder / "dumps", jobs=2)


RAISES_LINE = next(
    number
    for number, line in enumerate((PROGRAMS / "faulty.py").read_text("utf-8").splitlines(), 1)
    if "no such type" in line
)


@pytest.mark.parametrize(
    ("index", "message", "hint"),
    [
        (0, "the program raised TypeError: data type 'no such type' not understood", None),
        (1, "7 rows cannot be", "take 8"),
        (2, "faulty.py:returns_no_pair does not return a jitted function", "jax.ShapeDtypeStruct"),
        (3, "the program raised SystemExit: no TPU here", None),
        (4, "faulty.py is called 'helthy'", "did you mean 'healthy'?"),
        (7, "faulty.py:healthy is called 'columns'", "one of: rows"),
        (8, "the program raised ShardingTypeError: This reshape is not supported", "reshard"),
        (9, "the program raised AttributeError", "build arguments as jax.ShapeDtypeStruct"),
    ],
)
def test_a_program_that_cannot_be_built_is_an_error_of_usage(
    own_code: Session, index: int, message: str, hint: str | None
) -> None:
    raised = error(own_code[index])
    assert isinstance(raised, UsageError)
    assert message in raised.message
    assert (hint in raised.hint) if hint and raised.hint else raised.hint == hint


def test_an_exception_is_placed_in_the_users_own_code(own_code: Session) -> None:
    assert error(own_code[0]).message.endswith(f"(faulty.py:{RAISES_LINE} in step)")


def test_a_file_may_have_any_name_and_import_its_neighbours(own_code: Session) -> None:
    assert compiled(own_code[5]).manifest.module == "jit_tanh"


def test_a_module_is_imported_from_where_this_process_would(own_code: Session) -> None:
    assert compiled(own_code[6]).manifest.module == "jit_product"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def build(mesh):\n    return (\n", "the program raised SyntaxError"),
        ("\nimport no_such_module\n", "the program raised ModuleNotFoundError"),
        ("\nassert 1 > 2", "the program raised AssertionError ("),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(code, "utf-8")
    lowering = a_program(f"{tmp_path}/broken.py:build")
    with pytest.raises((SyntaxError, ImportError, AssertionError)) as raised:
        load_build(lowering.build)
    told = as_audit_error(raised.value, "build", lowering)
    assert type(told) is UsageError
    assert told.message.startswith(message)
    assert "(broken.py:2" in told.message


def test_a_program_among_the_libraries_has_frames_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(compile_worker, "_library_folders", lambda: (f"{tmp_path}/", ""))
    (tmp_path / "installed_program.py").write_text("def build(mesh):\n    return 1 / 0\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    lowering = a_program("installed_program:build")
    with pytest.raises(ZeroDivisionError) as raised:
        load_build(lowering.build)(None)
    told = as_audit_error(raised.value, "build", lowering)
    assert told.message.endswith(f"({tmp_path}/installed_program.py:2 in build)")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("no.such.module:build", "no module is called 'no.such.module'"),
        ("nowhere.py:build", "there is no file nowhere.py"),
    ],
)
def test_code_that_is_not_there_is_an_error_of_usage(build: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_build(build)


def test_nothing_a_program_prints_comes_through(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    noisy = a_program("noisy.py:build", platform="tpu", topology="v5p:2x2x1")
    (outcome,) = compile_programs([noisy], into=tmp_path)
    assert compiled(outcome).manifest.module == "jit_step"
    assert capfd.readouterr() == ("", "")


def test_a_program_that_turns_jaxs_cache_on_is_dumped_each_time(tmp_path: Path) -> None:
    caching = a_program("faulty.py:caches", settings={"folder": str(tmp_path / "cache")})
    session = run([caching, caching], tmp_path / "dumps", jobs=1)
    for outcome in session.outcomes:
        assert "ENTRY" in final_module(compiled(outcome).folder)


# --- crashes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2], ids=lambda jobs: f"jobs={jobs}")
def crashed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Programs that crash and one that hangs, each with a healthy one before and after it."""
    folder = tmp_path_factory.mktemp("crashed")
    builds = ["hangs", "healthy", "aborts", "healthy", "segfaults", "healthy"]
    builds += ["aborts_in_the_compiler", "healthy"]
    lowerings = [a_program(f"faulty.py:{name}") for name in builds]
    started = {"started": str(folder / "hanging.pid")}
    lowerings[0] = dataclasses.replace(lowerings[0], settings=started)
    return run(
        lowerings,
        folder / "dumps",
        jobs=request.param,
        timeout_seconds=HANG_TIMEOUT_SECONDS,
    )


@pytest.mark.parametrize("index", [1, 3, 5, 7])
def test_a_crash_leaves_the_other_programs_alone(crashed: Session, index: int) -> None:
    assert "ENTRY" in final_module(compiled(crashed[index]).folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (0, "the tracing of the program did not finish within 3 s"),
        (2, "the tracing of the program crashed with SIGABRT"),
        (4, "the tracing of the program crashed with SIGSEGV"),
        (6, "the compiler crashed with SIGABRT"),
    ],
)
def test_a_crash_is_a_compile_error_of_its_program(
    crashed: Session, index: int, message: str
) -> None:
    raised = error(crashed[index])
    assert isinstance(raised, CompileError)
    assert raised.exit_code == 3
    assert raised.message == message


def test_the_last_lines_before_a_crash_are_kept(crashed: Session) -> None:
    raised = error(crashed[2])
    assert isinstance(raised, CompileError)
    # Neither empty lines nor the C++ stack.
    assert raised.log == ("these are the last words",)


def test_a_crash_leaves_no_half_written_folder(crashed: Session) -> None:
    assert sorted(path.name for path in crashed.into.iterdir()) == [
        "healthy.auto.cpu-2",
        "healthy.auto.cpu-2.2",
        "healthy.auto.cpu-2.3",
        "healthy.auto.cpu-2.4",
    ]


def test_a_hanging_process_is_ended(crashed: Session) -> None:
    pid_file = Path(str(crashed.lowerings[0].settings["started"]))
    assert not alive(int(pid_file.read_text("utf-8")))


def test_other_ways_to_end_the_process(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    lowerings = [
        a_program("faulty.py:fails_a_check"),
        a_program("faulty.py:exits"),
        a_program("faulty.py:leaves_a_child", settings={"pid_file": str(pid_file)}),
    ]
    session = run(lowerings, tmp_path / "dumps", jobs=2)
    assert [error(outcome).message for outcome in session.outcomes] == [
        "the tracing of the program crashed with SIGABRT: Check failed: a == b (1 vs. 2)",
        "the tracing of the program ended the process with exit code 7",
        "the tracing of the program crashed with SIGABRT",
    ]
    assert_gone(int(pid_file.read_text("utf-8")))


# --- the end of the call ------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def assert_gone(pid: int) -> None:
    wait_until(lambda: not alive(pid), f"process {pid} is left")


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


HANGING_PARENT = """
    from pathlib import Path
    from hlo_audit.compiler import compile_programs
    from hlo_audit.program import Lowering

    def hanging(number):
        return Lowering(
            program="hangs", build={build!r}, mode="auto", layout=None,
            settings={{"started": {into!r} + f".pid{{number}}"}},
            mesh={{"data": -1}}, platform="cpu", topology="2",
        )

    compile_programs([hanging(0), hanging(1)], into=Path({into!r}), jobs=2)
"""


@pytest.fixture
def hanging_parent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int], Path]]:
    """A process inside ``compile_programs``, the two workers it waits for, and the folder."""
    into = tmp_path / "dumps"
    code = HANGING_PARENT.format(build=f"{PROGRAMS}/faulty.py:hangs", into=str(into))
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [tmp_path / "dumps.pid0", tmp_path / "dumps.pid1"]
    try:
        wait_until(
            lambda: all(file.exists() and file.read_text("utf-8") for file in files),
            "the workers do not start",
        )
        yield parent, [int(file.read_text("utf-8")) for file in files], into
    finally:
        parent.kill()
        parent.communicate()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_an_interrupt_leaves_no_process_and_nothing_half_written(
    hanging_parent: tuple[subprocess.Popen[str], list[int], Path], number: int, code: int
) -> None:
    parent, workers, into = hanging_parent
    assert all(map(alive, workers))
    parent.send_signal(number)
    parent.wait(PATIENCE_SECONDS)
    assert parent.returncode == code
    assert [worker for worker in workers if alive(worker)] == []
    assert list(into.iterdir()) == []


def test_workers_do_not_outlive_a_killed_parent(
    hanging_parent: tuple[subprocess.Popen[str], list[int], Path],
) -> None:
    parent, workers, _ = hanging_parent
    parent.kill()
    for worker in workers:
        assert_gone(worker)


def test_an_exception_of_the_callback_ends_the_workers(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hanging = a_program("faulty.py:hangs", settings={"started": str(pid_file)})

    def fail(lowering: Lowering, outcome: Outcome) -> None:
        wait_until(pid_file.exists, "the hanging program does not start")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compile_programs([hanging, a_program()], into=tmp_path / "dumps", jobs=2, on_done=fail)
    assert not alive(int(pid_file.read_text("utf-8")))
    assert not [p for p in (tmp_path / "dumps").iterdir() if p.name.startswith(".")]


# --- the environment ----------------------------------------------------------------------------


def test_the_users_environment_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "jax").mkdir(parents=True)
    (elsewhere / "jax" / "__init__.py").write_text("raise ImportError('not jax')", "utf-8")
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("HOME", raising=False)
    for name, value in {
        "XLA_FLAGS": f"--xla_dump_to={elsewhere}/dump --xla_no_such_flag=1",
        "LIBTPU_INIT_ARGS": f"--xla_dump_to={elsewhere}/dump",
        "JAX_COMPILATION_CACHE_DIR": str(elsewhere / "cache"),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "tpu",
        "JAX_DISABLE_JIT": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_MIN_LOG_LEVEL": "0",
    }.items():
        monkeypatch.setenv(name, value)
    session = run([a_tpu_program(), a_tpu_program()], tmp_path / "dumps", jobs=1)
    assert all("ENTRY" in final_module(compiled(o).folder) for o in session.outcomes)
    assert [path.name for path in elsewhere.iterdir()] == ["jax"]
    assert capfd.readouterr() == ("", "")


def test_a_worker_gets_the_import_path_of_this_process(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", ["", "/somewhere"])
        environment = compiler.worker_environment({}, tmp_path, None)
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/somewhere"]


def test_a_chosen_libtpu_is_kept_and_its_version_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = {"TPU_LIBRARY_PATH": "/my/libtpu.so"}
    assert compiler.worker_environment(chosen, Path("x"), None).items() >= chosen.items()
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/my/libtpu.so")
    told = as_audit_error(RuntimeError("INTERNAL: why"), "topology", a_tpu_program())
    assert told.message == "libtpu refuses v5p:2x2x1: why"


def test_the_parent_never_imports_jax(tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from hlo_audit.compiler import available_platform, compile_programs
        from hlo_audit.program import Lowering

        available_platform()
        lowering = Lowering(
            program="matmul", build={f"{PROGRAMS}/matmul.py:build"!r}, mode="auto", layout=None,
            settings={{}}, mesh={{"data": -1}}, platform="cpu", topology="2",
        )
        (outcome,) = compile_programs([lowering], into=Path({str(tmp_path)!r}))
        print(outcome.manifest.module, [m for m in ("jax", "jaxlib", "numpy") if m in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("jit_product []\n", "")


def test_without_libtpu_only_the_programs_for_tpu_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    assert compiler.available_platform() == "cpu"
    on_tpu, on_cpu = compile_programs([a_tpu_program(), a_program()], into=tmp_path)
    assert error(on_tpu).message == "the TPU compiler, libtpu, is not installed"
    assert 'pip install "jax[tpu]"' in str(on_tpu)
    assert compiled(on_cpu).manifest.platform == "cpu"


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_other_machines_have_no_tpu_compiler(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert compiler.available_platform() == "cpu"


def test_jax_that_cannot_be_imported_is_an_error_of_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise ImportError('no jaxlib here')", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (outcome,) = compile_programs([a_program()], into=tmp_path / "dumps")
    assert type(outcome) is UsageError
    assert outcome.message == "jax cannot be imported: no jaxlib here"


def test_a_folder_that_cannot_be_is_an_error_of_usage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write to the folder"):
        compile_programs([a_program()], into=tmp_path / "file" / "dumps")


def test_a_worker_that_cannot_be_started_is_a_compile_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_WORKER_COMMAND", (str(tmp_path / "no-python"),))
    with pytest.raises(CompileError, match="no worker process can be started"):
        compile_programs([a_program()], into=tmp_path / "dumps")
    assert list((tmp_path / "dumps").iterdir()) == []


@pytest.mark.parametrize("options", [{"jobs": 0}, {"timeout_seconds": 0}])
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        compile_programs([a_program()], into=tmp_path / "dumps", **options)
    assert not (tmp_path / "dumps").exists()


def test_as_many_jobs_as_cpus_that_may_be_used() -> None:
    assert 1 <= compiler.default_jobs() <= (os.cpu_count() or 1)


# --- manifests ----------------------------------------------------------------------------------


MODE: Mode = "explicit"

MANIFEST = Manifest(
    program="lm-head",
    mode=MODE,
    layout="embed-vocab",
    platform="tpu",
    topology="v5p:2x2x1",
    mesh={"fsdp": 4},
    settings={"embed": 512, "rate": 0.5, "tied": False, "dtype": "bfloat16"},
    xla_flags={"xla_tpu_rwb_fusion": "false"},
    versions={"python": "3.13.0", "jax": "0.12.0", "jaxlib": "0.12.0", "libtpu": None},
    module="jit_step",
    devices=4,
    lower_seconds=0.25,
    compile_seconds=2.0,
    digest="0" * 64,
)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(MANIFEST, tmp_path)
    assert read_manifest(tmp_path) == MANIFEST


def test_a_manifest_says_its_schema(tmp_path: Path) -> None:
    write_manifest(MANIFEST, tmp_path)
    data = json.loads((tmp_path / MANIFEST_NAME).read_text("utf-8"))
    assert data["schema_version"] == 1
    assert data["settings"] == dict(MANIFEST.settings)


def test_keys_of_a_later_release_are_left_alone() -> None:
    assert Manifest.from_json({**MANIFEST.to_json(), "later": [1]}) == MANIFEST


def test_a_folder_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": 2}, "schema_version is 2, not 1"),
        ({"schema_version": True}, "schema_version is True"),
        ({"devices": "4"}, "devices is '4', not of type int"),
        ({"devices": True}, "devices is True, not of type int"),
        ({"mode": None}, "mode is None, not of type str"),
        ({"layout": 3}, "layout is 3, not of type str"),
        ({"mesh": {"fsdp": 4.5}}, "mesh.fsdp is 4.5, not of type int"),
        ({"settings": {"embed": [1]}}, "settings.embed is"),
        ({"versions": []}, "versions is [], not of type dict"),
        ({"compile_seconds": "2"}, "compile_seconds is '2', not of type int or float"),
    ],
)
def test_a_broken_manifest_is_an_error_that_names_the_file(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = tmp_path / MANIFEST_NAME
    path.write_text(json.dumps({**MANIFEST.to_json(), **change}), "utf-8")
    with pytest.raises(DumpError) as raised:
        read_manifest(tmp_path)
    assert str(path) in raised.value.message
    assert reason in raised.value.message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema_version": 1}', "\0\xff"])
def test_a_manifest_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text, "latin-1")
    with pytest.raises(DumpError, match=MANIFEST_NAME):
        read_manifest(tmp_path)


@pytest.mark.parametrize("key", sorted(set(MANIFEST.to_json()) - {"layout"}))
def test_a_manifest_must_be_whole(key: str) -> None:
    data = MANIFEST.to_json()
    del data[key]
    with pytest.raises(ValueError, match=key):
        Manifest.from_json(data)
