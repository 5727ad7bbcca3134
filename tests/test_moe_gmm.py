"""The routed experts: what they compute, that layouts and modes agree, and what compiles on v6e."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo_audit.cache import Cache, default_folder
from hlo_audit.compiler import Compiled, available_platform, compile_programs
from hlo_audit.dump import read_dump
from hlo_audit.errors import UsageError
from hlo_audit.hlo import Module
from hlo_audit.models import ALL_MODELS, moe_gmm
from hlo_audit.models.moe_gmm import MOE_GMM, Batch, MoEConfig, Params
from hlo_audit.program import MODES, Lowering, Mode, find_subjects

pytestmark = pytest.mark.usefixtures("unoptimized")

LAYOUTS = [layout.name for layout in moe_gmm.LAYOUTS]
DEVICES = 4
SIZES: dict[str, Any] = {"experts": 4, "embed": 16, "mlp": 8, "batch": 4, "seq": 8}
FLOAT32 = MoEConfig(**SIZES, dtype="float32")

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")


# What it computes


def dense_experts(params: Params, tokens: jax.Array, config: MoEConfig) -> jax.Array:
    """Every expert on every token, weighted; for comparison. Tokens are [tokens, embed]."""
    logits = tokens @ params.router
    kth = jnp.sort(logits, axis=-1)[:, -config.top_k][:, None]
    weights = jax.nn.softmax(jnp.where(logits >= kth, logits, -jnp.inf), axis=-1)
    hidden = jnp.einsum("te,xef->txf", tokens, params.wi)
    if config.gated:
        gate, up = hidden[..., : config.mlp], hidden[..., config.mlp :]
        hidden = gate * jax.nn.sigmoid(gate) * up
    else:
        hidden = hidden * jax.nn.sigmoid(hidden)
    return jnp.einsum("tx,txf,xfe->te", weights, hidden, params.wo)


@pytest.mark.parametrize(
    ("layout", "gated", "top_k"),
    [("swapaxes", True, 2), ("transposed-rhs", True, 2), ("transposed-rhs", False, 1)],
)
def test_tokens_are_the_weighted_sum_of_their_experts_and_so_are_the_gradients(
    layout: str, gated: bool, top_k: int
) -> None:
    config = MoEConfig(**SIZES, dtype="float32", gated=gated, top_k=top_k)
    params, _ = moe_gmm.init(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens, weight = (jnp.asarray(rng.standard_normal((24, 16)), jnp.float32) for _ in range(2))

    @jax.jit
    def both(params: Params, tokens: jax.Array) -> Any:
        found = []
        for function in (
            lambda p, t: moe_gmm.apply(p, t, config, layout, interpret=True),
            lambda p, t: dense_experts(p, t, config),
        ):
            out, pull = jax.vjp(function, params, tokens)
            found.append((out, *pull(weight)))
        return found

    ours, dense = map(jax.tree.leaves, both(params, tokens))
    assert len(ours) == len(dense) == 5
    for found, expected in zip(ours, dense, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_parameters_start_with_the_variance_of_their_width_and_momenta_at_zero() -> None:
    config = MoEConfig(experts=8, embed=64, mlp=32)
    params, momenta = moe_gmm.init(config, jax.random.key(0))
    assert [leaf.shape for leaf in params] == [(64, 8), (8, 64, 64), (8, 32, 64)]
    for leaf, width in zip(params, (64, 64, 32), strict=True):
        assert leaf.dtype == jnp.float32
        assert float(jnp.std(leaf)) == pytest.approx(width**-0.5, rel=0.1)
    assert not any(leaf.any() for leaf in momenta)


# Every layout in every mode, on four devices


def run_every_layout(path: Path) -> None:
    """Run each layout in each mode and save what came of it; runs in its own process."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    arrays: Any = {}
    for mode in MODES:
        axis_type = getattr(jax.sharding.AxisType, mode.capitalize())
        mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(axis_type,))
        for layout in LAYOUTS:
            for inputs, results in moe_gmm.run(mesh, layout=layout, **MOE_GMM.run_settings).items():
                for name, array in results.items():
                    arrays["/".join((mode, layout, inputs, name))] = array
    np.savez(path, **arrays)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Array]:
    # The number of devices is fixed once jax has started, as it may have in this process.
    path = tmp_path_factory.mktemp("moe_gmm") / "results.npz"
    command = [sys.executable, "-W", "error", __file__, str(path)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    with np.load(path) as arrays:
        return dict(arrays)


def of(results: dict[str, Array], *key: str) -> dict[str, Array]:
    prefix = "/".join(key) + "/"
    return {name.removeprefix(prefix): a for name, a in results.items() if name.startswith(prefix)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_modes_agree_to_the_bit_where_no_sum_rounds(
    results: dict[str, Array], layout: str, mode: str
) -> None:
    expected = of(results, "auto", "swapaxes", "exact")
    found = of(results, mode, layout, "exact")
    assert set(found) == set(expected)
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_modes_agree_on_random_inputs(
    results: dict[str, Array], layout: str, mode: str
) -> None:
    expected = of(results, "auto", "swapaxes", "random")
    for name, array in of(results, mode, layout, "random").items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_exact_inputs_reach_every_parameter_and_their_step_is_exact(
    results: dict[str, Array],
) -> None:
    config = MoEConfig(**dict[str, Any](MOE_GMM.run_settings))
    params, batch = moe_gmm._exact_inputs(config)
    found = of(results, "auto", "transposed-rhs", "exact")

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        rows = tokens.reshape(-1, config.embed)
        logits = rows @ params.router
        # Ties go to the first expert, as top_k has it.
        _, chosen = jax.lax.top_k(logits, config.top_k)
        mask = (chosen[..., None] == jnp.arange(config.experts)).any(axis=1)
        weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
        hidden = jnp.einsum("te,xef->txf", rows, params.wi)
        gate, up = hidden[..., : config.mlp], hidden[..., config.mlp :]
        out = jnp.einsum("tx,txf,xfe->te", weights, jax.nn.silu(gate) * up, params.wo)
        return 0.5 * jnp.mean((out - batch.targets.reshape(out.shape)) ** 2)

    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        doubles = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, batch.tokens))
        grads, tokens_grad = jax.jit(jax.grad(loss, argnums=(0, 1)))(*doubles)
    finally:
        jax.config.update("jax_enable_x64", before)
    expected = {f"{name} gradient": g for name, g in grads._asdict().items()}
    for name, array in {**expected, "tokens gradient": tokens_grad}.items():
        assert np.abs(array).max() > 1, name
        # In float64 the tails of the sigmoid are 1e-50, which float32 has as 0.
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-30, err_msg=name)


# Refusals, and the model as the command line sees it


def abstract_mesh(axis: str = "fsdp") -> Any:
    return jax.sharding.AbstractMesh((DEVICES,), (axis,))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *((size, 0) for size in (*SIZES, "top_k")),
        ("top_k", 129),
        ("dtype", "int8"),
        ("quantization", "int4"),
        ("momentum", 1.0),
        ("learning_rate", float("nan")),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{setting}={value}") as refusal:
        MoEConfig(**{setting: value})
    assert refusal.value.hint


@pytest.mark.parametrize("size", ["experts", "batch"])
def test_a_size_that_the_mesh_does_not_divide_is_refused(size: str) -> None:
    with pytest.raises(UsageError, match=f"{size}=6 is no multiple of 4.*'fsdp'") as refusal:
        moe_gmm.build(abstract_mesh(), layout="swapaxes", **{**SIZES, size: 6})
    assert refusal.value.hint == f"set {size} to a multiple of 4"


def test_a_mesh_without_the_axis_is_refused() -> None:
    with pytest.raises(UsageError, match="no axis 'fsdp', only 'data'"):
        moe_gmm.build(abstract_mesh("data"), layout="swapaxes", **SIZES)


def test_an_unknown_layout_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no layout of moe-gmm is called 'swapaxis'") as refusal:
        moe_gmm.build(abstract_mesh(), layout="swapaxis", **SIZES)
    assert refusal.value.hint == "did you mean 'swapaxes'?"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_store_the_same_arrays_sharded_over_the_experts(layout: str) -> None:
    _, (params, momenta, batch) = moe_gmm.build(abstract_mesh(), layout=layout, **SIZES)
    shapes = [(16, 4), (4, 16, 16), (4, 8, 16)]
    for leaves in (params, momenta):
        assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [(s, jnp.float32) for s in shapes]
        specs = [tuple(leaf.sharding.spec) for leaf in leaves]
        assert specs == [(None, None), ("fsdp", None, None), ("fsdp", None, None)]
    assert isinstance(batch, Batch)
    for leaf in batch:
        assert (leaf.shape, leaf.dtype) == ((4, 8, 16), jnp.bfloat16)
        assert tuple(leaf.sharding.spec) == ("fsdp", None, None)


def test_the_baseline_is_the_layout_that_shows_the_fault() -> None:
    assert MOE_GMM.baseline_layout == "swapaxes"


def test_listing_the_model_and_its_layouts_imports_no_jax() -> None:
    program = (
        "import sys; from hlo_audit.models.moe_gmm import MOE_GMM, MoEConfig; MoEConfig(); "
        "[layout.summary for layout in MOE_GMM.layouts]; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# Under the TPU compiler

needs_libtpu = pytest.mark.skipif(
    available_platform() != "tpu", reason="libtpu is made for Linux x86-64 only"
)

# wi [16, 256, 176]: no multiple of the lanes
NARROW = {"experts": "16", "embed": "256", "mlp": "88"}
EXPERTS = (128, 16)

COMPILED: dict[str, tuple[dict[str, str], tuple[Mode, ...]]] = {
    "default": ({}, MODES),
    "narrow": (NARROW, ("explicit",)),
}


class WeightCopy(NamedTuple):
    """A copy of all gathered weights that only kernels read.

    Attributes:
        dims: of the copy.
        order: its minor-to-major order.
        bitcast: whether the kernels see it with other dimensions.
        kernels: how many of them there are.
    """

    dims: tuple[int, ...]
    order: tuple[int, ...]
    bitcast: bool
    kernels: int


Copies = Callable[[str, str, str], list[WeightCopy]]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Copies:
    """Find the weight-sized copies of a program of COMPILED, by its name, mode and layout."""
    subjects = {
        (name, str(subject.mode), str(subject.layout)): subject
        for name, (settings, modes) in COMPILED.items()
        for subject in find_subjects(
            ["moe-gmm"], ALL_MODELS, layouts=["all"], modes=modes, settings=settings
        )
        if isinstance(subject, Lowering)
    }
    outcomes = compile_programs(
        list(subjects.values()),
        into=tmp_path_factory.mktemp("moe_gmm_dumps"),
        cache=Cache(default_folder(os.environ)),
    )
    found = {}
    for key, outcome in zip(subjects, outcomes, strict=True):
        assert isinstance(outcome, Compiled), outcome
        (dump,) = read_dump(outcome.folder).modules
        assert dump.final is not None
        found[key] = sorted(weight_copies(dump.final.read()))
    return lambda name, mode, layout: found[name, mode, layout]


def weight_copies(module: Module) -> Iterator[WeightCopy]:
    for instruction in module.entry.instructions:
        shape = instruction.shape
        if instruction.opcode != "copy" or len(shape.dimensions) != 3:
            continue
        if shape.dimensions[0] not in EXPERTS:
            continue
        users = list(instruction.users)
        bitcasts = [user for user in users if user.opcode == "bitcast"]
        kernels = [
            kernel
            for user in users
            for kernel in (user.users if user.opcode == "bitcast" else (user,))
        ]
        if any(kernel.custom_call_target != "tpu_custom_call" for kernel in kernels):
            continue
        yield WeightCopy(
            shape.dimensions,
            shape.minor_to_major,
            any(b.shape.dimensions != shape.dimensions for b in bitcasts),
            len(kernels),
        )


@needs_libtpu
@pytest.mark.parametrize("mode", MODES)
def test_swapped_weights_are_written_once_for_each_product(copies: Copies, mode: str) -> None:
    assert copies("default", mode, "swapaxes") == [
        WeightCopy((128, 384, 512), (1, 2, 0), True, 1),
        WeightCopy((128, 512, 768), (1, 2, 0), True, 1),
    ]


@needs_libtpu
@pytest.mark.parametrize("mode", MODES)
def test_weights_that_are_read_transposed_are_not_copied(copies: Copies, mode: str) -> None:
    assert copies("default", mode, "transposed-rhs") == []


@needs_libtpu
def test_a_stored_layout_that_is_not_row_major_is_a_fault_that_stays(copies: Copies) -> None:
    swapped = copies("narrow", "explicit", "swapaxes")
    in_place = copies("narrow", "explicit", "transposed-rhs")
    # wo, [16, 88, 256], is stored row-major: swapped in the one and read in the other.
    wo = WeightCopy((16, 88, 256), (1, 2, 0), True, 1)
    assert [copy for copy in swapped if copy.dims == wo.dims] == [wo]
    assert [copy for copy in in_place if copy.dims == wo.dims] == []
    # wi is stored with 256 minor, for less padding. The kernels want it row-major, forward and
    # again in the backward pass; as it lies it is its own transpose, and swapping it is free.
    for found in (swapped, in_place):
        wi = [copy for copy in found if copy.dims == (16, 256, 176)]
        assert [(copy.order, copy.bitcast) for copy in wi] == [((2, 1, 0), False)] * 2


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)  # as the fixture unoptimized
    run_every_layout(Path(sys.argv[1]))
