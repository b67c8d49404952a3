"""Tiles of shared memory on their way through registers, of which a thread has eight neighbours of a row at a time.

Those are 16 bytes when they are stored as numbers of 16 bits, and the lanes of a warp have rows side by side: so both
sides of a conversion from 8 bits read and write all banks of shared memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from jflash._backends.nvidia.threads.builder import LANES, THREADS, WARPS, ThreadBuilder, array_type

_EIGHT = 8

NUMBERS = _EIGHT * THREADS
"""Numbers that all threads have at a time: a tile has as many, or a multiple."""

_utils: Any = mgpu.utils


def load(ref: Any) -> Array:
    """Return a tile of shared memory of 128, 64, 32 or 16 columns, which has `NUMBERS` or a multiple."""
    return plgpu.load(ref, layout=_layout(ref.shape[1]), optimized=False)


def times(values: BFloat16[Array, "rows columns"], factor: Any) -> BFloat16[Array, "rows columns"]:
    """Return a tile in the layout of `load`, each number times a float32 scalar, and rounded once.

    The scalar is taken as a sum of two bfloat16 numbers, and each product as an addition to that with the smaller one:
    two instructions for two numbers, where float32 would take seven.
    """

    def make(o: ThreadBuilder, values: Any, factor: Any) -> Any:
        high = o.rounded([factor, factor])
        rest = o.arith.subf(factor, o.number(o.left(high, 16)))
        both = high, o.rounded([rest, rest])
        in_words, products = o.ir.VectorType.get((_EIGHT // 2,), o.type), np.empty_like(values.registers)
        for place, register in np.ndenumerate(values.registers):
            words = [_times(o, word, both) for word in o.numbers(_utils.bitcast(register, in_words))]
            products[place] = _utils.bitcast(o.vector_of(words), register.type)
        return mgpu.FragmentedArray(_registers=products, _layout=values.layout, _is_signed=None)

    layout = _layout(values.shape[1])
    return ThreadBuilder.emit(
        make, values, factor, returns=array_type(values.shape, jnp.bfloat16, layout), layout=layout
    )


def _times(o: ThreadBuilder, word: Any, factor: Sequence[Any]) -> Any:
    product = "{ .reg .b32 low; mul.rn.bf16x2 low, $1, $3; fma.rn.bf16x2 $0, $1, $2, low; }"
    return _utils.inline_ptx(product, word, *factor, result_types=o.type)


def _layout(columns: int) -> Any:
    across = columns // _EIGHT
    rows = LANES // across
    tiling = fragmented_array.Tiling(((WARPS * rows, columns), (rows, columns), (_EIGHT,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
