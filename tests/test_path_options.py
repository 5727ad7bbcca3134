"""Paths on the command line: an empty one, and ``-``, of every option of every command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import click
import pytest

from hlo_audit.cli import cli
from hlo_audit.cli.paths import PathType
from hlo_audit.errors import UsageError


def commands(
    group: click.Group = cli, names: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*names, name))
        else:
            yield (*names, name), command


PATHS = [
    (names, parameter)
    for names, command in commands()
    for parameter in command.params
    if isinstance(parameter.type, click.Path) or parameter.name == "outputs"
]
FILES = [one for one in PATHS if isinstance(one[1].type, PathType) and not one[1].type.dash]


def called(names: tuple[str, ...], parameter: click.Parameter, value: str) -> list[str]:
    """A call with this value; its program is not there, which is told later than the value."""
    if isinstance(parameter, click.Argument):
        return [*names, value]
    command = dict(commands())[names]
    required = [one for one in command.params if isinstance(one, click.Argument) and one.required]
    option = max(parameter.opts, key=len)
    return [*names, *(["no/such/program"] if required else []), f"{option}={value}"]


def shown(value: object) -> str:
    return value.opts[-1] if isinstance(value, click.Parameter) else " ".join(map(str, value))  # type: ignore[call-overload]


def test_paths_are_of_the_one_type_that_looks_at_them() -> None:
    assert len(PATHS) > 20
    for _, parameter in PATHS:
        assert isinstance(parameter.type, PathType) or parameter.name == "outputs"


@pytest.mark.parametrize(("names", "parameter"), PATHS, ids=shown)
def test_an_empty_path_is_refused(
    names: tuple[str, ...],
    parameter: click.Parameter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        cli.main(called(names, parameter, ""), standalone_mode=False)
    option = max(parameter.opts, key=len) if isinstance(parameter, click.Option) else "REPORT"
    assert str(caught.value) == f"{option} is empty (is a variable not set?)"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("names", "parameter"), FILES, ids=shown)
def test_a_dash_is_refused_where_it_stands_for_nothing(
    names: tuple[str, ...],
    parameter: click.Parameter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"is -, which stands for no (file|folder) here"):
        cli.main(called(names, parameter, "-"), standalone_mode=False)


def test_a_file_of_the_name_of_a_stream_can_be_given() -> None:
    kinds: tuple[Literal["input", "output", "folder"], ...] = ("input", "output", "folder")
    for kind in kinds:
        given = PathType(kind, dash=kind != "folder").convert("./-", None, None)
        assert given == Path.cwd() / "-"


def test_options_are_alike_in_all_commands() -> None:
    helps: dict[str, set[str | None]] = {}
    for names, command in commands():
        for option in command.params:
            if not isinstance(option, click.Option):
                continue
            name = max(option.opts, key=len)
            assert ("-o" in option.opts) == (name == "--output"), names
            assert name == "--format" or option.help, (names, name)
            if option.multiple:
                assert "may be repeated" in (option.help or "").lower().replace("\n", " "), name
            helps.setdefault(name, set()).add(option.help)
    assert len(helps["--cache-dir"]) == len(helps["--timeout"]) == 1


def test_an_output_that_names_a_format_alone_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--output json=: no file is named \(is a variable"):
        cli.main(["check", "no/such/program", "--output", "json="], standalone_mode=False)


def test_a_dash_is_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        "HloModule m, is_scheduled=true\n\nENTRY %e (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0} parameter(0)\n  ROOT %n = f32[8]{0} negate(%p)\n}\n"
    )
    Path("m.txt").write_text(text)
    for command in (
        ("check", "m.txt", "--format", "json", "--output", "-"),
        ("check", "m.txt", "--output", "json=-"),
        ("diff", "m.txt", "m.txt", "--format", "json", "--output", "-"),
        ("report", "m.txt", "--output", "-"),
    ):
        with contextlib.suppress(SystemExit):
            cli.main([*command], standalone_mode=False)
        assert capsys.readouterr().out.startswith(("{", "<!DOCTYPE html>")), command
    assert [path.name for path in tmp_path.iterdir()] == ["m.txt"]
