"""The shapes in which kernels take and return a call's arrays: its own, or padded to what copies of tiles want.

Copies of tiles in blocks want rows in eights, and columns in as many as a swizzle has; those of tiles in panels want
columns in eights, which are 16 bytes. Panels may be several copies and products where blocks are one.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from jflash._backends.nvidia import bias_and_mask
from jflash._backends.nvidia.smem import round_up
from jflash._semantics.spec import Spec

_WIDEST = 64
"""Columns of the widest panel."""

_ONE_TILE = 128
"""Rows of queries whose padding costs next to nothing, as when decoding."""

_FEW_ROWS = 2048
"""Rows of queries that see a key, up to which padded copies take longer than products by several panels (one H100,
heads of 72 to 128); of values in panels narrower than the widest up to half as many."""


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
    return _may_have_panels(spec) and not (_has_whole_lengths(spec) and all(map(_has_wide_blocks, _dims(spec))))


def values_in_panels(spec: Spec) -> bool:
    """Whether the forward's values are: where blocks would want a copy, and that takes longer than several products do
    for one of all columns."""
    columns, rows = round_up(spec.value_dim, 16), _rows_that_see_a_key(spec) * spec.group
    is_whole = spec.key_length % 8 == 0 and _is_whole(spec.value_dim)
    few = _FEW_ROWS if _panel(columns) == _WIDEST else _FEW_ROWS // 2
    return forward_in_panels(spec) and not is_whole and (_panel(columns) == columns or rows <= few)


def in_panels(spec: Spec) -> bool:
    """Whether tiles of all kernels but the forward's are: where blocks would want copies, and those take longer than
    what panels cost: three operands' columns are a product for each, and rows may begin in the middle of 32 bytes."""
    if not _may_have_panels(spec) or (_has_whole_lengths(spec) and all(map(_is_whole, _dims(spec)))):
        return False
    are_wide = all(_panel(dim) in (dim, _WIDEST) for dim in _dims(spec))
    return are_wide or _rows_that_see_a_key(spec) <= _FEW_ROWS


def _may_have_panels(spec: Spec) -> bool:
    """Pieces of float32 are new arrays anyway."""
    # Tiles of a bias may leave no room for the kernels of narrow heads.
    most = 128 if bias_and_mask.has_bias_tiles(spec) else 256
    return spec.dtype != jnp.float32 and max(_dims(spec)) <= most


def _has_whole_lengths(spec: Spec) -> bool:
    """Whether copies of tiles in blocks take a call's rows as they are, or as good as that."""
    return spec.key_length % 8 == 0 and (spec.query_length % 8 == 0 or spec.query_length <= _ONE_TILE)


def _is_whole(dim: int) -> bool:
    """Whether blocks have as many columns as panels."""
    return panel_dim(dim) == block_dim(dim)


def _has_wide_blocks(dim: int) -> bool:
    """Whether they do, in a wider swizzle than the narrowest unless that has them all."""
    return _is_whole(dim) and (dim <= 16 or block_dim(dim) % 32 == 0)


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
    """A call's H and D in device memory, where tiles are in blocks; of pieces of float32, in multiples that every
    kernel's tiles take."""
    head_dim, value_dim = _dims(spec)
    if spec.dtype == jnp.float32:
        return round_up(head_dim, 32), round_up(value_dim, 32)
    return block_dim(head_dim), block_dim(value_dim)


def whole_dims(spec: Spec) -> tuple[int, int]:
    """A call's H and D in device memory, for all kernels but the forward."""
    return (panel_dim(spec.head_dim), panel_dim(spec.value_dim)) if in_panels(spec) else block_dims(spec)


def whole_rows(spec: Spec, rows: int) -> int:
    """A number of rows in device memory, likewise."""
    return rows if in_panels(spec) else round_up(rows, 8)


def tile_dims(spec: Spec) -> tuple[int, int]:
    """Columns of a call's tiles, of H and of D."""
    head_dim, value_dim = block_dims(spec)
    return round_up(head_dim, 16), round_up(value_dim, 16)
