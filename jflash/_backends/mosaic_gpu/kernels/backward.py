"""Backward, fused: a CTA owns some keys and walks over the tiles of queries that can see them.

    each of two consumer warpgroups, on 64 keys, for each query head that shares them and each tile of queries:
      S^T  = K Q^T
      dP^T = V dO^T                  the matrix unit runs this, while the warpgroup goes on with
      P^T  = exp(S^T - lse)
      dV   = dV + P^T dO             and this, during
      dS^T = P^T (dP^T - delta)      into shared memory, for both
      dK   = dK + dS^T Q
      dQ   = dS K                    of the tile before: one half of it from all keys, added to what is in device memory
    the producer warpgroup copies tiles of queries ahead of them into shared memory

Dropout changes P for dV, and dP (`inputs.dropped`).

A tile's dQ needs both warpgroups' dS. Made a tile later, it does not bring them into step: one's exponentials can run
beside the other's products. `row_statistics` says how lse and delta come.

delta is what the forward's softmax takes from every dP of a row: sum(dO * O) - d_lse. The additions to dQ come in any
order; `backward_dq` and `backward_dkv` are the backward in which every sum has one order.

Sources: FlashAttention-2, arXiv:2307.08691, algorithm 2; FlashAttention-3, arXiv:2407.08608, section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import logits
from jflash._backends.mosaic_gpu.exponent import sums_scale
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, WarpgroupOps, pipeline
from jflash._backends.mosaic_gpu.inputs import GmemTile, TileCoord, dropped, operand_pieces, whole_dims
from jflash._backends.mosaic_gpu.inputs.operand_pieces import Pieces
from jflash._backends.mosaic_gpu.inputs.row_statistics import RowStatistics
from jflash._backends.mosaic_gpu.kernels.backward_plan import FusedPlan
from jflash._backends.mosaic_gpu.kernels.launch import Cta, Refs
from jflash._backends.mosaic_gpu.schedule import QueryProducer, TileMask, TileOrder, dq_accumulator, tile_range
from jflash._backends.mosaic_gpu.schedule.dq_accumulator import DqRefs


def backward(plan: FusedPlan, arrays: Mapping[str, Array], dq_acc: Array, ops: WarpgroupOps) -> dict[str, Array]:
    """Launch the kernel; d_query, d_key, d_value, and for each parameter wanted the sums of its gradient `[B, N, L]`.

    `dq_acc` holds zeros.
    """
    schedule = plan.schedule
    states = dict(dq_acc=dq_acc, counters=jnp.zeros(plan.dq.counters(schedule), jnp.int32))
    made, written = plan.launch.update(lambda refs: _Cta(plan, refs, ops).run(), arrays, states, ops)
    of_keys = schedule.summed(plan.spec, made, whole_dims(plan.spec))
    if schedule.partial:
        d_query = dq_accumulator.unrounded(schedule, written["dq_acc"]) * sums_scale(plan.spec)
    else:
        d_query = made["d_query"][:, : arrays["query"].shape[1]]
    return made | of_keys | dict(d_query=d_query)


class _Step(NamedTuple):
    """Where a step's queries are."""

    head: Int[Array, ""]
    """Of the head group."""
    eighth: Int[Array, ""]
    """An eighth of the first one's index, so that the compiler knows that the index is a multiple of 8."""


class _Accumulators(NamedTuple):
    """dK and dV of a warpgroup's keys."""

    dk: Float[Array, "keys H"]
    dv: Float[Array, "keys D"]


_Carry = tuple[_Accumulators, tuple[Array, ...], _Step]
"""The loop's state: accumulators, the sums of parameters' gradients for one head, and the step before."""


class _Cta(Cta[FusedPlan]):
    dq_columns: Any
    """The columns of dQ that a warpgroup makes; it finds them when it begins to compute."""

    def __init__(self, plan: FusedPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops, keys_first=True)
        k_dk, v_dv = tuple(refs.smem.k_dk), tuple(refs.smem.v_dv)
        self.k, self.v = k_dk[0], v_dv[0]
        self.gradients = k_dk[-1], v_dv[-1]
        """Shared memory for dK and dV."""
        place = wave, block, item = self._take_ticket()
        self.item, self.first_key = plan.schedule.item(wave, item), block * plan.tile.keys
        tiles = tile_range.visited(self.inputs, self.item.batch, block, plan.tile.keys, plan.tile.queries)
        heads = plan.schedule.heads
        self.order = TileOrder(plan.spec, tiles, heads, block, by_head=bool(plan.wanted))
        dq_refs = DqRefs(refs.arrays["dq_acc"], refs.arrays["counters"], refs.results.get("d_query"), refs.smem)
        self.dq = plan.dq(plan.schedule, ops, dq_refs, sums_scale(plan.spec), *place, tiles.count * heads)

    def _take_ticket(self) -> tuple[Any, Any, Any]:
        """The CTA's wave, block and work item. CUDA promises no order in which CTAs begin, and a CTA waits for those of
        earlier waves: so its place is not its index, but the number of CTAs that began before it."""
        shared, schedule = self.smem, self.plan.schedule

        @pl.when(self.warpgroup == self.plan.tile.warpgroups)
        def _() -> None:
            self.ops.take_ticket(self.refs.arrays["counters"], shared.ticket)
            plgpu.barrier_arrive(shared.ticket_drawn)

        plgpu.barrier_wait(shared.ticket_drawn)
        # No ticket is negative. The compiler divides with fewer instructions if it knows.
        ticket = lax.bitwise_and(shared.ticket[0], jnp.int32(0x7FFFFFFF))
        items, blocks = schedule.items, schedule.blocks
        return lax.div(ticket, items * blocks), lax.rem(lax.div(ticket, items), blocks), lax.rem(ticket, items)

    def compute(self) -> None:
        """Round some of dQ, and walk over the tiles of queries."""
        pipeline.split_registers(self.plan.tile.warpgroups, copies=False)
        own_keys = pl.ds(self.first_key + self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        width = self.smem.dq.shape[-1]
        self.dq_columns = pl.ds(self.warpgroup * width, width)
        if self.plan.tile.split_dq_by_rows:
            self.dq_columns = pipeline.columns(width, self.refs.arrays["dq_acc"], self.item.batch)
        pl.when(self.dq.adds)(self._begin)
        self.dq.begin(self.warpgroup)

        @pl.when(self.dq.adds)
        def _() -> None:
            pl.when(self.order.tiles.count > 0)(lambda: plgpu.barrier_wait(self.smem.kv_full))
            self._store(self._visit_all(own_keys), own_keys)

    def _begin(self) -> None:
        """Hand empty slots to the producer; the first warpgroup copies the keys and values."""
        shared = self.smem
        pipeline.release(shared.q.empty, shared.do.empty)
        plgpu.barrier_arrive(shared.ds_empty.at[0])

        @pl.when((self.warpgroup == 0) & (self.order.tiles.count > 0))
        def _() -> None:
            keys = GmemTile(self.item.batch, self.first_key, self.plan.tile.keys, self.item.key_head)
            self.inputs.copy_rows("key", keys, self.k.at[0], shared.kv_full)
            self.inputs.copy_rows("value", keys, self.v.at[0], shared.kv_full)
            if shared.ones is not None:
                plgpu.copy_gmem_to_smem(self.refs.arrays["ones"], shared.ones, shared.kv_full)

    def _store(self, acc: _Accumulators, own_keys: Any) -> None:
        """Store dK and dV: in float32 where they are summed on."""
        shared, item = self.smem, self.item
        results = self.refs.results["d_key"], self.refs.results["d_value"]
        gradients = acc.dk * sums_scale(self.plan.spec), dropped.scaled(self.plan.spec, acc.dv)
        if self.plan.schedule.stores_sums:
            for result, gradient in zip(results, gradients, strict=True):
                result[item.batch, item.head_group, own_keys] = gradient
            plgpu.wait_smem_to_gmem(0)
            self.dq.finish(self.warpgroup)
            return
        # The other warpgroup reads these keys too.
        plgpu.barrier_arrive(shared.finished)
        plgpu.barrier_wait(shared.finished)
        own = self.own
        for buffer, gradient in zip(self.gradients, gradients, strict=True):
            buffer[0, own] = gradient.astype(buffer.dtype)
        plgpu.commit_smem()
        for buffer, result in zip(self.gradients, results, strict=True):
            columns = pipeline.columns(buffer.shape[-1], result, item.batch)
            plgpu.copy_smem_to_gmem(buffer.at[0, own], result.at[item.batch, own_keys, item.key_head, columns])
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
            producer = QueryProducer(self.inputs, self.order, self.item, keys)
            producer.copy_all(self.smem, self.dq.after_copy, self.dq.spare)
            self.dq.finish_copies()

    def _visit_all(self, own_keys: Any) -> _Accumulators:
        """dK and dV after all tiles; the sums of parameters' gradients are stored after each head."""
        ops, dims = self.ops, [gradient.shape[2] for gradient in self.gradients]
        zeros = lambda: tuple(ops.full((WARPGROUP_ROWS,), 0) for _ in self.plan.wanted)

        def finish_head(head: Array, carry: _Carry) -> _Carry:
            acc, sums, before = carry
            for name, total in zip(self.plan.wanted, sums, strict=True):
                self.refs.results[f"d_{name}"][self.item.batch, self.item.first_head + head, own_keys] = total
            return acc, zeros(), before

        acc = _Accumulators(*(ops.full((WARPGROUP_ROWS, dim), 0) for dim in dims))
        start = (acc, zeros(), _Step(jnp.int32(0), jnp.int32(0)))
        acc, _, before = self.order.each(self._visit, start, finish_head)
        steps = self.order.tiles.count * self.order.heads
        pl.when(steps > 0)(lambda: self._add_dq(steps - 1, before, lambda: None))
        # No barrier may end in the middle of its phase.
        plgpu.barrier_wait(self.smem.ds_empty.at[lax.rem(steps, 2)])
        return acc

    def _visit(self, step: Array, head: Array, index: Array, carry: _Carry) -> _Carry:
        """Add one tile's part to the accumulators, and the last one's to dQ."""
        (acc, sums, before), spec = carry, self.plan.spec
        start = self.order.tiles.start(index)
        key = self.first_key + self.warpgroup * WARPGROUP_ROWS
        at = TileCoord(self.item.batch, self.item.first_head + head, start, key)
        smem, ops, shape = self.smem, self.ops, (WARPGROUP_ROWS, self.plan.tile.queries)
        slot, parity = lax.rem(step, self.plan.tile.stages), lax.rem(step, 2)
        still = pipeline.opaque_zero(step, self.warpgroup)
        pieces = functools.partial(operand_pieces.of_tile, spec)
        q, do = pieces(smem.q.tiles.at[slot]), pieces(smem.do.tiles.at[slot])
        k, v = (pieces(ref.at[still].at[self.own]) for ref in (self.k, self.v))
        loaded = self.inputs.load_packed_mask(at, shape)
        plgpu.barrier_wait(smem.q.full.at[slot])
        slots = range(0, smem.statistics.shape[0], self.plan.tile.stages)
        refs = [smem.statistics.at[first + slot] for first in slots]
        statistics = RowStatistics(self.inputs, shape, refs, smem.ones)
        if smem.bias is not None:
            loaded["bias"] = ops.load(smem.bias.at[slot, :, self.own].T)
        mask = TileMask(self.inputs, self.order.tiles, index, at, loaded)

        def add(acc_dk: Any, acc_dv: Any) -> tuple[Array, ...]:
            def differentiate(acc_dp: Any, acc_s: Any) -> tuple[Pieces, tuple[Array, ...]]:
                statistics.mma(acc_s, k, operand_pieces.transposed(q), 0)
                plgpu.barrier_wait(smem.do.full.at[slot])
                statistics.mma(acc_dp, v, operand_pieces.transposed(do), 1)
                s = ops.read(acc_s, pending=statistics.mmas)
                p, pull_back = logits.differentiate(s, mask, statistics.probabilities, self.plan.wanted)
                p = dropped.signed(self.inputs, at, p)
                kept = operand_pieces.split(spec, dropped.kept_of_signed(spec, p), ops)
                operand_pieces.mma(acc_dv, kept, do, ops)
                dp = ops.read(acc_dp, pending=operand_pieces.products(spec))
                ds, d_parameters = pull_back(statistics.d_logits(p, dp))
                totals = tuple(
                    total + d_parameters[name].sum(axis=1) for name, total in zip(self.plan.wanted, sums, strict=True)
                )
                return self._hand_over(ds, parity), totals

            ds, totals = ops.accumulators(differentiate, shape, shape)
            operand_pieces.mma(acc_dk, ds, q, ops)

            def free() -> None:
                plgpu.barrier_arrive(smem.ds_empty.at[1 - parity])
                plgpu.barrier_arrive(smem.do.empty.at[slot])
                plgpu.barrier_arrive(smem.q.empty.at[slot])

            ops.cond(step > 0, lambda: self._add_dq(step - 1, before, free), free)
            return totals

        sums, (dk, dv) = operand_pieces.accumulate(spec, add, acc.dk, acc.dv, like=sums, ops=ops)
        return _Accumulators(dk, dv), sums, _Step(jnp.int32(head), lax.div(self.order.tiles.start(index), 8))

    def _hand_over(self, ds: Array, parity: Array) -> Pieces:
        """dS^T as an operand, for this warpgroup's dK and, through shared memory, for both warpgroups' dQ."""
        spec = self.plan.spec
        pieces = operand_pieces.split(spec, ds, self.ops)
        plgpu.barrier_wait(self.smem.ds_empty.at[parity])
        shared = operand_pieces.of_tile(spec, self.smem.ds.at[parity])
        for piece, target in zip(pieces, shared, strict=True):
            target[self.own] = piece
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem.ds_full.at[parity])
        return pieces

    def _add_dq(self, step: Array, at: _Step, made: Callable[[], None]) -> None:
        """Add this warpgroup's half of a step's dQ to what is in device memory; calls `made` after its products."""
        by_rows, ops = self.plan.tile.split_dq_by_rows, self.ops
        first, width = at.eighth * 8, self.smem.dq.shape[-1]
        rows = pl.ds(first + self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS) if by_rows else None
        target = self.dq.target(at.head, rows or pl.ds(first, self.plan.tile.queries), self.dq_columns)
        parity = lax.rem(step, 2)
        plgpu.barrier_wait(self.smem.ds_full.at[parity])
        ds = self.smem.ds.at[parity]
        k = self.k.at[pipeline.opaque_zero(step, self.warpgroup)]
        pieces = functools.partial(operand_pieces.of_tile, self.plan.spec)
        if by_rows:
            ds, k = pieces(ds, self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS), pieces(k)
        else:
            ds, k = pieces(ds), pieces(k, self.warpgroup * width, width)
        half = operand_pieces.matmul(operand_pieces.transposed(ds), k, (WARPGROUP_ROWS, width), ops)
        made()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.smem.dq[self.warpgroup] = half
        plgpu.commit_smem()
        ops.reduce_add(target, self.smem.dq.at[self.warpgroup])
