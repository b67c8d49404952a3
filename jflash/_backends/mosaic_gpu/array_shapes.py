"""How a call's arrays are padded for the copies of tiles: not at all, to whole blocks, and where padding has edges.

Copies of tiles in blocks want rows in eights, and columns in as many as a swizzle has; those of tiles in panels want
columns in eights, which are 16 bytes. Panels may be several copies and products where blocks are one: so each kind of
kernel has a rule for when its tiles are in panels. Pieces of float32 are new arrays anyway, and in blocks.

What was measured: examples/benchmarks/experiments/2026-11-26-odd-lengths.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.nvidia import cache_rows
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.packing import packs
from jflash._backends.nvidia.prepared import LENGTHS
from jflash._backends.nvidia.smem import round_up
from jflash._backends.nvidia.tile import operand_pieces
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import in_range, zero_padding

_WIDEST = 64
"""Columns of the widest panel."""

_FEW_ROWS = 2048
"""Rows of queries that see a key, up to which padded copies take longer than products by several panels; of values in
panels narrower than the widest, half as many."""

_ONE_TILE, _FEW_KEYS = 128, 512
"""The most queries, and the most keys, with which padded copies of queries take longer than products by two panels in
the fused backward."""

LARGEST_TILE = 128
"""Rows of the largest tile that is copied from an array with lengths."""

_SMALLEST_TILE = 64
"""Keys of the forward's smallest tile."""


def block_dim(dim: int) -> int:
    """H or D as copies of tiles in blocks want it: 8, or a multiple of 16."""
    return 8 if dim <= 8 else round_up(dim, 16)


def panel_dim(dim: int) -> int:
    """H or D as copies of tiles in panels want it: a multiple of 8; where that is a copy, it is blocks'."""
    return dim if dim % 8 == 0 else block_dim(dim)


def block_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`[B, L, N, H]` as copies of tiles in blocks want it."""
    batch, length, heads, dim = shape
    return batch, round_up(length, 8), heads, block_dim(dim)


def forward_in_panels(spec: Spec) -> bool:
    """Whether the forward's tiles are `Panels`: where blocks would want copies, or be in the narrowest swizzle."""
    is_wide_in_blocks = lambda dim: _is_whole(dim) and (dim <= 16 or block_dim(dim) % 32 == 0)
    return _may_have_panels(spec) and not (_has_whole_lengths(spec) and all(map(is_wide_in_blocks, _dims(spec))))


def values_in_panels(spec: Spec) -> bool:
    """Whether the forward's tiles of values are `Panels`: where blocks would want a copy that takes longer than several
    products do for one of all columns."""
    columns, rows = round_up(spec.value_dim, 16), _rows_that_see_a_key(spec) * spec.group
    is_whole = spec.key_length % 8 == 0 and _is_whole(spec.value_dim)
    few = _FEW_ROWS if _panel(columns) == _WIDEST else _FEW_ROWS // 2
    is_cheap = spec.pages is not None or _panel(columns) == columns or rows <= few
    return forward_in_panels(spec) and not is_whole and is_cheap


def in_panels(spec: Spec) -> bool:
    """Whether tiles of all kernels but the forward's are `Panels`: where blocks would want copies that cost more.

    Panels cost a product for each, with three operands' columns, and rows that begin in the middle of 32 bytes.
    """
    are_whole = all(map(_is_whole, _dims(spec)))
    if not _may_have_panels(spec) or (_has_whole_lengths(spec) and are_whole):
        return False
    pads_queries = are_whole and spec.key_length % 8 == 0 and spec.query_length <= _ONE_TILE
    if pads_queries and _WIDEST < max(_dims(spec)) <= 2 * _WIDEST and spec.key_length > _FEW_KEYS:
        return False
    are_wide = all(_panel(dim) in (dim, _WIDEST) for dim in _dims(spec))
    return are_wide or _rows_that_see_a_key(spec) <= _FEW_ROWS


def unsupported_cache(spec: Spec) -> str | None:
    """Return why copies do not take a call's paged cache as it is, in words for the user; `None`: they do."""
    if spec.pages is None:
        return None
    got = f"Got H={spec.head_dim} and D={spec.value_dim}."
    if facts_of(spec).is_float32:
        return "it takes paged caches of 16 bits. float32 would be split into pieces, the whole cache for every call."
    if spec.head_dim % 8 or spec.value_dim % 8:
        return f"it copies 16 bytes of a paged cache at a time, so 8 must divide H and D. {got}"
    # A part of a page fills whole swizzles, which have 8 rows.
    if spec.pages.size % 8 or not cache_rows.suits(spec, _SMALLEST_TILE):
        return f"it takes pages of 8, 16 or 32 keys, or of a multiple of 64. Got pages of {spec.pages.size}."
    if not forward_in_panels(spec) and block_dims(spec) != _dims(spec):
        such = " beside such a bias" * facts_of(spec).has_bias_tiles
        return f"it copies columns of a paged cache in sixteens{such}. {got}"
    if spec.pages.interleaved and spec.head_dim % 16:
        return f"it copies columns of interleaved pages in sixteens. Got H={spec.head_dim}."
    return None


def _may_have_panels(spec: Spec) -> bool:
    # Tiles of a bias may leave no room for the kernels of narrow heads.
    most = 128 if facts_of(spec).has_bias_tiles else 256
    return not facts_of(spec).is_float32 and max(_dims(spec)) <= most


def _has_whole_lengths(spec: Spec) -> bool:
    """Whether copies of tiles in blocks take a call's rows as they are. Threads take some forwards' one by one."""
    row_by_row = packs(spec) or spec.tokens is not None
    return spec.key_length % 8 == 0 and (spec.query_length % 8 == 0 or row_by_row)


def _is_whole(dim: int) -> bool:
    """Whether blocks have as many columns as panels."""
    return panel_dim(dim) == block_dim(dim)


def _dims(spec: Spec) -> tuple[int, int]:
    return spec.head_dim, spec.value_dim


def _panel(dim: int) -> int:
    """The width of equal panels into which `dim` columns could be divided."""
    return math.gcd(dim, _WIDEST)


def _rows_that_see_a_key(spec: Spec) -> float:
    """About how many queries of one head see each key."""
    left, right = spec.bounds
    if left is None or right is None:
        return spec.query_length / (1 if left is None and right is None else 2)
    return min(spec.query_length, left + right + 1)


def block_dims(spec: Spec) -> tuple[int, int]:
    """A call's H and D in device memory, where tiles are in blocks; pieces of float32 fill every kernel's tiles."""
    whole = (lambda dim: round_up(dim, 32)) if facts_of(spec).is_float32 else block_dim
    return whole(spec.head_dim), whole(spec.value_dim)


def whole_dims(spec: Spec) -> tuple[int, int]:
    """A call's H and D in device memory, for all kernels but the forward."""
    return (panel_dim(spec.head_dim), panel_dim(spec.value_dim)) if in_panels(spec) else block_dims(spec)


def whole_rows(spec: Spec, rows: int) -> int:
    """A number of rows as it is in device memory, for all kernels but the forward."""
    return rows if in_panels(spec) else round_up(rows, 8)


def tile_dims(spec: Spec) -> tuple[int, int]:
    """Columns of a call's tiles, of H and of D."""
    head_dim, value_dim = block_dims(spec)
    return round_up(head_dim, 16), round_up(value_dim, 16)


def whole_tiles(
    spec: Spec, name: str, array: Array, chunks: int = 1, *, whole_rows: bool = True, in_panels: bool = False
) -> Array:
    """Query, key, value or d_out `[B, L, N, H]`, padded with zeros to whole tiles, and in pieces.

    Each of `chunks` of the columns has its own pieces side by side. Without `whole_rows` columns alone are padded.
    """
    columns = array.shape[3]
    dim = panel_dim(columns) if in_panels else block_dims(spec)[name in ("value", "d_out")]
    room = [(0, 0)] * 3 + [(0, dim - columns)]
    if whole_rows and not in_panels:
        room[1] = (0, -array.shape[1] % 8)
    return operand_pieces.split_array(spec, jnp.pad(array, room), chunks)


def edges(spec: Spec, operands: Operands, arrays: Mapping[str, Float[Array, "B L N H"]]) -> dict[str, Array]:
    """For each array with lengths, the rows of the largest tile in which padding begins, with zeros for padding.

    `TmaInputs.copy_rows` copies them in the place of such a tile.
    """
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        lengths = in_range(spec, LENGTHS[name], getattr(operands, LENGTHS[name]))
        if lengths is not None:
            first = edge_row(jnp.broadcast_to(lengths, array.shape[:1]))
            rows = first[:, None] + jnp.arange(LARGEST_TILE + 8)[None]
            tile = array.at[jnp.arange(len(array))[:, None], rows].get(mode="clip")
            found[f"{name}_edge"] = zero_padding(tile, lengths - first)
    return found


def edge_row(length: Array) -> Array:
    """A row, a multiple of 8, before which no tile begins that has padding, for a length."""
    return lax.div(jnp.maximum(length - LARGEST_TILE, 0), 8) * 8


def copied(spec: Spec, *, packed: bool) -> list[str]:
    """The copies that a call costs before its kernels, in words for `explain`.

    A forward reads rows of queries whose heads are `packed` where they are.
    """
    rows, keys = (spec.batch, spec.query_length, spec.heads), (spec.batch, spec.key_length, spec.key_heads)
    shapes = dict(query=(*rows, spec.head_dim))
    if spec.pages is None:
        shapes |= dict(key=(*keys, spec.head_dim), value=(*keys, spec.value_dim))
    if facts_of(spec).is_float32:
        pieces = facts_of(spec).pieces
        copies = [f"{name} is split into bfloat16 pieces, {pieces} of each number" for name in shapes]
    else:
        in_place = lambda name: packed and name == "query"
        copies = [text for name, shape in shapes.items() for text in _padded(spec, name, shape, in_place(name))]
    if spec.bias_shape is not None and facts_of(spec).has_bias_tiles:
        *_, rows, columns = spec.bias_shape
        if rows % 8 or columns % 64:
            copies.append(f"bias is padded from [{rows}, {columns}] to [{round_up(rows, 8)}, {round_up(columns, 64)}]")
    if facts_of(spec).has_packed_mask:
        copies.append("mask is packed into bits, an eighth of its bytes")
    return copies


def _padded(spec: Spec, name: str, shape: tuple[int, ...], has_whole_rows: bool) -> Iterator[str]:
    """How an array of this shape is padded, if it is; its columns alone for a forward to which all rows are whole."""
    whole = lambda panels: (*shape[:3], panel_dim(shape[3])) if panels else block_shape(shape)
    forward = whole(values_in_panels(spec) if name == "value" else forward_in_panels(spec))
    backward = whole(in_panels(spec))
    if has_whole_rows:
        forward = (*shape[:3], forward[3])
    if forward != shape:
        yield f"{name} is padded from {shape} to {forward}"
    if backward not in (shape, forward) and spec.pages is None:
        yield f"{name} is padded from {shape} to {backward} for the backward"
