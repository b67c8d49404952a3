"""dQ of short sequences: the last CTA of a work item rounds it.

A work item has few CTAs, and few rows. So one of them rounds them all, right after the last addition, and nothing is
read that left the cache. Waves are small, so that few accumulators exist: for about twice as many CTAs as the device
runs at once. Of long sequences the last CTA would round for longer than others compute.

A CTA waits where the accumulators that it adds to were not rounded since the wave that had them before. That wave's
CTAs have begun, as a CTA's place in the grid is a ticket that it draws when it begins; and they wait for none but
earlier ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jflash._backends.mosaic_gpu.dq_accumulator import LINE, DqAccumulator
from jflash._backends.mosaic_gpu.tiles import FusedTiles
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule

_COUNTERS = FusedTiles.warpgroups + 1
"""Of a work item: for each warpgroup of a CTA how many CTAs are done, and how many have rounded their part."""


@dataclasses.dataclass(frozen=True)
class RoundedByLast(DqAccumulator):
    """What one CTA does with the accumulators. Its warpgroups count each for itself, and round every other tile."""

    @staticmethod
    def waves_with_room(schedule: BackwardSchedule) -> int:
        """The waves for which accumulators exist."""
        assert schedule.room is not None
        return schedule.room

    @staticmethod
    def counters(schedule: BackwardSchedule) -> int:
        """The next ticket, and those of each work item, in a cache line each."""
        return (1 + schedule.waves * schedule.items * _COUNTERS) * LINE

    def begin(self, warpgroup: Any) -> None:
        """Wait for room for what is added."""
        earlier = self.wave - self.waves_with_room(self.schedule)
        pl.when(earlier >= 0)(lambda: self._wait(earlier))

    def finish(self, warpgroup: Any) -> None:
        """Wait for the other warpgroup's additions; the work item's last CTA then rounds every other tile."""
        self._wait_for_other()
        own_number = self.refs.smem.numbers.at[pl.ds(1 + warpgroup, 1)]
        number = self.ops.take_number(self._counter(self.wave, warpgroup), own_number)

        @pl.when(number == self.schedule.blocks - 1)
        def _() -> None:
            item, every = self.schedule.item(self.wave, self.item), FusedTiles.warpgroups
            tiles = self._row_tiles * self.schedule.heads

            def round_tile(index: Any, _: None) -> None:
                tile = warpgroup + index * every
                rows = pl.ds(lax.div(tile, self.schedule.heads) * WARPGROUP_ROWS, WARPGROUP_ROWS)
                self._round_rows(item, self.wave, lax.rem(tile, self.schedule.heads), rows)

            lax.fori_loop(0, lax.div(tiles - warpgroup + every - 1, every), round_tile, None)
            self.ops.signal(self._counter(self.wave, FusedTiles.warpgroups))

    def _wait(self, wave: Any) -> None:
        """Until both parts of what this CTA's place accumulated in a wave are rounded."""
        self.ops.wait_for(self._counter(wave, FusedTiles.warpgroups), FusedTiles.warpgroups)

    def _wait_for_other(self) -> None:
        """Until what the other warpgroup added is there too."""
        finished = self.refs.smem.finished
        plgpu.barrier_arrive(finished)
        plgpu.barrier_wait(finished)

    def _counter(self, wave: Any, number: Any) -> Ref:
        """Of this CTA's work item in a wave."""
        return self.refs.counters.at[(1 + (wave * self.schedule.items + self.item) * _COUNTERS + number) * LINE]
