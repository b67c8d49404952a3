"""Operands in the form that kernels take: padded to whole tiles, with margins, and with heads packed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jflash._backends.nvidia.facts import facts_of
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import PARAMETERS

MARGIN = 256
"""Elements past the end of a vector that a tile at its end may read."""

LENGTHS = {
    **dict.fromkeys(("query", "t_query", "d_out"), "query_lengths"),
    **dict.fromkeys(("key", "t_key", "value", "t_value"), "key_lengths"),
}
"""Which lengths say where an array's padding begins."""


def with_margin(array: Array, axes: tuple[int, ...], fill: float = 0) -> Array:
    """Return `array` with room along `axes` for a tile that begins at the last element."""
    widths = [(0, MARGIN + -size % 8 if axis in axes else 0) for axis, size in enumerate(array.shape)]
    return jnp.pad(array, widths, constant_values=fill)


def operands_for_kernels(spec: Spec, operands: Operands, *, except_bias: bool = False) -> dict[str, Array]:
    """Return the operands but query, key, value and a packed mask, as kernels take them, by name; or their tangents.

    A bias or mask of one axis becomes a float32 vector with a margin. With `except_bias` the bias is left out.
    """
    prepared: dict[str, Array] = {}
    scalars = *PARAMETERS, "sinks", "query_offset", "query_lengths", "key_lengths", "page_table"
    counted = spec.score_mod is not None or spec.mask_mod is not None or spec.dropout_rate > 0
    indices = ("batch_index", "head_index", "first_query", "first_key") if counted else ()
    segments = "query_segments", "key_segments"
    for name in (*scalars, *indices, *segments):
        array = getattr(operands, name)
        if array is not None and name != "bias":
            prepared[name] = with_margin(array, (1,)) if name in segments else array
    for name, kind in facts_of(spec).kinds.items():
        array = getattr(operands, name)
        if array is None or (name == "bias" and except_bias) or (name == "mask" and kind == "tile"):
            continue
        match kind:
            case "tile":
                array = jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % 8), (0, -array.shape[3] % 64)))
            case "row" | "column":
                vector = array.squeeze(3 if kind == "row" else 2)
                array = with_margin(vector.astype(jnp.float32), (2,))
            case "scalar":
                array = array[..., 0, 0].astype(jnp.float32)
        prepared[name] = array
    if operands.dropout_seed is not None:
        prepared["dropout_seed"] = operands.dropout_seed
    return prepared


def pack_heads(array: Array, group: int) -> Array:
    """Return `[B, T, K * G, H]` as `[B, K, T * G, H]`: the heads of a group become rows of one tile."""
    batch, rows, heads, dim = array.shape
    split = array.reshape(batch, rows, heads // group, group, dim)
    return jnp.moveaxis(split, 2, 1).reshape(batch, heads // group, rows * group, dim)


def unpack_heads(array: Array, group: int) -> Array:
    """Return `[B, T * G, K, ...]` as `[B, T, K * G, ...]`."""
    batch, rows, heads, *rest = array.shape
    split = array.reshape(batch, rows // group, group, heads, *rest)
    return jnp.moveaxis(split, 2, 3).reshape(batch, rows // group, heads * group, *rest)


def in_32_bits[**Arguments, Made](function: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Return `function`, traced where Python's numbers have 32 bits, as those of kernels have.

    With `jax_enable_x64` they have 64, and make of an int32 that they meet an int64.
    """

    @functools.wraps(function)
    def traced(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        with jax.enable_x64(False):
            return function(*args, **kwargs)

    return traced
