"""The producer of both backwards by blocks of keys: it copies tiles of queries ahead of the warpgroups that compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu.hardware import Buffers, pipeline
from jflash._backends.mosaic_gpu.inputs import GmemTile, KernelInputs, row_statistics
from jflash._backends.mosaic_gpu.schedule.backward_schedule import WorkItem
from jflash._backends.mosaic_gpu.schedule.tile_order import TileOrder


@dataclasses.dataclass(frozen=True)
class QueryProducer:
    """The tiles of one block of keys, in its order."""

    inputs: KernelInputs
    order: TileOrder
    item: WorkItem
    keys: Any
    """The block's own keys."""

    def copy_all(self, smem: Buffers, then: Callable[[Array], None] = lambda step: None, more: int = 0) -> None:
        """Copy every tile; `then` is called after each, and for `more` steps while the last ones are read."""
        # The same number for the loop and for its remainders: with one head, they are no divisions then.
        count = pipeline.opaque(self.order.tiles.count, "block")

        def take(step: Array, _: None) -> None:
            pl.when(step < count * self.order.heads)(lambda: self._copy(smem, step, count))
            then(step)

        lax.fori_loop(0, count * self.order.heads + more, take, None)
        pipeline.drain(smem.q_empty, smem.do_empty)

    def _copy(self, smem: Buffers, step: Array, count: Array) -> None:
        stages, queries = smem.q.shape[:2]
        slot = lax.rem(step, stages)
        own_head, index = self.order.at(step, count)
        batch, head, first = self.item.batch, self.item.first_head + own_head, self.order.tiles.start(index)
        rows = pl.ds(first, queries)
        tile = GmemTile(batch, first, queries, head)
        plgpu.barrier_wait(smem.q_empty.at[slot])
        full = smem.q_full.at[slot]
        self.inputs.copy_rows("query", tile, smem.q.at[slot], full)
        early, *late = row_statistics.parts(self.inputs, batch, head, rows)
        plgpu.copy_gmem_to_smem(early, smem.statistics.at[slot], full)
        if smem.bias is not None:
            bias = self.inputs.part("bias", batch, head).at[rows, self.keys]
            plgpu.copy_gmem_to_smem(bias, smem.bias.at[slot], full)
        plgpu.barrier_wait(smem.do_empty.at[slot])
        full = smem.do_full.at[slot]
        self.inputs.copy_rows("d_out", tile, smem.do.at[slot], full)
        for number, source in enumerate(late, 1):
            plgpu.copy_gmem_to_smem(source, smem.statistics.at[number * stages + slot], full)
