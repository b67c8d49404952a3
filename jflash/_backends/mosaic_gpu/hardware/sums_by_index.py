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

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu

from jflash._backends.mosaic_gpu.hardware.lane_words import LaneWords

_utils: Any = mgpu.utils


def add(_: Any, table: Any, index: Any, values: Any) -> None:
    """The instructions, for `plgpu.inline_mgpu`."""
    o = LaneWords()
    long_type = _utils.ir.IntegerType.get_signless(64)
    start = _utils.llvm.ptrtoint(long_type, _utils.memref_ptr(table))

    def add_total(place: Any, total: Any, condition: Any = None) -> None:
        offset = o.arith.muli(o.arith.extsi(long_type, place), _utils.c(4, long_type))
        # What is hidden adds 0.
        wanted = o.arith.cmpf(o.arith.CmpFPredicate.UNE, total, o.zero)
        wanted = wanted if condition is None else o.arith.andi(wanted, condition)
        address = o.arith.addi(start, offset)
        _utils.inline_ptx("red.global.add.f32 [$0], $1;", address, total, predicate=wanted, has_side_effects=True)

    own = zip(_along_diagonals(o, index.registers), _along_diagonals(o, values.registers), strict=True)
    place, total = next(own)
    for next_place, number in own:
        is_other = o.arith.cmpi(o.arith.CmpIPredicate.ne, place, next_place)
        add_total(place, total, is_other)
        total = o.arith.select(is_other, number, o.arith.addf(total, number))
        place = next_place
    add_total(place, total)


def _along_diagonals(o: LaneWords, registers: Any) -> Iterator[Any]:
    """A thread's elements. Of its two rows, which are 8 apart, the lower one's follow those of the upper one that are 8
    columns before."""
    pairs = {(index[1], index[4]): o.numbers(register) for index, register in np.ndenumerate(registers)}
    eights = 1 + max(eight for eight, _ in pairs)
    for k in range(2):
        yield pairs[0, 1][k]
        for eight in range(eights):
            yield pairs[eight, 0][k]
            if eight + 1 < eights:
                yield pairs[eight + 1, 1][k]
