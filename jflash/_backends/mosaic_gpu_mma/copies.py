"""What a warpgroup copies between device memory and shared memory or registers, row by row and within bounds.

Rows of 16-bit numbers come to shared memory by `cp.async`, 16 bytes to a thread, which writes zeros in the place of
rows past a limit and columns past an array's. So padding may hold anything, and arrays need no room behind their end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu as mgpu

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.products import Tiles
from jflash._backends.mosaic_gpu_mma.smem_tile import CHUNK, SmemTile
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.threads.builder import THREADS, meet, places
from jflash._backends.nvidia.threads.device_rows import ColumnChunk, Rows, Source, store_rows

_utils: Any = mgpu.utils


class TileChunk(NamedTuple):
    """A chunk of a row of a tile, which a thread copies."""

    target: Any
    place: int
    """Bytes to be added to the target."""
    source: Source
    offset: int
    """Bytes to be added to the source's address."""
    is_inside: Any
    """Whether the row is there, and has such a column."""
    is_in_tile: Any
    """Whether the tile has the row; `None` if it has."""


def chunks_of_tile(
    o: Lanes,
    rows: Rows,
    tile: SmemTile,
    base: Any,
    first: Any,
    limit: Any,
    columns: ColumnChunk | None,
    width: int,
) -> Iterator[TileChunk]:
    """Yield what a thread copies of a tile: the same chunk of a panel's rows that are a fixed number apart.

    The rows have `width` columns, of which the tile may have some alone.
    """
    thread, together = o.thread, THREADS // tile.chunks
    thread_row, thread_chunk = o.arith.divui(thread, o(tile.chunks)), o.arith.remui(thread, o(tile.chunks))
    row = o.add(first, thread_row)
    target = o.add(base, o.times(thread_row, tile.pitch), tile.permuted(o, thread_row, thread_chunk))
    other_columns = 0
    if columns is not None:
        thread_chunk, other_columns = o.add(thread_chunk, o.right(columns.first, 3)), columns.whole - tile.columns
    steps = range(0, tile.rows, together)
    sources = rows.sources(o, row, o.times(thread_chunk, CHUNK), steps, limit)
    for index, source in zip(steps, sources, strict=True):
        is_there = o.below(o.add(row, o(index)), limit)
        is_in_tile = o.below(thread_row, o(tile.rows - index)) if index + together > tile.rows else None
        for chunk in range(0, tile.panels * tile.chunks, tile.chunks):
            is_inside = is_there
            if (chunk + tile.chunks) * CHUNK + other_columns > width:
                has_column = o.below(o.add(thread_chunk, o(chunk)), o(width // CHUNK))
                is_inside = o.arith.andi(is_there, has_column)
            at = source.offset + CHUNK * chunk * rows.item_bytes
            yield TileChunk(target, tile.place(index, chunk), source, at, is_inside, is_in_tile)


def copy_rows(source: Ref, target: Ref, first: Any, limit: Any, columns: ColumnChunk | None = None) -> None:
    """Begin to copy rows of `[L, H]`, or some columns, from `first` on to a tile; zeros from `limit` on, L at most.

    The tile is `[rows, columns]`. Of pieces, which lie side by side in rows, it is `[pieces, rows, columns]`.
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
    """Wait for a thread's copies but those of the last `pending` groups, and `meet`, so that those of all are seen."""
    Lanes.emit(lambda _: _utils.inline_ptx(f"cp.async.wait_group {pending};", has_side_effects=True))
    meet(warpgroups)


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


def store_pair(pair: Tiles, target: Ref, first: Any, limit: Any, columns: ColumnChunk | None = None) -> None:
    """Store rows, or some of their columns, of which a pair of blocks has each half, as `store_rows` does."""
    for number, values in enumerate(pair):
        store_rows(values, target, first, limit, columns, number)
