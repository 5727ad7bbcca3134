"""Findings that may stay: by the config and by comments, with a reason, and what has no use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import invoke
from hlo_audit.suppressions import find_comments

TOP = Path(__file__).parent

MODULE = """HloModule jit_step, is_scheduled=true

FileNames
1 "{file}"

FunctionNames
1 "step"
2 "state"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=2 end_line=2 column=1 end_column=1}}
2 {{file_name_id=1 function_name_id=2 line=7 end_line=7 column=1 end_column=1}}
3 {{file_name_id=1 function_name_id=2 line=9 end_line=9 column=1 end_column=1}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=2}}

ENTRY %e (p: f32[512,512], q: f32[512,512]) -> (f32[512,512], f32[512,512]) {{
  %p = f32[512,512]{{1,0}} parameter(0), metadata={{op_name="p"}}
  %q = f32[512,512]{{1,0}} parameter(1), metadata={{op_name="q"}}
  %a = f32[512,512]{{0,1}} copy(%p), metadata={{op_name="jit(step)/tanh" stack_frame_id=2}}
  %b = f32[512,512]{{{b}}} copy(%q), metadata={{op_name="jit(step)/sin" stack_frame_id=3}}
  ROOT %t = (f32[512,512]{{0,1}}, f32[512,512]{{{b}}}) tuple(%a, %b)
}}
"""

SOURCE = """def step(p, q):
    return state(p, q)


def state(p, q):
    return (
        tanh(p).T,
        # a comment of no meaning
        sin(q).T,
    )
"""


def repository(folder: Path, source: str = SOURCE, *, second: bool = True) -> Path:
    """A repository with a program of two copies, of one without ``second``, traced from its own
    file as another machine had it."""
    (folder / ".git").mkdir(exist_ok=True)
    (folder / "src").mkdir(exist_ok=True)
    (folder / "src" / "layers.py").write_text(source)
    b = "0,1" if second else "1,0"
    text = MODULE.format(file="/elsewhere/checkout/src/layers.py", b=b)
    (folder / "step.txt").write_text(text)
    return folder


def check(folder: Path, *arguments: str) -> dict[str, Any]:
    result = invoke(
        "check", "step.txt", "--select", "HLA002", "--format", "json", *arguments, cwd=folder
    )
    report: dict[str, Any] = json.loads(result.stdout)
    schema = TOP.parent / "hlo_audit" / "report" / "schema.json"
    jsonschema.Draft202012Validator(json.loads(schema.read_text())).validate(report)
    report["exit code"] = result.returncode
    return report


def kinds(report: dict[str, Any]) -> list[tuple[str, bool]]:
    return [(notice["kind"], notice["fails"]) for notice in report["gate"]["notices"]]


def with_comment(line: int, comment: str) -> str:
    lines = SOURCE.splitlines()
    lines[line - 1] += f"  {comment}"
    return "\n".join(lines) + "\n"


# -- comments


def test_a_comment_on_the_line_suppresses_what_is_traced_there(tmp_path: Path) -> None:
    source = with_comment(2, "# hlo-audit: ignore[HLA002] kept turned")
    report = check(repository(tmp_path, source), "--max", "HLA002=0")
    (program,) = report["programs"]
    assert report["exit code"] == 0
    assert (program["counts"], program["bytes"]) == ({"HLA002": 0}, {})
    suppressed = [finding["suppressed"] for finding in program["findings"]]
    assert suppressed == [{"by": "source", "reason": "kept turned", "where": "src/layers.py:2"}] * 2
    assert kinds(report) == []


@pytest.mark.parametrize("line", [6, 7, 9, 10])
def test_a_comment_anywhere_in_the_statement_is_for_all_of_it(tmp_path: Path, line: int) -> None:
    source = with_comment(line, "# hlo-audit: ignore[relayout-copy, HLA003] kept turned")
    (program,) = check(repository(tmp_path, source))["programs"]
    assert program["counts"] == {"HLA002": 0}


def test_a_comment_above_a_statement_is_for_it(tmp_path: Path) -> None:
    source = SOURCE.replace(
        "    return state", "    # hlo-audit: ignore[HLA002] x\n    return state"
    )
    lines = source.splitlines()
    del lines[3]  # the lines below stay where they were traced
    (program,) = check(repository(tmp_path, "\n".join(lines) + "\n"))["programs"]
    assert program["counts"] == {"HLA002": 2}  # the call is on line 3 now, and line 2 was traced
    lines[0:1] = []
    lines.insert(3, "")
    (program,) = check(repository(tmp_path, "\n".join(lines) + "\n"))["programs"]
    assert program["counts"] == {"HLA002": 0}


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("# hlo-audit: ignore[HLA002]", "gives no reason"),
        ("# hlo-audit: ignore some reason", "names no rule"),
        ("# hlo-audit: ignore[] some reason", "names no rule"),
        ("# hlo-audit: ignore[HLA02] some reason", "no rule is called 'HLA02'"),
    ],
)
def test_a_comment_without_a_rule_or_a_reason_suppresses_nothing(
    tmp_path: Path, comment: str, said: str
) -> None:
    folder = repository(tmp_path, with_comment(2, comment))
    report = check(folder)
    assert report["programs"][0]["counts"] == {"HLA002": 2}
    assert kinds(report) == [("bad-suppression", False)]
    message = report["gate"]["notices"][0]["message"]
    assert message.startswith("src/layers.py:2: suppresses nothing: ")
    assert said in message
    assert check(folder, "--strict")["exit code"] == 1


def test_a_comment_without_a_use_is_reported_and_fails_where_strict(tmp_path: Path) -> None:
    source = SOURCE.replace("sin(q).T,", "sin(q).T,  # hlo-audit: ignore[HLA002] kept turned")
    source = source.replace("    return (\n        tanh(p).T,\n", "    a = (\n  tanh(p).T)\n")
    source = source.replace("        sin(q)", "    b = (sin(q)")
    folder = repository(tmp_path, source, second=False)
    report = check(folder)
    assert kinds(report) == [("unused-suppression", False)]
    assert "src/layers.py:9: suppresses nothing: no HLA002" in str(report["gate"]["notices"])
    assert report["exit code"] == 0
    assert check(folder, "--strict")["exit code"] == 1
    assert "suppresses nothing" in invoke("check", "step.txt", cwd=folder).stdout
    # Not known, where the rule is not applied.
    other = invoke("check", "step.txt", "--ignore", "HLA002", "--strict", cwd=folder)
    assert other.returncode == 0
    assert kinds(check(repository(tmp_path, source), "--strict")) == []


def test_a_comment_on_a_line_that_was_not_traced_is_left_alone(tmp_path: Path) -> None:
    source = SOURCE + "\n\nx = 1  # hlo-audit: ignore[HLA002] another program has it\n"
    assert kinds(check(repository(tmp_path, source), "--strict")) == []


def test_a_text_in_a_string_is_no_comment() -> None:
    assert list(find_comments('x = "# hlo-audit: ignore[HLA002] no"\n')) == []
    assert [n for n, _, _ in find_comments("x = 1  #hlo-audit:ignore[HLA002] yes\n")] == [1]


@given(st.text(alphabet="#hlo-audit: ignore[HLA002]\n\"'()\\\t x", max_size=80))
def test_any_text_is_read(text: str) -> None:
    for number, lines, (codes, reason) in find_comments(f"# hlo-audit\n{text}"):
        assert number >= 1
        assert len(lines) >= 1
        assert isinstance(reason, str)
        assert all(codes)


# -- the config


@pytest.mark.parametrize(
    ("entry", "left"),
    [
        ("rule = 'HLA002'\nop-name = 'jit(step)/*'", 0),
        ("rule = 'HLA002'\nop-name = '*/tanh'", 1),
        ("rule = 'relayout-copy'\nsource = 'src/*.py'", 0),
        ("rule = 'relayout-copy'\nsource = 'src/layers.py:state'", 0),
        ("rule = 'relayout-copy'\nsource = 'layers.py'", 2),
        ("rule = 'HLA002'\nop-name = '*'\nprogram = 'step.txt'", 0),
        ("rule = 'HLA002'\nop-name = '*'\nprogram = 'other*'", 2),
        ("rule = 'HLA003'\nop-name = '*'", 2),
        ("rule = 'HLA002'\nop-name = 'jit(step)/[ts]*'", 2),  # only * has a meaning
    ],
)
def test_the_config_suppresses_by_patterns(tmp_path: Path, entry: str, left: int) -> None:
    folder = repository(tmp_path)
    (folder / "hlo-audit.toml").write_text(f"[[suppress]]\n{entry}\nreason = 'kept'\n")
    report = check(folder)
    assert report["programs"][0]["counts"] == {"HLA002": left}
    where = {f["suppressed"]["where"] for f in report["programs"][0]["findings"] if f["suppressed"]}
    assert where == ({"hlo-audit.toml:1"} if left < 2 else set())
    is_unused = left == 2 and "HLA003" not in entry  # which is not applied
    assert kinds(report) == [("unused-suppression", False)] * is_unused


def test_one_finding_is_suppressed_by_its_fingerprint(tmp_path: Path) -> None:
    folder = repository(tmp_path)
    first, second = check(folder)["programs"][0]["findings"]
    (folder / "hlo-audit.toml").write_text(
        f"[[suppress]]\nfingerprint = '{first['fingerprint']}'\nreason = 'kept'\n"
    )
    (program,) = check(folder)["programs"]
    assert program["counts"] == {"HLA002": 1}
    assert {f["fingerprint"]: bool(f["suppressed"]) for f in program["findings"]} == {
        first["fingerprint"]: True,
        second["fingerprint"]: False,
    }
    (folder / "hlo-audit.toml").write_text(
        "[[suppress]]\nfingerprint = '0123456789abcdef'\nreason = 'kept'\n"
    )
    assert kinds(check(folder, "--strict")) == [("unused-suppression", True)]


# -- elsewhere


def test_a_baseline_does_not_hold_what_is_suppressed(tmp_path: Path) -> None:
    source = with_comment(2, "# hlo-audit: ignore[HLA002] kept turned")
    folder = repository(tmp_path, source)
    written = invoke(
        "check", "step.txt", "--baseline", "known.json", "--update-baseline", cwd=folder
    )
    assert written.returncode == 0, written.stderr
    assert json.loads((folder / "known.json").read_text())["entries"][0]["findings"] == []
    report = check(repository(tmp_path), "--baseline", "known.json")
    assert report["exit code"] == 1  # without the comment they are new


def test_sarif_and_text_say_what_is_suppressed(tmp_path: Path) -> None:
    source = with_comment(7, "# hlo-audit: ignore[HLA002] kept turned")
    folder = repository(tmp_path, source)
    (folder / "hlo-audit.toml").write_text(
        "select = ['HLA002']\n[[suppress]]\nrule = 'HLA002'\nop-name = '*/sin'\nreason = 'why'\n"
    )
    log = json.loads(invoke("check", "step.txt", "--format", "sarif", cwd=folder).stdout)
    schema = json.loads((TOP / "data" / "sarif-schema-2.1.0.json").read_text())
    jsonschema.Draft7Validator(schema).validate(log)
    results = log["runs"][0]["results"]
    assert len(results) == 2
    found = {(s["kind"], s["justification"]) for r in results for s in r["suppressions"]}
    assert found <= {("inSource", "kept turned"), ("external", "why")}
    assert ("external", "why") in found
    text = invoke("check", "step.txt", cwd=folder).stdout
    assert "2 suppressed" in text
    assert "is copied" not in text
    for format_ in ("junit", "markdown", "github"):
        shown = invoke("check", "step.txt", "--format", format_, cwd=folder).stdout
        assert "is copied" not in shown


def test_a_strict_failure_is_told_in_every_format(tmp_path: Path) -> None:
    folder = repository(tmp_path, with_comment(2, "# hlo-audit: ignore[HLA002]"))
    for format_ in ("text", "sarif", "junit", "markdown", "github"):
        result = invoke("check", "step.txt", "--strict", "--format", format_, cwd=folder)
        assert result.returncode == 1
        assert "gives no reason" in result.stdout
    junit = invoke("check", "step.txt", "--strict", "--format", "junit", cwd=folder).stdout
    assert '<failure type="bad-suppression"' in junit
