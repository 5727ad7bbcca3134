"""A user's own programs, named on the command line: found, built, audited, and told of by their
own lines where they go wrong."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import command_line
from hlo_audit.cache import Cache, default_folder
from hlo_audit.compiler import compile_environment
from hlo_audit.compiling import Compiling
from hlo_audit.errors import HloAuditError, UsageError
from hlo_audit.models import ALL_MODELS
from hlo_audit.program import Lowering, Recorded, find_subjects, parse_mesh, read_value
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.rules import ALL_RULES
from hlo_audit.run import audit_subjects

TOP = Path(__file__).parent.parent
EXAMPLES = sorted((TOP / "examples").glob("*.py"))

# Found by the line's own text, so that the file may grow.
FAULTY = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def by_rows(mesh, axis="fsdp"):
    sharding = NamedSharding(mesh, P(axis, None))
    return jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)


def branches(mesh):
    def inner(x):
        return x if x.sum() > 0 else -x

    def step(x):
        return inner(x) + 1

    return jax.jit(step), (by_rows(mesh),)


def ambiguous(mesh):
    def step(x, y):
        return x @ y.T

    return jax.jit(step), (by_rows(mesh), by_rows(mesh))


def wrong_axis(mesh):
    return jax.jit(jnp.tanh), (by_rows(mesh, "model"),)


def other_devices(mesh):
    placed = jax.device_put(jnp.ones((8, 8)), jax.devices()[0])
    return jax.jit(jnp.tanh), (placed,)


def too_few_arguments(mesh):
    def step(x, y):
        return x + y

    return jax.jit(step), (by_rows(mesh),)


def returns_nothing(mesh):
    pass


def not_jitted(mesh):
    def step(x):
        return x

    return step, (by_rows(mesh),)


def bare_argument(mesh):
    return jax.jit(jnp.tanh), by_rows(mesh)


def no_arguments(mesh):
    return jax.jit(jnp.tanh)


def takes_no_mesh():
    return jax.jit(jnp.tanh), ()


def step(params, batch):
    return params


@jax.jit
def jitted(x):
    return x


def with_setting(mesh, *, rows):
    return jax.jit(jnp.tanh), (by_rows(mesh),)


NOT_A_FUNCTION = 3
"""

# --- names --------------------------------------------------------------------------------------


def find(*programs: str, **options: Any) -> list[Any]:
    return find_subjects(programs, ALL_MODELS, **options)


@pytest.fixture
def train_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("def train_step(mesh): ...\n")
    return path


def test_a_function_is_lowered_in_each_mode_for_the_mesh_and_the_settings(train_py: Path) -> None:
    found = find(
        "train.py:train_step",
        mesh={"data": 2, "fsdp": -1},
        settings={"batch": "8", "name": "x", "fast": "true"},
        xla_flags={"xla_f": "1"},
    )
    assert [(one.program, one.build, one.mode) for one in found] == [
        ("train.py:train_step", "train.py:train_step", "auto"),
        ("train.py:train_step", "train.py:train_step", "explicit"),
    ]
    for one in found:
        assert one.mesh == {"data": 2, "fsdp": -1}
        assert list(one.mesh) == ["data", "fsdp"]
        assert one.settings == {"batch": 8, "name": "x", "fast": True}
        assert (one.platform, one.topology, one.layout) == ("tpu", "v5p:2x2x1", None)
        assert one.xla_flags == {"xla_f": "1"}


def test_a_module_needs_no_file() -> None:
    (one,) = find("trainer.steps:train_step", mesh={"fsdp": 4}, modes=["explicit"])
    assert one.build == "trainer.steps:train_step"


@pytest.mark.parametrize(("mesh", "devices"), [({"a": 4}, "4"), ({"a": 2, "b": -1}, "2")])
def test_for_cpu_a_function_gets_the_devices_that_its_mesh_takes(
    mesh: Mapping[str, int], devices: str
) -> None:
    (one,) = find("m:f", mesh=mesh, platform="cpu", modes=["auto"])
    assert one.topology == devices


def test_a_file_whose_name_looks_like_a_function_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "dump.py:main"
    path.touch()
    assert find(str(path)) == [Recorded(path)]


def test_a_function_may_stand_beside_a_model_of_other_axes(train_py: Path) -> None:
    with pytest.raises(UsageError, match="the mesh of lm-head has the axes fsdp, not data"):
        find("lm-head", "train.py:train_step", mesh={"data": 4})
    found = find("lm-head", "train.py:train_step", mesh={"fsdp": 8}, modes=["auto"])
    assert [one.mesh for one in found] == [{"fsdp": 8}, {"fsdp": 8}]


@pytest.mark.parametrize(
    ("name", "options", "message", "hint"),
    [
        ("train.py:train_step", {}, "train.py:train_step needs a mesh", "--mesh fsdp=4"),
        ("train.py", {}, "train.py is a Python file", "train.py:train_step"),
        ("train.py:", {}, "'' is no name of a function", "train.py:train_step"),
        ("train.py:3x", {}, "'3x' is no name of a function", "train.py:train_step"),
        ("trian.py:train_step", {"mesh": {"a": 4}}, "there is no file trian.py", None),
        (
            "train.py:train_step",
            {"mesh": {"a": 4}, "layouts": ["split"]},
            "layouts are for models",
            "--set layout=split",
        ),
    ],
)
def test_a_name_that_cannot_be_is_told_before_anything_is_compiled(
    train_py: Path, name: str, options: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as raised:
        find(name, **options)
    assert message in raised.value.message
    assert (hint in (raised.value.hint or "")) if hint else raised.value.hint is None


@pytest.mark.parametrize(
    ("texts", "mesh"),
    [
        (["fsdp=4"], {"fsdp": 4}),
        (["data=2, fsdp=-1"], {"data": 2, "fsdp": -1}),
        (["z=2", "a=2"], {"z": 2, "a": 2}),
    ],
)
def test_a_mesh_is_read_in_its_order(texts: list[str], mesh: dict[str, int]) -> None:
    assert list(parse_mesh(texts).items()) == list(mesh.items())


@pytest.mark.parametrize(
    "text", ["", "fsdp", "fsdp=", "=4", "fsdp=0", "fsdp=-2", "fsdp=4.0", "a b=2", "a=2,a=2", "a=2,"]
)
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_mesh([text])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("16", 16), ("-3", -3), ("1e-3", 1e-3), ("0.5", 0.5), ("True", True), ("false", False)),
        *(("bfloat16", "bfloat16"), ("", ""), ("1e999", "1e999"), ("nan", "nan"), ("1_0", "1_0")),
    ],
)
def test_a_setting_is_read_as_what_it_looks_like(text: str, value: object) -> None:
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


def test_modules_of_one_name_in_two_folders_are_two_programs_to_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowering = Lowering("p", "trainer.steps:f", "auto", None, {}, {"a": 1}, "cpu", "1")
    monkeypatch.chdir(tmp_path)
    first = compile_environment(lowering)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert compile_environment(lowering) != first


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HloAuditError]:
    """What is said of each faulty program, by its name."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty.py").write_text(FAULTY)
    (folder / "imports.py").write_text("import json\nimport no_such_package\n")
    (folder / "cut.py").write_text("def train_step(mesh):\n    return (\n")
    (folder / "relative.py").write_text("from . import faulty\n")
    functions = [f.name for f in ast.parse(FAULTY).body if isinstance(f, ast.FunctionDef)]
    names = [f"faulty.py:{name}" for name in functions if name not in ("by_rows", "ambiguous")]
    names += ["faulty.py:NOT_A_FUNCTION", "faulty.py:branch"]
    names += ["imports.py:f", "cut.py:f", "relative.py:f", "no.such:f"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options: dict[str, Any] = {"platform": "cpu", "modes": ["auto"]}
        subjects = find(*names, mesh={"fsdp": 2}, **options)
        options["modes"] = ["explicit"]
        subjects += find("faulty.py:ambiguous", mesh={"fsdp": 2}, **options)
        options |= {"modes": ["auto"], "settings": {"row": "8"}}
        (unknown,) = find("faulty.py:with_setting", mesh={"fsdp": 2}, **options)
        options |= {"settings": {}, "topology": "4"}
        (misfit,) = find("faulty.py:wrong_axis", mesh={"fsdp": 3}, **options)
        audits = audit_subjects([*subjects, unknown, misfit], ALL_RULES, how=Compiling(jobs=2))
    keys = [one.program.partition(":")[2] or one.program for one in subjects]
    keys = [key if key != "f" else one.program for key, one in zip(keys, subjects, strict=True)]
    return dict(zip([*keys, "unknown", "misfit"], map(error_of, audits), strict=True))


def error_of(audit: ProgramAudit) -> HloAuditError:
    assert audit.error is not None, audit.program
    return audit.error


def line_of(code: str) -> int:
    return next(n for n, line in enumerate(FAULTY.splitlines(), 1) if code in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "message", "hint"),
    [
        ("branches", "the program raised TracerBoolConversionError: Attempted boolean", None),
        ("ambiguous", "the program raised ShardingTypeError: dot_general", "the mode auto needs"),
        ("wrong_axis", "is not found in mesh", "those of --mesh"),
        ("other_devices", "Received incompatible devices", "the mesh that the function is given"),
        ("too_few_arguments", "argument: 'y'", "that the jitted function takes"),
        ("returns_nothing", "it returns None", "return (jax.jit(step)"),
        ("not_jitted", "the first is the function step, which is not jitted", "jax.jit(step)"),
        ("bare_argument", "the arguments are an object of type ShapeDtypeStruct", "(argument, "),
        ("no_arguments", "the arguments are missing", "(argument, ...)"),
        ("takes_no_mesh", "faulty.py:takes_no_mesh takes no mesh", "first parameter"),
        ("step", "faulty.py:step needs the setting batch", "not the step itself"),
        ("jitted", "faulty.py:jitted is a jitted function", "takes a mesh"),
        ("with_setting", "needs the setting rows", "--set rows=VALUE"),
        ("unknown", "no setting of faulty.py:with_setting is called 'row'", "'rows'"),
        ("misfit", "the mesh fsdp=3 takes 3 devices, but the topology 4 has 4", "-1"),
        ("NOT_A_FUNCTION", "no function in faulty.py is called 'NOT_A_FUNCTION'", "such as "),
        ("branch", "no function in faulty.py is called 'branch'", "did you mean 'branches'?"),
        ("imports.py:f", "ModuleNotFoundError: No module named 'no_such_package'", "python"),
        ("cut.py:f", "the program raised SyntaxError: '(' was never closed (cut.py:2)", None),
        ("relative.py:f", "attempted relative import", "package.module:function"),
        ("no.such:f", "no module is called 'no.such'", "file.py:function"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(
    told: dict[str, HloAuditError], program: str, message: str, hint: str | None
) -> None:
    error = told[program]
    assert type(error) is UsageError
    assert error.exit_code == 2
    assert message in error.message
    assert (hint in (error.hint or "")) if hint else error.hint is None


@pytest.mark.slow
def test_an_exception_is_told_by_the_users_own_lines(told: dict[str, HloAuditError]) -> None:
    outer, inner = line_of("return inner(x) + 1"), line_of("return x if x.sum()")
    error = told["branches"]
    assert error.message.endswith(f"(faulty.py:{inner} in inner)")
    assert error.log[-2:] == (
        f"faulty.py:{outer} in step: return inner(x) + 1",
        f"faulty.py:{inner} in inner: return x if x.sum() > 0 else -x",
    )
    assert any("while tracing the function step" in line for line in error.log)
    assert told["imports.py:f"].log == ("imports.py:2 in <module>: import no_such_package",)
    assert told["cut.py:f"].log == ("cut.py:2: return (",)
    sharding = line_of("sharding = NamedSharding(mesh, P(axis")
    assert told["wrong_axis"].log[-1].startswith(f"faulty.py:{sharding} in by_rows: sharding = ")


@pytest.mark.slow
def test_no_line_of_ours_or_of_jax_is_shown(told: dict[str, HloAuditError]) -> None:
    for error in told.values():
        text = "\n".join((error.message, *error.log))
        assert "hlo_audit" not in text
        assert "site-packages" not in text
        assert "Traceback" not in text


# --- what goes right ----------------------------------------------------------------------------


# As the console script: the working directory is not on the path.
SCRIPT = (sys.executable, "-P", "-c", "from hlo_audit.cli import main; main()")
run = partial(command_line.run, command=SCRIPT)


@pytest.mark.slow
def test_the_example_of_the_readme_works_as_it_stands(tmp_path: Path) -> None:
    readme = (TOP / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    command, shown = re.findall(
        r"^\$ hlo-audit (check train\.py.*?)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL
    )[0]
    result = run(*shlex.split(command), "--quiet", "--verbose", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert "train.py:train_step/explicit: HLA002 is 2, at most 0" in result.stdout
    assert "train.py:train_step/auto:" not in result.stdout
    for line in re.findall(r"train\.py:\d+ in \S+", shown):
        assert line in result.stdout


MODULE = '''
from .sizes import ROWS
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def scaled(*, mesh, rows=ROWS, scale=1.0):
    """The mesh by keyword, an argument by keyword, and a closed-over setting."""
    assert mesh.axis_names == ("data", "fsdp")

    def step(x, *, shift):
        return x * scale + shift

    kind = "explicit" if "Explicit" in str(mesh.axis_types) else "auto"
    step.__name__ = f"{kind}_{rows}_{scale}".replace(".", "_")
    array = jax.ShapeDtypeStruct((rows, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    return jax.jit(step), (array,), {"shift": array}
'''


@pytest.mark.slow
def test_a_module_is_found_from_the_working_directory_and_built_for_each_mode(
    tmp_path: Path,
) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("ROWS = 16\n")
    (package / "steps.py").write_text(MODULE)
    options = "--platform cpu --mesh data=2,fsdp=1 --set scale=2.5 --quiet --format json"
    result = run("check", "trainer.steps:scaled", *options.split(), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    programs = json.loads(result.stdout)["programs"]
    assert [one["module"] for one in programs] == ["jit_auto_16_2_5", "jit_explicit_16_2_5"]
    assert [one["mode"] for one in programs] == ["auto", "explicit"]
    assert programs[0]["settings"] == {"scale": 2.5}
    assert programs[0]["topology"] == "2"
    assert all("error" not in one for one in programs)
    # A change of what the module imports is a change of the program.
    (package / "sizes.py").write_text("ROWS = 32\n")
    result = run("check", "trainer.steps:scaled", *options.split(), cwd=tmp_path)
    assert '"jit_auto_32_2_5"' in result.stdout


@pytest.mark.slow
def test_an_error_is_one_line_and_the_users_own_lines_below(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    options = "--platform cpu --mesh fsdp=2 --mode auto --quiet"
    result = run("check", "faulty.py:wrong_axis", *options.split(), cwd=tmp_path)
    assert result.returncode == 2
    first, *rest = result.stderr.splitlines()
    assert first.startswith(
        "hlo-audit: error: faulty.py:wrong_axis/auto: the program raised ValueError: "
    )
    assert rest
    assert all(line.startswith("  | faulty.py:") for line in rest)
    assert result.stdout == ""


@pytest.fixture(scope="module")
def examples() -> dict[str, ProgramAudit]:
    """Each example in both modes, compiled for TPU, by its name and mode."""
    subjects = find(*(f"{path}:train_step" for path in EXAMPLES), mesh={"fsdp": 4})
    how = Compiling(cache=Cache(default_folder(os.environ)))
    audits = audit_subjects(subjects, ALL_RULES, how=how)
    return {f"{Path(audit.program).stem}/{audit.mode}": audit for audit in audits}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_compiles_and_shows_what_explicit_sharding_costs(
    examples: dict[str, ProgramAudit], path: Path, mode: str
) -> None:
    audit = examples[f"{path.stem}/{mode}"]
    assert audit.error is None, (audit.error, audit.error and audit.error.log)
    assert audit.cost is not None
    between = audit.tallies.get("HLA001", {}).get("between-dot-and-transpose", 0)
    assert (between > 0) == (mode == "explicit")
    files = {finding.source.file for finding in audit.findings if finding.source}
    assert any(file.endswith(path.name) for file in files) == bool(files)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_says_how_it_is_audited(path: Path) -> None:
    text = path.read_text()
    assert f"hlo-audit check examples/{path.name}:train_step --mesh fsdp=4" in text
