"""Where a tile's elements are: row and column indices and distances, each one number of a thread's and a constant.

Pallas' own indices are divided from a running number. The compiler takes their parts that a loop does not change out of
it, and keeps one for each column, or each row and column that a mask compares: more than there are registers. What it
cannot see through stays in the loop, as one number.

Distances between keys and queries are, as float32 numbers, one addition for each element, where integers would be
subtracted and converted. As integers those of one diagonal are the same sum to the compiler, which makes once what
follows from that: an index that is clipped, and what is read there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jflash._backends.nvidia.threads.builder import ThreadBuilder, array_type, places, tile

Element = Callable[[int, int, int], Any]
"""Gives a thread's number of an element, by its `eight`, `half` and `k`."""


def indices(shape: tuple[int, ...], axis: int, first: Int[Array, ""] | int) -> Int[Array, "64 columns"]:
    """Return each element's index along `axis`, counted from `first` on."""
    return _make(shape, np.int32, first, functools.partial(integers, rows=1 - axis, columns=axis))


def key_minus_query(
    shape: tuple[int, ...], first: Int[Array, ""] | int, *, keys_first: bool
) -> Int[Array, "64 columns"]:
    """Return the key's index less the query's, `first` being that of the tile's corner.

    Rows are queries and columns keys, or with `keys_first` the reverse.
    """
    rows = 1 if keys_first else -1
    return _make(shape, np.int32, first, functools.partial(integers, rows=rows, columns=-rows))


def distances(shape: tuple[int, ...], first: Int[Array, ""] | int, *, keys_first: bool) -> Float[Array, "64 columns"]:
    """Return the query's index less the key's in float32; the arguments are those of `key_minus_query`."""
    rows = -1 if keys_first else 1
    return _make(shape, np.float32, first, functools.partial(floats, rows=rows, columns=-rows))


def integers(o: ThreadBuilder, first: Any, *, rows: int, columns: int) -> Element:
    """Return a thread's first + rows * row + columns * column; each factor is -1, 0 or 1, and they differ."""
    start, more = o.opaque(_start(o, first, rows, columns)), _constant(rows, columns)

    def element(eight: int, half: int, k: int) -> Any:
        constant = more(eight, half, k)
        return o.add(start, o(constant)) if constant >= 0 else o.arith.subi(start, o(-constant))

    return element


def floats(o: ThreadBuilder, first: Any, *, rows: int, columns: int) -> Element:
    """Return what `integers` does, in float32."""
    start, more = o.float32(_start(o, first, rows, columns)), _constant(rows, columns)
    return lambda eight, half, k: o.plus(start, float(more(eight, half, k)))


def _start(o: ThreadBuilder, first: Any, rows: int, columns: int) -> Any:
    """Return the number of a thread's first element."""
    row, column = o.first_row, o.first_column
    if rows and columns:
        return o.add(first, o.arith.subi(row, column) if rows > 0 else o.arith.subi(column, row))
    return o.add(first, row if rows else column)


def _constant(rows: int, columns: int) -> Callable[[int, int, int], int]:
    """Return how much more an element's number is than the first one's of its thread."""
    return lambda eight, half, k: rows * 8 * half + columns * (8 * eight + k)


def _make(
    shape: tuple[int, ...], dtype: Any, first: Int[Array, ""] | int, of_thread: Callable[[ThreadBuilder, Any], Element]
) -> Array:
    def make(o: ThreadBuilder, first: Any) -> Any:
        element = of_thread(o, first)
        registers = (o.vector_of([element(*place, k) for k in range(2)]) for place in places(shape[1]))
        return tile(shape, registers, is_signed=True if dtype is np.int32 else None)

    return ThreadBuilder.emit(make, first, returns=array_type(shape, dtype))
