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
from typing import NamedTuple, Self

from jflash._backends.mosaic_gpu.inputs import operand_pieces
from jflash._semantics.spec import Spec

_MOST_COLUMNS = 128
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
    def of(cls, spec: Spec, columns: int) -> Self:
        """The parts of tiles with `columns` of a piece, a multiple of 32: whole swizzles."""
        swizzle = math.gcd(columns, 64)
        width = max(some for some in range(swizzle, _MOST_COLUMNS + 1, swizzle) if columns % some == 0)
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
        """How many are in shared memory together, at least."""
        return self.of_a_piece if self._waits_for_a_piece else 1

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
