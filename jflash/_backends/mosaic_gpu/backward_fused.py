"""Backward, fused: a CTA owns some keys, and adds what it makes of dQ to accumulators in device memory.

`fused_cta` says what it makes. The additions to dQ come in any order; `backward_dq` and `backward_dkv` are the backward
in which every sum has one order, `backward_dkv_dq` that of float32 with 128 columns, and `backward_short` that of short
sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import dq_accumulator, pipeline, row_statistics
from jflash._backends.mosaic_gpu.array_shapes import whole_dims
from jflash._backends.mosaic_gpu.backward_fused_plan import FusedPlan
from jflash._backends.mosaic_gpu.dq_accumulator import DqRefs
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.query_producer import QueryProducer
from jflash._backends.mosaic_gpu.query_walk import Accumulators, FusedCta, Step
from jflash._backends.nvidia.launch import Refs
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.threads import sums
from jflash._backends.nvidia.tile.base2 import sums_scale
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_order import TileOrder


def backward(plan: FusedPlan, arrays: Mapping[str, Array], dq_acc: Array, ops: WarpgroupOps) -> dict[str, Array]:
    """Launch the kernel; d_query, d_key, d_value, and for each parameter wanted the sums of its gradient `[B, N, L]`.

    `dq_acc` holds zeros.
    """
    schedule = plan.schedule
    states = dict(dq_acc=dq_acc, counters=jnp.zeros(plan.dq.counters(schedule), jnp.int32), **plan.tables.zeros())
    made, written = plan.launch.update(lambda refs: _Cta(plan, refs, ops).run(), arrays, states, ops)
    of_keys = schedule.summed(plan.spec, made, whole_dims(plan.spec))
    if schedule.partial:
        acc = written["dq_acc"][:, :, : plan.acc_columns]
        acc = sums.as_rows(acc) if plan.tile.adds_registers else acc
        d_query = dq_accumulator.unrounded(schedule, acc) * sums_scale(plan.spec)
    else:
        d_query = made["d_query"]
    return made | of_keys | plan.tables.totals(written) | dict(d_query=d_query)


class _Cta(FusedCta[FusedPlan]):
    first_sum: Any
    """Where sums of dK and dV begin in device memory."""
    dq_columns: Any
    """The columns of dQ that a warpgroup makes; it finds them when it begins to compute."""

    def __init__(self, plan: FusedPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops, keys_first=True)
        k_dk, v_dv = tuple(refs.smem.k_dk), tuple(refs.smem.v_dv)
        self.k, self.v, self.ds = k_dk[0], v_dv[0], refs.smem.ds
        self.gradients = k_dk[-1], v_dv[-1]
        place = wave, block, item = self._take_ticket()
        key_block, split = plan.schedule.split(block)
        self.item, self.first_key = plan.schedule.item(wave, item), key_block * plan.tile.keys
        self.first_sum = block * plan.tile.keys
        tiles = tile_range.visited(self.inputs, self.item.batch, key_block, plan.tile.keys, plan.tile.queries)
        tiles = tiles.part(split, plan.schedule.splits)
        heads = plan.schedule.heads
        self.order = TileOrder(plan.spec, tiles, heads, block, by_head=bool(plan.wanted))
        dq_refs = DqRefs(refs.arrays["dq_acc"], refs.arrays["counters"], refs.results.get("d_query"), refs.smem)
        sizes = plan.acc_columns, plan.tile.adds_registers
        self.dq = plan.dq(plan.schedule, ops, dq_refs, sums_scale(plan.spec), *place, tiles.count * heads, *sizes)

    def _take_ticket(self) -> tuple[Any, Any, Any]:
        """The CTA's wave, block and work item. CUDA promises no order in which CTAs begin, and a CTA waits for those of
        earlier waves: so its place is not its index, but the number of CTAs that began before it."""
        shared, schedule = self.smem, self.plan.schedule

        @pl.when(self.warpgroup == self.plan.tile.warpgroups)
        def _() -> None:
            self.ops.take_ticket(self.refs.arrays["counters"], shared.numbers.at[pl.ds(0, 1)])
            plgpu.barrier_arrive(shared.ticket_drawn)

        plgpu.barrier_wait(shared.ticket_drawn)
        # No ticket is negative. The compiler divides with fewer instructions if it knows.
        ticket = lax.bitwise_and(shared.numbers[0], jnp.int32(0x7FFFFFFF))
        items, blocks = schedule.items, schedule.blocks
        return lax.div(ticket, items * blocks), lax.rem(lax.div(ticket, items), blocks), lax.rem(ticket, items)

    def compute(self) -> None:
        """Round some of dQ, and walk over the tiles of queries."""
        pipeline.split_registers(self.plan.tile.warpgroups, copies=False)
        width = self.plan.dq_width
        self.dq_columns = pl.ds(self.warpgroup * width, width)
        if self.plan.tile.adds_registers:
            self.dq_columns = pl.ds(0, self.plan.acc_columns)
        elif self.plan.tile.halves != "columns":
            self.dq_columns = pipeline.columns(width, self.refs.arrays["dq_acc"], self.item.batch)
        pl.when(self.dq.adds)(self._begin)
        self.dq.begin(self.warpgroup)

        @pl.when(self.dq.adds)
        def _() -> None:
            pl.when(self.order.tiles.count > 0)(lambda: plgpu.barrier_wait(self.smem.kv_full))
            self._store(self.visit_all())

    def _begin(self) -> None:
        """Hand empty slots to the producer; the first warpgroup copies the keys and values."""
        shared = self.smem
        pipeline.release(shared.q.empty, shared.do.empty)
        plgpu.barrier_arrive(shared.ds_empty.at[0])

        @pl.when((self.warpgroup == 0) & (self.order.tiles.count > 0))
        def _() -> None:
            self.copy_keys(shared.kv_full)
            self.copy_ones(shared.kv_full)

    def _store(self, acc: Accumulators) -> None:
        """Store dK and dV: in float32 where they are summed on."""
        if self.plan.schedule.stores_sums:
            results = self.refs.results["d_key"], self.refs.results["d_value"]
            own = pl.ds(self.first_sum + self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
            for result, gradient in zip(results, self.scaled(acc), strict=True):
                result[self.item.batch, self.item.head_group, own] = gradient
            plgpu.wait_smem_to_gmem(0)
            self.dq.finish(self.warpgroup)
            return
        self.store_rounded(acc)
        # All but these two.
        plgpu.wait_smem_to_gmem(2)
        self.dq.finish(self.warpgroup)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy(self) -> None:
        """Copy queries, and round dQ beside it."""
        pipeline.split_registers(self.plan.tile.warpgroups, copies=True)

        @pl.when(self.dq.adds)
        def _() -> None:
            keys = pl.ds(self.first_key, self.plan.tile.keys)
            producer = QueryProducer(self.inputs, self.order, self.item, keys, row_statistics.early(self.plan.spec))
            producer.copy_all(self.smem, self.dq.after_copy, self.dq.spare)
            pipeline.drain(self.smem.q.empty, self.smem.do.empty)
            self.dq.finish_copies()

    def turn(self, step: Any, at: Step) -> Any:
        """From step to step."""
        return step

    def dq_target(self, at: Step) -> Any:
        """In the accumulator of the step's head."""
        first = at.eighth * 8
        if self.plan.tile.halves == "rows":
            first += self.warpgroup * WARPGROUP_ROWS
        return self.dq.target(at.head, pl.ds(first, WARPGROUP_ROWS), self.dq_columns)

    def add_to_dq(self, target: Any, part: Float[Array, "rows columns"]) -> None:
        """From registers, or by a copy that adds."""
        if self.plan.tile.adds_registers:
            self.ops.add_to_sums(target, part)
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.smem.dq[self.warpgroup] = part
        plgpu.commit_smem()
        self.ops.reduce_add(target, self.smem.dq.at[self.warpgroup])
