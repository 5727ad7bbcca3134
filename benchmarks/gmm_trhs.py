"""The gate of the grouped matmul that reads its weights transposed.

    python benchmarks/gmm_trhs.py [--rows M] [--groups G] [--embed E] [--mlp F] [--topology T]

The input gradients of an expert's two products, ``wi`` [groups, embed, mlp] and ``wo`` [groups,
mlp, embed], by the kernel that reads the weights as they are, against the same kernel on the
weights with swapped axes: the kernel alone, the kernel on half of the groups by an offset, and
through the custom gradient, forward product and weight gradient included.

Where a TPU is attached all of it runs there: both must return the same values, and the transposed
kernel must not take longer than swap and kernel together. Elsewhere the values are compared in
Pallas' interpreter, at a small size, and the full size is compiled for a TPU: the swap must show as
a copy of the weights, which the transposed kernel must not have, and so cost bytes and cycles. The
first line says which it was. The exit code is 1 where the gate fails.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hlo_audit.compiler import Compiled, compile_programs
from hlo_audit.cost import estimate_cost
from hlo_audit.dump import read_dump
from hlo_audit.errors import HloAuditError
from hlo_audit.lazy_import import lazy_import
from hlo_audit.models.grouped_matmul import (
    DLHS_POLICIES,
    LANES,
    SWAPAXES,
    TRANSPOSED_RHS,
    grouped_matmul,
    product,
)
from hlo_audit.program import Lowering

jax = lazy_import("jax")
jnp = lazy_import("jax.numpy")
np = lazy_import("numpy")

SMALL = {"rows": 64, "groups": 4, "embed": 32, "mlp": 16}
"""What the interpreter runs."""

TIMED_RUNS = 20
SLOWER_BY = 1.02
"""How much longer than swap and kernel the transposed kernel may take: the noise of a timer."""


@dataclass(frozen=True)
class Case:
    """One comparison: ``level`` is kernel, offset or gradient; ``weights`` is wi or wo."""

    level: str
    weights: str

    @property
    def label(self) -> str:
        return f"{self.level} {self.weights}"


CASES = [
    Case(level, weights) for level in ("kernel", "offset", "gradient") for weights in ("wi", "wo")
]


def shapes(
    case: Case, *, rows: int, groups: int, embed: int, mlp: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The shapes of the product's input, of the weights here, and of the output's gradient."""
    k, n = (embed, mlp) if case.weights == "wi" else (mlp, embed)
    held = max(groups // 2, 1) if case.level == "offset" else groups
    return (rows, k), (held, k, n), (rows, n)


def step(case: Case, policy: str, groups: int, *, interpret: bool) -> Callable[..., Any]:
    """``f(x, weights, dout, sizes)``, which returns the input gradient, or all of a product's."""

    def kernel(x: Any, weights: Any, dout: Any, sizes: Any) -> Any:
        in_place = policy == TRANSPOSED_RHS
        return product(
            dout,
            weights if in_place else weights.swapaxes(1, 2),
            sizes,
            group_offset=groups // 4 if case.level == "offset" else 0,
            transpose_rhs=in_place,
            interpret=interpret,
        )

    def gradient(x: Any, weights: Any, dout: Any, sizes: Any) -> Any:
        def forward(x: Any, weights: Any) -> Any:
            return grouped_matmul(x, weights, sizes, dlhs=policy, interpret=interpret)

        out, pull = jax.vjp(forward, x, weights)
        return out, *pull(dout)

    return gradient if case.level == "gradient" else kernel


def build(mesh: Any, *, layout: str, level: str, weights: str, **sizes: int) -> Any:
    """The program that is compiled for a TPU, as ``hlo-audit`` builds one."""
    case, groups = Case(level, weights), sizes["groups"]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        for shape in shapes(case, **sizes)
    ]
    arguments.append(jax.ShapeDtypeStruct((groups,), jnp.int32, sharding=sharding))
    return jax.jit(step(case, layout, groups, interpret=False)), tuple(arguments)


def values(case: Case, sizes: Mapping[str, int]) -> list[Any]:
    """Small integers, for which every sum is exact, and groups that are very uneven."""
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.integers(-2, 3, shape), jnp.bfloat16) for shape in shapes(case, **sizes)
    ]
    shares = rng.dirichlet(np.full(sizes["groups"], 0.3))
    arrays.append(jnp.asarray(rng.multinomial(sizes["rows"], shares), jnp.int32))
    return arrays


def same_values(case: Case, sizes: Mapping[str, int], *, interpret: bool) -> bool:
    """Whether both policies return the same, and what they return is not all zero."""
    arguments = values(case, sizes)
    swapped, in_place = (
        [
            np.asarray(leaf, np.float32)
            for leaf in jax.tree.leaves(
                jax.jit(step(case, policy, sizes["groups"], interpret=interpret))(*arguments)
            )
        ]
        for policy in (SWAPAXES, TRANSPOSED_RHS)
    )
    return all(a.any() and (a == b).all() for a, b in zip(swapped, in_place, strict=True))


# With a TPU


def time_all(sizes: Mapping[str, int], table: Table) -> bool:
    for column in ("swap and kernel ms", "transposed", "kernel alone"):
        table.add_column(column, justify="right")
    passed = True
    for case in CASES:
        arguments = values(case, sizes)
        swapped, in_place = (
            seconds(jax.jit(step(case, policy, sizes["groups"], interpret=False)), arguments)
            for policy in (SWAPAXES, TRANSPOSED_RHS)
        )
        alone = ""
        if case.level != "gradient":
            _, weights, dout, group_sizes = arguments
            ready = jax.jit(lambda w: w.swapaxes(1, 2))(weights).block_until_ready()
            offset = sizes["groups"] // 4 if case.level == "offset" else 0
            run = jax.jit(lambda w, d, s, offset=offset: product(d, w, s, group_offset=offset))
            alone = f"{1e3 * seconds(run, [ready, dout, group_sizes]):.3f}"
        same = same_values(case, sizes, interpret=False)
        fast = in_place <= SLOWER_BY * swapped
        passed &= same and fast
        table.add_row(
            case.label,
            said(same),
            said(fast),
            f"{1e3 * swapped:.3f}",
            f"{1e3 * in_place:.3f}",
            alone,
        )
    return passed


def seconds(run: Callable[..., Any], arguments: list[Any]) -> float:
    """The median of some runs, the first left out."""
    jax.block_until_ready(run(*arguments))
    found = []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        found.append(time.perf_counter() - start)
    return statistics.median(found)


# Without one


@dataclass(frozen=True)
class Measured:
    """What a compiled program does besides its kernels, for which there is no estimate.

    Attributes:
        copied_bytes: of the weights copied to feed a kernel, read and written.
        estimated_cycles: of everything but the kernels.
    """

    copied_bytes: int
    estimated_cycles: int


def compile_all(sizes: Mapping[str, int], topology: str, table: Table) -> bool:
    for column in ("copied MB", "transposed", "est. cycles", "transposed"):
        table.add_column(column, justify="right")
    programs = {
        (case, policy): Lowering(
            program="gmm-trhs",
            build=f"{Path(__file__).resolve()}:build",
            mode="auto",
            layout=policy,
            settings={"level": case.level, "weights": case.weights, **sizes},
            mesh={"chip": -1},
            platform="tpu",
            topology=topology,
        )
        for case in CASES
        for policy in DLHS_POLICIES
    }
    with tempfile.TemporaryDirectory() as folder:
        outcomes = compile_programs(list(programs.values()), into=Path(folder))
        measured = {}
        for key, outcome in zip(programs, outcomes, strict=True):
            if not isinstance(outcome, Compiled):
                raise outcome
            held_bytes = 2 * np.prod(shapes(key[0], **sizes)[1], dtype=int)
            measured[key] = measure(outcome.folder, int(held_bytes))
    passed = True
    for case in CASES:
        swapped, in_place = (measured[case, policy] for policy in (SWAPAXES, TRANSPOSED_RHS))
        same = same_values(case, SMALL, interpret=True)
        cheaper = (
            in_place.copied_bytes == 0 < swapped.copied_bytes
            and in_place.estimated_cycles < swapped.estimated_cycles
        )
        passed &= same and cheaper
        table.add_row(
            case.label,
            said(same),
            said(cheaper),
            *(f"{m.copied_bytes / 1e6:,.1f}" for m in (swapped, in_place)),
            *(f"{m.estimated_cycles:,}" for m in (swapped, in_place)),
        )
    return passed


def measure(folder: Path, weights_bytes: int) -> Measured:
    """Read what the compiler wrote; copies of the weights' size are counted, read and written."""
    (dump,) = read_dump(folder).modules
    assert dump.final is not None
    module = dump.final.read()
    copies = [
        instruction.shape
        for instruction in module.instructions
        if instruction.opcode == "copy" and instruction.shape.logical_bytes == weights_bytes
    ]
    cost = estimate_cost(module)
    return Measured(
        copied_bytes=2 * sum(shape.padded_bytes for shape in copies),
        estimated_cycles=0 if cost is None else cost.estimated_cycles,
    )


def said(passed: bool) -> str:
    return "yes" if passed else "NO"


def tpu_is_attached() -> bool:
    """Whether a TPU's device file is there. jax itself would wait for one that is not."""
    files = (*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*"))
    return bool(files) and jax.default_backend() == "tpu"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--embed", type=int, default=2816)
    parser.add_argument("--mlp", type=int, default=1408)
    parser.add_argument("--topology", default="v6e:1x1", help="compiled for, without a TPU")
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in SMALL}
    if min(sizes.values()) < 1 or sizes["groups"] < 2:
        parser.error("sizes are 1 or more, and there are 2 groups at least")
    console = Console()
    attached = tpu_is_attached()
    if not attached:
        if sizes["embed"] % LANES or sizes["mlp"] % LANES:
            # XLA stores such weights in another order, and copies them for either kernel.
            parser.error(f"without a TPU embed and mlp are multiples of {LANES}")
        os.environ["JAX_PLATFORMS"] = "cpu"
    console.print(
        f"timed on {jax.devices()[0].device_kind}"
        if attached
        else f"no TPU: values in Pallas' interpreter at {SMALL}, costs as compiled for "
        f"{options.topology}"
    )
    console.print(f"{sizes}, bfloat16")
    table = Table("case", "same", "not slower" if attached else "cheaper")
    try:
        passed = time_all(sizes, table) if attached else compile_all(sizes, options.topology, table)
    except HloAuditError as error:
        console.print(f"error: {error}")
        return 2
    console.print(table)
    if not attached:
        console.print("on the left the swapped weights; cycles are of all but the kernels")
    console.print("the gate passed" if passed else "the gate FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
