"""A checkpoint stays in the canonical layout, and runs in any layout write and restore it."""

from __future__ import annotations

# mypy: untyped-calls-exclude=jax
import dataclasses
import json
import math
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from hlo_audit import checkpoint
from hlo_audit.errors import UsageError
from hlo_audit.models import ALL_MODELS, lm_head
from hlo_audit.models.lm_head import LMHeadConfig
from hlo_audit.program import MODES
from hlo_audit.stored import Storage, StoredArray, StoredLayouts, axis_names, rearrange

SIZES: dict[str, Any] = {"embed": 32, "vocab": 64, "batch": 8, "seq": 4}
CONFIG = LMHeadConfig(**SIZES, dtype="float32", logits_dtype="float32")
HEAD = lm_head.checkpoint_layouts(CONFIG)
SQUARE = lm_head.checkpoint_layouts(dataclasses.replace(CONFIG, vocab=32))
DEVICES = 4

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def hyper_connections() -> StoredLayouts:
    """Weights whose layouts differ in the axes that are merged, not in their order."""
    merged = ("rate", "embed")
    return StoredLayouts(
        model="mhc",
        canonical="flat",
        sizes={"rate": 4, "embed": 8, "maps": 24},
        arrays=(
            StoredArray(
                path="norm/scale",
                dtype="float32",
                layouts={
                    "flat": Storage((merged,), ("tensor",)),
                    "split": Storage(merged, (None, "tensor")),
                },
                moments={"mu": "float32"},
            ),
            StoredArray(
                path="alpha",
                dtype="bfloat16",
                layouts={
                    "flat": Storage((merged, "maps"), ("tensor", None)),
                    "split": Storage((*merged, "maps"), (None, "tensor", None)),
                },
                moments={"mu": "float32"},
            ),
        ),
    )


def arrays_of(description: StoredLayouts, layout: str) -> dict[str, Array]:
    """A tree with each described array, of values that differ."""
    return {
        array.path: np.arange(math.prod(description.shape(array, layout)))
        .reshape(description.shape(array, layout))
        .astype(jnp.dtype(array.dtype))
        for array in description.arrays
    }


def refusal(call: Any, *args: Any, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        call(*args, **options)
    assert caught.value.hint
    return caught.value


# What a turn does


@st.composite
def storages(draw: st.DrawFn) -> tuple[dict[str, int], Storage, Storage]:
    """Sizes of some logical axes, and two ways to order and merge them."""
    names = [f"axis{i}" for i in range(draw(st.integers(1, 5)))]
    sizes = {name: draw(st.integers(1, 4)) for name in names}

    def storage() -> Storage:
        order = draw(st.permutations(names))
        cuts = sorted(draw(st.sets(st.integers(1, len(names)))) | {len(names)})
        groups = [order[start:stop] for start, stop in zip([0, *cuts], cuts, strict=False)]
        return Storage(tuple(group[0] if len(group) == 1 else tuple(group) for group in groups))

    return sizes, storage(), storage()


@given(storages())
def test_every_value_keeps_its_place_along_the_named_axes(
    case: tuple[dict[str, int], Storage, Storage],
) -> None:
    sizes, source, target = case
    array = np.arange(math.prod(sizes.values())).reshape(source.shape(sizes))
    turned = rearrange(array, source.axes, target.axes, sizes)
    assert turned.shape == target.shape(sizes)
    for position in np.ndindex(*sizes.values()):
        at = dict(zip(sizes, position, strict=True))
        assert array[index_of(source, at, sizes)] == turned[index_of(target, at, sizes)]
    back = rearrange(turned, target.axes, source.axes, sizes)
    np.testing.assert_array_equal(back, array)


def index_of(storage: Storage, at: dict[str, int], sizes: dict[str, int]) -> tuple[int, ...]:
    index = []
    for axis in storage.axes:
        flat = 0
        for name in axis_names((axis,)):
            flat = flat * sizes[name] + at[name]
        index.append(flat)
    return tuple(index)


def small(description: StoredLayouts) -> StoredLayouts:
    sizes = {name: 2 + i for i, name in enumerate(description.sizes)}
    return dataclasses.replace(description, sizes=sizes)


DESCRIPTIONS = [
    *(small(model.stored(model.config())) for model in ALL_MODELS if model.stored),
    SQUARE,
    hyper_connections(),
]


@pytest.mark.parametrize("description", DESCRIPTIONS, ids=lambda description: description.model)
def test_every_layout_of_every_model_comes_back_exactly(description: StoredLayouts) -> None:
    for layout in description.layouts:
        tree = arrays_of(description, layout)
        checkpoint.check(tree, layout, description)
        stored = checkpoint.to_canonical(tree, layout, description)
        checkpoint.check(stored, description.canonical, description)
        tag = checkpoint.metadata(description.canonical, description)
        back = checkpoint.from_canonical(stored, layout, description, stored_metadata=tag)
        for path, array in tree.items():
            assert back[path].dtype == array.dtype
            np.testing.assert_array_equal(back[path], array, err_msg=f"{layout} {path}")


def test_every_model_describes_each_of_its_layouts() -> None:
    for model in ALL_MODELS:
        if model.stored:
            described = model.stored(model.config())
            assert described.layouts == tuple(layout.name for layout in model.layouts)
            assert (described.model, described.canonical) == (model.name, model.baseline_layout)


def test_splitting_a_merged_axis_is_a_pure_reshape() -> None:
    description = hyper_connections()
    flat = arrays_of(description, "flat")
    split = checkpoint.from_canonical(flat, "split", description)
    np.testing.assert_array_equal(split["norm/scale"], flat["norm/scale"].reshape(4, 8))
    np.testing.assert_array_equal(split["alpha"], flat["alpha"].reshape(4, 8, 24))


def test_a_numpy_array_comes_back_in_order_and_one_that_does_not_change_comes_back_itself() -> None:
    tree = arrays_of(HEAD, "embed-vocab")
    turned = checkpoint.from_canonical(tree, "vocab-embed", HEAD)
    assert turned["kernel"].flags.c_contiguous
    assert checkpoint.from_canonical(tree, "vocab-parallel", HEAD)["kernel"] is tree["kernel"]


def test_tied_embeddings_are_vocabulary_first_in_every_layout() -> None:
    tied = lm_head.checkpoint_layouts(dataclasses.replace(CONFIG, tied_embeddings=True))
    table = {"kernel": np.zeros((64, 32), np.float32)}
    for layout in tied.layouts:
        assert checkpoint.to_canonical(table, layout, tied)["kernel"] is table["kernel"]
    refused = refusal(checkpoint.to_canonical, table, "vocab-embed", tied)
    assert refused.message == "no stored layout of lm-head is called 'vocab-embed'"


# Trees


class AdamState(NamedTuple):
    count: Any
    mu: Any
    nu: Any


def train_state(layout: str, **others: Any) -> dict[str, Any]:
    """A tree as a trainer has it, with the moments in the optimiser's state as optax keeps them."""
    kernel = arrays_of(HEAD, layout)["kernel"]
    layer = {"mlp": {"wi": np.ones((32, 5))}, "head": {"kernel": kernel, **others}}
    mu = {"mlp": {"wi": np.ones((32, 5))}, "head": {"kernel": kernel + 1, **others}}
    nu = {"mlp": {"wi": np.ones((32, 5))}, "head": {"kernel": kernel + 2, **others}}
    return {"step": 7, "params": layer, "opt_state": (None, (AdamState(np.int32(7), mu, nu), ()))}


def test_parameter_and_moments_are_found_in_a_nested_state_and_the_rest_is_left_alone() -> None:
    state = train_state("vocab-embed")
    turned = checkpoint.to_canonical(state, "vocab-embed", HEAD)
    assert str(jax.tree.structure(turned)) == str(jax.tree.structure(state))
    adam, turned_adam = state["opt_state"][1][0], turned["opt_state"][1][0]
    for before, after in [
        (state["params"], turned["params"]),
        (adam.mu, turned_adam.mu),
        (adam.nu, turned_adam.nu),
    ]:
        np.testing.assert_array_equal(after["head"]["kernel"], before["head"]["kernel"].T)
        assert after["mlp"]["wi"] is before["mlp"]["wi"]
    assert turned["step"] == 7
    assert turned_adam.count is adam.count


def test_moments_may_stand_beside_their_parameter() -> None:
    kernel = arrays_of(HEAD, "embed-vocab")["kernel"]
    state = lm_head.State(kernel, kernel + 1, kernel + 2, np.int32(3))
    turned = checkpoint.from_canonical(state, "vocab-embed", HEAD)
    np.testing.assert_array_equal(turned.nu, state.nu.T)
    assert turned.count == 3
    # A leaf that only shares a moment's name is none.
    tree = {"head": {"kernel": kernel}, "norm": {"mu": np.ones(3)}}
    assert checkpoint.from_canonical(tree, "vocab-embed", HEAD)["norm"]["mu"] is tree["norm"]["mu"]


def test_parameters_alone_moments_alone_and_flat_names_are_trees_too() -> None:
    state = train_state("embed-vocab")
    turned = checkpoint.from_canonical(state["opt_state"], "vocab-embed", HEAD)
    assert turned[1][0].mu["head"]["kernel"].shape == (64, 32)
    flat = {"decoder/head/kernel": state["params"]["head"]["kernel"]}
    turned = checkpoint.from_canonical(flat, "vocab-embed", HEAD)
    assert turned["decoder/head/kernel"].shape == (64, 32)


def test_a_tree_without_the_array_is_refused_with_what_it_holds() -> None:
    refused = refusal(checkpoint.check, {"dense": {"weight": 0}}, "embed-vocab", HEAD)
    assert refused.message == "the tree holds no kernel of lm-head"
    assert refused.hint == "it holds dense/weight"
    assert refusal(checkpoint.check, {}, "embed-vocab", HEAD).hint == "it is empty"


def test_two_arrays_of_the_same_name_are_refused_until_the_path_is_longer() -> None:
    state = train_state("vocab-embed")
    state["params"]["mlp"]["kernel"] = np.ones((32, 5), np.float32)
    refused = refusal(checkpoint.to_canonical, state, "vocab-embed", HEAD)
    assert "may be params/head/kernel or params/mlp/kernel" in refused.message
    kernel = dataclasses.replace(HEAD.arrays[0], path="head/kernel")
    description = dataclasses.replace(HEAD, arrays=(kernel,))
    turned = checkpoint.to_canonical(state, "vocab-embed", description)
    assert turned["params"]["head"]["kernel"].shape == (32, 64)
    assert turned["params"]["mlp"]["kernel"].shape == (32, 5)


def test_a_moment_that_is_not_described_is_refused_and_not_left_unturned() -> None:
    kernel = arrays_of(HEAD, "embed-vocab")["kernel"]
    state = {"params": {"kernel": kernel}, "opt_state": {"trace": {"kernel": kernel}}}
    refused = refusal(checkpoint.from_canonical, state, "vocab-embed", HEAD)
    assert "opt_state/trace/kernel" in refused.message
    assert "name every moment" in str(refused.hint)


def test_one_array_of_two_descriptions_is_refused() -> None:
    (kernel,) = HEAD.arrays
    both = (kernel, dataclasses.replace(kernel, path="head/kernel"))
    description = dataclasses.replace(HEAD, arrays=both)
    tree = {"head": arrays_of(HEAD, "embed-vocab")}
    refused = refusal(checkpoint.check, tree, "embed-vocab", description)
    assert refused.message == "head/kernel is both kernel and head/kernel of lm-head"


# Checks of shape and dtype


def test_flipping_the_layout_of_an_existing_run_is_refused_with_the_way_to_do_it() -> None:
    state = train_state("vocab-embed")
    refused = refusal(checkpoint.check, state, "embed-vocab", HEAD)
    assert refused.message == (
        "opt_state/1/0/mu/head/kernel of lm-head has the shape [64, 32], [vocab, embed], of layout "
        "vocab-embed; layout embed-vocab stores [32, 64], [embed, vocab]"
    )
    assert refused.hint == (
        "a run does not change its layout by a flag: bring it there with "
        "to_canonical(tree, 'vocab-embed', description)"
    )
    refused = refusal(checkpoint.check, train_state("embed-vocab"), "vocab-embed", HEAD)
    assert "restore it through from_canonical(tree, 'vocab-embed', desc" in str(refused.hint)


def test_a_tree_that_is_not_in_the_layout_it_is_said_to_be_in_is_not_turned() -> None:
    for turn in (checkpoint.to_canonical, checkpoint.from_canonical):
        layout = "embed-vocab" if turn is checkpoint.to_canonical else "vocab-embed"
        refused = refusal(turn, arrays_of(HEAD, "vocab-embed"), layout, HEAD)
        assert "[64, 32], [vocab, embed], of layout vocab-embed" in refused.message


def test_another_size_is_told_from_another_layout() -> None:
    refused = refusal(checkpoint.check, {"kernel": np.zeros((32, 65))}, "embed-vocab", HEAD)
    assert "[32, 65], which no layout gives it" in refused.message


def test_another_dtype_is_refused() -> None:
    kernel = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    refused = refusal(checkpoint.from_canonical, {"kernel": kernel}, "vocab-embed", HEAD)
    assert refused.message == "kernel of lm-head is bfloat16, and the model stores it in float32"


def test_moments_have_a_dtype_of_their_own() -> None:
    description = hyper_connections()
    params = arrays_of(description, "flat")
    checkpoint.check({"params": params}, "flat", description)
    refused = refusal(
        checkpoint.check, {"params": params, "mu": params.copy()}, "flat", description
    )
    assert refused.message == "mu/alpha of mhc is bfloat16, and the model stores it in float32"


def test_what_is_no_array_is_refused() -> None:
    refused = refusal(checkpoint.check, {"kernel": 3}, "embed-vocab", HEAD)
    assert refused.message == "kernel of lm-head is no array but of type int"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Storage(("embed", ("rate", "embed"))), "'embed' is named twice"),
        (lambda: Storage(("embed", "vocab"), ("fsdp",)), "1 mesh axes for the 2 stored axes"),
        (lambda: StoredArray("", "float32", {"a": Storage(("embed",))}), "no path or no layout"),
        (
            lambda: StoredArray("w", "float32", {"a": Storage(("x",)), "b": Storage(("y",))}),
            "layout b stores w as [y], and layout a as [x]",
        ),
        (lambda: dataclasses.replace(HEAD, sizes={"embed": 32}), "'vocab' of kernel"),
        (lambda: dataclasses.replace(HEAD, canonical="flat"), "no stored layout of lm-head"),
        (lambda: dataclasses.replace(HEAD, arrays=HEAD.arrays * 2), "have the same path"),
        (
            lambda: dataclasses.replace(HEAD, arrays=HEAD.arrays + hyper_connections().arrays),
            "norm/scale and kernel of lm-head are not described in the same layouts",
        ),
    ],
)
def test_a_description_that_cannot_be_is_refused(call: Any, message: str) -> None:
    assert message in refusal(call).message


# Metadata


def test_metadata_is_json_and_fits_every_layout_that_stores_the_arrays_alike() -> None:
    stored = json.loads(json.dumps(checkpoint.metadata("embed-vocab", HEAD)))
    for layout in ("embed-vocab", "vocab-parallel", "free-entry-layout"):
        checkpoint.check_metadata({**stored, "commit": "1234"}, layout, HEAD)
    flat = json.loads(json.dumps(checkpoint.metadata("flat", hyper_connections())))
    checkpoint.check_metadata(flat, "flat", hyper_connections())
    refused = refusal(checkpoint.check_metadata, flat, "split", hyper_connections())
    assert "axes [rate*embed] (layout flat), and layout split stores [rate, embed]" in (
        refused.message
    )


def test_metadata_tells_a_square_kernel_from_its_transpose() -> None:
    turned = checkpoint.metadata("vocab-embed", SQUARE)
    refused = refusal(checkpoint.check_metadata, turned, "embed-vocab", SQUARE)
    assert refused.message == (
        "the checkpoint stores kernel of lm-head with the axes [vocab, embed] (layout "
        "vocab-embed), and layout embed-vocab stores [embed, vocab]"
    )
    assert "convert(tree, 'vocab-embed', 'embed-vocab', description)" in str(refused.hint)


def test_a_square_kernel_is_not_restored_without_metadata() -> None:
    tree = arrays_of(SQUARE, "embed-vocab")
    for layout in ("embed-vocab", "vocab-embed"):
        refused = refusal(checkpoint.from_canonical, tree, layout, SQUARE)
        assert "[32, 32] both as [embed, vocab] and" in refused.message
        assert "pass stored_metadata" in str(refused.hint)
    tag = checkpoint.metadata("embed-vocab", SQUARE)
    turned = checkpoint.from_canonical(tree, "vocab-embed", SQUARE, stored_metadata=tag)
    np.testing.assert_array_equal(turned["kernel"], tree["kernel"].T)
    tag = checkpoint.metadata("vocab-embed", SQUARE)
    refusal(checkpoint.from_canonical, tree, "vocab-embed", SQUARE, stored_metadata=tag)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "does not say which layout"),
        ({"format": "another"}, "does not say which layout"),
        ({"version": 2}, "in version 2 of its format"),
        ({"model": "mhc"}, "of model 'mhc', not of 'lm-head'"),
        ({"arrays": {}}, "does not say how it stores kernel"),
        ({"arrays": [1]}, "does not say how it stores kernel"),
        ({"arrays": {"kernel": 1}}, "does not say how it stores kernel"),
        ({"shape": [32, 128]}, "has the shape [32, 128], and [32, 64] is wanted"),
        ({"dtype": "bfloat16"}, "has the dtype bfloat16, and float32 is wanted"),
        ({"axes": None}, "with the axes None"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    stored: Any = None
    if change is not None:
        stored = checkpoint.metadata("embed-vocab", HEAD)
        place = stored["arrays"]["kernel"] if change.keys() & {"shape", "dtype", "axes"} else stored
        place.update(change)
    assert message in refusal(checkpoint.check_metadata, stored, "embed-vocab", HEAD).message


# Shardings


def mesh_of(**sizes: int) -> Any:
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))


def abstract_kernel(shape: tuple[int, ...], *spec: Any, mesh: Any = None) -> dict[str, Any]:
    sharding = jax.sharding.NamedSharding(mesh or mesh_of(fsdp=4), P(*spec))
    return {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)}


@pytest.mark.parametrize("layout", HEAD.layouts)
def test_the_shardings_of_a_run_are_those_described(layout: str) -> None:
    state = lm_head.abstract_state(CONFIG, mesh_of(fsdp=4), layout)
    checkpoint.check(state, layout, HEAD)
    checkpoint.check_sharding(state.kernel.sharding, "kernel", layout, HEAD)
    checkpoint.check_sharding(state.kernel.sharding.spec, "opt_state/mu/kernel", layout, HEAD)
    assert checkpoint.partition_spec("kernel", layout, HEAD) == state.kernel.sharding.spec


def test_the_spec_of_the_other_orientation_is_refused_although_its_rank_is_the_same() -> None:
    refused = refusal(
        checkpoint.check_sharding, P(None, "fsdp"), "params/kernel", "embed-vocab", HEAD
    )
    assert refused.message == (
        "the sharding (None, 'fsdp') of params/kernel of lm-head does not fit layout embed-vocab, "
        "which stores [embed, vocab] and shards it ('fsdp', None)"
    )
    assert "it is the sharding of layout vocab-embed or vocab-parallel" in str(refused.hint)
    tree = abstract_kernel((32, 64), None, "fsdp")
    assert refusal(checkpoint.check, tree, "embed-vocab", HEAD).message == (
        refused.message.replace("params/", "")
    )


def test_an_export_that_shards_by_its_own_mesh_axis_is_held_to_the_axis_it_names() -> None:
    by_vocab: Any = {"vocab": "model"}
    for layout, right, wrong in [
        ("embed-vocab", P(None, "model"), P("model", None)),
        ("vocab-embed", P("model", None), P(None, "model")),
    ]:
        assert checkpoint.partition_spec("kernel", layout, HEAD, sharded=by_vocab) == right
        checkpoint.check_sharding(right, "kernel", layout, HEAD, sharded=by_vocab)
        refused = refusal(
            checkpoint.check_sharding, wrong, "kernel", layout, HEAD, sharded=by_vocab
        )
        assert f"shards it {tuple(right)}" in refused.message
        assert "it is the sharding of layout" in str(refused.hint)


@pytest.mark.parametrize(
    "spec", [P("fsdp"), P(("fsdp",), None), ("fsdp",), ["fsdp", None], P("fsdp", ())]
)
def test_the_same_sharding_written_in_another_way_fits(spec: Any) -> None:
    checkpoint.check_sharding(spec, "kernel", "embed-vocab", HEAD)


@pytest.mark.parametrize("spec", [P(), P("data"), P(("fsdp", "data")), P("fsdp", None, None)])
def test_a_sharding_that_is_of_no_layout_is_refused(spec: Any) -> None:
    refused = refusal(checkpoint.check_sharding, spec, "kernel", "embed-vocab", HEAD)
    assert "does not fit layout embed-vocab" in refused.message


def test_a_mesh_axis_of_one_device_shards_nothing() -> None:
    tree = abstract_kernel((32, 64), None, "tensor", mesh=mesh_of(fsdp=1, tensor=1))
    checkpoint.check(tree, "embed-vocab", HEAD)
    checkpoint.check(abstract_kernel((32, 64), mesh=mesh_of(data=4)), "embed-vocab", HEAD)


@pytest.mark.parametrize("sharding", [None, "fsdp", 3, P(P.UNCONSTRAINED, None)])
def test_what_is_no_sharding_is_refused(sharding: Any) -> None:
    refused = refusal(checkpoint.check_sharding, sharding, "kernel", "embed-vocab", HEAD)
    assert "the sharding of kernel is" in refused.message


def test_a_sharding_of_an_unknown_array_or_axis_is_refused() -> None:
    refused = refusal(checkpoint.check_sharding, P(), "params/bias", "embed-vocab", HEAD)
    assert refused.message == "no stored array of lm-head is called 'params/bias'"
    refused = refusal(checkpoint.partition_spec, "kernel", "embed", HEAD)
    assert "no stored layout" in refused.message
    wrong: Any = {"vocabulary": "model"}
    refused = refusal(checkpoint.partition_spec, "kernel", "embed-vocab", HEAD, sharded=wrong)
    assert "called 'vocabulary'" in refused.message


def test_a_moment_named_alone_must_be_of_one_array() -> None:
    (kernel,) = HEAD.arrays
    both = tuple(dataclasses.replace(kernel, path=path) for path in ("wi", "wo"))
    description = dataclasses.replace(HEAD, arrays=both)
    refused = refusal(checkpoint.check_sharding, P(), "mu", "embed-vocab", description)
    assert refused.message == "mu of lm-head may be wi or wo"
    array = arrays_of(HEAD, "embed-vocab")["kernel"]
    refused = refusal(
        checkpoint.check, {"mu": array, "wi": array, "wo": array}, "embed-vocab", description
    )
    assert refused.message == "mu is both wi and wo of lm-head"


def test_only_the_outer_one_of_merged_axes_can_be_sharded() -> None:
    description = hyper_connections()
    spec = checkpoint.partition_spec
    assert spec("alpha", "flat", description, sharded={"rate": "x"}) == P("x", None)
    assert spec("alpha", "flat", description, sharded={("rate", "embed"): "x"}) == P("x", None)
    assert spec("alpha", "split", description, sharded={"embed": "x"}) == P(None, "x", None)
    refused = refusal(spec, "alpha", "flat", description, sharded={"embed": "x"})
    assert refused.message == (
        "layout flat stores embed of alpha within [rate*embed], of which only rate can be sharded"
    )


@pytest.mark.parametrize("layout", HEAD.layouts)
def test_an_abstract_state_keeps_the_sharding_of_each_logical_axis(layout: str) -> None:
    state = lm_head.abstract_state(CONFIG, mesh_of(fsdp=4), layout)
    stored = checkpoint.to_canonical(state, layout, HEAD)
    assert stored.mu.shape == (32, 64)
    by_axis = P(None, "fsdp") if layout == "vocab-parallel" else P("fsdp", None)
    assert stored.mu.sharding.spec == by_axis
    assert checkpoint.from_canonical(stored, layout, HEAD) == state


def test_merged_axes_are_sharded_as_the_layout_describes() -> None:
    description = hyper_connections()
    mesh = mesh_of(tensor=2)

    def alpha(shape: tuple[int, ...], *spec: Any) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    only_alpha = dataclasses.replace(description, arrays=description.arrays[1:])
    split = {"alpha": alpha((4, 8, 24), None, "tensor", None)}
    flat = checkpoint.to_canonical(split, "split", only_alpha)
    assert flat == {"alpha": alpha((32, 24), "tensor", None)}
    assert checkpoint.from_canonical(flat, "split", only_alpha) == split
    replicated = {"alpha": alpha((4, 8, 24))}
    assert checkpoint.to_canonical(replicated, "split", only_alpha) == {
        "alpha": alpha((32, 24), None, None)
    }


def test_shardings_of_another_tree_are_refused() -> None:
    tree = arrays_of(HEAD, "embed-vocab")
    refused = refusal(checkpoint.from_canonical, tree, "vocab-embed", HEAD, shardings=[None])
    assert "no tree like the arrays'" in refused.message


# jax


def test_importing_it_imports_no_jax() -> None:
    program = "import sys, hlo_audit.checkpoint; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_jax_array_is_turned_eagerly_and_within_a_jit() -> None:
    tree = {"kernel": jnp.asarray(arrays_of(HEAD, "embed-vocab")["kernel"])}
    turned = checkpoint.from_canonical(tree, "vocab-embed", HEAD)
    np.testing.assert_array_equal(turned["kernel"], tree["kernel"].T)
    jitted = jax.jit(lambda tree: checkpoint.from_canonical(tree, "vocab-embed", HEAD))
    np.testing.assert_array_equal(jitted(tree)["kernel"], tree["kernel"].T)
    assert not tree["kernel"].is_deleted()
    checkpoint.from_canonical(tree, "vocab-embed", HEAD, donate=True)
    assert tree["kernel"].is_deleted()


# On four devices, with Orbax


class Run(NamedTuple):
    """A training run in one mode and layout."""

    mode: str
    layout: str

    @property
    def name(self) -> str:
        return "-".join(self)


WRITERS = [Run("auto", "embed-vocab"), Run("explicit", "vocab-embed")]
READERS = [Run(mode, layout) for mode in MODES for layout in ("embed-vocab", "vocab-embed")]
PAIRS = [(writer, reader) for writer in WRITERS for reader in READERS]


def run_with_orbax(folder: Path) -> dict[str, Any]:
    """Write a checkpoint in each of WRITERS and go on from it in each of READERS."""
    results: dict[str, Any] = {}
    for writer in WRITERS:
        results[writer.name] = write_checkpoint(folder / writer.name, writer)
        for reader in READERS:
            key = f"{writer.name} {reader.name}"
            results[key] = restore_checkpoint(folder / writer.name, reader)
    results["merged"] = {mode: turn_merged_axes(mode) for mode in MODES}
    return results


def write_checkpoint(path: Path, run: Run) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    mesh = mesh_in(run.mode)
    start = lm_head.init(CONFIG, jax.random.key(0), run.layout)
    state = jax.device_put(start, lm_head.state_shardings(CONFIG, mesh, run.layout))
    for _ in range(2):
        state, _ = compiled_step(run)(state)
    stored = checkpoint.to_canonical(state, run.layout, HEAD)
    tag = checkpoint.metadata(HEAD.canonical, HEAD)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, stored, custom_metadata=tag)
        checkpointer.wait_until_finished()
        written = checkpointer.metadata(path)
        on_disk = checkpointer.restore(path)
    flipped = refusal(checkpoint.check, written.item_metadata.tree, "vocab-embed", HEAD)
    kernel = lm_head.convert(jax.tree.map(np.asarray, state), run.layout, "embed-vocab").kernel
    return {
        "flipped": flipped.message,
        "shapes": {name: list(on_disk[name].shape) for name in ("kernel", "mu", "nu")},
        "exact": bool(np.array_equal(on_disk["kernel"], kernel)),
        "layout": written.custom_metadata["layout"],
        **next_step(run, state),
    }


def restore_checkpoint(path: Path, run: Run) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    mesh = mesh_in(run.mode)
    target = lm_head.abstract_state(CONFIG, mesh, run.layout)
    with ocp.StandardCheckpointer() as checkpointer:
        tag = checkpointer.metadata(path).custom_metadata
        stored = checkpointer.restore(path, checkpoint.to_canonical(target, run.layout, HEAD))
    state = checkpoint.from_canonical(stored, run.layout, HEAD, stored_metadata=tag, donate=True)
    checkpoint.check(state, run.layout, HEAD)
    turned = jax.jit(lambda tree: checkpoint.from_canonical(tree, run.layout, HEAD))
    lowered = turned.lower(checkpoint.to_canonical(target, run.layout, HEAD))
    program = str(lowered.compile().as_text())
    return {
        "sharded_as_the_run": [
            leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
            for leaf, wanted in zip(state, target, strict=True)
        ],
        "collectives": re.findall(r" (all-[\w-]+|collective-[\w-]+|reduce-scatter)\(", program),
        "stored_deleted": [leaf.is_deleted() for leaf in stored[:3]],
        **next_step(run, state),
    }


def next_step(run: Run, state: Any) -> dict[str, Any]:
    state, loss = compiled_step(run)(state)
    _, later_loss = compiled_step(run)(state)
    return {"loss": float(loss), "later_loss": float(later_loss)}


@cache
def compiled_step(run: Run) -> Any:
    """Return ``step(state) -> (state, loss)``; the state stays usable."""
    mesh = mesh_in(run.mode)
    _, args = lm_head.build(mesh, layout=run.layout, **dataclasses.asdict(CONFIG))
    rng = np.random.default_rng(0)
    values = lm_head.Batch(
        rng.standard_normal(args[4].shape, np.float32),
        rng.integers(0, CONFIG.vocab, args[5].shape, np.int32),
    )
    batch = jax.device_put(values, lm_head.batch_shardings(CONFIG, mesh))
    with jax.set_mesh(mesh):
        compiled = jax.jit(lm_head.train_step(CONFIG, run.layout)).lower(*args).compile()
    return lambda state: compiled(*state, *batch)[:2]


def turn_merged_axes(mode: str) -> dict[str, Any]:
    """Split and merge a sharded axis, with the mesh in use and without."""
    description = hyper_connections()
    mesh = mesh_in(mode, "tensor")
    sharding = {
        layout: {
            array.path: jax.sharding.NamedSharding(mesh, P(*array.layouts[layout].mesh_axes))
            for array in description.arrays
        }
        for layout in description.layouts
    }
    flat = arrays_of(description, "flat")
    placed = checkpoint.from_canonical(flat, "flat", description, shardings=sharding["flat"])
    split = checkpoint.from_canonical(placed, "split", description)
    checkpoint.check(split, "split", description)
    with jax.set_mesh(mesh):
        back = checkpoint.to_canonical(split, "split", description)
        by_rate = checkpoint.from_canonical(
            back,
            "split",
            description,
            shardings=dict.fromkeys(flat, jax.sharding.NamedSharding(mesh, P("tensor"))),
        )
    checkpoint.check(back, "flat", description)
    one_device = jax.device_put(flat, jax.devices()[1])
    spread = checkpoint.from_canonical(
        one_device, "split", description, shardings=sharding["split"]
    )
    checkpoint.check(spread, "split", description)
    within_jit = jax.jit(
        lambda tree: checkpoint.convert(
            tree, "split", "flat", description, shardings=sharding["flat"]
        )
    )(split)
    checkpoint.check(within_jit, "flat", description)
    other = mesh_in("auto" if mode == "explicit" else "explicit", "tensor")
    there = {path: jax.sharding.NamedSharding(other, P("tensor")) for path in flat}
    for layout in description.layouts:
        moved = checkpoint.convert(back, "flat", layout, description, shardings=there)
        assert all(leaf.sharding.mesh == other for leaf in moved.values())
    return {
        "exact": all(np.array_equal(back[path], flat[path]) for path in flat),
        "spread_exact": all(np.array_equal(spread[path], split[path]) for path in flat),
        "by_rate": [str(leaf.sharding.spec[0]) for leaf in by_rate.values()],
    }


def mesh_in(mode: str, axis: str = "fsdp") -> Any:
    types = jax.sharding.AxisType
    axis_type = types.Explicit if mode == "explicit" else types.Auto
    return jax.make_mesh((DEVICES,), (axis,), axis_types=(axis_type,))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # The number of devices is fixed once jax has started, as it may have in this process.
    folder = tmp_path_factory.mktemp("checkpoints")
    command = [sys.executable, __file__, str(folder)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    outcome: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return outcome


@pytest.mark.parametrize("run", WRITERS, ids=lambda run: run.name)
def test_on_disk_every_run_writes_the_canonical_orientation(
    results: dict[str, Any], run: Run
) -> None:
    written = results[run.name]
    assert written["shapes"] == {"kernel": [32, 64], "mu": [32, 64], "nu": [32, 64]}
    assert written["exact"]
    assert written["layout"] == "embed-vocab"
    assert "[32, 64], [embed, vocab], of layout embed-vocab" in written["flipped"]


@pytest.mark.parametrize(
    ("writer", "reader"), PAIRS, ids=lambda run: run.name if isinstance(run, Run) else str(run)
)
def test_a_run_goes_on_from_any_others_checkpoint_with_the_same_loss(
    results: dict[str, Any], writer: Run, reader: Run
) -> None:
    went_on, restored = results[writer.name], results[f"{writer.name} {reader.name}"]
    if writer.layout == reader.layout:
        # The same arithmetic on the same values; the mode changes none of it on CPU.
        assert restored["loss"] == went_on["loss"]
        assert restored["later_loss"] == went_on["later_loss"]
    # The restored values are the same bit for bit, but the product with a transposed kernel may
    # add up in another order: a few units in the last place of float32. The step after it has been
    # through the gradient's own sums as well. Seen on CPU: the same to the last bit.
    assert restored["loss"] == pytest.approx(went_on["loss"], rel=1e-6, abs=0)
    assert restored["later_loss"] == pytest.approx(went_on["later_loss"], rel=1e-6, abs=0)


@pytest.mark.parametrize(
    ("writer", "reader"), PAIRS, ids=lambda run: run.name if isinstance(run, Run) else str(run)
)
def test_a_restored_array_is_sharded_as_the_run_has_it_and_no_value_left_its_device(
    results: dict[str, Any], writer: Run, reader: Run
) -> None:
    restored = results[f"{writer.name} {reader.name}"]
    assert all(restored["sharded_as_the_run"])
    assert restored["collectives"] == []
    assert restored["stored_deleted"] == [reader.layout == "vocab-embed"] * 3


@pytest.mark.parametrize("mode", MODES)
def test_sharded_axes_are_merged_and_split_apart_in_both_modes(
    results: dict[str, Any], mode: str
) -> None:
    merged = results["merged"][mode]
    assert merged["exact"]
    assert merged["spread_exact"]
    assert merged["by_rate"] == ["tensor", "tensor"]


# The guide


def test_the_example_of_the_guide_runs(tmp_path: Path) -> None:
    guide = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
    example = "\n".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL))
    script = tmp_path / "example.py"
    script.write_text(example)
    child = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert guide.endswith(f"print\n\n```\n{child.stdout}```\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)  # as the fixture unoptimized
    outcome_path = Path(sys.argv[1]) / "results.json"
    outcome_path.write_text(json.dumps(run_with_orbax(Path(sys.argv[1]))))
