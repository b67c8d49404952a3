"""Arrays of rows as copies take them: padded to whole tiles, in pieces, and with edges where padding begins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.array_shapes import (
    block_dims,
    block_shape,
    forward_in_panels,
    in_panels,
    panel_dim,
    values_in_panels,
)
from jflash._backends.nvidia import bias_and_mask
from jflash._backends.nvidia.prepare import LENGTHS
from jflash._backends.nvidia.smem import round_up
from jflash._backends.nvidia.tile import operand_pieces
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import zero_padding

LARGEST_TILE = 128
"""Rows of the largest tile that is copied from an array with lengths."""


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
