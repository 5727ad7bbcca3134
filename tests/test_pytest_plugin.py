"""The pytest plugin as other projects meet it: each test runs a pytest of its own."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TOP = Path(__file__).parent.parent

# Where the package is imported from a checkout that nobody installed.
INSTALLED = any(
    point.value == "hlo_audit.pytest_plugin"
    for point in metadata.entry_points(group="pytest11", name="hlo_audit")
)
WITH_PLUGIN = () if INSTALLED else ("-p", "hlo_audit.pytest_plugin")


@pytest.fixture(scope="session")
def dump(dumps: Callable[[str], Path]) -> Path:
    return dumps("lm_head_versions") / "jax-0.12.0-explicit"


@pytest.fixture
def run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., pytest.RunResult]:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(code: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(code)
        return pytester.runpytest_subprocess(*WITH_PLUGIN, "--strict-markers", *options)

    return run


def test_the_plugin_is_an_entry_point() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"hlo_audit": "hlo_audit.pytest_plugin"}


def test_a_budget_that_is_kept_passes(run: Callable[..., pytest.RunResult], dump: Path) -> None:
    result = run(f"""
        def test_layouts(hlo_audit_check):
            report = hlo_audit_check({str(dump)!r}, max={{"relayout-copy": 4}})
            assert report.counts["HLA002"] == 4
    """)
    result.assert_outcomes(passed=1)


def test_a_budget_that_is_not_kept_fails_with_findings_and_lines(
    run: Callable[..., pytest.RunResult], dump: Path
) -> None:
    result = run(f"""
        def test_layouts(hlo_audit_check):
            hlo_audit_check({str(dump)!r}, max={{"relayout-copy": 3}})
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            '>*hlo_audit_check(*max={"relayout-copy": 3})',
            "E*AuditFailure: *: HLA002 is 4, at most 3",
            "E*HLA002 relayout-copy  4: 2 parameter, 2 result; 65.5 MB*",
            "E*is copied from {1,0:T(8,128)} to {0,1:T(8,128)}",
            "E*/src/lm.py:29*",
            "E*fix vocab-embed for *",
            "E*gate failed",
            "FAILED *::test_layouts - hlo_audit.AuditFailure: *",
        ]
    )
    result.stdout.no_fnmatch_line("*hlo_audit/api.py*")
    result.stdout.no_fnmatch_line("*hlo_audit/pytest_plugin.py*")


def test_the_nearest_marker_wins_and_the_call_over_all(
    run: Callable[..., pytest.RunResult], dump: Path
) -> None:
    result = run(f"""
        import pytest

        DUMP = {str(dump)!r}
        pytestmark = pytest.mark.hlo_audit(max={{"relayout-copy": 3}}, select=["HLA002"])

        def test_of_the_module_fails(hlo_audit_check):
            hlo_audit_check(DUMP)

        @pytest.mark.hlo_audit(max={{"relayout-copy": 4}})
        def test_of_the_function(hlo_audit_check):
            report = hlo_audit_check(DUMP)
            assert list(report.counts) == ["HLA002"]

        @pytest.mark.hlo_audit(max={{"relayout-copy": 4}})
        def test_of_the_call_fails(hlo_audit_check):
            hlo_audit_check(DUMP, max={{"relayout-copy": 2}})
    """)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*HLA002 is 4, at most 3", "*HLA002 is 4, at most 2"])


def test_what_is_misused_is_told(run: Callable[..., pytest.RunResult], dump: Path) -> None:
    result = run(f"""
        import pytest

        def test_no_budget(hlo_audit_check):
            hlo_audit_check({str(dump)!r})

        @pytest.mark.hlo_audit(3)
        def test_position(hlo_audit_check):
            pass
    """)
    result.assert_outcomes(failed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*the marker hlo_audit takes its options by keyword", "E*UsageError: there is no budget*"]
    )


def test_who_does_not_use_it_does_not_pay_for_it(run: Callable[..., pytest.RunResult]) -> None:
    result = run("""
        import sys

        def test_nothing_is_imported():
            ours = sorted(name for name in sys.modules if name.startswith("hlo_audit"))
            assert ours == ["hlo_audit", "hlo_audit._version", "hlo_audit.pytest_plugin"]
            assert not {"jax", "pandas", "click"} & set(sys.modules)
    """)
    result.assert_outcomes(passed=1)


def test_the_marker_is_documented(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(*WITH_PLUGIN, "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.hlo_audit(**options): options of hlo_audit.check*"])


STEPS = """
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import hlo_audit

pytestmark = pytest.mark.hlo_audit(
    mesh={"fsdp": 4}, topology="v5p:2x2x1", max={"unfolded-transpose": 0}
)


def train_step(mesh, *, rows=128):
    def loss(kernel, x):
        return jnp.tanh(x @ jax.sharding.reshard(kernel, P())).sum()

    def step(kernel, x):
        return kernel - jax.grad(loss)(kernel, x)

    array = jax.ShapeDtypeStruct((rows, rows), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    return jax.jit(step), (array, array)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_built_here(hlo_audit_check, mode, rows):
    report = hlo_audit_check(train_step, mode=mode, settings={"rows": rows})
    assert report.programs[0].platform == "tpu"


def test_named(hlo_audit_check, tmp_path):
    hlo_audit_check(f"{__file__}:train_step", mode="explicit")


def test_compiled(hlo_audit_check):
    mesh = hlo_audit.make_mesh({"fsdp": 4}, topology="v5p:2x2x1", mode="explicit")
    step, arguments = train_step(mesh)
    with jax.set_mesh(mesh):
        compiled = step.lower(*arguments).compile()
    hlo_audit_check(compiled, mesh=None, topology=None, max={"relayout-copy": 0})
    with pytest.raises(hlo_audit.AuditFailure, match="could not be counted"):
        hlo_audit_check(compiled, mesh=None, topology=None)
"""


@pytest.mark.slow
def test_functions_and_compiled_objects_are_audited_side_by_side_under_xdist(
    run: Callable[..., pytest.RunResult],
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = pytester.path / "cache"
    monkeypatch.setenv("HLO_AUDIT_CACHE_DIR", str(cache))
    run(STEPS, "-n", "2", "--dist", "load").assert_outcomes(passed=6)
    # Four that were built there, and the named one.
    kept = sorted(cache.rglob("*.zip"))
    assert len(kept) == 5
    used = [path.stat().st_mtime_ns for path in kept]
    run(STEPS, "-n", "2", "--dist", "load").assert_outcomes(passed=6)
    assert sorted(cache.rglob("*.zip")) == kept
    assert all(path.stat().st_mtime_ns > before for path, before in zip(kept, used, strict=True))
