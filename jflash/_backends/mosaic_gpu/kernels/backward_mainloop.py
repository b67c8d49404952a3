"""The fused backward's main loop: one warpgroup's keys against the tiles of queries that can see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import gradient
from jflash._backends.mosaic_gpu.exponent import sums_scale
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Refs, WarpgroupOps, pipeline
from jflash._backends.mosaic_gpu.inputs import TileCoord
from jflash._backends.mosaic_gpu.inputs.row_statistics import RowStatistics
from jflash._backends.mosaic_gpu.kernels.backward_plan import FusedPlan
from jflash._backends.mosaic_gpu.kernels.cta import Cta
from jflash._backends.mosaic_gpu.schedule import TileMask, TileOrder, tile_range
from jflash._backends.mosaic_gpu.schedule.dq_accumulator import DqAccumulator, DqRefs


class Step(NamedTuple):
    """Where a step's queries are."""

    head: Int[Array, ""]
    """Of the head group."""
    eighth: Int[Array, ""]
    """An eighth of the first one's index, so that the compiler knows that the index is a multiple of 8."""


class Accumulators(NamedTuple):
    """dK and dV of a warpgroup's keys."""

    dk: Float[Array, "keys H"]
    dv: Float[Array, "keys D"]


Carry = tuple[Accumulators, tuple[Array, ...], Step]
"""The loop's state: accumulators, the sums of parameters' gradients for one head, and the step before."""


class FusedCta(Cta[FusedPlan]):
    """The place of a CTA in the grid, and what it visits and adds to."""

    dq_columns: Any
    """The columns of dQ that a warpgroup makes; it finds them when it begins to compute."""

    def __init__(self, plan: FusedPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops, keys_first=True)
        ticket = wave, block, item = _take_ticket(plan, refs, self.warpgroup, ops)
        self.item, self.first_key = plan.schedule.item(wave, item), block * plan.tile.keys
        tiles = tile_range.query_tiles(self.inputs, self.item.batch, block, plan.tile.keys, plan.tile.queries)
        heads = plan.schedule.heads
        self.order = TileOrder(plan.spec, tiles, heads, block, by_head=bool(plan.wanted))
        dq_refs = DqRefs(refs.arrays["dq_acc"], refs.arrays["counters"], refs.results["d_query"])
        self.dq = DqAccumulator(plan.schedule, ops, dq_refs, sums_scale(plan.spec), ticket, tiles.count * heads)

    def visit_all(self, store_sums: Callable[[Array, tuple[Array, ...]], None]) -> Accumulators:
        """dK and dV after all tiles. `store_sums` takes what a head's parameters' gradients are summed from."""
        ops, dims = self.ops, (self.smem.k.shape[2], self.smem.v.shape[2])
        zeros = lambda: tuple(ops.full((WARPGROUP_ROWS,), 0) for _ in self.plan.wanted)

        def finish_head(head: Array, carry: Carry) -> Carry:
            acc, sums, before = carry
            store_sums(head, sums)
            return acc, zeros(), before

        acc = Accumulators(*(ops.full((WARPGROUP_ROWS, dim), 0) for dim in dims))
        start = (acc, zeros(), Step(jnp.int32(0), jnp.int32(0)))
        acc, _, before = self.order.each(self._visit, start, finish_head)
        steps = self.order.tiles.count * self.order.heads
        pl.when(steps > 0)(lambda: self._add_dq(steps - 1, before, lambda: None))
        # No barrier may end in the middle of its phase.
        plgpu.barrier_wait(self.smem.ds_empty.at[lax.rem(steps, 2)])
        return acc

    def _visit(self, step: Array, head: Array, index: Array, carry: Carry) -> Carry:
        """Add one tile's part to the accumulators, and the last one's to dQ."""
        acc, sums, before = carry
        start = self.order.tiles.start(index)
        key = self.first_key + self.warpgroup * WARPGROUP_ROWS
        at = TileCoord(self.item.batch, self.item.first_head + head, start, key)
        smem, ops, shape = self.smem, self.ops, (WARPGROUP_ROWS, self.plan.tile.queries)
        slot, parity = lax.rem(step, self.plan.tile.stages), lax.rem(step, 2)
        still = pipeline.opaque_zero(step, self.warpgroup)
        q, do = smem.q.at[slot], smem.do.at[slot]
        k, v = smem.k.at[still], smem.v.at[still]
        loaded = self.inputs.load_packed_mask(at, shape)
        plgpu.barrier_wait(smem.q_full.at[slot])
        slots = range(0, smem.statistics.shape[0], self.plan.tile.stages)
        refs = [smem.statistics.at[first + slot] for first in slots]
        statistics = RowStatistics(self.inputs, shape, refs, smem.ones)
        if smem.bias is not None:
            loaded["bias"] = ops.load(smem.bias.at[slot, :, self.own].T)
        mask = TileMask(self.inputs, self.order.tiles, index, at, loaded)

        def add(acc_dk: Any, acc_dv: Any) -> tuple[Array, ...]:
            def differentiate(acc_dp: Any, acc_s: Any) -> tuple[Array, tuple[Array, ...]]:
                statistics.mma(acc_s, k.at[self.own], q.T, 0)
                plgpu.barrier_wait(smem.do_full.at[slot])
                statistics.mma(acc_dp, v.at[self.own], do.T, 1)
                s = ops.read(acc_s, pending=statistics.mmas)
                p, pull_back = gradient.differentiate(s, mask, statistics.probabilities, self.plan.wanted)
                ops.mma(acc_dv, p.astype(self.plan.spec.dtype), do)
                ds, d_parameters = pull_back(p * ops.read(acc_dp, pending=1))
                totals = tuple(
                    total + d_parameters[name].sum(axis=1) for name, total in zip(self.plan.wanted, sums, strict=True)
                )
                return self._hand_over(ds, parity), totals

            ds, totals = ops.accumulators(differentiate, shape, shape)
            ops.mma(acc_dk, ds, q)

            def free() -> None:
                plgpu.barrier_arrive(smem.ds_empty.at[1 - parity])
                plgpu.barrier_arrive(smem.do_empty.at[slot])
                plgpu.barrier_arrive(smem.q_empty.at[slot])

            ops.cond(step > 0, lambda: self._add_dq(step - 1, before, free), free)
            return totals

        sums, (dk, dv) = ops.accumulate(add, acc.dk, acc.dv, like=sums)
        return Accumulators(dk, dv), sums, Step(jnp.int32(head), lax.div(self.order.tiles.start(index), 8))

    def _hand_over(self, ds: Array, parity: Array) -> Array:
        """dS^T in the operands' dtype, for this warpgroup's dK and, through shared memory, for both warpgroups' dQ."""
        ds = ds.astype(self.plan.spec.dtype)
        plgpu.barrier_wait(self.smem.ds_empty.at[parity])
        self.smem.ds.at[parity][self.own] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem.ds_full.at[parity])
        return ds

    def _add_dq(self, step: Array, at: Step, made: Callable[[], None]) -> None:
        """Add this warpgroup's half of a step's dQ to what is in device memory; calls `made` after its products."""
        by_rows, ops = self.plan.tile.split_dq_by_rows, self.ops
        first, width = at.eighth * 8, self.smem.dq.shape[-1]
        rows = pl.ds(first + self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS) if by_rows else None
        target = self.dq.target(at.head, rows or pl.ds(first, self.plan.tile.queries), self.dq_columns)
        parity = lax.rem(step, 2)
        plgpu.barrier_wait(self.smem.ds_full.at[parity])
        ds = self.smem.ds.at[parity]
        k = self.smem.k.at[pipeline.opaque_zero(step, self.warpgroup)]
        if by_rows:
            ds = ds.at[:, self.own]
        else:
            k = k.at[:, pl.ds(self.warpgroup * width, width)]
        half = ops.matmul(ds.T, k, (WARPGROUP_ROWS, width))
        made()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.smem.dq[self.warpgroup] = half
        plgpu.commit_smem()
        ops.reduce_add(target, self.smem.dq.at[self.warpgroup])


def _take_ticket(plan: FusedPlan, refs: Refs, warpgroup: Any, ops: WarpgroupOps) -> tuple[Any, Any, Any]:
    """The CTA's wave, block and work item. CUDA promises no order in which CTAs begin, and a CTA waits for those of
    earlier waves: so its place is not its index, but the number of CTAs that began before it."""
    shared = refs.smem

    @pl.when(warpgroup == plan.tile.warpgroups)
    def _() -> None:
        ops.take_ticket(refs.arrays["counters"], shared.ticket)
        plgpu.barrier_arrive(shared.ticket_drawn)

    plgpu.barrier_wait(shared.ticket_drawn)
    # No ticket is negative. The compiler divides with fewer instructions if it knows.
    ticket = lax.bitwise_and(shared.ticket[0], jnp.int32(0x7FFFFFFF))
    items, blocks = plan.schedule.items, plan.schedule.blocks
    return lax.div(ticket, items * blocks), lax.rem(lax.div(ticket, items), blocks), lax.rem(ticket, items)
