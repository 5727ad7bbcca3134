"""``hlo-audit report``: where the page goes, its exit codes, and what it says in a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import assert_refused, invoke
from html_pages import Page, dump_of, module_file, written


def test_the_command_writes_a_page_without_jax(both_modes: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    code = f"""
import sys
sys.argv = ["hlo-audit", "report", {str(both_modes[1])!r}, "-o", {str(output)!r}]
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


def test_the_gate_decides_the_exit_code(both_modes: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    final = next(both_modes[1].glob("*.after_codegen.txt"))
    result = invoke("report", final, "--max", "HLA002=3", "-o", output)
    assert result.returncode == 1
    assert "gate failed" in result.stderr
    assert result.stdout == ""
    assert Page(output.read_text()).root.one("h1").text == "✗ Gate failed"
    result = invoke("report", final, "--max", "HLA002=3", "--exit-zero", "-o", output)
    assert result.returncode == 0
    result = invoke("report", final, "--max", "HLA002=4", "-o", output)
    assert result.returncode == 0
    assert "within budget" in Page(output.read_text()).root.one("h1").text


def test_a_damaged_snapshot_that_no_rule_reads_is_told_of(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump_of(dump, [[], [], []])
    (damaged,) = dump.glob("*after_pass-1*")
    damaged.write_text(damaged.read_text()[:-20])
    output = tmp_path / "page.html"
    result = invoke("report", dump, "-o", output, "--max", "HLA002=0")
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


def test_without_a_file_the_page_goes_to_standard_output(both_modes: list[Path]) -> None:
    result = invoke("report", next(both_modes[1].glob("*.after_codegen.txt")))
    assert result.returncode == 0
    assert Page(result.stdout).root.one("h1")


def test_a_terminal_gets_no_page(both_modes: list[Path]) -> None:
    primary, secondary = os.openpty()
    try:
        result = subprocess.run(
            [sys.executable, "-m", "hlo_audit", "report", str(both_modes[1])],
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
    arguments: list[str], said: str, both_modes: list[Path], tmp_path: Path
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
    result = invoke("report", *arguments, cwd=tmp_path)
    assert_refused(result, said)
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
    result = invoke("report", "-o", "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "step.txt" in Page((tmp_path / "page.html").read_text()).section("programs").text
    assert "With no PROGRAM" in invoke("report", "--help").stdout
