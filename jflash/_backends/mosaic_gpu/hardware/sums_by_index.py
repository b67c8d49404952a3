"""A tile's numbers, added to a table in device memory, each by an index of its own.

    for each of a thread's elements, along the tile's diagonals:
      where its index is that of the element before: total = total + number
      elsewhere: table[index before] += total, by `red`; total = number

A table has few numbers for many elements, and a thread often meets one index in a row: by the distance from query to
key, twice; by a distance that is clipped or in buckets, as often as it has elements. Shared memory would be nearer, but
adds no float32: there `red` is a loop of compare-and-swap, and in device memory one instruction that nothing waits for.

Source of the layout: PTX ISA, wgmma, the accumulator's fragment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu

from jflash._backends.mosaic_gpu.hardware.lane_words import LaneWords

_utils: Any = mgpu.utils


def add(_: Any, table: Any, index: Any, values: Any) -> None:
    """The instructions, for `plgpu.inline_mgpu`."""
    o = LaneWords()
    start = o.device_address(table)
    for place, total, condition in totals(o, in_order(o, index.registers), in_order(o, values.registers)):
        instruction = "red.global.add.f32 [$0], $1;"
        address = o.arith.addi(start, o.distance(place, 4))
        _utils.inline_ptx(instruction, address, total, predicate=condition, has_side_effects=True)


def totals(o: LaneWords, index: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """What a thread adds where, and whether it does; not where the total is 0, as it is of what is hidden."""
    wanted = lambda total: o.arith.cmpf(o.arith.CmpFPredicate.UNE, total, o.zero)
    place, total = index[0], values[0]
    for next_place, number in zip(index[1:], values[1:], strict=True):
        is_other = o.arith.cmpi(o.arith.CmpIPredicate.ne, place, next_place)
        yield place, total, o.arith.andi(wanted(total), is_other)
        total = o.arith.select(is_other, number, o.arith.addf(total, number))
        place = next_place
    yield place, total, wanted(total)


def in_order(o: LaneWords, registers: Any) -> list[Any]:
    """A thread's elements, along diagonals."""
    pairs = {(index[1], index[4]): o.numbers(register) for index, register in np.ndenumerate(registers)}
    return [pairs[eight, half][k] for eight, half, k in diagonals(len(pairs) // 2)]


def diagonals(eights: int) -> list[tuple[int, int, int]]:
    """Of `eights` of columns, which eight, which of the thread's two rows and which of its two columns there: each
    element of the upper row, and then that of the lower row, 8 below it, which is 8 columns after it."""
    rows = [(0, 1), *((eight + half, half) for eight in range(eights) for half in range(2))]
    return [(eight, half, k) for k in range(2) for eight, half in rows if eight < eights]
