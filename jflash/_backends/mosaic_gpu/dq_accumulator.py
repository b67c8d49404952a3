"""dQ of the fused backward: CTAs add to accumulators in device memory, which some of them round.

An accumulator, a head's dQ in float32, is rounded when all CTAs of its work item have added to it, and zeroed for
another one. So accumulators stay in the cache, and few more of them exist than are in use. Who rounds depends on how
many CTAs there are: `rounded_by_last`, `rounded_later`.

A partial call's dQ is not rounded. Its accumulators are the result: they exist for all waves, and no CTA waits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule, WorkItem

LINE = 32
"""Counters in a line of the cache: CTAs that poll one should not delay those that increment another."""


class DqRefs(NamedTuple):
    """Device memory of all CTAs, and shared memory."""

    acc: Ref
    """The accumulators, `[accumulators, L, columns]`; L is a multiple of 64, and there are whole blocks of columns."""
    counters: Ref
    """The next ticket, and what CTAs tell each other of each work item."""
    dq: Ref
    """The result, `[B, L, N, H]`; `None` in a partial call."""
    smem: Buffers
    """Of shared memory `numbers`, one for each warpgroup that computes, and `finished`, a barrier of them all."""


@dataclasses.dataclass(frozen=True)
class DqAccumulator:
    """What one CTA does with the accumulators; this one rounds nothing."""

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
    columns: int
    """Of an accumulator: whole blocks, which may be more columns than dQ has."""
    in_order_of_sums: bool
    """Whether an accumulator's numbers are in the order of `device_sums`, or in that of rows."""

    @staticmethod
    def lag(schedule: BackwardSchedule) -> int:
        """How many waves there are that only round."""
        return 0

    @staticmethod
    def waves_with_room(schedule: BackwardSchedule) -> int:
        """The waves for which accumulators exist."""
        return schedule.waves

    @staticmethod
    def counters(schedule: BackwardSchedule) -> int:
        """How many are needed; the first one is the next ticket."""
        return 1

    @classmethod
    def accumulators(cls, schedule: BackwardSchedule) -> int:
        """The heads of queries for which accumulators exist."""
        return cls.waves_with_room(schedule) * schedule.items * schedule.heads

    @property
    def adds(self) -> Any:
        """Whether this CTA has keys."""
        return self.lag(self.schedule) == 0 or self.wave < self.schedule.waves

    @property
    def spare(self) -> int:
        """Parts that the producer rounds when there is nothing left to copy."""
        return 0

    def target(self, head: Any, rows: Any, columns: Any) -> Ref:
        """A part of the accumulator of one of the head group's heads."""
        return self._acc(self.wave, head).at[rows, columns]

    def begin(self, warpgroup: Any) -> None:
        """For a warpgroup that computes, before it adds."""

    def after_copy(self, index: Any) -> None:
        """For the producer, after each copy."""

    def finish(self, warpgroup: Any) -> None:
        """For a warpgroup that computes: what it added is there."""

    def finish_copies(self) -> None:
        """For the producer, after the last copy."""

    @property
    def _row_tiles(self) -> int:
        """Tiles of 64 rows of a head; the last may lack some."""
        return pl.cdiv(self.refs.dq.shape[1], WARPGROUP_ROWS)

    def _acc(self, wave: Any, head: Any) -> Ref:
        """Of this CTA's place in a wave."""
        place = lax.rem(wave, self.waves_with_room(self.schedule)) * self.schedule.items + self.item
        return self.refs.acc.at[place * self.schedule.heads + head]

    def _round_rows(self, item: WorkItem, wave: Any, head: Any, rows: Any) -> None:
        """Round rows of what this CTA's place accumulated in a wave, for one of the work item's heads."""
        acc = self._acc(wave, head).at[rows, pl.ds(0, self.columns)]
        total = self.ops.load_strided(acc)
        rounded = (total * self.scale).astype(self.refs.dq.dtype)
        if self.in_order_of_sums:
            self.ops.store_sums(self.refs.dq.at[item.batch, :, item.first_head + head], rounded, rows.start)
        elif self.refs.dq.shape[1] % WARPGROUP_ROWS or self.refs.dq.shape[3] < self.columns:
            self.ops.store_strided(self.refs.dq.at[item.batch, :, item.first_head + head], rounded, rows.start)
        else:
            self.refs.dq[item.batch, rows, item.first_head + head] = rounded
        if self.waves_with_room(self.schedule) < self.schedule.waves:
            # Each thread overwrites what it has read.
            acc[...] = self.ops.zeros_strided(total.shape)


def unrounded(schedule: BackwardSchedule, acc: Float[Array, "accumulators L H"]) -> Float[Array, "B L N H"]:
    """A partial call's dQ, from its accumulators."""
    by_group = acc.reshape(-1, schedule.batch, schedule.heads, *acc.shape[1:])
    return by_group.transpose(1, 3, 0, 2, 4).reshape(schedule.batch, acc.shape[1], -1, acc.shape[2])
