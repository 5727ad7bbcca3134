"""The baseline and the budgets: what passes, what fails, and what is said of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from command_line import invoke
from hlo_audit import baseline as baseline_files
from hlo_audit.baseline import (
    Baseline,
    BaselineError,
    Entry,
    entry_of,
    read_baseline,
    render_baseline,
    updated,
    write_baseline,
)
from hlo_audit.budget import override, parse_budget, read_budgets
from hlo_audit.errors import UsageError
from hlo_audit.gate import Comparison, Gate, judge
from hlo_audit.hlo import SourceLocation
from hlo_audit.program_audit import ProgramAudit, audit_recorded, tell_apart
from hlo_audit.rule import Finding
from hlo_audit.rules import ALL_RULES

EXPLICIT = "jax-0.12.0-explicit"
COPY = next(rule for rule in ALL_RULES if rule.code == "HLA002")
SHARDING = next(rule for rule in ALL_RULES if rule.code == "HLA001")


def validate(text: str) -> dict[str, Any]:
    schema = resources.files("hlo_audit").joinpath("baseline.schema.json").read_text()
    data: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator(json.loads(schema)).validate(data)
    return data


def a_finding(op_name: str = "w", *, size: int = 1000, rule: str = "HLA002") -> Finding:
    return Finding(
        rule=rule,
        slug="relayout-copy" if rule == "HLA002" else "sharding-custom-call",
        severity="warning",
        message=f"{op_name} is copied",
        instruction="copy.264",
        computation="main",
        opcode="copy",
        shape="f32[512,512]",
        bytes=size if rule == "HLA002" else None,
        executions=1,
        estimated_cycles=10,
        op_name=op_name,
        source=SourceLocation("step.py", 7, "step"),
        stack=(),
        details={"from": "{1,0}", "to": "{0,1}", "place": "inner"},
        fixes=(),
    )


def an_audit(*findings: Finding, **changes: Any) -> ProgramAudit:
    return replace(
        ProgramAudit(
            "step.py:step",
            mode="explicit",
            platform="tpu",
            topology="v5p:2x2x1",
            versions={"python": "3.11.7", "jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": None},
            rules=(SHARDING, COPY),
            findings=findings,
        ),
        **changes,
    )


def known(*audits: ProgramAudit, name: str = "known.json") -> Baseline:
    return Baseline(name, tuple(entry_of(audit, Path()) for audit in audits))


def held(
    audits: Sequence[ProgramAudit],
    baseline: Baseline,
    *budgets: str,
    strict: bool = False,
    whole: bool = False,
) -> Gate:
    pairs = [(name, text) for name, _, text in (budget.partition("=") for budget in budgets)]
    limits = read_budgets(pairs, ALL_RULES)
    comparison = Comparison(baseline, strict=strict, whole=whole)
    return judge(audits, lambda audit: limits, None, comparison)


# -- the gate


def test_what_the_baseline_has_passes() -> None:
    audit = an_audit(a_finding("w"), a_finding("w"), a_finding("v"))
    gate = held([audit], known(audit), strict=True, whole=True)
    assert (gate.passed, gate.notices, gate.held) == (True, (), 1)


def test_a_new_finding_fails_though_an_old_one_is_gone() -> None:
    new = a_finding("v")
    gate = held([an_audit(new)], known(an_audit(a_finding("w"))))
    (violation,) = gate.violations
    assert (violation.limit, violation.count, violation.gone) == (1, 1, 1)
    assert violation.new == (new.fingerprint,)
    assert "HLA002 is 1, 1 of them new and 1 gone, known.json has 1" in violation.message


def test_of_equal_findings_one_more_is_new() -> None:
    one = a_finding("w")
    gate = held([an_audit(one, replace(one), replace(one))], known(an_audit(one, one)))
    (violation,) = gate.violations
    assert violation.new == (one.fingerprint,)


def test_fewer_findings_pass_and_fail_where_strict() -> None:
    baseline = known(an_audit(a_finding("w"), a_finding("v")))
    gate = held([an_audit(a_finding("v"))], baseline)
    assert gate.passed
    (notice,) = gate.notices
    assert notice.kind == "slack"
    assert "HLA002 is 1, known.json has 2: 1 gone, the baseline can be tightened" in notice.message
    assert not held([an_audit(a_finding("v"))], baseline, strict=True).passed


def test_a_program_that_the_baseline_lacks_has_new_findings_only() -> None:
    gate = held([an_audit(a_finding("w"))], Baseline("known.json"))
    (violation,) = gate.violations
    assert (violation.limit, violation.count) == (0, 1)
    assert "does not have this program" in violation.message
    clean = held([an_audit()], Baseline("known.json"))
    assert clean.passed
    assert [notice.kind for notice in clean.notices] == ["not-in-baseline"]


def test_another_way_to_compile_is_another_program() -> None:
    audit = an_audit(a_finding("w"))
    for change in (
        {"mode": "auto"},
        {"layout": "turned"},
        {"topology": "v6e:2x2"},
        {"mesh": {"fsdp": 2}},
        {"settings": {"embed": 8}},
        {"xla_flags": {"xla_flag": "1"}},
    ):
        assert not held([replace(audit, **change)], known(audit)).passed, change


def test_programs_that_only_the_baseline_has_are_told_of_a_whole_run() -> None:
    audit, other = an_audit(), an_audit(mode="auto")
    baseline = known(audit, other)
    assert held([audit], baseline, strict=True).notices == ()
    gate = held([audit], baseline, strict=True, whole=True)
    assert [(notice.kind, notice.fails) for notice in gate.notices] == [("not-audited", True)]


def test_other_versions_are_named() -> None:
    before = an_audit(versions={"jax": "0.9.0", "jaxlib": "0.9.0", "libtpu": "0.0.30"})
    gate = held([an_audit()], known(before))
    (notice,) = gate.notices
    assert notice.kind == "versions"
    assert "jax 0.9.0, now 0.10.2, jaxlib 0.9.0, now 0.10.2" in notice.message
    assert "libtpu" not in notice.message  # not known now
    assert gate.passed
    (violation,) = held([an_audit(a_finding("w"))], known(before)).violations
    assert "made under jax 0.9.0, now 0.10.2" in violation.message


def test_what_was_counted_and_cannot_be_any_more_fails() -> None:
    audit = an_audit()
    gate = held([replace(audit, skipped={"HLA002": "no snapshot"})], known(audit))
    (violation,) = gate.violations
    assert (violation.count, violation.limit) == (None, 0)


def test_a_rule_that_the_baseline_does_not_know_is_not_held() -> None:
    baseline = known(an_audit(rules=(SHARDING,)))
    gate = held([an_audit(a_finding("w"))], baseline)
    assert gate.passed
    assert "lacks this rule" in gate.notices[0].message


def test_a_program_that_failed_is_held_against_nothing() -> None:
    audit = an_audit(a_finding("w"))
    gate = held([replace(audit, error=UsageError("no"))], known(audit), whole=True)
    assert (gate.passed, gate.held, gate.notices) == (True, 0, ())


# -- budgets


@pytest.mark.parametrize(
    ("text", "shown", "known_count", "limit"),
    [
        ("0", "0", 9, 0),
        ("64MiB", "67108864B", 0, 67108864),
        ("1.5kB", "1500B", 0, 1500),
        ("0B", "0B", 5, 0),
        ("+2", "+2", 5, 7),
        ("+1KiB", "+1024B", 1000, 2024),
        ("+10%", "+10%", 1009, 1109),
        ("+0%", "+0%", 7, 7),
        ("+2.5%", "+2.5%", 1000, 1025),
    ],
)
def test_budgets_are_read(text: str, shown: str, known_count: int, limit: int) -> None:
    budget = parse_budget(COPY, text)
    assert str(budget) == shown
    assert budget.limit(known_count) == limit


@pytest.mark.parametrize("text", ["", "few", "-1", "10%", "1.5", "4 apples", "3XB", "++1", "٣"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no budget"):
        parse_budget(COPY, text)


def test_the_last_budget_of_a_kind_counts() -> None:
    pairs = [("HLA002", "4"), ("relayout-copy", "1MB"), ("relayout-copy", "2")]
    assert [str(budget) for budget in read_budgets(pairs, ALL_RULES)] == ["1000000B", "2"]
    first, second = read_budgets(pairs[:2], ALL_RULES), read_budgets(pairs[2:], ALL_RULES)
    assert override(first, second) == second


def test_a_budget_of_bytes_is_of_the_findings_bytes() -> None:
    audit = an_audit(a_finding("w", size=600), a_finding("v", size=500))
    budgets = read_budgets([("HLA002", "1kB")], ALL_RULES)
    (violation,) = judge([audit], lambda _: budgets).violations
    assert (violation.limit, violation.count, violation.unit) == (1000, 1100, "bytes")
    assert "is 1,100 bytes, at most 1,000 bytes" in violation.message
    assert judge([audit], lambda _: read_budgets([("HLA002", "1.1kB")], ALL_RULES)).passed


def test_a_budget_on_top_of_the_baseline_is_for_what_is_new() -> None:
    baseline = known(an_audit(a_finding("w", size=1000)))
    more = an_audit(a_finding("w", size=1000), a_finding("v", size=100))
    assert held([more], baseline, "HLA002=+10%").passed
    assert held([more], baseline, "HLA002=+1").passed
    assert held([more], baseline, "HLA002=+100B").passed
    (violation,) = held([more], baseline, "HLA002=+9%").violations
    assert (violation.limit, violation.count, violation.unit) == (1090, 1100, "bytes")
    assert "+9% on top of known.json" in violation.message
    assert not held([more], baseline, "HLA002=2").passed  # not on top: new ones fail as ever


def test_percent_is_of_the_number_where_nothing_moves() -> None:
    one = a_finding(rule="HLA001")
    ten, eleven = [replace(one) for _ in range(10)], [replace(one) for _ in range(11)]
    baseline = known(an_audit(*ten))
    assert held([an_audit(*eleven)], baseline, "HLA001=+10%").passed
    (violation,) = held([an_audit(*eleven, one)], baseline, "HLA001=+10%").violations
    assert (violation.limit, violation.count, violation.unit) == (11, 12, "findings")


def test_a_budget_on_top_of_nothing_is_refused() -> None:
    budgets = read_budgets([("HLA002", "+1")], ALL_RULES)
    with pytest.raises(UsageError, match="there is none"):
        judge([an_audit()], lambda _: budgets)


# -- the file


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    audits = [an_audit(a_finding("w"), a_finding("w"), a_finding(rule="HLA001")), an_audit()]
    audits[1] = replace(audits[1], mode="auto", skipped={"HLA001": "no"}, settings={"b": True})
    path = tmp_path / "known.json"
    baseline, _ = updated(
        Baseline(str(path)), [entry_of(audit, Path()) for audit in audits], whole=True
    )
    assert write_baseline(baseline, path)
    assert read_baseline(path) == baseline
    assert not write_baseline(read_baseline(path), path)
    data = validate(path.read_text())
    assert [entry["mode"] for entry in data["entries"]] == ["auto", "explicit"]
    assert data["entries"][1]["counts"] == {"HLA001": 1, "HLA002": 2}
    assert data["entries"][1]["bytes"] == {"HLA002": 2000}
    assert validate(render_baseline(Baseline("none"))) == {"schema_version": 1, "entries": []}


def test_the_order_of_findings_and_programs_leaves_no_trace() -> None:
    one, other = an_audit(a_finding("w"), a_finding("v")), an_audit(mode="auto")
    turned = an_audit(a_finding("v"), replace(a_finding("w"), instruction="copy.1"))
    assert render_baseline(known(one, other)) == render_baseline(known(other, turned))


def test_an_update_keeps_what_was_not_looked_at() -> None:
    before = known(an_audit(a_finding("w"), a_finding(rule="HLA001")), an_audit(mode="auto"))
    only_copies = entry_of(an_audit(a_finding("v"), rules=(COPY,)), Path())
    after, changes = updated(before, [only_copies], whole=False)
    assert changes == ["step.py:step/explicit/v5p:2x2x1: HLA002 1 -> 1 (1 new, 1 gone)"]
    assert {entry.mode for entry in after.entries} == {"auto", "explicit"}
    (explicit,) = [entry for entry in after.entries if entry.mode == "explicit"]
    assert explicit.counts == {"HLA001": 1, "HLA002": 1}
    whole, changes = updated(before, [only_copies], whole=True)
    assert "step.py:step/auto/v5p:2x2x1: removed" in changes
    assert len(whole.entries) == 1
    assert updated(whole, [only_copies], whole=True) == (whole, [])


def test_of_two_entries_for_one_program_an_update_writes_the_one_that_is_compared() -> None:
    before = known(an_audit(a_finding("w")), an_audit(a_finding("v")))
    entry = entry_of(an_audit(a_finding("u")), Path())
    after, _ = updated(before, [entry], whole=False)
    assert after.match([entry]) == [entry]
    assert len(after.entries) == 2


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(render_baseline(known(an_audit(a_finding("w")))))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["damaged", ":1:1"]),
        ('{"schema_version": 1,\n "entries": [', ["damaged", ":2:"]),
        ("[]", ["it is [], not of type dict"]),
        ('{"schema_version": 2, "entries": []}', ["schema_version is 2, not 1"]),
        ('{"schema_version": 1, "entries": {}}', ["entries is {}, not of type list"]),
        ('{"schema_version": 1, "entries": [NaN]}', ["NaN is no number"]),
        (
            '{\n<<<<<<< HEAD\n "a": 1\n=======\n "a": 2\n>>>>>>> branch\n}',
            [":2: the baseline holds a merge conflict", "--update-baseline"],
        ),
        (damaged(lambda d: d["entries"][0].pop("program")), ["entries[0] has no 'program'"]),
        (damaged(lambda d: d["entries"][0].update(mode=3)), ["entries[0].mode is 3"]),
        (
            damaged(lambda d: d["entries"][0]["counts"].update(HLA002=2)),
            ["counts.HLA002 is 2, and it lists 1 findings"],
        ),
        (
            damaged(lambda d: d["entries"][0]["findings"][0].update(count=True)),
            ["findings[0].count is True"],
        ),
        ("[" * 100_000, ["is no baseline"]),
    ],
    ids=lambda value: value[0][:30] if isinstance(value, list) else "",
)
def test_a_damaged_file_is_told_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "known.json"
    path.write_text(text)
    with pytest.raises(BaselineError) as raised:
        read_baseline(path)
    message = str(raised.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "known.json"
    write_baseline(known(an_audit()), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UsageError, match="No space left"):
        write_baseline(known(an_audit(a_finding("w"))), path)
    assert path.read_bytes() == before
    assert [child.name for child in tmp_path.iterdir()] == ["known.json"]


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    audit = an_audit(program="../models/step.py:step")
    assert entry_of(audit, Path("..")).program == "models/step.py:step"
    assert entry_of(an_audit(program="my.module:step"), Path("..")).program == "my.module:step"
    dump = ProgramAudit(str(tmp_path / "dump"), module="jit_step")
    assert entry_of(dump, Path("..")).program == "dump"
    assert baseline_files.portable_name("-", Path(".."), compiled=False) == "-"


def test_programs_that_look_alike_are_told_apart() -> None:
    labels = [
        audit.label
        for audit in tell_apart(
            [
                an_audit(topology="v5p:2x2x1", mesh={"fsdp": 4}),
                an_audit(topology="v6e:2x2", mesh={"fsdp": 4}),
                an_audit(mode="auto"),
            ]
        )
    ]
    assert labels == [
        "step.py:step/explicit/v5p:2x2x1",
        "step.py:step/explicit/v6e:2x2",
        "step.py:step/auto",
    ]


# -- real dumps


def renumbered(dump: Path, into: Path) -> None:
    """The same compile with other instruction numbers, and with its Python file 100 lines on."""
    into.mkdir()
    for path in dump.iterdir():
        text = path.read_text() if path.suffix == ".txt" else ""
        text = re.sub(r"(%[a-z][\w-]*)\.(\d+)", lambda m: f"{m[1]}.{int(m[2]) + 7000}", text)
        text = re.sub(r"\bline=(\d+)", lambda m: f"line={int(m[1]) + 100}", text)
        (into / path.name).write_text(text)


def test_fingerprints_survive_new_numbers_and_moved_lines(
    dumps: Callable[[str], Path], tmp_path: Path
) -> None:
    dump = dumps("lm_head_versions") / EXPLICIT
    renumbered(dump, tmp_path / "again")
    before = audit_recorded(dump, ALL_RULES, {})
    after = audit_recorded(tmp_path / "again", ALL_RULES, {})
    assert {f.instruction for f in before[0].findings if "." in f.instruction}.isdisjoint(
        f.instruction for f in after[0].findings
    )
    assert [f.source and f.source.line for f in before[0].findings] != [
        f.source and f.source.line for f in after[0].findings
    ]
    gate = held(
        [replace(after[0], program="x")], known(replace(before[0], program="x")), strict=True
    )
    assert sum(value or 0 for value in before[0].counts.values()) > 60
    assert (gate.violations, gate.notices) == ((), ())


MODULE = """HloModule m, is_scheduled=true

ENTRY %e (p: f32[512,512], q: f32[512,512]) -> (f32[512,512], f32[512,512]) {{
  %p = f32[512,512]{{1,0}} parameter(0), metadata={{op_name="p"}}
  %q = f32[512,512]{{1,0}} parameter(1), metadata={{op_name="q"}}
  %a = f32[512,512]{{{p},{not_p}}} copy(%p)
  %b = f32[512,512]{{{q},{not_q}}} copy(%q)
  ROOT %t = (f32[512,512]{{{p},{not_p}}}, f32[512,512]{{{q},{not_q}}}) tuple(%a, %b)
}}
"""


def write_module(folder: Path, *, p_turned: bool, q_turned: bool) -> None:
    p, q = (0 if turned else 1 for turned in (p_turned, q_turned))
    text = MODULE.format(p=p, not_p=1 - p, q=q, not_q=1 - q)
    (folder / "step.txt").write_text(text)


def test_the_command_line_from_the_first_baseline_to_the_tightened_one(tmp_path: Path) -> None:
    check = ("check", "step.txt", "--select", "HLA002", "--baseline", "known.json")
    write_module(tmp_path, p_turned=True, q_turned=False)
    missing = invoke(*check, cwd=tmp_path)
    assert missing.returncode == 2
    assert "there is no baseline known.json (--update-baseline writes it)" in missing.stderr
    first = invoke(*check, "--update-baseline", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "known.json: step.txt/m: added, 1 HLA002" in first.stderr
    written = (tmp_path / "known.json").read_bytes()
    validate(written.decode())
    again = invoke(*check, "--update-baseline", cwd=tmp_path)
    assert "known.json is up to date" in again.stderr
    assert (tmp_path / "known.json").read_bytes() == written

    write_module(tmp_path, p_turned=False, q_turned=True)
    swapped = invoke(*check, cwd=tmp_path)
    assert swapped.returncode == 1
    assert "HLA002 is 1, 1 of them new and 1 gone, known.json has 1" in swapped.stdout
    assert "new: f32[512,512] of parameter q" in swapped.stdout

    write_module(tmp_path, p_turned=False, q_turned=False)
    fewer = invoke(*check, cwd=tmp_path)
    assert fewer.returncode == 0
    assert "1 gone, the baseline can be tightened" in fewer.stdout
    assert invoke(*check, "--strict", cwd=tmp_path).returncode == 1
    tightened = invoke(*check, "--strict", "--update-baseline", cwd=tmp_path)
    assert tightened.returncode == 0
    assert "HLA002 1 -> 0 (1 gone)" in tightened.stderr


@pytest.mark.parametrize("format_", ["json", "sarif", "junit", "markdown", "github"])
def test_every_format_tells_what_is_new(tmp_path: Path, format_: str) -> None:
    check = ("check", "step.txt", "--select", "HLA002", "--baseline", "known.json")
    write_module(tmp_path, p_turned=True, q_turned=False)
    invoke(*check, "--update-baseline", "-q", cwd=tmp_path)
    write_module(tmp_path, p_turned=True, q_turned=True)
    result = invoke(*check, "--format", format_, cwd=tmp_path)
    assert result.returncode == 1
    assert {
        "json": '"new": [',
        "sarif": '"level": "error"',
        "junit": '<failure type="baseline"',
        "markdown": "| HLA002 relayout-copy | 1 | 2 | 1 new |",
        "github": "HLA002 is 2, 1 of them new, known.json has 1",
    }[format_] in result.stdout
    if format_ == "sarif":  # the known one is none
        assert result.stdout.count('"level": "error"') == 1
    if format_ == "json":
        gate = json.loads(result.stdout)["gate"]
        assert (gate["against"], gate["baseline"]) == ("baseline", "known.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--update-baseline"], ["--update-baseline: which file?"]),
        (["--baseline", "b", "--against", "HEAD"], ["--against takes the place"]),
        (["--max", "HLA002=+1"], ["HLA002=+1", "there is none"]),
        (["--max", "HLA002=3%"], ["--max HLA002=3%", "percent of what"]),
        (["--baseline", "step.txt"], ["step.txt:1:1: the baseline is damaged"]),
    ],
)
def test_wrong_options_are_told_in_one_line(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    write_module(tmp_path, p_turned=True, q_turned=False)
    result = invoke("check", "step.txt", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_a_baseline_in_the_config_is_relative_to_it(tmp_path: Path) -> None:
    write_module(tmp_path, p_turned=True, q_turned=False)
    (tmp_path / "hlo-audit.toml").write_text(
        "programs = ['step.txt']\nselect = ['HLA002']\nbaseline = 'known.json'\nstrict = true\n"
    )
    inner = tmp_path / "inner"
    inner.mkdir()
    assert invoke("check", "--update-baseline", cwd=inner).returncode == 0
    assert invoke("check", cwd=tmp_path).returncode == 0
    write_module(tmp_path, p_turned=False, q_turned=False)
    assert invoke("check", cwd=inner).returncode == 1
    assert invoke("check", "--no-strict", cwd=inner).returncode == 0


def test_an_entry_names_the_versions_it_was_made_under() -> None:
    entry: Entry = entry_of(an_audit(), Path())
    assert entry.versions == {"jax": "0.10.2", "jaxlib": "0.10.2", "hlo-audit": "0.1.0"}
    assert parse_budget(COPY, "3").amount == Decimal(3)


def test_a_baseline_that_cannot_be_read_is_told_before_anything_is_compiled(
    tmp_path: Path,
) -> None:
    result = invoke("check", "lm-head", "--baseline", "nope.json", "--no-cache", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert "there is no baseline nope.json" in line
