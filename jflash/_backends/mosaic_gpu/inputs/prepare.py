"""Operands in the form that kernels take: padded to whole tiles, with margins, edges of padding, packed masks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.hardware import round_up
from jflash._backends.mosaic_gpu.inputs import bias_and_mask, operand_pieces
from jflash._backends.mosaic_gpu.inputs.array_shapes import (
    block_dims,
    block_shape,
    forward_in_panels,
    in_panels,
    panel_dim,
    values_in_panels,
)
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import zero_padding

MARGIN = 256
"""Elements past the end of a vector that a tile at its end may read."""

LARGEST_TILE = 128
"""Rows of the largest tile that is copied from an array with lengths."""

LENGTHS = {
    **dict.fromkeys(("query", "t_query", "d_out"), "query_lengths"),
    **dict.fromkeys(("key", "t_key", "value", "t_value"), "key_lengths"),
}
"""Which lengths say where an array's padding begins."""


def whole_tiles(
    spec: Spec, name: str, array: Array, axis: int = 1, parts: int = 1, *, in_panels: bool = False
) -> Array:
    """`[B, L, N, H]` (L at `axis`) padded with zeros to whole tiles, and in pieces: query, key, value or d_out. Of
    `parts` of the columns each has its own pieces side by side."""
    columns = array.shape[3]
    dim = panel_dim(columns) if in_panels else block_dims(spec)[name in ("value", "d_out")]
    room = [(0, 0)] * 3 + [(0, dim - columns)]
    if not in_panels:
        room[axis] = (0, -array.shape[axis] % 8)
    return operand_pieces.split_array(spec, jnp.pad(array, room), parts)


def with_margin(array: Array, axes: tuple[int, ...], fill: float = 0) -> Array:
    """`array` with room along `axes` for a tile that begins at the last element."""
    widths = [(0, MARGIN + -size % 8 if axis in axes else 0) for axis, size in enumerate(array.shape)]
    return jnp.pad(array, widths, constant_values=fill)


def operands_for_kernels(spec: Spec, operands: Operands, *, except_bias: bool = False) -> dict[str, Array]:
    """The operands but query, key, value and a packed mask, as kernels take them, by name; or their tangents.

    A bias or mask of one axis becomes a float32 vector with a margin. With `except_bias` the bias is left out.
    """
    prepared: dict[str, Array] = {}
    scalars = "scale", "alibi_slopes", "sinks", "query_offset", "query_lengths", "key_lengths"
    counted = spec.score_mod is not None or spec.dropout_rate > 0
    indices = ("batch_index", "head_index", "first_query", "first_key") if counted else ()
    segments = "query_segments", "key_segments"
    for name in (*scalars, *indices, *segments):
        array = getattr(operands, name)
        if array is not None:
            prepared[name] = with_margin(array, (1,)) if name in segments else array
    for name, kind in bias_and_mask.kinds(spec).items():
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


def edges(operands: Operands, arrays: Mapping[str, Float[Array, "B L N H"]]) -> dict[str, Array]:
    """For each array with lengths, the rows of the largest tile in which padding begins, with zeros for padding.

    `KernelInputs.copy_rows` copies them in the place of such a tile.
    """
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        lengths = getattr(operands, LENGTHS[name])
        if lengths is not None:
            first = edge_row(jnp.broadcast_to(lengths, array.shape[:1]))
            rows = first[:, None] + jnp.arange(LARGEST_TILE + 8)
            tile = array.at[jnp.arange(len(array))[:, None], rows].get(mode="clip")
            found[f"{name}_edge"] = zero_padding(tile, lengths - first)
    return found


def edge_row(length: Array) -> Array:
    """A row, a multiple of 8, before which no tile begins that has padding, for a length."""
    return lax.div(jnp.maximum(length - LARGEST_TILE, 0), 8) * 8


def pack_heads(array: Array, group: int) -> Array:
    """`[B, T, K * G, H]` as `[B, K, T * G, H]`: the heads of a group become rows of one tile."""
    batch, rows, heads, dim = array.shape
    split = array.reshape(batch, rows, heads // group, group, dim)
    return jnp.moveaxis(split, 2, 1).reshape(batch, heads // group, rows * group, dim)


def unpack_heads(array: Array, group: int) -> Array:
    """`[B, T * G, K, ...]` as `[B, T, K * G, ...]`."""
    batch, rows, heads, *rest = array.shape
    split = array.reshape(batch, rows // group, group, heads, *rest)
    return jnp.moveaxis(split, 2, 3).reshape(batch, rows // group, heads * group, *rest)


def copied(spec: Spec) -> list[str]:
    """The copies that a call costs before its kernels, in words for `explain`."""
    shapes = {
        "query": (spec.batch, spec.query_length, spec.heads, spec.head_dim),
        "key": (spec.batch, spec.key_length, spec.key_heads, spec.head_dim),
        "value": (spec.batch, spec.key_length, spec.key_heads, spec.value_dim),
    }
    if spec.dtype == jnp.float32:
        copies = [
            f"{name} is split into bfloat16 pieces, {operand_pieces.number(spec)} of each number" for name in shapes
        ]
    else:
        panels = dict.fromkeys(("query", "key"), forward_in_panels(spec)) | dict(value=values_in_panels(spec))
        texts = (_padded(name, shape, panels[name], in_panels(spec)) for name, shape in shapes.items())
        copies = list(itertools.chain(*texts))
    if spec.bias_shape is not None and bias_and_mask.has_bias_tiles(spec):
        *_, rows, columns = spec.bias_shape
        if rows % 8 or columns % 64:
            copies.append(f"bias is padded from [{rows}, {columns}] to [{round_up(rows, 8)}, {round_up(columns, 64)}]")
    if bias_and_mask.has_packed_mask(spec):
        copies.append("mask is packed into bits, an eighth of its bytes")
    return copies


def _padded(name: str, shape: tuple[int, ...], forward_in_panels: bool, in_panels: bool) -> Iterator[str]:
    """How an array of this shape is padded, if it is."""
    whole = lambda panels: (*shape[:3], panel_dim(shape[3])) if panels else block_shape(shape)
    forward, backward = whole(forward_in_panels), whole(in_panels)
    if forward != shape:
        yield f"{name} is padded from {shape} to {forward}"
    if backward not in (shape, forward):
        yield f"{name} is padded from {shape} to {backward} for the backward"
