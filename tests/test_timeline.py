"""What the timeline counts in each snapshot is what counting in that one alone gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hlo_audit.dump import read_dump
from hlo_audit.hlo import Instruction, parse_module
from hlo_audit.passes import Passes
from hlo_audit.rule import Context, Rule, Seen, Watch
from hlo_audit.rules import ALL_RULES
from hlo_audit.timeline import DEFAULT_OPCODES, Reading, make_timeline


@pytest.mark.parametrize("name", ["lm_head_versions/jax-0.12.0-explicit", "llama2_auto_fsdp4"])
def test_the_counts_are_those_of_each_snapshot_alone(
    name: str, dumps: Callable[[str], Path]
) -> None:
    archive, _, folder = name.partition("/")
    (dump,) = read_dump(dumps(archive) / folder).modules
    passes = Passes(dump)
    series = {one.name: one for one in make_timeline(passes, ALL_RULES).series}
    every = max(1, len(passes) // 40)
    alone = {
        at: parse_module(snapshot.path.read_text())
        for at, snapshot in enumerate(passes.snapshots)
        if at % every == 0 or snapshot.stage != "pass"
    }
    for rule in ALL_RULES:
        watch = rule.watch
        if watch is None:
            continue
        others = {stage: passes.modules[passes.stage(stage) or 0] for stage in rule.reads[1:]}
        for at, module in alone.items():
            if passes.phases[at] not in watch.phases:
                assert series[rule.code].readings[at] is None
                continue
            context = Context(rule, {rule.reads[0]: module, **others})
            seen = [
                one
                for instruction in module.of_opcodes(watch.opcodes, watch.holding)
                for one in watch.sees(instruction, context)
            ]
            # Of those that are counted once, any: they are of one size here.
            counted = {one.once or place: one.shape for place, one in enumerate(seen)}
            sizes = [shape.logical_bytes for shape in counted.values()]
            assert series[rule.code].readings[at] == Reading(len(sizes), sum(sizes)), (rule, at)
    for opcode in DEFAULT_OPCODES:
        spelt = {opcode} if opcode == "copy" else {opcode, f"{opcode}-start"}
        for at, module in alone.items():
            sizes = [one.shape.logical_bytes for one in module.of_opcodes(spelt)]
            assert series[opcode].readings[at] == Reading(len(sizes), sum(sizes)), (opcode, at)


# -- with rules made for the purpose


HEAD = "HloModule jit_f, num_partitions={}\n\n"
BODY = """\
ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %copy = f32[8]{{0}} copy(%p)
  ROOT %n = f32[8]{{0}} {}(%copy)
}}
"""


def passes_of(folder: Path, *texts: str) -> Passes:
    for number, text in enumerate(texts):
        name = f"module_0001.jit_f.{number:04}.p.after_pass{number}.before_x.txt"
        (folder / name).write_text(text)
    (dump,) = read_dump(folder).modules
    return Passes(dump)


def rule_that(sees: Callable[[Instruction, Context], Iterator[Seen]], opcode: str = "copy") -> Rule:
    watch = Watch(
        "what it sees", ("unpartitioned", "partitioned", "laid-out"), "", (opcode,), sees, "module"
    )
    return replace(ALL_RULES[0], reads=("final",), watch=watch)


def counts_of(passes: Passes, rule: Rule) -> list[int | None]:
    (series,) = make_timeline(passes, (rule,), ()).series
    return [None if reading is None else reading.count for reading in series.readings]


def test_what_rests_on_the_head_of_a_module_is_seen_anew_where_it_changes(tmp_path: Path) -> None:
    def sees(copy: Instruction, context: Context) -> Iterator[Seen]:
        yield from [Seen(copy.shape)] * context.module("final").device_count

    passes = passes_of(
        tmp_path, *(HEAD.format(devices) + BODY.format("tanh") for devices in (1, 4, 4, 2))
    )
    assert counts_of(passes, rule_that(sees)) == [1, 4, 4, 2]


def test_a_snapshot_on_which_a_rule_fails_is_left_out_and_the_next_counted(tmp_path: Path) -> None:
    def sees(copy: Instruction, _: Context) -> Iterator[Seen]:
        if copy.users[0].opcode == "sine":
            raise KeyError("no rule for that")
        yield Seen(copy.shape)

    opcodes = ("tanh", "tanh", "sine", "sine", "cosine", "tanh")
    passes = passes_of(tmp_path, *(HEAD.format(1) + BODY.format(opcode) for opcode in opcodes))
    rule = rule_that(sees)
    assert counts_of(passes, rule) == [1, 1, None, None, 1, 1]
    (series,) = make_timeline(passes, (rule,), ()).series
    assert series.reasons == dict.fromkeys((2, 3), "the rule fails on this snapshot: KeyError")


def test_what_several_are_seen_for_is_counted_once(tmp_path: Path) -> None:
    """The smallest in order stands for all, and the next of them once it is gone."""

    def sees(copy: Instruction, _: Context) -> Iterator[Seen]:
        yield Seen(copy.shape, once=copy.operands[0].name)

    def with_copies(*sizes: int) -> str:
        copies = "".join(
            f"  %copy.{size} = f32[{size}]{{0}} copy(%{'p' if size < 9 else 'copy.1'})\n"
            for size in sizes
        )
        return (
            HEAD.format(1)
            + "ENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
            + copies
            + "  ROOT %n = f32[8]{0} negate(%p)\n}\n"
        )

    rows = ((8,), (8, 1), (2, 1, 8), (2, 8), (), (1, 9))
    passes = passes_of(tmp_path, *(with_copies(*row) for row in rows))
    (series,) = make_timeline(passes, (rule_that(sees),), ()).series
    sizes = [reading.bytes // 4 for reading in series.readings if reading is not None]
    assert [reading and reading.count for reading in series.readings] == [1, 1, 1, 1, 0, 2]
    assert sizes == [8, 1, 1, 2, 0, 1 + 9]


def test_instructions_made_for_counting_are_let_go_and_those_of_others_are_not(
    tmp_path: Path,
) -> None:
    def sees(copy: Instruction, context: Context) -> Iterator[Seen]:
        assert context.module("final").callers(copy.computation) == ()
        yield from [Seen(user.shape) for user in copy.users]

    texts = [HEAD.format(1) + BODY.format(opcode) for opcode in ("tanh", "sine", "cosine")]
    passes = passes_of(tmp_path, *texts)
    held = passes.modules[1].entry.root
    assert counts_of(passes, rule_that(sees)) == [1, 1, 1]
    assert [module.entry.made_count for module in passes.modules] == [0, 2, 0]
    assert passes.modules[1].entry.root is held
    assert [found.opcode for found in passes.modules[2].entry["copy"].users] == ["cosine"]
    assert Counter(one.opcode for one in passes.modules[0].instructions) == Counter(
        ("parameter", "copy", "tanh")
    )


def test_what_was_let_go_is_not_handed_out_by_what_was_kept_of_it(tmp_path: Path) -> None:
    fused = (
        "%fused (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
        "  ROOT %copy.1 = f32[8]{0} copy(%x)\n}\n\n"
    )

    def text(opcode: str) -> str:
        fusion = "fusion(%copy), kind=kLoop, calls=%fused"
        return HEAD.format(1) + fused + BODY.format(opcode).replace(f"{opcode}(%copy)", fusion)

    def sees(copy: Instruction, context: Context) -> Iterator[Seen]:
        for caller in context.module("final").callers(copy.computation):
            yield Seen(caller.shape)

    texts = [text("tanh"), text("tanh").replace("%n =", "%m ="), text("tanh").replace("%p", "%q")]
    passes = passes_of(tmp_path, *texts)
    assert counts_of(passes, rule_that(sees)) == [1, 1, 1]
    for module in passes.modules:
        (caller,) = module.callers(module.computations["fused"])
        assert caller is module.entry.root
