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
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
from jflash._backends.mosaic_gpu.schedule.tile_range import TileRange

_TICKET_DRAWER = 1
"""The warpgroup that draws the CTA's ticket: the one that copies nothing."""


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


class _Work(NamedTuple):
    """What a CTA's place means: a block of keys of a work item, and the tiles of queries that see it."""

    wave: Any
    block: Any
    number: Any
    """Of the item, in its wave."""
    item: WorkItem
    tiles: TileRange


def _work_at(plan: FusedPlan, inputs: KernelInputs, place: Any) -> _Work:
    """Of all items of a wave come the first blocks, then the second, and so on."""
    row, number = lax.div(place, plan.schedule.items), lax.rem(place, plan.schedule.items)
    wave, block = lax.div(row, plan.schedule.blocks), lax.rem(row, plan.schedule.blocks)
    item = plan.schedule.item(wave, number)
    tiles = tile_range.query_tiles(inputs, item.batch, block, plan.tile.keys, plan.tile.queries)
    return _Work(wave, block, number, item, tiles)


def _kernel(plan: FusedPlan, refs: Refs, ops: WarpgroupOps) -> None:
    """CUDA promises no order in which CTAs begin, and a CTA waits for those of earlier waves. So its place is not its
    index, but a ticket: the number of CTAs that began before it. It comes late from device memory. Until then the CTA
    copies its first tiles as if it were the index, and nearly always it is.
    """
    inputs = KernelInputs(plan.spec, ops, refs.arrays, keys_first=True)
    warpgroup = lax.axis_index("warpgroup")
    index = index_in_grid(plan)
    expected = _work_at(plan, inputs, index)

    @pl.when(warpgroup == _TICKET_DRAWER)
    def _() -> None:
        ops.take_ticket(refs.arrays["counters"], refs.smem.ticket)
        plgpu.barrier_arrive(refs.smem.ticket_drawn)

    # So the compiler knows that tiles begin at a multiple of 8.
    in_eighths = lambda work: work._replace(tiles=work.tiles.from_row(lax.div(work.tiles.first, 8)))

    def work() -> tuple[_Work, Any]:
        """The CTA's own, and whether it is not what was expected."""
        plgpu.barrier_wait(refs.smem.ticket_drawn)
        ticket = refs.smem.ticket[0]
        is_other = ticket != index
        own = lax.cond(is_other, lambda: in_eighths(_work_at(plan, inputs, ticket)), lambda: in_eighths(expected))
        return own._replace(tiles=own.tiles.from_row(own.tiles.first * 8)), is_other

    cta = functools.partial(_Cta, plan, inputs, refs)
    pl.when(warpgroup < WARPGROUPS)(lambda: _consume(cta, expected, work, warpgroup))
    pl.when(warpgroup == WARPGROUPS)(lambda: _produce(cta, expected, work))


def index_in_grid(plan: FusedPlan) -> Any:
    """The CTA's index: the place that it would have if CTAs began in the order of their indices."""
    wave, block, item = (lax.axis_index(name) for name in plan.launch.grid)
    return (wave * plan.schedule.blocks + block) * plan.schedule.items + item


def _consume(
    cta: Callable[[_Work], _Cta], expected: _Work, work: Callable[[], tuple[_Work, Any]], warpgroup: Any
) -> None:
    """A warpgroup that computes. The first copies the keys and values."""
    first = cta(expected)
    pipeline.split_registers(WARPGROUPS, copies=False)
    pipeline.release(first.plan.tile.stages, first.smem.q_empty, first.smem.do_empty)
    pl.when((warpgroup == 0) & first.visits)(first.copy_keys)
    own, is_other = work()

    @pl.when(is_other)
    def _() -> None:
        pl.when(first.visits)(first.discard)
        pl.when((warpgroup == 0) & cta(own).visits)(cta(own).copy_keys)

    cta(own).consume(warpgroup)


def _produce(cta: Callable[[_Work], _Cta], expected: _Work, work: Callable[[], tuple[_Work, Any]]) -> None:
    """The warpgroup that copies queries, and rounds dQ beside it."""
    first = cta(expected)
    pipeline.split_registers(WARPGROUPS, copies=True)
    pl.when(first.visits)(lambda: first.producer.copy(first.smem, jnp.int32(0)))
    own, is_other = work()
    copied = jnp.where(is_other | ~first.visits, 0, 1)

    @pl.when(cta(own).dq.adds)
    def _() -> None:
        cta(own).producer.copy_all(first.smem, cta(own).dq.after_copy, SPARE, copied)
        cta(own).dq.finish()

    pipeline.drain(first.plan.tile.stages, first.smem.q_empty, first.smem.do_empty)


@dataclasses.dataclass(frozen=True)
class _Cta:
    """What a CTA's warpgroups share."""

    plan: FusedPlan
    inputs: KernelInputs
    refs: Refs
    work: _Work

    @property
    def item(self) -> WorkItem:
        return self.work.item

    @property
    def first_key(self) -> Int[Array, ""]:
        return self.work.block * self.plan.tile.keys

    @property
    def order(self) -> TileOrder:
        work, heads = self.work, self.plan.schedule.heads
        return TileOrder.of(self.plan.spec, work.tiles, heads, work.block, by_head=bool(self.plan.wanted))

    @property
    def dq(self) -> DqAccumulator:
        schedule, work = self.plan.schedule, self.work
        refs = DqRefs(self.refs.arrays["dq_acc"], self.refs.arrays["counters"], self.refs.results["d_query"])
        at = (work.wave, work.block, work.number)
        steps = work.tiles.count * schedule.heads
        return DqAccumulator(schedule, self.inputs.ops, refs, sums_scale(self.plan.spec), WARPGROUPS, at, steps)

    @property
    def qk_columns(self) -> Any:
        """What tiles take of the columns of queries and keys."""
        return self._columns(self.plan.spec.head_dim)

    @property
    def vo_columns(self) -> Any:
        """What tiles take of the columns of values and d_out."""
        return self._columns(self.plan.spec.value_dim)

    def _columns(self, dim: int) -> Any:
        return pipeline.columns(self.plan.tile.columns(dim), whole_dim(dim), self.item.batch)

    @property
    def smem(self) -> SharedMemory:
        return self.refs.smem

    @property
    def visits(self) -> Any:
        """Whether the CTA has keys that a query can see."""
        return self.dq.adds & (self.order.tiles.count > 0)

    @property
    def producer(self) -> QueryProducer:
        """What copies the tiles of queries."""
        names = ("columns",) if row_statistics.as_columns(self.plan.spec) else ("lse", "delta")
        statistics = [self.refs.arrays[name] for name in names]
        own_keys = pl.ds(self.first_key, self.plan.tile.keys)
        columns = (self.qk_columns, self.vo_columns)
        return QueryProducer(
            self.inputs, self.order, statistics, self.item.batch, self.item.first_head, own_keys, columns
        )

    def copy_keys(self) -> None:
        """Copy the block's keys and values."""
        shared = self.smem
        keys = GmemTile(self.item.batch, self.first_key, self.plan.tile.keys, self.item.key_head, self.qk_columns)
        self.inputs.copy_rows("key", keys, shared.k.at[0], shared.kv_full)
        self.inputs.copy_rows("value", keys._replace(columns=self.vo_columns), shared.v.at[0], shared.kv_full)
        if shared.ones is not None:
            plgpu.copy_gmem_to_smem(self.refs.arrays["ones"], shared.ones, shared.kv_full)

    def discard(self) -> None:
        """Hand the first tiles back: they were another CTA's."""
        shared = self.smem
        plgpu.barrier_wait(shared.kv_full)
        for full, empty in ((shared.q_full, shared.q_empty), (shared.do_full, shared.do_empty)):
            plgpu.barrier_wait(full.at[0])
            plgpu.barrier_arrive(empty.at[0])
        # Keys are copied anew when both warpgroups have waited for these.
        self._meet()

    def _meet(self) -> None:
        """Wait for the other warpgroup that computes."""
        plgpu.barrier_arrive(self.smem.finished)
        plgpu.barrier_wait(self.smem.finished)

    def consume(self, warpgroup: Any) -> None:
        """Visit all tiles."""
        own_keys = pl.ds(self.first_key + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        width = self.smem.dq.shape[-1]
        own_columns = self.qk_columns if self.plan.tile.split_dq_by_rows else pl.ds(warpgroup * width, width)
        self.dq.begin(warpgroup)

        def store_sums(head: Array, sums: tuple[Array, ...]) -> None:
            for name, total in zip(self.plan.wanted, sums, strict=True):
                self.refs.results[f"d_{name}"][self.item.batch, self.item.first_head + head, own_keys] = total

        @pl.when(self.dq.adds)
        def _() -> None:
            plgpu.barrier_arrive(self.smem.ds_empty.at[0])
            pl.when(self.order.tiles.count > 0)(lambda: plgpu.barrier_wait(self.smem.kv_full))
            origin = TileCoord(self.item.batch, self.item.first_head, 0, self.first_key)
            loop = MainLoop(self.plan, self.inputs, self.smem, self.order, self.dq, warpgroup, origin, own_columns)
            self._store(loop.run(store_sums), warpgroup, own_keys)

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
        self._meet()
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
