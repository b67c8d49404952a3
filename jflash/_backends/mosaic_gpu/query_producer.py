"""The producer of backward kernels whose CTAs own keys: it copies tiles of queries ahead of who computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import pipeline, row_statistics
from jflash._backends.mosaic_gpu.tma_inputs import GmemTile, TmaInputs
from jflash._backends.nvidia.smem import Buffers
from jflash._backends.nvidia.walk.backward_schedule import WorkItem
from jflash._backends.nvidia.walk.tile_order import TileOrder


@dataclasses.dataclass(frozen=True)
class QueryProducer:
    """The producer of a backward by blocks of keys: it copies tiles ahead of the warpgroups that compute."""

    inputs: TmaInputs
    order: TileOrder
    item: WorkItem
    keys: Any
    """The block's own keys."""
    early: int = 1
    """How many of the row statistics come with the queries; the others come with dO."""
    axis: str = "block"
    """Of the grid, by whose index CTAs differ."""

    def copy_all(self, smem: Buffers, then: Callable[[Array], None] = lambda step: None, more: int = 0) -> None:
        """Copy every tile; `then` is called after each, and for `more` steps while the last ones are read."""
        # The same number for the loop and for its remainders: with one head, they are no divisions then.
        count = pipeline.opaque(self.order.tiles.count, self.axis)

        def take(step: Array, _: None) -> None:
            pl.when(step < count * self.order.heads)(lambda: self._copy(smem, step, count))
            then(step)

        lax.fori_loop(0, count * self.order.heads + more, take, None)

    def _copy(self, smem: Buffers, step: Array, count: Array) -> None:
        stages, queries = smem.q.tiles.shape[:2]
        slot = lax.rem(step, stages)
        own_head, index = self.order.at(step, count)
        batch, head, first = self.item.batch, self.item.first_head + own_head, self.order.tiles.start(index)
        rows = pl.ds(first, queries)
        tile = GmemTile(batch, first, queries, head)
        plgpu.barrier_wait(smem.q.empty.at[slot])
        full = smem.q.full.at[slot]
        self.inputs.copy_rows("query", tile, smem.q.tiles.at[slot], full)
        statistics = list(enumerate(row_statistics.parts(self.inputs, batch, head, rows)))
        for number, source in statistics[: self.early]:
            plgpu.copy_gmem_to_smem(source, smem.statistics.at[number * stages + slot], full)
        if smem.bias is not None:
            bias = self.inputs.part("bias", batch, head).at[rows, self.keys]
            plgpu.copy_gmem_to_smem(bias, smem.bias.at[slot], full)
        plgpu.barrier_wait(smem.do.empty.at[slot])
        full = smem.do.full.at[slot]
        self.inputs.copy_rows("d_out", tile, smem.do.tiles.at[slot], full)
        for number, source in statistics[self.early :]:
            plgpu.copy_gmem_to_smem(source, smem.statistics.at[number * stages + slot], full)
