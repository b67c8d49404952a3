"""Constants of the schedules' models, fitted to measurements on one H200.

`PACES`: times of the forward with 2, 3 and 4 warpgroups, causal and full, at head dim 64 with 128 to 16,384 tokens; at
80, 96 and 112 on one H100 with 256 to 16,384, of which 8 divides some, so that three warpgroups are taken where they
were faster.
The others: 12 calls at head dims 64 and 128, each measured with up to 10 schedules. With these values the schedule that
the model chooses is the fastest measured, or on average 0.7% slower.
"""

from __future__ import annotations

from collections.abc import Mapping

Pace = Mapping[tuple[int, int], tuple[float, float]]
"""By warpgroups and keys of a tile: microseconds of one multiprocessor that 64 rows take for 128 keys, and to begin and
end."""

PACES: Mapping[int, Pace] = {
    64: {(2, 128): (0.61, 0.52), (3, 128): (0.48, 0.55), (4, 64): (0.59, 0.35)},
    80: {(2, 128): (0.66, 1.2), (3, 112): (0.58, 1.7), (3, 64): (0.68, 1.2)},
    96: {(2, 128): (0.64, 1.5), (3, 96): (0.62, 1.1), (3, 64): (0.78, 1.0)},
    112: {(2, 128): (0.98, 1.9), (3, 96): (0.78, 3.1), (3, 64): (0.98, 2.0)},
}
"""By the columns of tiles: of 64 for all that are narrower."""
LONGER_WHERE_UNTIMED = 1.06
"""How much longer three warpgroups are taken to need with options that were not timed since they take turns: as much as
they needed without."""
KEYS_OF_THREE_WARPGROUPS = {80: 112, 96: 96, 112: 96}
"""By the columns of tiles, above 64: the most keys for which three warpgroups have registers."""

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
BEGIN_BY_OUTPUT_PARTS = (0.6, 1.0, 1.5)
"""Likewise for two warpgroups, by the parts in which the output leaves from a buffer of its own. 0: it takes the place
of the queries, and the next item's queries wait for it, which takes half of what several items save."""
