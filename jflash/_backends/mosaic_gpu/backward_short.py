"""Backward, fused, of short sequences: a CTA has all queries and keys of a head, and dQ stays in shared memory.

    dQ = 0                                            by the threads that add to it
    for each block of keys:
      dK, dV, dQ += ...                               as `query_walk` has them
      store dK, dV                                    while the next block's keys are copied
    store dQ

Where several query heads share keys, a CTA has all of those. Each sum has one order, so `deterministic` asks for no
other kernel. CTAs take one work item after the other, and the producer is ahead of what is stored.

A head's dQ in float32 has to fit beside the tiles: 512 rows of 64 columns, 256 of 96, 128 of 128.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import pipeline, row_statistics, smem
from jflash._backends.mosaic_gpu.array_shapes import whole_dims, whole_rows
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.query_walk import QueryWalkCta, QueryWalkPlan, Step, WalkBuffers
from jflash._backends.mosaic_gpu.smem import CallTiles, Overlaid
from jflash._backends.mosaic_gpu.tiles import ShortTiles
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Launch, Refs, cta_index
from jflash._backends.nvidia.ops import Tile
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.tile.gradient_sums import ParameterSums, TableSums
from jflash._backends.nvidia.walk.backward_schedule import WorkItem
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._semantics.spec import Spec

_GAIN = 1.2
"""How much longer the other fused kernel takes: as much as multiprocessors may be idle here."""


@dataclasses.dataclass(frozen=True)
class ShortPlan(QueryWalkPlan):
    """One kernel for dQ, dK and dV, whose CTAs have all queries and keys of a head, or of all heads that share keys."""

    tile: ShortTiles
    ctas: int

    @property
    def visits(self) -> Blocks:
        return Blocks(self.tile.keys, self.tile.queries, self.spec.group, of_keys=True)

    @property
    def items(self) -> int:
        """Work items: each key head of each batch entry."""
        return self.spec.batch * self.spec.key_heads

    @property
    def blocks(self) -> int:
        """Blocks of keys that a work item has."""
        return pl.cdiv(self.spec.key_length, self.tile.keys)

    @property
    def tiles(self) -> int:
        """Tiles of queries that a head has."""
        return pl.cdiv(self.spec.query_length, self.tile.queries)

    @property
    def alignment(self) -> int:
        return WARPGROUP_ROWS

    def item(self, number: Any) -> WorkItem:
        """Return a work item by its number. Neighbours are heads of one entry, side by side in device memory."""
        batch, head = lax.div(number, self.spec.key_heads), lax.rem(number, self.spec.key_heads)
        return WorkItem(batch, head, head, head * self.spec.group)

    @property
    def launch(self) -> Launch:
        spec, (head_dim, value_dim) = self.spec, whole_dims(self.spec)
        array = lambda rows, *dims: jax.ShapeDtypeStruct((spec.batch, whole_rows(spec, rows), *dims), spec.dtype)
        return Launch(
            name=f"jflash_backward_short_{head_dim}_{value_dim}",
            grid=dict(cta=self.ctas),
            results=dict(
                d_query=array(spec.query_length, spec.heads, head_dim),
                d_key=array(spec.key_length, spec.key_heads, head_dim),
                d_value=array(spec.key_length, spec.key_heads, value_dim),
                **self.sums.results(spec.batch, spec.heads, self.blocks * self.tile.keys),
            ),
            smem=shared_memory(spec, self.tile),
            warpgroups=self.tile.warpgroups + 1,
        )


def dq_shares(spec: Spec, tile: ShortTiles) -> int:
    """Return how many shares of a work item's dQ warpgroups make: tiles, or halves of them."""
    return (tile.warpgroups if tile.halves else 1) * spec.group * pl.cdiv(spec.query_length, tile.queries)


def shared_memory(spec: Spec, tile: ShortTiles) -> Buffers:
    """Return the kernel's buffers and barriers."""
    walk, dim = WalkBuffers(spec, tile), whole_dims(spec)[0]
    k, v = walk.keys_and_values(tile.key_stages)
    # Shares of dQ that are stored at once: as many as have the size of dS.
    slots = max(1, 2 * tile.keys // (tile.warpgroups * walk.dq_width))
    rounded_dq = CallTiles.of(spec).result((tile.warpgroups, slots, WARPGROUP_ROWS, walk.dq_width), dim)
    return Buffers(
        k=k,
        v=v,
        kv_full=smem.barriers(tile.key_stages, arrivals=smem.copies(k, v)),
        kv_empty=smem.barriers(tile.key_stages, arrivals=tile.warpgroups),
        ones_full=smem.barriers(1),
        **walk.walked(),
        # What is stored takes the place of dS^T, so that keys and values are copied meanwhile.
        ds_gradients=Overlaid.of(walk.ds(), walk.gradients(), rounded_dq),
        acc_dq=smem.tile((dq_shares(spec, tile), WARPGROUP_ROWS, walk.dq_width), jnp.float32, dim),
    )


def plan(spec: Spec, tile: ShortTiles, sums: ParameterSums, processors: int | None) -> ShortPlan:
    """Return the plan of a call on a device with `processors` multiprocessors; `None` where that is unknown."""
    items = spec.batch * spec.key_heads
    tables = TableSums.of(spec, pl.cdiv(spec.key_length, tile.keys), tile.warpgroups, processors)
    return ShortPlan(spec, sums, tables, tile, min(items, processors or items))


def suits(spec: Spec, processors: int | None) -> bool:
    """Whether there are work items for all multiprocessors, and no sums that go on after the call."""
    items = spec.batch * spec.key_heads
    at_once = processors or items
    return not spec.partial and pl.cdiv(items, at_once) * at_once <= _GAIN * items


class ShortCta(QueryWalkCta[ShortPlan]):
    """A CTA that takes one work item after the other, block by block."""

    axis = "cta"
    first_step: Any
    """Blocks of keys before the work item."""
    slot: Any
    """The place of a block's keys and values."""

    def __init__(self, plan: ShortPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops)
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
        cta, ctas = cta_index("cta"), self.plan.ctas

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
            self.order = self.order_of(self.visited(block, self.plan.alignment), block)
            visit()

        lax.fori_loop(0, plan.blocks, take, None)

    def _copy_block(self) -> None:
        plgpu.barrier_wait(self.smem.kv_empty.at[self.slot])
        pl.when(self.order.tiles.count > 0)(lambda: self.copy_keys(self.smem.kv_full.at[self.slot]))
        self.copy_queries(row_statistics.early(self.plan.spec))

    def _compute_item(self) -> None:
        self._each_share(self._zero)
        self._each_block(self._compute_block)
        self._wait_for_copies()
        self._each_share(self._store_share)

    def _wait_for_copies(self) -> None:
        """Wait until what both warpgroups store has left shared memory, where something else takes its place."""
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
        # From tile to tile: each block of keys adds to what the same warpgroup's threads have.
        return self._tile(at)

    def dq_target(self, at: Step) -> Any:
        tile, every = self._tile(at), self.plan.tile.warpgroups
        return self.smem.acc_dq.at[tile * every + self.warpgroup if self.plan.tile.halves else tile]

    def add_to_dq(self, target: Any, dq: Tile) -> None:
        # Each thread adds to numbers that it alone reads.
        target[...] = self.ops.load(target) + dq

    def _tile(self, at: Step) -> Any:
        """Return the number of a step's tile, among those of all heads."""
        return at.head * self.plan.tiles + lax.div(at.eighth, WARPGROUP_ROWS // 8)

    def _each_share(self, visit: Callable[[Any, Any], None]) -> None:
        """Call `visit(number, share)` for this warpgroup's shares of dQ, every other one."""
        every = self.plan.tile.warpgroups
        number, more = divmod(dq_shares(self.plan.spec, self.plan.tile), every)
        if more:
            number = jnp.where(self.warpgroup < more, number + 1, number)
        lax.fori_loop(0, number, lambda number, _: visit(number, number * every + self.warpgroup), None)

    def _zero(self, _: Any, share: Any) -> None:
        acc = self.smem.acc_dq.at[share]
        acc[...] = self.ops.full(acc.shape, 0)

    def _store_share(self, number: Any, share: Any) -> None:
        """Issue a copy of a share of dQ, rounded."""
        plan, result = self.plan, self.refs.results["d_query"]
        slots = self.rounded_dq.shape[1]
        rounded = self.rounded_dq.at[self.warpgroup, lax.rem(number, slots)]
        dq = self.ops.load(self.smem.acc_dq.at[share]) * facts_of(plan.spec).sums_scale
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        rounded[...] = dq.astype(result.dtype)
        plgpu.commit_smem()
        tile, width = share, plan.buffers.dq_width
        columns = pipeline.columns(width, result, self.item.batch)
        if plan.tile.halves:
            tile, columns = number, pl.ds(self.warpgroup * width, width)
        head, rows = self.item.first_head + lax.div(tile, plan.tiles), lax.rem(tile, plan.tiles) * WARPGROUP_ROWS
        pipeline.copy_out(rounded, result.at[self.item.batch, pl.ds(rows, WARPGROUP_ROWS), head, columns])
