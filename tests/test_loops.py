"""Trip counts and executions, on loops as compilers print them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hlo_audit.dump import read_dump
from hlo_audit.hlo import Module, Value, parse_module
from hlo_audit.hlo.dataflow import Site, evaluate
from hlo_audit.hlo.loops import executions, trip_count

LOOP = """\
HloModule m

%condition (p: (s32[], f32[8])) -> pred[] {{
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] constant({bound})
  ROOT %test = pred[] compare({test}), direction={direction}
}}

%body (q: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %q = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %step = s32[] constant({step})
  %next = s32[] add(%j, %step)
  %x = f32[8] get-tuple-element(%q), index=1
  %y = f32[8] negate(%x)
  ROOT %out = (s32[], f32[8]) tuple(%next, %y)
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8] parameter(0)
  %start = s32[] constant({start})
  %copy = s32[] copy(%start)
  %init = (s32[], f32[8]) tuple(%copy, %a)
  %loop = (s32[], f32[8]) while(%init), condition=%condition, body=%body{config}
  ROOT %result = f32[8] get-tuple-element(%loop), index=1
}}
"""


def loop_module(
    *,
    start: int = 0,
    bound: int = 12,
    step: int = 1,
    direction: str = "LT",
    test: str = "%i, %bound",
    config: str = "",
) -> Module:
    return parse_module(
        LOOP.format(
            start=start, bound=bound, step=step, direction=direction, test=test, config=config
        )
    )


@pytest.mark.parametrize(
    ("module", "trips"),
    [
        (loop_module(), 12),
        (loop_module(step=5), 3),
        (loop_module(start=2, direction="LE"), 11),
        (loop_module(start=12, bound=0, step=-1, direction="GT"), 12),
        (loop_module(start=12, bound=0, step=-1, direction="GE"), 13),
        (loop_module(direction="GT", test="%bound, %i"), 12),
        (loop_module(step=4, direction="NE"), 3),
        (loop_module(start=20), 0),
        (loop_module(step=0), None),
        (loop_module(step=5, direction="NE"), None),
        (loop_module(config=', backend_config={"known_trip_count":{"n":"7"}}'), 7),
    ],
)
def test_a_loop_that_counts_has_a_trip_count(module: Module, trips: int | None) -> None:
    loop = module.entry["loop"]
    assert trip_count(module, loop) == trips
    assert executions(module)["body"] == trips
    assert executions(module)["condition"] == (None if trips is None else trips + 1)


def test_loops_of_real_modules_run_as_often_as_there_are_layers(
    dumps: Callable[[str], Path],
) -> None:
    (module,) = read_dump(dumps("llama2_explicit_fsdp4")).modules
    assert module.before_optimizations is not None
    assert module.before_layout_assignment is not None
    assert module.final is not None
    for snapshot in (module.before_optimizations, module.before_layout_assignment, module.final):
        read = snapshot.read()
        loops = [i for i in read.instructions if i.opcode == "while"]
        assert [trip_count(read, loop) for loop in loops] == [2, 2]
        assert None not in executions(read).values()


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        ("%c = u32[] constant(128)\n  ROOT %r = u32[] multiply(%p, %c)", [0, 128, 256, 384]),
        ("%c = u32[] constant(3)\n  ROOT %r = u32[] and(%p, %c)", [0, 1, 2, 3]),
        ("%c = u32[] constant(1)\n  ROOT %r = u32[] shift-right-logical(%p, %c)", [0, 0, 1, 1]),
        ("%c = u32[] constant(2)\n  ROOT %r = u32[] remainder(%p, %c)", [0, 1, 0, 1]),
        (
            "%t = s32[4]{0} constant({0, 32, 64, 96})\n"
            "  %d = s32[1]{0} dynamic-slice(%t, %p), dynamic_slice_sizes={1}\n"
            "  ROOT %r = s32[] reshape(%d)",
            [0, 32, 64, 96],
        ),
        (
            "%c = u32[] constant(2)\n  %l = pred[] compare(%p, %c), direction=LT\n"
            "  %z = u32[] constant(9)\n  ROOT %r = u32[] select(%l, %p, %z)",
            [0, 1, 9, 9],
        ),
        ("%x = u32[] parameter(0)\n  ROOT %r = u32[] add(%p, %x)", [None] * 4),
        ("%c = u32[] constant(0)\n  ROOT %r = u32[] divide(%p, %c)", [None] * 4),
    ],
)
def test_index_arithmetic_is_evaluated_for_each_partition(
    expression: str, values: list[int | None]
) -> None:
    module = parse_module(
        "HloModule m\n\nENTRY %main () -> u32[] {\n"
        f"  %p = u32[] partition-id()\n  {expression}\n}}\n"
    )
    site = Site(Value(module.entry.root))
    assert evaluate(module, site, range(4)) == values
