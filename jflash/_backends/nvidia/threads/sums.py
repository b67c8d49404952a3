"""Sums of rows in device memory, to which CTAs add rows that they have in registers, in any order.

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

from jflash._backends.nvidia.threads.builder import THREADS, ThreadBuilder, strided

ROWS, COLUMNS = 8, 16
UNIT = ROWS * COLUMNS
_ITEM = 4
_utils: Any = mgpu.utils


def as_rows(sums: Float[Array, "*#B L C"]) -> Float[Array, "*#B L C"]:
    """Return sums whose instructions add four numbers as rows."""
    *batch, length, columns = sums.shape
    # Unit: row, pair, eight, neighbour.
    numbers = sums.reshape(*batch, length // ROWS, columns // COLUMNS, ROWS, 4, 2, 2)
    return numbers.swapaxes(-5, -4).swapaxes(-3, -2).reshape(sums.shape)


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
        """Return where one of a thread's four numbers of a unit is, in bytes from its first."""
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


def add(sums: Any, rows: Float[Array, "64 columns"]) -> None:
    """Add 64 rows to `sums` in device memory, `[64, C]`, four numbers at a time. Columns from C on are left out."""

    def make(o: ThreadBuilder, sums: Any, rows: Any) -> None:
        columns = o.shape(sums)[1]
        places = Places(o, o.device_address(sums), columns // COLUMNS, o.times(o.warp, 16), o(0), 4)
        add_numbers(o, places, list(rows.registers.flat)[: columns // 4])

    ThreadBuilder.emit(make, sums, rows)


def store(target: Any, sums: Array, first: Any) -> None:
    """Store sums `[L, C]` of 16 bits, in the layout `strided`, as rows of an array in device memory from `first` on.

    Rows and columns that the array does not have are left out.
    """

    def make(o: ThreadBuilder, target: Any, sums: Any, first: Any) -> None:
        index, ends = o.ir.IndexType.get(), o.shape(target)
        for number, register in enumerate(sums.registers.flat):
            size = o.ir.VectorType(register.type).shape[0]
            words = o.numbers(_utils.bitcast(register, o.ir.VectorType.get((size // 2,), o.type)))
            row, column, words = in_row(o, number, sums.shape[1] // COLUMNS, words)
            row = o.add(row, first)
            is_there = o.arith.andi(*(o.below(at, o(end)) for at, end in zip((row, column), ends, strict=True)))
            numbers = o.vector_of(words)
            with mgpu.when(is_there):
                at = [o.arith.index_cast(index, place) for place in (row, column)]
                _utils.vector.store(_utils.bitcast(numbers, o.ir.VectorType.get((size,), o.dtype(target))), target, at)

    ThreadBuilder.emit(make, target, sums, first, layout=strided(sums.shape))


def in_row(o: ThreadBuilder, number: int, units: int, words: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """Return the row and the first column of what a thread stores of its `number`th one or two words of sums, and the
    words.

    A word has two neighbours. Of two words one is exchanged with the next thread, so that a thread has four neighbours.
    """
    of_vector, size = number * THREADS * 2 * len(words), 2 * len(words)
    index = o.add(o.times(o.thread, size), o(of_vector))
    unit = o.right(index, 7)
    group, block = o.arith.divui(unit, o(units)), o.arith.remui(unit, o(units))
    row = o.add(o.times(group, ROWS), o.arith.andi(o.right(index, 4), o(7)))
    pair = o.arith.andi(o.right(index, 2), o(3))
    column = o.add(o.times(block, COLUMNS), o.left(pair, 1))
    if len(words) == 1:
        eight = o.arith.andi(o.right(index, 1), o(1))
        return row, o.add(column, o.left(eight, 3)), list(words)
    is_odd = o.differ(o.arith.andi(pair, o(1)), o(0))
    return row, o.add(column, o.arith.select(is_odd, o(6), o(0))), o.side_by_side(is_odd, words)
