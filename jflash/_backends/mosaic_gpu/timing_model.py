"""How long the forward's blocks and CTAs take: a model fitted to measurements, by which tiles and schedules are chosen.

How the constants were found: examples/benchmarks/experiments/2026-11-22-forward-schedule.md and, for three warpgroups,
2026-11-26-forward-turns.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jflash._backends.mosaic_gpu.tiles import RowTiles
from jflash._backends.nvidia.smem import WARPGROUP_ROWS

Visits = Callable[[int, int], Sequence[int]]
"""Takes (rows, keys) to how many tiles of `keys` keys each block of `rows` rows visits, the first rows' first."""

Pace = Mapping[tuple[int, int], tuple[float, float]]
"""By warpgroups and keys of a tile: microseconds of one multiprocessor that 64 rows take for 128 keys, and to begin and
end."""

PACES: Mapping[int, Pace] = {
    64: {(2, 128): (0.61, 0.52), (3, 128): (0.48, 0.55), (4, 64): (0.59, 0.35)},
    80: {(2, 128): (0.66, 1.2), (3, 112): (0.58, 1.7), (3, 64): (0.68, 1.2)},
    96: {(2, 128): (0.64, 1.5), (3, 96): (0.62, 1.1), (3, 64): (0.78, 1.0)},
    112: {(2, 128): (0.98, 1.9), (3, 96): (0.78, 3.1), (3, 64): (0.98, 2.0)},
}
"""Paces by the columns of tiles; those of 64 serve all that are narrower."""
LONGER_WHERE_UNTIMED = 1.06
"""How much longer three warpgroups are taken to need with options that were not timed since they take turns."""
KEYS_OF_THREE_WARPGROUPS = {80: 112, 96: 96, 112: 96}
"""The most keys for which three warpgroups have registers, by the columns of tiles above 64."""

ITEM = 0.3
"""How long a work item takes beside its tiles; this and what follows in visits to a tile of keys."""
SPREAD = 0.05
"""How much longer the slowest multiprocessor takes than the fastest."""
CACHE = 10 * 2**20
"""Bytes of keys and values, of all heads at work, that are read at full speed."""
MISSES = 0.0008 / 2**20
"""The part of the time that every byte beyond `CACHE` adds."""

WORTH = 1.025
"""A schedule with several items a CTA, or more head groups, is taken where a call takes so much longer without it."""
ENOUGH = 1.006
"""Among those within this of the best, the first is taken."""

BEGIN_THREE_WARPGROUPS = 3.0
"""How long a CTA takes to begin and end: three warpgroups wait for the slowest."""
BEGIN_BY_STORES = (0.6, 1.0, 1.5)
"""How long a CTA of two warpgroups takes to begin and end, by the stores in which its output leaves. With none it takes
the place of the queries, and the next item's queries wait for it, which takes half of what several items save."""


def block_times(tile: RowTiles, rows: int, visits: Visits, pace: Pace) -> list[float]:
    """Return how many microseconds each block of queries takes, of a head with `rows` in all."""
    visit, beginning = pace[tile.warpgroups, tile.keys]
    absent = tile.missing(rows) // WARPGROUP_ROWS
    present = tile.warpgroups - absent
    if tile.rows > tile.keys:
        # Each warpgroup leaves out what its own rows do not see.
        visited = visits(WARPGROUP_ROWS, tile.keys)
    else:
        each = visits(tile.rows, tile.keys)
        visited = [count for count in each for _ in range(tile.warpgroups)][absent:]
    times = [visit * tile.keys / 128 * count + beginning for count in visited]
    # The others wait for some of what a warpgroup without rows would have done.
    first, rest = sum(times[:present]) * (1 + 0.6 * absent / present), times[present:]
    return [first, *(sum(rest[at : at + tile.warpgroups]) for at in range(0, len(rest), tile.warpgroups))]
