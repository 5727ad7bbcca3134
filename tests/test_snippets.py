"""The lines of Python that reports quote, and those that no dump can have them quote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hlo_audit.hlo import SourceLocation
from hlo_audit.report.snippets import SourceReader
from hlo_audit.report.sources import Repository
from html_pages import TOP, module_file, written


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
