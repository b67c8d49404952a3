"""Distances between keys and queries: of a thread's elements one number, to which a constant is added.

As float32 numbers they are one addition for each element, where integers would be subtracted, be made positive, and be
converted. Of integers those of one diagonal are the same sum to the compiler, which makes once what follows from it: an
index that is clipped, and what is read there. From two indices of its own, each element would have another difference.

Source of the layout: PTX ISA, wgmma, the accumulator's fragment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jflash._backends.nvidia.threads.builder import ThreadBuilder, make_tile


def make(shape: tuple[int, ...], first: Int[Array, ""], *, keys_first: bool) -> Float[Array, "64 columns"]:
    """first + row - column, or with `keys_first` first - row + column."""
    own = functools.partial(own_distances, keys_first=keys_first)
    return make_tile(shape, np.float32, first, ThreadBuilder, own)


def own_distances(o: Any, first: Any, *, keys_first: bool) -> Any:
    """A thread's, by the columns from 8 `eight` on, which of them, and the upper (half 0) or lower row."""
    own, step = _rows_less_columns(o, negated=keys_first)
    start = o.float32(o.add(first, own))
    return lambda eight, half, k: o.plus(start, float(step(eight, half, k)))


def make_ahead(shape: tuple[int, ...], first: Int[Array, ""], *, keys_first: bool) -> Int[Array, "rows columns"]:
    """first + column - row, or with `keys_first` first + row - column."""
    return make_tile(shape, np.int32, first, ThreadBuilder, lambda o, first: own_ahead(o, first, keys_first=keys_first))


def own_ahead(o: Any, first: Any, *, keys_first: bool) -> Any:
    """A thread's, likewise."""
    own, step = _rows_less_columns(o, negated=not keys_first)
    start = o.opaque(o.add(first, own))

    def element(eight: int, half: int, k: int) -> Any:
        constant = step(eight, half, k)
        return o.add(start, o(constant)) if constant >= 0 else o.subtract(start, o(-constant))

    return element


def _rows_less_columns(o: Any, *, negated: bool) -> tuple[Any, Callable[[int, int, int], int]]:
    """row - column, or column - row, of a thread's first element; and by how much another's is larger."""
    row, column = o.add(o.times(o.warp, 16), o.row), o.times(o.pair, 2)
    own = o.subtract(column, row) if negated else o.subtract(row, column)

    def step(eight: int, half: int, k: int) -> int:
        more = 8 * half - 8 * eight - k
        return -more if negated else more

    return own, step
