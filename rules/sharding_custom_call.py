"""`Sharding` annotations in the module before optimisation.

## What it reports

Every `custom-call` to `Sharding`, by `kind`:

- `between-dot-and-transpose`: the annotation stands between a dot and the transpose of its
  result. XLA folds `transpose(dot(a, b))` into `dot(b, a)`, but not through a custom call, and
  the partitioner takes the call away only after the simplifier has run. Transposes that no
  exchange of the operands gives, such as those of attention heads, are not meant. The gradient
  then comes out transposed, which costs relayout copies (HLA002) and, on small models, the
  reduce-scatter (HLA004).
- `repeats-operand`: the operand has that very sharding already.
- `reshards`: the operand is known to have another.
- `annotates`: the operand's sharding is not known; the call sets it.

## Why it matters

On a mesh of explicit axes JAX annotates the result of every primitive whose type carries a
sharding, changed or not: a training step has hundreds. Each is a barrier to rewrites until
partitioning. Their number is no fault (every explicit program has many, shard_map and constraints
add some, and it changes with the version of JAX) but one to watch for change, so those are notes;
only a call between a dot and its transpose is a warning.

## Limits

An operand's sharding is known where it is annotated, or computed element by element from operands
that agree. Two shardings are the same if they are printed alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from hlo_audit.hlo import Computation, Instruction, Module, Sharding
from hlo_audit.hlo.dots import swaps_operands
from hlo_audit.rule import Context, Detail, Example, Finding, Rule, Seen, Severity, Watch
from hlo_audit.rules._lm_head_fixes import (
    EXPLICIT_ON_V5_AND_V6E,
    kernel_order_grad,
    vocab_embed,
)

# Between a dot and its transpose the simplifier looks past these by itself.
_TRANSPARENT = frozenset({"convert", "copy", "bitcast"})

# Between a dot and its transpose stand one or two of them.
_LONGEST_CHAIN = 100

_TARGET = '"Sharding"'

_ELEMENTWISE = frozenset(
    {
        *("abs", "add", "and", "atan2", "ceil", "clamp", "compare", "convert", "copy", "cosine"),
        *("divide", "exponential", "exponential-minus-one", "floor", "is-finite", "log"),
        *("log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or"),
        *("power", "remainder", "rsqrt", "select", "sign", "sine", "sqrt", "subtract", "tan"),
        *("tanh", "xor"),
    }
)

_MESSAGES = {
    "between-dot-and-transpose": "stands between a dot and its transpose: XLA cannot fold them",
    "repeats-operand": "repeats the sharding that its operand has",
    "reshards": "changes the sharding of its operand",
    "annotates": "sets a sharding",
}


def check(module: Module, context: Context) -> Iterator[Finding]:
    """Yield a finding for each annotation of the module before optimisation."""
    for computation in module.computations.values():
        annotations = list(annotations_of(computation))
        shardings = _known_shardings(computation) if annotations else {}
        for call in annotations:
            yield _finding(module, context, call, shardings)


def sees(call: Instruction, _: Context) -> Iterator[Seen]:
    """Yield an annotation."""
    if is_annotation(call):
        yield Seen(call.shape)


def annotations_of(computation: Computation) -> Iterator[Instruction]:
    """The calls to ``Sharding`` in a computation."""
    # A look at the text spares a computation with none, be it full of other custom calls.
    return filter(is_annotation, computation.of_opcodes(("custom-call",), holding=_TARGET))


def is_annotation(instruction: Instruction) -> bool:
    """Whether an instruction is a call to ``Sharding``."""
    return instruction.custom_call_target == "Sharding" and instruction.operand_count > 0


def _finding(
    module: Module,
    context: Context,
    call: Instruction,
    shardings: dict[Instruction, Sharding],
) -> Finding:
    sharding = shardings.get(call)
    details: dict[str, Detail] = {"sharding": sharding.text if sharding else None}
    severity: Severity = "note"
    fixes: tuple[str, ...] = ()
    dot = _dot_before(call)
    transpose = None if dot is None else _foldable_transpose_after(call, dot)
    before = shardings.get(call.operands[0])
    if dot is not None and transpose is not None:
        kind, severity = "between-dot-and-transpose", "warning"
        fixes = ("kernel-order-grad", "vocab-embed")
        details |= {"dot": dot.name, "transpose": transpose.name}
    elif before is None or sharding is None:
        kind = "annotates"
    elif _same(before, sharding):
        kind = "repeats-operand"
    else:
        kind = "reshards"
        details["operand_sharding"] = before.text
    return context.finding(
        module,
        call,
        f"Sharding call on {call.shape.without_layout} {_MESSAGES[kind]}",
        bytes=None,
        details={"kind": kind, **details},
        severity=severity,
        fixes=fixes,
        charged_to=(call, call.operands[0]),
    )


def _dot_before(call: Instruction) -> Instruction | None:
    current = call.operands[0]
    for _ in range(_LONGEST_CHAIN):
        if not current.operands or not (current.opcode in _TRANSPARENT or is_annotation(current)):
            break
        current = current.operands[0]
    return current if current.opcode == "dot" else None


def _foldable_transpose_after(call: Instruction, dot: Instruction) -> Instruction | None:
    """The transpose of the dot's result that the dot of the exchanged operands would spare."""
    waiting = list(call.users)
    seen: set[Instruction] = set()
    while waiting and len(seen) < _LONGEST_CHAIN:
        user = waiting.pop()
        if user.opcode == "transpose" and swaps_operands(dot, user.dimensions):
            return user
        if user not in seen and (user.opcode in _TRANSPARENT or is_annotation(user)):
            seen.add(user)
            waiting.extend(user.users)
    return None


def _known_shardings(computation: Computation) -> dict[Instruction, Sharding]:
    """The sharding of each instruction that has one or takes its operands'."""
    known: dict[Instruction, Sharding] = {}
    # A constant, or one spread over an array, has any sharding that is wanted of it.
    constants: set[Instruction] = set()
    for instruction in computation:
        if instruction.opcode == "constant" or (
            instruction.opcode == "broadcast" and constants.issuperset(instruction.operands)
        ):
            constants.add(instruction)
        sharding = instruction.sharding
        if sharding is not None:
            known[instruction] = sharding
        elif instruction.opcode in _ELEMENTWISE and not known.keys().isdisjoint(
            instruction.operands
        ):
            whole = [
                operand
                for operand in instruction.operands
                if operand.shape.dimensions == instruction.shape.dimensions
                and operand not in constants
            ]
            found = [known[operand] for operand in whole if operand in known]
            if found and len(found) == len(whole) and all(_same(one, found[0]) for one in found):
                known[instruction] = found[0]
    return known


def _same(one: Sharding, other: Sharding) -> bool:
    return one.text == other.text or one.kind == other.kind == "replicated"


_HEAD = """\
HloModule jit_step, num_partitions=4

ENTRY %main (x: bf16[16,512], g: bf16[16,32000]) -> f32[512,32000] {
  %x = bf16[16,512]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %g = bf16[16,32000]{1,0} parameter(1), sharding={devices=[4,1]<=[4]}
"""

EXAMPLES = (
    Example(
        "between a dot and its transpose",
        1,
        {
            "before_optimizations": _HEAD
            + """\
  %dot.1 = f32[32000,512]{1,0} dot(%g, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %dot.2 = f32[32000,512]{1,0} custom-call(%dot.1), custom_call_target="Sharding", \
sharding={replicated}
  ROOT %transpose.1 = f32[512,32000]{0,1} transpose(%dot.2), dimensions={1,0}
}
"""
        },
        tallies={"between-dot-and-transpose": 1},
    ),
    Example(
        "an annotation that repeats what its operands have",
        2,
        {
            "before_optimizations": """\
HloModule jit_step, num_partitions=4

ENTRY %main (x: f32[16,512]) -> f32[16,512] {
  %x = f32[16,512]{1,0} parameter(0), sharding={mesh['fsdp'=4], [{'fsdp'}, {}]}
  %constant.1 = f32[] constant(2)
  %broadcast.1 = f32[16,512]{1,0} broadcast(%constant.1), dimensions={}
  %multiply.1 = f32[16,512]{1,0} multiply(%x, %broadcast.1)
  %mul.1 = f32[16,512]{1,0} custom-call(%multiply.1), custom_call_target="Sharding", \
sharding={mesh['fsdp'=4], [{'fsdp'}, {}]}
  %tanh.1 = f32[16,512]{1,0} tanh(%mul.1)
  ROOT %tanh.2 = f32[16,512]{1,0} custom-call(%tanh.1), custom_call_target="Sharding", \
sharding={mesh['fsdp'=4], [{'fsdp'}, {}]}
}
"""
        },
        tallies={"repeats-operand": 2},
    ),
    Example(
        "near miss, reported as an annotation only: a transpose that no exchange of operands gives",
        1,
        {
            "before_optimizations": """\
HloModule jit_step, num_partitions=4

ENTRY %main (x: f32[8,1024,512], w: f32[512,8,64]) -> f32[8,8,1024,64] {
  %x = f32[8,1024,512]{2,1,0} parameter(0), sharding={devices=[4,1,1]<=[4]}
  %w = f32[512,8,64]{2,1,0} parameter(1), sharding={devices=[4,1,1]<=[4]}
  %dot.1 = f32[8,1024,8,64]{3,2,1,0} dot(%x, %w), lhs_contracting_dims={2}, \
rhs_contracting_dims={0}
  %dot.2 = f32[8,1024,8,64]{3,2,1,0} custom-call(%dot.1), custom_call_target="Sharding", \
sharding={devices=[4,1,1,1]<=[4]}
  ROOT %transpose.1 = f32[8,8,1024,64]{3,1,2,0} transpose(%dot.2), dimensions={0,2,1,3}
}
"""
        },
        tallies={"annotates": 1},
    ),
    Example(
        "near miss: other custom calls, and a name that says Sharding",
        0,
        {
            "before_optimizations": _HEAD
            + """\
  %dot.1 = f32[32000,512]{1,0} dot(%g, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %dot.2 = f32[32000,512]{1,0} custom-call(%dot.1), custom_call_target="SPMDFullToShardShape", \
metadata={op_name="custom_call_target=\\"Sharding\\""}
  ROOT %transpose.1 = f32[512,32000]{0,1} transpose(%dot.2), dimensions={1,0}
}
"""
        },
    ),
)

FIXES = (
    kernel_order_grad(
        "run the forward dot under jax.sharding.auto_axes: its gradient is not annotated",
        cost="explicit mode only; the sharding of the dot's result must be named",
        clears=EXPLICIT_ON_V5_AND_V6E,
    ),
    vocab_embed(
        "store the kernel transposed, [vocab, embed]: its gradient needs no transpose",
        clears=EXPLICIT_ON_V5_AND_V6E,
    ),
)

RULE = Rule(
    code="HLA001",
    slug="sharding-custom-call",
    summary="Sharding annotations, and those between a dot and its transpose",
    documentation=__doc__,
    reads=("before_optimizations",),
    check=check,
    tally="kind",
    examples=EXAMPLES,
    fixes=FIXES,
    watch=Watch(
        counts="calls to Sharding",
        phases=("unpartitioned", "partitioned", "laid-out"),
        elsewhere="",
        opcodes=("custom-call",),
        holding=_TARGET,
        sees=sees,
        reach="instruction",
    ),
)
