"""The shapes in which kernels take and return a call's arrays: its own, or padded to what copies of tiles want."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp

from jflash._backends.mosaic_gpu.hardware import round_up
from jflash._backends.mosaic_gpu.inputs import bias_and_mask
from jflash._semantics.spec import Spec

_WIDEST = 64
"""Columns of the widest panel."""

_ONE_TILE = 128
"""Rows of queries whose padding costs next to nothing, as when decoding."""

_FEW_ROWS = 1024
"""Rows of queries that see a key, up to which padded copies take longer than products by panels narrower than the
widest (one H100, heads of 80 and 96); by those of the widest up to twice as many (heads of 128)."""


def whole_dim(dim: int) -> int:
    """H or D as copies of tiles want it: 8, or a multiple of 16."""
    return 8 if dim <= 8 else round_up(dim, 16)


def whole_shape(shape: tuple[int, ...], axis: int = 1) -> tuple[int, ...]:
    """`[B, L, N, H]` (L at `axis`) with L a multiple of 8 and H as `whole_dim` says."""
    return *shape[:axis], round_up(shape[axis], 8), *shape[axis + 1 : 3], whole_dim(shape[3])


def forward_in_panels(spec: Spec) -> bool:
    """Whether the forward's tiles are `Panels`, whose arrays are not padded: where lengths of others would be.

    Where H or D would be, panels are no faster: in rows of 144 bytes their copies read twice as much. Pieces of float32
    are new arrays anyway.
    """
    dims = spec.head_dim, spec.value_dim
    if spec.dtype == jnp.float32 or any(whole_dim(dim) != dim for dim in dims):
        return False
    # Tiles of a bias may leave no room for the kernels of narrow heads.
    most = 128 if bias_and_mask.has_bias_tiles(spec) else 256
    is_whole = spec.key_length % 8 == 0 and (spec.query_length % 8 == 0 or spec.query_length <= _ONE_TILE)
    return max(dims) <= most and not is_whole


def values_in_panels(spec: Spec) -> bool:
    """Whether the forward's values are: several panels are as many products, which take longer than one of all
    columns."""
    width, rows = _panel(spec.value_dim), _rows_that_see_a_key(spec) * spec.group
    few = 2 * _FEW_ROWS if width == _WIDEST else _FEW_ROWS
    return forward_in_panels(spec) and (width == spec.value_dim or rows <= few)


def in_panels(spec: Spec) -> bool:
    """Whether tiles of all kernels but the forward's are. There three operands have columns that become a sum's, for
    which panels of the widest are wide enough."""
    are_wide = all(_panel(dim) in (dim, _WIDEST) for dim in (spec.head_dim, spec.value_dim))
    return forward_in_panels(spec) and (are_wide or _rows_that_see_a_key(spec) <= _FEW_ROWS)


def _panel(dim: int) -> int:
    """The width of the panels into which `dim` columns are divided; `dim` is 8 or a multiple of 16."""
    return math.gcd(dim, _WIDEST)


def _rows_that_see_a_key(spec: Spec) -> float:
    """About how many queries of one head see each key."""
    left, right = spec.bounds
    if left is None or right is None:
        return spec.query_length / (1 if left is None and right is None else 2)
    return min(spec.query_length, left + right + 1)


def whole_dims(spec: Spec) -> tuple[int, int]:
    """A call's H and D in device memory; of pieces of float32, in multiples that every kernel's tiles take."""
    whole = functools.partial(round_up, multiple=32) if spec.dtype == jnp.float32 else whole_dim
    return whole(spec.head_dim), whole(spec.value_dim)


def whole_rows(spec: Spec, rows: int) -> int:
    """A number of rows in device memory."""
    return rows if in_panels(spec) else round_up(rows, 8)


def tile_dims(spec: Spec) -> tuple[int, int]:
    """Columns of a call's tiles, of H and of D."""
    head_dim, value_dim = whole_dims(spec)
    return round_up(head_dim, 16), round_up(value_dim, 16)
