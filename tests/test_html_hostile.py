"""The HTML report: nothing out of a dump gets loose in it, and it asks for nothing."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from command_line import run
from hlo_audit.gate import Gate, Notice, Violation
from hlo_audit.hlo import SourceLocation
from hlo_audit.report import Report
from hlo_audit.report.html import render_html
from hlo_audit.report.sources import Repository
from html_pages import TOP, Page, examined_of, module_file, written


@pytest.fixture(scope="module")
def text(both_modes: list[Path]) -> str:
    return written(both_modes)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_the_page_asks_for_nothing(page: Page) -> None:
    for node in page.root.all():
        assert not {"src", "srcset", "style", "action", "background", "ping"} & set(node.attributes)
        assert not any(name.startswith("on") for name in node.attributes)
        assert node.attributes.get("href", "#").startswith("#")
        assert node.tag not in ("link", "img", "iframe", "object", "embed", "base")
    for style in page.root.all("style"):
        assert not re.search(r"url\(|@import", "".join(style.texts))


def test_the_policy_allows_the_scripts_and_styles_by_their_hashes_alone(
    text: str, page: Page
) -> None:
    head = page.root.one("head")
    policy = head.children[1].attributes  # the second: what stands before is not held to it
    assert policy["http-equiv"] == "Content-Security-Policy"
    rules = dict(rule.split(" ", 1) for rule in policy["content"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"

    def hashes(tag: str) -> set[str]:
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return {f"'sha256-{b64encode(sha256(t.encode()).digest()).decode()}'" for t in inside}

    assert set(rules["script-src"].split()) == hashes("script")
    assert len(hashes("script")) == 3
    assert set(rules["style-src"].split()) == hashes("style")


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


def hostile_page(name: str, both_modes: Sequence[Path]) -> str:
    """A page in which all that can be a text of a dump, a manifest or a config is ``name``."""
    examined, pairs = examined_of(*both_modes)
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
    return render_html(report, evil, [replace(pairs[0], diff=diff)], Repository(TOP))


@pytest.fixture(scope="module")
def harmless_tags(both_modes: list[Path]) -> Counter[str]:
    return _tags(Page(hostile_page("harmless", both_modes)))


def _tags(page: Page) -> Counter[str]:
    return Counter(node.tag for node in page.root.all())


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_stays_text(
    name: str, both_modes: list[Path], harmless_tags: Counter[str]
) -> None:
    text = hostile_page(name, both_modes)
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
def test_what_cannot_be_seen_is_spelt_out(name: str, shown: str, both_modes: list[Path]) -> None:
    page = Page(hostile_page(name, both_modes))
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
