"""Pages of the HTML report for the tests of it: made of small dumps, and read as trees."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hlo_audit.examination import Examined, Pair, examine_subjects
from hlo_audit.gate import Gate
from hlo_audit.program import Recorded
from hlo_audit.program_audit import tell_apart
from hlo_audit.report import Report
from hlo_audit.report.html import render_html
from hlo_audit.report.sources import Repository
from hlo_audit.rules import ALL_RULES

TOP = Path(__file__).parent.parent
"""The checkout."""

_VOID = {"meta", "br", "input", "link", "img", "hr"}


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
    examined, pairs = _examine(paths)
    audits = tell_apart([one.audit for one in examined])
    report = Report(audits, gate([audit.label for audit in audits]), {})
    return render_html(report, examined, pairs, Repository(repository))


@cache
def examined_of(*paths: Path) -> tuple[list[Examined], list[Pair]]:
    """What is examined of dumps or files that do not change, read once."""
    return _examine(paths)


def _examine(paths: Sequence[Path]) -> tuple[list[Examined], list[Pair]]:
    return examine_subjects([Recorded(path) for path in paths], ALL_RULES)


# -- small dumps and large files


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
