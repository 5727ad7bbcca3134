"""The command line as users and CI jobs meet it: output, exit codes, one line for what is wrong."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import command_line
from command_line import assert_refused

FINAL = "module_0000.jit_step.cl_1004524046.after_codegen.txt"
EXPLICIT = "jax-0.12.0-explicit"

run = partial(command_line.run, columns=80)
invoke = partial(command_line.invoke, columns=80)


@pytest.fixture(scope="session")
def explicit_dump(dumps: Callable[[str], Path]) -> Path:
    return dumps("lm_head_versions") / EXPLICIT


def schema() -> Any:
    return json.loads(resources.files("hlo_audit.report").joinpath("schema.json").read_text())


def validated(output: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(output)
    jsonschema.Draft202012Validator(schema()).validate(report)
    return report


def test_a_dump_folder_is_reported_with_counts_findings_and_fixes(explicit_dump: Path) -> None:
    result = run("check", explicit_dump)
    assert result.returncode == 0, result.stderr
    assert "jit_step" in result.stdout
    assert "HLA002 relayout-copy  4: 2 parameter, 2 result; 65.5 MB" in result.stdout
    assert "/src/lm.py:29" in result.stdout
    assert "1 (+61)" in result.stdout
    assert "%copy.3" in result.stdout
    assert "fix vocab-embed for 1 of 1 HLA001, 4 of 4 HLA002" in result.stdout
    assert "no gate" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_json_follows_its_schema(explicit_dump: Path) -> None:
    result = run("check", explicit_dump, "--format", "json")
    report = validated(result.stdout)
    (program,) = report["programs"]
    assert program["counts"] == {"HLA001": 62, "HLA002": 4, "HLA003": 1, "HLA004": 0, "HLA005": 0}
    assert program["platform"] == "tpu"
    assert program["mode"] is None
    assert program["module"] == "jit_step"
    assert (report["gate"]["passed"], report["gate"]["held"]) == (True, 0)
    assert report["gate"]["against"] is None


def test_the_schema_refuses_a_count_without_a_number() -> None:
    report = {"schema_version": 1, "programs": []}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema()).validate(report)


def test_what_a_single_file_cannot_show_is_null_and_never_zero(explicit_dump: Path) -> None:
    report = validated(run("check", explicit_dump / FINAL, "--format", "json").stdout)
    (program,) = report["programs"]
    assert program["counts"] == {
        "HLA001": None,
        "HLA002": 4,
        "HLA003": None,
        "HLA004": 0,
        "HLA005": None,
    }
    assert set(program["skipped"]) == {"HLA001", "HLA003", "HLA005"}
    assert "before optimisation" in program["skipped"]["HLA001"]


def test_the_modules_of_several_folders_are_told_apart(dumps: Callable[[str], Path]) -> None:
    folder = dumps("lm_head_platforms")
    report = validated(run("check", folder, "--format", "json").stdout)
    names = [Path(program["program"]).name for program in report["programs"]]
    assert names == ["cpu-auto", "cpu-explicit", "gpu-h100-auto", "gpu-h100-explicit"]
    text = " ".join(run("check", folder, "--max", "HLA002=1").stdout.split())
    assert "cpu-explicit: HLA002 is 2, at most 1" in text


def test_notes_are_listed_where_they_break_a_budget(dumps: Callable[[str], Path]) -> None:
    folder = dumps("lm_head_platforms") / "cpu-explicit"
    assert "of a value inside a fusion" not in run("check", folder).stdout
    assert "of a value inside a fusion" in run("check", folder, "--max", "HLA002=1").stdout


def test_a_snapshot_between_the_stages_says_what_is_missing(explicit_dump: Path) -> None:
    (path,) = explicit_dump.glob("*.before_layout-assignment.txt")
    report = validated(run("check", path, "--format", "json").stdout)
    (program,) = report["programs"]
    assert set(program["counts"].values()) == {None}
    assert "of the final module" in program["skipped"]["HLA003"]


def test_an_empty_standard_input_is_called_so() -> None:
    assert_refused(run("check", "-", text=""), "standard input is empty")


def test_the_verdict_is_seen_where_the_report_goes_to_a_file(
    explicit_dump: Path, tmp_path: Path
) -> None:
    result = run("check", explicit_dump, "--max", "HLA002=3", "--output", tmp_path / "report.txt")
    assert result.returncode == 1
    assert "HLA002 is 4, at most 3" in result.stderr


def test_standard_input_is_a_file(explicit_dump: Path) -> None:
    text = (explicit_dump / FINAL).read_text()
    report = validated(run("check", "-", "--format", "json", text=text).stdout)
    assert report["programs"][0]["counts"]["HLA002"] == 4


def test_a_budget_gates(explicit_dump: Path) -> None:
    kept = run("check", explicit_dump, "--max", "relayout-copy=4")
    assert kept.returncode == 0
    assert "gate passed" in kept.stdout
    broken = run("check", explicit_dump, "--max", "HLA002=3")
    assert broken.returncode == 1
    assert "HLA002 is 4, at most 3" in broken.stdout
    assert run("check", explicit_dump, "--max", "HLA002=3", "--exit-zero").returncode == 0


def test_a_budget_on_what_could_not_be_counted_fails(explicit_dump: Path) -> None:
    result = run("check", explicit_dump / FINAL, "--max", "HLA001=99")
    assert result.returncode == 1
    assert "HLA001 could not be counted" in result.stdout


def test_rules_are_selected_and_ignored_by_code_and_slug(explicit_dump: Path) -> None:
    only = run("check", explicit_dump, "--select", "relayout-copy", "--format", "json")
    assert set(validated(only.stdout)["programs"][0]["counts"]) == {"HLA002"}
    rest = run("check", explicit_dump, "--ignore", "HLA001", "--format", "json")
    assert set(validated(rest.stdout)["programs"][0]["counts"]) == {
        *("HLA002", "HLA003", "HLA004", "HLA005")
    }


def test_a_rule_option_changes_its_threshold(explicit_dump: Path) -> None:
    option = "relayout-copy.min_bytes=20000000"
    result = run("check", explicit_dump, "--rule-option", option, "--format", "json")
    assert validated(result.stdout)["programs"][0]["counts"]["HLA002"] == 0


def test_the_verdict_says_what_programs_were_compared_with(
    explicit_dump: Path, tmp_path: Path
) -> None:
    (tmp_path / "old.json").write_text(run("check", explicit_dump, "--format", "json").stdout)
    update = ("--baseline", "known.json", "--update-baseline")
    assert run("check", explicit_dump, *update, cwd=tmp_path).returncode == 0
    for options, said in (
        (["--against", "old.json"], "the report old.json"),
        (["--baseline", "known.json"], "the baseline known.json"),
        (["--against", explicit_dump], "the dump "),
    ):
        result = run("check", explicit_dump, *options, cwd=tmp_path, env={"COLUMNS": "300"})
        assert f"gate passed: 1 program with nothing new against {said}" in result.stdout
        page = run("check", explicit_dump, *options, "--format", "markdown", cwd=tmp_path)
        assert f"with nothing new against {' '.join(said.split()[:2])}\n" in page.stdout
        report = run("check", explicit_dump, *options, "--format", "json", cwd=tmp_path)
        assert validated(report.stdout)["gate"]["against"] == "baseline"
    report = run("check", explicit_dump, "--max", "HLA002=4", "--format", "json")
    assert validated(report.stdout)["gate"]["against"] == "budget"


def test_verbose_lists_notes_too(explicit_dump: Path) -> None:
    assert "repeats the sharding" not in run("check", explicit_dump).stdout
    assert "repeats the sharding" in run("check", explicit_dump, "--verbose").stdout


def test_a_report_is_written_to_a_file(explicit_dump: Path, tmp_path: Path) -> None:
    for format_ in ("text", "json"):
        path = tmp_path / f"report.{format_}"
        result = run("check", explicit_dump, "--format", format_, "--output", path)
        assert result.returncode == 0
        assert result.stdout == ""
        assert "relayout-copy" in path.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "report.text"]


@pytest.mark.parametrize("format_", ["text", "json"])
def test_a_reader_that_goes_early_does_not_change_the_verdict(
    explicit_dump: Path, format_: str
) -> None:
    for budget, code in (("HLA002=3", 1), ("HLA002=4", 0)):
        process = command_line.start(
            *("check", explicit_dump, "--verbose", "--max", budget, "--format", format_)
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(60) == code


def test_no_arguments_print_the_help() -> None:
    result = run()
    assert "Usage: hlo-audit" in result.stdout + result.stderr
    assert "error" not in result.stderr


def test_one_bad_program_does_not_hide_the_others(explicit_dump: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_text("HloModule m\n\nENTRY %e {\n  %p = f32[8]{0} parameter(0)\n")
    result = run("check", bad, explicit_dump, "--format", "json")
    assert result.returncode == 2
    first, second = validated(result.stdout)["programs"]
    assert first["error"]["kind"] == "parse"
    assert "bad.txt:5:1: the text ends inside computation e" in first["error"]["message"]
    assert second["counts"]["HLA002"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "lm-hed"], ["'lm-hed'", "did you mean 'lm-head'"]),
        (["check", "lm-head", "--layout", "embed-vocap"], ["'embed-vocap'", "'embed-vocab'"]),
        (["check", "lm-head", "--set", "embd=4"], ["'embd'", "'embed'"]),
        (["check", "lm-head", "--set", "embed=0"], ["embed=0", "1 or more"]),
        (["check", "lm-head", "--set", "embed=many"], ["embed=many", "int"]),
        (["check", "lm-head", "--set", "embed"], ["--set embed", "NAME=VALUE"]),
        (["check", "lm-head", "--topology", ""], ["topology is empty"]),
        (["check", "lm-head", "--topology", "v5p-8"], ["v5p-8", "v5p:2x2x1"]),
        (["check", "lm-head", "--topology", "v9z:2x2x1"], ["v9z"]),
        (["check", "lm-head", "--xla-flag", "xla_no_such_flag=1"], ["xla_no_such_flag"]),
        (["check", "lm-head", "--mode", "manual"], ["'manual'", "explicit"]),
        (["check", "lm-head", "--jobs", "0"], ["--jobs", "0"]),
        (["check", "lm-head", "--max", "HLA002=few"], ["HLA002=few"]),
        (["check", "lm-head", "--max", "HLA999=1"], ["'HLA999'"]),
        (["check", "lm-head", "--select", "HLA0O2"], ["'HLA0O2'", "HLA002"]),
        (["check", "lm-head", "--rule-option", "relayout-copy.floor=1"], ["'floor'", "min_bytes"]),
        (["check", "lm-head", "--nope"], ["--nope"]),
        (["check", "no/such/folder"], ["there is no file or folder no/such/folder"]),
        (["check", "{empty}"], ["no HLO dump is in"]),
        (["check", "{prose}"], ["prose.txt:1:1", "this is not HLO text"]),
        (["check", "{cut}"], ["cut.txt:4:18", "it may be cut off"]),
        (["check", "{page}"], ["page.json is a report, not HLO", "needs the dumps"]),
        (["report", "{page}"], ["page.json is a report, not HLO", "merge joins reports"]),
        (["check", "{known}"], ["known.json is a baseline, not HLO", "--baseline"]),
        (["diff", "{known}", "{other}"], ["known.json is a baseline, not HLO"]),
        (["check", "{other}"], ["other.json is JSON, not HLO"]),
        (["explain", "relayout"], ["'relayout'", "relayout-copy"]),
        (["lower", "{prose}", "-o", "{empty}"], ["is a dump already"]),
        (["chek"], ["chek"]),
        (["check", "{prose}", "--topology", "v6e:2x2"], ["for models"]),
        (["check", "{prose}", "--mode", "auto"], ["for models"]),
        (["check", "lm-head", "--select", "HLA002", "--ignore", "HLA002"], ["no rule is left"]),
        (["check", "lm-head", "--select", "HLA002", "--max", "HLA001=0"], ["--max HLA001"]),
        (["check", "lm-heads"], ["'lm-heads'", "folder or file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    places = {name: tmp_path / name for name in ("empty", "prose.txt", "cut.txt")}
    places["empty"].mkdir()
    places["prose.txt"].write_text("To whom it may concern\n")
    places["cut.txt"].write_text(
        "HloModule m\n\nENTRY %e (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} p"
    )
    for name, keys in (
        ("page.json", ("schema_version", "tool", "programs", "gate", "volatile")),
        ("known.json", ("schema_version", "entries")),
        ("other.json", ("a",)),
    ):
        places[name] = tmp_path / name
        places[name].write_text(json.dumps(dict.fromkeys(keys, 1), indent=2))
    named = {name.partition(".")[0]: str(path) for name, path in places.items()}
    quiet = ["--quiet"] if arguments[0] in ("check", "lower") else []
    result = invoke(*(argument.format(**named) for argument in arguments), *quiet)
    assert_refused(result, *words)


def test_terminal_escapes_in_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "step.txt"
    path.write_text(
        "HloModule m, is_scheduled=true\n\nENTRY %e (p: f32[512,512]) -> f32[512,512] {\n"
        '  %p = f32[512,512]{1,0} parameter(0), metadata={op_name="\x1b[31mred\\033[0m[bold]"}\n'
        "  ROOT %copy = f32[512,512]{0,1} copy(%p)\n}\n"
    )
    result = run("check", path)
    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert "[bold]" in result.stdout


@pytest.mark.parametrize("code", ["HLA001", "HLA002", "HLA003", "HLA004", "HLA005"])
def test_explain_prints_documentation_options_and_fixes(code: str) -> None:
    result = run("explain", code)
    assert result.returncode == 0
    for heading in ("What it reports", "Why it matters", "Limits", "Fixes"):
        assert heading in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_rules_and_models_are_listed() -> None:
    listed = run("rules").stdout
    for slug in ("sharding-custom-call", "relayout-copy", "missed-reduce-scatter"):
        assert slug in listed
    models = run("models").stdout
    for word in ("lm-head", "vocab-embed", "[vocab, embed]", "embed=512", "v5p:2x2x1"):
        assert word in models


def test_help_names_every_command() -> None:
    result = run("--help")
    for command in ("check", "lower", "explain", "rules", "models"):
        assert command in result.stdout


def test_auditing_a_dump_imports_neither_jax_nor_pandas(explicit_dump: Path) -> None:
    code = (
        "import sys\n"
        "from hlo_audit.cli import cli\n"
        f"cli.main(['check', {str(explicit_dump)!r}], standalone_mode=False)\n"
        "heavy = {'jax', 'jaxlib', 'pandas', 'numpy', 'libtpu'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_listing_models_imports_no_jax() -> None:
    code = (
        "import sys\n"
        "from hlo_audit.models import ALL_MODELS\n"
        "ALL_MODELS[0].configure({'embed': '8'})\n"
        "assert not {'jax', 'numpy'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_starts_about_as_fast_as_click() -> None:
    def seconds(*command: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        return time.perf_counter() - start

    pairs = [
        (seconds("-m", "hlo_audit", "--version"), seconds("-c", "import click")) for _ in range(9)
    ]
    ours, clicks = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert ours < 2.5 * clicks


def test_models_at_the_top_of_the_checkout_refuse_to_be_imported_by_that_name() -> None:
    top = Path(__file__).parent.parent
    for package in ("models", "rules"):
        result = subprocess.run(
            [sys.executable, "-c", f"import {package}"],
            cwd=top,
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"imported as hlo_audit.{package}" in result.stderr
