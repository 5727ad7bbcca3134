"""The mHC block: what it computes, that its layouts agree, and what its layouts compile to."""

from __future__ import annotations

# mypy: untyped-calls-exclude=jax
import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hlo_audit import checkpoint
from hlo_audit.cache import Cache, default_folder
from hlo_audit.compile_worker import make_mesh
from hlo_audit.compiler import Compiled, available_platform, compile_programs
from hlo_audit.errors import UsageError
from hlo_audit.models import mhc, mhc_export
from hlo_audit.models.mhc import MHC, MHCConfig
from hlo_audit.program import MODES, Lowering, find_subjects

pytestmark = pytest.mark.usefixtures("unoptimized")

LAYOUTS = ("flat", "split")
DEVICES = 8
SIZES: dict[str, Any] = {"rate": 4, "embed": 16, "mlp": 24, "batch": 2, "seq": 3}
FLOAT32 = MHCConfig(**SIZES, dtype="float32")
LITE = dataclasses.replace(FLOAT32, mapping="lite")
CONFIGS = pytest.mark.parametrize("config", [FLOAT32, LITE], ids=["sinkhorn", "lite"])

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def random_params(config: MHCConfig, layout: str = "flat") -> dict[str, Any]:
    """Drawn parameters with mappings that are not almost constant."""
    params = mhc.init_params(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    for name, leaf in params.items():
        if name not in (*mhc.ALPHAS, "wi", "wo"):
            params[name] = leaf + jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32) / 2
    converted: dict[str, Any] = mhc.convert(params, "flat", layout, config)
    return converted


def example_batch(config: MHCConfig) -> mhc.Batch:
    rng = np.random.default_rng(1)
    shape = (config.batch, config.seq, config.rate, config.embed)
    return mhc.Batch(*(jnp.asarray(rng.standard_normal(shape), config.dtype) for _ in range(2)))


# What it computes


def expected_output(params: dict[str, Any], x: Any, config: MHCConfig) -> Array:
    """The block in numpy and float64, one token and one stream at a time."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    k, d = config.rate, config.embed
    out = np.zeros(x.shape)
    for b, s in np.ndindex(*x.shape[:2]):
        streams = np.asarray(x[b, s], np.float64)
        flat = streams.reshape(k * d)
        normed = flat / np.sqrt((flat**2).mean() + config.norm_eps) * p["norm_scale"]
        logits = {
            part: p[f"{part}_alpha_scale"] * (normed @ p[f"{part}_alpha"]) + p[f"{part}_beta"]
            for part in ("pre", "post", "res")
        }
        pre, post = (1 / (1 + np.exp(-logits[part])) for part in ("pre", "post"))
        if config.mapping == "lite":
            weights = np.exp(logits["res"]) / np.exp(logits["res"]).sum()
            res = sum(
                w * np.eye(k)[list(order)]
                for w, order in zip(weights, itertools.permutations(range(k)), strict=True)
            )
        else:
            res = np.exp(logits["res"].reshape(k, k))
            res /= res.sum(axis=0, keepdims=True)
            for _ in range(config.sinkhorn_iterations):
                res /= res.sum(axis=1, keepdims=True)
                res /= res.sum(axis=0, keepdims=True)
        inner = pre @ streams
        inner = inner / np.sqrt((inner**2).mean() + config.norm_eps) * p["mlp_norm_scale"]
        branch = np.maximum(inner @ p["wi"], 0) @ p["wo"]
        for m in range(k):
            out[b, s, m] = sum(res[i, m] * streams[i] for i in range(k)) + 2 * post[m] * branch
    return out


@CONFIGS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_block_is_what_the_paper_says(layout: str, config: MHCConfig) -> None:
    x = example_batch(config).x
    apply = jax.jit(mhc.apply, static_argnums=(2, 3))
    found = apply(random_params(config, layout), x, config, layout)
    expected = expected_output(random_params(config), x, config)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@CONFIGS
def test_outputs_and_gradients_do_not_depend_on_the_layout(config: MHCConfig) -> None:
    x, target = example_batch(config)
    found = {}
    for layout in LAYOUTS:
        grad = jax.jit(jax.value_and_grad(mhc.loss, argnums=(0, 1)), static_argnums=(3, 4))
        value, (grads, x_grad) = grad(random_params(config, layout), x, target, config, layout)
        found[layout] = (value, mhc.convert(grads, layout, "flat", config), x_grad)
    for flat, split in zip(*map(jax.tree.leaves, found.values()), strict=True):
        assert np.abs(flat).max() > 0
        np.testing.assert_allclose(split, flat, rtol=1e-4, atol=1e-6)


def test_sinkhorn_makes_rows_and_columns_sum_to_one_whatever_the_logits() -> None:
    logits = 4 * jax.random.normal(jax.random.key(0), (64, 4, 4))
    matrix = mhc.sinkhorn(logits, 20)
    np.testing.assert_allclose(matrix.sum(axis=-2), 1.0, rtol=1e-5)
    assert (
        np.abs(matrix.sum(axis=-1) - 1).max()
        < np.abs(mhc.sinkhorn(logits, 1).sum(axis=-1) - 1).max()
    )
    huge = mhc.sinkhorn(jnp.full((4, 4), 1e4) * jnp.eye(4), 20)
    np.testing.assert_allclose(huge, np.eye(4), atol=1e-6)


def test_the_permutations_are_all_of_them_and_the_first_is_the_identity() -> None:
    matrices = mhc.permutations(3)
    assert matrices.shape == (6, 3, 3)
    assert len({matrix.tobytes() for matrix in matrices}) == 6
    assert (matrices.sum(axis=1) == 1).all()
    assert (matrices.sum(axis=2) == 1).all()
    np.testing.assert_array_equal(matrices[0], np.eye(3))


# Layouts


@CONFIGS
def test_split_starts_from_the_values_of_flat_reshaped(config: MHCConfig) -> None:
    flat, split = (mhc.init_params(config, jax.random.key(3), layout) for layout in LAYOUTS)
    k, d = config.rate, config.embed
    assert flat["norm_scale"].shape == (k * d,)
    assert split["norm_scale"].shape == (k, d)
    for name, maps in config.maps.items():
        assert flat[name].shape == (k * d, maps)
        np.testing.assert_array_equal(split[name], flat[name].reshape(k, d, maps))
        assert float(jnp.std(flat[name])) == pytest.approx((k * d) ** -0.5, rel=0.15)
    for name in set(flat) - {"norm_scale", *mhc.ALPHAS}:
        np.testing.assert_array_equal(split[name], flat[name], err_msg=name)
    draws = [np.asarray(flat[name]).ravel()[:8] for name in (*mhc.ALPHAS, "wi", "wo")]
    assert len({draw.tobytes() for draw in draws}) == len(draws)


@pytest.mark.parametrize("optimizer", mhc.OPTIMIZERS)
@pytest.mark.parametrize("alpha_sharding", mhc.ALPHA_SHARDINGS)
def test_a_checkpoint_of_state_and_moments_is_a_pure_reshape_and_comes_back_exactly(
    optimizer: str, alpha_sharding: str
) -> None:
    config = dataclasses.replace(FLOAT32, optimizer=optimizer, alpha_sharding=alpha_sharding)
    description = mhc.checkpoint_layouts(config)
    rng = np.random.default_rng(0)
    split = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype),
        mhc.init(config, jax.random.key(0), "split"),
    )
    stored = checkpoint.to_canonical(split, "split", description)
    checkpoint.check(stored, "flat", description)
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(stored)}
    assert (4, 16, 4) not in shapes
    assert (64, 4) in shapes
    for flat_leaf, split_leaf in zip(jax.tree.leaves(stored), jax.tree.leaves(split), strict=True):
        np.testing.assert_array_equal(flat_leaf.reshape(split_leaf.shape), split_leaf)
    tag = checkpoint.metadata("flat", description)
    back = checkpoint.from_canonical(stored, "split", description, stored_metadata=tag)
    jax.tree.map(np.testing.assert_array_equal, back, split)
    with pytest.raises(UsageError, match="of layout flat; layout split stores"):
        checkpoint.check(stored, "split", description)


def first_update(transform: optax.GradientTransformation, grads: Any, params: Any) -> Any:
    """In one program: one by one, each operation is compiled for each shape."""
    return jax.jit(lambda grads, params: transform.update(grads, transform.init(params), params))(
        grads, params
    )[0]


@pytest.mark.parametrize("optimizer", mhc.OPTIMIZERS)
def test_the_update_from_either_layout_is_the_same_array_reshaped(optimizer: str) -> None:
    config = dataclasses.replace(FLOAT32, optimizer=optimizer)
    grads = random_params(config)
    updates = {}
    for layout in LAYOUTS:
        params = mhc.init_params(config, jax.random.key(0), layout)
        updates[layout] = first_update(
            mhc.optimizer(config, layout), mhc.convert(grads, "flat", layout, config), params
        )
    for name, flat in updates["flat"].items():
        np.testing.assert_allclose(
            updates["split"][name].reshape(flat.shape), flat, rtol=1e-5, atol=1e-8, err_msg=name
        )


def test_muon_orthogonalises_the_alphas_over_both_of_their_input_axes() -> None:
    config = dataclasses.replace(FLOAT32, optimizer="muon", weight_decay=0.0, learning_rate=1.0)
    params = mhc.init_params(config, jax.random.key(0), "split")
    update = first_update(mhc.optimizer(config, "split"), params, params)
    for name, maps in config.maps.items():
        singular = np.linalg.svd(np.asarray(update[name]).reshape(-1, maps), compute_uv=False)
        # The five steps of optax leave them between 0.5 and 1.5 (its documentation).
        assert 0.5 < singular.min() <= singular.max() < 1.5
    # The rest goes to AdamW, whose update is the same for gradients of any size.
    assert params["mlp_norm_scale"].mean() != params["res_alpha_scale"]
    np.testing.assert_allclose(update["norm_scale"], update["res_alpha_scale"], rtol=1e-3)


def test_weight_decay_reaches_the_same_parameters_in_both_layouts() -> None:
    config = dataclasses.replace(FLOAT32, learning_rate=1.0, weight_decay=0.5)
    for layout in LAYOUTS:
        params = jax.tree.map(jnp.ones_like, mhc.init_params(config, jax.random.key(0), layout))
        transform = mhc.optimizer(config, layout)
        zeros = jax.tree.map(jnp.zeros_like, params)
        update, _ = transform.update(zeros, transform.init(params), params)
        decayed = {name for name, leaf in update.items() if leaf.any()}
        assert decayed == {*mhc.ALPHAS, "wi", "wo"}
        assert optax.apply_updates(params, update)["wi"].max() == 0.5


@pytest.mark.parametrize(
    ("layout", "alpha_sharding", "shape", "spec"),
    [
        ("flat", "replicated", (64, 4), (None, None)),
        ("flat", "embed", (64, 4), ("tensor", None)),
        ("split", "replicated", (4, 16, 4), (None, None, None)),
        ("split", "embed", (4, 16, 4), (None, "tensor", None)),
    ],
)
@pytest.mark.parametrize("optimizer", mhc.OPTIMIZERS)
def test_the_abstract_arguments_say_how_each_layout_is_sharded(
    layout: str, alpha_sharding: str, shape: tuple[int, ...], spec: Any, optimizer: str
) -> None:
    _, args = mhc.build(
        abstract_mesh(),
        layout=layout,
        alpha_sharding=alpha_sharding,
        optimizer=optimizer,
        **SIZES,
    )
    params, opt_state, x, target = args
    alphas = [params["pre_alpha"]]
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        if getattr(path[-1], "key", None) == "pre_alpha":
            alphas.append(leaf)
    assert len(alphas) == (3 if optimizer == "adamw" else 2)
    for leaf in alphas:
        assert (leaf.shape, tuple(leaf.sharding.spec)) == (shape, spec)
    assert (x.shape, x.dtype) == (target.shape, target.dtype) == ((2, 3, 4, 16), jnp.bfloat16)
    assert tuple(x.sharding.spec) == ("expert", None, None, "tensor")


def test_a_mesh_without_the_axis_of_the_batch_leaves_the_batch_whole() -> None:
    mesh = abstract_mesh((8,), ("tensor",))
    assert tuple(mhc.batch_shardings(FLOAT32, mesh).x.spec) == (None, None, None, "tensor")


# Export


@CONFIGS
def test_the_export_is_the_same_from_either_layout_and_comes_back(config: MHCConfig) -> None:
    params = {layout: random_params(config, layout) for layout in LAYOUTS}
    exported = {layout: mhc_export.export_mappings(params[layout], config) for layout in LAYOUTS}
    for name, array in exported["flat"].items():
        np.testing.assert_array_equal(exported["split"][name], array, err_msg=name)
    maps = sum(config.maps.values())
    assert exported["flat"]["fn"].shape == (maps, 64)
    assert (exported["flat"]["base"].shape, exported["flat"]["scale"].shape) == ((maps,), (3,))
    np.testing.assert_array_equal(exported["flat"]["fn"][5], params["flat"]["post_alpha"][:, 1])
    as_lists = {name: array.tolist() for name, array in exported["flat"].items()}
    for layout in LAYOUTS:
        for arrays in (exported["flat"], as_lists):
            back = mhc_export.import_mappings(arrays, config, layout)
            assert len(back) == 9
            for name, array in back.items():
                np.testing.assert_array_equal(array, params[layout][name], err_msg=name)


def test_alphas_may_be_lists_and_of_either_layout() -> None:
    alphas = [np.arange(64.0 * n).reshape(4, 16, n) for n in (4, 4, 16)]
    fused = mhc_export.concat_alphas(alphas)
    assert fused.shape == (24, 64)
    flat = [alphas[0].reshape(64, 4).tolist(), alphas[1].tolist(), alphas[2].reshape(64, 16)]
    np.testing.assert_array_equal(mhc_export.concat_alphas(flat), fused)


@pytest.mark.parametrize(
    ("alphas", "message"),
    [
        ([np.ones((8, 2))] * 2, "three alphas, pre, post and res, and 2 were given"),
        ([np.ones((8, 2))] * 4, "and 4 were given"),
        ([np.ones((8, 2)), np.ones(8), np.ones((8, 4))], r"post has the shape \[8\]"),
        ([np.ones((8, 2)), [[1.0], [1.0, 2.0]], np.ones((8, 4))], "post is no array of numbers"),
        ([np.ones((8, 2)), np.ones((8, 2)), np.ones((2, 3, 4))], "pre 8, post 8, res 6"),
    ],
)
def test_alphas_that_are_none_are_refused(alphas: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        mhc_export.concat_alphas(alphas)
    assert refusal.value.hint


def test_arrays_of_another_block_are_neither_exported_nor_imported() -> None:
    params = random_params(FLOAT32)
    wider = dataclasses.replace(FLOAT32, embed=32)
    with pytest.raises(UsageError, match=r"pre_alpha has the shape \[64, 4\], and the block"):
        mhc_export.export_mappings(params, wider)
    with pytest.raises(UsageError, match="there is no pre_beta among the arrays"):
        mhc_export.export_mappings({n: v for n, v in params.items() if n != "pre_beta"}, FLOAT32)
    exported = mhc_export.export_mappings(params, FLOAT32)
    with pytest.raises(UsageError, match=r"fn has the shape \[24, 64\], and \[24, 128\]"):
        mhc_export.import_mappings(exported, wider, "flat")
    with pytest.raises(UsageError, match="no stored layout of mhc is called 'flats'"):
        mhc_export.import_mappings(exported, FLOAT32, "flats")


# Refusals


def abstract_mesh(
    sizes: tuple[int, ...] = (1, 8), axes: tuple[str, ...] = ("expert", "tensor")
) -> Any:
    return jax.sharding.AbstractMesh(sizes, axes)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *((size, 0) for size in (*SIZES, "sinkhorn_iterations")),
        ("mapping", "softmax"),
        ("dtype", "bf16"),
        ("alpha_sharding", "tensor"),
        ("optimizer", "adam"),
        ("b1", 1.0),
        ("b2", -0.1),
        ("learning_rate", float("nan")),
        ("weight_decay", -1.0),
        ("eps", 0.0),
        ("norm_eps", -1.0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{setting}={value}") as refusal:
        MHCConfig(**{setting: value})
    assert refusal.value.hint


def test_too_many_permutations_are_refused() -> None:
    MHCConfig(mapping="lite", rate=6)
    with pytest.raises(UsageError, match="rate=7 has 5,040 permutations"):
        MHCConfig(mapping="lite", rate=7)


@pytest.mark.parametrize(("size", "axis"), [("embed", 8), ("mlp", 8), ("batch", 3)])
def test_a_size_that_the_mesh_does_not_divide_is_refused(size: str, axis: int) -> None:
    mesh = abstract_mesh((3, 8))
    with pytest.raises(UsageError, match=f"{size}=20 is no multiple of {axis}") as refusal:
        mhc.build(mesh, layout="flat", **{**SIZES, "batch": 3, size: 20})
    assert refusal.value.hint == f"set {size} to a multiple of {axis}"


def test_a_mesh_without_the_axis_is_refused() -> None:
    with pytest.raises(UsageError, match="no axis 'tensor', only 'fsdp'"):
        mhc.build(abstract_mesh((8,), ("fsdp",)), layout="flat", **SIZES)


def test_an_unknown_layout_is_refused_with_the_nearest() -> None:
    for call in (
        lambda: mhc.build(abstract_mesh(), layout="splits", **SIZES),
        lambda: mhc.init(FLOAT32, jax.random.key(0), "splits"),
    ):
        with pytest.raises(UsageError, match="no layout of mhc is called 'splits'") as refusal:
            call()
        assert refusal.value.hint == "did you mean 'split'?"


def test_listing_the_model_imports_neither_jax_nor_optax() -> None:
    program = (
        "import sys; from hlo_audit.models.mhc import MHC, MHCConfig; MHC.stored(MHCConfig()); "
        "sys.exit('jax' in sys.modules or 'optax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# Every layout in every mode, on eight devices


class Run(NamedTuple):
    """One layout in one mode, with one setting changed."""

    variant: str
    mode: str
    layout: str

    def key(self, *name: str) -> str:
        return "|".join((*self, *name))


VARIANTS = {
    "sinkhorn": {},
    "lite": {"mapping": "lite"},
    "muon": {"optimizer": "muon", "alpha_sharding": "embed"},
}
RUNS = [
    *(Run(v, mode, layout) for v in ("sinkhorn", "lite") for mode in MODES for layout in LAYOUTS),
    *(Run("muon", "explicit", layout) for layout in LAYOUTS),
]


def run_every_layout(path: Path) -> None:
    """Take the steps of :func:`mhc.run` with each of RUNS; runs in its own process."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    arrays: Any = {}
    for run in RUNS:
        settings: dict[str, Any] = {**MHC.configure({}), **MHC.run_settings}
        mesh = make_mesh(jax.devices("cpu"), {"expert": 2, "tensor": 4}, run.mode)
        results = mhc.run(mesh, layout=run.layout, **{**settings, **VARIANTS[run.variant]})
        for inputs, named in results.items():
            arrays |= {run.key(inputs, name): array for name, array in named.items()}
    np.savez(path, **arrays)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Array]:
    # The number of devices is fixed once jax has started, as it may have in this process.
    path = tmp_path_factory.mktemp("mhc") / "results.npz"
    command = [sys.executable, "-W", "error", __file__, str(path)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    with np.load(path) as arrays:
        return dict(arrays)


def named(results: dict[str, Array], run: Run, inputs: str) -> dict[str, Array]:
    start = run.key(inputs, "")
    return {key.removeprefix(start): a for key, a in results.items() if key.startswith(start)}


BASELINE_MODES = {"sinkhorn": "auto", "lite": "auto", "muon": "explicit"}


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_steps_do_not_depend_on_layout_or_mode(results: dict[str, Array], run: Run) -> None:
    baseline = named(results, Run(run.variant, BASELINE_MODES[run.variant], "flat"), "random")
    found = named(results, run, "random")
    assert found.keys() == baseline.keys()
    for name, expected in baseline.items():
        # Sums are taken in other orders; AdamW and Muon divide by the gradient's own size.
        largest = max(float(np.abs(expected).max()), 1e-30)
        assert np.abs(found[name] - expected).max() <= 2e-5 * largest, name


@pytest.mark.parametrize("run", [run for run in RUNS if run.variant != "muon"], ids="-".join)
def test_steps_agree_bit_for_bit_where_no_sum_rounds(results: dict[str, Array], run: Run) -> None:
    baseline = named(results, Run(run.variant, "auto", "flat"), "exact")
    for name, array in named(results, run, "exact").items():
        np.testing.assert_array_equal(array, baseline[name], err_msg=name)
    for name in ("norm_scale", "post_alpha", "res_alpha"):
        # No agreement of zeros. The gradient of pre is one: the MLP's norm undoes its size.
        assert np.count_nonzero(baseline[f"opt_state/0/mu/{name}"]), name


# What the layouts compile to

needs_tpu_compiler = pytest.mark.skipif(
    available_platform() != "tpu", reason="libtpu is not installed"
)


class Program(NamedTuple):
    """Collectives of the final module, by opcode and shape, and the estimated cycles."""

    collectives: list[str]
    cycles: int


def compile_in(
    folder: Path, modes: tuple[Any, ...], layouts: tuple[str, ...], **settings: str
) -> dict[tuple[str, str], Program]:
    subjects = find_subjects(["mhc"], [MHC], modes=modes, layouts=layouts, settings=settings)
    programs: dict[tuple[str, str], Program] = {}
    cache = Cache(default_folder(os.environ))
    lowerings = [subject for subject in subjects if isinstance(subject, Lowering)]
    for outcome in compile_programs(lowerings, into=folder, jobs=1, cache=cache):
        assert isinstance(outcome, Compiled), outcome
        (final,) = outcome.folder.glob("*.after_codegen.txt")
        text = final.read_text()
        collectives = re.findall(
            r"= \(?(\w+\[[\d,]*\])\S* .*?\b(all-gather|all-to-all|collective-permute)(?:-start)?\(",
            text,
        )
        cycles = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))
        key = (str(outcome.lowering.mode), str(outcome.lowering.layout))
        programs[key] = Program([f"{opcode} {shape}" for shape, opcode in collectives], cycles)
    return programs


@needs_tpu_compiler
def test_flat_gathers_all_streams_and_split_does_not(tmp_path: Path) -> None:
    programs = compile_in(tmp_path, MODES, LAYOUTS)
    streams = "all-gather bf16[2,128,4,1024]"
    for mode in MODES:
        flat, split = programs[mode, "flat"], programs[mode, "split"]
        assert flat.collectives.count(streams) == 1
        assert not [name for name in split.collectives if "4,1024]" in name and "128" in name]
        assert 0 < split.cycles < 0.95 * flat.cycles


@needs_tpu_compiler
def test_with_the_alphas_sharded_the_flatten_moves_shares_around(tmp_path: Path) -> None:
    programs = compile_in(tmp_path, ("auto",), LAYOUTS, alpha_sharding="embed")
    opcodes = [name.split()[0] for name in programs["auto", "flat"].collectives]
    assert "all-to-all" in opcodes
    assert "collective-permute" in opcodes
    assert {name.split()[0] for name in programs["auto", "split"].collectives} == {"all-gather"}


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)  # as the fixture unoptimized
    run_every_layout(Path(sys.argv[1]))
