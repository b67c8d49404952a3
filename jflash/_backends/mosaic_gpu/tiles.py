"""The shapes of the kernels' tiles: what a tuned choice is made of."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from jflash._backends.nvidia.smem import WARPGROUP_ROWS, round_up


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Tiles of a kernel whose CTAs own rows of queries, 64 for each warpgroup that computes.

    `stages` are tiles of keys in shared memory together; of the bias, in the kernel that makes its gradient.
    """

    warpgroups: int
    keys: int
    stages: int

    @property
    def rows(self) -> int:
        """Query rows of one CTA's tile."""
        return WARPGROUP_ROWS * self.warpgroups

    def missing(self, rows: int) -> int:
        """Return how many of its rows the first of a head's blocks lacks, of `rows` in all.

        Not the last block: where queries see what is before them, the first has least to do.
        """
        return -round_up(rows, WARPGROUP_ROWS) % self.rows


@dataclasses.dataclass(frozen=True)
class DqTiles(RowTiles):
    """Tiles of the kernel that makes dQ alone; values are needed for a shorter time than keys."""

    value_stages: int


@dataclasses.dataclass(frozen=True)
class FusedTiles:
    """Tiles of the fused backward, of 64 keys for each of two warpgroups that compute."""

    queries: int
    stages: int
    """Tiles of queries that are in shared memory together."""
    columns_of_statistics: bool = True
    """Whether products subtract row statistics, where a call has them as columns; or else registers do."""
    dq_alternates: bool = False
    """Whether a warpgroup makes dQ of every other tile, or a half of each tile's."""
    adds_registers: bool = False
    """Whether dQ is added to device memory from registers, of which a warpgroup has whole rows, or by copies from
    shared memory."""
    warpgroups: ClassVar = 2
    keys: ClassVar = 2 * WARPGROUP_ROWS

    @property
    def halves(self) -> Literal["rows", "columns"] | None:
        """How a tile's dQ is halved, if it is: the matrix unit wants 64 rows at least."""
        if self.dq_alternates:
            return None
        return "rows" if self.queries == 2 * WARPGROUP_ROWS else "columns"

    def columns(self, dim: int) -> int:
        """Return the columns of tiles of queries, keys and values: they, or half of them, are whole swizzles."""
        return round_up(dim, 16 if self.dq_alternates else 32)


@dataclasses.dataclass(frozen=True)
class ShortTiles(FusedTiles):
    """Tiles of the fused backward of short sequences, of 64 queries, with some blocks of keys together."""

    queries: int = WARPGROUP_ROWS
    stages: int = 2
    key_stages: int = 1


@dataclasses.dataclass(frozen=True)
class WideTiles(RowTiles):
    """Tiles of the forward of wide heads, with chunks of tiles of keys; `stages` are those of values, of 64 keys."""

    value_keys: ClassVar[int] = 64

    chunk_slots: int
    """Chunks of tiles of keys that are in shared memory together."""

    @property
    def value_tiles(self) -> int:
        """Tiles of values for one of keys."""
        return self.keys // self.value_keys


@dataclasses.dataclass(frozen=True)
class WalkedTiles:
    """Tiles of the backward of wide heads, of `size` keys or queries, which CTAs with 64 rows of the others visit."""

    size: int
    stages: int
    """Tiles that are weighed, and in shared memory together."""
    chunk_slots: int
    """Chunks of the other tiles that are in shared memory together."""
