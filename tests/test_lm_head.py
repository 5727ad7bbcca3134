"""The LM head: what it computes, and that its layouts and modes all compute the same."""

from __future__ import annotations

# mypy: untyped-calls-exclude=jax
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo_audit.errors import UsageError
from hlo_audit.models import lm_head
from hlo_audit.models.lm_head import LM_HEAD, LMHeadConfig, State
from hlo_audit.program import MODES

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("unoptimized")]

LAYOUTS = [layout.name for layout in lm_head.LAYOUTS]
SIZES: dict[str, Any] = {"embed": 32, "vocab": 64, "batch": 8, "seq": 4}
DEVICES = 4
STEPS = 3
FLOAT32 = LMHeadConfig(**SIZES, dtype="float32", logits_dtype="float32")

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def example_batch(config: LMHeadConfig) -> lm_head.Batch:
    rng = np.random.default_rng(0)
    tokens = (config.batch, config.seq)
    hidden = rng.standard_normal((*tokens, config.embed))
    return lm_head.Batch(
        jnp.asarray(hidden, config.dtype), jnp.asarray(rng.integers(0, config.vocab, tokens))
    )


# What it computes


def expected_step(state: State, batch: lm_head.Batch, config: LMHeadConfig) -> dict[str, Array]:
    """One step in numpy and float64."""
    kernel, mu, nu = (np.asarray(leaf, np.float64) for leaf in state[:3])
    hidden = np.asarray(batch.hidden, np.float64)
    logits = hidden @ kernel
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    labels = np.eye(config.vocab)[np.asarray(batch.targets)]
    logits_grad = (probabilities - labels) / (config.batch * config.seq)
    grad = np.einsum("bse,bsv->ev", hidden, logits_grad)
    count = int(state.count) + 1
    mu = config.b1 * mu + (1 - config.b1) * grad
    nu = config.b2 * nu + (1 - config.b2) * grad**2
    step = mu / (1 - config.b1**count) / (np.sqrt(nu / (1 - config.b2**count)) + config.eps)
    return {
        "loss": -np.log((probabilities * labels).sum(axis=-1)).mean(),
        "hidden_grad": logits_grad @ kernel.T,
        "kernel": kernel - config.learning_rate * (step + config.weight_decay * kernel),
        "mu": mu,
        "nu": nu,
    }


def test_a_step_is_cross_entropy_its_gradients_and_one_adamw_update() -> None:
    batch = example_batch(FLOAT32)
    state = lm_head.init(FLOAT32, jax.random.key(0))
    step = jax.jit(lm_head.train_step(FLOAT32, "embed-vocab"))
    for count in range(2):
        expected = expected_step(state, batch, FLOAT32)
        state, loss, hidden_grad = step(*state, *batch)
        found = {**state._asdict(), "loss": loss, "hidden_grad": hidden_grad}
        assert int(found.pop("count")) == count + 1
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-7, err_msg=name)


def test_the_default_dtypes_are_those_of_mixed_precision() -> None:
    config = LMHeadConfig(**SIZES)
    state, batch = lm_head.init(config, jax.random.key(0)), example_batch(config)
    logits = jax.eval_shape(
        lambda kernel, hidden: lm_head.apply(kernel, hidden, config, "embed-vocab"),
        state.kernel,
        batch.hidden,
    )
    assert (logits.shape, logits.dtype) == ((8, 4, 64), jnp.bfloat16)
    after, loss, hidden_grad = jax.eval_shape(
        lm_head.train_step(config, "embed-vocab"), *state, *batch
    )
    assert [leaf.dtype for leaf in after] == [jnp.float32] * 3 + [jnp.int32]
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert (hidden_grad.shape, hidden_grad.dtype) == ((8, 4, 32), jnp.bfloat16)


def test_tied_embeddings_take_the_logits_from_the_embedding_table() -> None:
    tied = LMHeadConfig(**SIZES, dtype="float32", logits_dtype="float32", tied_embeddings=True)
    table = lm_head.init(tied, jax.random.key(0)).kernel
    hidden = example_batch(tied).hidden
    assert table.shape == (64, 32)
    logits = lm_head.apply(table, hidden, tied, "embed-vocab")
    np.testing.assert_allclose(logits, hidden @ table.T, rtol=1e-5, atol=1e-5)


# Layouts


def test_every_layout_starts_from_the_same_values() -> None:
    states = {layout: lm_head.init(FLOAT32, jax.random.key(0), layout) for layout in LAYOUTS}
    kernel = states["embed-vocab"].kernel
    assert float(jnp.std(kernel)) == pytest.approx(FLOAT32.embed**-0.5, rel=0.05)
    for layout, state in states.items():
        stored = state.kernel.T if layout == "vocab-embed" else state.kernel
        np.testing.assert_array_equal(stored, kernel, err_msg=layout)
        assert state.mu.shape == state.nu.shape == state.kernel.shape
        assert not state.mu.any()
        assert not state.nu.any()


@pytest.mark.parametrize("to_layout", LAYOUTS)
@pytest.mark.parametrize("from_layout", LAYOUTS)
def test_a_conversion_gives_the_other_layouts_shapes_and_comes_back_exactly(
    from_layout: str, to_layout: str
) -> None:
    rng = np.random.default_rng(0)
    shape = lm_head.dense_layer(FLOAT32, from_layout).kernel_shape
    kernel, mu, nu = (rng.standard_normal(shape) for _ in range(3))
    state = State(kernel, mu, nu, np.int32(7))
    there = lm_head.convert(state, from_layout, to_layout)
    assert there.kernel.shape == lm_head.dense_layer(FLOAT32, to_layout).kernel_shape
    back = lm_head.convert(there, to_layout, from_layout)
    for before, after in zip(state, back, strict=True):
        np.testing.assert_array_equal(after, before)


def test_the_conversion_moves_kernel_and_moments_alike() -> None:
    kernel, mu, nu = (np.arange(6.0).reshape(2, 3) + i for i in range(3))
    converted = lm_head.convert(State(kernel, mu, nu, 7), "embed-vocab", "vocab-embed")
    np.testing.assert_array_equal(converted[:3], [kernel.T, mu.T, nu.T])
    assert converted.count == 7


@pytest.mark.parametrize(
    ("layout", "shape", "spec"),
    [
        ("embed-vocab", (32, 64), ("fsdp", None)),
        ("vocab-embed", (64, 32), (None, "fsdp")),
        ("vocab-parallel", (32, 64), (None, "fsdp")),
    ],
)
def test_the_abstract_arguments_say_how_each_layout_is_sharded(
    layout: str, shape: tuple[int, int], spec: tuple[str | None, ...]
) -> None:
    _, args = lm_head.build(abstract_mesh(), layout=layout, **SIZES)
    kernel, mu, nu, count, hidden, targets = args
    for leaf in (kernel, mu, nu):
        assert (leaf.shape, leaf.dtype, tuple(leaf.sharding.spec)) == (shape, jnp.float32, spec)
    assert (count.shape, count.dtype) == ((), jnp.int32)
    assert (hidden.shape, hidden.dtype) == ((8, 4, 32), jnp.bfloat16)
    assert tuple(hidden.sharding.spec) == ("fsdp", None, None)
    assert (targets.shape, targets.dtype) == ((8, 4), jnp.int32)
    assert tuple(targets.sharding.spec) == ("fsdp", None)


# Refusals


def abstract_mesh(axis: str = "fsdp") -> Any:
    return jax.sharding.AbstractMesh((DEVICES,), (axis,))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *((size, 0) for size in SIZES),
        ("dtype", "int8"),
        ("logits_dtype", "bf16"),
        ("b1", 1.0),
        ("b2", -0.1),
        ("learning_rate", float("nan")),
        ("weight_decay", -1.0),
        ("eps", 0.0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{setting}={value}") as refusal:
        LMHeadConfig(**{setting: value})
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("layout", "size"),
    [("embed-vocab", "embed"), ("vocab-parallel", "vocab"), ("embed-vocab", "batch")],
)
def test_a_size_that_the_mesh_does_not_divide_is_refused(layout: str, size: str) -> None:
    with pytest.raises(UsageError, match=f"{size}=30 is no multiple of 4.*'fsdp'") as refusal:
        lm_head.build(abstract_mesh(), layout=layout, **{**SIZES, size: 30})
    assert refusal.value.hint == f"set {size} to a multiple of 4"


def test_a_size_that_the_layout_does_not_shard_may_be_any() -> None:
    lm_head.build(abstract_mesh(), layout="embed-vocab", **{**SIZES, "vocab": 30, "seq": 3})
    lm_head.build(abstract_mesh(), layout="vocab-parallel", **{**SIZES, "embed": 30})


def test_a_mesh_without_the_axis_is_refused() -> None:
    with pytest.raises(UsageError, match="no axis 'fsdp', only 'data'"):
        lm_head.build(abstract_mesh("data"), layout="embed-vocab", **SIZES)


def test_an_unknown_layout_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no layout of lm-head is called 'embed_vocab'") as refusal:
        lm_head.build(abstract_mesh(), layout="embed_vocab", **SIZES)
    assert refusal.value.hint == "did you mean 'embed-vocab'?"
    with pytest.raises(UsageError, match="no layout"):
        lm_head.convert(State(0, 0, 0, 0), "embed-vocab", "vocab")


def test_tied_embeddings_have_no_kernel_to_transpose() -> None:
    with pytest.raises(UsageError, match="does not go with tied embeddings"):
        lm_head.build(abstract_mesh(), layout="vocab-embed", tied_embeddings=True, **SIZES)


# The model as the command line sees it


def test_the_baseline_is_the_layout_that_shows_the_fault() -> None:
    assert LM_HEAD.baseline_layout == "embed-vocab"


def test_settings_are_read_as_their_types() -> None:
    settings = LM_HEAD.configure({"embed": "2048", "tied_embeddings": "true", "eps": "1e-6"})
    assert (settings["embed"], settings["tied_embeddings"], settings["eps"]) == (2048, True, 1e-6)


def test_listing_the_model_and_its_layouts_imports_no_jax() -> None:
    program = (
        "import sys; from hlo_audit.models.lm_head import LM_HEAD, LMHeadConfig; LMHeadConfig(); "
        "[layout.summary for layout in LM_HEAD.layouts]; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# Every layout in every mode, on four devices


class Run(NamedTuple):
    """One layout in one mode and dtype."""

    dtype: str
    mode: str
    layout: str

    def key(self, name: str) -> str:
        return "/".join((*self, name))


BFLOAT16_LAYOUTS = ("embed-vocab", "vocab-embed", "vocab-parallel")
"""Those that differ in the arithmetic and not only in what the compiler is told."""

RUNS = [
    *(Run("float32", mode, layout) for mode in MODES for layout in LAYOUTS),
    *(Run("bfloat16", "explicit", layout) for layout in BFLOAT16_LAYOUTS),
]


def run_every_layout(path: Path) -> None:
    """Take some steps with each of RUNS and save what came of them; runs in its own process."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    arrays: Any = {run.key(name): array for run in RUNS for name, array in results_of(run)}
    np.savez(path, **arrays)


def results_of(run: Run) -> Iterator[tuple[str, Array]]:
    settings = {**SIZES, "dtype": run.dtype, "logits_dtype": run.dtype}
    config = LMHeadConfig(**settings)
    mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(axis_type(run.mode),))
    state = lm_head.convert(initial_state(), "embed-vocab", run.layout)
    values = (*state, *example_batch(config))
    with jax.set_mesh(mesh):
        jitted, args = lm_head.build(mesh, layout=run.layout, **settings)
        lowered = jitted.lower(*args)
        compiled = lowered.compile()
        *before, hidden, targets = jax.device_put(values, compiled.input_formats[0])
        state = before
        for _ in range(STEPS):
            state, loss, hidden_grad = compiled(*state, hidden, targets)
    text = lowered.as_text("hlo")
    yield "sharding_calls", np.asarray(text.count('custom_call_target="Sharding"'))
    yield "transposed_opcodes", np.asarray(transposed_opcodes(text), str)
    yield "all_donated", np.asarray(all(leaf.is_deleted() for leaf in before))
    yield "module", np.asarray(text.split()[1].rstrip(","))
    yield "loss", np.asarray(loss)
    yield "hidden_grad", np.asarray(hidden_grad.astype(jnp.float32))
    gathered = jax.tree.map(np.asarray, state)
    yield from lm_head.convert(gathered, run.layout, "embed-vocab")._asdict().items()


@cache
def initial_state() -> State:
    state: State = jax.tree.map(np.asarray, lm_head.init(FLOAT32, jax.random.key(0)))
    return state


def transposed_opcodes(hlo: str) -> list[str]:
    """The opcode of each transpose's operand."""
    opcodes = dict(re.findall(r"(\S+) = \S+ ([\w-]+)\(", hlo))
    return [opcodes[operand] for operand in re.findall(r" transpose\((?:\S+ )?(\S+?)\)", hlo)]


def axis_type(mode: str) -> jax.sharding.AxisType:
    types = jax.sharding.AxisType
    return types.Explicit if mode == "explicit" else types.Auto


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Array]:
    # The number of devices is fixed once jax has started, as it may have in this process.
    path = tmp_path_factory.mktemp("lm_head") / "results.npz"
    command = [sys.executable, "-W", "error", __file__, str(path)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradient_and_state_do_not_depend_on_layout_or_mode(
    results: dict[str, Array], layout: str, mode: str
) -> None:
    # Not bit for bit: sums are taken in other orders, over the vocabulary's shards or a transposed
    # kernel. Adam divides by the gradient's own size, so that in the kernel the error counts
    # against the updates, three of the learning rate, and not against the gradient.
    run, baseline = Run("float32", mode, layout), Run("float32", "auto", "embed-vocab")
    tolerances = {"loss": 1e-6, "hidden_grad": 1e-7, "mu": 1e-7, "nu": 1e-8, "kernel": 1e-6}
    for name, tolerance in tolerances.items():
        found, expected = results[run.key(name)], results[baseline.key(name)]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=tolerance, err_msg=name)
    assert results[run.key("count")] == STEPS


def test_a_transposed_kernel_computes_the_same_in_bfloat16(results: dict[str, Array]) -> None:
    run = Run("bfloat16", "explicit", "vocab-embed")
    baseline = Run("bfloat16", "explicit", "embed-vocab")
    for name in ("loss", "hidden_grad", "mu", "nu", "kernel"):
        found, expected = results[run.key(name)], results[baseline.key(name)]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_bfloat16_over_vocab_is_within_the_rounding_of_partial_sums(
    results: dict[str, Array],
) -> None:
    # The other layouts round each device's share of the kernel's gradient before they add them up,
    # this one rounds the shares of the hidden states' gradient: relative 2**-8 each.
    run = Run("bfloat16", "explicit", "vocab-parallel")
    baseline = Run("bfloat16", "explicit", "embed-vocab")
    np.testing.assert_allclose(results[run.key("loss")], results[baseline.key("loss")], rtol=1e-4)
    for name in ("hidden_grad", "mu"):
        found, expected = results[run.key(name)], results[baseline.key(name)]
        assert np.abs(found - expected).max() <= 2**-6 * np.abs(expected).max(), name
    # Adam turns a gradient near zero into a full step of either sign.
    most = 2 * STEPS * LMHeadConfig.learning_rate
    found, expected = results[run.key("kernel")], results[baseline.key("kernel")]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=most)
    assert np.abs(found - expected).mean() <= most / 50


@pytest.mark.parametrize("layout", LAYOUTS)
def test_explicit_mode_annotates_every_operation(results: dict[str, Array], layout: str) -> None:
    auto, explicit = (
        int(results[Run("float32", mode, layout).key("sharding_calls")]) for mode in MODES
    )
    assert 0 < 10 * auto <= explicit


@pytest.mark.parametrize(
    ("mode", "layout", "opcodes"),
    [
        ("auto", "embed-vocab", ["dot"]),
        ("auto", "kernel-order-grad", ["dot"]),
        ("explicit", "embed-vocab", ["custom-call"]),
        ("explicit", "vocab-embed", []),
        ("explicit", "kernel-order-grad", ["dot"]),
    ],
)
def test_an_annotation_stands_between_the_gradient_and_its_transpose_in_the_baseline_only(
    results: dict[str, Array], mode: str, layout: str, opcodes: list[str]
) -> None:
    assert results[Run("float32", mode, layout).key("transposed_opcodes")].tolist() == opcodes


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_every_step_donates_its_state(results: dict[str, Array], run: Run) -> None:
    assert results[run.key("all_donated")]
    assert results[run.key("module")] == "jit_step"


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)  # as the fixture unoptimized
    run_every_layout(Path(sys.argv[1]))
