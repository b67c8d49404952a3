"""Distances from keys to queries, as float32 numbers: one addition for each element of a tile.

As integers, each would be subtracted, be made positive, and be converted.

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
