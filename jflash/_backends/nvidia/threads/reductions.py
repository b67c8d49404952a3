"""What threads combine of a tile: sums of its rows in parts, and what all threads of a warp agree on."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Bool, Float

from jflash._backends.nvidia.threads.builder import SCALAR, TILE, ThreadBuilder, array_type, as_tree, scalar

_utils: Any = mgpu.utils
_UNIFORM = array_type((), jnp.bool_, SCALAR)
"""One value for a warp, by which it may branch; warps may differ."""


def partial_sums(tile: Float[Array, "64 columns"], parts: int) -> Float[Array, "64 parts"]:
    """Return the sums of every `parts`th column of each row, a multiple of 8 that divides the columns.

    A thread adds its own registers: of eight neighbours in a row it has two in the matrix unit's layouts. In operations
    of Pallas each addition, and each slice, would have a layout to be found: most of those of a plain forward.
    """
    rows, columns = tile.shape

    def make(_: ThreadBuilder, tile: Any) -> Any:
        return functools.reduce(operator.add, (tile[:, first : first + parts] for first in range(0, columns, parts)))

    return ThreadBuilder.emit(make, tile, returns=array_type((rows, parts), jnp.float32))


def all_below(tile: Float[Array, "64 columns"], limit: float) -> Bool[Array, ""]:
    """Return whether all magnitudes that a thread's warp holds of a tile are below a limit."""

    def make(o: ThreadBuilder, tile: Any) -> Any:
        # Without the sign, which is the highest bit.
        bits = lambda x: o.arith.andi(o.arith.bitcast(o.type, x), o(0x7FFFFFFF))
        size = lambda pair, at: o.arith.bitcast(o.zero.type, bits(o.extract(pair, at)))
        sizes = [size(pair, at) for pair in tile.registers.flat for at in range(2)]
        # NaN is the largest, and below nothing.
        largest = as_tree(o.arith.maximumf, sizes)
        return _vote(o, o.arith.cmpf(o.arith.CmpFPredicate.OLT, largest, _utils.c(limit, o.zero.type)))

    return ThreadBuilder.emit(make, tile, returns=_UNIFORM)


def all_rows(condition: Bool[Array, "64"]) -> Bool[Array, ""]:
    """Return whether a condition holds for all rows of a thread's warp."""

    def make(o: ThreadBuilder, condition: Any) -> Any:
        return _vote(o, functools.reduce(o.arith.andi, [o.extract(row, 0) for row in condition.registers.flat]))

    return ThreadBuilder.emit(make, condition, returns=_UNIFORM, layout=TILE.reduce(1))


def _vote(o: ThreadBuilder, held: Any) -> Any:
    return scalar(_utils.nvvm.vote_sync(o(0xFFFFFFFF), held, "all"), is_signed=False)
