"""The order in which CTAs of the fused backward add to dQ: any, or one, so that every run rounds the same sums.

In one order, a tile of queries gets the additions of the blocks of keys that see it as these blocks begin. They are
neighbours, where ranges say what is seen. So a block waits for no other than the one before it, and with that for all.

A warpgroup counts a step when what it added in it has arrived. The warpgroup of the next block that adds to the same
numbers knows from the other's range which step that is, and waits until so many are counted. It counts and waits while
the matrix unit makes the product that it adds next: an addition has a step's time to arrive.

CTAs wait for none but those whose tickets come before theirs, so that every wait ends (`dq_accumulator`).

Source: FlashAttention-3, arXiv:2407.08608; its code has a semaphore for each tile of queries instead.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jflash._backends.mosaic_gpu.dq_accumulator import LINE, Place
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.tiles import FusedTiles
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.tile_order import InTurn
from jflash._semantics.spec import Spec


def suits(spec: Spec) -> bool:
    """Return whether the blocks of keys that see a tile of queries are neighbours, and each block's tiles a range."""
    return not facts_of(spec).has_lists and "query_segments" not in spec.operands


class AnyOrder:
    """Additions in any order."""

    def end(self) -> None:
        """Wait until what this warpgroup added in the step before has arrived, and count that step."""

    def count(self) -> None:
        """Count a step, of which what this warpgroup added has arrived."""

    def await_turn(self, head: Any, first: Any) -> None:
        """Wait until this warpgroup may add to a tile of one of the head group's heads, whose first query is given."""


@dataclasses.dataclass(frozen=True)
class OneOrder(AnyOrder):
    """Additions of one CTA after those of the one before it, which its work item's CTA of the last ticket is.

    Each warpgroup that computes has a counter, which is one more than the steps whose additions have arrived.
    """

    schedule: BackwardSchedule
    tile: FusedTiles
    ops: WarpgroupOps
    counters: Ref
    """The counters of all CTAs."""
    place: Place
    warpgroup: Any
    before: InTurn
    """The order of the tiles of the CTA before this one; it has none if this one is the first."""

    @staticmethod
    def size(schedule: BackwardSchedule) -> int:
        """Return how many numbers the counters of all CTAs take."""
        return schedule.waves * schedule.blocks * schedule.items * FusedTiles.warpgroups * LINE

    def end(self) -> None:
        if not self.tile.adds_registers:
            plgpu.wait_smem_to_gmem(0)
        self.count()

    def count(self) -> None:
        self.ops.signal(self._counter(self.place.block, self.warpgroup))

    def await_turn(self, head: Any, first: Any) -> None:
        tiles = self.before.tiles
        distance, size = first - tiles.start(0), tiles.size
        is_visited = (distance >= 0) & (distance < tiles.count * size)
        step = self.before.step(head, lax.div(distance, size))
        adds = lax.rem(step, FusedTiles.warpgroups) if self.tile.dq_alternates else self.warpgroup
        before = jnp.maximum(self.place.block - 1, 0)
        # What is made of a step is added in the next one, before which the steps up to it were counted.
        self.ops.wait_until(self._counter(before, adds), jnp.where(is_visited, step + 3, 0))

    def _counter(self, block: Any, warpgroup: Any) -> Ref:
        """Return the counter of a warpgroup of this CTA's work item, by the place of its CTA."""
        schedule, (wave, _, item) = self.schedule, self.place
        number = (wave * schedule.items + item) * schedule.blocks + block
        return self.counters.at[(number * FusedTiles.warpgroups + warpgroup) * LINE]
