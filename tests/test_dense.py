"""The dense layer: a transposed kernel changes how weights lie, and nothing that is computed."""

# mypy: untyped-calls-exclude=jax
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo_audit.errors import UsageError
from hlo_audit.models.dense import Dense

pytestmark = pytest.mark.usefixtures("unoptimized")

FEATURES = [pytest.param(16, id="scalar"), pytest.param((2, 8), id="two-axes")]


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def small_integers(seed: int, *shape: int) -> jax.Array:
    """Floats whose products and sums are exact, so that the order of summation does not show."""
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 9, shape), jnp.float32)


def squares(dense: Dense, kernel: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(dense.apply({"kernel": kernel}, x) ** 2)


def test_the_output_is_the_product_over_every_input_axis_plus_the_bias() -> None:
    dense = Dense((4, 8), (2, 3), use_bias=True)
    params = {"kernel": normal(0, 4, 8, 2, 3), "bias": normal(1, 2, 3)}
    x = normal(2, 5, 4, 8)
    expected = np.tensordot(x, params["kernel"], axes=2) + params["bias"]
    np.testing.assert_allclose(dense.apply(params, x), expected, rtol=1e-5, atol=1e-5)


def test_an_input_without_leading_axes_gives_the_output_features_alone() -> None:
    dense = Dense(4, (2, 3))
    assert dense.apply({"kernel": normal(0, 4, 2, 3)}, normal(1, 4)).shape == (2, 3)


def test_the_product_is_computed_and_returned_in_the_dtypes_asked_for() -> None:
    x = normal(0, 3, 32)
    params = {"kernel": normal(1, 32, 16)}
    assert Dense(32, 16, dtype="bfloat16").apply(params, x).dtype == jnp.bfloat16
    wide = Dense(32, 16, dtype="bfloat16", output_dtype="float32").apply(params, x)
    assert wide.dtype == jnp.float32
    rounded = [np.asarray(a.astype(jnp.bfloat16), np.float32) for a in (x, params["kernel"])]
    np.testing.assert_allclose(wide, rounded[0] @ rounded[1], rtol=1e-5, atol=1e-5)


def test_a_transposed_kernel_permutes_its_shape_and_its_axes_alike() -> None:
    axes = ("embed", "heads", "head_dim")
    usual = Dense(32, (2, 8), kernel_axes=axes)
    transposed = Dense(32, (2, 8), kernel_axes=axes, kernel_transposed=True)
    assert usual.kernel_shape == (32, 2, 8)
    assert usual.stored_kernel_axes == axes
    assert transposed.kernel_shape == (2, 8, 32)
    assert transposed.stored_kernel_axes == ("heads", "head_dim", "embed")
    drawn = jax.eval_shape(transposed.init, jax.random.key(0))["kernel"]
    assert (drawn.shape, drawn.dtype) == ((2, 8, 32), jnp.float32)


def test_a_kernel_without_axis_names_has_none_for_each_axis() -> None:
    assert Dense((4, 8), 16, kernel_transposed=True).stored_kernel_axes == (None, None, None)


@pytest.mark.parametrize("out_features", FEATURES)
def test_the_output_does_not_depend_on_the_orientation(out_features: int | tuple[int, ...]) -> None:
    usual, transposed = Dense(32, out_features), Dense(32, out_features, kernel_transposed=True)
    for values, tolerance in ((small_integers, 0.0), (normal, 1e-5)):
        x, kernel = values(0, 4, 6, 32), values(1, *usual.kernel_shape)
        y = transposed.apply({"kernel": jnp.moveaxis(kernel, 0, -1)}, x)
        expected = usual.apply({"kernel": kernel}, x)
        assert y.shape == expected.shape == (4, 6, *usual.out_shape)
        np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("out_features", FEATURES)
def test_the_gradient_is_the_same_transposed(out_features: int | tuple[int, ...]) -> None:
    usual, transposed = Dense(32, out_features), Dense(32, out_features, kernel_transposed=True)
    gradient = jax.grad(squares, argnums=1)
    for values, tolerance in ((small_integers, 0.0), (normal, 1e-5)):
        x, kernel = values(0, 4, 6, 32), values(1, *usual.kernel_shape)
        stored = gradient(transposed, jnp.moveaxis(kernel, 0, -1), x)
        expected = gradient(usual, kernel, x)
        assert stored.shape == transposed.kernel_shape
        np.testing.assert_allclose(
            jnp.moveaxis(stored, -1, 0), expected, rtol=tolerance, atol=100 * tolerance
        )


@pytest.mark.parametrize("transposed", [False, True])
def test_the_bias_has_the_shape_and_axes_of_the_output_features(transposed: bool) -> None:
    axes = ("embed", "heads", "head_dim")
    dense = Dense(32, (2, 8), kernel_axes=axes, use_bias=True, kernel_transposed=transposed)
    assert dense.bias_axes == ("heads", "head_dim")
    assert jax.eval_shape(dense.init, jax.random.key(0))["bias"].shape == (2, 8)
    kernel, bias, x = normal(0, *dense.kernel_shape), normal(1, 2, 8), normal(2, 3, 32)
    zeros = jnp.zeros((2, 8))
    with_bias = dense.apply({"kernel": kernel, "bias": bias}, x)
    without = dense.apply({"kernel": kernel, "bias": zeros}, x)
    np.testing.assert_array_equal(with_bias, np.asarray(without) + np.asarray(bias))


@pytest.mark.parametrize("in_features", [64, (16, 4)])
def test_both_orientations_start_from_the_same_values(in_features: int | tuple[int, ...]) -> None:
    usual = Dense(in_features, (32, 64)).init(jax.random.key(0))["kernel"]
    stored = Dense(in_features, (32, 64), kernel_transposed=True).init(jax.random.key(0))["kernel"]
    assert stored.shape[:2] == (32, 64)
    np.testing.assert_array_equal(jnp.moveaxis(stored, (0, 1), (-2, -1)), usual)
    # Over the inputs alone; fan-in over the outputs would give 0.022.
    assert float(jnp.std(usual)) == pytest.approx(64**-0.5, rel=0.01)


def test_int8_rounds_each_output_feature_to_255_steps_of_its_own_scale() -> None:
    kernel = np.asarray(normal(0, 32, 16)) * np.float32(10) ** np.arange(-8, 8)
    dense = Dense(32, 16, quantization="int8")
    rounded = np.asarray(dense.apply({"kernel": jnp.asarray(kernel)}, jnp.eye(32)))
    scale = np.abs(kernel).max(axis=0) / 127
    steps = rounded / scale
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
    assert np.abs(steps).max() == pytest.approx(127)
    assert (np.abs(rounded - kernel) <= scale * 0.5001).all()


def test_int8_keeps_a_feature_of_zeros_zero() -> None:
    kernel = jnp.asarray([[0.0, 1.0]] * 32, jnp.float32)
    y = Dense(32, 2, quantization="int8").apply({"kernel": kernel}, normal(1, 3, 32))
    assert not np.asarray(y)[:, 0].any()
    assert np.isfinite(y).all()


def test_int8_passes_the_gradient_through_the_rounding() -> None:
    kernel, x, weight = normal(0, 32, 16), normal(1, 3, 32), normal(2, 3, 16)

    def product(kernel: jax.Array) -> jax.Array:
        return jnp.sum(Dense(32, 16, quantization="int8").apply({"kernel": kernel}, x) * weight)

    np.testing.assert_allclose(jax.grad(product)(kernel), x.T @ weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quantization", ["", "int8"])
def test_a_slice_is_that_part_of_the_output(quantization: str) -> None:
    dense = Dense(32, (2, 8), use_bias=True, quantization=quantization)
    params = {"kernel": normal(0, 32, 2, 8), "bias": normal(1, 2, 8)}
    x = normal(2, 3, 32)
    part = dense.apply(params, x, slice_bounds=(2, 5))
    np.testing.assert_allclose(part, dense.apply(params, x)[..., 2:5], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bounds", [(-1, 4), (4, 4), (5, 4), (0, 17)])
def test_a_slice_out_of_range_is_refused(bounds: tuple[int, int]) -> None:
    dense = Dense(32, 16)
    with pytest.raises(UsageError, match="no range of 16 output features"):
        dense.apply({"kernel": normal(0, 32, 16)}, normal(1, 3, 32), slice_bounds=bounds)


def test_a_tied_layer_multiplies_by_the_rows_of_the_embedding_table() -> None:
    table, x = normal(0, 16, 32), normal(1, 3, 32)
    dense = Dense(32, 16, kernel_axes=("embed", "vocab"), tied_embedding=True)
    assert dense.kernel_shape == (16, 32)
    assert dense.stored_kernel_axes == ("vocab", "embed")
    np.testing.assert_allclose(dense.apply({"kernel": table}, x), x @ table.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"in_features": 0}, "no kernel has 0 input"),
        ({"out_features": ()}, "no kernel has 32 input and .* output features"),
        ({"kernel_axes": ("embed",)}, "names 1 axes of a kernel of 2"),
        ({"quantization": "int3"}, "no quantization is called 'int3'"),
        ({"quantization": "int8", "kernel_transposed": True}, "quantization=int8 does not go"),
        ({"quantization": "int8", "tied_embedding": True}, "quantization=int8 does not go"),
        ({"tied_embedding": True, "kernel_transposed": True}, "does not go with tied embeddings"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as refusal:
        Dense(**{"in_features": 32, "out_features": 16, **options})
    assert refusal.value.hint


@pytest.mark.parametrize("option", ["kernel_transposed", "tied_embedding"])
def test_a_slice_of_a_kernel_stored_outputs_first_is_refused(option: str) -> None:
    dense = Dense(32, 16, **{option: True})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="slice_bounds does not go"):
        dense.apply({"kernel": normal(0, 16, 32)}, normal(1, 3, 32), slice_bounds=(0, 8))


def test_an_input_of_other_features_is_refused() -> None:
    dense = Dense(32, 16)
    with pytest.raises(UsageError, match=r"\(32,\) input features was given an input of \(3, 31\)"):
        dense.apply({"kernel": normal(0, 32, 16)}, normal(1, 3, 31))
