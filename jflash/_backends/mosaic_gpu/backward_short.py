"""Backward, fused, of short sequences: a CTA has all queries and keys of a head, and dQ stays in shared memory.

    dQ = 0                                            each thread's own numbers
    for each block of keys:
      dK, dV, dQ += ...                               as `fused_cta` has them
      store dK, dV                                    while the next block's keys are copied
    store dQ

Where several query heads share keys, a CTA has all of those. Each sum has one order, so `deterministic` asks for no
other kernel. CTAs take one work item after the other, and the producer is ahead of what is stored.

A head's dQ in float32 has to fit beside the tiles: 512 rows of 64 columns, 256 of 96, 128 of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import pipeline, row_statistics
from jflash._backends.mosaic_gpu.backward_short_plan import ShortPlan
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.query_producer import QueryProducer
from jflash._backends.mosaic_gpu.query_walk import FusedCta, Step
from jflash._backends.nvidia.launch import Refs
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile.base2 import sums_scale
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_order import TileOrder


def backward(plan: ShortPlan, arrays: Mapping[str, Array], ops: WarpgroupOps) -> dict[str, Array]:
    """Launch the kernel; d_query, d_key, d_value, and the sums of each wanted parameter's gradient `[B, N, L]`."""
    return plan.tables.launch(plan.launch, lambda refs: _Cta(plan, refs, ops).run(), arrays, ops)


class _Cta(FusedCta[ShortPlan]):
    first_step: Any
    """Blocks of keys before the work item."""
    slot: Any
    """The place of a block's keys and values."""

    def __init__(self, plan: ShortPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops, keys_first=True)
        self.ds, self.gradients, self.rounded_dq = refs.smem.ds_gradients

    def compute(self) -> None:
        """Walk over each block of keys of each work item."""
        shared = self.smem
        pipeline.split_registers(self.plan.tile.warpgroups, copies=False)
        pipeline.release(shared.q.empty, shared.do.empty, shared.kv_empty)
        if shared.ones is not None:
            plgpu.barrier_wait(shared.ones_full)
        self._each_item(self._compute_item)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy(self) -> None:
        """Copy what each block of keys needs."""
        shared = self.smem
        pipeline.split_registers(self.plan.tile.warpgroups, copies=True)
        self.copy_ones(shared.ones_full)
        self._each_item(lambda: self._each_block(self._copy_block))
        pipeline.drain(shared.q.empty, shared.do.empty, shared.kv_empty)

    def _each_item(self, visit: Callable[[], None]) -> None:
        cta, ctas = lax.axis_index("cta"), self.plan.ctas

        def take(index: Array, _: None) -> None:
            self.item, self.first_step = self.plan.item(cta + index * ctas), index * self.plan.blocks
            visit()

        lax.fori_loop(0, lax.div(self.plan.items - cta + ctas - 1, ctas), take, None)

    def _each_block(self, visit: Callable[[], None]) -> None:
        plan = self.plan

        def take(block: Array, _: None) -> None:
            self.first_key = block * plan.tile.keys
            self.slot = lax.rem(self.first_step + block, plan.tile.key_stages)
            self.k, self.v = (ref.at[pl.ds(self.slot, 1)] for ref in (self.smem.k, self.smem.v))
            sizes = plan.tile.keys, plan.tile.queries
            tiles = tile_range.visited(self.inputs, self.item.batch, block, *sizes, alignment=WARPGROUP_ROWS)
            self.order = TileOrder(plan.spec, tiles, plan.heads, block, by_head=bool(plan.wanted))
            visit()

        lax.fori_loop(0, plan.blocks, take, None)

    def _copy_block(self) -> None:
        plgpu.barrier_wait(self.smem.kv_empty.at[self.slot])
        pl.when(self.order.tiles.count > 0)(lambda: self.copy_keys(self.smem.kv_full.at[self.slot]))
        keys, early = pl.ds(self.first_key, self.plan.tile.keys), row_statistics.early(self.plan.spec)
        QueryProducer(self.inputs, self.order, self.item, keys, early, axis="cta").copy_all(self.smem)

    def _compute_item(self) -> None:
        self._each_part(self._zero)
        self._each_block(self._compute_block)
        self._wait_for_copies()
        self._each_part(self._store_part)

    def _wait_for_copies(self) -> None:
        """Until what both warpgroups store has left shared memory, where something else takes its place."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.smem.finished)
        plgpu.barrier_wait(self.smem.finished)

    def _compute_block(self) -> None:
        shared = self.smem
        self._wait_for_copies()
        plgpu.barrier_arrive(shared.ds_empty.at[0])
        pl.when(self.order.tiles.count > 0)(lambda: plgpu.barrier_wait(shared.kv_full.at[self.slot]))
        acc = self.visit_all()
        plgpu.barrier_arrive(shared.kv_empty.at[self.slot])
        self.store_rounded(acc)

    def turn(self, step: Any, at: Step) -> Any:
        """From tile to tile: each block of keys adds to what the same warpgroup's threads have."""
        return self._tile(at)

    def dq_target(self, at: Step) -> Any:
        """This warpgroup's part of the step's tile."""
        tile, every = self._tile(at), self.plan.tile.warpgroups
        return self.smem.acc_dq.at[tile * every + self.warpgroup if self.plan.tile.halves else tile]

    def add_to_dq(self, target: Any, part: Float[Array, "rows columns"]) -> None:
        """Each thread to its own numbers, as it alone reads them."""
        target[...] = self.ops.load(target) + part

    def _tile(self, at: Step) -> Any:
        """The number of a step's tile, among those of all heads."""
        return at.head * self.plan.tiles + lax.div(at.eighth, WARPGROUP_ROWS // 8)

    def _each_part(self, visit: Callable[[Any, Any], None]) -> None:
        """`visit(number, part)` for this warpgroup's parts of dQ, every other one."""
        every = self.plan.tile.warpgroups
        number, more = divmod(self.plan.dq_parts, every)
        if more:
            number = jnp.where(self.warpgroup < more, number + 1, number)
        lax.fori_loop(0, number, lambda number, _: visit(number, number * every + self.warpgroup), None)

    def _zero(self, _: Any, part: Any) -> None:
        acc = self.smem.acc_dq.at[part]
        acc[...] = self.ops.full(acc.shape, 0)

    def _store_part(self, number: Any, part: Any) -> None:
        """Issue a copy of it."""
        plan, result = self.plan, self.refs.results["d_query"]
        slots = self.rounded_dq.shape[1]
        rounded = self.rounded_dq.at[self.warpgroup, lax.rem(number, slots)]
        dq = self.ops.load(self.smem.acc_dq.at[part]) * sums_scale(plan.spec)
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        rounded[...] = dq.astype(result.dtype)
        plgpu.commit_smem()
        tile, columns = part, pipeline.columns(plan.dq_width, result, self.item.batch)
        if plan.tile.halves:
            tile, columns = number, pl.ds(self.warpgroup * plan.dq_width, plan.dq_width)
        head, rows = self.item.first_head + lax.div(tile, plan.tiles), lax.rem(tile, plan.tiles) * WARPGROUP_ROWS
        pipeline.copy_out(rounded, result.at[self.item.batch, pl.ds(rows, WARPGROUP_ROWS), head, columns])
