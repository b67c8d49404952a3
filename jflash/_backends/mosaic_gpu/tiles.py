"""The shapes of the kernels' tiles, what a tuned choice is made of; and how long the forward takes with them.

How the paces were measured: examples/benchmarks/experiments/2026-11-22-forward-schedule.md and, for three warpgroups,
2026-11-26-forward-turns.md.
"""

from __future__ import annotations

import dataclasses
import itertools
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
    """Microseconds of one multiprocessor that tiles of one shape take."""

    visit: float
    """For 64 rows and 128 keys."""
    item: float
    """For 64 rows of a work item, beside its visits."""
    beginning: float
    """For a CTA to begin and end."""


PACES: Mapping[int, Mapping[tuple[int, int], Pace]] = {
    64: {(2, 128): Pace(0.592, 0.49, 2.1), (3, 128): Pace(0.455, 0.45, 4.0), (4, 64): Pace(0.54, 0.28, 2.5)},
    80: {(2, 128): Pace(0.610, 0.74, 2.1), (3, 112): Pace(0.504, 0.82, 3.3), (3, 64): Pace(0.591, 0.63, 2.7)},
    96: {(2, 128): Pace(0.621, 0.92, 2.1), (3, 96): Pace(0.555, 0.68, 2.7), (3, 64): Pace(0.639, 0.65, 2.7)},
    112: {(2, 128): Pace(0.700, 1.27, 2.1), (3, 96): Pace(0.623, 1.18, 2.7), (3, 64): Pace(0.741, 0.93, 2.7)},
    128: {(2, 128): Pace(0.682, 1.05, 2.1)},
    192: {(2, 64): Pace(1.00, 1.55, 1.5)},
    256: {(2, 64): Pace(1.253, 2.20, 1.8)},
}
"""Paces by the columns of tiles, and by their warpgroups and keys; they serve tiles of fewer columns too."""
ALONE = 0.8
"""The part of a step of all warpgroups that a step of one of them takes: while it waits for a product, none works."""
SAVED_IN_PLACE = 0.6
"""The part of a beginning that a further item saves where the output leaves from the queries' place: the next item's
queries wait for it."""
LONGER_WHERE_UNTIMED = 1.06
"""How much longer three warpgroups are taken to need with options that were not timed since they take turns."""
KEYS_OF_THREE_WARPGROUPS = {80: 112, 96: 96, 112: 96}
"""The most keys for which three warpgroups have registers, by the columns of tiles above 64."""


def block_times(tile: RowTiles, rows: int, visits: Visits, pace: Pace) -> list[float]:
    """Return how many microseconds each block of queries takes, of a head with `rows` in all."""
    count, absent = tile.warpgroups, tile.missing(rows) // WARPGROUP_ROWS
    if tile.rows > tile.keys:
        # Each warpgroup leaves out what its own rows do not see.
        visited = [0] * absent + list(visits(WARPGROUP_ROWS, tile.keys))
    else:
        visited = [number for number in visits(tile.rows, tile.keys) for _ in range(count)]
        visited[:absent] = [0] * absent

    def time(numbers: Sequence[int]) -> float:
        """Return how long a block takes whose warpgroups visit these numbers of tiles."""
        falling, least = sorted(numbers, reverse=True), ALONE * count
        steps = itertools.pairwise((*falling, 0))
        visit = sum((more - fewer) * max(at_work, least) for at_work, (more, fewer) in enumerate(steps, 1))
        return pace.visit * tile.keys / 128 * visit + pace.item * max(count - falling.count(0), least)

    return [time(visited[first : first + count]) for first in range(0, len(visited), count)]
