"""What a warpgroup copies to shared memory from a paged cache: a tile's rows, each from the page that has it.

Numbers of 16 bits in the query's dtype come by `cp.async`, as from any array. Others are loaded to registers, converted
(`cache_numbers`) and stored: no copy converts. The numbers of the pages of a tile have come to shared memory when its
rows are copied. Those of rows past the sequence's length may be anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma import cache_numbers
from jflash._backends.mosaic_gpu_mma.cache_numbers import UNITS
from jflash._backends.mosaic_gpu_mma.copies import chunks_of_tile, copy_tile
from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.smem_tile import SmemTile
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.threads.builder import array_type, tile
from jflash._backends.nvidia.threads.device_rows import Rows, Source

_utils: Any = mgpu.utils


class CachedRows(NamedTuple):
    """References to the keys, or values, of a sequence and a head in a paged cache."""

    cache: Ref
    """`[rows, columns]`, the rows of all pages one after the other."""
    page_numbers: Ref
    """`[pages]`, in shared memory, the numbers of the sequence's pages from that of a tile's first row on."""
    page_size: int
    scales: Ref | None = None
    """`[#pages]`, what each page's rows are multiplied by; `None` if they are taken as they are."""


class PageNumbers(NamedTuple):
    """The numbers of a sequence's pages in shared memory, as threads find them."""

    start: Any
    """Where they begin."""
    first: Any
    """How many pages come before the first of them."""
    size: int
    """Rows of a page."""

    @staticmethod
    def of(o: Lanes, ref: Any, first_row: Any, size: int) -> PageNumbers:
        """Return those of a reference, which has them from that of a row's page on."""
        first = o.arith.divui(first_row, o(size))
        return PageNumbers(o.shared_address(ref), first, size)

    def number(self, o: Lanes, row: Any) -> Any:
        """Return the number of the page that has a row; of a row that is not there, any number."""
        index = o.arith.subi(o.arith.divui(row, o(self.size)), self.first)
        return o.load_word(o.add(self.start, o.times(index, 4)), 0)


def copy_cached_rows(rows: CachedRows, target: Ref, first: Any, limit: Any) -> None:
    """Copy a sequence's rows, from `first` on, to a tile `[rows, columns]`; zeros for those from `limit` on.

    Rows that have the tile's dtype and no scales are still on their way when this returns. Others are multiplied by
    their pages' scales, converted to that dtype, and stored; in pieces the tile is `[pieces, rows, columns]`.
    """
    dtypes = rows.cache.dtype.name, target.dtype.name
    is_converted = rows.cache.dtype != target.dtype or rows.scales is not None

    def make(o: Lanes, cache: Any, page_numbers: Any, scales: Any, target: Any, first: Any, limit: Any) -> None:
        *pieces, height, width = o.shape(target)
        pages = PageNumbers.of(o, page_numbers, first, rows.page_size)
        paged = PagedRows.of_array(o, cache, pages)
        if not is_converted and paged.item_bytes == 1:
            # Two neighbours are copied as one number of 16 bits.
            width, paged = width // 2, dataclasses.replace(paged, columns=paged.columns // 2, item_bytes=2)
        conversion = Conversion.of(o, *dtypes, math.prod(pieces), scales) if is_converted else None
        tile, base = SmemTile(height, width), o.shared_address(target)
        if conversion is None:
            copy_tile(o, paged, tile, base, first, limit)
        else:
            convert_tile(o, paged, conversion, tile, base, first, limit)

    Lanes.emit(make, rows.cache, rows.page_numbers, rows.scales, target, first, limit)


def copy_page_numbers(table: Ref, target: Ref, first: Any) -> None:
    """Begin to copy numbers of `[pages]` in device memory to shared memory, up to 128, from `first` on.

    Past the end of the table it is the last number that is copied.
    """

    def make(o: Lanes, table: Any, target: Any, first: Any) -> None:
        (pages,), (number,) = o.shape(table), o.shape(target)
        index = o.arith.minsi(o.add(first, o.thread), o(pages - 1))
        source = o.arith.addi(o.device_address(table), o.distance(index, 4))
        o.copy_number(o.add(o.shared_address(target), o.times(o.thread, 4)), source, o.below(o.thread, o(number)))

    Lanes.emit(make, table, target, first)


def load_page_scales(
    scales: Ref, page_numbers: Ref, page_size: int, first: Any, limit: Any, shape: tuple[int, int]
) -> Float[Array, "64 columns"]:
    """Return for each element of a tile of logits, whose warps have a quarter of the keys each, its key's page's scale.

    Args:
      scales: `[pages]`, a float32 number for each page, in device memory.
      page_numbers: as those of `CachedRows`.
      page_size: the number of keys in a page.
      first: the tile's first key.
      limit: where keys end; from there on scales are 0.
      shape: the tile's, `[64, keys / 4]`.
    """

    def make(o: Lanes, scales: Any, page_numbers: Any, first: Any, limit: Any) -> Any:
        (stride,), _ = _utils.ir.MemRefType(scales.type).get_strides_and_offset()
        start, pages = o.device_address(scales), PageNumbers.of(o, page_numbers, first, page_size)
        first = o.add(first, o.times(o.warp, shape[1]), o.first_column)

        def scale(column: int) -> Any:
            key = o.add(first, o(column))
            # Behind the last key the table may hold anything.
            is_there = o.below(key, limit)
            page = o.arith.select(is_there, pages.number(o, key), o(0))
            (bits,) = o.load_words(o.arith.addi(start, o.distance(page, 4 * stride)), 0, 1)
            return o.arith.select(is_there, o.number(bits), o.zero)

        pairs = [o.vector_of([scale(column), scale(column + 1)]) for column in range(0, shape[1], 8)]
        return tile(shape, (pair for pair in pairs for _ in range(2)))

    return Lanes.emit(make, scales, page_numbers, first, limit, returns=array_type(shape, jnp.float32))


@dataclasses.dataclass(frozen=True)
class PagedRows(Rows):
    """A sequence's rows in device memory, as threads find them; those of `Rows` are the whole cache's."""

    pages: PageNumbers

    def sources(self, o: Lanes, row: Any, column: Any, steps: Iterable[int], limit: Any) -> list[Source]:
        """Return what `Rows` does. All pages are looked up before the first is used, so that a thread waits once."""
        del limit
        places = [o.add(row, o(step)) for step in steps]
        pages = [self.pages.number(o, place) for place in places]
        row = lambda place, page: o.add(o.times(page, self.pages.size), o.arith.remui(place, o(self.pages.size)))
        rows = map(row, places, pages)
        return [Source(self.address(o, row, column), 0, page) for row, page in zip(rows, pages, strict=True)]


class Conversion(NamedTuple):
    """How rows of a cache become those of a tile."""

    cached: str
    """The dtype of the cache."""
    stored: str
    """The dtype of the tile."""
    pieces: int
    scales: Any
    """Where the scales begin; `None` if there are none."""
    scale_bytes: int
    """Bytes from one page's scale to the next, 0 if they share one."""

    @staticmethod
    def of(o: Lanes, cached: str, stored: str, pieces: int, scales: Any) -> Conversion:
        """Return the conversion of one dtype to another, with a reference to the scales, if there are any."""
        if scales is None:
            return Conversion(cached, stored, pieces, None, 0)
        (number,), ((stride,), _) = o.shape(scales), _utils.ir.MemRefType(scales.type).get_strides_and_offset()
        return Conversion(cached, stored, pieces, o.device_address(scales), 4 * stride if number > 1 else 0)

    def factor(self, o: Lanes, page: Any) -> Any:
        """Return what the numbers that were loaded from a page are to be multiplied by; `None` if by nothing."""
        unit = UNITS.get(self.cached)
        if self.scales is None:
            return None if unit is None else o.plus(o.zero, unit)
        (bits,) = o.load_words(o.arith.addi(self.scales, o.distance(page, self.scale_bytes)), 0, 1)
        return o.number(bits) if unit is None else o.arith.mulf(o.number(bits), o.plus(o.zero, unit))


def convert_tile(
    o: Lanes, rows: PagedRows, conversion: Conversion, tile: SmemTile, base: Any, first: Any, limit: Any
) -> None:
    """Convert the rows of a tile, or of the tiles of its pieces, one behind the other, and store them."""
    for chunk in chunks_of_tile(o, rows, tile, base, first, limit, None, rows.columns):
        # What is not there may lie outside the array.
        address = o.arith.select(chunk.is_inside, chunk.source.address, rows.start)
        numbers = cache_numbers.load(o, conversion.cached, address, chunk.offset)
        factor = conversion.factor(o, o.arith.select(chunk.is_inside, chunk.source.page, o(0)))
        if factor is not None:
            numbers = [o.arith.mulf(number, factor) for number in numbers]
        for piece, words in enumerate(cache_numbers.chunks(o, conversion.stored, numbers, conversion.pieces)):
            stored = [o.arith.select(chunk.is_inside, word, o(0)) for word in words]
            o.store_chunk(chunk.target, chunk.place + piece * tile.bytes, stored, chunk.is_in_tile)
