"""The config: ``hlo-audit.toml``, or the table ``[tool.hlo-audit]`` of ``pyproject.toml``.

What it may hold stands in :data:`TEMPLATE`. Everything is checked as it is read, and an error names
the key and the line.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hlo_audit.budget import Budget, override, read_budgets
from hlo_audit.errors import HloAuditError, UsageError, unknown_name
from hlo_audit.program import MODES, Mode, Platform, Setting
from hlo_audit.program_audit import RuleOptions
from hlo_audit.rule import Rule, find_rule
from hlo_audit.suppressions import Suppression
from hlo_audit.toml_lines import KeyPath, find_lines, line_of
from hlo_audit.whole_file import read_text_within

CONFIG_NAME = "hlo-audit.toml"
PYPROJECT_NAME = "pyproject.toml"

_MOST_BYTES = 16 << 20

_T = TypeVar("_T")


FUNCTION_IN_FILE = re.compile(r"(.+\.py)(:\w+)")
"""The name of a function in a file: the file and the rest."""


class ConfigError(HloAuditError):
    """A config that cannot be read, or says what cannot be."""

    kind = "usage"


@dataclass(frozen=True)
class Ways:
    """How programs are compiled; what is empty is left to the program or to the top of the config.

    Attributes:
        meshes: axis name -> size each.
        settings: as they stand in the config.
    """

    modes: tuple[Mode, ...] = ()
    layouts: tuple[str, ...] = ()
    topologies: tuple[str, ...] = ()
    meshes: tuple[Mapping[str, int], ...] = ()
    platform: Platform | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    xla_flags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ConfiguredProgram:
    """A program that the config names.

    Attributes:
        name: as ``hlo-audit check`` takes it; a path is relative to the folder of the config.
        where: file and line of it.
        ways: its own, without what stands at the top of the config.
        budgets: its own; they replace those at the top, rule by rule.
        ignore: codes of the rules that are not applied to it.
    """

    name: str
    where: str
    ways: Ways = field(default_factory=Ways)
    budgets: tuple[Budget, ...] = ()
    ignore: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Config:
    """A config that was read; the one without a file says nothing.

    Attributes:
        path: the file, ``None`` for none.
        programs: in their order.
        ways: of all programs, where they do not say otherwise.
        select, ignore: codes of rules.
        options: thresholds of rules.
        budgets: of all programs.
        baseline: the baseline file.
        strict: whether slack and unused suppressions fail.
        suppressions: in their order.
    """

    path: Path | None = None
    programs: tuple[ConfiguredProgram, ...] = ()
    ways: Ways = field(default_factory=Ways)
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    options: RuleOptions = field(default_factory=dict)
    budgets: tuple[Budget, ...] = ()
    baseline: Path | None = None
    strict: bool = False
    suppressions: tuple[Suppression, ...] = ()

    @property
    def folder(self) -> Path:
        """What paths in it are relative to."""
        return self.path.parent if self.path is not None else Path()

    def name_here(self, program: ConfiguredProgram) -> str:
        """The name of a program, if it is a path as seen from the working directory."""
        function = FUNCTION_IN_FILE.fullmatch(program.name)
        path, rest = function.groups() if function is not None else (program.name, "")
        whole = self.folder / path
        if function is not None or _exists(whole):
            return os.path.relpath(whole) + rest
        return program.name

    def program(self, name: str) -> ConfiguredProgram | None:
        """The program that is called ``name`` in the working directory, or what holds it: a dump of
        several modules is audited as several programs."""
        wanted = _normal(name)
        for program in self.programs:
            here = _normal(self.name_here(program))
            if wanted == here or wanted.startswith(here + os.sep):
                return program
        return None

    def budgets_of(self, program: ConfiguredProgram | None) -> tuple[Budget, ...]:
        """The budgets of a program: its own, and for other rules those of all programs."""
        return override(self.budgets, program.budgets if program is not None else ())


def _normal(name: str) -> str:
    """A name as all ways to write the same path have it."""
    function = FUNCTION_IN_FILE.fullmatch(name)
    path, rest = function.groups() if function is not None else (name, "")
    return os.path.normpath(path) + rest


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def find_config(folder: Path) -> Path | None:
    """The config that is nearest: in ``folder`` or the first of its parents that has one.

    ``hlo-audit.toml`` goes before ``pyproject.toml``, and that counts only with a table
    ``[tool.hlo-audit]``.

    Raises:
        ConfigError: for a ``pyproject.toml`` that speaks of hlo-audit and cannot be read.
    """
    folder = folder.resolve()
    for parent in (folder, *folder.parents):
        if (parent / CONFIG_NAME).is_file():
            return parent / CONFIG_NAME
        pyproject = parent / PYPROJECT_NAME
        if pyproject.is_file() and _table_of(pyproject) is not None:
            return pyproject
    return None


def read_config(path: Path, rules: Sequence[Rule]) -> Config:
    """Read a config.

    Args:
        path: ``pyproject.toml`` or a file of any other name; the first has its keys in a table.
        rules: those that it may name.

    Raises:
        ConfigError: names the file, the line and the key.
    """
    found = _table_of(path)
    if found is None:
        raise ConfigError(f"{path} has no table [tool.hlo-audit]")
    table, prefix, text = found
    return _Reading(path, rules, find_lines(text), prefix).config(table)


def _table_of(path: Path) -> tuple[Mapping[str, Any], KeyPath, str] | None:
    """The table of a file with the keys that lead to it, and the file's text."""
    is_pyproject = path.name == PYPROJECT_NAME
    try:
        try:
            text = read_text_within(path, _MOST_BYTES)
        except ValueError as error:
            raise ConfigError(f"cannot read the config {path}: {error}") from None
        if is_pyproject and "hlo-audit" not in text:
            return None
        data = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    if not is_pyproject:
        return data, (), text
    tool = data.get("tool")
    if not isinstance(tool, dict) or "hlo-audit" not in tool:
        return None
    prefix: KeyPath = ("tool", "hlo-audit")
    table = tool["hlo-audit"]
    if not isinstance(table, dict):
        line = line_of(find_lines(text), prefix)
        raise ConfigError(f"{path}:{line}: tool.hlo-audit is no table")
    return table, prefix, text


class _Reading:
    """The reading of one config; each method reads the value of a key, or complains of it."""

    def __init__(
        self, path: Path, rules: Sequence[Rule], lines: Mapping[KeyPath, int], prefix: KeyPath
    ) -> None:
        self.path = path
        self.rules = rules
        self.lines = lines
        self.prefix = prefix

    def config(self, table: Mapping[str, Any]) -> Config:
        own = ("programs", "select", "ignore", "rule-options", "max", "baseline", "strict")
        self._check_keys((), table, (*_WAYS, *own, "suppress"))
        programs = self._list(("programs",), table.get("programs", []), self._program)
        for number, program in enumerate(programs):
            if any(program.name == other.name for other in programs[:number]):
                self._refuse(("programs", number), f"{program.name!r} is there twice")
        baseline = table.get("baseline")
        return Config(
            path=self.path,
            programs=programs,
            ways=self._ways((), table),
            select=self._list(("select",), table.get("select", []), self._rule_code),
            ignore=self._list(("ignore",), table.get("ignore", []), self._rule_code),
            options=self._rule_options(("rule-options",), table.get("rule-options", {})),
            budgets=self._budgets(("max",), table.get("max", {})),
            baseline=None if baseline is None else self._file(("baseline",), baseline),
            strict=self._typed(("strict",), table.get("strict", False), bool, "true or false"),
            suppressions=self._list(("suppress",), table.get("suppress", []), self._suppression),
        )

    def where(self, path: KeyPath) -> str:
        return f"{self.path}:{line_of(self.lines, (*self.prefix, *path))}"

    def _refuse(self, path: KeyPath, problem: str, hint: str | None = None) -> NoReturn:
        key = ""
        for part in path:
            key += f"[{part}]" if isinstance(part, int) else f"{'.' if key else ''}{part}"
        raise ConfigError(f"{self.where(path)}: {key}: {problem}", hint=hint)

    def _reading(self, path: KeyPath, read: Callable[[], _T]) -> _T:
        """What ``read`` returns; what it complains of is an error of the key."""
        try:
            return read()
        except UsageError as error:
            self._refuse(path, error.message, error.hint)

    def _check_keys(self, path: KeyPath, table: Mapping[str, Any], known: Iterable[str]) -> None:
        choices = list(known)
        for key in table:
            if key not in choices:
                error = unknown_name("key", key, choices)
                self._refuse((*path, key), "there is no such key", error.hint)

    def _typed(self, path: KeyPath, value: Any, kind: type[_T], said: str) -> _T:
        if type(value) is not kind:
            self._refuse(path, f"{_shown(value)} is not {said}")
        assert isinstance(value, kind)
        return value

    def _text(self, path: KeyPath, value: Any) -> str:
        text = self._typed(path, value, str, "a text")
        if not text.strip():
            self._refuse(path, "it is empty")
        return text

    def _table(self, path: KeyPath, value: Any) -> Mapping[str, Any]:
        return self._typed(path, value, dict, "a table")

    def _list(
        self, path: KeyPath, value: Any, read: Callable[[KeyPath, Any], _T]
    ) -> tuple[_T, ...]:
        items = self._typed(path, value, list, "a list")
        return tuple(read((*path, number), item) for number, item in enumerate(items))

    def _choice(self, path: KeyPath, value: Any, choices: Sequence[_T]) -> _T:
        chosen = next((choice for choice in choices if choice == value), None)
        if chosen is None:
            self._refuse(path, f"{_shown(value)} is not one of {', '.join(map(str, choices))}")
        return chosen

    def _file(self, path: KeyPath, value: Any) -> Path:
        return self.path.parent / self._text(path, value)

    def _rule(self, path: KeyPath, value: Any) -> Rule:
        name = self._text(path, value)
        return self._reading(path, lambda: find_rule(self.rules, name))

    def _rule_code(self, path: KeyPath, value: Any) -> str:
        return self._rule(path, value).code

    # -- how to compile

    def _ways(self, path: KeyPath, table: Mapping[str, Any]) -> Ways:
        def listed(key: str, read: Callable[[KeyPath, Any], _T]) -> tuple[_T, ...]:
            return self._list((*path, key), table.get(key, []), read)

        platforms: tuple[Platform, ...] = ("tpu", "cpu")
        platform = table.get("platform")
        return Ways(
            modes=listed("modes", lambda where, value: self._choice(where, value, MODES)),
            layouts=listed("layouts", self._text),
            topologies=listed("topologies", self._text),
            meshes=listed("meshes", self._mesh),
            platform=None
            if platform is None
            else self._choice((*path, "platform"), platform, platforms),
            settings=self._pairs((*path, "settings"), table.get("settings", {}), _SETTING),
            xla_flags={
                name: _flag(value)
                for name, value in self._pairs(
                    (*path, "xla-flags"), table.get("xla-flags", {}), _SETTING
                ).items()
            },
        )

    def _mesh(self, path: KeyPath, value: Any) -> Mapping[str, int]:
        mesh = self._pairs(path, value, (int,))
        for axis, size in mesh.items():
            if not axis.isidentifier():
                self._refuse((*path, axis), "an axis has the name of a variable")
            if size != -1 and size < 1:
                self._refuse((*path, axis), f"{size} is no size: 1 or more, or -1 for the rest")
        if not mesh:
            self._refuse(path, "a mesh has one axis or more")
        return mesh

    def _pairs(self, path: KeyPath, value: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
        table = self._table(path, value)
        for key, item in table.items():
            if type(item) not in kinds:
                names = " or ".join(_KINDS[kind] for kind in kinds)
                self._refuse((*path, key), f"{_shown(item)} is not {names}")
        return dict(table)

    # -- programs

    def _program(self, path: KeyPath, value: Any) -> ConfiguredProgram:
        if isinstance(value, str):
            return ConfiguredProgram(self._text(path, value), self.where(path))
        table = self._typed(path, value, dict, "a name or a table")
        self._check_keys(path, table, ("name", *_WAYS, "max", "ignore"))
        if "name" not in table:
            self._refuse(path, "it has no name", "such as name = 'train.py:step'")
        ignore = self._list((*path, "ignore"), table.get("ignore", []), self._rule_code)
        return ConfiguredProgram(
            name=self._text((*path, "name"), table["name"]),
            where=self.where(path),
            ways=self._ways(path, table),
            budgets=self._budgets((*path, "max"), table.get("max", {})),
            ignore=frozenset(ignore),
        )

    # -- rules

    def _rule_options(self, path: KeyPath, value: Any) -> RuleOptions:
        options: dict[str, dict[str, int]] = {}
        for name, of_rule in self._table(path, value).items():
            rule = self._rule((*path, name), name)
            for key, number in self._table((*path, name), of_rule).items():
                where = (*path, name, key)
                self._check_keys((*path, name), {key: number}, rule.options)
                if type(number) is not int or number < 0:
                    self._refuse(where, f"{_shown(number)} is not a number of at least 0")
                options.setdefault(rule.code, {})[key] = number
        return options

    def _budgets(self, path: KeyPath, value: Any) -> tuple[Budget, ...]:
        budgets: list[Budget] = []
        for name, limits in self._table(path, value).items():
            where = (*path, name)
            rule = self._rule(where, name)
            pairs = []
            for limit in limits if isinstance(limits, list) else [limits]:
                if type(limit) not in (int, str):
                    self._refuse(where, f"{_shown(limit)} is not a number or a text")
                pairs.append((rule.code, str(limit)))
            budgets += self._reading(where, partial(read_budgets, pairs, self.rules))
        return tuple(budgets)

    def _suppression(self, path: KeyPath, value: Any) -> Suppression:
        table = self._table(path, value)
        texts = ("fingerprint", "rule", "op-name", "source", "program", "reason")
        self._check_keys(path, table, texts)
        given = {key: self._text((*path, key), item) for key, item in table.items()}
        if "reason" not in given:
            self._refuse(path, "it has no reason", "say why it may stay")
        by_pattern = "rule" in given and ("op-name" in given or "source" in given)
        if "fingerprint" not in given and not by_pattern:
            self._refuse(
                path,
                "it does not say which finding",
                "give its fingerprint, or a rule with op-name or source",
            )
        rules: frozenset[str] = frozenset()
        if "rule" in given:
            rules = frozenset({self._rule_code((*path, "rule"), given["rule"])})
        return Suppression(
            by="config",
            where=self.where(path),
            reason=given["reason"],
            rules=rules,
            fingerprint=given.get("fingerprint"),
            op_name=given.get("op-name"),
            source=given.get("source"),
            program=given.get("program"),
        )


_WAYS = ("modes", "layouts", "topologies", "meshes", "platform", "settings", "xla-flags")

_SETTING = (int, float, bool, str)

_KINDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _flag(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


TEMPLATE = """\
# What `hlo-audit check` does in this folder and below. Options on the command line win.
# The same keys may stand in pyproject.toml, in the table [tool.hlo-audit].
# Rules are named by code or slug: see `hlo-audit rules`.

# What to audit: functions, reference models, dump folders and HLO files. A function takes a mesh
# and returns (jitted step, its abstract arguments). Paths are relative to this file.
# programs = ["train.py:train_step", "lm-head"]

# How to compile them. Layouts are of reference models, meshes are for functions.
# modes = ["auto", "explicit"]
# topologies = ["v5p:2x2x1"]
# meshes = [{ fsdp = 4 }]
# layouts = ["all"]
# platform = "tpu"
# xla-flags = { xla_tpu_enable_latency_hiding_scheduler = true }

# Which rules, and from which size on.
# select = ["relayout-copy", "missed-reduce-scatter"]
# ignore = ["sharding-custom-call"]
# rule-options = { relayout-copy = { min_bytes = 65536 } }

# The gate: known findings, written by `hlo-audit check --update-baseline`; a new one fails.
# With strict, a baseline that could be tighter and a suppression without a use fail too.
# baseline = "hlo-audit-baseline.json"
# strict = false

# Budgets: findings (0), bytes ("64MiB"), or more than the baseline has ("+1", "+8MiB", "+10%").
# [max]
# relayout-copy = 0
# missed-reduce-scatter = "64MiB"

# A program with ways, budgets and ignored rules of its own, in place of a name in `programs`:
# [[programs]]
# name = "train.py:train_step"
# topologies = ["v5p:2x2x1", "v6e:2x2"]
# meshes = [{ data = 2, fsdp = 2 }]
# settings = { embed = 512 }
# max = { relayout-copy = ["0", "0B"] }
# ignore = ["HLA001"]

# A finding that may stay, by its fingerprint (in --format json), or by rule and place; * is any
# text. On the line itself: # hlo-audit: ignore[HLA002] reason
# [[suppress]]
# rule = "relayout-copy"
# op-name = "jit(train_step)/*/transpose"
# source = "models/attention.py*"
# reason = "the cache is read in this order"
"""
"""A config with every key, all of them in comments: what ``hlo-audit init`` writes."""
