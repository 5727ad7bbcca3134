"""No text report has blanks at the ends of its lines, on a terminal or in a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hlo_audit.cli import cli
from hlo_audit.report.console import TidyConsole

COMMANDS = {
    "check": ["check", "{explicit}", "{auto}", "--verbose"],
    "passes": ["passes", "{explicit}"],
    "passes-all": ["passes", "{explicit}", "--all"],
    "passes-finding": ["passes", "{explicit}", "--finding", "1"],
    "diff": ["diff", "{auto}", "{explicit}"],
    "explain": ["explain", "HLA002"],
    "rules": ["rules"],
    "models": ["models"],
    "doctor": ["doctor"],
    "cache": ["cache", "info"],
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_line_ends_in_blanks(
    both_modes: list[Path], tmp_path: Path, command: list[str], width: int
) -> None:
    auto, explicit = both_modes
    arguments = [one.format(auto=auto, explicit=explicit) for one in command]
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) > 1
    assert not re.findall(r"^.*[ \t]$", result.stdout, re.MULTILINE)
    if command[0] in ("check", "passes", "diff"):
        path = tmp_path / "report.txt"
        assert CliRunner().invoke(cli, [*arguments, "--output", str(path)]).exit_code == 0
        assert not re.findall(r"^.*[ \t]$", path.read_text(), re.MULTILINE)


@pytest.mark.slow
def test_no_line_of_a_proof_ends_in_blanks() -> None:
    # At the sizes that other tests compile, too.
    options = ["--topology", "v5p:2x2x1", "--mode", "explicit", "--quiet"]
    result = CliRunner().invoke(cli, ["prove", "HLA001", "lm-head", *options])
    assert len(result.stdout.splitlines()) > 5, result.output
    assert not re.findall(r"^.*[ \t]$", result.stdout, re.MULTILINE)


def test_nothing_but_blanks_at_the_ends_is_taken_off() -> None:
    table = Table(box=None)
    for row in (("a", "b"), ("long enough", ""), ("", "x  y")):
        table.add_row(*row)
    for block in (table, Text("one  \n\n  two "), Text(""), Text("x" * 100, style="bold")):
        said = []
        for kind in (Console, TidyConsole):
            console = kind(width=40, highlight=False)
            with console.capture() as capture:
                console.print(block)
                console.print()
            said.append(capture.get())
        plain, tidy = said
        assert tidy == re.sub(r" +$", "", plain, flags=re.MULTILINE)


def test_a_coloured_line_ends_in_no_blanks() -> None:
    console = TidyConsole(width=40, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(Text("red   ", style="red"))
    assert capture.get() == "\x1b[31mred\x1b[0m\n"
