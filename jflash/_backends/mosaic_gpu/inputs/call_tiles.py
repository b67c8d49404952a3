"""Shared memory for tiles of a call's arrays: of operands in their pieces, and of results in the call's dtype."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from jflash._backends.mosaic_gpu.hardware import Buffers, smem
from jflash._backends.mosaic_gpu.inputs import array_shapes, operand_pieces
from jflash._semantics.spec import Spec


@dataclasses.dataclass(frozen=True)
class CallTiles:
    """What a kernel declares its tiles by: as for `smem.tile`, with the columns of one piece."""

    spec: Spec
    in_panels: bool

    @classmethod
    def of(cls, spec: Spec) -> Self:
        """Of any kernel but the forward's, which has rules of its own for panels."""
        return cls(spec, array_shapes.in_panels(spec))

    def operand(self, shape: tuple[int, ...], *divides: int, part: int | None = None) -> Any:
        """Tiles `[..., rows, columns]` of an operand, with all its pieces."""
        given, part = self._of_pieces(shape, divides, part)
        return smem.tile(*given, part=part, in_panels=self.in_panels)

    def ring(self, shape: tuple[int, ...], *divides: int, part: int | None = None, **options: Any) -> Buffers:
        """`smem.ring` of such tiles, whose other options these are."""
        given, part = self._of_pieces(shape, divides, part)
        return smem.ring(*given, part=part, in_panels=self.in_panels, **options)

    def result(self, shape: tuple[int, ...], *divides: int, part: int | None = None) -> Any:
        """Tiles `[..., rows, columns]` of a result."""
        return smem.tile(shape, self.spec.dtype, *divides, part=part, in_panels=self.in_panels)

    def _of_pieces(
        self, shape: tuple[int, ...], divides: tuple[int, ...], part: int | None
    ) -> tuple[tuple[Any, ...], int | None]:
        count = operand_pieces.number(self.spec)
        wide = (*shape[:-1], count * shape[-1]), operand_pieces.dtype(self.spec), *(count * width for width in divides)
        return wide, shape[-1] if part is None and count > 1 else part
