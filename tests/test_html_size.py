"""The HTML report: of a bounded size, whatever there is to show, and what is left out counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hlo_audit.gate import Gate, Violation
from hlo_audit.report import Report
from hlo_audit.report.html import render_html
from hlo_audit.report.html.limits import MOST_FINDINGS, MOST_NOTES
from hlo_audit.report.sources import Repository
from html_pages import TOP, Page, examined_of, large_module, module_file, written


def test_a_large_module_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    path = large_module(tmp_path / "large.txt", 100_000, 2_000)
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


def test_the_count_of_findings_is_that_of_the_table(both_modes: list[Path]) -> None:
    examined, _ = examined_of(both_modes[1])
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


def test_notes_and_long_texts_are_bounded(tmp_path: Path) -> None:
    assert MOST_NOTES >= 61
    long = module_file(tmp_path, f'op_name="{"y" * 3_000_000}"')
    text = written([long])
    assert len(text) < 700_000
    assert "y" * 100 in text
    assert "y" * 1000 not in text
