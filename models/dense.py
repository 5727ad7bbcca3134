"""A dense layer of any number of feature axes, with its kernel in either orientation.

The kernel of a dense layer is usually stored input axes first, ``in..., out...``. Its gradient
comes out of autodiff the other way round, as ``transpose(dot(...))``, and the compiler folds that
transpose only where nothing stands between the two. ``kernel_transposed`` stores the kernel as
``out..., in...``, the order in which the gradient comes out, so that there is nothing to fold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hlo_audit.errors import UsageError
from hlo_audit.lazy_import import lazy_import

if TYPE_CHECKING:
    from collections.abc import Mapping

    import jax
    import jax.numpy as jnp
else:
    jax = lazy_import("jax")
    jnp = lazy_import("jax.numpy")

Features = int | tuple[int, ...]

INT8_MAX = 127


@dataclass(frozen=True)
class Dense:
    """``y = x @ kernel + bias``, contracting the trailing axes of ``x``.

    Callers name features and axes in the order ``in..., out...`` whatever the kernel's orientation;
    the shape of the output, ``x.shape[:-n_in] + out``, does not depend on it either.

    Attributes:
        in_features: size of the contracted axis of the input, or the sizes of several.
        out_features: size of the new axis of the output, or the sizes of several.
        kernel_axes: a logical or mesh axis name, or ``None``, for each axis of the kernel in the
            order ``in..., out...``; empty for none at all.
        use_bias: add a bias of the output's features.
        dtype: what inputs, kernel and bias are cast to for the product.
        param_dtype: what kernel and bias are stored in.
        output_dtype: what the product is accumulated and returned in; empty for ``dtype``.
        quantization: empty, or ``int8``: the product sees the kernel rounded to int8, with one
            scale for each output feature (its largest magnitude over 127). The stored kernel stays
            as it is, and its gradient passes the rounding unchanged (straight-through).
        kernel_transposed: store the kernel as ``out..., in...``.
        tied_embedding: the kernel is the table of an embedding, which stores it vocabulary first
            (``out..., in...``) for its lookups.

    Raises:
        UsageError: for sizes below 1, axes that do not match the features, an unknown quantization,
            and for ``kernel_transposed`` together with ``quantization`` or ``tied_embedding``.
    """

    in_features: Features
    out_features: Features
    kernel_axes: tuple[str | None, ...] = ()
    use_bias: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    output_dtype: str = ""
    quantization: str = ""
    kernel_transposed: bool = False
    tied_embedding: bool = False

    def __post_init__(self) -> None:
        features = self.in_shape + self.out_shape
        if not self.in_shape or not self.out_shape or min(features) < 1:
            raise UsageError(
                f"no kernel has {self.in_features} input and {self.out_features} output features",
                hint="give at least one input and one output feature axis, each of size 1 or more",
            )
        if self.kernel_axes and len(self.kernel_axes) != len(features):
            raise UsageError(
                f"kernel_axes names {len(self.kernel_axes)} axes of a kernel of {len(features)}",
                hint="name one for each feature axis, inputs first, or None for one without a name",
            )
        if self.quantization not in ("", "int8"):
            raise UsageError(
                f"no quantization is called {self.quantization!r}",
                hint="leave it empty or say int8",
            )
        if self.kernel_transposed and self.tied_embedding:
            raise UsageError(
                "kernel_transposed does not go with tied embeddings: there is no kernel of its own",
                hint="the embedding's table is stored vocabulary first already",
            )
        if self._out_first and self.quantization:
            raise UsageError(
                f"quantization={self.quantization} does not go with a kernel stored outputs first",
                hint="quantise a dense layer without kernel_transposed or tied embeddings",
            )

    @property
    def in_shape(self) -> tuple[int, ...]:
        return _as_tuple(self.in_features)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return _as_tuple(self.out_features)

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """The shape that the kernel is stored in."""
        inputs, outputs = self.in_shape, self.out_shape
        return outputs + inputs if self._out_first else inputs + outputs

    @property
    def stored_kernel_axes(self) -> tuple[str | None, ...]:
        """``kernel_axes`` in the order of ``kernel_shape``."""
        n_in = len(self.in_shape)
        axes = self.kernel_axes or (None,) * (n_in + len(self.out_shape))
        return axes[n_in:] + axes[:n_in] if self._out_first else axes

    @property
    def bias_axes(self) -> tuple[str | None, ...]:
        """The names of the bias's axes, which are those of the output features."""
        n_out = len(self.out_shape)
        axes = self.stored_kernel_axes
        return axes[:n_out] if self._out_first else axes[-n_out:]

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Draw the parameters: ``kernel`` and, with ``use_bias``, a ``bias`` of zeros.

        The kernel is truncated normal with variance ``1 / fan_in``, ``fan_in`` being the product of
        the input features. Both orientations hold the same values under the same key: the
        transposed kernel is the other one, transposed.
        """
        n_in, n_out = len(self.in_shape), len(self.out_shape)
        draw = jax.nn.initializers.variance_scaling(
            1.0,
            "fan_in",
            "truncated_normal",
            in_axis=tuple(range(n_in)),
            out_axis=tuple(range(n_in, n_in + n_out)),
        )
        kernel = draw(key, self.in_shape + self.out_shape, jnp.dtype(self.param_dtype))
        if self._out_first:
            kernel = kernel.transpose(*range(n_in, n_in + n_out), *range(n_in))
        params = {"kernel": kernel}
        if self.use_bias:
            params["bias"] = jnp.zeros(self.out_shape, self.param_dtype)
        return params

    def apply(
        self,
        params: Mapping[str, jax.Array],
        x: jax.Array,
        *,
        slice_bounds: tuple[int, int] | None = None,
    ) -> jax.Array:
        """Return the output, ``x.shape[:-n_in] + out_features``, in ``output_dtype``.

        Args:
            params: ``kernel`` in ``kernel_shape`` and, with ``use_bias``, ``bias``.
            x: the input; its trailing axes are ``in_features``.
            slice_bounds: compute only this half-open range of the last output feature axis.

        Raises:
            UsageError: for an input without those trailing axes, and for ``slice_bounds`` that are
                empty, out of range, or meet a kernel stored outputs first.
        """
        n_in, n_out = len(self.in_shape), len(self.out_shape)
        if x.shape[-n_in:] != self.in_shape:
            raise UsageError(
                f"a dense layer of {self.in_shape} input features was given an input of {x.shape}",
                hint="the trailing axes of the input are the input features",
            )
        kernel = params["kernel"]
        bias = params["bias"] if self.use_bias else None
        if slice_bounds is not None:
            start, stop = self._check_slice(slice_bounds)
            kernel = kernel[..., start:stop]
            bias = None if bias is None else bias[..., start:stop]
        scale = None
        if self.quantization:
            kernel, scale = _round_to_int8(kernel, tuple(range(n_in)))
        first = n_out if self._out_first else 0
        y = jax.lax.dot_general(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            ((tuple(range(x.ndim - n_in, x.ndim)), tuple(range(first, first + n_in))), ((), ())),
            preferred_element_type=jnp.dtype(self.output_dtype or self.dtype),
        )
        if scale is not None:
            y = y * scale.astype(y.dtype)
        if bias is not None:
            y = y + bias.astype(y.dtype)
        return y

    @property
    def _out_first(self) -> bool:
        return self.kernel_transposed or self.tied_embedding

    def _check_slice(self, bounds: tuple[int, int]) -> tuple[int, int]:
        if self._out_first:
            raise UsageError(
                "slice_bounds does not go with a kernel stored outputs first",
                hint="it cuts the kernel's last axis, which is an input axis there",
            )
        start, stop = bounds
        size = self.out_shape[-1]
        if not 0 <= start < stop <= size:
            raise UsageError(
                f"slice_bounds=({start}, {stop}) is no range of {size} output features",
                hint=f"0 <= start < stop <= {size}",
            )
        return start, stop


def _as_tuple(features: Features) -> tuple[int, ...]:
    return (features,) if isinstance(features, int) else tuple(features)


def _round_to_int8(kernel: jax.Array, in_axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the kernel's int8 values, as floats that a gradient can pass, and their scales.

    The scales have the shape of the output features.
    """
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), axis=in_axes)
    # A feature whose weights are all zero has no scale of its own: 1 keeps its values zero.
    scale = jax.lax.stop_gradient(jnp.where(largest > 0, largest / INT8_MAX, 1.0))
    scaled = kernel / scale
    values = jax.lax.stop_gradient(jnp.round(scaled).astype(jnp.int8)).astype(jnp.float32)
    # Adds an exact zero that carries the gradient past the rounding.
    return values + (scaled - jax.lax.stop_gradient(scaled)), scale
