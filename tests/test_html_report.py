"""The HTML report: what stands in it, and that nothing out of a dump gets loose in it.

Here the text is parsed; what a browser makes of it is in ``test_html_browser.py``.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hlo_audit.errors import CompileError, HloAuditError, UsageError
from hlo_audit.examination import Examined, examine_subjects
from hlo_audit.gate import Gate, Notice, Violation
from hlo_audit.hlo import SourceLocation
from hlo_audit.manifest import MANIFEST_NAME
from hlo_audit.program import Recorded
from hlo_audit.program_audit import ProgramAudit, tell_apart
from hlo_audit.report import Report
from hlo_audit.report.html import render_html
from hlo_audit.report.html.limits import MOST_FINDINGS, MOST_NOTES
from hlo_audit.report.snippets import SourceReader
from hlo_audit.report.sources import Repository
from hlo_audit.rules import ALL_RULES

TOP = Path(__file__).parent.parent
ASSETS = TOP / "hlo_audit" / "report" / "html"

_VOID = {"meta", "br", "input", "link", "img", "hr"}
_DRAWN = {"svg", "rect"}


class Node:
    """An element of a page."""

    def __init__(self, tag: str, attributes: dict[str, str], parent: Node | None) -> None:
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.children: list[Node] = []
        self.texts: list[str] = []

    def all(self, tag: str | None = None, class_: str | None = None) -> list[Node]:
        """Every element below of this tag and class."""
        found = []
        for child in self.children:
            classes = child.attributes.get("class", "").split()
            if tag in (None, child.tag) and (class_ is None or class_ in classes):
                found.append(child)
            found += child.all(tag, class_)
        return found

    def one(self, tag: str | None = None, class_: str | None = None) -> Node:
        (found,) = self.all(tag, class_)
        return found

    @property
    def text(self) -> str:
        """All text in it, white space made single."""
        return " ".join("".join(self.texts).split())


class Page(HTMLParser):
    """A page as a tree; fails where elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = self._here = Node("", {}, None)
        self.comments: list[str] = []
        self.feed(text)
        self.close()
        assert self._here is self.root, self._here.tag

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), attrs
        node = Node(tag, {name: value or "" for name, value in attrs}, self._here)
        self._here.children.append(node)
        if tag not in _VOID:
            self._here = node

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._here.children.append(Node(tag, {n: v or "" for n, v in attrs}, self._here))

    def handle_endtag(self, tag: str) -> None:
        assert self._here.tag == tag, (self._here.tag, tag)
        assert self._here.parent is not None
        self._here = self._here.parent

    def handle_data(self, data: str) -> None:
        node: Node | None = self._here
        while node is not None:
            node.texts.append(data)
            node = node.parent

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    @property
    def main(self) -> Node:
        return self.root.one("main")

    def section(self, name: str) -> Node:
        """The section of a heading's id."""
        (found,) = [
            one for one in self.main.all("section") if one.attributes.get("aria-labelledby") == name
        ]
        return found

    @property
    def data(self) -> Any:
        """What the charts are drawn from."""
        (island,) = [one for one in self.root.all("script") if one.attributes.get("id") == "data"]
        assert island.attributes["type"] == "application/json"
        return json.loads("".join(island.texts))


def written(
    paths: Sequence[Path],
    *,
    gate: Callable[[Sequence[str]], Gate] = lambda labels: Gate(),
    repository: Path = TOP,
) -> str:
    """The page of some dumps or files."""
    examined, pairs = examine_subjects([Recorded(path) for path in paths], ALL_RULES)
    audits = tell_apart([one.audit for one in examined])
    report = Report(audits, gate([audit.label for audit in audits]), {})
    return render_html(report, examined, pairs, Repository(repository))


def run(*arguments: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", **kwargs.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "hlo_audit", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
        **kwargs,
    )


@pytest.fixture(scope="module")
def both(dumps: Callable[[str], Path]) -> list[Path]:
    folder = dumps("lm_head_versions")
    return [folder / "jax-0.12.0-auto", folder / "jax-0.12.0-explicit"]


@pytest.fixture(scope="module")
def text_of_both(both: list[Path]) -> str:
    return written(both)


@pytest.fixture(scope="module")
def page_of_both(text_of_both: str) -> Page:
    return Page(text_of_both)


# -- what stands in it


def test_the_page_is_well_formed_and_its_links_lead_somewhere(page_of_both: Page) -> None:
    ids = [node.attributes["id"] for node in page_of_both.root.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    for node in page_of_both.root.all():
        for name in ("href", "aria-labelledby"):
            if name in node.attributes:
                assert node.attributes[name].removeprefix("#") in ids, node.attributes
    assert not page_of_both.comments


def test_the_page_asks_for_nothing(text_of_both: str, page_of_both: Page) -> None:
    for node in page_of_both.root.all():
        assert not {"src", "srcset", "style", "action", "background", "ping"} & set(node.attributes)
        assert not any(name.startswith("on") for name in node.attributes)
        assert node.attributes.get("href", "#").startswith("#")
        assert node.tag not in ("link", "img", "iframe", "object", "embed", "base", "object")
    for style in page_of_both.root.all("style"):
        assert not re.search(r"url\(|@import", "".join(style.texts))


def test_the_policy_allows_the_scripts_and_styles_by_their_hashes_alone(
    text_of_both: str, page_of_both: Page
) -> None:
    head = page_of_both.root.one("head")
    policy = head.children[1].attributes  # the second: what stands before is not held to it
    assert policy["http-equiv"] == "Content-Security-Policy"
    rules = dict(rule.split(" ", 1) for rule in policy["content"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"

    def hashes(tag: str) -> set[str]:
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text_of_both, re.DOTALL)
        return {f"'sha256-{b64encode(sha256(t.encode()).digest()).decode()}'" for t in inside}

    assert set(rules["script-src"].split()) == hashes("script")
    assert len(hashes("script")) == 3
    assert set(rules["style-src"].split()) == hashes("style")


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


def test_the_time_of_a_finding_is_said_once(both: list[Path], tmp_path: Path) -> None:
    final = next(both[1].glob("*.after_codegen.txt"))
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


def dump_of(folder: Path, snapshots: Sequence[Sequence[str]]) -> None:
    """A dump of a module with these instructions after each pass; the first and the last are those
    before and after all passes."""
    folder.mkdir()
    names = [
        "before_optimizations",
        *(f"{n:04}.p.after_pass-{n}.before_pass-{n + 1}" for n in range(1, len(snapshots) - 1)),
        "after_optimizations",
    ]
    for name, instructions in zip(names, snapshots, strict=True):
        lines = ["HloModule jit_step", "", "ENTRY %main (p: f32[9]) -> f32[9] {"]
        lines += [f"  %{size} = f32[{size}]{{0}} constant(0)" for size in range(1, 5)]
        lines += [f"  %copy.{n} = {text}" for n, text in enumerate(instructions)]
        lines += ["  ROOT %p = f32[9]{0} parameter(0)", "}", ""]
        (folder / f"module_0001.jit_step.{name}.txt").write_text("\n".join(lines))


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
    result = run("check", *paths, "--format", "markdown")
    assert "| `4 CPU devices` |" in result.stdout
    assert "4 CPU devices" in run("check", *paths).stdout
    assert "  1 CPU device  " in run("diff", *paths, "--force").stdout


def test_a_fix_that_is_among_the_programs_is_measured(both: list[Path], tmp_path: Path) -> None:
    for name, dump, layout in (("x", both[1], "embed-vocab"), ("y", both[0], "vocab-embed")):
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


def manifest(**changed: Any) -> dict[str, Any]:
    """A manifest of a dump of ``jit_step``."""
    return {
        "schema_version": 1,
        "program": "step",
        "mode": "explicit",
        "layout": None,
        "platform": "tpu",
        "topology": "v5p:2x2x1",
        "mesh": {"fsdp": 4},
        "settings": {},
        "xla_flags": {},
        "versions": {},
        "module": "jit_step",
        "devices": 4,
        "lower_seconds": 1.0,
        "compile_seconds": 1.0,
        "digest": "0" * 64,
        **changed,
    }


def test_the_verdict_comes_first_and_says_why(both: list[Path]) -> None:
    def failing(labels: Sequence[str]) -> Gate:
        return Gate(
            (Violation(labels[0], "HLA002", 2, 4, "budget"),),
            held=1,
            against="budget",
            notices=(Notice("slack", "the baseline could be tightened", fails=True),),
        )

    page = Page(written([both[1]], gate=failing))
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


def test_a_program_that_cannot_be_read_is_told_of(both: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text("HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8")
    page = Page(written([broken, both[0]]))
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
    error: HloAuditError, title: str, both: list[Path]
) -> None:
    examined, _ = _examined(both[:1])
    failed = Examined(ProgramAudit("step", error=error))
    report = Report([examined[0].audit, failed.audit], Gate(), {})
    page = Page(render_html(report, [*examined, failed], [], Repository(TOP)))
    log = page.section("programs").one("td", "error").one("details")
    assert log.one("summary").text == title
    assert log.one("pre").text == error.log[0]


def test_a_single_file_says_why_it_has_no_timeline(both: list[Path]) -> None:
    final = next(both[1].glob("*.after_codegen.txt"))
    page = Page(written([final]))
    assert "a single file shows no passes" in page.section("passes").text
    assert page.data["timelines"] == {}
    (copies, _) = (page.section("findings").all("details", "finding"), None)
    assert [one.attributes["data-rule"] for one in copies] == ["HLA002"] * 4
    unknown = page.section("programs").one("tbody").all("span", "unknown")
    assert all("not counted: needs the snapshot" in one.text for one in unknown)
    assert len(unknown) == 3


def test_programs_that_are_not_comparable_say_why(both: list[Path], dumps: Any) -> None:
    other = dumps("lm_head_platforms") / "cpu-auto"
    page = Page(written([both[0], other]))
    one = page.section("compare").one("article")
    assert "Not comparable" in one.text
    assert "the platform differs: tpu and cpu" in one.text
    assert not one.all("section", "side")


def test_only_programs_that_belong_together_are_compared(both: list[Path], dumps: Any) -> None:
    other = dumps("lm_head_versions") / "jax-0.11.0-auto"
    page = Page(written([*both, other]))
    assert not page.main.all("article", "comparison")
    assert len(page.section("entry").all("details", "entry")) == 3


def test_the_same_input_makes_the_same_page(both: list[Path], text_of_both: str) -> None:
    assert written(both) == text_of_both


# -- source lines


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    top = tmp_path / "checkout"
    for name in ("src/lm.py", "secret.txt", ".hidden/key.py", ".env.py", "sub/.git/config.py"):
        file = top / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"line {number} of {name}\n" for number in range(1, 9)))
    (tmp_path / "outside.py").write_text("PRIVATE = 1\n" * 9)
    (top / "link.py").symlink_to(tmp_path / "outside.py")
    (top / "to").symlink_to(tmp_path)
    (top / "passwd.py").symlink_to("/etc/passwd")
    os.mkfifo(top / "pipe.py")
    return top


def test_the_lines_around_are_shown(checkout: Path) -> None:
    reader = SourceReader(Repository(checkout))
    for file in (str(checkout / "src/lm.py"), "/somewhere/else/src/lm.py", "src/lm.py"):
        snippet = reader.snippet([SourceLocation(file, 5, "step")])
        assert snippet is not None
        assert snippet.place == "src/lm.py:5"
        assert (snippet.first, snippet.line) == (2, 5)
        assert snippet.lines == tuple(f"line {number} of src/lm.py" for number in range(2, 9))
    first = reader.snippet([SourceLocation(str(checkout / "src/lm.py"), 1, "")])
    assert first is not None
    assert first.first == 1


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/passwd", "/proc/self/environ", "/dev/zero", "../outside.py", "secret.txt"),
        *("{top}/secret.txt", "{top}/.env.py", "{top}/.hidden/key.py", "{top}/sub/.git/config.py"),
        *("{top}/../outside.py", "{top}/link.py", "{top}/to/outside.py", "{top}/passwd.py"),
        *("{top}/pipe.py", "{top}", "{top}/src", "{top}/none.py", "", "src/lm.py\0", "x" * 5000),
        *("/somewhere/else/.hidden/key.py", "src/../secret.txt", "file:///etc/passwd"),
    ],
)
def test_a_dump_cannot_have_other_files_shown(name: str, checkout: Path) -> None:
    reader = SourceReader(Repository(checkout))
    frame = SourceLocation(name.replace("{top}", str(checkout)), 1, "")
    assert reader.snippet([frame]) is None


@pytest.mark.parametrize("line", [0, -1, 9, 10**12])
def test_a_line_that_is_not_there_is_not_shown(line: int, checkout: Path) -> None:
    reader = SourceReader(Repository(checkout))
    assert reader.snippet([SourceLocation(str(checkout / "src/lm.py"), line, "")]) is None


def test_the_reference_models_are_quoted_from_anywhere(checkout: Path) -> None:
    file = str(TOP / "hlo_audit" / "models" / "lm_head.py")
    snippet = SourceReader(Repository(checkout)).snippet([SourceLocation(file, 1, "")])
    assert snippet is not None
    assert snippet.place == "hlo_audit/models/lm_head.py:1"
    other = str(TOP / "hlo_audit" / "models" / ".." / "errors.py")
    assert SourceReader(Repository(checkout)).snippet([SourceLocation(other, 1, "")]) is None


def test_a_page_quotes_the_repository_and_nothing_else(tmp_path: Path, checkout: Path) -> None:
    def copy_from(file: str) -> str:
        return written(
            [module_file(tmp_path, f'source_file="{file}" source_line=2')], repository=checkout
        )

    assert "line 2 of src/lm.py" in copy_from("/build/src/lm.py")
    for file in ("/etc/passwd", str(checkout / "passwd.py"), str(checkout / "secret.txt")):
        text = copy_from(file)
        assert "root:" not in text
        assert "line 2 of" not in text
        assert Path(file).name in text  # named all the same


# -- what comes out of a dump

HOSTILE = [
    "<script>owned()</script>",
    "</script><script>owned()</script>",
    "</SCRIPT\t><img src=x onerror=owned()>",
    "<!--<script>",
    "--><svg onload=owned()>",
    "]]><![CDATA[",
    "\"'><img src=//evil.example/x onerror=owned()>",
    "' onmouseover='owned()",
    "javascript:owned()",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "${owned()}`\\",
    "</style><style>@import url(//evil.example)</style>",
    "</pre></code></details></main>",
    "&lt;b&gt;&amp;amp;&#60;",
    "\u2028owned()\u2029",
    "\x00\x08\x7f",
    "\x1b[31mred\x1b]8;;http://evil.example\x07",
    "\u202eexe.txt\u202c\u2066\u200b\ufeff",
    "\ud800lone\udfff",
    "a\nb\r\nc\td",
    "x" * 100_000,
]


def module_file(folder: Path, metadata: str, name: str = "step.txt") -> Path:
    """A final module with one relayout copy."""
    path = folder / name
    path.write_text(
        f"""\
HloModule jit_step, is_scheduled=true

ENTRY %main (p: f32[128,32000]) -> f32[128,32000] {{
  %p = f32[128,32000]{{1,0:T(8,128)}} parameter(0), metadata={{op_name="kernel"}}
  ROOT %copy.1 = f32[128,32000]{{0,1:T(8,128)}} copy(%p), metadata={{{metadata}}}
}}
""",
        encoding="utf-8",
    )
    return path


def hostile_page(name: str, both: Sequence[Path]) -> tuple[str, int]:
    """A page in which all that can be a text of a dump, a manifest or a config is ``name``."""
    examined, pairs = _examined(both)
    evil = []
    for one in examined:
        audit = one.audit
        findings = tuple(
            replace(
                finding,
                message=name,
                op_name=name,
                shape=name,
                source=SourceLocation(name, 1, name),
                stack=(SourceLocation(f"/x/{name}", 2, name),) * 3,
                details={name: name, "bytes": name},
                introduced_by=name,
            )
            for finding in sorted(audit.findings, key=lambda f: f.severity == "note")[:8]
        )
        audit = replace(
            audit,
            program=name,
            mode=name,
            layout=name,
            topology=name,
            module=name,
            settings={name: name},
            xla_flags={name: name},
            mesh={name: 1},
            versions={name: name},
            findings=findings,
            skipped={"HLA005": name},
        )
        passes = tuple(replace(line, name=name) for line in one.passes)
        series = tuple(
            replace(s, name=name, title=name, counts=name, reasons={0: name}) for s in one.series
        )
        evil.append(replace(one, audit=audit, passes=passes, series=series))
    diff = pairs[0].diff
    assert diff is not None
    sides = [
        replace(side, name=name, audit=one.audit)
        for side, one in zip((diff.a, diff.b), evil, strict=True)
    ]
    entry = tuple(replace(row, name=name) for row in diff.entry)
    diff = replace(diff, a=sides[0], b=sides[1], obstacles=(name,), notes=(name,), entry=entry)
    gate = Gate(
        (Violation(name, name, 1, 2, "baseline", baseline=name, remark=name),),
        held=1,
        notices=(Notice("slack", name),),
    )
    report = Report([one.audit for one in evil], gate, {})
    text = render_html(report, evil, [replace(pairs[0], diff=diff)], Repository(TOP))
    return text, len(evil)


_EXAMINED: dict[tuple[Path, ...], tuple[list[Examined], list[Any]]] = {}


def _examined(paths: Sequence[Path]) -> tuple[list[Examined], list[Any]]:
    key = tuple(paths)
    if key not in _EXAMINED:
        _EXAMINED[key] = examine_subjects([Recorded(path) for path in paths], ALL_RULES)
    return _EXAMINED[key]


@pytest.fixture(scope="module")
def harmless_tags(both: list[Path]) -> dict[str, int]:
    return _tags(Page(hostile_page("harmless", both)[0]))


def _tags(page: Page) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in page.root.all():
        counts[node.tag] = counts.get(node.tag, 0) + 1
    return counts


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_stays_text(
    name: str, both: list[Path], harmless_tags: dict[str, int]
) -> None:
    text, _ = hostile_page(name, both)
    page = Page(text)
    # The elements are those that a harmless name gives, and so are their attributes.
    assert _tags(page) == harmless_tags
    for node in page.root.all():
        assert not any(attribute.startswith("on") for attribute in node.attributes)
        assert node.attributes.get("href", "#").startswith("#")
    assert not page.comments
    assert all(char.isprintable() or char == "\n" for char in _ours_left_out(text))
    assert text.encode("utf-8")
    json.dumps(page.data)
    assert len(text) < 2_000_000
    if name.isprintable() and len(name) < 200:
        assert " ".join(name.split()) in page.section("programs").text
        assert name in json.dumps(page.data, ensure_ascii=False).replace('\\"', '"').replace(
            "\\\\", "\\"
        )


def _ours_left_out(text: str) -> str:
    """Without the scripts of this package, which hold a few such characters themselves."""
    return re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[31m", r"\x1b[31m"),
        ("a\u202eb", r"a\u202eb"),
        ("\u2028", r"\u2028"),
        ("\x00", r"\x00"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_cannot_be_seen_is_spelt_out(name: str, shown: str, both: list[Path]) -> None:
    page = Page(hostile_page(name, both)[0])
    assert shown in page.section("programs").text
    assert shown in page.section("findings").text
    assert shown in page.section("passes").text
    assert shown in page.section("compare").text
    assert any(shown in one["program"] for one in page.data["costs"])


def test_a_hostile_file_goes_through_the_command_line(tmp_path: Path) -> None:
    evil = "</script><script>owned()</script>"
    folder = tmp_path / "<img src=x onerror=owned()>"
    folder.mkdir()
    escaped = r"\033[31m\000\342\200\256"
    path = module_file(folder, f'op_name="{evil}{escaped}" source_file="{evil}.py" source_line=3')
    result = run("report", path, "-o", tmp_path / "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert "<script>owned()" not in text
    assert "<img" not in text
    finding = page.section("findings").one("details", "finding")
    assert f"{evil}\\x1b[31m\\x00" in finding.text
    assert f"{evil}.py:3" in finding.text
    assert "<img src=x onerror=owned()>" in page.section("programs").text


# -- large modules

COPIES = 2_000


def large_module(path: Path, instructions: int, copies: int) -> Path:
    """A final module with many relayout copies, each with a name, a line and an op_name of its
    own."""
    shape, turned = "f32[512,512]{1,0:T(8,128)}", "f32[512,512]{0,1:T(8,128)}"

    def lines() -> Iterator[str]:
        yield "HloModule jit_large, is_scheduled=true, num_partitions=4\n\n"
        yield "ENTRY %main (p: f32[512,512]) -> f32[512,512] {\n"
        yield f'  %p = {shape} parameter(0), metadata={{op_name="p"}}\n'
        every, last = instructions // copies, "p"
        for number in range(instructions - 2):
            about = f'metadata={{op_name="jit(step)/layer_{number}/mul" source_file="/src/m.py" '
            about += f"source_line={number % 900 + 1}}}"
            if number % every == 0:
                yield f"  %copy.{number} = {turned} copy(%{last}), {about}\n"
            else:
                yield f"  %multiply.{number} = {shape} multiply(%{last}, %p), {about}\n"
                last = f"multiply.{number}"
        yield f"  ROOT %add.1 = {shape} add(%{last}, %p)\n}}\n"

    with path.open("w") as file:
        file.writelines(lines())
    return path


def test_a_large_module_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    path = large_module(tmp_path / "large.txt", 100_000, COPIES)
    text = written([path])
    page = Page(text)
    assert len(text.encode()) < 2_500_000  # 10 MB are allowed
    assert len(page.section("findings").all("details", "finding")) == MOST_FINDINGS
    assert (
        f"Showing the {MOST_FINDINGS} most costly of 2,000 findings"
        in page.section("findings").text
    )
    assert page.root.one("nav").all("span", "pill")[0].text == "2,000"
    assert "2,000" in [cell.text for cell in page.section("programs").all("span", "some")]
    assert "--format json has all" in page.section("findings").text


def test_the_count_of_findings_is_that_of_the_table(both: list[Path]) -> None:
    examined, _ = _examined([both[1]])
    audit = examined[0].audit
    copy = next(finding for finding in audit.findings if finding.rule == "HLA002")
    note = next(finding for finding in audit.findings if finding.severity == "note")
    copies = tuple(replace(copy, instruction=f"copy.{n}") for n in range(1_234))
    notes = tuple(replace(note, instruction=f"note.{n}") for n in range(2_345))
    other = replace(copy, message="another")
    audit = replace(audit, findings=(*copies, other, *notes))
    gate = Gate((Violation(audit.label, "HLA002", 1_000, 2_235, "budget"),), 1, "budget")
    page = Page(render_html(Report([audit], gate, {}), examined, [], Repository(TOP)))
    assert page.root.one("nav").all("span", "pill")[0].text == "1,235 (2 different)"
    cells = [cell.text for cell in page.section("programs").one("tbody").all("td")]
    assert any(cell.startswith("1,235 over") for cell in cells)
    assert any(cell == "0 (+2,345)" for cell in cells)
    (heading,) = page.main.all("details", "notes")
    assert heading.one("summary").text == "Notes 2,345 (1 different)"
    assert "1,234 times:" in page.section("findings").text
    assert [cell.text for cell in page.main.children[0].one("tbody").all("td")] == [
        *("HLA002 relayout-copy", "at most 1,000", "2,235", "+1,235"),
    ]


def test_notes_and_long_texts_are_bounded(tmp_path: Path, both: list[Path]) -> None:
    assert MOST_NOTES >= 61
    long = module_file(tmp_path, f'op_name="{"y" * 3_000_000}"')
    text = written([long])
    assert len(text) < 700_000
    assert "y" * 100 in text
    assert "y" * 1000 not in text


# -- the command line


def test_the_command_writes_a_page_without_jax(both: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    code = f"""
import sys
sys.argv = ["hlo-audit", "report", {str(both[1])!r}, "-o", {str(output)!r}]
from hlo_audit.cli import main
try:
    main()
except SystemExit as ended:
    assert ended.code == 0, ended.code
found = {{name.partition(".")[0] for name in sys.modules}} & {{"jax", "jaxlib", "pandas", "numpy"}}
assert not found, found
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (result.stdout, result.stderr) == ("", f"wrote {output}\n")
    assert Page(output.read_text()).root.one("h1").text.startswith("○ No gate")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_other_commands_do_not_load_the_template_engine() -> None:
    code = (
        "import sys; from hlo_audit.cli import cli; import hlo_audit.report.text; "
        "assert 'jinja2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_gate_decides_the_exit_code(both: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    final = next(both[1].glob("*.after_codegen.txt"))
    result = run("report", final, "--max", "HLA002=3", "-o", output)
    assert result.returncode == 1
    assert "gate failed" in result.stderr
    assert result.stdout == ""
    assert Page(output.read_text()).root.one("h1").text == "✗ Gate failed"
    result = run("report", final, "--max", "HLA002=3", "--exit-zero", "-o", output)
    assert result.returncode == 0
    result = run("report", final, "--max", "HLA002=4", "-o", output)
    assert result.returncode == 0
    assert "within budget" in Page(output.read_text()).root.one("h1").text


def test_a_damaged_snapshot_that_no_rule_reads_is_told_of(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump_of(dump, [[], [], []])
    (damaged,) = dump.glob("*after_pass-1*")
    damaged.write_text(damaged.read_text()[:-20])
    output = tmp_path / "page.html"
    result = run("report", dump, "-o", output, "--max", "HLA002=0")
    assert result.returncode == 0
    (warning,) = [line for line in result.stderr.splitlines() if "warning" in line]
    assert warning.startswith(f"hlo-audit: warning: {dump} has no timeline, as its dump is damaged")
    assert damaged.name in warning
    page = Page(output.read_text())
    (notice,) = page.main.children[0].one("ul", "notices").all("li")
    assert f"hlo-audit: warning: {notice.text}" == warning
    assert "no timeline" in page.section("passes").text


def test_a_dump_without_passes_is_not_damaged(tmp_path: Path) -> None:
    dump_of(tmp_path / "dump", [[], []])
    page = Page(written([tmp_path / "dump"]))
    assert "holds no snapshot of a pass" in page.section("passes").text
    assert not page.main.children[0].all("ul")


def test_without_a_file_the_page_goes_to_standard_output(both: list[Path]) -> None:
    result = run("report", next(both[1].glob("*.after_codegen.txt")))
    assert result.returncode == 0
    assert Page(result.stdout).root.one("h1")


def test_a_terminal_gets_no_page(both: list[Path]) -> None:
    primary, secondary = os.openpty()
    try:
        result = subprocess.run(
            [sys.executable, "-m", "hlo_audit", "report", str(both[1])],
            stdout=secondary,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(secondary)
        os.close(primary)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "-o report.html" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "{out}"], "no program is named"),
        (["{none}", "-o", "{out}"], "there is no file or folder"),
        (["{dump}", "-o", "{tmp}/no/such/folder/x.html"], "cannot write"),
        (["{dump}", "-o", "{tmp}"], "is a directory"),
        (["{file}", "-o", "{file}"], "is what is read"),
        (["{dump}", "--max", "HLA999=1", "-o", "{out}"], "HLA999"),
        (["{dump}", "--mode", "auto", "-o", "{out}"], "modes"),
        (["{dump}", "--baseline", "{none}", "-o", "{out}"], "none"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], said: str, both: list[Path], tmp_path: Path
) -> None:
    file = module_file(tmp_path, 'op_name="x"')
    names = {
        "{none}": str(tmp_path / "none"),
        "{dump}": str(file),
        "{file}": str(file),
        "{tmp}": str(tmp_path),
        "{out}": str(tmp_path / "out.html"),
    }
    for name, path in names.items():
        arguments = [argument.replace(name, path) for argument in arguments]
    before = file.read_text()
    result = run("report", *arguments, cwd=tmp_path)
    assert result.returncode == 2, result
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert said in result.stderr
    assert result.stdout == ""
    assert file.read_text() == before
    assert not (tmp_path / "out.html").exists()


def test_a_terminal_sees_how_far_the_reading_is(tmp_path: Path) -> None:
    module_file(tmp_path, 'op_name="x"')
    (tmp_path / "cut.txt").write_text("HloModule m")
    command = [sys.executable, "-m", "hlo_audit", "report", "step.txt", "cut.txt", "-o", "p.html"]
    shown = {}
    for options in ((), ("--quiet",)):
        primary, secondary = os.openpty()
        try:
            with subprocess.Popen(
                [*command, *options],
                stderr=secondary,
                cwd=tmp_path,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
            ) as process:
                os.close(secondary)
                shown[options] = _all_of(primary)
        finally:
            os.close(primary)
        assert process.returncode == 2
    assert "examining" in shown[()]
    assert "2/2" in shown[()]
    assert "wrote p.html" in shown[()]
    assert not {"examining", "wrote"} & set(shown["--quiet",].split())


def _all_of(terminal: int) -> str:
    """All that is written to a terminal until nobody has it open."""
    parts = []
    while True:
        try:
            part = os.read(terminal, 65_536)
        except OSError:  # on Linux, at its end
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode()


def test_without_a_program_the_config_says_which(tmp_path: Path) -> None:
    module_file(tmp_path, 'op_name="x"')
    (tmp_path / "hlo-audit.toml").write_text('programs = ["step.txt"]\n')
    result = run("report", "-o", "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "step.txt" in Page((tmp_path / "page.html").read_text()).section("programs").text
    assert "With no PROGRAM" in run("report", "--help").stdout


# -- the package


def test_the_chart_library_is_the_one_pinned() -> None:
    wrong_files = runpy.run_path(str(TOP / "scripts" / "vendor_chart_library.py"))["wrong_files"]
    assert wrong_files() == []


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_page_is_packed_whole(kind: str, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(tmp_path)],
        cwd=TOP,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (built,) = tmp_path.iterdir()
    if kind == "wheel":
        names = zipfile.ZipFile(built).namelist()
    else:
        with tarfile.open(built) as archive:
            names = [name.partition("/")[2] for name in archive.getnames()]
    for path in ASSETS.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(TOP).as_posix() in names
    licences = [name for name in names if name.endswith("d3.LICENSE")]
    assert licences


# -- colours


def _colours() -> dict[str, dict[str, str]]:
    style = (ASSETS / "page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]
    light, dark, paper = found
    return {"light": light, "dark": {**light, **dark}, "paper": {**light, **paper}}


def _contrast(one: str, other: str) -> float:
    """By WCAG 2.2: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_the_contrast_is_computed_as_the_standard_says() -> None:
    assert _contrast("#ffffff", "#000000") == pytest.approx(21)
    assert _contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark", "paper"])
def test_text_and_drawings_can_be_told_from_their_ground(scheme: str) -> None:
    colours = _colours()[scheme]
    assert len(colours) == 18
    for text in ("text", "muted", "accent", "bad", "good", "warn"):
        for ground in ("ground", "surface", "code-ground", "bad-ground", "good-ground"):
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert _contrast(colours["mark-text"], colours["mark-ground"]) >= 4.5
    assert _contrast(colours["text"], colours["bar-ground"]) >= 4.5
    for ground in ("ground", "surface", "bar-ground", "area"):
        assert _contrast(colours["bar"], colours[ground]) >= 3, ground
