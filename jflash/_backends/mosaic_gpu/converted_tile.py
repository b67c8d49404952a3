"""Tiles of a paged cache that is not in the query's dtype, or has scales: copied as they are, and converted.

No copy converts. So a warpgroup that copies has buffers of its own, into which tiles come ahead of it. It multiplies
their numbers by their pages' scales, rounds them to the query's dtype, and stores them in the ring that others read.
The readers cannot tell the difference.

What was measured: examples/benchmarks/experiments/2026-11-29-decoding.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jflash._backends.mosaic_gpu import pipeline, smem
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.source_tile import SourceTile, arrive
from jflash._backends.nvidia import cache_rows
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import Buffers
from jflash._backends.nvidia.threads import eights
from jflash._backends.nvidia.threads.builder import THREADS
from jflash._semantics.spec import Spec

_WIDEST = 128
"""The most columns that are converted at once. In 8 bits a row of them spans all banks of shared memory."""

_NUMBERS = 32
"""Numbers that a thread converts at once: it loads them all before it waits for the first."""

_STAGED_BYTES = 2**16
"""Bytes that a multiprocessor has in flight, enough to keep device memory busy."""

_LEAST = 32
"""H and D must be multiples of this: 32 columns of 16 bits fill a 64-byte swizzle."""


def unsupported(spec: Spec) -> str | None:
    """Return why a call's paged cache is not converted, in words for the user; `None`: it is, or need not be."""
    pages = spec.pages
    if pages is None or not cache_rows.converts(spec):
        return None
    if spec.head_dim % _LEAST or spec.value_dim % _LEAST:
        return f"it converts paged caches where {_LEAST} divides H and D. Got H={spec.head_dim} and D={spec.value_dim}."
    least = eights.NUMBERS // _columns(spec)
    if not spec.operands.isdisjoint(cache_rows.SCALES.values()) and pages.size < least:
        return f"it takes scales of pages of at least {least} keys. Got pages of {pages.size}."
    return None


def _columns(spec: Spec) -> int:
    """Return the fewest columns that are converted at once."""
    return min(64, *(dim & -dim for dim in (spec.head_dim, spec.value_dim)))


def buffers(spec: Spec, keys: int) -> Buffers | None:
    """Return the buffers into which tiles of `keys` keys are copied unconverted, by name; `None` without conversion."""
    pages = spec.pages
    if pages is None or not cache_rows.converts(spec):
        return None
    number = max(2, _STAGED_BYTES // (keys * (spec.head_dim + spec.value_dim) * pages.dtype.itemsize))

    def staged(columns: int) -> Buffers:
        full = smem.barriers(number, arrivals=cache_rows.parts(spec, keys))
        return Buffers(tiles=plgpu.SMEM((number, keys, columns), pages.dtype), full=full)

    return Buffers(key=staged(spec.head_dim), value=staged(spec.value_dim))


class StagedTiles:
    """The keys, or values, of a walk's tiles. Copies run ahead of the conversion, one tile for each buffer."""

    def __init__(self, name: str, staged: Buffers, tile: Callable[[Any], SourceTile], count: Int[Array, ""]) -> None:
        """Begin to copy those of the first of `count` tiles."""
        self.name, self.staged, self.count, self._tile = name, staged, count, tile
        self.depth = staged.tiles.shape[0]
        lax.fori_loop(0, jnp.minimum(count, self.depth), lambda index, _: self.copy(tile(index), index), None)

    def tile(self, index: Int[Array, ""]) -> ConvertedTile:
        """Return a tile of the walk; its pages are looked up now, and those of the tile that takes its place."""
        later = jnp.minimum(index + self.depth, self.count - 1)
        return ConvertedTile(self, index, self._tile(index), self._tile(later))

    def copy(self, source: SourceTile, index: Int[Array, ""]) -> None:
        """Begin to copy a tile, number `index` of the walk, to its buffer."""
        slot = lax.rem(index, self.depth)
        source.copy_parts(self.name, self.staged.tiles.at[slot], self.staged.full.at[slot])


class ConvertedTile:
    """Keys, or values, of a tile, with the interface of a `SourceTile`."""

    def __init__(self, every: StagedTiles, index: Int[Array, ""], source: SourceTile, later: SourceTile) -> None:
        self._every, self._index, self._source, self._later = every, index, source, later
        self.keys = source.keys

    def copy(self, name: str, ring: Buffers, slot: Int[Array, ""]) -> None:
        """Convert them into a slot of a ring, and begin to copy those that take their place."""
        every, index, tile = self._every, self._index, ring.tiles.at[slot]
        own = lax.rem(index, every.depth)
        plgpu.barrier_wait(every.staged.full.at[own])
        self._convert(name, every.staged.tiles.at[own], tile)
        if name == "value":
            self._source.clear_padding(tile)
        plgpu.commit_smem()
        arrive(tile, ring.full.at[slot], parts=1)
        later = index + every.depth
        pl.when(later < every.count)(lambda: every.copy(self._later, later))

    def _convert(self, name: str, staged: Ref, tile: Ref) -> None:
        ops, scales = self._source.inputs.ops, self._source.scales(name)
        assert isinstance(ops, WarpgroupOps)
        keys, number, column = staged.shape[0], max(1, len(scales)), 0
        for target in pipeline.chunks_of_columns(tile, _WIDEST):
            width = target.shape[-1]
            rows = min(keys // number, THREADS * _NUMBERS // width)
            for row in range(0, keys, rows):
                place = pl.ds(row, rows)
                numbers = ops.load_eights(staged.at[place, pl.ds(column, width)])
                factor = scales[row * number // keys] if scales else None
                target.at[place][...] = _converted(numbers, tile.dtype, factor, ops)
            column += width


def _converted(numbers: Array, dtype: Any, factor: Array | None, ops: WarpgroupOps) -> Array:
    """Return numbers of 8 or 16 bits times a factor, if there is one, in a dtype of 16 bits."""
    if dtype == jnp.bfloat16 and numbers.dtype.itemsize == 1:
        # bfloat16 has all of 8 bits; Mosaic makes it of float8 by way of float32.
        exact = numbers if numbers.dtype == jnp.int8 else numbers.astype(jnp.float32)
        exact = exact.astype(dtype)
        return exact if factor is None else ops.times_eights(exact, factor)
    numbers = numbers.astype(jnp.float32)
    return (numbers if factor is None else numbers * factor).astype(dtype)
