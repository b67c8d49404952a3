"""dQ of long sequences: CTAs of later waves round it.

A CTA waits for its first tiles when it begins, and its producer waits for the other warpgroups to be done with tiles.
In that time they round a share of what earlier CTAs accumulated, and zero the accumulators for later ones.

What was accumulated `lag` waves before is rounded; after the last wave, `lag` more waves do nothing else. Accumulators
exist for 2 lag waves: when a wave begins, the one that had its place was rounded by the wave `lag` before it, for which
it waits anyway.

A wait is short, or none: 1.5 to 2 times as many CTAs as the device runs at once begin between those that a CTA waits
for and itself. It ends, whatever the order in which CTAs begin: a CTA's place in the grid is a ticket that it draws
when it begins, so all CTAs of earlier waves have begun (decoupled look-back, Merrill and Garland, 2016, has the same
device).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jflash._backends.mosaic_gpu.dq_accumulator import LINE, DqAccumulator
from jflash._backends.mosaic_gpu.tiles import FusedTiles
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule, WorkItem

SPARE = 3
"""Parts that the producer can round while the other warpgroups are at the last tiles."""


@dataclasses.dataclass(frozen=True)
class RoundedLater(DqAccumulator):
    """What one CTA does with the accumulators."""

    @staticmethod
    def lag(schedule: BackwardSchedule) -> int:
        """When a wave begins, the last CTAs of the one before are always still at work."""
        return min(schedule.waves, schedule.lag)

    @staticmethod
    def waves_with_room(schedule: BackwardSchedule) -> int:
        """The waves for which accumulators exist."""
        return min(schedule.waves, 2 * RoundedLater.lag(schedule))

    @staticmethod
    def counters(schedule: BackwardSchedule) -> int:
        """The next ticket, and for each work item how many warpgroups have finished, in a cache line each."""
        return (1 + schedule.waves * schedule.items) * LINE

    @property
    def spare(self) -> int:
        """Parts that the producer rounds when there is nothing left to copy."""
        return SPARE

    def begin(self, warpgroup: Any) -> None:
        """Round what the copies leave no time for."""
        self._wait()
        # The last one comes first: the first is still at the copies of the block's keys.
        first = lax.div(self._beside_copies, self._portion) + FusedTiles.warpgroups - 1 - warpgroup
        self._round(first, self._tiles * (self._parts // self._portion), self._portion, FusedTiles.warpgroups)

    def after_copy(self, index: Any) -> None:
        """Round a part of a tile, as the producer has registers for 8 numbers a thread."""
        pl.when(index == 0)(self._wait)
        self._round(index, jnp.minimum(index + 1, self._beside_copies))

    def finish(self, warpgroup: Any) -> None:
        """It has rounded its share too."""
        self.ops.signal(self._finished(self.wave))

    def finish_copies(self) -> None:
        """It has rounded its share."""
        self.ops.signal(self._finished(self.wave))

    @property
    def _is_early(self) -> Any:
        """Whether nothing is to be rounded yet."""
        return self.wave < self.lag(self.schedule)

    @property
    def _earlier_wave(self) -> Any:
        return jnp.maximum(self.wave - self.lag(self.schedule), 0)

    @property
    def _earlier(self) -> WorkItem:
        """The work item that is rounded: all heads of its group, and of their rows a part by each block's CTA."""
        return self.schedule.item(self._earlier_wave, self.item)

    def _finished(self, wave: Any) -> Ref:
        """The counter of this CTA's work item in a wave."""
        return self.refs.counters.at[(1 + wave * self.schedule.items + self.item) * LINE]

    @property
    def _share(self) -> int:
        """Tiles of 64 rows of each head that fall to a CTA, if there are as many left."""
        return pl.cdiv(self._row_tiles, self.schedule.blocks)

    @property
    def _tiles(self) -> Any:
        """How many tiles this CTA rounds."""
        left = self._row_tiles - self.block * self._share
        return jnp.where(self._is_early, 0, jnp.clip(left, 0, self._share) * self.schedule.heads)

    @property
    def _parts(self) -> int:
        """Of a tile: as many numbers as 8 for each thread, or what comes out even; sums are stored by twos."""
        numbers = {rows: rows * self.columns for rows in (64, 32, 16, 8)}
        for_all_threads = 256 if self.in_order_of_sums else 128
        even = (rows for rows, size in numbers.items() if size <= 1024 and size % for_all_threads == 0)
        return WARPGROUP_ROWS // next(even, 16)

    @property
    def _portion(self) -> int:
        """Parts that a warpgroup that computes takes at once: 32 numbers for each thread, or a tile."""
        return min(self._parts, 4)

    @property
    def _beside_copies(self) -> Any:
        """How many parts are rounded one by one, after each copy and after them all."""
        parts = jnp.minimum(self.copies + self.spare, self._tiles * self._parts)
        return jnp.where(self.adds, lax.div(parts, self._portion) * self._portion, 0)

    def _wait(self) -> None:
        """Until what is rounded here is accumulated, and there is room for what is added."""
        # The producer counts too.
        everyone = self.schedule.blocks * (FusedTiles.warpgroups + 1)
        wait = lambda: self.ops.wait_for(self._finished(self._earlier_wave), everyone)
        pl.when(~self._is_early)(wait)

    def _round(self, first: Any, last: Any, portion: int = 1, every: int = 1) -> None:
        """Some of this CTA's parts, a portion at once."""
        parts = self._parts // portion
        first_tile = self.block * self._share
        size = WARPGROUP_ROWS // parts

        def round_rows(index: Any, _: None) -> None:
            number = first + index * every
            tile = lax.div(number, parts)
            row = (first_tile + lax.div(tile, self.schedule.heads)) * WARPGROUP_ROWS + lax.rem(number, parts) * size
            self._round_rows(self._earlier, self._earlier_wave, lax.rem(tile, self.schedule.heads), pl.ds(row, size))

        lax.fori_loop(0, lax.div(last - first + every - 1, every), round_rows, None)
