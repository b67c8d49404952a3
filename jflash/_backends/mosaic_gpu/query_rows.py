"""What the kernels of dQ and of the tangent share: a CTA owns rows of queries and walks over the keys that they see."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import pipeline, smem
from jflash._backends.mosaic_gpu.array_shapes import tile_dims, whole_dims, whole_rows
from jflash._backends.mosaic_gpu.cta import Cta
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.tiles import RowTiles
from jflash._backends.mosaic_gpu.tma_inputs import GmemTile, TmaInputs
from jflash._backends.nvidia.launch import KernelPlan, Refs
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule, WorkItem
from jflash._semantics.spec import Spec

Walked = tuple[Buffers, Mapping[str, Ref]]
"""A ring that is filled with tiles of keys, and its buffers by the names of what is copied to them, in that order."""


@dataclasses.dataclass(frozen=True)
class QueryRowsPlan(KernelPlan):
    """A kernel whose CTAs own rows of queries, before any array."""

    tile: RowTiles
    schedule: BackwardSchedule
    """The schedule of blocks of queries; every head, or every chunk of its columns, has blocks of its own."""

    @property
    def grid(self) -> dict[str, int]:
        """The axes of the kernel's grid."""
        return dict(wave=self.schedule.waves, block=self.schedule.blocks, item=self.schedule.items)

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
        self.take(plan, schedule.item(lax.axis_index("wave"), lax.axis_index("item")))
        self.block = schedule.blocks - 1 - lax.axis_index("block")
        super().__init__(plan, refs, ops)
        self.q, self.staged = refs.smem.q_result
        self.tiles = tile_range.visited(self.inputs, self.batch, self.block, plan.tile.rows, plan.tile.keys)
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

    def bias_inputs(self, name: str) -> TmaInputs | None:
        """Return the inputs that have a bias of this name; `None` for arrays of keys and values."""
        return self.inputs if name == "bias" else None

    def begin(self, buffers: Mapping[str, Ref], *statistics: str) -> list[Float[Array, "rows"]]:
        """Return row statistics by name, when this warpgroup's rows of arrays are in its buffers."""
        pipeline.release(self.smem.k.empty, self.smem.v.empty)
        pipeline.split_registers(self.plan.tile.warpgroups, copies=False)
        rows, full = self.query_rows, self.smem.rows_full.at[self.warpgroup]
        tile = GmemTile(self.batch, self.warpgroup_row, WARPGROUP_ROWS, self.head)
        self.copy_rows(tile, full, **{name: buffer.at[self.warpgroup] for name, buffer in buffers.items()})
        loaded = [self.ops.load(self.refs.arrays[name].at[self.batch, self.head, rows], 0) for name in statistics]
        plgpu.barrier_wait(full)
        return loaded

    def store_in_place(self, values: Float[Array, "rows columns"], result: Ref, head: Any) -> None:
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
        tile, inputs = self.plan.tile, self.bias_inputs(name)
        if inputs is None:
            keys = GmemTile(self.batch, first, tile.keys, self.walked_head(name, key_head))
            self.inputs.copy_rows(name, keys, target, full)
            return
        tile_of_bias = pl.ds(self.first_row, tile.rows), pl.ds(first, tile.keys)
        plgpu.copy_gmem_to_smem(inputs.part("bias", self.batch, self.head).at[tile_of_bias], target, full)
