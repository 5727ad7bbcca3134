"""The Python interface: what it takes, what it returns, and how light it is to import."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pandas
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import hlo_audit
from hlo_audit import live
from hlo_audit.errors import CompileError, DumpError, UsageError
from hlo_audit.program_audit import ProgramAudit

TOPOLOGY = "v5p:2x2x1"
EXPLICIT = "jax-0.12.0-explicit"
MANUAL: Any = "manual"


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    before = getattr(jax.config, "jax_platforms")  # noqa: B009  # unknown to mypy
    jax.config.update("jax_platforms", "cpu")
    yield
    jax.config.update("jax_platforms", before)


@pytest.fixture(scope="session")
def dump(dumps: Callable[[str], Path]) -> Path:
    return dumps("lm_head_versions") / EXPLICIT


@pytest.fixture(scope="session")
def recorded(dump: Path) -> hlo_audit.Report:
    return hlo_audit.audit(dump)


def output_of(code: str) -> list[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


# --- the package --------------------------------------------------------------------------------


def test_to_import_the_package_or_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, hlo_audit; dir(hlo_audit); hlo_audit.__version__\n"
        "plain = {m for m in sys.modules if m.startswith('hlo_audit')}\n"
        "import pytest; before = set(sys.modules)\n"
        "import hlo_audit.pytest_plugin\n"
        "print(sorted(plain), sorted(set(sys.modules) - before))\n"
        "heavy = ('jax', 'pandas', 'numpy', 'rich', 'click')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    first, second = output_of(code)
    assert first == "['hlo_audit', 'hlo_audit._version'] ['hlo_audit.pytest_plugin']"
    assert second == "[]"


def test_a_dump_is_audited_and_loaded_without_jax(dump: Path) -> None:
    code = (
        "import sys, hlo_audit\n"
        f"print(hlo_audit.audit({str(dump)!r}).counts)\n"
        f"print(hlo_audit.load({str(dump)!r}).modules[0].name)\n"
        "print([m for m in ('jax', 'pandas', 'click') if m in sys.modules])"
    )
    assert output_of(code) == [
        "{'HLA001': 62, 'HLA002': 4, 'HLA003': 1, 'HLA004': 0, 'HLA005': 0}",
        "jit_step",
        "[]",
    ]


def test_every_public_name_is_there_and_stays_so() -> None:
    import hlo_audit.program_audit  # no module may take the place of a function

    for name in hlo_audit.__all__:
        assert getattr(hlo_audit, name) is getattr(hlo_audit, name)
        assert name in dir(hlo_audit)
    assert callable(hlo_audit.audit)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = hlo_audit.no_such_name


# --- reports ------------------------------------------------------------------------------------


def test_a_report_counts_what_its_programs_hold(recorded: hlo_audit.Report) -> None:
    known = {"HLA001": 62, "HLA002": 4, "HLA003": 1, "HLA004": 0, "HLA005": 0}
    assert recorded.counts == known
    assert len(recorded.findings) == 67
    assert recorded.gate.passed


def test_counts_are_summed_and_unknown_where_one_is_unknown(dump: Path) -> None:
    both = hlo_audit.audit(dump.parent, select=["relayout-copy"])
    single = [audit.counts["HLA002"] for audit in both.programs]
    assert len(single) > 1
    assert both.counts == {"HLA002": sum(count or 0 for count in single)}
    final = next(dump.glob("*after_codegen.txt"))
    assert hlo_audit.audit(final).counts == {
        "HLA001": None,
        "HLA002": 4,
        "HLA003": None,
        "HLA004": 0,
        "HLA005": None,
    }


def test_a_program_that_failed_leaves_no_sum_known(recorded: hlo_audit.Report) -> None:
    failed = ProgramAudit("step", error=CompileError("the compiler failed"))
    report = replace(recorded, programs=[*recorded.programs, failed])
    assert set(report.counts.values()) == {None}
    assert "the compiler failed" in report._repr_html_()


def test_a_report_is_json_by_the_schema(recorded: hlo_audit.Report) -> None:
    schema = json.loads(resources.files("hlo_audit.report").joinpath("schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(recorded.to_json())


def test_a_report_is_a_frame_with_a_row_for_each_finding(recorded: hlo_audit.Report) -> None:
    frame = recorded.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == 67
    copies = frame[frame.slug == "relayout-copy"]
    assert copies.bytes.sum() == 4 * 16_384_000
    assert str(frame.bytes.dtype) == "Int64"
    assert (copies.file == "/src/lm.py").all()
    assert frame.fingerprint.str.fullmatch("[0-9a-f]{16}").all()
    assert hlo_audit.audit(recorded.programs[0].program, select=["HLA004"]).to_frame().empty


def test_a_report_reads_as_on_the_command_line(recorded: hlo_audit.Report) -> None:
    console = Console(width=100, file=io.StringIO(), highlight=False)
    with console.capture() as capture:
        console.print(recorded)
    assert capture.get() == str(recorded)
    assert "HLA002 relayout-copy  4: 2 parameter, 2 result; 65.5 MB" in str(recorded)
    assert "/src/lm.py:29" in str(recorded)


class Tags(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_html_shows_counts_findings_fixes_and_the_verdict(recorded: hlo_audit.Report) -> None:
    page = Tags(recorded._repr_html_())
    assert "1 (+61)" in page.text
    assert "HLA002 relayout-copy" in page.text
    assert "/src/lm.py:29" in page.text
    assert "vocab-embed" in page.text
    assert "no gate" in page.text
    tables = {"table", "thead", "tbody", "tr", "th", "td"}
    assert page.tags <= {"div", "p", "b", "code", "ul", "li", *tables}


HOSTILE = """HloModule m<script>, is_scheduled=true

ENTRY %main (p: f32[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0} parameter(0), metadata={op_name="<img src=x onerror=alert(1)>"}
  ROOT %copy = f32[512,512]{0,1} copy(%p), metadata={op_name="<img src=x>" source_file="<b>&.py" \
source_line=3}
}
"""


def test_html_of_a_hostile_module_holds_no_tag_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "<script>alert(1)<&script>.txt"
    path.write_text(HOSTILE.replace("m<script>", "m"))
    report = hlo_audit.audit(path, max={"HLA002": 0, "HLA001": 0})
    assert report.counts["HLA002"] == 1
    page = Tags(report._repr_html_())
    assert not page.tags & {"script", "img"}
    assert "<img src=x" in page.text
    assert "<b>&.py:3" in page.text
    module = hlo_audit.parse_module(path.read_text())
    assert not Tags(module._repr_html_()).tags & {"script", "img"}


# --- dumps and modules --------------------------------------------------------------------------


def test_a_dump_is_a_frame_of_its_snapshots(dump: Path) -> None:
    loaded = hlo_audit.load(str(dump))
    frame = loaded.to_frame()
    assert len(frame) == sum(len(module.snapshots) for module in loaded.modules)
    assert frame.stage.iloc[0] == "before_optimizations"
    assert frame.stage.iloc[-1] == "after_codegen"
    assert (dump / frame.file.iloc[-1]).exists()
    assert "after_codegen" in loaded._repr_html_()
    with pytest.raises(DumpError, match="there is no file or folder"):
        hlo_audit.load("no/such")


def test_a_file_is_a_dump_of_one_snapshot(dump: Path, tmp_path: Path) -> None:
    final = next(dump.glob("*after_codegen.txt"))
    (module,) = hlo_audit.load(final).modules
    assert (module.name, module.platform) == ("jit_step", "tpu")
    assert module.final is not None
    assert module.snapshots == (module.final,)
    assert module.final.path == final
    for name, stage in (("step.txt", "after_optimizations"), ("s.hlo", "before_optimizations")):
        text = HOSTILE.replace("m<script>", "m")
        scheduled = stage == "after_optimizations"
        (tmp_path / name).write_text(text if scheduled else text.replace(", is_scheduled=true", ""))
        (module,) = hlo_audit.load(tmp_path / name).modules
        assert [snapshot.stage for snapshot in module.snapshots] == [stage]
        assert module.snapshots[0].read().name == module.name == "m"
    (tmp_path / "prose.txt").write_text("To whom it may concern")
    with pytest.raises(hlo_audit.ParseError):
        hlo_audit.load(tmp_path / "prose.txt")


def test_a_module_is_a_frame_of_its_instructions(dump: Path) -> None:
    final = hlo_audit.load(dump).modules[0].final
    assert final is not None
    module = final.read()
    frame = module.to_frame()
    assert len(frame) == sum(1 for _ in module.instructions)
    row = frame[(frame.name == "copy") & (frame.computation == module.entry_name)].iloc[0]
    copy = module.entry["copy"]
    assert row["shape"] == str(copy.shape)
    assert row.bytes == 16_384_000
    assert row.operands == tuple(operand.name for operand in copy.operands)
    assert row.executions == 1
    assert row.estimated_cycles == copy.estimated_cycles
    traced = next(i for i in module.instructions if module.source(i) is not None)
    source = module.source(traced)
    assert source is not None
    computation = frame[frame.computation == traced.computation.name]
    row = computation[computation.position == traced.index].iloc[0]
    assert (row["name"], row.file, row.line) == (traced.name, source.file, source.line)


def test_numbers_beyond_a_column_are_missing() -> None:
    text = "HloModule m\n\nENTRY %e {\n  ROOT %p = f32[3000000000,1000000000] parameter(0)\n}\n"
    assert hlo_audit.parse_module(text).to_frame().bytes.isna().all()


# --- programs of this process -------------------------------------------------------------------


def by_rows(mesh: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("fsdp", None)))


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.tanh(x @ jax.sharding.reshard(kernel, P()))


def build(mesh: Any, *, rows: int = 64) -> Any:
    return jax.jit(jax.grad(lambda k, x: product(x, k).sum())), (
        by_rows(mesh, 64, 64),
        by_rows(mesh, rows, 64),
    )


@pytest.fixture(scope="module")
def mesh() -> Any:
    return hlo_audit.make_mesh({"fsdp": 4}, topology=TOPOLOGY)


def test_a_function_of_a_mesh_is_audited_in_both_modes() -> None:
    report = hlo_audit.audit(build, mesh={"fsdp": -1}, topology=TOPOLOGY, settings={"rows": 128})
    auto, explicit = report.programs
    assert (auto.label, explicit.label) == ("build/auto", "build/explicit")
    assert auto.platform == explicit.platform == "tpu"
    assert auto.topology == TOPOLOGY
    assert auto.settings == {"rows": 128}
    assert auto.versions["jax"] == jax.__version__
    assert auto.counts["HLA001"] == 0
    assert (explicit.counts["HLA001"] or 0) > 0
    assert auto.cost is not None
    sources = {f.source for f in explicit.findings if f.source is not None}
    assert any(source.file == __file__ for source in sources)
    frames = {frame.file for finding in explicit.findings for frame in finding.stack}
    assert not any("hlo_audit/live.py" in file or "pytest" in file for file in frames)


def test_a_function_is_audited_with_the_mesh_of_its_arguments(mesh: Any) -> None:
    report = hlo_audit.audit(product, by_rows(mesh, 64, 64), by_rows(mesh, 64, 64))
    (program,) = report.programs
    assert (program.label, program.platform) == ("product/auto", "tpu")
    assert None not in program.counts.values()


def test_arguments_at_hand_are_moved_onto_the_mesh() -> None:
    here = jax.sharding.Mesh(
        np.array(jax.devices()[:1]), ("fsdp",), axis_types=(AxisType.Explicit,)
    )
    x = jax.device_put(jnp.ones((64, 64)), NamedSharding(here, P("fsdp", None)))
    (program,) = hlo_audit.audit(
        jax.jit(product), x, np.ones((64, 64), np.float32), mesh={"fsdp": 4}, topology=TOPOLOGY
    ).programs
    assert (program.mode, program.platform) == ("explicit", "tpu")
    with pytest.raises(UsageError, match="sharded over 'fsdp', and the mesh has the axes data"):
        hlo_audit.audit(product, x, x, mesh={"data": 4}, topology=TOPOLOGY)


def test_lowered_and_compiled_objects_are_audited() -> None:
    lowered = jax.jit(lambda x: x @ x).lower(np.ones((8, 8)))
    (program,) = hlo_audit.audit(lowered, name="square").programs
    assert (program.program, program.platform, program.mode) == ("square", "cpu", None)
    assert None not in program.counts.values()
    (program,) = hlo_audit.audit(lowered.compile()).programs
    assert program.counts == {
        "HLA001": None,
        "HLA002": 0,
        "HLA003": None,
        "HLA004": 0,
        "HLA005": None,
    }
    assert "before optimisation" in program.skipped["HLA001"]
    traced = jax.jit(lambda x: x @ x).trace(np.ones((8, 8)))
    assert None not in hlo_audit.audit(traced).counts.values()


def test_functions_of_nnx_jit_are_audited_with_their_modules(mesh: Any) -> None:
    from flax import nnx

    def call(layer: Any, x: jax.Array) -> Any:
        return layer(x)

    apply = nnx.jit(call)
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    (program,) = hlo_audit.audit(apply, layer, np.ones((8, 8), np.float32)).programs
    assert (program.program, program.platform) == ("call", "cpu")
    assert program.module == "jit_call"
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    abstract = nnx.eval_shape(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    (program,) = hlo_audit.audit(apply, abstract, x).programs
    assert program.platform == "tpu"
    lowered = apply.lower(abstract, x)
    assert None not in hlo_audit.audit(lowered).counts.values()
    assert hlo_audit.audit(lowered.compile()).counts["HLA001"] is None


def test_what_is_compiled_for_tpu_is_kept(
    mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles = []
    real = live._compile

    def compile_counted(*arguments: Any) -> None:
        compiles.append(1)
        real(*arguments)

    monkeypatch.setattr(live, "_compile", compile_counted)
    x = by_rows(mesh, 32, 64)
    first = hlo_audit.audit(jnp.tanh, x, cache=tmp_path)
    again = hlo_audit.audit(jnp.tanh, x, cache=tmp_path)
    assert compiles == [1]
    assert again.programs == first.programs
    hlo_audit.audit(jnp.tanh, x, cache=tmp_path, xla_flags={"xla_embed_ir_in_executable": True})
    hlo_audit.audit(jnp.tanh, by_rows(mesh, 64, 64), cache=tmp_path)
    assert compiles == [1, 1, 1]


def test_jaxs_own_cache_is_passed_over_and_left_as_it_was(tmp_path: Path) -> None:
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        jax.jit(lambda x: x + 1)(np.ones(3))
        kept = sorted(tmp_path.glob("*-cache"))
        for _ in range(2):
            hlo_audit.audit(lambda x: x @ x, np.ones((8, 8)))
        assert sorted(tmp_path.glob("*-cache")) == kept
        assert getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_an_exception_of_the_users_goes_through(mesh: Any) -> None:
    def broken(x: jax.Array) -> jax.Array:
        raise LookupError("the user's own")

    with pytest.raises(LookupError, match="the user's own"):
        hlo_audit.audit(broken, by_rows(mesh, 8, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hlo_audit.audit(3), "an object of type int cannot be audited"),
        (lambda: hlo_audit.audit("lm-hed"), "no reference model, folder or file is called"),
        (lambda: hlo_audit.audit("lm-head", 3), "is a name, and takes no arguments"),
        (lambda: hlo_audit.audit(jnp.tanh, 1.0, topology=TOPOLOGY), "needs the axes of a mesh"),
        (lambda: hlo_audit.audit(jnp.tanh, 1.0, mode="auto"), "needs a mesh to be made"),
        (lambda: hlo_audit.audit(jnp.tanh, 1.0, mode=MANUAL), "no mode is called 'manual'"),
        (lambda: hlo_audit.audit(jnp.tanh, 1.0, settings={"a": 1}), "settings are for a function"),
        (lambda: hlo_audit.audit(jnp.tanh, 1.0, platform="cpu"), "for programs with a name"),
        (lambda: hlo_audit.audit(build, mesh={"fsdp": 4}, topology="v5p-8"), "no TPU topology"),
        (lambda: hlo_audit.audit(build, mesh={"fsdp": 3}, topology=TOPOLOGY), "has 4"),
        (
            lambda: hlo_audit.audit(
                build, mesh={"fsdp": 4}, topology=TOPOLOGY, settings={"row": 1}
            ),
            "no setting of build is called 'row'",
        ),
        (lambda: hlo_audit.audit(jnp.tanh, 1.0, select=["HLA9"]), "no rule is called 'HLA9'"),
        (
            lambda: hlo_audit.audit(jnp.tanh, 1.0, rule_options={"HLA002": {"floor": 1}}),
            "no option of relayout-copy is called 'floor'",
        ),
        (
            lambda: hlo_audit.audit(jnp.tanh, 1.0, ignore=["HLA002"], max={"HLA002": 0}),
            "has a budget and is not applied",
        ),
        (lambda: hlo_audit.check(jnp.tanh, 1.0, max={}), "there is no budget"),
        (
            lambda: hlo_audit.audit(jax.jit(jnp.tanh).lower(1.0), 1.0),
            "is lowered already",
        ),
        (
            lambda: hlo_audit.audit(
                "m:f", mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
            ),
            "in another process",
        ),
        (
            lambda: hlo_audit.audit(jnp.tanh, 1.0, xla_flags={"xla_no_such_flag": 1}),
            "xla_no_such_flag",
        ),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        call()
    assert message in raised.value.message


def test_a_program_alone_that_fails_raises_its_error(tmp_path: Path) -> None:
    with pytest.raises(hlo_audit.HloAuditError):
        hlo_audit.audit(tmp_path)
    assert issubclass(CompileError, hlo_audit.HloAuditError)


def test_libtpu_finds_the_environment_as_it_was(mesh: Any) -> None:
    before = dict(os.environ)
    hlo_audit.make_mesh({"fsdp": 4}, topology=TOPOLOGY, mode="explicit")
    assert dict(os.environ) == before


# --- budgets ------------------------------------------------------------------------------------


def test_check_returns_the_report_of_what_is_within_budget(dump: Path) -> None:
    report = hlo_audit.check(dump, max={"relayout-copy": 4, "HLA003": 1})
    assert report.gate.passed
    assert report.gate.held == 1


def test_check_fails_with_the_findings_and_their_lines(dump: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        hlo_audit.check(dump, max={"relayout-copy": 3})
    failure = raised.value
    assert isinstance(failure, hlo_audit.AuditFailure)
    assert failure.report.counts["HLA002"] == 4
    first, *rest = str(failure).splitlines()
    assert first == f"{dump}: HLA002 is 4, at most 3"
    text = "\n".join(rest)
    assert "is copied from {1,0:T(8,128)} to {0,1:T(8,128)}" in text
    assert "/src/lm.py:29" in text
    assert "fix vocab-embed" in text
    assert "gate failed" in text


def test_what_could_not_be_counted_is_not_within_budget(dump: Path) -> None:
    final = next(dump.glob("*after_codegen.txt"))
    with pytest.raises(hlo_audit.AuditFailure, match="HLA003 could not be counted"):
        hlo_audit.check(final, max={"unfolded-transpose": 0})
