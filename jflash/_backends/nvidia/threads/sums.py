"""Sums in device memory, to which CTAs add rows that they have in registers, in any order.

Sums of rows `[L, C]` are kept as `[L / 8, C / 16, 128]`: of 8 rows and 16 columns, the numbers in the order in which a
warp adds them. A thread has two neighbours in each 8 columns of a row, so four of the 16 columns. They lie side by side
where one instruction adds four numbers (`together`), as it does since Hopper, and a warp's 32 threads add to 512 bytes
that do. Where an instruction adds one number, those of the 32 threads do: 128 bytes, a line of the cache.

Tiles may begin at the last row, and are added whole: there are rows for them behind it, which nothing reads. Additions
on a condition take longer (examples/benchmarks/experiments/2026-11-27-dq-from-registers.md).

Source: PTX ISA, red.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Float

from jflash._backends.nvidia.threads.builder import THREADS, ThreadBuilder

ROWS, COLUMNS = 8, 16
UNIT = ROWS * COLUMNS
_ITEM = 4
_HOPPERS = 4
"""How many numbers an instruction adds."""
_utils: Any = mgpu.utils


def as_rows(sums: Float[Array, "*#B L C"]) -> Float[Array, "*#B L C"]:
    """Hopper's sums in the order of rows."""
    *batch, length, columns = sums.shape
    # Unit: row, pair, eight, neighbour.
    numbers = sums.reshape(*batch, length // ROWS, columns // COLUMNS, ROWS, 4, 2, 2)
    return numbers.swapaxes(-5, -4).swapaxes(-3, -2).reshape(sums.shape)


def from_rows(rows: Float[Array, "*#B L C"]) -> Float[Array, "*#B L C"]:
    """Rows in the order of Hopper's sums."""
    *batch, length, columns = rows.shape
    numbers = rows.reshape(*batch, length // ROWS, ROWS, columns // COLUMNS, 2, 4, 2)
    return numbers.swapaxes(-5, -4).swapaxes(-3, -2).reshape(rows.shape)


class Places:
    """The addresses of the numbers that a thread adds to, or loads, in sums of `units` times 16 columns.

    `sums` is the address of the first sum. The thread's warp has 16 rows, from `row` on, which is a multiple of 8, and
    columns from `column` on, which is a multiple of 16.
    """

    def __init__(self, o: ThreadBuilder, sums: Any, units: int, row: Any, column: Any, together: int) -> None:
        self.units, self.together = units, together
        unit = o.add(o.times(o.right(row, 3), units), o.right(column, 4))
        number = o.add(o.times(unit, UNIT), o.times(o.lane, together))
        self.start = o.arith.addi(sums, o.distance(number, _ITEM))

    def offset(self, half: int, unit: int, number: int) -> int:
        """Of one of a thread's four numbers of a unit, in bytes from its first."""
        lanes = number * 32 if self.together == 1 else number
        return ((half * self.units + unit) * UNIT + lanes) * _ITEM


def add_numbers(o: ThreadBuilder, places: Places, pairs: Sequence[Any]) -> None:
    """Add an accumulator's registers, in their order."""
    for half in range(2):
        for unit in range(len(pairs) // 4):
            numbers = [number for eight in range(2) for number in o.numbers(pairs[4 * unit + 2 * eight + half])]
            for first in range(0, 4, places.together):
                some = numbers[first : first + places.together]
                o.add_numbers(places.start, places.offset(half, unit, first), some)


# Hopper's, for `plgpu.inline_mgpu`.


def add(_: Any, sums: Any, part: Any) -> None:
    """Add 64 rows in the layout of products to sums `[64, C]`. Columns from C on are left out."""
    o = ThreadBuilder()
    columns = _utils.ir.MemRefType(sums.type).shape[1]
    places = Places(o, o.device_address(sums), columns // COLUMNS, o.times(o.warp, 16), o(0), _HOPPERS)
    add_numbers(o, places, list(part.registers.flat)[: columns // 4])


def store(_: Any, target: Any, sums: Any, first: Any) -> None:
    """Store rounded sums `[L, C]`, of which threads have neighbours, as rows from `first` on: as far as an array in
    device memory has such rows and columns."""
    o, ir = ThreadBuilder(), _utils.ir
    index, ends = ir.IndexType.get(), ir.MemRefType(target.type).shape
    size = ir.VectorType(sums.registers.flat[0].type).shape[0]
    item = ir.MemRefType(target.type).element_type
    for number, register in enumerate(sums.registers.flat):
        words = _utils.bitcast(register, ir.VectorType.get((size // 2,), o.type))
        words = [_utils.vector.extract(words, [], ir.DenseI64ArrayAttr.get([at])) for at in range(size // 2)]
        row, column, words = in_row(o, number, sums.shape[1] // COLUMNS, words)
        row = o.add(row, first.registers.item())
        is_there = o.arith.andi(*(o.below(at, o(end)) for at, end in zip((row, column), ends, strict=True)))
        numbers = _utils.vector.from_elements(ir.VectorType.get((size // 2,), o.type), list(words))
        with mgpu.when(is_there):
            at = [o.arith.index_cast(index, place) for place in (row, column)]
            _utils.vector.store(_utils.bitcast(numbers, ir.VectorType.get((size,), item)), target, at)


def in_row(o: ThreadBuilder, number: int, units: int, words: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """The row and the first column of what a thread stores of its `number`th one or two words of sums, and the words.

    A word has two neighbours. Of two words one is exchanged with the next thread, so that a thread has four neighbours.
    """
    of_vector, size = number * THREADS * 2 * len(words), 2 * len(words)
    index = o.add(o.times(o.add(o.times(o.warp, 32), o.lane), size), o(of_vector))
    unit = o.right(index, 7)
    group, block = o.arith.divui(unit, o(units)), o.arith.remui(unit, o(units))
    row = o.add(o.times(group, ROWS), o.arith.andi(o.right(index, 4), o(7)))
    pair = o.arith.andi(o.right(index, 2), o(3))
    column = o.add(o.times(block, COLUMNS), o.left(pair, 1))
    if len(words) == 1:
        eight = o.arith.andi(o.right(index, 1), o(1))
        return row, o.add(column, o.left(eight, 3)), list(words)
    is_odd = o.arith.cmpi(o.arith.CmpIPredicate.ne, o.arith.andi(pair, o(1)), o(0))
    return row, o.add(column, o.arith.select(is_odd, o(6), o(0))), o.side_by_side(is_odd, words)
