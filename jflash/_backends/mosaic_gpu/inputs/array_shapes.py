"""The shapes in which kernels take and return a call's arrays: its own, or padded to what copies of tiles want."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jflash._backends.mosaic_gpu.hardware import round_up
from jflash._semantics.spec import Spec

_PANEL = 64
"""Columns of the widest panel."""

_MOST_COLUMNS = 256
"""Of heads whose tiles may be panels."""


def whole_dim(dim: int) -> int:
    """H or D as copies of tiles want it: 8, or a multiple of 16."""
    return 8 if dim <= 8 else round_up(dim, 16)


def whole_shape(shape: tuple[int, ...], axis: int = 1) -> tuple[int, ...]:
    """`[B, L, N, H]` (L at `axis`) with L a multiple of 8 and H as `whole_dim` says."""
    return *shape[:axis], round_up(shape[axis], 8), *shape[axis + 1 : 3], whole_dim(shape[3])


def in_panels(spec: Spec) -> bool:
    """Whether a call's tiles are `Panels`, whose arrays are not padded: where others' would be, and they can be.

    The columns of a product are then one instruction for each panel. Rows of 8 columns have the 16 bytes that copies
    want. Pieces of float32 are new arrays anyway.
    """
    dims, lengths = (spec.head_dim, spec.value_dim), (spec.query_length, spec.key_length)
    if spec.dtype == jnp.float32 or max(dims) > _MOST_COLUMNS:
        return False
    is_whole = all(length % 8 == 0 for length in lengths) and all(whole_dim(dim) == dim for dim in dims)
    return not is_whole and all(dim % (8 if dim <= _PANEL else _PANEL) == 0 for dim in dims)


def whole_dims(spec: Spec) -> tuple[int, int]:
    """A call's H and D in device memory; of pieces of float32, in multiples that every kernel's tiles take."""
    dims = spec.head_dim, spec.value_dim
    if in_panels(spec):
        return dims
    whole = functools.partial(round_up, multiple=32) if spec.dtype == jnp.float32 else whole_dim
    return whole(dims[0]), whole(dims[1])


def whole_rows(spec: Spec, rows: int) -> int:
    """A number of rows in device memory."""
    return rows if in_panels(spec) else round_up(rows, 8)


def tile_dims(spec: Spec) -> tuple[int, int]:
    """Columns of a call's tiles, of H and of D."""

    def columns(dim: int) -> int:
        if in_panels(spec):
            return next((width for width in (16, 32) if dim <= width), round_up(dim, _PANEL))
        return round_up(dim, 16)

    head_dim, value_dim = whole_dims(spec)
    return columns(head_dim), columns(value_dim)
