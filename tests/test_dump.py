"""Dump folders: which file is which module, pass and stage."""

from __future__ import annotations

import errno
import gzip
import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hlo_audit.dump import parse_file_name, read_dump, read_module, stage_of_file
from hlo_audit.errors import DumpError, ParseError

MODULE = """\
HloModule jit_step

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}
"""


@pytest.mark.parametrize(
    ("name", "module", "stage", "platform"),
    [
        ("module_0000.jit_f.cl_9.before_optimizations.txt", "jit_f", "before_optimizations", None),
        ("module_0000.jit_f.cl_9.after_codegen.txt", "jit_f", "after_codegen", "tpu"),
        ("module_0000.jit_f.cl_9.after_optimizations.txt", "jit_f", "after_optimizations", None),
        ("module_0000.jit_f.cpu_after_optimizations.hlo.pb", "jit_f", "after_optimizations", "cpu"),
        ("module_0001.f.sm_9.0a_gpu_after_optimizations.txt.gz", "f", "after_optimizations", "gpu"),
        ("module_0001.f.gfx942_gpu_after_optimizations.txt", "f", "after_optimizations", "gpu"),
        ("1712.module_0001.a.b.c.before_optimizations.txt", "a.b.c", "before_optimizations", None),
        ("module_0001.before_optimizations.txt", "", "before_optimizations", None),
    ],
)
def test_a_stage_is_told_by_the_whole_suffix(
    name: str, module: str, stage: str, platform: str | None
) -> None:
    found = parse_file_name(name)
    assert found is not None
    assert (found.module, found.snapshot.stage, found.platform) == (module, stage, platform)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "module_0000.jit_f.cl_9.0124.Layout_assignment.after_layout-assignment.before_end.txt",
            ("jit_f", 124, "Layout_assignment", "layout-assignment", "end", ""),
        ),
        (
            "module_0000.jit_f.cl_9.0006.After_X64_rewriter,_before_optimizations"
            ".after_pipeline-start.before_cse.txt",
            ("jit_f", 6, "After_X64_rewriter,_before_optimizations", "pipeline-start", "cse", ""),
        ),
        (
            "module_0000.jit_f.0178.copy-insertion.after_removing_unnecessary_copies.txt",
            ("jit_f", 178, "copy-insertion", "", "", "after_removing_unnecessary_copies"),
        ),
        (
            "module_0007.my.0003.net.0012.JF_after_main_fusion.after_cse.before_dce.hlo.pb.gz",
            ("my.0003.net", 12, "JF_after_main_fusion", "cse", "dce", ""),
        ),
    ],
)
def test_a_pass_is_read_from_names_that_hold_dots_and_after(
    name: str, expected: tuple[str, int, str, str, str, str]
) -> None:
    found = parse_file_name(name)
    assert found is not None
    s = found.snapshot
    assert (found.module, s.number, s.pipeline, s.after, s.before, s.step) == expected


@pytest.mark.parametrize(
    "name",
    [
        "module_0000.jit_f.cl_9.after_optimizations_before_buffer_assignment.txt",
        "module_0000.jit_f.cl_9.after_optimizations-buffer-assignment.txt",
        "module_0000.jit_f.cpu_after_optimizations-memory-usage-report.txt",
        "module_0000.jit_f.cl_9.tpu_comp_env.txt",
        "module_0000.jit_f.debug_options",
        "module_0000.jit_f.cl_9.flagfile",
        "module_0000.mlir",
        "hlo-audit.json",
        "module_0000.jit_f.wrapped.ir-no-opt.ll",
    ],
)
def test_other_files_of_a_dump_hold_no_module(name: str) -> None:
    assert parse_file_name(name) is None


def test_stages_are_found_exactly_on_tpu(dumps: Callable[[str], Path]) -> None:
    (module,) = read_dump(dumps("llama2_explicit_fsdp4")).modules
    assert (module.name, module.platform, len(module.passes)) == ("jit_train_step", "tpu", 205)
    assert [s.number for s in module.passes] == list(range(205))
    assert module.before_layout_assignment is module.passes[119]
    assert module.passes[119].before == "layout-assignment"
    assert module.final is not None
    assert module.final.stage == "after_codegen"
    assert module.final.read().is_scheduled
    assert module.before_optimizations is not None
    assert not module.before_optimizations.read().is_scheduled


@pytest.mark.parametrize(
    ("folder", "platform", "number", "final"),
    [
        ("cpu-auto", "cpu", 32, "cpu_after_optimizations"),
        ("cpu-explicit", "cpu", 35, "cpu_after_optimizations"),
        ("gpu-h100-auto", "gpu", 51, "sm_9.0a_gpu_after_optimizations"),
        ("gpu-h100-explicit", "gpu", 52, "sm_9.0a_gpu_after_optimizations"),
    ],
)
def test_stages_are_found_exactly_on_cpu_and_gpu(
    dumps: Callable[[str], Path], folder: str, platform: str, number: int, final: str
) -> None:
    (module,) = read_dump(dumps("lm_head_platforms") / folder).modules
    assert module.platform == platform
    last = module.before_layout_assignment
    assert last is not None
    assert (last.number, last.before) == (number, "layout-assignment")
    assert module.final is not None
    assert module.final.path.name == f"{module.prefix}.{final}.txt"


def test_no_layout_is_assigned_before_layout_assignment(dumps: Callable[[str], Path]) -> None:
    (module,) = read_dump(dumps("lm_head_versions") / "jax-0.9.2-explicit").modules
    last = module.before_layout_assignment
    assert last is not None
    assert not any(
        instruction.shape.layout is not None and instruction.shape.layout.tiles
        for instruction in last.read().entry
    )
    later = module.passes[module.passes.index(last) + 1]
    assert later.pipeline == "tpu-tiling-rewriter"


def test_snapshots_read_in_a_row_are_as_read_alone_and_share_what_is_the_same(
    dumps: Callable[[str], Path],
) -> None:
    (module,) = read_dump(dumps("lm_head_versions") / "jax-0.12.0-explicit").modules
    before: set[int] = set()
    shared = 0
    for snapshot, together in module.read_all():
        alone = snapshot.read()
        assert [i.text for i in together.instructions] == [i.text for i in alone.instructions]
        assert together.lines == alone.lines
        assert together.entry.name == alone.entry.name
        now = {id(computation) for computation in together.computations.values()}
        shared += len(now & before)
        before = now
        kept = together  # alive until the next is read: an id is then no other's
    assert kept.is_scheduled
    assert shared > 5 * len(module.snapshots)


def test_several_modules_and_processes_in_a_folder_are_told_apart(tmp_path: Path) -> None:
    for name in (
        "module_0001.jit_a.before_optimizations.txt",
        "module_0002.jit_a.before_optimizations.txt",
        "7.module_0001.jit_a.before_optimizations.txt",
        "process_1/module_0001.jit_a.before_optimizations.txt",
        "process_1/module_0001.jit_a.cpu_after_optimizations.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(MODULE)
    found = read_dump(tmp_path).modules
    assert sorted((m.folder.name != tmp_path.name, m.prefix, len(m.snapshots)) for m in found) == [
        (False, "7.module_0001.jit_a", 1),
        (False, "module_0001.jit_a", 1),
        (False, "module_0002.jit_a", 1),
        (True, "module_0001.jit_a", 2),
    ]


def test_text_is_taken_before_a_proto_of_the_same_pass(tmp_path: Path) -> None:
    stem = "module_0001.jit_a.before_optimizations"
    (tmp_path / f"{stem}.hlo.pb").write_bytes(b"")
    (tmp_path / f"{stem}.txt").write_text(MODULE)
    (module,) = read_dump(tmp_path).modules
    assert [s.path.name for s in module.snapshots] == [f"{stem}.txt"]


@pytest.mark.parametrize("ending", [".txt", ".hlo", ".txt.gz", ".hlo.gz"])
def test_text_is_read_plain_and_compressed(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"step{ending}"
    data = MODULE.encode()
    path.write_bytes(gzip.compress(data) if ending.endswith(".gz") else data)
    assert read_module(path).entry.root.opcode == "negate"


@pytest.mark.parametrize("wrapped", [True, False], ids=["HloProto", "HloModuleProto"])
@pytest.mark.parametrize("ending", [".hlo.pb", ".hlo.pb.gz"])
def test_a_serialised_module_is_read_through_jaxlib(
    tmp_path: Path, ending: str, wrapped: bool
) -> None:
    try:
        hlo = importlib.import_module("jaxlib._hlo")
    except ImportError:  # jaxlib before 0.8
        hlo = importlib.import_module("jaxlib._jax")
    data = hlo.hlo_module_from_text(MODULE).as_serialized_hlo_module_proto()
    if wrapped:
        assert len(data) < 1 << 14
        data = b"\x0a" + bytes([len(data) & 0x7F | 0x80, len(data) >> 7]) + data
    path = tmp_path / f"step{ending}"
    path.write_bytes(gzip.compress(data) if ending.endswith(".gz") else data)
    module = read_module(path)
    assert module.name == "jit_step"
    assert [i.opcode for i in module.entry] == ["parameter", "negate"]


@pytest.mark.parametrize(
    ("name", "header", "stage"),
    [
        ("step.txt", "HloModule m, is_scheduled=true", "final"),
        ("step.txt", "HloModule m", "before_optimizations"),
        ("module_0000.f.before_optimizations.txt", "HloModule m", "before_optimizations"),
        ("module_0000.f.cpu_after_optimizations.txt", "HloModule m", "final"),
        (
            "module_0000.f.0007.Layout_assignment.after_x.before_layout-assignment.txt",
            "HloModule m",
            "before_layout_assignment",
        ),
        ("module_0000.f.0008.fusion.after_cse.before_dce.txt", "HloModule m", None),
    ],
)
def test_the_stage_of_a_single_file(
    tmp_path: Path, name: str, header: str, stage: str | None
) -> None:
    path = tmp_path / name
    path.write_text(MODULE.replace("HloModule jit_step", header))
    assert stage_of_file(path, read_module(path)) == stage


def test_what_cannot_be_read_is_one_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="there is no file or folder"):
        read_dump(tmp_path / "nowhere")
    with pytest.raises(DumpError, match="no HLO dump is in"):
        read_dump(tmp_path)
    with pytest.raises(DumpError, match=r"cannot read .*gone\.txt: No such file"):
        read_module(tmp_path / "gone.txt")
    (tmp_path / "prose.txt").write_text("Dear all,\n")
    with pytest.raises(ParseError, match=r"prose.txt:1:1: this is not HLO text"):
        read_module(tmp_path / "prose.txt")
    (tmp_path / "broken.txt.gz").write_bytes(b"\x1f\x8b\x08 nothing")
    with pytest.raises(DumpError, match=r"cannot read .*broken\.txt\.gz"):
        read_module(tmp_path / "broken.txt.gz")
    (tmp_path / "no.hlo.pb").write_bytes(b"\xff\xff")
    with pytest.raises(DumpError, match="holds no serialised HLO module"):
        read_module(tmp_path / "no.hlo.pb")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DumpError, match="is neither a file nor a folder"):
        read_module(tmp_path / "pipe.txt")


def test_a_file_without_permission_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    path = tmp_path / "secret.txt"
    path.write_text(MODULE)
    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(DumpError, match=r"cannot read .*secret\.txt: Permission denied"):
        read_module(path)


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "module_0001.a.before_optimizations.txt").write_text(MODULE)
    (inside / "loop").symlink_to(inside)
    (inside / "out").symlink_to(outside)
    (inside / "module_0002.a.before_optimizations.txt").symlink_to(
        outside / "module_0001.a.before_optimizations.txt"
    )
    with pytest.raises(DumpError, match="no HLO dump is in"):
        read_dump(inside)
