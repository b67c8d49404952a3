"""Tiles of 16-bit operands in shared memory: where each 16 bytes of a row are, and how a warp reads them by `ldmatrix`.

A tile `[rows, columns]` is cut into panels of the widest of 64, 32 and 16 columns that divides them; a panel's rows lie
one after the other. Within a row its chunks of 16 bytes are permuted by the row's index, so that the same chunk of
eight neighbouring rows lies in different banks: as `ldmatrix` reads them, and as copies write them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.threads.builder import ThreadBuilder

CHUNK = 8
"""Numbers of 16 bits in 16 bytes: what a thread copies at once, and a row of the 8 x 8 matrices of `ldmatrix`."""


@dataclasses.dataclass(frozen=True)
class SmemTile:
    """The layout of a tile."""

    rows: int
    columns: int

    @property
    def chunks(self) -> int:
        """How many chunks a panel's row has."""
        return next(number for number in (8, 4, 2) if self.columns % (number * CHUNK) == 0)

    @property
    def panels(self) -> int:
        """How many panels the tile has."""
        return self.columns // (self.chunks * CHUNK)

    @property
    def pitch(self) -> int:
        """Bytes from one row to the next."""
        return self.chunks * 16

    @property
    def bytes(self) -> int:
        """How many bytes the tile has."""
        return self.rows * self.panels * self.pitch

    def place(self, row: int, chunk: int) -> int:
        """Return where a chunk would be if nothing were permuted, in bytes.

        Eight rows from a multiple of 8 on have one permutation each, wherever they are.
        """
        return (chunk // self.chunks * self.rows + row) * self.pitch

    def permuted(self, o: ThreadBuilder, row: Any, chunk: Any) -> Any:
        """Return a chunk's offset in its row, in bytes; its panel's rows and chunks count from 0."""
        turns = o.right(o.arith.andi(row, o(7)), {8: 0, 4: 1, 2: 2}[self.chunks])
        return o.left(o.arith.xori(chunk, turns), 4)


class SmemOperand:
    """A tile in shared memory, as an operand of products by `mma.sync`."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any, first_chunk: Any = None) -> None:
        """`first_chunk` is that of the lane's warp, if it has chunks of its own in a panel."""
        self.o, self.tile, self.base, self.first_chunk = o, tile, base, first_chunk
        self.addresses: dict[tuple[int, bool], Any] = {}
        self.offset = 0

    def pieces(self, number: int) -> list[Self]:
        """Return `number` tiles: this one and those that lie behind it, which share its addresses."""
        every = [copy.copy(self) for _ in range(number)]
        for place, one in enumerate(every):
            one.offset = place * self.tile.bytes
        return every

    def matrices(self, row: int, chunk: int, *, rows_first: bool, transpose: bool) -> Sequence[Any]:
        """Return four 8 x 8 matrices, which are 16 rows, from `row` on, of two chunks.

        They come in the order of rows, both chunks of each eight, or with `rows_first` in that of chunks.
        """
        address, offset = self._address(chunk, rows_first), self.tile.place(row, chunk)
        return self.o.load_matrices(address, self.offset + offset, transpose=transpose)

    def _address(self, chunk: int, rows_first: bool) -> Any:
        """Return where a lane's row of the matrices begins, but for what is the same for all lanes."""
        key = chunk % self.tile.chunks, rows_first
        if key in self.addresses:
            return self.addresses[key]
        o = self.o
        if key[0] > 0:
            # Rows of a panel begin at multiples of their bytes. One instruction from one address, which the compiler
            # repeats where registers are short.
            self.addresses[key] = o.arith.xori(self._address(0, rows_first), o(16 * key[0]))
        else:
            row, matrix = o.arith.andi(o.lane, o(7)), o.right(o.lane, 3)
            low, high = o.arith.andi(matrix, o(1)), o.right(matrix, 1)
            below, beside = (low, high) if rows_first else (high, low)
            lane_row, chunk = o.add(row, o.left(below, 3)), beside
            if self.first_chunk is not None:
                chunk = o.arith.ori(chunk, self.first_chunk)
            places = o.times(lane_row, self.tile.pitch), self.tile.permuted(o, row, chunk)
            self.addresses[key] = o.add(self.base, *places)
        return self.addresses[key]


class LeftOperand(SmemOperand):
    """A tile `[rows, K]` as A, of which each warp reads its own rows: 16 of every 64, or if `paired` 32 of 64.

    Of a tile of 16 rows all warps read the same.
    """

    def __init__(self, o: Lanes, tile: SmemTile, base: Any, *, paired: bool = False) -> None:
        if tile.rows > 16:
            first_row = o.times(o.right(o.warp, 1), 32 * tile.pitch) if paired else o.times(o.warp, 16 * tile.pitch)
            base = o.add(base, first_row)
        super().__init__(o, tile, base)
        self.rows, self.depth = 16 if paired else WARPGROUP_ROWS, tile.columns

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """Return the four words of 16 columns of a block."""
        return self.matrices(block * self.rows, 2 * index, rows_first=True, transpose=False)


class TransposedOperand(SmemOperand):
    """A tile `[K, rows]` as A, in panels of 64 columns; each warp reads the rows that it reads of a `LeftOperand`."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any, *, paired: bool = False) -> None:
        super().__init__(o, tile, base, o.times(o.right(o.warp, 1), 4) if paired else o.times(o.warp, 2))
        self.chunks, self.depth = (16 if paired else WARPGROUP_ROWS) // CHUNK, tile.rows

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """Return the four words of 16 rows of a block."""
        return self.matrices(16 * index, block * self.chunks, rows_first=False, transpose=True)


class PairedColumns(SmemOperand):
    """A tile `[K, columns]` as B, of which each warp reads half of the columns."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any) -> None:
        odd, half = o.arith.andi(o.warp, o(1)), tile.columns // CHUNK // 2
        if half < tile.chunks:
            super().__init__(o, tile, base, o.times(odd, half))
        else:
            super().__init__(o, tile, o.add(base, o.times(odd, tile.place(0, half))))
