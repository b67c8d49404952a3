"""Backward, fused: a CTA owns some keys, and adds what it makes of dQ to accumulators in device memory.

`query_walk` says what it makes. The additions to dQ come in any order, or in one (`dq_order`); `backward_dq` and
`backward_dkv`, where each sum has one order too, serve what has none here. `backward_dkv_dq` is for float32 with 128
columns, and `backward_short` for short sequences.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import dq_accumulator, pipeline, row_statistics, smem
from jflash._backends.mosaic_gpu.array_shapes import block_dims, whole_dims, whole_rows
from jflash._backends.mosaic_gpu.dq_accumulator import DqAccumulator, Layout, Place, RoundedByLast, RoundedLater
from jflash._backends.mosaic_gpu.dq_order import OneOrder
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.query_walk import Accumulators, QueryWalkCta, QueryWalkPlan, Step, WalkBuffers
from jflash._backends.mosaic_gpu.run import HopperBackward
from jflash._backends.mosaic_gpu.tiles import FusedTiles
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import Tile
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.threads import sums
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.tile_order import InTurn
from jflash._backends.nvidia.walk.tile_range import Walk
from jflash._semantics.spec import Spec


def shared_memory(spec: Spec, tile: FusedTiles) -> Buffers:
    """Return the kernel's buffers and barriers."""
    walk = WalkBuffers(spec, tile)
    (k, v), (dk, dv) = walk.keys_and_values(), walk.gradients()
    dq = (tile.warpgroups, WARPGROUP_ROWS, walk.dq_width)
    return Buffers(
        # Their gradients take the place of keys and values.
        k_dk=smem.reused(k, dk),
        v_dv=smem.reused(v, dv),
        kv_full=smem.barriers(1, arrivals=smem.copies(k, v) + walk.as_columns),
        **walk.walked(),
        ds=walk.ds(),
        # What copies add from.
        dq=None if tile.adds_registers else smem.tile(dq, jnp.float32, block_dims(spec)[0]),
        # The CTA's place in the order in which CTAs begin, and for each warpgroup in which those of its work item end.
        # One vector: another would begin a kilobyte later.
        numbers=smem.vectors(1 + tile.warpgroups, dtype=jnp.int32),
        ticket_drawn=smem.barriers(1),
        **(OneOrder.barriers(tile) if spec.deterministic else {}),
    )


@dataclasses.dataclass(frozen=True)
class FusedPlan(QueryWalkPlan):
    """One kernel for dQ, dK and dV, which adds dQ in device memory."""

    schedule: BackwardSchedule

    @property
    def visits(self) -> Blocks:
        return Blocks(self.tile.keys, self.tile.queries, self.schedule.heads, of_keys=True)

    @property
    def dq(self) -> type[DqAccumulator]:
        """Where dQ is summed, and which of a work item's CTAs round it."""
        if self.schedule.partial:
            return DqAccumulator
        return RoundedLater if self.schedule.room is None else RoundedByLast

    @property
    def launch(self) -> Launch:
        """The launch, with waves of CTAs that have keys, and after them those that only round dQ."""
        spec, schedule, dims = self.spec, self.schedule, whole_dims(self.spec)
        rows, key_rows = (whole_rows(spec, length) for length in (spec.query_length, spec.key_length))
        keys = schedule.blocks * self.tile.keys
        columns, value_columns = self.buffers.columns
        d_query = jax.ShapeDtypeStruct((spec.batch, rows, spec.heads, dims[0]), spec.dtype)
        return Launch(
            name=f"jflash_backward_{dims[0]}_{dims[1]}",
            grid=schedule.grid | dict(wave=schedule.waves + self.dq.lag(schedule)),
            results=dict(
                **({} if spec.partial else dict(d_query=d_query)),
                d_key=schedule.gradient(spec, (key_rows, dims[0]), (keys, columns)),
                d_value=schedule.gradient(spec, (key_rows, dims[1]), (keys, value_columns)),
                **self.sums.results(spec.batch, spec.heads, keys),
            ),
            smem=shared_memory(spec, self.tile),
            warpgroups=self.tile.warpgroups + 1,
        )

    @property
    def alignment(self) -> int:
        # Those that add to one tile after the other must agree on where it begins.
        return self.tile.queries if self.schedule.in_order else super().alignment

    @property
    def acc_columns(self) -> int:
        """Columns of an accumulator of dQ."""
        columns = block_dims(self.spec)[0]
        return round_up(columns, sums.COLUMNS) if self.tile.adds_registers else columns

    def dq_acc(self, margin: int) -> jax.ShapeDtypeStruct:
        # Registers add whole tiles, of which one may begin at the last query.
        room = max(margin, self.tile.queries if self.tile.adds_registers else 0)
        rows = round_up(self.spec.query_length, WARPGROUP_ROWS) + room
        return jax.ShapeDtypeStruct((self.dq.accumulators(self.schedule), rows, self.acc_columns + margin), jnp.float32)

    def states(self, call: HopperBackward) -> dict[str, Array]:
        counters = dict(counters=jnp.zeros(self.dq.counters(self.schedule), jnp.int32))
        if self.schedule.in_order:
            counters["steps"] = jnp.zeros(OneOrder.size(self.schedule), jnp.int32)
        return dict(dq_acc=call.row_sums()["dq_acc"], **counters, **super().states(call))

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        made = super().finish(made, changed) | self.schedule.summed(self.spec, made, whole_dims(self.spec))
        if not self.schedule.partial:
            return made
        acc = changed["dq_acc"][:, :, : self.acc_columns]
        acc = sums.as_rows(acc) if self.tile.adds_registers else acc
        return made | dict(d_query=dq_accumulator.unrounded(self.schedule, acc) * facts_of(self.spec).sums_scale)


class FusedCta(QueryWalkCta[FusedPlan]):
    """A CTA that has one block of keys."""

    first_sum: Any
    """The row of device memory at which the CTA's sums of dK and dV begin."""
    dq_columns: Any
    """The columns of dQ that this warpgroup makes, known from `compute` on."""

    def __init__(self, plan: FusedPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops)
        (self.k, dk), (self.v, dv) = refs.smem.k_dk, refs.smem.v_dv
        self.ds, self.gradients = refs.smem.ds, (dk, dv)
        place, schedule = self._take_ticket(), plan.schedule
        self._take_place(place)
        layout = Layout(plan.acc_columns, plan.tile.adds_registers)
        scale, copies = facts_of(plan.spec).sums_scale, self.order.tiles.count * schedule.heads
        self.dq = plan.dq(schedule, ops, refs, scale, place, copies, layout)

    def _take_place(self, place: Place) -> None:
        """Find the block of keys, the order of its tiles, and that of additions to their dQ."""
        plan, schedule = self.plan, self.plan.schedule
        block = schedule.block(place.wave, place.block)
        key_block, split = schedule.split(block)
        self.item, self.first_key = schedule.item(place.wave, place.item), key_block * plan.tile.keys
        self.first_sum = block * plan.tile.keys
        tiles = self._visited_by_split(key_block, split)
        self.order = self.order_of(tiles, block)
        if schedule.in_order:
            in_turn = functools.partial(InTurn, by_head=bool(plan.sums), up=schedule.is_turned(place.wave))
            self.order = in_turn(plan.spec, tiles, schedule.heads)
            before = in_turn(plan.spec, self._visited_before(place), schedule.heads)
            steps = self.refs.arrays["steps"]
            self.additions = OneOrder(schedule, self.ops, steps, self.smem, place, self.order, before)

    def _visited_by_split(self, key_block: Any, split: Any) -> Walk:
        """Return the tiles that a split of a block of keys visits."""
        return self.visited(key_block, self.plan.alignment).share(split, self.plan.schedule.splits)

    def _visited_before(self, place: Place) -> Walk:
        """Return the tiles that the CTA before this one visits of its work item; none if this one is the first."""
        schedule = self.plan.schedule
        tiles = self._visited_by_split(*schedule.split(schedule.block(place.wave, place.block - 1)))
        return dataclasses.replace(tiles, count=jnp.where(place.block == 0, 0, tiles.count))

    def _take_ticket(self) -> Place:
        """Return the CTA's place: not its index, but the number of CTAs that began before it (`dq_accumulator`)."""
        shared, schedule = self.smem, self.plan.schedule

        @pl.when(self.warpgroup == self.plan.tile.warpgroups)
        def _() -> None:
            self.ops.take_ticket(self.refs.arrays["counters"], shared.numbers.at[pl.ds(0, 1)])
            plgpu.barrier_arrive(shared.ticket_drawn)

        plgpu.barrier_wait(shared.ticket_drawn)
        # No ticket is negative. The compiler divides with fewer instructions if it knows.
        ticket = lax.bitwise_and(shared.numbers[0], jnp.int32(0x7FFFFFFF))
        items, blocks = schedule.items, schedule.blocks
        wave = lax.div(ticket, items * blocks)
        return Place(wave, lax.rem(lax.div(ticket, items), blocks), lax.rem(ticket, items))

    def compute(self) -> None:
        """Round some of dQ, and walk over the tiles of queries."""
        pipeline.split_registers(self.plan.tile.warpgroups, copies=False)
        width = self.plan.buffers.dq_width
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
        """Hand empty slots to the producer. The first warpgroup copies the keys and values."""
        shared = self.smem
        pipeline.release(shared.q.empty, shared.do.empty)
        plgpu.barrier_arrive(shared.ds_empty.at[0])

        @pl.when((self.warpgroup == 0) & (self.order.tiles.count > 0))
        def _() -> None:
            self.copy_keys(shared.kv_full)
            self.copy_ones(shared.kv_full)

    def _store(self, acc: Accumulators) -> None:
        """Store dK and dV, in float32 where they are summed on."""
        if self.plan.schedule.stores_sums:
            results = self.refs.results["d_key"], self.refs.results["d_value"]
            rows = pl.ds(self.first_sum + self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
            for result, gradient in zip(results, self.scaled(acc), strict=True):
                result[self.item.batch, self.item.head_group, rows] = gradient
            plgpu.wait_smem_to_gmem(0)
            self._finish()
            return
        self.store_rounded(acc)
        # All but these two.
        plgpu.wait_smem_to_gmem(2)
        self._finish()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _finish(self) -> None:
        """Note that all that this warpgroup added has arrived."""
        self.additions.arrive(self.order.tiles.count * self.order.heads + 1)
        self.dq.finish(self.warpgroup)

    def copy(self) -> None:
        """Copy queries, and round dQ beside it."""
        pipeline.split_registers(self.plan.tile.warpgroups, copies=True)

        @pl.when(self.dq.adds)
        def _() -> None:
            spare = max(self.dq.spare, self.additions.more)
            self.copy_queries(row_statistics.early(self.plan.spec), self._after_copy, spare)
            if not self.plan.schedule.in_order:
                pipeline.drain(self.smem.q.empty, self.smem.do.empty)
            self.dq.finish_copies()

    def _after_copy(self, step: Any) -> None:
        self.additions.follow(step)
        self.dq.after_copy(step)

    def dq_target(self, at: Step) -> Any:
        first = at.eighth * 8
        if self.plan.tile.halves == "rows":
            first += self.warpgroup * WARPGROUP_ROWS
        return self.dq.target(at.head, pl.ds(first, WARPGROUP_ROWS), self.dq_columns)

    def add_to_dq(self, target: Any, dq: Tile) -> None:
        if self.plan.tile.adds_registers:
            self.ops.add_to_sums(target, dq)
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.smem.dq[self.warpgroup] = dq
        plgpu.commit_smem()
        self.ops.reduce_add(target, self.smem.dq.at[self.warpgroup])
