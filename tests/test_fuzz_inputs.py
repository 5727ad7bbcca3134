"""Drawn JSON and TOML of the right form, through the command line.

What is sound is taken for what it says; an instance of a schema whose values contradict each other
is refused in a line, as every damaged file is.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz_cases import FRAMES, Drawn, Outcome, files_written, hold, run_inside, tried, validator
from hlo_audit import __version__
from hlo_audit.manifest import MANIFEST_NAME
from hlo_audit.rules import ALL_RULES
from hlo_modules import Choices, Draw

_NAMES = (
    *("step.txt", "train.py:step", "lm-head", "fsdp", "jax", "a b", ""),
    *("é", "\x1b[31m", "</script>"),
)
_RULES = tuple(rule.code for rule in ALL_RULES)
_LARGE = (0, 1, 7, 4096, 1 << 40, (1 << 63) - 1)
_DIGITS = "0123456789abcdef"


def names(c: Choices) -> str:
    return c.choose((*_NAMES, *c.texts))


_CHOICES = st.builds(
    Choices,
    st.binary(min_size=400, max_size=400),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=3),
)


def outcome_of(files: Mapping[str, str], *arguments: str) -> Outcome:
    drawn = Drawn({name: text.encode() for name, text in files.items()}, list(arguments))
    with files_written(drawn.files, kept=True):
        outcome = run_inside(drawn.arguments)
    hold(drawn, outcome)
    return outcome


# -- instances of a schema


def instance(schema: Mapping[str, Any], top: Mapping[str, Any], c: Choices, depth: int = 0) -> Any:
    """Data that a JSON Schema allows; it knows the keywords that the schemas of this tool use.

    Args:
        top: the whole schema, for its ``$defs``.
    """
    if "$ref" in schema:
        return instance(top["$defs"][schema["$ref"].rpartition("/")[2]], top, c, depth)
    if "oneOf" in schema:
        return instance(c.choose(schema["oneOf"]), top, c, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return c.choose(schema["enum"])
    kinds = schema.get("type", ["null", "integer", "string"])
    kind = c.choose(kinds if isinstance(kinds, list) else [kinds])
    match kind:
        case "object":
            return _object(schema, top, c, depth)
        case "array":
            most = 3 if depth < 4 else 1
            return [
                instance(schema.get("items", {}), top, c, depth + 1)
                for _ in range(c.number(0, most))
            ]
        case "integer":
            return max(schema.get("minimum", 0), c.choose(_LARGE))
        case "number":
            return c.choose((0, 0.5, 1e-9, 1e8))
        case "boolean":
            return c.one_in(2)
        case "string" if "pattern" in schema:
            return _matching(schema["pattern"], c)
        case "string":
            return names(c) or "x" * schema.get("minLength", 0)
        case _:
            assert kind == "null"
            return None


def _object(schema: Mapping[str, Any], top: Mapping[str, Any], c: Choices, depth: int) -> Any:
    known = schema.get("properties", {})
    required = schema.get("required", ())
    found = {
        name: instance(inner, top, c, depth + 1)
        for name, inner in known.items()
        if name in required or c.one_in(2)
    }
    other = schema.get("additionalProperties", False)
    if isinstance(other, dict):
        pattern = schema.get("propertyNames", {}).get("pattern")
        for _ in range(c.number(0, 3)):
            name = _matching(pattern, c) if pattern else names(c)
            if name not in known:
                found[name] = instance(other, top, c, depth + 1)
    return found


def _matching(pattern: str, c: Choices) -> str:
    """A text for one of the patterns that the schemas have: of codes, and of digests."""
    text = c.choose(_RULES)
    if not re.search(pattern, text):
        length = re.fullmatch(r"\^\[0-9a-f\]\{(\d+)\}\$", pattern)
        assert length is not None, pattern
        text = "".join(c.choose(_DIGITS) for _ in range(int(length[1])))
    return text


def schema_of(name: str) -> dict[str, Any]:
    schema = validator(name).schema
    assert isinstance(schema, dict)
    return schema


# -- baselines


@st.composite
def baselines(draw: Draw) -> dict[str, Any]:
    """Of the schema; most often no count in it contradicts what it counts."""
    c = draw(_CHOICES)
    schema = schema_of("baseline.schema.json")
    entries = []
    for _ in range(c.number(0, 3)):
        entry = instance(schema["$defs"]["entry"], schema, c)
        if c.one_in(2):  # of the file that is audited
            nothing = dict.fromkeys(("mode", "layout", "platform", "topology"))
            entry |= {"program": "step.txt", "module": "jit_step", **nothing}
            entry |= {"mesh": {}, "settings": {}, "xla_flags": {}}
        entries.append(entry)
    if not c.one_in(8):
        for entry in entries:
            counts = dict.fromkeys(entry["counts"], 0)
            for finding in entry["findings"]:
                finding["count"] = min(finding["count"], 1_000)
                counts[finding["rule"]] = counts.get(finding["rule"], 0) + finding["count"]
            entry["counts"] = counts
    return {"schema_version": 1, "entries": entries}


def is_sound(baseline: Mapping[str, Any]) -> bool:
    """Whether each count is that of the findings listed."""
    for entry in baseline["entries"]:
        listed = dict.fromkeys(entry["counts"], 0)
        for finding in entry["findings"]:
            listed[finding["rule"]] = listed.get(finding["rule"], 0) + finding["count"]
        if listed != {rule: count or 0 for rule, count in entry["counts"].items()}:
            return False
    return True


def test_a_sound_baseline_is_held_against_and_can_be_brought_up_to_date(
    empty_repository: Path, pytestconfig: pytest.Config
) -> None:
    @tried(pytestconfig, share=8)
    @given(baselines(), st.booleans())
    def holds(baseline: dict[str, Any], is_strict: bool) -> None:
        validator("baseline.schema.json").validate(baseline)
        files = {"step.txt": FRAMES, "b.json": json.dumps(baseline)}
        check = ["check", "step.txt", "--baseline", "b.json"]
        strict = ["--strict"] if is_strict else []
        outcome = outcome_of(files, *check, "--format", "json", *strict)
        assert (outcome.code != 2) == is_sound(baseline), outcome.stderr
        if outcome.code == 2:
            assert "b.json is no baseline" in outcome.stderr
            return
        updated = outcome_of(files, *check, "--update-baseline")
        assert updated.code == 0, updated.stderr
        written = json.loads(Path("b.json").read_text())
        validator("baseline.schema.json").validate(written)
        assert is_sound(written)
        again = outcome_of({"b.json": json.dumps(written)}, *check, "--format", "json", *strict)
        assert again.code == 0, again.stdout

    holds()


# -- manifests


@st.composite
def manifests(draw: Draw) -> dict[str, Any]:
    c = draw(_CHOICES)

    def pairs(values: tuple[Any, ...]) -> dict[str, Any]:
        return {names(c): c.choose(values) for _ in range(c.number(0, 3))}

    found = {
        "schema_version": 1,
        "program": names(c),
        "mode": c.choose(("auto", "explicit")),
        "layout": c.choose((None, names(c))),
        "platform": c.choose(("tpu", "cpu")),
        "topology": c.choose(("v5p:2x2x1", "v6e:2x2", "4", names(c))),
        "mesh": pairs((1, 4, -1, 0, *_LARGE)),
        "settings": pairs((*_LARGE, True, 0.5, -1e300, names(c))),
        "xla_flags": pairs(("true", names(c))),
        "versions": pairs((None, "0.10.2", names(c))),
        "module": "jit_step",  # of another module it says nothing
        "devices": c.choose((1, 4, 0, -1, *_LARGE)),
        "lower_seconds": c.choose((0, 0.25, 1e9)),
        "compile_seconds": c.choose((0, 1.5, 60)),
        "digest": c.choose(("0" * 64, names(c))),
    }
    if c.one_in(3):  # a key of a later version
        found[names(c) + "?"] = [None, {}]
    return found


def test_a_sound_manifest_is_told_in_the_report(
    empty_repository: Path, pytestconfig: pytest.Config
) -> None:
    @tried(pytestconfig, share=6)
    @given(manifests())
    def holds(manifest: dict[str, Any]) -> None:
        files = {
            "dump/module_0001.jit_step.after_codegen.txt": FRAMES,
            f"dump/{MANIFEST_NAME}": json.dumps(manifest),
        }
        outcome = outcome_of(files, "check", "dump", "--format", "json")
        (program,) = json.loads(outcome.stdout)["programs"]
        assert outcome.code in (0, 1), outcome.stderr
        for key in _TOLD:
            assert program[key] == manifest[key], key

    holds()


_TOLD = ("mode", "layout", "platform", "topology", "mesh", "settings", "xla_flags", "versions")


# -- reports


@st.composite
def reports(draw: Draw) -> dict[str, Any]:
    """Of the schema, of this version, and as many timings as programs."""
    c = draw(_CHOICES)
    schema = schema_of("report/schema.json")
    report: dict[str, Any] = instance(schema, schema, c)
    report["tool"]["version"] = __version__
    timing = {"lower_seconds": 0.5, "compile_seconds": 1, "cached": False}
    timings = [c.choose((None, timing)) for _ in report["programs"]]
    report["volatile"] = {**report.get("volatile", {}), "timings": timings}
    return report


def test_a_report_of_the_schema_is_read_or_refused(
    empty_repository: Path, pytestconfig: pytest.Config
) -> None:
    @tried(pytestconfig, share=10)
    @given(reports(), st.booleans())
    def holds(report: dict[str, Any], is_merged: bool) -> None:
        files = {"step.txt": FRAMES, "r.json": json.dumps(report)}
        if is_merged:
            outcome_of(files, "merge", "r.json", "--format", "text")
        else:
            outcome_of(files, "check", "step.txt", "--against", "r.json", "--format", "json")

    holds()


# -- configs


@st.composite
def configs(draw: Draw) -> dict[str, Any]:
    """Configs that can be taken; the programs are files that are there."""
    c = draw(_CHOICES)

    def rule() -> str:
        one = c.choose(ALL_RULES)
        name: str = one.code if c.one_in(2) else one.slug
        return name

    def budgets() -> dict[str, Any]:
        limits: tuple[Any, ...] = (0, 3, "0", "64MiB", "0B", "1.5KiB", [0, "0B"], ["2", "1GiB"])
        return {rule(): c.choose(limits) for _ in range(c.number(0, 2))}

    found: dict[str, Any] = {}
    programs: list[Any] = ["step.txt"]
    if c.one_in(2):
        table: dict[str, Any] = {"name": "other.txt", "max": budgets()}
        table |= {"ignore": [rule()]} if c.one_in(2) else {}
        programs.append(table)
    suppress = []
    for _ in range(c.number(0, 2)):
        one: dict[str, Any] = {"reason": f"r{names(c)}"}
        if c.one_in(2):
            one["fingerprint"] = "".join(c.choose(_DIGITS) for _ in range(16))
        else:
            one |= {"rule": rule(), c.choose(("op-name", "source")): f"{names(c)}*"}
        one |= {"program": f"{names(c)}*"} if c.one_in(3) else {}
        suppress.append(one)
    every = {
        "programs": programs,
        "modes": ["auto"],
        "topologies": ["v5p:2x2x1"],
        "meshes": [{"fsdp": 4}, {"data": 2, "fsdp": -1}],
        "platform": "tpu",
        "settings": {"embed": 512, "rate": 0.5, f"k{names(c)}": names(c), "tied": True},
        "xla-flags": {"xla_some_flag": c.choose((True, 1, "x"))},
        "ignore": [rule() for _ in range(c.number(0, 2))],
        "rule-options": {"relayout-copy": {"min_bytes": c.choose(_LARGE)}},
        "strict": c.one_in(2),
        "max": budgets(),
        "suppress": suppress,
    }
    for place in c.order(len(every)):
        key = list(every)[place]
        if not c.one_in(3):
            found[key] = every[key]
    return found


def toml(config: Mapping[str, Any], prefix: str, c: Choices) -> str:
    """As TOML: what is a table or a list of tables in one way or the other."""
    inline, tables = [], []
    for key, value in config.items():
        if isinstance(value, dict) and c.one_in(2):
            rows = [f"{_key(name)} = {_value(inner)}" for name, inner in value.items()]
            tables.append("\n".join([f"[{prefix}{key}]", *rows]))
        elif key == "suppress" and value and c.one_in(2):
            for one in value:
                rows = [f"{_key(name)} = {_value(inner)}" for name, inner in one.items()]
                tables.append("\n".join([f"[[{prefix}{key}]]", *rows]))
        else:
            inline.append(f"{_key(key)} = {_value(value)}" + " # why" * c.one_in(5))
    head = [f"[{prefix.rstrip('.')}]"] if prefix else []
    return "\n".join([*head, *inline]) + "\n\n" + "\n\n".join(tables) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            inner = ", ".join(f"{_key(name)} = {_value(one)}" for name, one in value.items())
            return f"{{ {inner} }}"
        case _:
            return repr(value)


_BAD = (
    *('select = ["HLA9"]', 'modes = ["fast"]', "strict = 1", 'baseline = ""', "unknown-key = 0"),
    *("max = { relayout-copy = -1 }", "meshes = [{ fsdp = 0 }]", "rule-options = { x = {} }"),
    *('layouts = [""]', "programs = [{}]", 'suppress = [{ rule = "HLA002" }]', 'platform = "gpu"'),
)


def test_a_sound_config_is_taken_and_a_bad_key_is_told_with_its_line(
    empty_repository: Path, pytestconfig: pytest.Config
) -> None:
    @tried(pytestconfig, share=10)
    @given(configs(), _CHOICES)
    def holds(config: dict[str, Any], c: Choices) -> None:
        is_project = c.one_in(4)
        prefix = "tool.hlo-audit." if is_project else ""
        name, other = "pyproject.toml", "hlo-audit.toml"
        name = name if is_project else other
        Path("hlo-audit.toml").unlink(missing_ok=True)
        Path("pyproject.toml").unlink(missing_ok=True)
        text = toml(config, prefix, c)
        table: Any = tomllib.loads(text)
        for part in prefix.split(".")[:-1]:
            table = table.get(part, {})
        assert table == config
        files = {"step.txt": FRAMES, "other.txt": FRAMES, name: text}
        bare = () if "programs" in config else ("step.txt",)
        outcome = outcome_of(files, "check", *bare, "--format", "json", "--config", name)
        assert outcome.code in (0, 1), outcome.stderr
        bad = c.choose(_BAD)
        key = bad.split(" = ")[0]
        if key in config:
            return
        lines = text.split("\n")
        at = 1 if prefix else 0
        worse = "\n".join([*lines[:at], bad, *lines[at:]])
        outcome = outcome_of({**files, name: worse}, "check", *bare, "--config", name)
        assert outcome.code == 2
        assert f"{name}:{at + 1}: {key}" in outcome.stderr

    holds()
