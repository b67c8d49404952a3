"""What the kernels of dQ and of the tangent share: a CTA owns rows of queries and walks over the keys that they see."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import pipeline
from jflash._backends.mosaic_gpu.cta import Cta
from jflash._backends.mosaic_gpu.tiles import RowTiles
from jflash._backends.mosaic_gpu.tma_inputs import GmemTile, TmaInputs
from jflash._backends.nvidia.launch import KernelPlan
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.tile_range import TileRange


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


class Walked(NamedTuple):
    """A ring of shared memory that the producer fills with tiles of keys."""

    ring: Buffers
    stages: int
    targets: Mapping[str, Ref]
    """The buffers by the names of what is copied to them, in the order of the copies."""


class QueryRowsCta[Plan: QueryRowsPlan](Cta[Plan]):
    """A CTA that has 64 rows of queries for each warpgroup that computes."""

    batch: Any
    head: Any
    first_row: Any
    tiles: TileRange

    @property
    def own_row(self) -> Any:
        """The first row of this warpgroup."""
        return self.first_row + self.warpgroup * WARPGROUP_ROWS

    def walked(self) -> Sequence[Walked]:
        """Return what the producer fills for each tile of keys, in order."""
        raise NotImplementedError

    def walked_head(self, name: str, key_head: Any) -> Any:
        """Return the head of an array that is walked over."""
        return key_head

    def bias_inputs(self, name: str) -> TmaInputs | None:
        """Return the inputs that have a bias of this name; `None` for arrays of keys and values."""
        return self.inputs if name == "bias" else None

    def copy_own(self, buffers: Mapping[str, Ref], full: Ref) -> None:
        """Copy this warpgroup's rows of arrays to its buffers."""
        rows = GmemTile(self.batch, self.own_row, WARPGROUP_ROWS, self.head)
        for name, buffer in buffers.items():
            self.inputs.copy_rows(name, rows, buffer.at[self.warpgroup], full)

    def store_in_place(self, values: Float[Array, "rows columns"], staged: Ref, result: Ref, head: Any) -> None:
        """Store this warpgroup's rows of a result through the place of its queries; a partial call's from registers."""
        target = GmemTile(self.batch, self.own_row, WARPGROUP_ROWS, head).of(result, values.shape[1])
        if self.plan.spec.partial:
            target[...] = values
            return
        if self.smem.q_empty is not None:
            # In another layout they lie over the queries of other warpgroups too.
            plgpu.barrier_arrive(self.smem.q_empty)
            plgpu.barrier_wait(self.smem.q_empty)
        pipeline.store(values, staged.at[self.warpgroup], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy(self) -> None:
        """Copy tiles of keys and values ahead of the warpgroups that compute."""
        pipeline.split_registers(self.plan.tile.warpgroups, copies=True)
        walked, key_head = self.walked(), lax.div(self.head, self.plan.spec.group)

        def copy_tile(index: Array) -> None:
            slots = [lax.rem(index, one.stages) for one in walked]
            first = self.tiles.start(index)
            for slot, (ring, _, targets) in zip(slots, walked, strict=True):
                plgpu.barrier_wait(ring.empty.at[slot])
                for name, target in targets.items():
                    self._copy(name, first, key_head, target.at[slot], ring.full.at[slot])

        pipeline.for_each_copy(self.tiles.count, copy_tile, "wave", "item", "block")
        pipeline.drain(*(one.ring.empty for one in walked))

    def _copy(self, name: str, first: Any, key_head: Any, target: Ref, full: Ref) -> None:
        tile, inputs = self.plan.tile, self.bias_inputs(name)
        if inputs is None:
            keys = GmemTile(self.batch, first, tile.keys, self.walked_head(name, key_head))
            self.inputs.copy_rows(name, keys, target, full)
            return
        tile_of_bias = pl.ds(self.first_row, tile.rows), pl.ds(first, tile.keys)
        plgpu.copy_gmem_to_smem(inputs.part("bias", self.batch, self.head).at[tile_of_bias], target, full)
