"""Reports as CI systems read them: valid, within the limits, in one order, and harmless whatever
the names in a dump are."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote
from xml.etree import ElementTree

import click
import jsonschema
import pytest
import xmlschema
from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console

import command_line
from hlo_audit import __version__
from hlo_audit.cli import cli
from hlo_audit.cost import Cost, Traffic
from hlo_audit.errors import CompileError, HloAuditError, UsageError
from hlo_audit.gate import Gate, judge
from hlo_audit.hlo import Module, SourceLocation
from hlo_audit.models import ALL_MODELS
from hlo_audit.program_audit import ProgramAudit, audit_recorded
from hlo_audit.report import Report
from hlo_audit.report.formats import FORMATS, Destination, Format, plan_outputs, render
from hlo_audit.report.github import render_github
from hlo_audit.report.json import to_json
from hlo_audit.report.junit import render_junit
from hlo_audit.report.listed import alike, listed
from hlo_audit.report.markdown import MARKER, render_markdown
from hlo_audit.report.sarif import MOST_RESULTS, render_sarif
from hlo_audit.report.sources import DumpLines, Repository
from hlo_audit.report.text import print_report
from hlo_audit.rule import Context, Finding, LayoutFix, Rule, Target
from hlo_audit.rules import ALL_RULES

DATA = Path(__file__).parent / "data"
GOLDEN = Path(__file__).parent / "golden"

HOSTILE = [
    "</script><script>alert(1)</script>",
    "a]]>b<!--",
    "x%0A::error::owned",
    "x\n::error file=a.py::owned",
    "##[error]owned",
    "a|b\\|c\\\\|d",
    "`code` ``two`` `",
    "@user #1 GH-1 https://evil.example/ www.evil.example a@b.example",
    "![i](https://evil.example/i.png) [l](javascript:alert(1)) [dump](1) {0}",
    "\x1b[31mred\x1b]0;title\x07\x00\x08\x7f\x9b",
    "\u202edesrever\u2066\u200b\ufeff\u2028\u2029",
    "\ud800 lone",
    "</details></code><img src=x onerror=alert(1)>",
    "$x$ :tada: **b** _i_ ~~s~~ # h",
    "&lt;&amp;&#60;",
    "${{ github.token }}",
    "../../../etc/passwd",
    "",
    " ",
    "a" * 100_000,
]


def never(module: Module, context: Context) -> Iterator[Finding]:
    yield from ()


FIX = LayoutFix(
    "turned",
    "store it turned",
    "lm-head",
    "straight",
    (),
    "nothing",
    clears=(Target("explicit", ("v5p:2x2x1",)),),
)
RULE = Rule(
    code="HLA902",
    slug="made-up",
    summary="made up for these tests",
    documentation="Made up.\n\n## What it reports\n\nNothing.",
    reads=("final",),
    check=never,
    tally="place",
    examples=(),
    fixes=(FIX,),
    options={"min_bytes": 1024},
)
OTHER = replace(RULE, code="HLA903", slug="other", fixes=(), options={})


STEP = SourceLocation("/elsewhere/src/train.py", 3, "step")


def finding(
    message: str = "f32[8,16] of parameter w is copied",
    *,
    rule: Rule = RULE,
    severity: Literal["warning", "note"] = "warning",
    instruction: str = "copy.1",
    cycles: int | None = 100,
    source: SourceLocation | None = STEP,
    stack: tuple[SourceLocation, ...] = (),
    **changes: Any,
) -> Finding:
    return replace(
        Finding(
            rule=rule.code,
            slug=rule.slug,
            severity=severity,
            message=message,
            instruction=instruction,
            computation="main",
            opcode="copy",
            shape="f32[8,16]",
            bytes=512,
            executions=1,
            estimated_cycles=cycles,
            op_name="jit(step)/w",
            source=source,
            stack=stack,
            details={"place": "parameter", "from": "{1,0}", "to": "{0,1}"},
            fixes=("turned",) if rule is RULE else (),
        ),
        **changes,
    )


def audited(*findings: Finding, program: str = "train", **changes: Any) -> ProgramAudit:
    return replace(
        ProgramAudit(
            program, module="jit_step", rules=(RULE, OTHER), findings=findings, platform="tpu"
        ),
        **changes,
    )


def reported(*programs: ProgramAudit, budgets: dict[str, int] | None = None) -> Report:
    return Report(programs, judge(programs, budgets or {}), {"python": "3.11.7", "jax": None})


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A checkout with ``src/train.py``, nine lines long."""
    root = tmp_path / "repo"
    (root / "src").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "src" / "train.py").write_text("pass\n" * 9)
    return Repository(root)


@pytest.fixture(scope="session")
def explicit_dump(dumps: Callable[[str], Path]) -> Path:
    return dumps("lm_head_versions") / "jax-0.12.0-explicit"


invoke = partial(command_line.invoke, columns=80)


def sarif_run(text: str) -> dict[str, Any]:
    """The one run of a SARIF log that holds to the schema and to what GitHub asks for."""
    log = json.loads(text)
    schema = json.loads((DATA / "sarif-schema-2.1.0.json").read_text())
    jsonschema.Draft4Validator(schema).validate(log)
    one: dict[str, Any]
    (one,) = log["runs"]
    for result in one["results"]:
        assert one["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert len(result["locations"]) == 1
        assert len(result["relatedLocations"]) <= 10
        for location in [*result["locations"], *result["relatedLocations"]]:
            physical = location["physicalLocation"]
            assert physical["artifactLocation"]["uri"]
            assert physical["region"]["startLine"] >= 1
        assert len(result["message"]["text"]) <= 2048
        assert set(result["partialFingerprints"]) == {
            "primaryLocationLineHash",
            "hloAuditFinding/v1",
        }
    return one


def texts(value: Any) -> Iterator[str]:
    """Every text in plain data, the keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value:
            yield from texts(item)
        if isinstance(value, dict):
            yield from texts(list(value.values()))


def junit_suites(text: str) -> ElementTree.Element:
    """The suites of a report that holds to the schema and counts right."""
    xmlschema.XMLSchema(str(DATA / "junit-10.xsd")).validate(text)
    suites = ElementTree.fromstring(text)
    for suite in suites:
        assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
    for attribute, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
        assert int(suites.attrib[attribute]) == len(list(suites.iter(tag)))
    return suites


def markdown_tokens(text: str) -> list[Token]:
    """Every token of a Markdown text, those inside lines too, as GitHub reads it."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tokens = parser.parse(text)
    return [one for token in tokens for one in (token, *(token.children or ()))]


def commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """The workflow commands as the runner reads them: kind, properties, message."""

    def unescape(value: str) -> str:
        for code, char in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
            value = value.replace(code, char)
        return value

    found = []
    for line in re.split(r"\r\n|\r|\n", text.removesuffix("\n")):
        assert line.startswith("::"), line
        head, _, data = line[2:].partition("::")
        kind, _, options = head.partition(" ")
        properties = dict(option.split("=", 1) for option in options.split(","))
        found.append((kind, {k: unescape(v) for k, v in properties.items()}, unescape(data)))
    return found


# -- the golden files


def typical() -> Report:
    """A run with a bit of everything: budgets broken and kept, notes, a failed compile."""
    library = SourceLocation("/venv/lib/python3.11/site-packages/flax/linen.py", 40, "Dense")
    costly = finding(
        "f32[8,16] of the result for w is copied",
        cycles=900,
        source=library,
        stack=(
            SourceLocation("/elsewhere/src/train.py", 5, "loss"),
            SourceLocation("/elsewhere/src/train.py", 9, "step"),
        ),
        instruction="copy.2",
    )
    note = finding("Sharding call", severity="note", rule=OTHER, source=None, cycles=None)
    compiled = {"mode": "explicit", "layout": "straight", "topology": "v5p:2x2x1"}
    return reported(
        audited(finding(), costly, note, cost=Cost(123456, 0), **compiled),
        audited(finding(), **{**compiled, "mode": "auto"}),
        audited(program="dump/other", skipped={"HLA903": "needs a snapshot"}),
        ProgramAudit(
            "broken",
            mode="auto",
            error=CompileError("it crashed", hint="try again", log=("a", "b")),
        ),
        budgets={"HLA902": 1},
    )


@pytest.mark.parametrize("format_", [one for one in FORMATS if one not in ("text", "json")])
def test_a_report_is_as_the_golden_file(
    format_: Format, repository: Repository, pytestconfig: pytest.Config
) -> None:
    text = render(format_, typical(), repository)
    text = text.replace(str(repository.root), "/repo").replace(__version__, "VERSION")
    endings = {"sarif": "sarif", "junit": "xml", "markdown": "md", "github": "txt"}
    path = GOLDEN / f"report.{endings[format_]}"
    if pytestconfig.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), (
        "if this is meant: pytest tests/test_formats.py --update-golden"
    )


# -- what is listed, and where it is


def test_what_fails_the_gate_comes_first_then_the_most_costly() -> None:
    report = reported(
        audited(
            finding("cheap", cycles=1),
            finding("dear", cycles=9),
            finding("in a loop", cycles=2, executions=10),
            finding("a note", cycles=99, severity="note"),
            finding("over budget", rule=OTHER, cycles=0),
        ),
        budgets={"HLA903": 0},
    )
    assert [entry.finding.message for entry in listed(report)] == [
        "over budget",
        "in a loop",
        "dear",
        "cheap",
    ]
    assert listed(report, show_all=True)[-1].finding.message == "a note"


def test_the_counts_of_every_model_fit_80_columns() -> None:
    notes = [finding(f"note {n}", rule=ALL_RULES[0], severity="note") for n in range(697)]
    for model in ALL_MODELS:
        audits = [
            replace(
                audited(*notes, program=model.name, mode=mode, layout=layout.name),
                rules=ALL_RULES,
                cost=Cost(7_448_809, 0),
            )
            for layout in model.layouts
            for mode in ("auto", "explicit")
        ]
        console = Console(width=80, file=io.StringIO(), highlight=False)
        with console.capture() as capture:
            print_report(console, reported(*audits))
        rows = [line.split() for line in capture.get().splitlines()]
        for audit in audits:
            counts = [*("0", "(+697)"), *4 * "0", "7,448,809"]
            assert [audit.mode, audit.layout, *counts] in rows, audit.layout


def test_a_collective_without_cycles_is_placed_by_the_time_of_its_traffic() -> None:
    slow = Traffic(hbm_bytes=0, wire_bytes=49_000_000, moved_bytes=0, asked_bytes=0)
    collective = replace(finding(instruction="all-reduce", cycles=None), traffic=slow)
    audit = audited(
        finding(instruction="copy", cycles=50_000),
        collective,
        finding(instruction="small", cycles=10),
    )
    audit = replace(audit, topology="v5p:2x2x1")
    # 49 MB at 200 GB/s are 245 us, 50,000 cycles at 1.75 GHz are 29.
    assert audit.seconds_of(collective) == pytest.approx(245e-6, rel=0.01)
    assert audit.seconds_of(audit.findings[0]) == pytest.approx(28.6e-6, rel=0.01)
    names = [entry.finding.instruction for entry in listed(reported(audit))]
    assert names == ["all-reduce", "copy", "small"]


def test_findings_that_are_told_together_are_placed_by_what_they_cost_together() -> None:
    one = finding("one", cycles=50)
    many = [finding("the same", instruction=f"copy.{n}", cycles=40) for n in range(3)]
    groups = alike(listed(reported(audited(one, *many))))
    assert [len(group) for group in groups] == [3, 1]


def test_what_runs_in_a_loop_is_told_by_its_run_and_by_its_step(repository: Repository) -> None:
    in_loop = finding("in a loop", executions=12)
    unknown = finding("in a loop without a known end", executions=None)
    moves_nothing = finding("no bytes", bytes=None, executions=3)
    (program,) = to_json(reported(audited(in_loop, unknown, moves_nothing)))["programs"]
    assert [(f["bytes"], f["executions"], f["executed_bytes"]) for f in program["findings"]] == [
        (512, 12, 6144),
        (512, None, None),
        (None, 3, None),
    ]
    text = render("text", reported(audited(in_loop)), repository)
    assert "6.14 kB, 1,200 est. cycles a step; 512 B x 12 runs" in " ".join(text.split())


def test_a_reference_model_is_offered_its_own_layouts_alone() -> None:
    other = replace(FIX, name="split", model="mhc")
    rules = (replace(RULE, fixes=(FIX, other)), OTHER)
    found = finding(fixes=("turned", "split"))
    offered = {
        program: audited(found, program=program, rules=rules).fixes_of(found)
        for program in ("lm-head", "mhc", "train")
    }
    assert offered == {"lm-head": ("turned",), "mhc": ("split",), "train": ("turned", "split")}


def test_notes_are_listed_where_they_fail_the_gate() -> None:
    audit = audited(finding(severity="note"))
    assert not listed(reported(audit))
    (entry,) = listed(reported(audit, budgets={"HLA902": 0}))
    assert entry.level == "error"


def test_fewer_findings_than_the_reference_fail_without_calling_the_rest_errors() -> None:
    report = reported(audited(finding()))
    gate = judge(report.programs, {"HLA902": 0})
    (violation,) = gate.violations
    fewer = replace(violation, limit=2, against="reference")
    report = replace(report, gate=Gate((fewer,), 1, "reference"))
    assert [entry.level for entry in listed(report)] == ["warning"]


def test_lines_are_relative_to_the_repository(repository: Repository) -> None:
    root = repository.root

    def place(file: str, line: int = 3) -> tuple[str, bool]:
        found = repository.place(SourceLocation(file, line))
        return found.path, found.in_repository

    assert place(f"{root}/src/train.py") == ("src/train.py", True)
    assert place("src/train.py") == ("src/train.py", True)
    assert place("/home/else/proj/src/train.py") == ("src/train.py", True)
    assert place("/home/else/proj/src/train.py", 10) == ("/home/else/proj/src/train.py", False)
    assert place("/home/else/train.py") == ("/home/else/train.py", False)
    assert place(f"{root}/src/../../x.py")[1] is False
    assert place(f"{root}/.venv/lib/site-packages/jax/a.py")[1] is False
    assert place("<string>")[1] is False


def test_a_link_in_the_repository_is_named_by_what_it_points_to(repository: Repository) -> None:
    (repository.root / "link").symlink_to("src")
    place = repository.place(SourceLocation(f"{repository.root}/link/train.py", 1))
    assert place.path == "src/train.py"


def test_a_repository_is_found_around_a_folder(repository: Repository, tmp_path: Path) -> None:
    assert Repository.around(repository.root / "src").root == repository.root
    assert Repository.around(tmp_path).root == tmp_path


def test_the_first_line_of_the_repository_stands_for_a_finding_in_a_library(
    repository: Repository,
) -> None:
    inner = SourceLocation("/venv/site-packages/flax/linen.py", 40, "Dense")
    outer = SourceLocation("/else/src/train.py", 5, "loss")
    places = repository.places(finding(source=inner, stack=(outer,)))
    assert [str(place) for place in places] == ["src/train.py:5 in loss"]
    assert [p.line for p in repository.places(finding(source=inner))] == [40]
    assert repository.places(finding(source=None)) == []


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_name_is_no_place_in_the_repository(
    name: str, repository: Repository
) -> None:
    for file in (name, f"/{name}", f"{repository.root}/../{name}", f"/src/{name}"):
        place = repository.place(SourceLocation(file, 1))
        assert ".." not in Path(place.path).parts or not place.in_repository


def test_the_line_of_an_instruction_in_a_dump_is_found(explicit_dump: Path) -> None:
    (audit,) = audit_recorded(explicit_dump, ALL_RULES, {})
    lines = DumpLines()
    for one in audit.findings:
        stages = next(rule for rule in audit.rules if rule.code == one.rule).reads
        found = [
            (path, line)
            for path in (audit.files[stage] for stage in stages)
            if (line := lines.line_of(path, one.computation, one.instruction))
        ]
        path, line = found[0]
        text = path.read_text().splitlines()[line - 1]
        assert re.match(rf"\s+(ROOT )?%?{re.escape(one.instruction)} = ", text)


# -- SARIF


def test_sarif_of_a_real_dump_is_valid(explicit_dump: Path, tmp_path: Path) -> None:
    path = tmp_path / "audit.sarif"
    result = invoke("check", explicit_dump, "--max", "HLA002=3", "--output", f"sarif={path}")
    assert result.returncode == 1
    assert "HLA002 relayout-copy" in result.stdout
    one = sarif_run(path.read_text())
    assert [r["level"] for r in one["results"]].count("error") == 4
    (invocation,) = one["invocations"]
    assert invocation["exitCode"] == 1
    assert invocation["executionSuccessful"] is True
    dumped = one["results"][0]["relatedLocations"][0]["physicalLocation"]
    file = Path(unquote(dumped["artifactLocation"]["uri"].removeprefix("file://")))
    line = file.read_text().splitlines()[dumped["region"]["startLine"] - 1]
    assert f"%{one['results'][0]['properties']['instruction']} = " in line


def test_sarif_holds_the_help_of_each_rule(repository: Repository, explicit_dump: Path) -> None:
    report = reported(*audit_recorded(explicit_dump, ALL_RULES, {}))
    rules = sarif_run(render_sarif(report, repository))["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [rule.code for rule in ALL_RULES]
    for described, rule in zip(rules, ALL_RULES, strict=True):
        assert rule.documentation.strip() in described["help"]["markdown"]
        assert described["name"] == rule.slug
        assert 0 < len(described["fullDescription"]["text"]) <= 1024
        assert "helpUri" not in described


def test_sarif_points_at_the_users_line(repository: Repository) -> None:
    (result,) = sarif_run(render_sarif(reported(audited(finding())), repository))["results"]
    physical = result["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"] == {"uri": "src/train.py", "uriBaseId": "%SRCROOT%"}
    assert physical["region"]["startLine"] == 3


def test_a_finding_without_a_line_has_a_location_all_the_same(repository: Repository) -> None:
    text = render_sarif(reported(audited(finding(source=None))), repository)
    (result,) = sarif_run(text)["results"]
    artifact = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert artifact == {"uri": "jit_step.hlo"}


def fingerprints(report: Report, repository: Repository) -> list[str]:
    results = sarif_run(render_sarif(report, repository))["results"]
    return [result["partialFingerprints"]["primaryLocationLineHash"] for result in results]


def test_fingerprints_survive_a_recompile_and_a_moved_line(repository: Repository) -> None:
    compiled = {"mode": "auto", "layout": "straight"}
    before = fingerprints(reported(audited(finding(), **compiled)), repository)
    moved = finding(
        instruction="copy.264", source=SourceLocation("/elsewhere/src/train.py", 7, "step")
    )
    assert fingerprints(reported(audited(moved, **compiled)), repository) == before
    elsewhere = reported(audited(finding(), program="/tmp/a/dump"))
    here = reported(audited(finding(), program="dump"))
    assert fingerprints(elsewhere, repository) == fingerprints(here, repository)


def test_fingerprints_tell_modes_and_equal_findings_apart(repository: Repository) -> None:
    both = [audited(finding(), finding(), mode=mode) for mode in ("auto", "explicit")]
    found = fingerprints(reported(*both), repository)
    assert len(set(found)) == 4
    assert sorted(one.partition(":")[2] for one in found) == ["1", "1", "2", "2"]


def test_programs_that_failed_are_notifications(repository: Repository) -> None:
    one = sarif_run(render_sarif(typical(), repository))
    (invocation,) = one["invocations"]
    assert invocation["executionSuccessful"] is False
    assert invocation["exitCode"] == 3
    errors = [n for n in invocation["toolExecutionNotifications"] if n["level"] == "error"]
    assert "it crashed" in errors[0]["message"]["text"]
    notes = [n for n in invocation["toolExecutionNotifications"] if n["level"] == "note"]
    assert notes[0]["associatedRule"]["id"] == "HLA903"


def test_sarif_keeps_the_most_costly_and_says_what_it_left_out(repository: Repository) -> None:
    findings = [finding(cycles=cycles) for cycles in range(MOST_RESULTS + 100)]
    one = sarif_run(render_sarif(reported(audited(*findings)), repository))
    assert len(one["results"]) == MOST_RESULTS
    assert one["results"][0]["properties"]["estimatedCycles"] == MOST_RESULTS + 99
    (notification,) = one["invocations"][0]["toolExecutionNotifications"]
    assert "100 more findings" in notification["message"]["text"]


def test_sarif_stays_under_the_size_that_is_uploaded(repository: Repository) -> None:
    names = [os.urandom(300).hex() for _ in range(200)]
    report = reported(audited(*(finding(name) for name in names)))
    text = render_sarif(report, repository, most_bytes=30_000)
    assert len(gzip.compress(text.encode())) <= 30_000
    kept = len(sarif_run(text)["results"])
    assert 0 < kept < 200
    assert f"{200 - kept} more findings" in text


# -- JUnit


def test_junit_fails_only_what_the_gate_fails(repository: Repository) -> None:
    suites = junit_suites(render_junit(typical(), repository))
    assert [suite.attrib["name"] for suite in suites] == [
        "train/explicit/straight",
        "train/auto/straight",
        "dump/other",
        "broken/auto",
    ]
    explicit, auto, other, broken = suites
    (failure,) = explicit.iter("failure")
    assert failure.attrib["message"] == "train/explicit/straight: HLA902 is 2, at most 1"
    assert "src/train.py:5 in loss" in (failure.text or "")
    assert not list(auto.iter("failure"))
    assert "src/train.py:3 in step" in (auto.findtext("testcase/system-out") or "")
    (skipped,) = other.iter("skipped")
    assert skipped.attrib["message"] == "needs a snapshot"
    (error,) = broken.iter("error")
    assert error.text == "it crashed (try again)\na\nb"


def test_junit_of_a_real_dump_is_valid(explicit_dump: Path) -> None:
    result = invoke("check", explicit_dump, "--format", "junit")
    assert result.returncode == 0
    (suite,) = junit_suites(result.stdout)
    assert len(suite.findall("testcase")) == len(ALL_RULES)


# -- GitHub annotations


def test_annotations_are_at_the_line_and_say_what_to_do(repository: Repository) -> None:
    found = commands(render_github(typical(), repository))
    assert [kind for kind, _, _ in found] == ["error", "error", "error", "error", "warning"]
    verdict, failed, *rest = found
    assert verdict[1] == {"title": "hlo-audit: gate failed"}
    assert "HLA902 is 2, at most 1" in verdict[2]
    assert "it crashed" in failed[2]
    costly = rest[0]
    assert costly[1] == {"file": "src/train.py", "line": "5", "title": "HLA902 made-up"}
    for words in ("of the result for w", "900 est. cycles", "fixes: turned", "train/explicit"):
        assert words in costly[2]


def test_annotations_stay_within_the_limits_and_count_the_rest(repository: Repository) -> None:
    findings = [
        finding(f"{rule.slug} {severity} {n}", cycles=n, severity=severity, rule=rule)
        for rule in (RULE, OTHER)
        for severity in ("warning", "note")
        for n in range(15)
    ]
    errors = [ProgramAudit(f"bad{n}", error=HloAuditError("no")) for n in range(3)]
    report = reported(audited(*findings), *errors, budgets={"HLA902": 0})
    found = commands(render_github(report, repository, show_all=True))
    kinds = [kind for kind, _, _ in found]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "error": 10,
        "warning": 10,
        "notice": 10,
    }
    # Six findings are errors beside the verdict and the three programs; ten and nine fit below.
    assert found[-1][2].startswith(f"{60 - 6 - 10 - 9} more findings are not shown")
    warnings = [message for kind, _, message in found if kind == "warning"]
    assert warnings[0].startswith("other warning 14")


def test_more_programs_than_fit_are_counted(repository: Repository) -> None:
    errors = [ProgramAudit(f"bad{n}", error=HloAuditError("no")) for n in range(12)]
    found = commands(render_github(reported(*errors), repository))
    assert "3 more programs that were not audited" in found[-1][2]


def test_findings_alike_in_two_modes_share_an_annotation(repository: Repository) -> None:
    report = reported(*(audited(finding(), mode=mode) for mode in ("auto", "explicit")))
    found = commands(render_github(report, repository))
    warning, verdict = found
    assert warning[2].startswith("2 times: ")
    assert "in train/auto, train/explicit" in warning[2]
    assert verdict[0] == "notice"


# -- Markdown


def test_markdown_leads_with_the_verdict_and_the_difference(repository: Repository) -> None:
    lines = render_markdown(typical(), repository).splitlines()
    assert lines[0] == MARKER
    assert lines[1] == "### :x: hlo-audit: 1 of 4 programs not audited; gate failed"
    assert "| `train/explicit/straight` | HLA902 made-up | at most 1 | 2 | +1 |" in lines[:8]
    passed = render_markdown(reported(audited(), budgets={"HLA902": 0}), repository)
    assert passed.splitlines()[1] == (
        ":white_check_mark:".join(("### ", " hlo-audit: gate passed: 1 program within budget"))
    )


def test_markdown_stays_under_the_limit_and_says_what_is_missing(repository: Repository) -> None:
    findings = [finding(f"finding number {n}", cycles=n) for n in range(2000)]
    audits = [audited(*findings, mode=mode) for mode in ("auto", "explicit")]
    text = render_markdown(reported(*audits), repository)
    assert len(text.encode()) <= 65_000
    assert "finding number 1999" in text
    shown = text.count("`finding number ")
    assert f"{4000 - shown} more findings did not fit" in text
    assert text.count("<details>") == text.count("</details>") == 1


def test_markdown_with_very_many_programs_stays_under_the_limit(repository: Repository) -> None:
    audits = [audited(finding(), program=f"program{n}") for n in range(3000)]
    text = render_markdown(reported(*audits, budgets={"HLA902": 0}), repository)
    assert len(text.encode()) <= 65_000
    assert "More rows did not fit." in text
    assert text.splitlines()[1] == "### :x: hlo-audit: gate failed"


# -- hostile names, everywhere a dump can put one


def hostile(name: str) -> Report:
    evil = finding(
        name,
        instruction=name,
        computation=name,
        shape=name,
        op_name=name,
        source=SourceLocation(name, 1, name),
        stack=(SourceLocation(f"/x/{name}", 0, name),),
        details={"place": name, "argument": [name], "more": {"deep": name}},
    )
    described = {"module": name, "mode": name, "layout": name, "topology": name}
    return reported(
        audited(evil, program=name, settings={name: name}, xla_flags={name: name}, **described),
        ProgramAudit(name, error=CompileError(name, hint=name, log=(name,))),
        audited(program=name, skipped={"HLA903": name}, versions={"jax": name}),
        budgets={"HLA902": 0},
    )


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_harmless_in_sarif(name: str, repository: Repository) -> None:
    text = render_sarif(hostile(name), repository)
    one = sarif_run(text)
    assert all(char.isprintable() or char == "\n" for char in "".join(texts(one)))
    for result in one["results"]:
        message = result["message"]["text"]
        assert all(char.isprintable() for char in message)
        assert not re.search(r"\{\d+\}|\[[^\]]*\]\(", message)
        for location in [*result["locations"], *result["relatedLocations"]]:
            uri = location["physicalLocation"]["artifactLocation"]["uri"]
            assert re.fullmatch(r"(file:/)?[\w./%~-]+", uri, re.ASCII), uri
    assert len(text) < 200_000


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_harmless_in_junit(name: str, repository: Repository) -> None:
    text = render_junit(hostile(name), repository)
    suites = junit_suites(text)
    assert len(suites) == 3
    assert {element.tag for element in suites.iter()} <= {
        *("testsuites", "testsuite", "properties", "property", "testcase"),
        *("failure", "error", "skipped", "system-out"),
    }
    assert all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_harmless_in_annotations(name: str, repository: Repository) -> None:
    text = render_github(hostile(name), repository)
    assert all(char.isprintable() or char == "\n" for char in text)
    found = commands(text)
    assert [kind for kind, _, _ in found] == ["error", "error", "error"]
    assert all(set(properties) <= {"file", "line", "title"} for _, properties, _ in found)
    assert not any(
        line.startswith("::") for _, _, message in found for line in message.splitlines()
    )


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_harmless_in_markdown(name: str, repository: Repository) -> None:
    text = render_markdown(hostile(name), repository)
    assert all(char.isprintable() or char == "\n" for char in text)
    tokens = markdown_tokens(text)
    assert not {token.type for token in tokens} & {"link_open", "image", "em_open", "s_open"}
    tags: list[str] = []
    for token in tokens:
        if token.type in ("html_inline", "html_block"):
            tags += re.findall(r"<(/?[^\s>]+)", token.content)
        elif token.type == "text" and tags.count("code") == tags.count("/code"):
            # What stands in no code is ours.
            assert re.fullmatch(r"[\w .,:;+()*%/-]*", token.content, re.ASCII), token.content
            assert not re.search("owned|evil|user|link|alert|token|etc", token.content)
    assert set(tags) <= {"!--", "details", "/details", "summary", "/summary", "code", "/code"}
    assert [tag for tag in tags if tag.strip("/") in ("details", "summary")] == [
        *("details", "summary", "/summary", "/details")
    ]
    cells = [token for token in tokens if token.type in ("td_open", "th_open")]
    assert len(cells) == 2 * 5 + 2 * 3 + 3 * 5  # columns of three tables, heads and rows


def test_real_names_that_hurt_go_through_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "step.txt"
    name = "\x1b[31m</script>]]>%0A::error::x|`@user\\n::error::y"
    path.write_text(
        "HloModule m, is_scheduled=true\n\nENTRY %e (p: f32[512,512]) -> f32[512,512] {\n"
        f'  %p = f32[512,512]{{1,0}} parameter(0), metadata={{op_name="{name}"}}\n'
        "  ROOT %copy = f32[512,512]{0,1} copy(%p)\n}\n"
    )
    outputs = [f"--output={one}={tmp_path / one}" for one in FORMATS]
    result = invoke("check", path, "--max", "HLA002=0", *outputs, cwd=tmp_path)
    assert result.returncode == 1
    assert "\x1b" not in result.stdout
    sarif_run((tmp_path / "sarif").read_text())
    junit_suites((tmp_path / "junit").read_text())
    assert commands((tmp_path / "github").read_text())[1][2].startswith("f32[512,512] of parameter")
    assert {token.type for token in markdown_tokens((tmp_path / "markdown").read_text())}


# -- --format and --output


@pytest.mark.parametrize(
    ("formats", "outputs", "quiet", "planned"),
    [
        ([], [], False, [("text", None)]),
        ([], [], True, [("text", None)]),
        (["json"], [], False, [("json", None)]),
        (["json", "json"], [], False, [("json", None)]),
        (["text", "github"], [], False, [("text", None), ("github", None)]),
        ([], ["r"], False, [("text", "r")]),
        (["json"], ["r"], False, [("json", "r")]),
        ([], ["sarif=s"], False, [("text", None), ("sarif", "s")]),
        ([], ["sarif=s"], True, [("sarif", "s")]),
        (["text"], ["sarif=s"], True, [("text", None), ("sarif", "s")]),
        (["json"], ["sarif=s"], False, [("json", None), ("sarif", "s")]),
        (["sarif"], ["sarif=s"], False, [("text", None), ("sarif", "s")]),
        (["text", "sarif"], ["sarif=s"], False, [("text", None), ("sarif", "s")]),
        (["json"], ["r", "sarif=s"], False, [("sarif", "s"), ("json", "r")]),
        ([], ["sarif=a=b"], True, [("sarif", "a=b")]),
        ([], ["./a=b"], False, [("text", "./a=b")]),
        ([], ["-"], True, [("text", None)]),
        (["json"], ["-"], False, [("json", None)]),
        ([], ["json=-"], False, [("json", None)]),
        (["json"], ["json=-"], False, [("json", None)]),
        ([], ["json=-", "sarif=s"], False, [("json", None), ("sarif", "s")]),
        (["json"], ["-", "sarif=s"], True, [("json", None), ("sarif", "s")]),
        ([], ["./-"], False, [("text", "./-")]),
        (
            ["github"],
            ["json=j", "junit=x"],
            False,
            [("github", None), ("json", "j"), ("junit", "x")],
        ),
    ],
)
def test_formats_and_outputs_together(
    formats: list[Format],
    outputs: list[str],
    quiet: bool,
    planned: list[tuple[Format, str | None]],
) -> None:
    expected = [Destination(one, None if path is None else Path(path)) for one, path in planned]
    assert plan_outputs(formats, outputs, quiet=quiet) == expected


@pytest.mark.parametrize(
    ("formats", "outputs", "words"),
    [
        (["json", "sarif"], ["r"], ["which of the formats json, sarif?", "--output sarif=r"]),
        ([], ["a", "b"], ["--output a and --output b", "FORMAT=PATH"]),
        (["text", "json"], [], ["text and json", "terminal", "--output json=PATH"]),
        (["json", "sarif"], [], ["sarif and json", "terminal"]),
        ([], ["sarf=a.sarif"], ["no format is called 'sarf'", "did you mean 'sarif'", "./sarf="]),
        ([], ["a.sarif=b"], ["no format is called 'a.sarif'"]),
        ([], ["sarif="], ["no file is named"]),
        ([], ["sarif=a", "json=a"], ["both sarif and json"]),
        ([], ["sarif=-", "json=-"], ["json and sarif", "cannot both go to the terminal"]),
        (["text"], ["json=-"], ["text and json", "cannot both go to the terminal"]),
        ([], ["sarif=a", "sarif=./a"], ["both sarif and sarif"]),
    ],
)
def test_unclear_outputs_are_refused(
    formats: list[Format], outputs: list[str], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_outputs(formats, outputs)
    for word in words:
        assert word in str(caught.value)


def test_an_unclear_output_is_one_line_and_exit_code_2(explicit_dump: Path) -> None:
    result = invoke("check", explicit_dump, "--output", "sarf=x")
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("hlo-audit: error: --output sarf=x")


def test_every_format_is_written_in_one_run(explicit_dump: Path, tmp_path: Path) -> None:
    outputs = [f"--output={one}={tmp_path / one}" for one in FORMATS]
    result = invoke("check", explicit_dump, *outputs)
    assert result.returncode == 0
    assert "HLA002 relayout-copy" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FORMATS)
    quiet = invoke("check", explicit_dump, *outputs, "--quiet", "--max", "HLA002=3")
    assert quiet.returncode == 1
    assert quiet.stdout == ""
    assert "HLA002 is 4, at most 3" in quiet.stderr


def test_an_output_is_never_the_input(explicit_dump: Path, tmp_path: Path) -> None:
    path = tmp_path / "step.txt"
    (final,) = explicit_dump.glob("*.after_codegen.txt")
    path.write_text(final.read_text())
    result = invoke("check", path, "--output", f"sarif={path}")
    assert result.returncode == 2
    assert path.read_text() == final.read_text()


def test_exit_zero_is_the_exit_code_in_sarif_too(explicit_dump: Path) -> None:
    result = invoke("check", explicit_dump, "--max", "HLA002=0", "--exit-zero", "--format", "sarif")
    assert result.returncode == 0
    assert sarif_run(result.stdout)["invocations"][0]["exitCode"] == 0


def test_a_program_that_cannot_be_read_is_in_every_report(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("HloModule m\n\nENTRY %e {\n  %p = f32[8]{0} parameter(0)\n")
    outputs = [f"--output={one}={tmp_path / one}" for one in FORMATS]
    result = invoke("check", path, *outputs)
    assert result.returncode == 2
    assert result.stdout == ""
    for one in FORMATS:
        words = " ".join((tmp_path / one).read_text().split())
        assert "ends inside computation e" in words, one


def test_the_formats_of_the_command_line_are_all_there_are() -> None:
    (option,) = (p for p in cli.commands["check"].params if p.name == "formats")
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == FORMATS
