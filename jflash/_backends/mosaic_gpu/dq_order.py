"""The order in which CTAs of the fused backward add to dQ: any, or one, so that every run rounds the same sums.

In one order, a tile of queries gets the additions of the blocks of keys that see it as these blocks begin. They are
neighbours, where ranges say what is seen. So a block waits for no other than the one before it, and with that for all.

    warpgroups that compute, in iteration n        producer, when they have read tile n
      wait until what they added in n - 1 arrived    wait for "arrived n"
      arrive at "arrived n"                          count it for other CTAs, and beside that wait until the CTA before
      multiply dS K of step n - 1                      has counted enough for step n
      wait for "turn n - 1"                          arrive at "turn n"
      add the product to dQ

What is added in an iteration has the next one to arrive. To count and to wait take as long as device memory, each about
half an iteration; warpgroups that compute do neither. The CTA before has counted enough when its step that added to the
same tile has arrived: which step that is follows from its range.

CTAs wait for none but those whose tickets come before theirs, so that every wait ends (`dq_accumulator`).

Source: FlashAttention-3, arXiv:2407.08608; its code has a semaphore for each tile of queries instead.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jflash._backends.mosaic_gpu import smem
from jflash._backends.mosaic_gpu.dq_accumulator import LINE, Place
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.tiles import FusedTiles
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import Buffers
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.tile_order import InTurn
from jflash._semantics.spec import Spec


def suits(spec: Spec) -> bool:
    """Return whether the blocks of keys that see a tile of queries are neighbours, and each block's tiles a range."""
    return not facts_of(spec).has_lists and "query_segments" not in spec.operands


class AnyOrder:
    """Additions in any order."""

    def end(self, number: Any) -> None:
        """Wait until what this warpgroup added has arrived, and note it; in each iteration, and after the last."""

    def arrive(self, number: Any) -> None:
        """Note that what this warpgroup added has arrived, in the iteration of this number."""

    def await_turn(self, step: Any) -> None:
        """Wait until this warpgroup may add what it makes of a step; not if there is no such step."""

    def follow(self, number: Any) -> None:
        """Do the producer's part: it calls this after the copies of each step, and `more` times past the last step."""

    @property
    def more(self) -> int:
        """The number of calls of `follow` past the last step."""
        return 0


@dataclasses.dataclass(frozen=True)
class OneOrder(AnyOrder):
    """Additions of one CTA after those of the one before it, which its work item's CTA of the last ticket is."""

    schedule: BackwardSchedule
    ops: WarpgroupOps
    counters: Ref
    """The counters of all CTAs, which are two more than the steps whose additions have arrived."""
    smem: Buffers
    place: Place
    order: InTurn
    before: InTurn
    """The order of the tiles of the CTA before this one; it has none if this one is the first."""

    @staticmethod
    def barriers(tile: FusedTiles) -> dict[str, Any]:
        """Return barriers by name: `turn` of one step, and `arrived`, which warpgroups reach ahead of the producer."""
        return dict(turn=smem.barriers(1), arrived=smem.barriers(tile.stages + 1, arrivals=tile.warpgroups))

    @staticmethod
    def size(schedule: BackwardSchedule) -> int:
        """Return how many numbers the counters of all CTAs take."""
        return schedule.waves * schedule.blocks * schedule.items * LINE

    def end(self, number: Any) -> None:
        plgpu.wait_smem_to_gmem(0)
        self.arrive(number)

    def arrive(self, number: Any) -> None:
        plgpu.barrier_arrive(self._arrived(number))

    def await_turn(self, step: Any) -> None:
        pl.when(step >= 0)(lambda: plgpu.barrier_wait(self.smem.turn.at[0]))

    def follow(self, number: Any) -> None:
        steps, read = self.order.tiles.count * self.order.heads, number - self._stages

        @pl.when((number >= steps) & (read < steps))
        def _() -> None:
            # As a copy would.
            slot = lax.rem(number, self._stages)
            plgpu.barrier_wait(self.smem.q.empty.at[slot])
            plgpu.barrier_wait(self.smem.do.empty.at[slot])

        @pl.when(read >= 0)
        def _() -> None:
            plgpu.barrier_wait(self._arrived(read))
            counter, before = self.counter(self.place.block), self.counter(jnp.maximum(self.place.block - 1, 0))
            self.ops.count_and_wait(counter, before, jnp.where(read < steps, self.least(read), 0))
            pl.when(read < steps)(lambda: plgpu.barrier_arrive(self.smem.turn.at[0]))

    @property
    def more(self) -> int:
        return self._stages + 2

    def least(self, step: Any) -> Int[Array, ""]:
        """Return what the CTA before counts when what it adds to a step's tile has arrived; 0 if it adds nothing."""
        head, index = self.order.at(step, jnp.maximum(self.order.tiles.count, 1))
        tiles = self.before.tiles
        distance, size = self.order.tiles.start(index) - tiles.start(0), tiles.size
        is_visited = (distance >= 0) & (distance < tiles.count * size)
        return jnp.where(is_visited, self.before.step(head, lax.div(distance, size)) + 3, 0)

    def counter(self, block: Any) -> Ref:
        """Return the counter of a CTA of this work item, by the CTA's place."""
        schedule, (wave, _, item) = self.schedule, self.place
        number = (wave * schedule.items + item) * schedule.blocks + block
        return self.counters.at[number * LINE]

    @property
    def _stages(self) -> int:
        return self.smem.q.tiles.shape[0]

    def _arrived(self, number: Any) -> Ref:
        return self.smem.arrived.at[lax.rem(number, self._stages + 1)]
