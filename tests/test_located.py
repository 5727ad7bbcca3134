"""Python lines in the terminal, and what a click on them may open."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from hlo_audit.hlo import SourceLocation
from hlo_audit.report.located import located


def printed(file: str | Path, *, terminal: bool = True) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=500,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
    )
    console.print(located(SourceLocation(str(file), 7, "step")))
    return stream.getvalue()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    top = tmp_path / "checkout"
    (top / ".git").mkdir(parents=True)
    (top / "my train.py").write_text("x = 1\n")
    monkeypatch.chdir(top)
    return top


@pytest.mark.parametrize("relative", [True, False])
def test_a_file_of_the_repository_opens_at_its_line(checkout: Path, relative: bool) -> None:
    file = checkout / "my train.py"
    text = printed("my train.py" if relative else file)
    assert f";{file.as_uri()}#7\x1b\\" in text
    assert "my%20train.py" in text
    assert "my train.py:7 in step" in text


def test_no_terminal_no_link(checkout: Path) -> None:
    assert printed("my train.py", terminal=False) == "my train.py:7 in step\n"


def test_nothing_else_is_linked(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("")
    (checkout / "run.desktop").write_text("")
    (checkout / "in.py").symlink_to(tmp_path / "outside.py")
    (checkout / "loop.py").symlink_to("loop.py")
    (checkout / "folder.py").mkdir()
    others = (
        "gone.py",
        "run.desktop",
        "../outside.py",
        tmp_path / "outside.py",
        "in.py",
        "loop.py",
    )
    for file in (*others, "folder.py", "/etc/passwd", "a\0b.py", "file:///etc/passwd.py", ""):
        assert "\x1b]8" not in printed(file), file
