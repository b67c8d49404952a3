"""A tile's numbers, added to a table in device memory, each by an index of its own.

    where each thread of a warp has one index: table[index] += the sum of the thread's numbers
    elsewhere, for each of a thread's elements, along the tile's diagonals:
      where its index is that of the element before: total = total + number
      elsewhere: table[index before] += total, by `red`; total = number

A table has few numbers for many elements, and a thread often meets one index in a row: by the distance from query to
key, twice; by a distance that is clipped or in buckets, as often as it has elements. Most tiles of a long call are so
far from the diagonal that they have one index. Shared memory would be nearer, but adds no float32: there `red` is a
loop of compare-and-swap, and in device memory one instruction that nothing waits for.

Source of the layout: PTX ISA, wgmma, the accumulator's fragment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu

from jflash._backends.nvidia.threads.builder import ThreadBuilder, as_tree

_utils: Any = mgpu.utils


def add(_: Any, table: Any, index: Any, values: Any) -> None:
    """The instructions, for `plgpu.inline_mgpu`."""
    o = ThreadBuilder()
    start = o.device_address(table)
    places, numbers = in_order(o, index.registers), in_order(o, values.registers)

    def add_where(place: Any, total: Any, condition: Any) -> None:
        address = o.arith.addi(start, o.distance(place, 4))
        instruction = "red.global.add.f32 [$0], $1;"
        _utils.inline_ptx(instruction, address, total, predicate=condition, has_side_effects=True)

    is_one = o.arith.cmpi(o.arith.CmpIPredicate.eq, differences(o, places), o(0))
    branch = _utils.scf.IfOp(_utils.nvvm.vote_sync(o(-1), is_one, "all"), has_else=True)
    with _utils.ir.InsertionPoint(branch.then_block):
        total = as_tree(o.arith.addf, numbers)
        add_where(places[0], total, _is_wanted(o, total))
        _utils.scf.yield_([])
    with _utils.ir.InsertionPoint(branch.else_block):
        for addition in totals(o, places, numbers):
            add_where(*addition)
        _utils.scf.yield_([])


def differences(o: ThreadBuilder, index: Sequence[Any]) -> Any:
    """The bits in which a thread's indices differ from the first one."""
    return o.either(*(o.arith.xori(index[0], place) for place in index[1:]))


def totals(o: ThreadBuilder, index: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """What a thread adds where, and whether it does; not where the total is 0, as it is of what is hidden."""
    place, total = index[0], values[0]
    for next_place, number in zip(index[1:], values[1:], strict=True):
        is_other = o.arith.cmpi(o.arith.CmpIPredicate.ne, place, next_place)
        yield place, total, o.arith.andi(_is_wanted(o, total), is_other)
        total = o.arith.select(is_other, number, o.arith.addf(total, number))
        place = next_place
    yield place, total, _is_wanted(o, total)


def _is_wanted(o: ThreadBuilder, total: Any) -> Any:
    return o.arith.cmpf(o.arith.CmpFPredicate.UNE, total, o.zero)


def in_order(o: ThreadBuilder, registers: Any) -> list[Any]:
    """A thread's elements, along diagonals."""
    pairs = {(index[1], index[4]): o.numbers(register) for index, register in np.ndenumerate(registers)}
    return [pairs[eight, half][k] for eight, half, k in diagonals(len(pairs) // 2)]


def diagonals(eights: int) -> list[tuple[int, int, int]]:
    """Of `eights` of columns, which eight, which of the thread's two rows and which of its two columns there: each
    element of the upper row, and then that of the lower row, 8 below it, which is 8 columns after it."""
    rows = [(0, 1), *((eight + half, half) for eight in range(eights) for half in range(2))]
    return [(eight, half, k) for k in range(2) for eight, half in rows if eight < eights]
