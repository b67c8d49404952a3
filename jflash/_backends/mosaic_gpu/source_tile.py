"""A tile in device memory of what kernels walk over, and its copies to their rings.

A paged cache has a tile in parts, each in one page: a part is a copy by the descriptor of the whole cache. Past an
entry's keys a copy begins past the last row, where it reads zeros and no device memory. Behind the last key its page,
or array, may hold anything: those values become zeros before others read them, since 0 * NaN is NaN. The keys' logits
are hidden.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import pipeline
from jflash._backends.mosaic_gpu.panels import Panels
from jflash._backends.mosaic_gpu.pipeline import GmemTile, TmaInputs
from jflash._backends.nvidia import cache_rows
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers


class SourceTile:
    """A tile of an array, or of both keys and values.

    Pages are looked up when it is made, and so before its copies wait for their slots. A tile of keys whose kernel
    `mends` goes to rings that are made for it (`smem.ring`).
    """

    def __init__(self, inputs: TmaInputs, tile: GmemTile, *, mends: bool = False) -> None:
        self.inputs, self.keys, self._mends = inputs, tile, mends
        if mends:
            self._length: Any = inputs.value("key_lengths", tile.batch)
            self._parts = cache_rows.parts_of_tile(inputs, tile.batch, tile.first, tile.size, self._length)

    def copy(self, name: str, ring: Buffers, slot: Array, first_column: int = 0, cluster: str | None = None) -> None:
        """Copy the tile of an array, or some of its columns, to a slot of a ring, with zeros for values of padding.
        `cluster` is as for `pipeline.copy_in`."""
        tile = ring.tiles.at[slot]
        if not self._mends:
            self.inputs.copy_rows(name, self.keys, tile, ring.full.at[slot], first_column, cluster)
        elif name == "key":
            self.copy_parts(name, tile, ring.full.at[slot], first_column)
        else:
            self._copy_mended(ring, slot, first_column)

    @property
    def _has_padding(self) -> Any:
        return (self.keys.first < self._length) & (self._length < self.keys.first + self.keys.size)

    def _copy_mended(self, ring: Buffers, slot: Array, first_column: int) -> None:
        """Copy values, and if padding begins among them, wait for them and replace it before others may read them."""
        tile, own = ring.tiles.at[slot], ring.tiles.shape[0]
        has_padding = self._has_padding
        self.copy_parts("value", tile, ring.full.at[jnp.where(has_padding, own, slot)], first_column)

        def mend() -> None:
            plgpu.barrier_wait(ring.full.at[own])
            self._clear_padding(tile)
            plgpu.commit_smem()
            arrive(tile, ring.full.at[slot], len(self._parts))

        pl.when(has_padding)(mend)

    def copy_parts(self, name: str, tile: Ref, full: Ref, first_column: int = 0) -> None:
        """Copy the tile's keys, or values, as they are, or some of their columns."""
        cache, keys, parts, pages = self.inputs.refs[name], self.keys, self._parts, self.inputs.spec.pages
        if name == "value" and pages is not None and pages.interleaved:
            first_column += self.inputs.spec.head_dim
        batch = keys.batch if cache.shape[0] > 1 else keys.batch * 0

        def copy(index: int) -> None:
            row, size = parts[index]
            target = tile if len(parts) == 1 else tile.at[pl.ds(index * size, size)]
            source = GmemTile(batch, row, size, keys.head).of(cache, tile.shape[-1], first_column)
            pipeline.copy_in(source, target, full)

        pipeline.each_by_warps(copy, len(parts))

    def scales(self, name: str) -> list[Array]:
        """Return what the tile's keys, or values, are multiplied by: one number, one for each part, or none."""
        scales, pages = self.inputs.refs.get(cache_rows.SCALES[name]), self.inputs.spec.pages
        if scales is None:
            return []
        assert pages is not None
        last, keys = scales.shape[1] - 1, self.keys
        entry, head = (0 if scales.shape[axis] == 1 else at for axis, at in ((0, keys.batch), (2, keys.head)))
        parts = self._parts if last > 0 else self._parts[:1]
        return [scales[entry, jnp.minimum(lax.div(part.row, pages.size), last), head] for part in parts]

    def clear_padding(self, tile: Ref) -> None:
        """Replace values past the last key, which threads have stored, by zeros, if there are any."""

        def clear() -> None:
            # Other threads have stored what a thread replaces.
            plgpu.commit_smem()
            self._clear_padding(tile)

        pl.when(self._has_padding)(clear)

    def _clear_padding(self, tile: Ref) -> None:
        keys, ops = self.keys, self.inputs.ops
        for row in range(0, keys.size, WARPGROUP_ROWS):
            first, rows = keys.first + row, tile.at[pl.ds(row, WARPGROUP_ROWS)]

            def clear(first: Any = first, rows: Ref = rows) -> None:
                for some in pipeline.chunks_of_columns(rows):
                    values = ops.load(some)
                    is_inside = ops.indices(values.shape, 0, first) < self._length
                    some[...] = jnp.where(is_inside, values, jnp.zeros((), values.dtype))

            pl.when(self._length < first + WARPGROUP_ROWS)(clear)


def arrive(tile: Ref, full: Ref, parts: int) -> None:
    """Say that a tile is whole that threads stored, as often as copies of its parts would: once for each panel."""
    for _ in range(parts * (tile.number if isinstance(tile, Panels) else 1)):
        plgpu.barrier_arrive(full)
