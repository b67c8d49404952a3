"""Tiles of 16-bit operands in shared memory: where each 16 bytes of a row are.

A tile `[rows, columns]` is cut into panels of the widest of 64, 32 and 16 columns that divides them; a panel's rows lie
one after the other. Within a row its chunks of 16 bytes are permuted by the row's index, so that the same chunk of
eight neighbouring rows lies in different banks: as `ldmatrix` reads them, and as copies write them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

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
