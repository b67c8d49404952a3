"""Which 16 bytes of a tile of rows in device memory each thread copies to shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.smem_tile import CHUNK, SmemTile
from jflash._backends.nvidia.threads.builder import THREADS
from jflash._backends.nvidia.threads.device_rows import ColumnChunk, Rows, Source


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
