"""Auditing a dump runs nothing of it, opens nothing that it names, and writes nothing beside it;
and no name that stands in it becomes more than a text, whatever shows it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import hlo_audit
from hlo_audit.diff import diff_subjects
from hlo_audit.errors import CompileError, DumpError
from hlo_audit.gate import judge
from hlo_audit.history import read_histories
from hlo_audit.hlo import SourceLocation
from hlo_audit.manifest import MANIFEST_NAME, Manifest
from hlo_audit.program import Recorded
from hlo_audit.program_audit import ProgramAudit, audit_recorded
from hlo_audit.report import Report
from hlo_audit.report.diff_json import render_diff_json
from hlo_audit.report.diff_text import print_diff
from hlo_audit.report.json import render_json
from hlo_audit.report.notebook import report_html
from hlo_audit.report.passes_json import render_passes_json
from hlo_audit.report.passes_text import print_passes
from hlo_audit.report.sources import Repository
from hlo_audit.report.text import print_report
from hlo_audit.rule import Finding
from hlo_audit.rules import ALL_RULES

PLANTED = ("json", "jax", "jaxlib", "click", "rich", "numpy", "pandas", "gzip", "sitecustomize2")

WATCH = """\
import json, os, runpy, sys

events = []

def hook(name, arguments):
    if name == "open" and isinstance(arguments[0], (str, bytes)):
        events.append([name, os.fsdecode(arguments[0]), arguments[1], arguments[2]])
    elif name == "import":
        events.append([name, arguments[0], str(arguments[1]), 0])
    elif name.startswith(("subprocess.", "os.exec", "os.posix_spawn", "os.fork", "os.system",
                          "socket.connect", "socket.bind", "socket.getaddrinfo", "os.remove",
                          "os.rename", "os.mkdir", "os.symlink", "os.link", "ctypes.dlopen",
                          "os.chmod", "os.truncate", "shutil.", "webbrowser.")):
        events.append([name, repr(arguments)[:300], None, 0])

arguments = json.loads(sys.argv[1])
sys.argv = ["hlo-audit", *arguments]
sys.addaudithook(hook)
code = None
try:
    runpy.run_module("hlo_audit", run_name="__main__", alter_sys=False)
except SystemExit as error:
    code = error.code
finally:
    with open(os.environ["EVENTS"], "w") as file:
        json.dump({"code": code or 0, "events": events}, file)
"""

SOURCES = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

ENTRY %e (p: f32[512,512]) -> (f32[512,512], f32[512,512]) {
  %p = f32[512,512]{1,0} parameter(0), metadata={op_name="w" source_file="SECRET" source_line=1}
  %copy = f32[512,512]{0,1} copy(%p), metadata={op_name="a/b" source_file="SECRET" source_line=1}
  %copy.2 = f32[512,512]{0,1} copy(%p), metadata={op_name="a/c" source_file="LINK" source_line=1}
  ROOT %t = (f32[512,512]{0,1}, f32[512,512]{0,1}) tuple(%copy, %copy.2)
}
"""

STAGES = (
    "before_optimizations",
    "0001.one.after_algsimp.before_dce",
    "0002.two.after_dce.before_layout-assignment",
    "after_codegen",
)


@dataclass(frozen=True)
class Watched:
    """What a run of the command asked of the system."""

    code: int
    stdout: str
    stderr: str
    events: Sequence[tuple[str, str, Any, int]]

    def named(self, *names: str) -> list[str]:
        return [event[1] for event in self.events if event[0].startswith(names)]

    def opened(self) -> list[Path]:
        return [Path(path) for path in self.named("open")]

    def written(self) -> list[str]:
        flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        return [event[1] for event in self.events if event[0] == "open" and (event[3] or 0) & flags]


def watch(arguments: Sequence[str], cwd: Path, tmp_path: Path) -> Watched:
    events = tmp_path / "events.json"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", WATCH, json.dumps(list(arguments))],
        cwd=cwd,
        env={**os.environ, "EVENTS": str(events), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    found = json.loads(events.read_text())
    return Watched(found["code"], ended.stdout, ended.stderr, [*map(tuple, found["events"])])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A repository with dumps that name files in and out of it, and modules that nobody may
    import, everywhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.py").write_text("SECRET = 1  # hlo-audit: ignore[HLA002] do not tell\n" * 9)
    here = tmp_path / "here"
    (here / ".git").mkdir(parents=True)
    (here / "src").mkdir()
    (here / "src" / "link.py").symlink_to(outside / "secret.py")
    for folder in ("dump", "other"):
        dump = here / folder
        dump.mkdir()
        for number, stage in enumerate(STAGES):
            text = SOURCES.replace("SECRET", str(outside / "secret.py"))
            text = text.replace("LINK", "/elsewhere/src/link.py")
            text = text.replace("a/c", f"a/{folder}") if number > 1 else text
            (dump / f"module_0001.jit_step.{stage}.txt").write_text(text)
    for beside in (here, here / "dump", here / "src"):
        for name in PLANTED:
            (beside / f"{name}.py").write_text("raise SystemExit('imported what lies about')\n")
    return here


COMMANDS = {
    "check": ["check", "dump", "--max", "relayout-copy=9"],
    "check, every format": ["check", "dump", "--format", "sarif"],
    "introduced by": ["check", "dump", "--introduced-by", "--format", "markdown"],
    "against": ["check", "dump", "--against", "other", "--exit-zero"],
    "passes": ["passes", "dump", "--finding", "1"],
    "diff": ["diff", "dump", "other", "--force"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_of_a_dump_is_run_and_nothing_outside_of_it_is_read(
    name: str, place: Path, tmp_path: Path
) -> None:
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    ran = watch(COMMANDS[name], place, tmp_path)
    assert ran.code == 0, ran.stderr
    opened = [path for path in ran.opened() if path.is_absolute() or (place / path).exists()]
    own = [path for path in map(place.joinpath, opened) if path.is_relative_to(tmp_path)]
    assert any("module_0001" in path.name for path in own)
    dumped = {path for path in own if path.parent.name in ("dump", "other")}
    assert all(path.name.startswith("module_") or path.name == MANIFEST_NAME for path in dumped)
    assert set(own) - dumped <= {tmp_path / "events.json"}, "it read what the dump names"
    for planted in PLANTED:
        assert not any(path.stem == planted for path in own)
    assert {Path(path) for path in ran.written()} & set(own) <= {tmp_path / "events.json"}
    # A diff makes a temporary folder for what may have to be compiled.
    harmful = ran.named("subprocess.", "os.", "socket.", "shutil.", "webbrowser.")
    assert [event for event in harmful if tempfile.gettempdir() not in event] == []
    assert [event for event in harmful if str(tmp_path) in event] == []
    after = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    after.pop(tmp_path / "events.json")
    assert after.keys() == before.keys()
    assert "imported" not in ran.stderr
    assert "do not tell" not in ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("start", [["-m", "hlo_audit"], ["-P", "-m", "hlo_audit"]])
def test_what_lies_in_the_working_directory_is_not_imported(place: Path, start: list[str]) -> None:
    for arguments in (["check", "dump"], ["passes", "dump"], ["doctor"]):
        ended = subprocess.run(
            [sys.executable, *start, *arguments],
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
        assert "imported" not in ended.stderr


@pytest.mark.parametrize("file", ["/etc/passwd", "../secret.py", "src/link.py", "a/src/link.py"])
def test_a_source_line_leads_nowhere_out_of_the_repository(
    file: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    read = Path.read_bytes

    def watched(path: Path) -> bytes:
        opened.append(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", watched)
    found = Repository(place).place(SourceLocation(file, 1))
    assert not found.in_repository
    assert opened == []


def test_many_lines_of_one_file_read_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("pass\n" * 50)
    count = 0
    read = Path.read_bytes

    def watched(path: Path) -> bytes:
        nonlocal count
        count += 1
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", watched)
    repository = Repository(tmp_path)
    places = [repository.place(SourceLocation("train.py", line)) for line in range(1, 99)]
    assert sum(place.in_repository for place in places) == 50
    assert count == 1


# -- names

HOSTILE = [
    "\x1b[31mred\x1b[0m\x9b31m",
    "\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]0;title\x07\x08\x08\r\x0b\x0c\x7f",
    "[link=https://evil.example]click[/link] [bold red]loud[/]",
    "[/] [[ \\[",
    "\u202edesrever\u2066\u200b\ufeff\u2028\u2029",
    "nul\x00 lone\ud800",
    "x\n::error::owned\r\n##[error]owned",
    "%0A::error::owned",
    "]]>--><!--",
    "</script><script>alert(1)</script>",
    "</details></code><img src=x onerror=alert(1)>\"' onload=alert(1)",
    "`code` ``two`` | cell \\| @user #1 GH-1",
    "[l](javascript:alert(1)) ![i](https://evil.example/i.png) <https://evil.example>",
    "javascript:alert(1)//",
    "file:///etc/passwd",
    "hlo-audit: error: owned",
    ":boom: {0} ${{ github.token }} %s {x}",
]


def is_plain(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


def finding(name: str) -> Finding:
    return Finding(
        rule="HLA002",
        slug="relayout-copy",
        severity="warning",
        message=name,
        instruction=name,
        computation=name,
        opcode=name,
        shape=name,
        bytes=512,
        executions=1,
        estimated_cycles=100,
        op_name=f"a/{name}",
        source=SourceLocation(f"/x/{name}", 1, name),
        stack=(SourceLocation(name, 2, name),),
        details={"place": name},
        fixes=(),
        introduced_by=name,
    )


def report(name: str) -> Report:
    programs = (
        ProgramAudit(
            name,
            rules=ALL_RULES,
            findings=(finding(name),),
            settings={name: name},
            xla_flags={name: name},
            versions={"jax": name},
            skipped={"HLA003": name},
            module=name,
            mode=name,
            layout=name,
            topology=name,
        ),
        ProgramAudit(name, error=CompileError(name, hint=name, log=(name,))),
    )
    return Report(programs, judge(programs, {"HLA002": 0}), {"python": name})


def terminal() -> Console:
    """One with colours and links, as a reader has it."""
    file = io.StringIO()
    return Console(file=file, width=100, force_terminal=True, color_system=None, highlight=False)


def shown_on(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    # Its own styles are the only escapes that there may be.
    return re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_do_not_steer_a_terminal(name: str) -> None:
    console = terminal()
    print_report(console, report(name), show_all=True)
    text = shown_on(console)
    assert is_plain(text)
    assert "HLA002 relayout-copy" in text


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_in_json_are_what_they_were_and_no_bytes_that_act(name: str) -> None:
    text = render_json(report(name))
    assert is_plain(text)
    assert text.isascii()
    program = json.loads(text)["programs"][0]
    assert program["findings"][0]["message"] == name
    assert program["settings"] == {name: name}


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_in_a_notebook_are_text(name: str) -> None:
    parser = _Tags()
    html = report_html(report(name))
    parser.feed(html)
    parser.close()
    assert is_plain(html)
    known = {"div", "table", "thead", "tbody", "tr", "th", "td", "p", "b", "ul", "li", "code"}
    assert parser.tags <= {*known, "pre", "span"}
    assert parser.attributes <= {"style", "title"}


def quoted(name: str) -> str:
    """As it can stand in the metadata of a text."""
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def named_dump(folder: Path, name: str) -> Path:
    folder.mkdir()
    identifier = "".join(char for char in name if char not in " ,\n\r\t/\0(){}=%") or "x"
    text = SOURCES.replace("SECRET", quoted(name)).replace("a/b", f"a/{quoted(name)}")
    for stage in STAGES:
        path = folder / f"module_0001.jit_step.{stage}.txt"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    manifest = Manifest(
        program=name,
        mode="auto",
        layout=identifier,
        platform="tpu",
        topology=name,
        mesh={name: 4},
        settings={name: name},
        xla_flags={name: name},
        versions={"jax": name},
        module="jit_step",
        devices=4,
        lower_seconds=0.0,
        compile_seconds=0.0,
        digest="",
    )
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest.to_json()))
    return folder


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_in_passes_and_diffs_are_text(name: str, tmp_path: Path) -> None:
    dump = named_dump(tmp_path / "dump", name)
    other = named_dump(tmp_path / "other", f"other {name}")
    for path in other.glob("*.after_codegen.txt"):
        path.write_text(path.read_text(errors="replace").replace("{0,1}", "{1,0}"))
    histories = read_histories([Recorded(dump)], ALL_RULES)
    assert histories[0].timeline is not None, histories[0].audit.error
    console = terminal()
    print_passes(console, histories, [name], None, show_all=True)
    assert is_plain(shown_on(console))
    assert is_plain(render_passes_json(histories, [name], None))
    diff = diff_subjects([Recorded(dump), Recorded(other)], ALL_RULES, force=True)
    for renamed in (diff, replace(diff, a=replace(diff.a, name=name))):
        console = terminal()
        print_diff(console, renamed)
        assert is_plain(shown_on(console))
        assert "evil.example\x1b" not in shown_on(console)
        assert is_plain(render_diff_json(renamed, {}))


@pytest.mark.slow
def test_names_in_error_lines_are_text(tmp_path: Path) -> None:
    names = [name for name in HOSTILE if "\0" not in name and "\ud800" not in name]
    for number, name in enumerate(names):
        file = tmp_path / f"{name.replace('/', '')[:40]}{number}.txt"
        file.write_text(f"HloModule {name}\n\n{name}")
    arguments = [str(path) for path in tmp_path.iterdir()]
    hostile = "\x1b[31m::error::\n"
    for more in ([], ["--baseline", hostile], ["--max", f"{hostile}=1"], ["--config", hostile]):
        ended = subprocess.run(
            [sys.executable, "-m", "hlo_audit", "check", *arguments, *more],
            capture_output=True,
            check=False,
            timeout=120,
        )
        assert ended.returncode == 2
        text = ended.stderr.decode()
        assert is_plain(text)
        assert all(line.startswith("hlo-audit: error: ") for line in text.splitlines())


# -- what SECURITY.md says


def test_the_bounds_that_are_documented_are_those_that_hold() -> None:
    from hlo_audit import dump, serialised

    text = (Path(hlo_audit.__file__).parent.parent / "SECURITY.md").read_text()
    for bound in (
        f"{dump.MAX_MODULE_BYTES >> 30} GiB",
        f"{dump.MAX_UNPACKED_TIMES} times its size",
        f"{dump.UNPACKED_BYTES_ALLOWED >> 20} MiB",
        f"{serialised._MEMORY_BYTES >> 30} GiB and {serialised._MEMORY_TIMES} times",
        f"{serialised._SECONDS} seconds and {serialised._SECONDS_PER_MB} for each megabyte",
    ):
        assert bound in " ".join(text.split()), bound


def test_a_folder_of_python_is_no_dump(tmp_path: Path) -> None:

    (tmp_path / "train.py").write_text("raise SystemExit('run')")
    with pytest.raises(DumpError):
        audit_recorded(tmp_path, ALL_RULES, {})
