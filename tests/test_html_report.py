"""The HTML report: what stands in it.

Here the text is parsed; what a browser makes of it is in ``test_html_browser.py``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from command_line import invoke
from hlo_audit.errors import CompileError, HloAuditError, UsageError
from hlo_audit.examination import Examined, examine_subjects
from hlo_audit.gate import Gate, Notice, Violation
from hlo_audit.manifest import MANIFEST_NAME
from hlo_audit.program import Recorded
from hlo_audit.program_audit import ProgramAudit
from hlo_audit.report import Report
from hlo_audit.report.html import render_html
from hlo_audit.report.sources import Repository
from hlo_audit.rules import ALL_RULES
from html_pages import TOP, Node, Page, dump_of, examined_of, manifest, written


@pytest.fixture(scope="module")
def text_of_both(both_modes: list[Path]) -> str:
    return written(both_modes)


@pytest.fixture(scope="module")
def page_of_both(text_of_both: str) -> Page:
    return Page(text_of_both)


def test_the_page_is_well_formed_and_its_links_lead_somewhere(page_of_both: Page) -> None:
    ids = [node.attributes["id"] for node in page_of_both.root.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    for node in page_of_both.root.all():
        for name in ("href", "aria-labelledby"):
            if name in node.attributes:
                assert node.attributes[name].removeprefix("#") in ids, node.attributes
    assert not page_of_both.comments


def test_the_page_can_be_walked_by_its_headings_and_landmarks(page_of_both: Page) -> None:
    root = page_of_both.root
    assert root.one("html").attributes["lang"] == "en"
    assert [root.one(tag).tag for tag in ("h1", "main", "nav", "title")]
    levels = [
        int(node.tag[1]) for node in page_of_both.main.all() if re.fullmatch("h[1-6]", node.tag)
    ]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for table in root.all("table"):
        assert table.one("caption").text
        for head in table.all("th"):
            assert head.attributes["scope"] in ("col", "row")
        # A wide table scrolls by itself, also by the keyboard.
        around = table.parent
        assert around is not None
        assert around.attributes["class"] == "scroll"
        assert around.attributes["tabindex"] == "0"
        assert around.attributes["role"] == "region"
        assert {"aria-label", "aria-labelledby"} & set(around.attributes)
    for drawing in root.all("svg"):
        assert drawing.attributes["aria-hidden"] == "true"  # the number stands beside it


def test_the_overview_has_the_counts_of_both(page_of_both: Page) -> None:
    rows = page_of_both.section("programs").one("tbody").all("tr")
    counts = [[cell.text for cell in row.all("td")] for row in rows]
    assert "jax-0.12.0-auto" in rows[0].one("th").text
    assert counts[0][1].startswith("583,241")
    assert counts[1][2:] == ["1 (+61)", "4 65.5 MB", "1 16.4 MB", "0", "0"]
    caption = page_of_both.section("programs").one("caption").text
    assert "not a measurement" in caption
    assert "size of what they copy or send" in caption


def test_the_comparison_leads_with_what_differs_where_and_what_to_do(page_of_both: Page) -> None:
    one = page_of_both.section("compare").one("article")
    sentences = [item.text for item in one.one("ul", "sentences").all("li")]
    assert re.match(r"B adds 4 relayout copies of entry .*: 131\.1 MB of HBM traffic", sentences[0])
    assert any(text.startswith("they part at simplification-1, algsimp") for text in sentences)
    fixes = [line.text for line in one.all("p", "fix-line")]
    assert fixes[0].startswith("Fix kernel-order-grad for 1 of 1 HLA001, 4 of 4 HLA002")
    auto, explicit = one.all("section", "side")
    assert "Only in A" in auto.text
    assert [item.one("span", "rule").text for item in explicit.one("ul").all("li")] == [
        *("HLA002",) * 4,
        "HLA003",
        "HLA001",
    ]
    numbers = {row.one("th").text: row.text for row in one.all("tbody")[0].all("tr")}
    assert "▲ +4" in numbers["HLA002 relayout-copy"]


def test_findings_are_listed_by_cost_with_all_that_is_known(page_of_both: Page) -> None:
    findings = page_of_both.section("findings").all("details", "finding")
    assert [one.attributes["data-rule"] for one in findings] == [
        *("HLA002",) * 4,
        "HLA003",
        "HLA001",
    ]
    cycles = [int(m[1].replace(",", "")) for one in findings if (m := _cycles(one))]
    assert cycles == sorted(cycles, reverse=True)
    first = findings[0]
    facts = {
        name.text: value.text
        for name, value in zip(first.one("dl", "facts").all("dt"), first.all("dd"), strict=True)
    }
    assert facts["instruction"].startswith("%copy")
    assert facts["shape"] == "f32[128,32000]"
    assert facts["size"] == "16.4 MB (16,384,000 bytes) once"
    assert facts["HBM traffic a step"] == "32.8 MB"
    assert facts["from"] == "{1,0:T(8,128)}"
    assert facts["origin"] == "brought by Layout_assignment: layout-assignment"
    assert "/src/lm.py" in first.children[0].text
    assert "not folded" not in first.text
    transpose = findings[4]
    way = [step.text for step in transpose.one("ol", "way").all("li")]
    assert any("does not fold" in step and "Sharding call" in step for step in way)


def test_the_time_of_a_finding_is_said_once(both_modes: list[Path], tmp_path: Path) -> None:
    final = next(both_modes[1].glob("*.after_codegen.txt"))
    shutil.copy(final, tmp_path)
    made = manifest(mode="explicit", module="jit_step")
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(made))
    page = Page(written([tmp_path]))
    copies = page.section("findings").all("details", "finding")
    assert len(copies) == 4
    for one in copies:
        times = re.findall(r"about ([\d.]+) us", one.one("dl", "facts").text)
        assert len(times) == 1
        # 16.4 MB are read and written, at the 2.37 TB/s that copies reach.
        assert float(times[0]) == pytest.approx(2 * 16_384_000 / 2.37e6, rel=0.01)
    # Of several that are alike: one, and all of them.
    examined, _ = examine_subjects([Recorded(tmp_path)], ALL_RULES)
    alike = replace(examined[0].audit.findings[0], op_name="", source=None, stack=())
    audit = replace(examined[0].audit, findings=(alike, replace(alike, instruction="other")))
    page = Page(render_html(Report([audit], Gate(), {}), examined, [], Repository(TOP)))
    facts = page.section("findings").one("details", "finding").one("dl", "facts").text
    assert re.search(r"about 13\.8 us each, about 27\.[67] us for all 2, if nothing", facts)


def _cycles(finding: Node) -> re.Match[str] | None:
    return re.search(r"([\d,]+) est\. cycles", finding.children[0].text)


def test_the_hlo_around_an_instruction_has_what_it_reads_and_what_reads_it(
    page_of_both: Page,
) -> None:
    finding = page_of_both.section("findings").all("details", "finding")[0]
    excerpt = finding.one("pre", "hlo")
    (this,) = excerpt.all("span", "this")
    name = re.search(r"%([\w.-]+) = f32\[128,32000\]\{0,1:T\(8,128\)\} copy\(%([\w.-]+)", this.text)
    assert name is not None
    assert any(f"%{name[2]} = " in line.text for line in excerpt.all("span", "operand"))
    assert all(f"%{name[1]}" in line.text for line in excerpt.all("span", "user"))
    assert "metadata=" not in excerpt.text


def test_the_passes_are_told_in_charts_and_in_tables(page_of_both: Page) -> None:
    section = page_of_both.section("passes")
    timelines = section.all("details", "timeline")
    assert len(timelines) == 2
    explicit = timelines[1]
    series, passes = explicit.all("table")
    numbers = {row.one("th").text: row.all("td") for row in series.one("tbody").all("tr")}
    assert [cell.text for cell in numbers["HLA001 sharding-custom-call"]] == ["62", "62", "0", ""]
    assert numbers["HLA002 relayout-copy"][2].text == "4"
    rows = {row.one("th").text: row for row in passes.one("tbody").all("tr")}
    layouts = rows["Layout_assignment: layout-assignment"]
    assert "▲ HLA002" in layouts.text
    # The chart has the same numbers.
    chart = page_of_both.data["timelines"][explicit.one("div", "chart").attributes["data-chart"]]
    copies = next(one for one in chart["series"] if one["name"] == "HLA002")
    assert copies["title"] == "relayout-copy"
    assert copies["points"][0] == [0, None, None]
    assert copies["points"][-1][1:] == [4, 4 * 16_384_000]
    position = chart["passes"].index("Layout_assignment: layout-assignment")
    assert [position, 4, 0] in copies["lasting"]


def test_what_lasts_of_a_change_is_told_apart_from_what_is_undone(tmp_path: Path) -> None:
    a, b, c = (f"f32[{size}]{{0}} copy(%{size})" for size in (1, 2, 3))
    # Three of b come and go while one of a goes for good; then c goes and d comes, both for good.
    d = "f32[4]{0} copy(%4)"
    dump_of(tmp_path / "swings", [[a, c], [b, b, b, c], [c], [d]])
    page = Page(written([tmp_path / "swings"]))
    (chart,) = page.data["timelines"].values()
    copies = next(one for one in chart["series"] if one["name"] == "copy")
    assert [count for _, count, _ in copies["points"]] == [2, 4, 1, 1]
    assert copies["lasting"] == [[1, 0, 1], [3, 1, 1]]
    rows = page.section("passes").all("table")[1].one("tbody").all("tr")
    assert [row.one("li").text for row in rows] == [
        "▼ copy +3 -1 to 4, +20 B (3 of these are undone later, or undo; -1 lasts)",
        "▼ copy -3 to 1, -24 B (undone later, or undoes)",
        "↕ copy +1 -1 to 1, +4 B",
    ]
    assert ["passing" in row.attributes.get("class", "") for row in rows] == [False, True, False]


def test_the_entry_layouts_stand_side_by_side(page_of_both: Page) -> None:
    (entry,) = page_of_both.section("entry").all("details", "entry")
    rows = entry.all("tbody")[0].all("tr")
    assert all(len(row.all("td")) == 3 for row in rows)
    assert any("f32[128,32000]{1,0:T(8,128)}" in row.text for row in rows)


def test_a_fix_stands_with_what_it_claims(page_of_both: Page) -> None:
    fixes = page_of_both.section("fixes").all("article", "fix")
    embed = next(one for one in fixes if one.one("h3").text == "vocab-embed")
    rule = next(rule for rule in ALL_RULES if rule.code == "HLA001")
    claimed = next(fix for fix in rule.fixes if fix.name == "vocab-embed")
    assert claimed.change in embed.text
    assert claimed.cost in embed.text
    for target in (*claimed.clears, *claimed.slower):
        assert str(target) in embed.text
    assert claimed.claims["Numerics"] in embed.text


def test_cpu_devices_are_called_so_everywhere(tmp_path: Path) -> None:
    for devices in ("4", "1"):
        dump_of(tmp_path / devices, [[], [], []])
        made = manifest(platform="cpu", topology=devices, mode="auto", devices=int(devices))
        (tmp_path / devices / MANIFEST_NAME).write_text(json.dumps(made))
    paths = [tmp_path / "4", tmp_path / "1"]
    page = Page(written(paths))
    rows = page.section("programs").one("tbody").all("tr")
    assert [row.all("td")[0].text for row in rows] == ["4 CPU devices", "1 CPU device"]
    one = page.section("compare").one("article")
    assert one.one("h3").text.startswith("4 CPU devices against 1 CPU device")
    result = invoke("check", *paths, "--format", "markdown")
    assert "| `4 CPU devices` |" in result.stdout
    assert "4 CPU devices" in invoke("check", *paths).stdout
    assert "  1 CPU device  " in invoke("diff", *paths, "--force").stdout


def test_a_fix_that_is_among_the_programs_is_measured(
    both_modes: list[Path], tmp_path: Path
) -> None:
    for name, dump, layout in (
        ("x", both_modes[1], "embed-vocab"),
        ("y", both_modes[0], "vocab-embed"),
    ):
        shutil.copytree(dump, tmp_path / name)
        made = manifest(layout=layout, program="lm-head")
        (tmp_path / name / MANIFEST_NAME).write_text(json.dumps(made))
    page = Page(written([tmp_path / "x", tmp_path / "y"]))
    fixes = page.section("fixes").all("article", "fix")
    embed = next(one for one in fixes if one.one("h3").text == "vocab-embed")
    measured = embed.all("table")[0]
    assert measured.one("caption").text.startswith("In this report")
    assert "HLA002 4 → 0" in measured.one("tbody").text
    assert re.search(r"-\d+\.\d%", measured.one("tbody").text)


def test_the_verdict_comes_first_and_says_why(both_modes: list[Path]) -> None:
    def failing(labels: Sequence[str]) -> Gate:
        return Gate(
            (Violation(labels[0], "HLA002", 2, 4, "budget"),),
            held=1,
            against="budget",
            notices=(Notice("slack", "the baseline could be tightened", fails=True),),
        )

    page = Page(written([both_modes[1]], gate=failing))
    first = page.main.children[0]
    assert "failed" in first.attributes["class"]
    assert first.one("h1").text == "✗ Gate failed"
    cells = [cell.text for cell in first.one("tbody").all("td")]
    assert cells == ["HLA002 relayout-copy", "at most 2", "4", "+2"]
    assert "fails: the baseline could be tightened" in first.text
    over = page.section("findings").all("details", "error")
    assert [one.attributes["data-rule"] for one in over] == ["HLA002"] * 4
    assert "fails the gate" in over[0].text
    assert "over" in page.section("programs").one("td", "breaks").text


def test_a_program_that_cannot_be_read_is_told_of(both_modes: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text("HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8")
    page = Page(written([broken, both_modes[0]]))
    assert page.root.one("h1").text.startswith("✗ 1 of 2 programs not audited; no gate")
    assert "1 of 2 programs not audited" in page.root.one("title").text
    assert "broken.txt:4" in page.section("programs").one("td", "error").text


@pytest.mark.parametrize(
    ("error", "title"),
    [
        (UsageError("the program raised ValueError", log=("step.py:3",)), "Traceback"),
        (CompileError("it crashed", log=("check failed",)), "What the compiler wrote last"),
    ],
)
def test_the_lines_of_an_error_are_called_what_they_are(
    error: HloAuditError, title: str, both_modes: list[Path]
) -> None:
    examined, _ = examined_of(both_modes[0])
    failed = Examined(ProgramAudit("step", error=error))
    report = Report([examined[0].audit, failed.audit], Gate(), {})
    page = Page(render_html(report, [*examined, failed], [], Repository(TOP)))
    log = page.section("programs").one("td", "error").one("details")
    assert log.one("summary").text == title
    assert log.one("pre").text == error.log[0]


def test_a_single_file_says_why_it_has_no_timeline(both_modes: list[Path]) -> None:
    final = next(both_modes[1].glob("*.after_codegen.txt"))
    page = Page(written([final]))
    assert "a single file shows no passes" in page.section("passes").text
    assert page.data["timelines"] == {}
    copies = page.section("findings").all("details", "finding")
    assert [one.attributes["data-rule"] for one in copies] == ["HLA002"] * 4
    unknown = page.section("programs").one("tbody").all("span", "unknown")
    assert all("not counted: needs the snapshot" in one.text for one in unknown)
    assert len(unknown) == 3


def test_programs_that_are_not_comparable_say_why(both_modes: list[Path], dumps: Any) -> None:
    other = dumps("lm_head_platforms") / "cpu-auto"
    page = Page(written([both_modes[0], other]))
    one = page.section("compare").one("article")
    assert "Not comparable" in one.text
    assert "the platform differs: tpu and cpu" in one.text
    assert not one.all("section", "side")


def test_only_programs_that_belong_together_are_compared(
    both_modes: list[Path], dumps: Any
) -> None:
    other = dumps("lm_head_versions") / "jax-0.11.0-auto"
    page = Page(written([*both_modes, other]))
    assert not page.main.all("article", "comparison")
    assert len(page.section("entry").all("details", "entry")) == 3


def test_the_same_input_makes_the_same_page(both_modes: list[Path], text_of_both: str) -> None:
    assert written(both_modes) == text_of_both
