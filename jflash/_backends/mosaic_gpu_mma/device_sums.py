"""What CTAs do with the sums of a tile in device memory (`nvidia.threads.sums`), `[L / 8, C / 16, 128]` in float32."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.products import Tiles
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, round_up
from jflash._backends.nvidia.threads.builder import array_type, places, tile
from jflash._backends.nvidia.threads.sums import COLUMNS, ROWS, UNIT, Places, add_numbers

_utils: Any = mgpu.utils


def shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Return the shape of the sums of a tile; `columns` is a multiple of 16."""
    return round_up(rows, ROWS) // ROWS, columns // COLUMNS, UNIT


def together(compute_capability: str) -> int:
    """Return how many numbers one instruction adds: PTX ISA, red."""
    return 4 if float(compute_capability) >= 9 else 1


def add_rows(blocks: Tiles, target: Ref, row: Any, column: Any, together: int, half: int) -> None:
    """Add a block or a pair to rows from `row` on, a multiple of 8, and columns from `column` on, a multiple of 16.

    The values may be some columns of a tile. Those of a pair belong to its halves, which have `half` of all columns.
    """

    def make(o: Lanes, values: Any, target: Any, row: Any, column: Any, of_pair: int | None) -> None:
        below, beside = o.warp_place(half, of_pair)
        numbers = _numbers(o, target, o.add(row, below), o.add(column, beside), together)
        add_numbers(o, numbers, list(values.registers.flat))

    for number, values in enumerate(blocks):
        of_pair = number if len(blocks) > 1 else None
        Lanes.emit(functools.partial(make, of_pair=of_pair), values, target, row, column)


def load_rows(source: Ref, row: Any, columns: int, together: int) -> Float[Array, "64 columns"]:
    """Return rows from `row` on, a multiple of 8."""
    made = WARPGROUP_ROWS, columns

    def make(o: Lanes, source: Any, row: Any) -> Any:
        sums = _numbers(o, source, o.add(row, o.times(o.warp, 16)), o(0), together)
        some_type = _utils.ir.VectorType.get((together,), o.zero.type)
        registers: dict[tuple[int, int], Any] = {}
        for half in range(2):
            for unit in range(columns // COLUMNS):
                numbers: list[Any] = []
                for first in range(0, 4, together):
                    address = o.arith.addi(sums.start, o.long(sums.offset(half, unit, first)))
                    numbers += o.numbers(o.load(some_type, address))
                for eight in range(2):
                    registers[2 * unit + eight, half] = o.vector_of(numbers[2 * eight : 2 * eight + 2])
        return tile(made, (registers[place] for place in places(columns)))

    return Lanes.emit(make, source, row, returns=array_type(made, jnp.float32))


def _numbers(o: Lanes, sums: Any, row: Any, column: Any, together: int) -> Places:
    return Places(o, o.device_address(sums), o.shape(sums)[1], row, column, together)
