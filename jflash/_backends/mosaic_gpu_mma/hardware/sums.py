"""Sums in device memory, to which CTAs add rows that they have in registers, in any order.

Sums of rows `[L, C]` are kept as `[L / 8, C / 16, 128]`: of 8 rows and 16 columns, the numbers in the order in which a
warp adds them. A thread has two neighbours in each 8 columns of a row, so four of the 16 columns. They lie side by side
where one instruction adds four numbers (`together`), and a warp's 32 threads add to 512 bytes that do. Where an
instruction adds one number, those of the 32 threads do: 128 bytes, a line of the cache.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.hardware import Ref, round_up
from jflash._backends.mosaic_gpu_mma.hardware.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.hardware.products import own_place

_SCALAR = plgpu.Layout.WG_SPLAT(())
_TILE = plgpu.Layout.WGMMA
_ROWS, _COLUMNS, _ITEM = 8, 16, 4
_UNIT = _ROWS * _COLUMNS
_utils: Any = mgpu.utils

Sums = Ref
"""`[L / 8, C / 16, 128]` in device memory, float32."""


def shape(rows: int, columns: int) -> tuple[int, int, int]:
    """That of the sums of a tile; `columns` is a multiple of 16."""
    return round_up(rows, _ROWS) // _ROWS, columns // _COLUMNS, _UNIT


def together(compute_capability: str) -> int:
    """How many numbers one instruction adds: PTX ISA, red."""
    return 4 if float(compute_capability) >= 9 else 1


def add_rows(
    values: Float[Array, "64 columns"], target: Sums, row: Any, column: Any, together: int, of_pair: int | None = None
) -> None:
    """Add to rows from `row` on, a multiple of 8, and columns from `column` on, a multiple of 16.

    Rows past the last are left out. The values may be one block `of_pair`.
    """

    @plgpu.inline_mgpu(arg_types=(_TILE, plgpu.RefType(), _SCALAR, _SCALAR))
    def add(_: Any, values: Any, target: Any, row: Any, column: Any) -> None:
        o = Lanes()
        below, beside = own_place(o, values.shape[1], of_pair)
        first = o.add(row.registers.item(), below), o.add(column.registers.item(), *beside)
        places = Places(o, *_place(o, target), *first, together)
        add_numbers(o, places, list(values.registers.flat))

    call: Any = add
    call(values, target, jnp.int32(row), jnp.int32(column))


def add_numbers(o: Lanes, places: Places, pairs: list[Any]) -> None:
    """Add an accumulator's registers, in their order."""
    for half in range(2):
        for unit in range(len(pairs) // 4):
            numbers = [number for eight in range(2) for number in o.numbers(pairs[4 * unit + 2 * eight + half])]
            for first in range(0, 4, places.together):
                some = numbers[first : first + places.together]
                o.add_numbers(places.start, places.offset(half, unit, first), some, places.is_there[half])


def load_rows(source: Sums, row: Any, columns: int, together: int) -> Float[Array, "64 columns"]:
    """Rows from `row` on, a multiple of 8; any numbers past the last."""
    result = plgpu.ShapeDtypeStruct((64, columns), jnp.dtype(jnp.float32), layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=result)
    def load(_: Any, source: Any, row: Any) -> Any:
        o = Lanes()
        first = o.add(row.registers.item(), own_place(o, columns, None)[0])
        places = Places(o, *_place(o, source), first, o(0), together)
        pair_type, some_type = (_utils.ir.VectorType.get((size,), o.number_type) for size in (2, together))
        registers = np.empty(columns // 4, dtype=object)
        element = lambda some, at: o.vector.extract(some, [], o.ir.DenseI64ArrayAttr.get([at]))
        for half in range(2):
            start = o.arith.select(places.is_there[half], places.start, places.first)
            for unit in range(columns // _COLUMNS):
                numbers: list[Any] = []
                for first in range(0, 4, together):
                    offset = o.arith.select(places.is_there[half], o.long(places.offset(half, unit, first)), o.long(0))
                    place = _utils.llvm.inttoptr(_utils.llvm.PointerType.get(1), o.arith.addi(start, offset))
                    some = _utils.llvm.load(some_type, place)
                    numbers += [element(some, at) for at in range(together)]
                for eight in range(2):
                    pair = o.vector.from_elements(pair_type, numbers[2 * eight : 2 * eight + 2])
                    registers[4 * unit + 2 * eight + half] = pair
        registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((64, columns)))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    call: Any = load
    return call(source, jnp.int32(row))


class Places:
    """Where a thread's numbers are in sums, of 16 rows of its warp's from a row on and of columns from one on."""

    def __init__(self, o: Lanes, first: Any, shape: tuple[int, int, int], row: Any, column: Any, together: int) -> None:
        groups, self.units, _ = shape
        self.first, self.together = first, together
        group = o.right(row, 3)
        self.is_there = [o.below(o.add(group, o(half)), o(groups)) for half in range(2)]
        unit = o.add(o.times(group, self.units), o.right(column, 4))
        number = o.add(o.times(unit, _UNIT), o.times(o.lane, together))
        self.start = o.arith.addi(self.first, o.distance(number, _ITEM))

    def offset(self, half: int, unit: int, number: int) -> int:
        """Of one of a thread's four numbers of a unit, in bytes from its first."""
        lanes = number * 32 if self.together == 1 else number
        return ((half * self.units + unit) * _UNIT + lanes) * _ITEM


def _place(o: Lanes, sums: Any) -> tuple[Any, tuple[int, int, int]]:
    """Where sums begin, and their shape."""
    return _utils.llvm.ptrtoint(o.long_type, _utils.memref_ptr(sums)), tuple(_utils.ir.MemRefType(sums.type).shape)
