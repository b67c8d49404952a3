"""Distances from keys to queries, as float32 numbers: one addition for each element of a tile.

As integers, each would be subtracted, be made positive, and be converted.

Source of the layout: PTX ISA, wgmma, the accumulator's fragment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu.hardware.lane_words import LaneWords


def make(shape: tuple[int, ...], first: Int[Array, ""], *, keys_first: bool) -> Float[Array, "64 columns"]:
    """first + row - column, or with `keys_first` first - row + column."""
    return_type = plgpu.ShapeDtypeStruct(shape, np.dtype(np.float32), layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),), return_type=return_type)
    def made(_: Any, first: Any) -> Any:
        o = LaneWords()
        own = own_distances(o, first.registers.item(), keys_first=keys_first)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        pair = o.ir.VectorType.get((2,), o.zero.type)
        for index in np.ndindex(registers.shape):
            _, eight, _, _, half, *_ = index
            registers[index] = o.vector.from_elements(pair, [own(eight, half, k) for k in range(2)])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    call: Any = made
    return call(first)


def own_distances(o: Any, first: Any, *, keys_first: bool) -> Any:
    """A thread's, by the columns from 8 `eight` on, which of them, and the upper (half 0) or lower row."""
    row, column = o.add(o.times(o.warp, 16), o.row), o.times(o.pair, 2)
    ahead = o.subtract(column, row) if keys_first else o.subtract(row, column)
    start = o.float32(o.add(first, ahead))

    def own(eight: int, half: int, k: int) -> Any:
        step = 8 * half - 8 * eight - k
        return o.plus(start, float(-step if keys_first else step))

    return own
