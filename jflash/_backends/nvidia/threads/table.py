"""A table in device memory, `[numbers]`, from which a tile's elements read, and to which they add, each by its index.

Where numbers are added to a table:

    where each thread of a warp has one index: table[index] += the sum of the thread's numbers
    elsewhere, for each of a thread's elements, along the tile's diagonals:
      where its index is that of the element before: total = total + number
      elsewhere: table[index before] += total, by `red`; total = number

A table has few numbers for many elements, and a thread often meets one index in a row: by the distance from query to
key, twice; by a distance that is clipped or in buckets, as often as it has elements. Most tiles of a long call are so
far from the diagonal that they have one index. Shared memory would be nearer, but adds no float32: there `red` is a
loop of compare-and-swap, and in device memory one instruction that nothing waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Float, Int

from jflash._backends.nvidia.threads.builder import ThreadBuilder, array_type, as_tree, tile

_utils: Any = mgpu.utils


def gather(table: Any, index: Int[Array, "64 columns"]) -> Array:
    """Return a tile of a table's numbers, by their indices, which must be inside."""

    def make(o: ThreadBuilder, table: Any, index: Any) -> Any:
        def number(place: Any) -> Any:
            return _utils.memref.load(table, [o.arith.index_cast(o.ir.IndexType.get(), place)])

        pairs = ([number(o.extract(pair, at)) for at in range(2)] for pair in index.registers.flat)
        return tile(index.shape, map(o.vector_of, pairs), is_signed=is_signed)

    is_signed = True if jnp.issubdtype(table.dtype, jnp.integer) else None
    return ThreadBuilder.emit(make, table, index, returns=array_type(index.shape, table.dtype))


def add(table: Any, index: Int[Array, "64 columns"], values: Float[Array, "64 columns"]) -> None:
    """Add a tile's numbers to those of a table, by their indices, which must be inside; in any order."""

    def make(o: ThreadBuilder, table: Any, index: Any, values: Any) -> None:
        start = o.device_address(table)
        places, numbers = in_order(o, index.registers), in_order(o, values.registers)

        def add_where(place: Any, total: Any, condition: Any) -> None:
            address = o.arith.addi(start, o.distance(place, 4))
            instruction = "red.global.add.f32 [$0], $1;"
            _utils.inline_ptx(instruction, address, total, predicate=condition, has_side_effects=True)

        is_one = o.same(differences(o, places), o(0))
        branch = _utils.scf.IfOp(_utils.nvvm.vote_sync(o(-1), is_one, "all"), has_else=True)
        with _utils.ir.InsertionPoint(branch.then_block):
            total = as_tree(o.arith.addf, numbers)
            add_where(places[0], total, _is_wanted(o, total))
            _utils.scf.yield_([])
        with _utils.ir.InsertionPoint(branch.else_block):
            for addition in totals(o, places, numbers):
                add_where(*addition)
            _utils.scf.yield_([])

    ThreadBuilder.emit(make, table, index, values)


def differences(o: ThreadBuilder, index: Sequence[Any]) -> Any:
    """Return the bits in which a thread's indices differ from the first one."""
    return o.either(*(o.arith.xori(index[0], place) for place in index[1:]))


def totals(o: ThreadBuilder, index: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield where a thread adds, what, and whether it does; not where the total is 0, as it is of what is hidden."""
    place, total = index[0], values[0]
    for next_place, number in zip(index[1:], values[1:], strict=True):
        is_other = o.differ(place, next_place)
        yield place, total, o.arith.andi(_is_wanted(o, total), is_other)
        total = o.arith.select(is_other, number, o.arith.addf(total, number))
        place = next_place
    yield place, total, _is_wanted(o, total)


def _is_wanted(o: ThreadBuilder, total: Any) -> Any:
    return o.arith.cmpf(o.arith.CmpFPredicate.UNE, total, o.zero)


def in_order(o: ThreadBuilder, registers: Any) -> list[Any]:
    """Return a thread's elements, along diagonals."""
    pairs = [o.numbers(register) for register in registers.flat]
    return [pairs[2 * eight + half][k] for eight, half, k in diagonals(len(pairs) // 2)]


def diagonals(eights: int) -> list[tuple[int, int, int]]:
    """Return (eight, half, k) of each element of the upper row of a thread, and after it that of the lower row which is
    8 columns further: it is on the same diagonal."""
    rows = [(0, 1), *((eight + half, half) for eight in range(eights) for half in range(2))]
    return [(eight, half, k) for k in range(2) for eight, half in rows if eight < eights]
