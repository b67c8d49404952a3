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

A tile's dQ needs both warpgroups' dS. Made a tile later, it does not bring them into step: one's exponentials can run
beside the other's products. `row_statistics` says how lse and delta come.

delta is what the forward's softmax takes from every dP of a row: sum(dO * O) - d_lse. The additions to dQ come in any
order; `backward_dq` and `backward_dkv` are the backward in which every sum has one order.

Sources: FlashAttention-2, arXiv:2307.08691, algorithm 2; FlashAttention-3, arXiv:2407.08608, section 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jflash._backends.mosaic_gpu.exponent import sums_scale
from jflash._backends.mosaic_gpu.hardware import pipeline
from jflash._backends.mosaic_gpu.hardware.launch import Refs
from jflash._backends.mosaic_gpu.hardware.smem import WARPGROUP_ROWS
from jflash._backends.mosaic_gpu.hardware.warpgroup import WarpgroupOps
from jflash._backends.mosaic_gpu.inputs import row_statistics
from jflash._backends.mosaic_gpu.inputs.kernel_inputs import GmemTile, KernelInputs, TileCoord
from jflash._backends.mosaic_gpu.inputs.prepare import whole_dim
from jflash._backends.mosaic_gpu.kernels.backward_mainloop import Accumulators, MainLoop
from jflash._backends.mosaic_gpu.kernels.backward_plan import WARPGROUPS, FusedPlan, SharedMemory
from jflash._backends.mosaic_gpu.schedule import dq_accumulator, tile_range
from jflash._backends.mosaic_gpu.schedule.backward_schedule import WorkItem
from jflash._backends.mosaic_gpu.schedule.dq_accumulator import SPARE, DqAccumulator, DqRefs
from jflash._backends.mosaic_gpu.schedule.query_producer import QueryProducer
from jflash._backends.mosaic_gpu.schedule.tile_order import TileOrder


def backward(plan: FusedPlan, arrays: Mapping[str, Array], ops: WarpgroupOps) -> dict[str, Array]:
    """Launch the kernel; d_query, d_key, d_value, and for each parameter wanted the sums of its gradient `[B, N, L]`.

    `arrays`: query, key, value and d_out in whole tiles, row statistics (`columns` and `ones`, or `lse` and `delta`),
    what was prepared of the other operands, and `dq_acc`, zeros.
    """
    launch, schedule = plan.launch, plan.schedule
    read_only = {name: array for name, array in arrays.items() if name != "dq_acc"}

    def store(refs: Any) -> None:
        results, dq_acc, counters = refs
        made = launch.run(
            lambda refs: _kernel(plan, refs, ops), read_only | dict(dq_acc=dq_acc, counters=counters), ops
        )
        for name, ref in results.items():
            ref[...] = made[name]

    # Not `jax.new_ref`, whose effect JAX cannot lower for several devices (0.11 and 0.12).
    states = {name: jnp.zeros(result.shape, result.dtype) for name, result in launch.results.items()}
    counters = jnp.zeros(dq_accumulator.counters(schedule), jnp.int32)
    made, _, _ = pl.run_state(store)((states, arrays["dq_acc"], counters))
    of_keys = {f"d_{name}": schedule.summed(made[f"d_{name}"], arrays[name]) for name in ("key", "value")}
    return made | of_keys | dict(d_query=made["d_query"][:, : arrays["query"].shape[1]])


def _kernel(plan: FusedPlan, refs: Refs, ops: WarpgroupOps) -> None:
    spec, schedule = plan.spec, plan.schedule
    inputs = KernelInputs(spec, ops, refs.arrays, keys_first=True)
    warpgroup = lax.axis_index("warpgroup")
    wave, block, item = _take_ticket(plan, refs, warpgroup, ops)
    own = schedule.item(wave, item)
    tiles = tile_range.query_tiles(inputs, own.batch, block, plan.tile.keys, plan.tile.queries)
    order = TileOrder.of(spec, tiles, schedule.heads, block, by_head=bool(plan.wanted))
    dq = DqAccumulator(
        schedule,
        ops,
        DqRefs(refs.arrays["dq_acc"], refs.arrays["counters"], refs.results["d_query"]),
        sums_scale(spec),
        WARPGROUPS,
        (wave, block, item),
        tiles.count * schedule.heads,
    )
    dims = (spec.head_dim, spec.value_dim)
    qk, vo = (pipeline.columns(plan.tile.columns(dim), whole_dim(dim), own.batch) for dim in dims)
    cta = _Cta(plan, inputs, refs, own, block * plan.tile.keys, order, dq, qk, vo)
    pl.when(warpgroup < WARPGROUPS)(lambda: cta.consume(warpgroup))
    pl.when(warpgroup == WARPGROUPS)(cta.produce)


def _take_ticket(plan: FusedPlan, refs: Refs, warpgroup: Any, ops: WarpgroupOps) -> tuple[Any, Any, Any]:
    """The CTA's wave, block and work item. CUDA promises no order in which CTAs begin, and a CTA waits for those of
    earlier waves: so its place is not its index, but the number of CTAs that began before it."""
    shared = refs.smem

    @pl.when(warpgroup == WARPGROUPS)
    def _() -> None:
        ops.take_ticket(refs.arrays["counters"], shared.ticket)
        plgpu.barrier_arrive(shared.ticket_drawn)

    plgpu.barrier_wait(shared.ticket_drawn)
    ticket = shared.ticket[0]
    items, blocks = plan.schedule.items, plan.schedule.blocks
    return lax.div(ticket, items * blocks), lax.rem(lax.div(ticket, items), blocks), lax.rem(ticket, items)


@dataclasses.dataclass(frozen=True)
class _Cta:
    """What a CTA's warpgroups share."""

    plan: FusedPlan
    inputs: KernelInputs
    refs: Refs
    item: WorkItem
    first_key: Int[Array, ""]
    order: TileOrder
    dq: DqAccumulator
    qk_columns: Any
    """What tiles take of the columns of queries and keys."""
    vo_columns: Any
    """What tiles take of the columns of values and d_out."""

    @property
    def smem(self) -> SharedMemory:
        return self.refs.smem

    def consume(self, warpgroup: Any) -> None:
        """A warpgroup that computes."""
        pipeline.split_registers(WARPGROUPS, copies=False)
        own_keys = pl.ds(self.first_key + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        width = self.smem.dq.shape[-1]
        own_columns = self.qk_columns if self.plan.tile.split_dq_by_rows else pl.ds(warpgroup * width, width)
        pl.when(self.dq.adds)(lambda: self._begin(warpgroup))
        self.dq.begin(warpgroup)

        def store_sums(head: Array, sums: tuple[Array, ...]) -> None:
            for name, total in zip(self.plan.wanted, sums, strict=True):
                self.refs.results[f"d_{name}"][self.item.batch, self.item.first_head + head, own_keys] = total

        @pl.when(self.dq.adds)
        def _() -> None:
            pl.when(self.order.tiles.count > 0)(lambda: plgpu.barrier_wait(self.smem.kv_full))
            origin = TileCoord(self.item.batch, self.item.first_head, 0, self.first_key)
            loop = MainLoop(self.plan, self.inputs, self.smem, self.order, self.dq, warpgroup, origin, own_columns)
            self._store(loop.run(store_sums), warpgroup, own_keys)

    def _begin(self, warpgroup: Any) -> None:
        """Hand empty slots to the producer; the first warpgroup copies the keys and values."""
        shared = self.smem
        pipeline.release(self.plan.tile.stages, shared.q_empty, shared.do_empty)
        plgpu.barrier_arrive(shared.ds_empty.at[0])

        @pl.when((warpgroup == 0) & (self.order.tiles.count > 0))
        def _() -> None:
            keys = GmemTile(self.item.batch, self.first_key, self.plan.tile.keys, self.item.key_head, self.qk_columns)
            self.inputs.copy_rows("key", keys, shared.k.at[0], shared.kv_full)
            self.inputs.copy_rows("value", keys._replace(columns=self.vo_columns), shared.v.at[0], shared.kv_full)
            if shared.ones is not None:
                plgpu.copy_gmem_to_smem(self.refs.arrays["ones"], shared.ones, shared.kv_full)

    def _store(self, acc: Accumulators, warpgroup: Any, own_keys: Any) -> None:
        """Store dK and dV: in float32 where several head groups share the keys."""
        shared, item = self.smem, self.item
        dk_ref, dv_ref = self.refs.results["d_key"], self.refs.results["d_value"]
        dk, dv = acc.dk * sums_scale(self.plan.spec), acc.dv
        if self.plan.schedule.head_groups > 1:
            dk_ref[item.batch, item.head_group, own_keys] = dk
            dv_ref[item.batch, item.head_group, own_keys] = dv
            plgpu.wait_smem_to_gmem(0)
            self.dq.finish()
            return
        # The other warpgroup reads these keys too.
        plgpu.barrier_arrive(shared.finished)
        plgpu.barrier_wait(shared.finished)
        own = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        shared.k[0, own] = dk.astype(self.plan.spec.dtype)
        shared.v[0, own] = dv.astype(self.plan.spec.dtype)
        self.inputs.ops.commit()
        plgpu.copy_smem_to_gmem(shared.k.at[0, own], dk_ref.at[item.batch, own_keys, item.key_head, self.qk_columns])
        plgpu.copy_smem_to_gmem(shared.v.at[0, own], dv_ref.at[item.batch, own_keys, item.key_head, self.vo_columns])
        # All but these two.
        plgpu.wait_smem_to_gmem(2)
        self.dq.finish()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def produce(self) -> None:
        """The warpgroup that copies queries, and rounds dQ beside it."""
        pipeline.split_registers(WARPGROUPS, copies=True)

        @pl.when(self.dq.adds)
        def _() -> None:
            names = ("columns",) if row_statistics.as_columns(self.plan.spec) else ("lse", "delta")
            producer = QueryProducer(
                self.inputs,
                self.order,
                [self.refs.arrays[name] for name in names],
                self.item.batch,
                self.item.first_head,
                pl.ds(self.first_key, self.plan.tile.keys),
                (self.qk_columns, self.vo_columns),
            )
            producer.copy_all(self.smem, self.dq.after_copy, SPARE)
            self.dq.finish()
