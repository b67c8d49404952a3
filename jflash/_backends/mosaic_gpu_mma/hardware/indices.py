"""The indices of a tile's rows or columns: for each element the sum of one number of its thread's and a constant.

Pallas' own are divided from a running number. Their parts that a loop does not change the compiler takes out of it, and
keeps one in a register for each column, or each row and column that a mask compares: more than there are, so that each
step of the loop loads them from local memory. What it cannot see through stays in the loop, as one number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jflash._backends.mosaic_gpu_mma.hardware.lanes import Lanes


def make(shape: tuple[int, ...], axis: int, first: Int[Array, ""]) -> Int[Array, "64 columns"]:
    """first + row, or for axis 1 first + column."""
    return_type = plgpu.ShapeDtypeStruct(shape, np.dtype(np.int32), layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),), return_type=return_type)
    def made(_: Any, first: Any) -> Any:
        o = Lanes()
        own = own_indices(o, axis, first.registers.item())
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for index in np.ndindex(registers.shape):
            _, eight, _, _, half, *_ = index
            registers[index] = o.pair_of([own(eight, half, k) for k in range(2)])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=True)

    call: Any = made
    return call(first)


def own_indices(o: Any, axis: int, first: Any) -> Any:
    """A thread's, by the columns from 8 `eight` on, which of them, and the upper (half 0) or lower row."""
    own = o.add(o.times(o.warp, 16), o.row) if axis == 0 else o.times(o.pair, 2)
    start = o.opaque(o.add(first, own))
    return lambda eight, half, k: o.add(start, o(8 * half if axis == 0 else 8 * eight + k))
