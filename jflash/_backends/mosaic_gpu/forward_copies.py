"""The forward's warpgroups that copy tiles of keys and values ahead of those that compute.

One copies both, and what there is of a bias. Of a cache that is converted (`converted_tile`) one has the keys and
another the values, since that takes about as long as the attention of few queries does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import bf16_columns, pipeline
from jflash._backends.mosaic_gpu.converted_tile import ConvertedTile, StagedTiles
from jflash._backends.mosaic_gpu.cta import Cta
from jflash._backends.mosaic_gpu.forward_plan import ForwardPlan
from jflash._backends.mosaic_gpu.forward_schedule import CtaPlace
from jflash._backends.mosaic_gpu.pipeline import GmemTile
from jflash._backends.mosaic_gpu.source_tile import SourceTile
from jflash._backends.nvidia import cache_rows
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_range import Place, Walk


class CopyingCta(Cta[ForwardPlan]):
    """A CTA of the forward, as far as it copies."""

    cta_place: CtaPlace

    def item(self, index: Any) -> tuple[Place, Walk]:
        """Return a work item's place and tiles of keys."""
        raise NotImplementedError

    def block_start(self, block: Any) -> Any:
        """The first row of a block."""
        return tile_range.block_start(block, self.plan.tile.rows, self.plan.missing_rows)

    def key_head(self, head: Any) -> Any:
        """The head of keys and values that a head of queries attends to."""
        return lax.div(head, self.plan.heads // self.plan.spec.key_heads)

    def split_registers(self, *, copies: bool) -> None:
        """Take this warpgroup's registers."""
        spec = self.plan.spec
        converts = cache_rows.converts(spec)
        pipeline.split_registers(
            self.plan.tile.warpgroups, copies=copies, mends=cache_rows.mends(spec), converts=converts
        )

    @property
    def copiers(self) -> Sequence[Callable[[], None]]:
        if self.smem.staged is None:
            return (self.copy,)
        return tuple(functools.partial(self._copy, name) for name in ("key", "value"))

    def copy(self) -> None:
        """Copy keys and values."""
        self._copy("key", "value")

    def _copy(self, *names: str) -> None:
        """Copy what is named. A warpgroup that converts is given one name."""
        plan, shared, rings = self.plan, self.smem, dict(key=self.smem.k, value=self.smem.v)
        self.split_registers(copies=True)

        def copy_block(index: Any, visited: Any) -> Any:
            place, tiles = self.item(index)
            key_head = self.key_head(place.group)
            tile: Callable[[Any], SourceTile | ConvertedTile]
            tile = lambda index: self._source(place.batch, tiles.start(index), key_head)
            if shared.staged is not None:
                (name,) = names
                tile = StagedTiles(name, getattr(shared.staged, name), tile, tiles.count).tile

            def copy_tile(index: Array) -> None:
                slot, walked = lax.rem(visited + index, plan.tile.stages), tile(index)
                for name in names:
                    plgpu.barrier_wait(rings[name].empty.at[slot])
                    walked.copy(name, rings[name], slot)
                    if name == "key":
                        self._copy_bias(walked.keys, place, slot)

            pipeline.for_each_copy(tiles.count, copy_tile, "head", "block", "head_group", "batch")
            return visited + tiles.count

        plan.schedule.each(self.cta_place, copy_block)
        pipeline.drain(*(rings[name].empty for name in names))

    def _source(self, batch: Any, first: Any, key_head: Any) -> SourceTile:
        keys = GmemTile(batch, first, self.plan.tile.keys, key_head)
        return SourceTile(self.inputs, keys, mends=cache_rows.mends(self.plan.spec))

    def _copy_bias(self, keys: GmemTile, place: Place, slot: Array) -> None:
        """Copy what there is of a bias, with the keys."""
        shared, inputs, full = self.smem, self.inputs, self.smem.k.full.at[slot]
        if shared.bias_columns is not None:
            source = bf16_columns.of_keys(inputs, keys, place.group)
            plgpu.copy_gmem_to_smem(source, shared.bias_columns.at[slot], full)
        if shared.bias is not None:
            tile = pl.ds(self.block_start(place.block), self.plan.tile.rows), pl.ds(keys.first, keys.size)
            plgpu.copy_gmem_to_smem(inputs.part("bias", keys.batch, place.group).at[tile], shared.bias.at[slot], full)
