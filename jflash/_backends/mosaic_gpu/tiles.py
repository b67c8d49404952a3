"""The shapes of the kernels' tiles, what a tuned choice is made of; and how long the forward takes with them.

How the paces were measured: examples/benchmarks/experiments/2026-11-22-forward-schedule.md and, for three warpgroups,
2026-11-26-forward-turns.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

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
    """Whether dQ is added to device memory from registers, which have whole rows, or by copies from shared memory."""
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


Visits = Callable[[int, int], Sequence[int]]
"""Takes (rows, keys) to how many tiles of `keys` keys each block of `rows` rows visits, the first rows' first."""


class Pace(NamedTuple):
    """Microseconds of one multiprocessor that 64 rows take with tiles of one shape."""

    visit: float
    """For 128 keys."""
    item: float
    """For a work item, beside its visits."""
    alone: float = 0.0
    """For each warpgroup without rows in a block of which only one has rows: it takes part in every step as well."""


PACES: Mapping[int, Mapping[tuple[int, int], Pace]] = {
    64: {(2, 128): Pace(0.61, 0.52), (3, 128): Pace(0.45, 0.55, 0.6), (4, 64): Pace(0.59, 0.35, 0.3)},
    80: {(2, 128): Pace(0.58, 0.88), (3, 112): Pace(0.46, 1.04), (3, 64): Pace(0.63, 0.48, 0.4)},
    96: {(2, 128): Pace(0.56, 1.02), (3, 96): Pace(0.50, 0.78), (3, 64): Pace(0.66, 0.42, 0.8)},
    112: {(2, 128): Pace(0.69, 1.18), (3, 96): Pace(0.58, 1.32, 0.1), (3, 64): Pace(0.90, 0.56, 1.0)},
}
"""Paces by the columns of tiles, and by their warpgroups and keys; those of 64 serve all that are narrower."""
BEGINNINGS = {2: 2.1, 3: 4.3, 4: 2.7}
"""Microseconds that a CTA takes to begin and end, by its warpgroups."""
LONGER_WHERE_UNTIMED = 1.06
"""How much longer three warpgroups are taken to need with options that were not timed since they take turns."""
KEYS_OF_THREE_WARPGROUPS = {80: 112, 96: 96, 112: 96}
"""The most keys for which three warpgroups have registers, by the columns of tiles above 64."""


def block_times(tile: RowTiles, rows: int, visits: Visits, pace: Pace) -> list[float]:
    """Return how many microseconds each block of queries takes, of a head with `rows` in all."""
    visit, item, alone = pace
    absent = tile.missing(rows) // WARPGROUP_ROWS
    present = tile.warpgroups - absent
    if tile.rows > tile.keys:
        # Each warpgroup leaves out what its own rows do not see.
        visited = visits(WARPGROUP_ROWS, tile.keys)
    else:
        each = visits(tile.rows, tile.keys)
        visited = [count for count in each for _ in range(tile.warpgroups)][absent:]
    times = [visit * tile.keys / 128 * count + item for count in visited]
    # The others wait for some of what a warpgroup without rows would have done.
    first, rest = sum(times[:present]) * (1 + 0.6 * absent / present), times[present:]
    first += alone * absent * (present == 1)
    return [first, *(sum(rest[at : at + tile.warpgroups]) for at in range(0, len(rest), tile.warpgroups))]
