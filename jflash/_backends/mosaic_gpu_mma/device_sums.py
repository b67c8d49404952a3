"""What CTAs do with sums in device memory (`sums`)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.products import own_place
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import round_up
from jflash._backends.nvidia.threads.sums import COLUMNS, ROWS, UNIT, Places, add_numbers

_SCALAR = plgpu.Layout.WG_SPLAT(())
_TILE = plgpu.Layout.WGMMA
_utils: Any = mgpu.utils

Sums = Ref
"""`[L / 8, C / 16, 128]` in device memory, float32."""


def shape(rows: int, columns: int) -> tuple[int, int, int]:
    """That of the sums of a tile; `columns` is a multiple of 16."""
    return round_up(rows, ROWS) // ROWS, columns // COLUMNS, UNIT


def together(compute_capability: str) -> int:
    """How many numbers one instruction adds: PTX ISA, red."""
    return 4 if float(compute_capability) >= 9 else 1


def add_rows(
    values: Float[Array, "64 columns"],
    target: Sums,
    row: Any,
    column: Any,
    together: int,
    of_pair: int | None = None,
    half: int = 0,
) -> None:
    """Add to rows from `row` on, a multiple of 8, and columns from `column` on, a multiple of 16.

    The values may be some columns of one block `of_pair`, whose blocks have `half` of all.
    """

    @plgpu.inline_mgpu(arg_types=(_TILE, plgpu.RefType(), _SCALAR, _SCALAR))
    def add(_: Any, values: Any, target: Any, row: Any, column: Any) -> None:
        o = Lanes()
        below, beside = own_place(o, half, of_pair)
        first = o.add(row.registers.item(), below), o.add(column.registers.item(), beside)
        places = Places(o, *_place(o, target), *first, together)
        add_numbers(o, places, list(values.registers.flat))

    call: Any = add
    call(values, target, jnp.int32(row), jnp.int32(column))


def load_rows(source: Sums, row: Any, columns: int, together: int) -> Float[Array, "64 columns"]:
    """Rows from `row` on, a multiple of 8."""
    result = plgpu.ShapeDtypeStruct((64, columns), jnp.dtype(jnp.float32), layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=result)
    def load(_: Any, source: Any, row: Any) -> Any:
        o = Lanes()
        first = o.add(row.registers.item(), own_place(o, columns, None)[0])
        places = Places(o, *_place(o, source), first, o(0), together)
        pair_type, some_type = (_utils.ir.VectorType.get((size,), o.zero.type) for size in (2, together))
        registers = np.empty(columns // 4, dtype=object)
        element = lambda some, at: o.vector.extract(some, [], o.ir.DenseI64ArrayAttr.get([at]))
        for half in range(2):
            for unit in range(columns // COLUMNS):
                numbers: list[Any] = []
                for first in range(0, 4, together):
                    address = o.arith.addi(places.start, o.long(places.offset(half, unit, first)))
                    some = _utils.llvm.load(some_type, _utils.llvm.inttoptr(_utils.llvm.PointerType.get(1), address))
                    numbers += [element(some, at) for at in range(together)]
                for eight in range(2):
                    pair = o.vector.from_elements(pair_type, numbers[2 * eight : 2 * eight + 2])
                    registers[4 * unit + 2 * eight + half] = pair
        registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((64, columns)))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    call: Any = load
    return call(source, jnp.int32(row))


def _place(o: Lanes, sums: Any) -> tuple[Any, int]:
    """Where sums begin, and how many units of columns they have."""
    return o.device_address(sums), _utils.ir.MemRefType(sums.type).shape[1]
