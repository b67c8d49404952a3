"""What CTAs share: the last warpgroup copies tiles ahead of the others, which compute.

A CTA of the backward has rows of queries, for dQ and the tangent, and walks over the keys that they see; or it has a
block of keys, or of wide heads' queries, and walks over tiles of the others for each head of a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import pipeline, row_statistics, smem
from jflash._backends.mosaic_gpu.array_shapes import tile_dims, whole_dims, whole_rows
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.pipeline import GmemTile, TmaInputs
from jflash._backends.mosaic_gpu.run import HopperBackward
from jflash._backends.mosaic_gpu.tiles import RowTiles
from jflash._backends.nvidia.launch import KernelPlan, Refs, cta_index
from jflash._backends.nvidia.ops import Ref, Rows, Tile
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.tile.gradient_sums import SummingPlan
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule, WorkItem
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.tile_order import TileOrder
from jflash._backends.nvidia.walk.tile_range import Place, Walk
from jflash._semantics.spec import Spec


class Cta[Plan: KernelPlan]:
    """A CTA of any kernel with a warpgroup that copies."""

    def __init__(self, plan: Plan, refs: Refs, ops: WarpgroupOps, **options: Any) -> None:
        """`options` are those of `KernelInputs`.

        A subclass calls this among its own reads of the grid's indices. Their order is that of the PTX that was
        measured: another one makes other code.
        """
        self.plan, self.refs, self.smem, self.ops = plan, refs, refs.smem, ops
        self.inputs = TmaInputs(plan.spec, ops, refs.arrays, **options)
        self.warpgroup = lax.axis_index("warpgroup")

    def run(self) -> None:
        """Run this warpgroup."""
        copiers = self.copiers
        first = lax.axis_size("warpgroup") - len(copiers)
        pl.when(self.warpgroup < first)(self.compute)
        for number, copy in enumerate(copiers):
            pl.when(self.warpgroup == first + number)(copy)

    @property
    def copiers(self) -> Sequence[Callable[[], None]]:
        """What each of the last warpgroups does; there is one that copies, unless copies are converted."""
        return (self.copy,)

    @property
    def warpgroup_rows(self) -> Any:
        """The rows of the CTA's tile that are this warpgroup's."""
        return pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def compute(self) -> None:
        """Run a warpgroup that computes."""
        raise NotImplementedError

    def copy(self) -> None:
        """Run the warpgroup that copies."""
        raise NotImplementedError

    def copy_rows(self, tile: GmemTile, full: Ref, **buffers: Ref) -> None:
        """Copy the same tile of each named array to its buffer."""
        for name, buffer in buffers.items():
            self.inputs.copy_rows(name, tile, buffer, full)


@dataclasses.dataclass(frozen=True)
class WalkingPlan(SummingPlan):
    """A kernel whose CTAs have a block of keys or queries, before any array."""

    @property
    def visits(self) -> Blocks:
        """What each block visits."""
        raise NotImplementedError

    def arrays(self, call: HopperBackward) -> dict[str, Array]:
        return call.read(self.visits)


class WalkingCta[Plan: WalkingPlan](Cta[Plan]):
    """A CTA that has a block of keys or queries, and walks over tiles of the others for each head of a group."""

    item: WorkItem
    order: TileOrder
    axis = "block"
    """The axis of the grid by whose index CTAs differ."""

    def __init__(self, plan: Plan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops, keys_first=plan.visits.of_keys)

    @property
    def sum_rows(self) -> Any:
        """The rows in device memory of which this warpgroup sums parameters' gradients."""
        raise NotImplementedError

    def visited(self, block: Any, alignment: int = 8) -> Walk:
        """Return the tiles that one of the work item's blocks visits."""
        place, blocks = Place(self.item.batch, self.item.head_group, block), self.plan.visits
        return tile_range.visited(self.inputs, place, blocks.rows, blocks.size, alignment=alignment)

    def order_of(self, tiles: Walk, block: Any) -> TileOrder:
        """Return the order of a block's tiles."""
        plan = self.plan
        return TileOrder(plan.spec, tiles, plan.visits.heads, block, by_head=bool(plan.sums))

    def finish_head(self, head: Any, carry: Any) -> Any:
        """Store a head's sums, the second of what a walk carries, and let them begin anew."""
        acc, totals, *others = carry
        self.plan.sums.store(self.refs.results, totals, self.item.batch, self.item.first_head + head, self.sum_rows)
        return acc, self.plan.sums.zeros(self.ops), *others

    def copy_each(self, copy: Callable[[Array, Array], None], more: int = 0) -> None:
        """Call `copy(step, count)` for all steps, of which a head has `count`, and for `more`."""
        # The same number for the loop and for its remainders: with one head, they are no divisions then.
        count = pipeline.opaque(self.order.tiles.count, self.axis)
        lax.fori_loop(0, count * self.order.heads + more, lambda step, _: copy(step, count), None)


class KeysCta[Plan: WalkingPlan](WalkingCta[Plan]):
    """A CTA that has a block of keys, or one after the other, and walks over tiles of queries."""

    first_key: Any
    k: Ref
    v: Ref
    """Shared memory for the block's keys and values."""

    @property
    def key_rows(self) -> Any:
        """The block's rows of keys, in device memory."""
        return pl.ds(self.first_key, self.plan.visits.rows)

    @property
    def key_tile(self) -> GmemTile:
        """The block's keys in device memory."""
        return GmemTile(self.item.batch, self.first_key, self.plan.visits.rows, self.item.key_head)

    def copy_queries(self, early: int, then: Callable[[Array], None] = lambda step: None, more: int = 0) -> None:
        """Copy every tile of queries and dO, and call `then` after each, and for `more` while the last ones are read.

        As many of the row statistics as `early` come with the queries, and the others with dO.
        """

        def take(step: Array, count: Array) -> None:
            pl.when(step < count * self.order.heads)(lambda: self._copy_tile(step, count, early))
            then(step)

        self.copy_each(take, more)

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


Walked = tuple[Buffers, Mapping[str, Ref]]
"""A ring that is filled with tiles of keys, and its buffers by the names of what is copied to them, in that order."""


@dataclasses.dataclass(frozen=True)
class QueryRowsPlan(KernelPlan):
    """A kernel whose CTAs own rows of queries, before any array."""

    tile: RowTiles
    schedule: BackwardSchedule
    """The schedule of blocks of queries; every head, or every chunk of its columns, has blocks of its own."""

    @property
    def visits(self) -> Blocks:
        """What each block of queries visits."""
        return Blocks(self.tile.rows, self.tile.keys)

    @property
    def all_rows(self) -> int:
        """Rows of all blocks of a head."""
        return self.schedule.blocks * self.tile.rows

    def result(self, spec: Spec, heads: int, operand: int) -> jax.ShapeDtypeStruct:
        """Return what is stored with the columns of queries (operand 0) or values (1), of `heads`."""
        rows, columns = whole_rows(spec, spec.query_length), whole_dims(spec)[operand]
        if spec.partial:
            # Registers are stored whole.
            rows, columns = self.all_rows, tile_dims(spec)[operand]
        return jax.ShapeDtypeStruct((spec.batch, rows, heads, columns), spec.result_dtype)


def in_place_of_queries(spec: Spec, q: Any, result: Any, warpgroups: int) -> dict[str, Any]:
    """Return buffers for queries and for the result that takes their place; a partial call's leaves from registers."""
    q_result = smem.reused(q, None if spec.partial else result)
    return dict(q_result=q_result, q_empty=None if q_result.is_one_layout else smem.barriers(1, arrivals=warpgroups))


class QueryRowsCta[Plan: QueryRowsPlan](Cta[Plan]):
    """A CTA that has 64 rows of queries for each warpgroup that computes."""

    batch: Any
    head: Any

    def __init__(self, plan: Plan, refs: Refs, ops: WarpgroupOps) -> None:
        schedule = plan.schedule
        self.take(plan, schedule.item(cta_index("wave"), cta_index("item")))
        self.block = schedule.blocks - 1 - cta_index("block")
        super().__init__(plan, refs, ops)
        self.q, self.staged = refs.smem.q_result
        place = Place(self.batch, self.head, self.block)
        self.tiles = tile_range.visited(self.inputs, place, plan.tile.rows, plan.tile.keys)
        self.first_row = self.block * plan.tile.rows

    def take(self, plan: Plan, item: WorkItem) -> None:
        """Take a work item: with a head of keys for each query head, a head group is a query head."""
        self.batch, self.head = item.batch, item.head_group

    @property
    def warpgroup_row(self) -> Any:
        """The first row of this warpgroup."""
        return self.first_row + self.warpgroup * WARPGROUP_ROWS

    @property
    def query_rows(self) -> Any:
        """The rows of this warpgroup, in device memory."""
        return pl.ds(self.warpgroup_row, WARPGROUP_ROWS)

    def walked(self) -> Sequence[Walked]:
        """Return what the producer fills for each tile of keys, in order."""
        raise NotImplementedError

    def walked_head(self, name: str, key_head: Any) -> Any:
        """Return the head of an array that is walked over."""
        return key_head

    def begin(self, buffers: Mapping[str, Ref], *statistics: str) -> list[Rows]:
        """Return row statistics by name, when this warpgroup's rows of arrays are in its buffers."""
        pipeline.release(self.smem.k.empty, self.smem.v.empty)
        pipeline.split_registers(self.plan.tile.warpgroups, copies=False)
        rows, full = self.query_rows, self.smem.rows_full.at[self.warpgroup]
        tile = GmemTile(self.batch, self.warpgroup_row, WARPGROUP_ROWS, self.head)
        self.copy_rows(tile, full, **{name: buffer.at[self.warpgroup] for name, buffer in buffers.items()})
        loaded = [self.ops.load(self.refs.arrays[name].at[self.batch, self.head, rows], 0) for name in statistics]
        plgpu.barrier_wait(full)
        return loaded

    def store_in_place(self, values: Tile, result: Ref, head: Any) -> None:
        """Store this warpgroup's rows of a result through the place of its queries; a partial call's from registers."""
        target = GmemTile(self.batch, self.warpgroup_row, WARPGROUP_ROWS, head).of(result, values.shape[1])
        if self.plan.spec.partial:
            target[...] = values
            return
        if self.smem.q_empty is not None:
            # In another layout they lie over the queries of other warpgroups too.
            plgpu.barrier_arrive(self.smem.q_empty)
            plgpu.barrier_wait(self.smem.q_empty)
        pipeline.store(values, self.staged.at[self.warpgroup], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy(self) -> None:
        """Copy tiles of keys and values ahead of the warpgroups that compute."""
        pipeline.split_registers(self.plan.tile.warpgroups, copies=True)
        walked, key_head = self.walked(), lax.div(self.head, self.plan.spec.group)

        def copy_tile(index: Array) -> None:
            slots = [lax.rem(index, ring.full.shape[0]) for ring, _ in walked]
            first = self.tiles.start(index)
            for slot, (ring, targets) in zip(slots, walked, strict=True):
                plgpu.barrier_wait(ring.empty.at[slot])
                for name, target in targets.items():
                    self._copy(name, first, key_head, target.at[slot], ring.full.at[slot])

        pipeline.for_each_copy(self.tiles.count, copy_tile, "wave", "item", "block")
        pipeline.drain(*(ring.empty for ring, _ in walked))

    def _copy(self, name: str, first: Any, key_head: Any, target: Ref, full: Ref) -> None:
        tile = self.plan.tile
        if name in ("bias", "t_bias"):
            tile_of_bias = pl.ds(self.first_row, tile.rows), pl.ds(first, tile.keys)
            plgpu.copy_gmem_to_smem(self.inputs.part(name, self.batch, self.head).at[tile_of_bias], target, full)
            return
        keys = GmemTile(self.batch, first, tile.keys, self.walked_head(name, key_head))
        self.inputs.copy_rows(name, keys, target, full)
