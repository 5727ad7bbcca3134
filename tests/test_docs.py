"""The documentation is of this version: generated pages are fresh, README and CI agree."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from hlo_audit.cli import cli

TOP = Path(__file__).parent.parent
README = (TOP / "README.md").read_text()


def test_the_pages_of_the_rules_are_generated_from_them() -> None:
    pages = runpy.run_path(str(TOP / "scripts" / "make_docs.py"))["pages"]()
    for path, text in pages.items():
        assert path.read_text() == text, "run scripts/make_docs.py"
    assert sorted((TOP / "docs" / "rules").iterdir()) == sorted(pages)


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_every_command_stands_in_the_readme(command: str) -> None:
    assert f"hlo-audit {command}" in README


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("hlo-audit check lm-head")
    assert commands[1].endswith("pytest -n auto")
    assert "grep -m 1 '^python3 -m venv .*pytest' README.md" in (TOP / ".ci" / "run").read_text()


def test_the_changelog_has_the_version() -> None:
    from hlo_audit import __version__

    assert f"## {__version__}" in (TOP / "CHANGELOG.md").read_text()
