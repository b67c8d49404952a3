"""The indices of a tile's rows or columns: for each element the sum of one number of its thread's and a constant.

Pallas' own are divided from a running number. Their parts that a loop does not change the compiler takes out of it, and
keeps one in a register for each column, or each row and column that a mask compares: more than there are, so that each
step of the loop loads them from local memory. What it cannot see through stays in the loop, as one number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Array, Int

from jflash._backends.nvidia.threads.builder import ThreadBuilder, make_tile


def make(shape: tuple[int, ...], axis: int, first: Int[Array, ""]) -> Int[Array, "64 columns"]:
    """first + row, or for axis 1 first + column."""
    return make_tile(shape, np.int32, first, ThreadBuilder, lambda o, first: own_indices(o, axis, first))


def own_indices(o: Any, axis: int, first: Any) -> Any:
    """A thread's, by the columns from 8 `eight` on, which of them, and the upper (half 0) or lower row."""
    own = o.add(o.times(o.warp, 16), o.row) if axis == 0 else o.times(o.pair, 2)
    start = o.opaque(o.add(first, own))
    return lambda eight, half, k: o.add(start, o(8 * half if axis == 0 else 8 * eight + k))
