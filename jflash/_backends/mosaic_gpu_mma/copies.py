"""What a warpgroup copies between device memory and shared memory or registers, row by row and within bounds.

Rows of 16-bit numbers come to shared memory by `cp.async`, 16 bytes to a thread, which writes zeros in the place of
rows past a limit and columns past an array's. So padding may hold anything, and arrays need no room behind their end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.products import Tiles
from jflash._backends.mosaic_gpu_mma.rows import ColumnChunk, Rows, chunks_of_tile
from jflash._backends.mosaic_gpu_mma.smem_tile import SmemTile
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.threads.builder import ThreadBuilder, array_type, places, tile

_utils: Any = mgpu.utils


def copy_rows(source: Ref, target: Ref, first: Any, limit: Any, columns: ColumnChunk | None = None) -> None:
    """Begin to copy rows of `[L, H]`, from `first` on, to a tile `[rows, columns]`; zeros for those from `limit` on,
    which is at most L.

    The tile may have some of the columns alone. Pieces lie side by side in rows, and are tiles of `[pieces, rows,
    columns]`.
    """

    def make(o: Lanes, source: Any, target: Any, first: Any, limit: Any, first_column: Any) -> None:
        *pieces, height, width = o.shape(target)
        chunk = None if columns is None else columns._replace(first=first_column)
        base, tile = o.shared_address(target), SmemTile(height, width)
        copy_tile(o, Rows.of(o, source), tile, base, first, limit, chunk, math.prod(pieces))

    Lanes.emit(make, source, target, first, limit, None if columns is None else columns.first)


def copy_tile(
    o: Lanes,
    rows: Rows,
    tile: SmemTile,
    base: Any,
    first: Any,
    limit: Any,
    columns: ColumnChunk | None = None,
    pieces: int = 1,
) -> None:
    """Begin the copies of a tile, or of its pieces, which lie side by side in rows."""
    width = rows.columns // pieces
    for chunk in chunks_of_tile(o, rows, tile, base, first, limit, columns, width):
        size = o.arith.select(chunk.is_inside, o(16), o(0))
        for piece in range(pieces):
            target, source = chunk.place + piece * tile.bytes, chunk.offset + piece * width * rows.item_bytes
            # A copy of nothing writes zeros: past the tile there must be none.
            o.copy_chunk(chunk.target, chunk.source.address, (target, source), size, chunk.is_in_tile)


def copy_numbers(source: Ref, target: Ref, first: Any) -> None:
    """Begin to copy float32 numbers of `[L]`, from `first` on, to shared memory: as many as `target` has, up to 128."""

    def make(o: Lanes, source: Any, target: Any, first: Any) -> None:
        thread = o.thread
        place = o.add(o.shared_address(target), o.times(thread, 4))
        start = o.arith.addi(o.device_address(source), o.distance(o.add(first, thread), 4))
        o.copy_number(place, start, o.below(thread, o(*o.shape(target))))

    Lanes.emit(make, source, target, first)


def commit() -> None:
    """Make a group of the copies that began since the last one."""
    Lanes.emit(lambda _: _utils.inline_ptx("cp.async.commit_group;", has_side_effects=True))


def wait(pending: int = 0, *, warpgroups: int = 1) -> None:
    """Wait until a thread's copies are done but for those of the last `pending` groups, and `meet`: then those of all
    threads are seen."""
    Lanes.emit(lambda _: _utils.inline_ptx(f"cp.async.wait_group {pending};", has_side_effects=True))
    meet(warpgroups)


def meet(warpgroups: int) -> None:
    """Wait until all threads of the CTA, which has `warpgroups`, are here, and see what they wrote to shared memory."""
    if warpgroups == 1:
        Lanes.emit(lambda _: mgpu.warpgroup_barrier())
    else:
        Lanes.emit(lambda _: _utils.inline_ptx("bar.sync 0;", has_side_effects=True, convergent=True))


def store_tile(values: Tiles, target: Ref, first_column: Any) -> None:
    """Store blocks of 64 rows of 16-bit numbers in a tile `[rows, M]` of shared memory, from a column on."""

    def make(o: Lanes, values: Any, target: Any, first: Any) -> None:
        base = o.shared_address(target)
        store_words(o, SmemTile(*o.shape(target)), base, list(map(o.words_of, values)), first)

    Lanes.emit(make, tuple(values), target, first_column)


def store_words(o: Lanes, tile: SmemTile, base: Any, blocks: Sequence[Sequence[Any]], first: Any) -> None:
    """Store each block's words, in the order of an accumulator's registers, in a tile whose panels have 64 columns.

    They have whole panels' columns, or half of one's; the first is a multiple of their number.
    """
    first_chunk = o.right(first, 3)
    panel, chunk_in_panel = o.right(first_chunk, 3), o.arith.andi(first_chunk, o(7))
    row = o.first_row
    start = o.add(base, o.times(panel, tile.rows * tile.pitch), o.times(row, tile.pitch), o.left(o.pair, 2))
    found: dict[int, Any] = {}
    for block, words in enumerate(blocks):
        for (eight, half), word in zip(places(4 * len(words)), words, strict=True):
            chunk = eight % tile.chunks
            if chunk not in found:
                found[chunk] = o.add(start, tile.permuted(o, row, o.arith.ori(chunk_in_panel, o(chunk))))
            o.store_word(found[chunk], tile.place(block * WARPGROUP_ROWS + 8 * half, eight - chunk), word)


def store_rows(
    values: Float[Array, "64 D"],
    target: Ref,
    first: Any,
    limit: Any,
    columns: ColumnChunk | None = None,
    of_pair: int | None = None,
) -> None:
    """Store rows in `[L, D]`, in the array's dtype, from `first` to below `limit`; but for columns past D, a multiple
    of 8.

    They may have some of the columns alone, and be one block `of_pair`.
    """
    width = values.shape[1]
    other_columns = 0 if columns is None else columns.whole - width

    def make(o: Lanes, values: Any, target: Any, first: Any, limit: Any, first_column: Any) -> None:
        rows = Rows.of(o, target)
        below, beside = o.warp_place(width, of_pair)
        row, column = o.add(first, below, o.row), beside if first_column is None else o.add(beside, first_column)
        if rows.item_bytes == 2:
            stored = in_rows(o, o.words_of(values))
        else:
            pair = _utils.ir.VectorType.get((2,), o.type)
            stored = pairs_in_rows(o, [_utils.bitcast(two, pair) for two in values.registers.flat])
        store_in_rows(o, rows, stored, (row, column), limit, other_columns)

    values = values.astype(target.dtype)
    Lanes.emit(make, values, target, first, limit, None if columns is None else columns.first)


def store_pair(pair: Tiles, target: Ref, first: Any, limit: Any, columns: ColumnChunk | None = None) -> None:
    """Store rows, or some of their columns, of which a pair of blocks has each half, as `store_rows` does."""
    for number, values in enumerate(pair):
        store_rows(values, target, first, limit, columns, number)


Stored = tuple[int, int, Any, Sequence[Any]]
"""Two neighbouring words: which half of 16 rows they are in; a column, to which that of the thread is to be added; that
of the thread; and they."""


def in_rows(o: ThreadBuilder, words: Sequence[Any]) -> Iterator[Stored]:
    """Yield what threads store of an accumulator's words of 16-bit numbers.

    Of two words of neighbouring eights of columns one is exchanged with the next thread. So a warp stores 32 bytes of
    each row at a time, as much as device memory is written in.
    """
    is_odd = o.is_odd
    thread_column = o.add(o.left(o.arith.andi(o.pair, o(2)), 1), o.arith.select(is_odd, o(8), o(0)))
    for place, half in itertools.product(range(len(words) // 4), range(2)):
        two = words[4 * place + half], words[4 * place + 2 + half]
        yield half, 16 * place, thread_column, o.side_by_side(is_odd, two)


def pairs_in_rows(o: ThreadBuilder, pairs: Sequence[Any]) -> Iterator[Stored]:
    """Yield what threads store of an accumulator's pairs of 32-bit numbers: 32 bytes of each row at a time."""
    for (eight, half), pair in zip(places(4 * len(pairs)), pairs, strict=True):
        yield half, 8 * eight, o.first_column, o.numbers(pair)


def store_in_rows(
    o: Lanes, rows: Rows, stored: Iterable[Stored], first: tuple[Any, Any], limit: Any, other_columns: int
) -> None:
    """Store words in rows below `limit` and columns that there are; `first` are a thread's first row and its warp's
    first column, which is one of `other_columns` at most."""
    row, column = first
    is_there = [o.below(o.add(row, o(8 * half)), limit) for half in range(2)]
    for half, more, thread_column, two in stored:
        place = o.add(column, thread_column)
        start, is_inside = rows.address(o, row, place), is_there[half]
        if more + 16 + other_columns > rows.columns:
            is_inside = o.arith.andi(is_inside, o.below(o.add(place, o(more)), o(rows.columns)))
        o.store_in_row(start, 8 * half * rows.pitch + more * rows.item_bytes, two, is_inside)


def load_tile(
    source: Ref, row: Any, column: Any, shape: tuple[int, int], *, transposed: bool
) -> Float[Array, "64 columns"]:
    """Return a tile of an array `[L, M]` in device memory, from a row and a column on, 0 past its ends; or its
    transpose."""

    def make(o: Lanes, source: Any, row: Any, column: Any) -> Any:
        rows, dtype = Rows.of(o, source), o.dtype(source)
        turned = lambda place: place[::-1] if transposed else place
        tile_row, tile_column = turned((o.first_row, o.first_column))
        first_row, first_column = o.add(row, tile_row), o.add(column, tile_column)
        start = rows.address(o, first_row, first_column)

        def number(down: int, right: int) -> Any:
            """Return an element, by how far it is from the thread's first."""
            below = o.below(o.add(first_row, o(down)), o(rows.length))
            inside = o.arith.andi(below, o.below(o.add(first_column, o(right)), o(rows.columns)))
            there = o.arith.select(inside, o.long(down * rows.pitch + right * rows.item_bytes), o.long(0))
            safe = o.arith.select(inside, start, rows.start)
            return o.arith.select(inside, o.load(dtype, o.arith.addi(safe, there)), _utils.c(0.0, dtype))

        pairs = ([number(*turned((8 * half, 8 * eight + k))) for k in range(2)] for eight, half in places(shape[1]))
        return tile(shape, map(o.vector_of, pairs))

    return Lanes.emit(make, source, row, column, returns=array_type(shape, source.dtype))
