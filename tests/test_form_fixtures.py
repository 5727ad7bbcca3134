"""The archive of HLO text of each jax: it holds the forms that it is there for, and we read them.

``test_parser_oracle.py`` holds every module of it against XLA's own parser, where the installed
jaxlib can read it; here nothing depends on the installed jax.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hlo_audit.dump import read_dump
from hlo_audit.hlo import Module, parse_module
from hlo_audit.hlo.loops import trip_count

VERSIONS = ("0.7.2", "0.8.0", "0.8.3", "0.9.2", "0.10.2", "0.11.2", "0.12.0.1")
PROGRAMS = (
    *(f"tpu-{name}-auto" for name in ("control_flow", "collectives", "arrays", "kernel")),
    *(f"cpu-{name}-auto" for name in ("control_flow", "collectives", "arrays")),
    *(f"tpu-lm-head-{mode}" for mode in ("auto", "explicit")),
)
EVERY = (VERSIONS[0], VERSIONS[-1])

# A form of text, a sign of it, and the first and the last version that write it.
CHANGED_FORMS = {
    "source positions inline": (r'source_file="tests/programs/forms\.py"', ("0.7.2", "0.8.0")),
    "source positions in tables": (r"(?m)^StackFrames$", ("0.8.3", "0.12.0.1")),
    "groups as iota tiles": (r"replica_groups=\[\d+,\d+\]<=\[", ("0.7.2", "0.12.0.1")),
    "groups over a mesh": (r"replica_groups=mesh\[", ("0.10.2", "0.12.0.1")),
    "operands that read an element": (r"%[\w.-]+#\d", ("0.11.2", "0.12.0.1")),
    "shardings over named axes": (r"sharding=\{+mesh\[", ("0.11.2", "0.12.0.1")),
    "shardings over device lists": (r"sharding=\{+devices=\[", ("0.7.2", "0.11.2")),
}
STEADY_FORMS = {
    "groups as lists": r"replica_groups=\{\{0,3\},\{1,2\}\}",
    "pairs": r"source_target_pairs=\{\{",
    "an async collective": r" collective-permute-start\(",
    "an async copy": r" copy-start\(",
    "a tuple": r"\(f32\[[\d,]+\]\S*, (?:/\*index=\d+\*/)?\S+\[.* tuple\(",
    "a comment in operands": r"/\*index=5\*/",
    "a loop": r" while\(.*condition=%.*body=%",
    "a trip count": r'"?known_trip_count"?:\{',
    "a conditional of two branches": r" conditional\(.*branch_computations=\{%[^,}]+, %[^,}]+\}",
    "a conditional of three branches": r" conditional\(.*branch_computations=\{(?:%[^}]+){3}\}",
    "a sort of two arrays": r"= \(.*\) sort\(.*to_apply=%",
    "random bits": r" rng-bit-generator\(.*algorithm=",
    "random numbers": r" rng\(.*distribution=rng_uniform",
    "a gather": r" gather\(.*offset_dims=\{",
    "a scatter": r" scatter\(.*update_window_dims=\{",
    "a window": r" reduce-window\(.*window=\{size=",
    "a select-and-scatter": r" select-and-scatter\(.*select=%.*scatter=%",
    "a convolution": r" convolution\(.*dim_labels=",
    "a Fourier transform": r" fft\(.*fft_type=",
    "padding": r" pad\(.*padding=\d",
    "complex numbers": r"c64\[",
    "8-bit floats": r"f8e4m3fn\[[^ ]*.*|f8e5m2\[",
    "4-bit integers": r"\bs4\[",
    "an empty array": r"f32\[0,4\]",
    "infinities": r" constant\(\{.*-inf.*nan",
    "donated buffers": r"input_output_alias=\{ \{0\}: \(\d+, \{\}, ",
    "a Pallas kernel": r'custom_call_target="tpu_custom_call"',
    "a sharding annotation": r'custom_call_target="Sharding"',
    "tiled layouts": r"\{1,0:T\(8,128\)",
    "packed tiles": r"T\(8,128\)\(2,1\)",
    "a memory space": r"S\(1\)\}",
    "costs of instructions": r'"estimated_cycles":"\d+"',
    "a schedule": r"(?m)^HloModule .*is_scheduled=true",
    "a reduce-scatter": r" reduce-scatter\(",
    "an all-to-all": r" all-to-all\(",
}
FORMS = {**CHANGED_FORMS, **{name: (sign, EVERY) for name, sign in STEADY_FORMS.items()}}

Dumps = Callable[[str], Path]


def snapshots(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*.txt")):
        yield path, path.read_text("utf-8")


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def texts(dumps: Dumps, version: str) -> dict[Path, str]:
    return dict(snapshots(dumps("forms_versions") / f"jax-{version}"))


@pytest.fixture(scope="module")
def modules(texts: dict[Path, str]) -> dict[Path, Module]:
    return {path: parse_module(text) for path, text in texts.items()}


def test_each_version_has_every_program_from_its_first_module_to_its_last(
    dumps: Dumps, version: str
) -> None:
    folder = dumps("forms_versions") / f"jax-{version}"
    assert {path.name for path in folder.iterdir()} == {*PROGRAMS, "versions.json"}
    assert json.loads((folder / "versions.json").read_text())["jax"] == version
    for program in PROGRAMS:
        found = read_dump(folder / program).modules
        assert {module.name for module in found} == {"jit_step"}
        assert any(module.before_optimizations for module in found), program
        assert any(module.final for module in found), program


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_there_in_the_versions_that_write_it_and_in_no_other(
    texts: dict[Path, str], version: str, form: str
) -> None:
    sign, (first, last) = FORMS[form]
    written = VERSIONS.index(first) <= VERSIONS.index(version) <= VERSIONS.index(last)
    found = any(re.search(sign, text) for text in texts.values())
    assert found == written


def test_every_instruction_of_every_module_is_read(
    texts: dict[Path, str], modules: dict[Path, Module]
) -> None:
    assert len(texts) > 40
    for path, text in texts.items():
        lines = re.findall(r"(?m)^  (?:ROOT )?%?([\w.-]+) = ", text)
        module = modules[path]
        names = [one.name for computation in module.computations.values() for one in computation]
        assert sorted(names) == sorted(lines), path


def test_every_attribute_that_has_a_reader_is_understood(modules: dict[Path, Module]) -> None:
    groups = shardings = called = 0
    for path, module in modules.items():
        for one in module.instructions:
            if "replica_groups" in one.attributes:
                read = one.replica_groups(4)
                assert read is not None, (path, one.text)
                assert sorted(device for group in read for device in group) == [0, 1, 2, 3]
                groups += 1
            if one.sharding is not None:
                assert one.sharding.kind != "unknown", (path, one.text)
                shardings += 1
            names = {called.name for called in module.called(one)}
            assert names == set(one.called_names), (path, one.text)
            called += len(names)
    assert groups > 20
    assert shardings > 20
    assert called > 100


def test_the_counted_loop_is_counted(dumps: Dumps, version: str) -> None:
    folder = dumps("forms_versions") / f"jax-{version}"
    for platform in ("tpu", "cpu"):
        (final,) = (
            module.final.read()
            for module in read_dump(folder / f"{platform}-control_flow-auto").modules
            if module.final is not None
        )
        counts = {trip_count(final, one) for one in final.instructions if one.opcode == "while"}
        assert {3, None} <= counts, platform


def test_each_module_tells_where_its_instructions_come_from(
    modules: dict[Path, Module],
) -> None:
    for path, module in modules.items():
        if "before_optimizations" not in path.name:
            continue
        files = {frame.file for one in module.instructions for frame in module.frames(one)}
        program = "lm_head.py" if "lm-head" in path.parent.name else "forms.py"
        assert any(file.endswith(program) for file in files), path


def test_nothing_names_the_machine_that_compiled_it(texts: dict[Path, str]) -> None:
    kernels = 0
    for path, text in texts.items():
        assert not re.search(r'"/[^"]*\.py"', text), path
        for body in re.findall(r'"body":"([A-Za-z0-9+/=]+)"', text):
            kernels += 1
            assert not re.search(rb"/(?:home|root|tmp|Users)/", base64.b64decode(body)), path
    assert kernels > 0
