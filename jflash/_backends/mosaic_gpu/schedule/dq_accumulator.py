"""dQ of the fused backward: CTAs add to accumulators in device memory, and CTAs of later waves round them.

A CTA waits for its first tiles when it begins, and its producer waits for the other warpgroups to be done with tiles.
In that time they round a share of what earlier CTAs accumulated, and zero the accumulators for later ones. So
accumulators stay in the cache, and few more of them exist than are in use.

What was accumulated `lag` waves before is rounded; after the last wave, `lag` more waves do nothing else. Accumulators
exist for 2 lag waves: when a wave begins, the one that had its place was rounded by the wave `lag` before it, for which
it waits anyway.

A wait is short, or none: about twice as many CTAs as the device runs at once begin between those that a CTA waits for
and itself. It ends, whatever the order in which CTAs begin: a CTA's place in the grid is a ticket that it draws when it
begins, so all CTAs of earlier waves have begun (decoupled look-back, Merrill and Garland, 2016, has the same device).

A partial call's dQ is not rounded. Its accumulators are the result: they exist for all waves, and no CTA waits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Ref, WarpgroupOps
from jflash._backends.mosaic_gpu.schedule.backward_schedule import BackwardSchedule, WorkItem
from jflash._backends.mosaic_gpu.schedule.tiles import FusedTiles

SPARE = 3
"""Parts that the producer can round while the other warpgroups are at the last tiles."""

_LINE = 32
"""Counters in a line of the cache: CTAs that poll one should not delay those that increment another."""


def lag(schedule: BackwardSchedule) -> int:
    """When a wave begins, the last CTAs of the one before are always still at work."""
    return 0 if schedule.partial else min(schedule.waves, 2)


def waves_with_room(schedule: BackwardSchedule) -> int:
    """The waves for which accumulators exist."""
    return schedule.waves if schedule.partial else min(schedule.waves, 2 * lag(schedule))


def accumulators(schedule: BackwardSchedule) -> int:
    """The heads of queries for which accumulators exist."""
    return waves_with_room(schedule) * schedule.items * schedule.heads


def counters(schedule: BackwardSchedule) -> int:
    """The next ticket, and a counter for each work item, in a cache line each."""
    return (1 + schedule.waves * schedule.items) * _LINE


def unrounded(schedule: BackwardSchedule, acc: Float[Array, "accumulators L H"]) -> Float[Array, "B L N H"]:
    """A partial call's dQ, from its accumulators."""
    by_group = acc.reshape(-1, schedule.batch, schedule.heads, *acc.shape[1:])
    return by_group.transpose(1, 3, 0, 2, 4).reshape(schedule.batch, acc.shape[1], -1, acc.shape[2])


class DqRefs(NamedTuple):
    """Device memory of all CTAs."""

    acc: Ref
    """The accumulators, `[accumulators, L, H]`; L is a multiple of 64."""
    counters: Ref
    """The next ticket, and of each work item how many warpgroups have finished."""
    dq: Ref
    """The result, `[B, L, N, H]`; `None` in a partial call."""


@dataclasses.dataclass(frozen=True)
class DqAccumulator:
    """What one CTA does with the accumulators."""

    schedule: BackwardSchedule
    ops: WarpgroupOps
    refs: DqRefs
    scale: float
    """What is accumulated is multiplied with it when it is rounded."""
    wave: Any
    block: Any
    item: Any
    """The CTA's work item, of its wave."""
    copies: Any
    """Tiles of queries that this CTA visits."""

    @property
    def adds(self) -> Any:
        """Whether this CTA has keys."""
        return self.wave < self.schedule.waves

    def target(self, head: Any, rows: Any, columns: Any) -> Ref:
        """A part of the accumulator of one of the head group's heads."""
        return self._acc(self.wave, head).at[rows, columns]

    @property
    def spare(self) -> int:
        """Parts that the producer rounds when there is nothing left to copy."""
        return 0 if self.schedule.partial else SPARE

    def begin(self, warpgroup: Any) -> None:
        """For a warpgroup that computes, before it adds: round what the copies leave no time for."""
        if self.schedule.partial:
            return
        self._wait()
        # The last one comes first: the first is still at the copies of the block's keys.
        first = lax.div(self._beside_copies, self._portion) + FusedTiles.warpgroups - 1 - warpgroup
        self._round(first, self._tiles * (self._parts // self._portion), self._portion, FusedTiles.warpgroups)

    def after_copy(self, index: Any) -> None:
        """For the producer: round a part of a tile, as it has registers for 8 numbers a thread."""
        if self.schedule.partial:
            return
        pl.when(index == 0)(self._wait)
        self._round(index, jnp.minimum(index + 1, self._beside_copies))

    def finish(self) -> None:
        """A warpgroup has rounded its share, and what it added is there."""
        if not self.schedule.partial:
            self.ops.signal(self._finished(self.wave))

    @property
    def _is_early(self) -> Any:
        """Whether nothing is to be rounded yet."""
        return self.wave < lag(self.schedule)

    @property
    def _earlier_wave(self) -> Any:
        return jnp.maximum(self.wave - lag(self.schedule), 0)

    @property
    def _earlier(self) -> WorkItem:
        """The work item that is rounded: all heads of its group, and of their rows a part by each block's CTA."""
        return self.schedule.item(self._earlier_wave, self.item)

    def _finished(self, wave: Any) -> Ref:
        """The counter of this CTA's work item in a wave."""
        return self.refs.counters.at[(1 + wave * self.schedule.items + self.item) * _LINE]

    def _acc(self, wave: Any, head: Any) -> Ref:
        """Of this CTA's place in a wave."""
        place = lax.rem(wave, waves_with_room(self.schedule)) * self.schedule.items + self.item
        return self.refs.acc.at[place * self.schedule.heads + head]

    @property
    def _share(self) -> int:
        """Tiles of 64 rows of each head that fall to a CTA, if there are as many left."""
        return -(-self.refs.dq.shape[1] // (self.schedule.blocks * WARPGROUP_ROWS))

    @property
    def _tiles(self) -> Any:
        """How many tiles this CTA rounds."""
        left = self.refs.dq.shape[1] // WARPGROUP_ROWS - self.block * self._share
        return jnp.where(self._is_early, 0, jnp.clip(left, 0, self._share) * self.schedule.heads)

    @property
    def _parts(self) -> int:
        """Of a tile: as many numbers as 8 for each thread, or what comes out even."""
        numbers = {rows: rows * self.refs.dq.shape[3] for rows in (64, 32, 16, 8)}
        even = (rows for rows, size in numbers.items() if size <= 1024 and size % 128 == 0)
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
            self._round_rows(lax.rem(tile, self.schedule.heads), pl.ds(row, size))

        lax.fori_loop(0, lax.div(last - first + every - 1, every), round_rows, None)

    def _round_rows(self, head: Any, rows: Any) -> None:
        acc = self._acc(self._earlier_wave, head).at[rows, pl.ds(0, self.refs.dq.shape[3])]
        total = self.ops.load_strided(acc)
        earlier = self._earlier
        rounded = (total * self.scale).astype(self.refs.dq.dtype)
        self.refs.dq[earlier.batch, rows, earlier.first_head + head] = rounded
        if waves_with_room(self.schedule) < self.schedule.waves:
            # Each thread overwrites what it has read.
            acc[...] = self.ops.zeros_strided(total.shape)
