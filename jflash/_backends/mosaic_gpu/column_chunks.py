"""A tile whose columns come to shared memory in parts, of which each leaves as soon as it has been read.

    own [64, columns] tile^T = the sum over parts of own[:, a part's columns] part^T

So tiles of which there is no room for two are copied ahead all the same. With pieces of float32 a part is of one piece,
and is multiplied with the pieces of `own` that `operand_pieces` says.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import piece_products, smem
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.tma_inputs import GmemTile, TmaInputs
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import Buffers
from jflash._backends.nvidia.tile import operand_pieces
from jflash._semantics.spec import Spec

_MOST_COLUMNS = 192
"""Of a part: each is waited for. With 64 the kernels of d256 in float32 take 1.35 times as long (one H100)."""


class PartProduct(NamedTuple):
    """One product of the matrix unit: some columns of a piece of `own`, and a part."""

    part: int
    first_column: int
    own_piece: int
    is_first: bool
    """Of the part's products."""
    is_last: bool
    """Likewise."""


@dataclasses.dataclass(frozen=True)
class TileParts:
    """How a tile is divided."""

    pieces: int
    columns: int
    """Of a piece."""
    width: int
    """Columns of a part."""

    @classmethod
    def of(cls, spec: Spec, columns: int, most: int = _MOST_COLUMNS) -> Self:
        """The parts of tiles with `columns` of a piece, a multiple of 32, each of `most` at most: whole swizzles."""
        swizzle = math.gcd(columns, 64)
        width = max(some for some in range(swizzle, most + 1, swizzle) if columns % some == 0)
        return cls(operand_pieces.number(spec), columns, width)

    @property
    def of_a_piece(self) -> int:
        """How many parts a piece has."""
        return self.columns // self.width

    @property
    def number(self) -> int:
        """How many a tile has."""
        return self.pieces * self.of_a_piece

    @property
    def least(self) -> int:
        """How many are in shared memory together, at least: a part leaves when the next one's product is issued."""
        return min(self.number, max(2, self.of_a_piece if self._waits_for_a_piece else 1))

    @property
    def first_columns(self) -> Sequence[int]:
        """Where each part begins in device memory, in the order in which they come: the smallest piece first."""
        pieces, columns = reversed(range(self.pieces)), range(0, self.columns, self.width)
        return [piece * self.columns + first for piece in pieces for first in columns]

    @property
    def products(self) -> Sequence[PartProduct]:
        """All products, in their order: the smallest first, as what is added to zeros is rounded least."""
        found: list[PartProduct] = []
        for turn, piece in enumerate(reversed(range(self.pieces))):
            own_pieces, places = range(self.pieces - 1 - piece, -1, -1), range(self.of_a_piece)
            pairs = itertools.product(own_pieces, places)
            if not self._waits_for_a_piece:
                pairs = ((own, place) for place, own in itertools.product(places, own_pieces))
            found += (
                PartProduct(turn * self.of_a_piece + place, place * self.width, own, own == own_pieces[0], own == 0)
                for own, place in pairs
            )
        return found

    @property
    def _waits_for_a_piece(self) -> bool:
        """Whether a piece's parts stay until its largest products are made, after all smaller ones. With two pieces the
        rest is not so exact that it matters."""
        return self.pieces > 2

    def ring(self, spec: Spec, slots: int, rows: int, columns: int, cluster: str | None = None) -> Buffers:
        """Shared memory for parts `[slots, rows, width]`, copied from an array whose pieces have `columns`.

        One warpgroup of each CTA along `cluster` reads them.
        """
        shape, in_array = (slots, rows, self.width), columns * self.pieces
        return smem.ring(shape, operand_pieces.dtype(spec), in_array, readers=1, chunk=self.width, cluster=cluster)


@dataclasses.dataclass(frozen=True)
class PartsRing:
    """The ring that the parts of all tiles go through, in the order of the tiles."""

    parts: TileParts
    ring: Buffers
    cluster: str | None = None
    """The axis of the CTAs that share copies, if some do."""

    def slot(self, step: Any, part: int) -> Array:
        """Of a part of a step's tile."""
        return lax.rem(step * self.parts.number + part, self.ring.tiles.shape[0])

    def copy(self, inputs: TmaInputs, name: str, tile: GmemTile, step: Any, part: int) -> None:
        """Copy a part of a step's tile, as soon as its slot is free."""
        ring, slot = self.ring, self.slot(step, part)
        first_column = self.parts.first_columns[part]
        plgpu.barrier_wait(ring.empty.at[slot])
        inputs.copy_rows(name, tile, ring.tiles.at[slot], ring.full.at[slot], first_column, self.cluster)

    def product(
        self, spec: Spec, own: Ref, step: Any, shape: tuple[int, int], ops: WarpgroupOps
    ) -> Float[Array, "rows columns"]:
        """own tile^T of a step's tile, whose parts leave as they have been read."""
        ring = self.ring
        # Where a part has the same slot in every tile, its addresses would stay in registers.
        same_slots = self.parts.number % ring.tiles.shape[0] == 0
        opaque_index = ops.opaque_zero(step) if same_slots else 0

        def multiply(acc: Any) -> Array:
            read = None
            for product in self.parts.products:
                slot = self.slot(step, product.part)
                if product.is_first:
                    plgpu.barrier_wait(ring.full.at[slot])
                factor = piece_products.of_tile(spec, own, product.first_column, self.parts.width)[product.own_piece]
                ops.mma(acc, factor, ring.tiles.at[slot + opaque_index].T)
                if read is not None:
                    ops.wait(1)
                    plgpu.barrier_arrive(ring.empty.at[read])
                read = slot if product.is_last else None
            made = ops.read(acc)
            plgpu.barrier_arrive(ring.empty.at[read])
            return made

        return ops.accumulators(multiply, shape)
