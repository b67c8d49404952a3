"""dQ of the fused backward: CTAs add to accumulators in device memory, and some of them round what is complete.

An accumulator is a head's dQ in float32. When all CTAs of its work item have added to it, it is rounded, and zeroed for
another work item. So accumulators stay in the cache, and few more of them exist than are in use. Who rounds depends on
the number of CTAs.

`RoundedByLast`, of short sequences: a work item has few CTAs and few rows, so its last CTA rounds them all, right after
the last addition, and reads nothing that left the cache. Accumulators exist for about twice as many CTAs as the device
runs at once. A CTA waits where the accumulators that it adds to were not rounded since the wave that had them before.

`RoundedLater`, of long sequences, of which the last CTA would round for longer than others compute: a CTA waits for its
first tiles when it begins, and its producer waits for the other warpgroups to be done with tiles. In that time they
round a share of what was accumulated `lag` waves before, and zero it. After the last wave, `lag` more waves do nothing
else. Accumulators exist for 2 lag waves: when a wave begins, the one that had its place was rounded by the wave `lag`
before it, for which it waits anyway. 1.5 to 2 times as many CTAs as the device runs at once begin between those that a
CTA waits for and itself, so that it seldom waits.

Every wait ends, whatever the order in which CTAs begin: a CTA's place in the grid is a ticket that it draws when it
begins, so that all CTAs of earlier waves have begun, and CTAs wait for none but those. Decoupled look-back (Merrill and
Garland, 2016) has the same device.

A partial call's dQ is not rounded (`DqAccumulator`). Its accumulators are the result: they exist for all waves, and no
CTA waits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.tiles import FusedTiles
from jflash._backends.nvidia.launch import Refs
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule, WorkItem

LINE = 32
"""Counters in a line of the cache: CTAs that poll one should not delay those that increment another."""


class Place(NamedTuple):
    """A CTA's place in the grid; `item` is the number of its work item in the wave."""

    wave: Any
    block: Any
    item: Any


class Layout(NamedTuple):
    """How the numbers of an accumulator lie in device memory."""

    columns: int
    """Whole blocks, which may be more columns than dQ has."""
    in_order_of_sums: bool
    """Whether they are in the order of `threads.sums`, or in that of rows."""


@dataclasses.dataclass(frozen=True)
class DqAccumulator:
    """What one CTA does with the accumulators, where it rounds nothing."""

    schedule: BackwardSchedule
    ops: WarpgroupOps
    refs: Refs
    """The kernel's, of which these are read:

    arrays: `dq_acc`, the accumulators `[accumulators, L, columns]`, where L is a multiple of 64, and columns are whole
      blocks; `counters`, the next ticket and what CTAs tell each other of each work item.
    results: `d_query`, `[B, L, N, H]`; not in a partial call.
    smem: `numbers`, one for each warpgroup that computes, and `finished`, a barrier of them all.
    """
    scale: float
    """The factor between what is accumulated and dQ."""
    place: Place
    copies: Any
    """Tiles of queries that this CTA visits."""
    layout: Layout

    spare: ClassVar = 0
    """Shares that the producer rounds when there is nothing left to copy."""

    @staticmethod
    def lag(schedule: BackwardSchedule) -> int:
        """Return how many waves there are that only round."""
        return 0

    @staticmethod
    def waves_with_room(schedule: BackwardSchedule) -> int:
        """Return for how many waves accumulators exist."""
        return schedule.waves

    @staticmethod
    def counters(schedule: BackwardSchedule) -> int:
        """Return how many counters are needed; the first one is the next ticket."""
        return 1

    @classmethod
    def accumulators(cls, schedule: BackwardSchedule) -> int:
        """Return for how many heads of queries accumulators exist."""
        return cls.waves_with_room(schedule) * schedule.items * schedule.heads

    @property
    def adds(self) -> Any:
        """Whether this CTA has keys."""
        return self.lag(self.schedule) == 0 or self.place.wave < self.schedule.waves

    def target(self, head: Any, rows: Any, columns: Any) -> Ref:
        """Return rows and columns of the accumulator of one of the head group's heads."""
        return self._acc(self.place.wave, head).at[rows, columns]

    def begin(self, warpgroup: Any) -> None:
        """Prepare a warpgroup that computes for its first addition."""

    def after_copy(self, index: Any) -> None:
        """Let the producer round something after a copy."""

    def finish(self, warpgroup: Any) -> None:
        """Note that what a warpgroup added has arrived."""

    def finish_copies(self) -> None:
        """Note that the producer is done."""

    @property
    def _row_tiles(self) -> int:
        """Tiles of 64 rows of a head; the last may lack some."""
        return pl.cdiv(self.refs.results["d_query"].shape[1], WARPGROUP_ROWS)

    def _acc(self, wave: Any, head: Any) -> Ref:
        """Return the accumulator of a head that this CTA's place in a wave has."""
        place = lax.rem(wave, self.waves_with_room(self.schedule)) * self.schedule.items + self.place.item
        return self.refs.arrays["dq_acc"].at[place * self.schedule.heads + head]

    def _round_rows(self, item: WorkItem, wave: Any, head: Any, rows: Any) -> None:
        """Round rows of what this CTA's place accumulated in a wave, for one of the work item's heads."""
        columns, in_order_of_sums = self.layout
        dq, acc = self.refs.results["d_query"], self._acc(wave, head).at[rows, pl.ds(0, columns)]
        total = self.ops.load_strided(acc)
        rounded, query_head = (total * self.scale).astype(dq.dtype), item.first_head + head
        if in_order_of_sums:
            self.ops.store_sums(dq.at[item.batch, :, query_head], rounded, rows.start)
        elif dq.shape[1] % WARPGROUP_ROWS or dq.shape[3] < columns:
            self.ops.store_strided(dq.at[item.batch, :, query_head], rounded, rows.start)
        else:
            dq[item.batch, rows, query_head] = rounded
        if self.waves_with_room(self.schedule) < self.schedule.waves:
            # Each thread overwrites what it has read.
            acc[...] = self.ops.zeros_strided(total.shape)


@dataclasses.dataclass(frozen=True)
class RoundedByLast(DqAccumulator):
    """What one CTA does where a work item's last CTA rounds. Its warpgroups count apart, and round every other tile.

    A work item has a counter of finished CTAs for each warpgroup, and one of those that have rounded their tiles.
    """

    _COUNTERS = FusedTiles.warpgroups + 1

    @staticmethod
    def waves_with_room(schedule: BackwardSchedule) -> int:
        assert schedule.room is not None
        return schedule.room

    @staticmethod
    def counters(schedule: BackwardSchedule) -> int:
        return (1 + schedule.waves * schedule.items * RoundedByLast._COUNTERS) * LINE

    def begin(self, warpgroup: Any) -> None:
        """Wait for room for what is added."""
        earlier = self.place.wave - self.waves_with_room(self.schedule)
        pl.when(earlier >= 0)(lambda: self._wait(earlier))

    def finish(self, warpgroup: Any) -> None:
        """Wait for the other warpgroup's additions; the work item's last CTA then rounds every other tile."""
        self._wait_for_other()
        wave, heads, every = self.place.wave, self.schedule.heads, FusedTiles.warpgroups
        number_of_warpgroup = self.refs.smem.numbers.at[pl.ds(1 + warpgroup, 1)]
        number = self.ops.take_number(self._counter(wave, warpgroup), number_of_warpgroup)

        @pl.when(number == self.schedule.blocks - 1)
        def _() -> None:
            item, tiles = self.schedule.item(wave, self.place.item), self._row_tiles * heads

            def round_tile(index: Any, _: None) -> None:
                tile = warpgroup + index * every
                rows = pl.ds(lax.div(tile, heads) * WARPGROUP_ROWS, WARPGROUP_ROWS)
                self._round_rows(item, wave, lax.rem(tile, heads), rows)

            lax.fori_loop(0, lax.div(tiles - warpgroup + every - 1, every), round_tile, None)
            self.ops.signal(self._counter(wave, every))

    def _wait_for_other(self) -> None:
        plgpu.barrier_arrive(self.refs.smem.finished)
        plgpu.barrier_wait(self.refs.smem.finished)

    def _wait(self, wave: Any) -> None:
        """Wait until both warpgroups have rounded what this CTA's place accumulated in a wave."""
        self.ops.wait_for(self._counter(wave, FusedTiles.warpgroups), FusedTiles.warpgroups)

    def _counter(self, wave: Any, number: Any) -> Ref:
        """Return a counter of this CTA's work item in a wave."""
        place = (wave * self.schedule.items + self.place.item) * self._COUNTERS
        return self.refs.arrays["counters"].at[(1 + place + number) * LINE]


@dataclasses.dataclass(frozen=True)
class RoundedLater(DqAccumulator):
    """What one CTA does where CTAs of later waves round.

    A work item has a counter of the warpgroups that have finished. A tile of 64 rows is rounded in shares.
    """

    spare: ClassVar = 3

    @staticmethod
    def lag(schedule: BackwardSchedule) -> int:
        # When a wave begins, the last CTAs of the one before are always still at work.
        return min(schedule.waves, schedule.lag)

    @staticmethod
    def waves_with_room(schedule: BackwardSchedule) -> int:
        return min(schedule.waves, 2 * RoundedLater.lag(schedule))

    @staticmethod
    def counters(schedule: BackwardSchedule) -> int:
        return (1 + schedule.waves * schedule.items) * LINE

    def begin(self, warpgroup: Any) -> None:
        """Round what the copies leave no time for."""
        self._wait()
        # The last one comes first: the first is still at the copies of the block's keys.
        first = lax.div(self._beside_copies, self._portion) + FusedTiles.warpgroups - 1 - warpgroup
        self._round(first, self._tiles * (self._shares // self._portion), self._portion, FusedTiles.warpgroups)

    def after_copy(self, index: Any) -> None:
        """Round a share of a tile: the producer has registers for 8 numbers a thread."""
        pl.when(index == 0)(self._wait)
        self._round(index, jnp.minimum(index + 1, self._beside_copies))

    def finish(self, warpgroup: Any) -> None:
        self.finish_copies()

    def finish_copies(self) -> None:
        self.ops.signal(self._finished(self.place.wave))

    @property
    def _is_early(self) -> Any:
        """Whether nothing is to be rounded yet."""
        return self.place.wave < self.lag(self.schedule)

    @property
    def _earlier_wave(self) -> Any:
        return jnp.maximum(self.place.wave - self.lag(self.schedule), 0)

    def _finished(self, wave: Any) -> Ref:
        """Return the counter of this CTA's work item in a wave."""
        return self.refs.arrays["counters"].at[(1 + wave * self.schedule.items + self.place.item) * LINE]

    @property
    def _tiles_of_cta(self) -> int:
        """Tiles of 64 rows of each head that fall to a CTA, if as many are left."""
        return pl.cdiv(self._row_tiles, self.schedule.blocks)

    @property
    def _tiles(self) -> Any:
        """How many tiles this CTA rounds."""
        left = self._row_tiles - self.place.block * self._tiles_of_cta
        return jnp.where(self._is_early, 0, jnp.clip(left, 0, self._tiles_of_cta) * self.schedule.heads)

    @property
    def _shares(self) -> int:
        """Shares of a tile: as many numbers as 8 for each thread, or what comes out even; sums are stored by twos."""
        numbers = {rows: rows * self.layout.columns for rows in (64, 32, 16, 8)}
        for_all_threads = 256 if self.layout.in_order_of_sums else 128
        even = (rows for rows, size in numbers.items() if size <= 1024 and size % for_all_threads == 0)
        return WARPGROUP_ROWS // next(even, 16)

    @property
    def _portion(self) -> int:
        """Shares that a warpgroup that computes takes at once: 32 numbers for each thread, or a tile."""
        return min(self._shares, 4)

    @property
    def _beside_copies(self) -> Any:
        """How many shares are rounded one by one, after each copy and after them all."""
        shares = jnp.minimum(self.copies + self.spare, self._tiles * self._shares)
        return jnp.where(self.adds, lax.div(shares, self._portion) * self._portion, 0)

    def _wait(self) -> None:
        """Wait until what is rounded here is accumulated, and there is room for what is added."""
        # The producer counts too.
        everyone = self.schedule.blocks * (FusedTiles.warpgroups + 1)
        wait = lambda: self.ops.wait_for(self._finished(self._earlier_wave), everyone)
        pl.when(~self._is_early)(wait)

    def _round(self, first: Any, last: Any, portion: int = 1, every: int = 1) -> None:
        """Round some of this CTA's shares of all heads of an earlier work item, a portion at once."""
        portions, heads = self._shares // portion, self.schedule.heads
        first_tile, size = self.place.block * self._tiles_of_cta, WARPGROUP_ROWS // portions

        def round_rows(index: Any, _: None) -> None:
            number = first + index * every
            tile = lax.div(number, portions)
            row = (first_tile + lax.div(tile, heads)) * WARPGROUP_ROWS + lax.rem(number, portions) * size
            item, head = self.schedule.item(self._earlier_wave, self.place.item), lax.rem(tile, heads)
            self._round_rows(item, self._earlier_wave, head, pl.ds(row, size))

        lax.fori_loop(0, lax.div(last - first + every - 1, every), round_rows, None)


def unrounded(schedule: BackwardSchedule, acc: Float[Array, "accumulators L H"]) -> Float[Array, "B L N H"]:
    """Return a partial call's dQ, from its accumulators."""
    by_group = acc.reshape(-1, schedule.batch, schedule.heads, *acc.shape[1:])
    return by_group.transpose(1, 3, 0, 2, 4).reshape(schedule.batch, acc.shape[1], -1, acc.shape[2])
