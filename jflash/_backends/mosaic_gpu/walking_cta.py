"""CTAs of the backward that walk over tiles for each head of a group: their loops over copies, and sums of each head.

Where rows are keys, the warpgroup that copies brings tiles of queries and dO, with row statistics and a bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import pipeline, row_statistics
from jflash._backends.mosaic_gpu.cta import Cta
from jflash._backends.mosaic_gpu.tma_inputs import GmemTile
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.tile.gradient_sums import SummingPlan
from jflash._backends.nvidia.walk.backward_schedule import WorkItem
from jflash._backends.nvidia.walk.tile_order import TileOrder


class WalkingCta[Plan: SummingPlan](Cta[Plan]):
    """A CTA that has a block of keys or queries, and walks over tiles of the others for each head of a group."""

    item: WorkItem
    order: TileOrder

    @property
    def sum_rows(self) -> Any:
        """The rows in device memory of which this warpgroup sums parameters' gradients."""
        raise NotImplementedError

    def finish_head(self, head: Any, carry: Any) -> Any:
        """Store a head's sums, the second of what a walk carries, and let them begin anew."""
        acc, totals, *others = carry
        self.plan.sums.store(self.refs.results, totals, self.item.batch, self.item.first_head + head, self.sum_rows)
        return acc, self.plan.sums.zeros(self.ops), *others

    def copy_each(self, copy: Callable[[Array, Array], None], axis: str = "block", more: int = 0) -> None:
        """Call `copy(step, count)` for all steps, of which a head has `count`, and for `more`.

        `axis` is one of the grid, by whose index CTAs differ.
        """
        # The same number for the loop and for its remainders: with one head, they are no divisions then.
        count = pipeline.opaque(self.order.tiles.count, axis)
        lax.fori_loop(0, count * self.order.heads + more, lambda step, _: copy(step, count), None)


class KeysCta[Plan: SummingPlan](WalkingCta[Plan]):
    """A CTA that has a block of keys, or one after the other, and walks over tiles of queries."""

    first_key: Any
    block_size: int
    """Keys of a block."""
    k: Ref
    v: Ref
    """Shared memory for the block's keys and values."""

    @property
    def key_rows(self) -> Any:
        """The block's rows of keys, in device memory."""
        return pl.ds(self.first_key, self.block_size)

    @property
    def key_tile(self) -> GmemTile:
        """The block's keys in device memory."""
        return GmemTile(self.item.batch, self.first_key, self.block_size, self.item.key_head)

    def copy_queries(
        self, axis: str = "block", early: int = 1, then: Callable[[Array], None] = lambda step: None, more: int = 0
    ) -> None:
        """Copy every tile of queries and dO, and call `then` after each.

        Args:
          axis: the axis of the grid by whose index CTAs differ.
          early: how many of the row statistics come with the queries; the others come with dO.
          then: what is called after each tile, and for `more` steps while the last ones are read.
        """

        def take(step: Array, count: Array) -> None:
            pl.when(step < count * self.order.heads)(lambda: self._copy_tile(step, count, early))
            then(step)

        self.copy_each(take, axis, more)

    def _copy_tile(self, step: Array, count: Array, early: int) -> None:
        shared, inputs = self.smem, self.inputs
        stages, queries = shared.q.tiles.shape[:2]
        slot = lax.rem(step, stages)
        group_head, index = self.order.at(step, count)
        batch, head, first = self.item.batch, self.item.first_head + group_head, self.order.tiles.start(index)
        rows, tile = pl.ds(first, queries), GmemTile(batch, first, queries, head)

        def copy_statistics(some: list[tuple[int, Ref]], full: Ref) -> None:
            for number, source in some:
                plgpu.copy_gmem_to_smem(source, shared.statistics.at[number * stages + slot], full)

        plgpu.barrier_wait(shared.q.empty.at[slot])
        full = shared.q.full.at[slot]
        inputs.copy_rows("query", tile, shared.q.tiles.at[slot], full)
        statistics = list(enumerate(row_statistics.in_device_memory(inputs, batch, head, rows)))
        copy_statistics(statistics[:early], full)
        if shared.bias is not None:
            bias = inputs.part("bias", batch, head).at[rows, self.key_rows]
            plgpu.copy_gmem_to_smem(bias, shared.bias.at[slot], full)
        plgpu.barrier_wait(shared.do.empty.at[slot])
        full = shared.do.full.at[slot]
        inputs.copy_rows("d_out", tile, shared.do.tiles.at[slot], full)
        copy_statistics(statistics[early:], full)
