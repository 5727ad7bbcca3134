"""The config: what is found, read, refused with its line, and overridden by the command line."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import invoke
from hlo_audit.budget import Budget
from hlo_audit.cli.options import How
from hlo_audit.cli.planned import plan
from hlo_audit.config import TEMPLATE, Config, ConfigError, Ways, find_config, read_config
from hlo_audit.errors import UsageError
from hlo_audit.program import Lowering
from hlo_audit.rules import ALL_RULES
from hlo_audit.toml_lines import find_lines, line_of

HOW = How(
    modes=(),
    settings=(),
    platform="tpu",
    xla_flags=(),
    jobs=None,
    timeout_seconds=1.0,
    cache_dir=None,
    no_cache=True,
    quiet=True,
)


def config_of(folder: Path, text: str, name: str = "hlo-audit.toml") -> Config:
    path = folder / name
    path.write_text(text)
    return read_config(path, ALL_RULES)


def uncommented(text: str, *, left_out: str) -> str:
    """The template with its examples in force; of the two ways to name programs only one can be."""
    lines = []
    for line in text.splitlines():
        example = re.fullmatch(r"# ([\w-]+ = .*|\[+[\w-]+\]+)", line)
        if example and not example[1].startswith(left_out):
            lines.append(example[1])
    return "\n".join(lines) + "\n"


# -- reading


def test_the_template_changes_nothing_until_it_is_uncommented(tmp_path: Path) -> None:
    config = config_of(tmp_path, TEMPLATE)
    assert config == Config(path=tmp_path / "hlo-audit.toml")


def test_every_example_of_the_template_is_valid(tmp_path: Path) -> None:
    text = uncommented(TEMPLATE, left_out="programs")
    config = config_of(tmp_path, text)
    assert [program.name for program in config.programs] == ["train.py:train_step"]
    (program,) = config.programs
    assert program.ways.topologies == ("v5p:2x2x1", "v6e:2x2")
    assert program.ways.meshes == ({"data": 2, "fsdp": 2},)
    assert program.ignore == {"HLA001"}
    assert [str(budget) for budget in program.budgets] == ["0", "0B"]
    assert config.ways.xla_flags == {"xla_tpu_enable_latency_hiding_scheduler": "true"}
    assert config.baseline == tmp_path / "hlo-audit-baseline.json"
    assert config.options == {"HLA002": {"min_bytes": 65536}}
    assert len(config.suppressions) == 1
    named = config_of(tmp_path, uncommented(TEMPLATE, left_out="[[programs]]").split("[max]")[0])
    assert [program.name for program in named.programs] == ["train.py:train_step", "lm-head"]


def test_a_program_has_the_budgets_of_all_but_where_it_has_its_own(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "[max]\nHLA002 = 0\nHLA004 = '1MiB'\n[[programs]]\nname = 'lm-head'\n"
        "max = { relayout-copy = [3, '+10%'] }\n",
    )
    budgets = config.budgets_of(config.program("lm-head"))
    assert {(b.rule, str(b)) for b in budgets} == {
        ("HLA004", "1048576B"),
        ("HLA002", "3"),
        ("HLA002", "+10%"),
    }
    assert config.budgets_of(None)[0] == Budget("HLA002", Decimal(0), "findings", relative=False)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("\nprogram = []", 2, ["program", "no such key", "'programs'"]),
        ("modes = [\n  'auto',\n  'manual',\n]", 3, ["modes[1]", "'manual'", "auto, explicit"]),
        ("modes = 'auto'", 1, ["modes", "not a list"]),
        ("strict = 1", 1, ["strict", "not true or false"]),
        ("topologies = ['']", 1, ["topologies[0]", "empty"]),
        ("meshes = [{ fsdp = 0 }]", 1, ["meshes[0].fsdp", "0 is no size"]),
        ("meshes = [{ fsdp = 'four' }]", 1, ["meshes[0].fsdp", "whole number"]),
        ("platform = 'gpu'", 1, ["platform", "tpu, cpu"]),
        ("[max]\nHLA002 = 'few'", 2, ["max.HLA002", "'few'", "64MiB"]),
        ("[max]\nHLA002 = '10%'", 2, ["max.HLA002", "percent of what"]),
        ("[max]\nHLA002 = true", 2, ["max.HLA002", "True"]),
        ("[max]\nrelayout = 0", 2, ["max.relayout", "'relayout'", "relayout-copy"]),
        ("select = ['HLA0O2']", 1, ["select[0]", "'HLA0O2'", "HLA002"]),
        ("[rule-options.HLA002]\nmin_byte = 0", 2, ["min_byte", "'min_bytes'"]),
        ("[rule-options.HLA002]\nmin_bytes = -1", 2, ["HLA002.min_bytes", "at least 0"]),
        ("[[programs]]\nmax = {}", 1, ["programs[0]", "no name"]),
        ("programs = ['a.py:f', 'b.py:f',\n 'a.py:f']", 2, ["programs[2]", "there twice"]),
        ("programs = [3]", 1, ["programs[0]", "a name or a table"]),
        ("[[suppress]]\nrule = 'HLA002'\nreason = 'x'", 1, ["suppress[0]", "which finding"]),
        ("[[suppress]]\nfingerprint = '0'", 1, ["suppress[0]", "no reason"]),
        ("[[suppress]]\nop_name = 'x'", 2, ["suppress[0].op_name", "'op-name'"]),
        ("settings = { a = [1] }", 1, ["settings.a"]),
    ],
)
def test_an_error_names_the_key_and_the_line(
    tmp_path: Path, text: str, line: int, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(tmp_path, text)
    message = str(raised.value)
    assert message.startswith(f"{tmp_path / 'hlo-audit.toml'}:{line}: "), message
    for word in words:
        assert word in message


def test_in_pyproject_the_keys_are_those_of_the_table(tmp_path: Path) -> None:
    text = "[project]\nname = 'x'\n\n[tool.hlo-audit]\nstrict = true\nmoeds = []\n"
    with pytest.raises(ConfigError, match=r"pyproject.toml:6: moeds: .*did you mean 'modes'"):
        config_of(tmp_path, text, "pyproject.toml")
    assert config_of(tmp_path, text.replace("moeds", "modes"), "pyproject.toml").strict


def test_what_is_no_toml_is_told_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no TOML: .*line 2"):
        config_of(tmp_path, "strict = true\nmodes = [\n= 3\n".replace("[\n=", "= "))


# -- finding it


def test_the_nearest_config_upwards_is_taken(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert find_config(inner) is None or not find_config(inner).is_relative_to(tmp_path)  # type: ignore[union-attr]
    (tmp_path / "pyproject.toml").write_text("[tool.hlo-audit]\n")
    assert find_config(inner) == tmp_path / "pyproject.toml"
    (tmp_path / "hlo-audit.toml").write_text("")
    assert find_config(inner) == tmp_path / "hlo-audit.toml"
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\n# hlo-audit is not here\n")
    assert find_config(inner) == tmp_path / "hlo-audit.toml"
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.hlo-audit]\n")
    assert find_config(inner) == tmp_path / "a" / "pyproject.toml"


def test_a_broken_pyproject_of_another_tool_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("this is = = no TOML")
    found = find_config(tmp_path)
    assert found is None or found.parent != tmp_path
    (tmp_path / "pyproject.toml").write_text("[tool.hlo-audit\n")
    with pytest.raises(ConfigError, match="is no TOML"):
        find_config(tmp_path)


# -- lines


def test_lines_are_found_in_every_form_of_toml() -> None:
    text = (
        "# first\n"
        "a = '''x\ny'''\n"
        '"quoted key" = 1\n'
        "list = [ # comment ]\n  'one', [2,\n 3], {x = 1, y = 2}\n\n]\n"
        "[table.inner]\n"
        'b = "]] \\" ["\n'
        "[[rows]]\nc = 1\n[[rows]]\n c = 2\n[rows.deep]\nd.e = 1979-05-27 07:32:00\n"
    )
    tomllib.loads(text)
    lines = find_lines(text)
    expected = {
        ("a",): 2,
        ("quoted key",): 4,
        ("list",): 5,
        ("list", 0): 6,
        ("list", 1, 0): 6,
        ("list", 1, 1): 7,
        ("list", 2, "x"): 7,
        ("list", 2, "y"): 7,
        ("table", "inner"): 10,
        ("table", "inner", "b"): 11,
        ("rows", 0, "c"): 13,
        ("rows", 1): 14,
        ("rows", 1, "c"): 15,
        ("rows", 1, "deep"): 16,
        ("rows", 1, "deep", "d", "e"): 17,
    }
    assert {path: lines.get(path) for path in expected} == expected
    assert line_of(lines, ("rows", 1, "nothing", 3)) == 14
    assert line_of(lines, ("nothing",)) == 1


@given(st.dictionaries(st.text(max_size=6), st.text(max_size=8), max_size=6))
def test_any_keys_and_texts_are_found(pairs: dict[str, str]) -> None:
    # JSON's strings are TOML's, but for what it leaves unescaped or writes as surrogates.
    lines = [f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in pairs.items()]
    text = "".join(lines)
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert {path: line for path, line in find_lines(text).items() if len(path) == 1} == {
        (key,): number for number, key in enumerate(read, start=1)
    }


# -- over it, the command line


def lowerings(names: tuple[str, ...], how: How, config: Config) -> list[Lowering]:
    subjects = plan(names, how, config)
    assert all(isinstance(subject, Lowering) for subject in subjects)
    return [subject for subject in subjects if isinstance(subject, Lowering)]


def test_programs_come_in_each_topology_mesh_and_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step.py").write_text("def step(mesh): ...\n")
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    config = config_of(
        tmp_path,
        "programs = ['step.py:step', 'lm-head']\nmodes = ['explicit']\n"
        "topologies = ['v5p:2x2x1', 'v6e:2x2', '8']\nlayouts = ['vocab-embed']\n"
        "meshes = [{ fsdp = 4 }, { data = 2, fsdp = -1 }]\n",
    )
    found = lowerings((), HOW, config)
    assert [(one.program, one.topology, dict(one.mesh), one.layout) for one in found] == [
        ("../step.py:step", "v5p:2x2x1", {"fsdp": 4}, None),
        ("../step.py:step", "v5p:2x2x1", {"data": 2, "fsdp": -1}, None),
        ("../step.py:step", "v6e:2x2", {"fsdp": 4}, None),
        ("../step.py:step", "v6e:2x2", {"data": 2, "fsdp": -1}, None),
        ("lm-head", "v5p:2x2x1", {"fsdp": -1}, "vocab-embed"),
        ("lm-head", "v6e:2x2", {"fsdp": -1}, "vocab-embed"),
    ]
    assert {one.mode for one in found} == {"explicit"}
    on_cpu = lowerings((), replace(HOW, platform="cpu"), config)
    assert {one.topology for one in on_cpu} == {"8"}


def test_options_of_the_command_line_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(
        tmp_path,
        "modes = ['explicit']\n[[programs]]\nname = 'lm-head'\nlayouts = ['all']\n"
        "topologies = ['v6e:2x2']\nsettings = { embed = 256, seq = 64 }\n",
    )
    how = replace(
        HOW,
        modes=("auto",),
        layouts=("vocab-embed",),
        topology="v5p:2x2x1",
        settings=("embed=128",),
    )
    (one,) = lowerings(("lm-head",), how, config)
    assert (one.mode, one.layout, one.topology) == ("auto", "vocab-embed", "v5p:2x2x1")
    assert (one.settings["embed"], one.settings["seq"]) == (128, 64)
    assert len(lowerings((), HOW, config)) > 2  # all layouts


def test_what_is_wrong_with_a_program_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, "programs = [\n  'lm-head',\n  'lm-hed',\n]\n")
    with pytest.raises(UsageError, match=r"hlo-audit.toml:3: .*'lm-hed'"):
        plan((), HOW, config)


def test_without_programs_the_models_are_meant() -> None:
    found = lowerings((), HOW, Config())
    assert {"lm-head", "mhc", "moe-gmm"} <= {one.program for one in found}
    modes: Any = ("auto",)
    assert {one.mode for one in lowerings((), HOW, Config(ways=Ways(modes=modes)))} == {"auto"}


def test_the_config_is_taken_left_and_chosen(tmp_path: Path) -> None:
    (tmp_path / "step.txt").write_text(
        "HloModule m, is_scheduled=true\n\nENTRY %e (p: f32[512,512]) -> f32[512,512] {\n"
        "  %p = f32[512,512]{1,0} parameter(0)\n  ROOT %copy = f32[512,512]{0,1} copy(%p)\n}\n"
    )
    (tmp_path / "hlo-audit.toml").write_text("programs = ['step.txt']\n[max]\nHLA002 = 0\n")
    (tmp_path / "other.toml").write_text("programs = ['step.txt']\n[max]\nHLA002 = 1\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    failed = invoke("check", cwd=inner)
    assert failed.returncode == 1
    assert "../step.txt: HLA002 is 1, at most 0" in failed.stdout
    assert invoke("check", "--config", "../other.toml", cwd=inner).returncode == 0
    assert invoke("check", "--max", "HLA002=1", cwd=inner).returncode == 0  # wins over the config
    assert invoke("check", "../step.txt", cwd=inner).returncode == 1  # by its name, too
    assert invoke("check", "--no-config", "../step.txt", cwd=inner).returncode == 0
    both = invoke("check", "--no-config", "--config", "../other.toml", cwd=inner)
    assert both.returncode == 2
    missing = invoke("check", "--config", "nothing.toml", cwd=inner)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "cannot read the config nothing.toml" in missing.stderr


def test_a_rule_is_ignored_for_one_program(tmp_path: Path) -> None:
    module = (
        "HloModule m, is_scheduled=true\n\nENTRY %e (p: f32[512,512]) -> f32[512,512] {\n"
        "  %p = f32[512,512]{1,0} parameter(0)\n  ROOT %copy = f32[512,512]{0,1} copy(%p)\n}\n"
    )
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(module)
    (tmp_path / "hlo-audit.toml").write_text(
        "programs = ['a.txt', { name = 'b.txt', ignore = ['relayout-copy'] }]\n"
        "select = ['HLA002', 'HLA004']\n"
    )
    result = invoke("check", "--format", "json", cwd=tmp_path)
    counts = [program["counts"] for program in json.loads(result.stdout)["programs"]]
    assert counts == [{"HLA002": 1, "HLA004": 0}, {"HLA004": 0}]
    assert invoke("check", "--format", "markdown", cwd=tmp_path).returncode == 0
    assert invoke("check", cwd=tmp_path).returncode == 0


# -- init and doctor


def test_init_writes_a_config_and_overwrites_none(tmp_path: Path) -> None:
    assert invoke("init", cwd=tmp_path).returncode == 0
    path = tmp_path / "hlo-audit.toml"
    assert path.read_text() == TEMPLATE
    path.write_text("strict = true\n")
    again = invoke("init", cwd=tmp_path)
    assert again.returncode == 2
    assert "is there already (--force writes over it)" in again.stderr
    assert path.read_text() == "strict = true\n"
    assert invoke("init", "--force", cwd=tmp_path).returncode == 0
    assert path.read_text() == TEMPLATE


def test_doctor_says_what_there_is_and_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "hlo-audit.toml").write_text("programs = ['lm-head']\nbaseline = 'known.json'\n")
    (tmp_path / "file").write_text("")
    result = invoke("doctor", "--format", "json", "--cache-dir", "file/cache", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["config"] == str(tmp_path / "hlo-audit.toml")
    assert told["programs"] == ["lm-head"]
    assert told["platforms"]["cpu"] == {"available": True, "reason": None}
    assert told["cache"]["folder"] == str(tmp_path / "file" / "cache")
    assert not told["cache"]["writable"]
    missing = " ".join(told["missing"])
    assert "known.json" in missing
    assert "cannot be written" in missing
    text = invoke("doctor", cwd=tmp_path).stdout
    assert re.search(r"^jax +\d", text, re.MULTILINE)
    assert "missing: there is no baseline known.json" in text
