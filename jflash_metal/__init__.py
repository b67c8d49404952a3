"""The backend for Apple GPUs: Metal shaders, run as XLA custom calls on JAX's cpu platform.

Apple's GPUs share their memory with the CPU, so the arrays of JAX's CPU platform are read and written in place. Where
the native library is built without Metal (`_ffi.host()`), the same shaders run in an emulator: slowly, and watched for
races and for accesses out of bounds.

`_source` makes the shader for a call, `_ffi` runs it, shaders/ has the algorithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflash import _platform, _sharding
from jflash._platform import Platform
from jflash._semantics.online_softmax import sinks_gradient
from jflash._semantics.spec import Operands, Residuals, Spec
from jflash_metal import _ffi, _mps, _source
from jflash_metal._blocks import blocks
from jflash_metal._parameters import parameters

__all__ = ["ONLY_BY_NAME", "backward", "forward", "unsupported"]

ONLY_BY_NAME = True
"""Until the shaders have run on an Apple GPU, `implementation=None` does not choose them."""
LARGEST_DIM = 256
_THREADS = (128, 1, 1)


def unsupported(spec: Spec, platform: Platform) -> str | None:
    """Another platform than JAX's cpu, what the shaders do not compute, or a native library that is not there."""
    if platform.name == "METAL":
        return (
            "jax-metal's platform METAL runs two custom calls of its own and has no FFI, so no library can run a "
            "shader there. JAX's cpu platform on the same Mac can: JAX_PLATFORMS=cpu."
        )
    if platform.name == "mps" and _mps.launcher() is None:
        return (
            "jax-mps's platform mps has no FFI, and this version has no metal_kernel_jit, so no library can run a "
            "shader there. JAX's cpu platform on the same Mac can: JAX_PLATFORMS=cpu."
        )
    if platform.name not in ("cpu", "mps"):
        return f"its kernels are for Apple GPUs, by way of JAX's cpu platform; this is {platform}."
    if spec.dtype.name not in _source.SCALARS:
        return f"Metal has no {spec.dtype}; it takes {', '.join(_source.SCALARS)}."
    if max(spec.head_dim, spec.value_dim) > LARGEST_DIM:
        return f"head dimensions up to {LARGEST_DIM}; these are {spec.head_dim} and {spec.value_dim}."
    if spec.dropout_rate > 0:
        return "it has no dropout."
    if spec.score_mod is not None:
        return "it has no score_mod: a Python function cannot become part of a Metal shader."
    return None if platform.name == "mps" else _ffi.available()


def forward(spec: Spec, operands: Operands) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Output in the query's dtype and log-sum-exp in float32."""
    operands = _readable(operands)
    source = _source.forward(spec, _bias_dtype(operands))
    out, lse = _launch(
        source,
        "forward",
        (_cover(spec.query_length, blocks(spec).forward.rows), spec.heads, spec.batch),
        parameters(spec, operands),
        [*_arrays(operands), operands.sinks],
        [
            jax.ShapeDtypeStruct((spec.batch, spec.query_length, spec.heads, spec.value_dim), spec.dtype),
            _by_row(spec),
        ],
    )
    return out, lse


def backward(spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
    """The gradients of the operands, `None` for those that have none or that nobody differentiates."""
    original, operands = operands, _readable(operands)
    source = _source.backward(spec, _bias_dtype(operands))
    want, sizes = _source.wanted(spec), blocks(spec)
    values = parameters(spec, operands)
    like = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype)
    query_blocks = _cover(spec.query_length, sizes.d_query.rows)

    (delta,) = _launch(
        source,
        "delta",
        (_cover(spec.query_length, 4), spec.heads, spec.batch),
        values,
        [residuals.out, residuals.d_out, residuals.lse, residuals.d_lse],
        [_by_row(spec)],
    )
    arrays = [*_arrays(operands), residuals.d_out, residuals.lse, delta]
    gradients: dict[str, Any] = dict(query=None, key=None, value=None)
    sums: dict[str, Array] = {}
    results = _source.row_results(want)
    if "query" not in spec.constants or results:
        gradients["query"], *rows = _launch(
            source,
            "d_query",
            (query_blocks, spec.heads, spec.batch),
            values,
            arrays,
            [
                like(operands.query),
                *(like(operands.bias) if name == "d_bias" else _by_row(spec) for name in results),
            ],
        )
        sums = dict(zip(results, rows, strict=True))
    if not {"key", "value"} <= spec.constants or want.bias_columns:
        columns = jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.key_length), jnp.float32)
        gradients["key"], gradients["value"], *rest = _launch(
            source,
            "d_key_value",
            (_cover(spec.key_length, sizes.d_key_value.rows), spec.key_heads, spec.batch),
            values,
            arrays,
            [like(operands.key), like(operands.value), *([columns] if want.bias_columns else [])],
        )
        if want.bias_columns:
            (sums["d_bias_columns"],) = rest
    if operands.bias is not None and original.bias is not None:
        d_bias = None
        if want.bias_pairs:
            d_bias = sums["d_bias"]
        elif want.bias_shared:
            bias_batch, bias_heads = operands.bias.shape[:2]
            grid = (_cover(spec.key_length, sizes.d_query.columns), query_blocks, bias_batch * bias_heads)
            (d_bias,) = _launch(source, "d_bias", grid, values, arrays, [like(operands.bias)])
        elif want.bias_rows:
            d_bias = _summed(sums["d_bias_rows"][..., None], operands.bias.shape)
        elif want.bias_columns:
            d_bias = _summed(sums["d_bias_columns"][:, :, None], operands.bias.shape)
        gradients["bias"] = None if d_bias is None else d_bias.astype(original.bias.dtype)
    if operands.scale is not None and want.scale:
        gradients["scale"] = _summed(sums["d_scale_rows"], operands.scale.shape)
    if operands.alibi_slopes is not None and want.slopes:
        gradients["alibi_slopes"] = _summed(sums["d_slope_rows"], operands.alibi_slopes.shape)
    seen_lse = jnp.where(residuals.lse == -jnp.inf, jnp.inf, residuals.lse)
    return Operands(**gradients, sinks=sinks_gradient(operands.sinks, seen_lse, delta))


def _summed(array: Array, shape: tuple[int, ...]) -> Array:
    """`array` summed over the axes that have size 1 in `shape`, or that it does not have."""
    array = array.sum(axis=tuple(range(len(shape), array.ndim)))
    shared = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return array.sum(axis=shared, keepdims=True)


def _cover(length: int, block: int) -> int:
    return -(-length // block)


def _by_row(spec: Spec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.query_length), jnp.float32)


def _bias_dtype(operands: Operands) -> str:
    return "float32" if operands.bias is None else operands.bias.dtype.name


def _readable(operands: Operands) -> Operands:
    """The same call in dtypes that Metal has: a float64 bias in float32, 64-bit segment ids counted from 0."""
    bias, queries, keys = operands.bias, operands.query_segments, operands.key_segments
    if bias is not None and bias.dtype.name not in _source.SCALARS:
        bias = bias.astype(jnp.float32)
    if queries is not None and keys is not None and max(queries.dtype.itemsize, keys.dtype.itemsize) > 4:
        ids = jnp.sort(jnp.concatenate([queries.ravel(), keys.ravel()]))
        queries, keys = (jnp.searchsorted(ids, array).astype(jnp.int32) for array in (queries, keys))
    return operands._replace(bias=bias, query_segments=queries, key_segments=keys)


def _ranges(segments: Int[Array, "#B L"] | None) -> Int[Array, "#B L8 2"] | None:
    """The smallest and the largest segment of each eight in turn."""
    if segments is None:
        return None
    padded = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % 8)), mode="edge")
    eights = padded.reshape(segments.shape[0], -1, 8)
    return jnp.stack([eights.min(axis=-1), eights.max(axis=-1)], axis=-1)


def _arrays(operands: Operands) -> list[Array | None]:
    """What all kernels of attention take, in the order of their buffers."""
    return [
        operands.query,
        operands.key,
        operands.value,
        operands.bias,
        operands.mask,
        operands.scale,
        operands.alibi_slopes,
        operands.query_offset,
        operands.query_lengths,
        operands.key_lengths,
        operands.query_segments,
        operands.key_segments,
        _ranges(operands.query_segments),
        _ranges(operands.key_segments),
    ]


def _launch(
    source: str,
    entry: str,
    grid: tuple[int, int, int],
    values: bytes,
    arrays: Sequence[Array | None],
    results: Sequence[jax.ShapeDtypeStruct],
) -> tuple[Array, ...]:
    # A kernel that does not use an array still has a place for it.
    placeholder = jnp.zeros(1, jnp.int32)
    present = [placeholder if array is None else array for array in arrays]
    launch = _mps.launch if _platform.current().name == "mps" else _ffi.launch
    launched = launch(source, entry, grid, _THREADS, values, present, results)
    # Inside shard_map a result differs between devices as the operands do, which a custom call's type does not say.
    return _sharding.varying_alike(launched, like=present)
