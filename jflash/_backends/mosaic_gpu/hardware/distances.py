"""Distances between keys and queries: of a thread's elements one number, to which a constant is added.

As float32 numbers they are one addition for each element, where integers would be subtracted, be made positive, and be
converted. Of integers those of one diagonal are the same sum to the compiler, which makes once what follows from it: an
index that is clipped, and what is read there. From two indices of its own, each element would have another difference.

Source of the layout: PTX ISA, wgmma, the accumulator's fragment.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu.hardware.lane_words import LaneWords, make_tile


def make(shape: tuple[int, ...], first: Int[Array, ""], *, keys_first: bool) -> Float[Array, "64 columns"]:
    """first + row - column, or with `keys_first` first - row + column."""
    own = functools.partial(own_distances, keys_first=keys_first)
    return make_tile(shape, np.float32, first, LaneWords, own)


def own_distances(o: Any, first: Any, *, keys_first: bool) -> Any:
    """A thread's, by the columns from 8 `eight` on, which of them, and the upper (half 0) or lower row."""
    row, column = o.add(o.times(o.warp, 16), o.row), o.times(o.pair, 2)
    ahead = o.subtract(column, row) if keys_first else o.subtract(row, column)
    start = o.float32(o.add(first, ahead))

    def own(eight: int, half: int, k: int) -> Any:
        step = 8 * half - 8 * eight - k
        return o.plus(start, float(-step if keys_first else step))

    return own


def make_ahead(shape: tuple[int, ...], first: Int[Array, ""], *, keys_first: bool) -> Int[Array, "rows columns"]:
    """first + column - row, or with `keys_first` first + row - column."""
    return make_tile(shape, np.int32, first, LaneWords, lambda o, first: own_ahead(o, first, keys_first=keys_first))


def own_ahead(o: Any, first: Any, *, keys_first: bool) -> Any:
    """A thread's, likewise."""
    row, column = o.add(o.times(o.warp, 16), o.row), o.times(o.pair, 2)
    start = o.opaque(o.add(first, o.subtract(row, column) if keys_first else o.subtract(column, row)))

    def own(eight: int, half: int, k: int) -> Any:
        step = (8 * half - 8 * eight - k) * (1 if keys_first else -1)
        return o.add(start, o(step)) if step >= 0 else o.subtract(start, o(-step))

    return own
