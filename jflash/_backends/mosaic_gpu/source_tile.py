"""A tile in device memory of what kernels walk over, and its copies to their rings.

A paged cache has a tile in parts, each in one page: a part is a copy by the descriptor of the whole cache. Past an
entry's keys a copy begins past the last row, where it reads zeros and no device memory. Behind the last key its page,
or array, may hold anything: those values become zeros before others read them, since 0 * NaN is NaN. The keys' logits
are hidden.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import pipeline
from jflash._backends.mosaic_gpu.panels import Panels
from jflash._backends.mosaic_gpu.tma_inputs import GmemTile, TmaInputs
from jflash._backends.nvidia import cache_rows
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers


class SourceTile:
    """A tile of an array, or of both keys and values.

    Pages are looked up when it is made, and so before its copies wait for their slots. A tile of keys whose kernel
    `mends` goes to rings that are made for it (`smem.ring`).
    """

    def __init__(self, inputs: TmaInputs, tile: GmemTile, *, mends: bool = False) -> None:
        self._inputs, self._keys, self._mends = inputs, tile, mends
        if mends:
            self._length: Any = inputs.value("key_lengths", tile.batch)
            self._parts = cache_rows.parts_of_tile(inputs, tile.batch, tile.first, tile.size, self._length)

    def copy(self, name: str, ring: Buffers, slot: Array, first_column: int = 0, cluster: str | None = None) -> None:
        """Copy the tile of an array, or some of its columns, to a slot of a ring, with zeros for values of padding.
        `cluster` is as for `pipeline.copy_in`."""
        tile, pages = ring.tiles.at[slot], self._inputs.spec.pages
        if not self._mends:
            self._inputs.copy_rows(name, self._keys, tile, ring.full.at[slot], first_column, cluster)
        elif name == "key":
            self._copy_parts(name, tile, ring.full.at[slot], first_column)
        else:
            before = self._inputs.spec.head_dim if pages is not None and pages.interleaved else 0
            self._copy_mended(name, ring, slot, before + first_column)

    def _copy_mended(self, name: str, ring: Buffers, slot: Array, first_column: int) -> None:
        """Copy values, and if padding begins among them, wait for them and replace it before others may read them."""
        keys, tile, own = self._keys, ring.tiles.at[slot], ring.tiles.shape[0]
        has_padding = (keys.first < self._length) & (self._length < keys.first + keys.size)
        self._copy_parts(name, tile, ring.full.at[jnp.where(has_padding, own, slot)], first_column)

        def mend() -> None:
            plgpu.barrier_wait(ring.full.at[own])
            self._clear_padding(tile)
            plgpu.commit_smem()
            for _ in range(len(self._parts) * (tile.number if isinstance(tile, Panels) else 1)):
                plgpu.barrier_arrive(ring.full.at[slot])

        pl.when(has_padding)(mend)

    def _copy_parts(self, name: str, tile: Ref, full: Ref, first_column: int) -> None:
        cache, keys, parts = self._inputs.refs[name], self._keys, self._parts
        batch = keys.batch if cache.shape[0] > 1 else keys.batch * 0

        def copy(index: int) -> None:
            row, size = parts[index]
            target = tile if len(parts) == 1 else tile.at[pl.ds(index * size, size)]
            source = GmemTile(batch, row, size, keys.head).of(cache, tile.shape[-1], first_column)
            pipeline.copy_in(source, target, full)

        pipeline.each_by_warps(copy, len(parts))

    def _clear_padding(self, tile: Ref) -> None:
        keys, ops = self._keys, self._inputs.ops
        for row in range(0, keys.size, WARPGROUP_ROWS):
            first, rows = keys.first + row, tile.at[pl.ds(row, WARPGROUP_ROWS)]

            def clear(first: Any = first, rows: Ref = rows) -> None:
                for some in pipeline.chunks_of_columns(rows):
                    values = ops.load(some)
                    is_inside = ops.indices(values.shape, 0, first) < self._length
                    some[...] = jnp.where(is_inside, values, jnp.zeros((), values.dtype))

            pl.when(self._length < first + WARPGROUP_ROWS)(clear)
