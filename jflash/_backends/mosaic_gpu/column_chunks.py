"""A tile whose columns come to shared memory in chunks, of which each leaves as soon as it has been read.

    fixed [64, columns] tile^T = the sum over chunks of fixed[:, a chunk's columns] chunk^T

So tiles of which there is no room for two are copied ahead all the same. With pieces of float32 a chunk is of one
piece, and is multiplied with the pieces of `fixed` that `operand_pieces` says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import piece_products, smem
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.source_tile import SourceTile
from jflash._backends.nvidia import cache_rows
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.ops import Ref, Tile
from jflash._backends.nvidia.smem import Buffers
from jflash._semantics.spec import Spec

_MOST_COLUMNS = 192
"""The most columns of a chunk. Each is waited for, so they are few and wide."""


@dataclasses.dataclass(frozen=True)
class ColumnChunks:
    """How a tile is divided."""

    pieces: int
    columns: int
    """Columns of a piece."""
    width: int
    """Columns of a chunk."""

    @classmethod
    def of(cls, spec: Spec, columns: int, most: int = _MOST_COLUMNS) -> Self:
        """Divide tiles with `columns` of a piece, a multiple of 32, into chunks of whole swizzles, `most` at most."""
        swizzle = math.gcd(columns, 64)
        width = max(some for some in range(swizzle, most + 1, swizzle) if columns % some == 0)
        return cls(facts_of(spec).pieces, columns, width)

    @property
    def of_a_piece(self) -> int:
        """How many chunks a piece has."""
        return self.columns // self.width

    @property
    def number(self) -> int:
        """How many chunks a tile has."""
        return self.pieces * self.of_a_piece

    @property
    def least(self) -> int:
        """How few chunks may be in shared memory together: one leaves when the next one's product is issued."""
        return min(self.number, max(2, self.of_a_piece if self.pieces > 2 else 1))

    @property
    def first_columns(self) -> Sequence[int]:
        """Where each chunk begins in device memory, in the order in which they come: the smallest piece first."""
        pieces, columns = reversed(range(self.pieces)), range(0, self.columns, self.width)
        return [piece * self.columns + first for piece in pieces for first in columns]

    @property
    def products(self) -> Sequence[tuple[int, int]]:
        """The chunk of each product of the matrix unit, and the piece of `fixed` that it is multiplied with.

        The smallest products come first, as what is added to zeros is rounded least; of three pieces over all chunks,
        of two over each, as the rest is not so exact that it matters.
        """
        found: list[tuple[int, int]] = []
        for turn in range(self.pieces):
            chunks, factors = range(turn * self.of_a_piece, (turn + 1) * self.of_a_piece), range(turn, -1, -1)
            if self.pieces > 2:
                found += [(chunk, factor) for factor in factors for chunk in chunks]
            else:
                found += [(chunk, factor) for chunk in chunks for factor in factors]
        return found

    def ring(self, spec: Spec, slots: int, rows: int, columns: int, **options: Any) -> Buffers:
        """Shared memory for chunks `[slots, rows, width]`, copied from an array whose pieces have `columns`; with the
        `options` of `smem.ring`."""
        shape, in_array = (slots, rows, self.width), columns * self.pieces
        tiles = smem.tile(shape, facts_of(spec).operand_dtype, in_array, chunk=self.width)
        return smem.ring(tiles, parts=cache_rows.parts(spec, rows), **options)


@dataclasses.dataclass(frozen=True)
class ChunkRing:
    """The ring that the chunks of all tiles go through, in the order of the tiles."""

    chunks: ColumnChunks
    ring: Buffers
    cluster: str | None = None
    """The axis of the CTAs that share copies, if some do."""
    again: int | None = None
    """The chunk that `product`'s warpgroup reads again before it leaves, if there is one."""

    def slot(self, step: Any, chunk: int) -> Array:
        """Return the slot of a step's chunk."""
        return lax.rem(step * self.chunks.number + chunk, self.ring.tiles.shape[0])

    def copy(self, source: SourceTile, name: str, step: Any, chunk: int) -> None:
        """Copy a chunk of a step's tile, as soon as its slot is free."""
        ring, slot = self.ring, self.slot(step, chunk)
        plgpu.barrier_wait(ring.empty.at[slot])
        source.copy(name, ring, slot, self.chunks.first_columns[chunk], self.cluster)

    def product(self, spec: Spec, fixed: Ref, step: Any, shape: tuple[int, int], ops: WarpgroupOps) -> Tile:
        """fixed tile^T of a step's tile, whose chunks leave as they have been read."""
        ring, chunks = self.ring, self.chunks
        # Where a chunk has the same slot in every tile, its addresses would stay in registers.
        same_slots = chunks.number % ring.tiles.shape[0] == 0
        opaque_index = ops.opaque_zero(step) if same_slots else 0

        def multiply(acc: Any) -> Array:
            read = None
            for chunk, factor in chunks.products:
                slot, (turn, place) = self.slot(step, chunk), divmod(chunk, chunks.of_a_piece)
                if factor == turn:
                    plgpu.barrier_wait(ring.full.at[slot])
                factors = piece_products.of_tile(spec, fixed, place * chunks.width, chunks.width)
                ops.mma(acc, factors[factor], ring.tiles.at[slot + opaque_index].T)
                if read is not None:
                    ops.wait(1)
                    plgpu.barrier_arrive(ring.empty.at[read])
                # A chunk's products begin with the piece of its own turn, and end with the first.
                read = slot if factor == 0 and chunk != self.again else None
            made = ops.read(acc)
            if read is not None:
                plgpu.barrier_arrive(ring.empty.at[read])
            return made

        return ops.accumulators(multiply, shape)
