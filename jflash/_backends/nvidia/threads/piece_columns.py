"""Columns of bfloat16 pieces: of each row, the pieces of its numbers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, BFloat16, Float32

from jflash._backends.nvidia.threads.builder import TILE, ThreadBuilder, array_type

PIECES = 3
"""bfloat16 numbers that together have the 24 bits of one float32 number."""


def of_rows(numbers: Sequence[Float32[Array, "64"]], columns: int) -> BFloat16[Array, "64 columns"]:
    """Return each row's pieces, the largest first: of its first number, of its second, and so on; then zeros.

    The number of columns is a multiple of 8.
    """
    shape = (*numbers[0].shape, columns)

    def make(o: ThreadBuilder, *numbers: Any) -> Any:
        wide, narrow = o.zero.type, o.ir.BF16Type.get()
        pieces = []
        for rest in numbers:
            for _ in range(PIECES):
                pieces.append(rest.astype(narrow).astype(wide))
                rest = rest - pieces[-1]
        held: Any = dict(layout=mgpu.WGMMA_LAYOUT)
        index = mgpu.FragmentedArray.broadcasted_iota(o.type, shape, 1, **held, is_signed=True)
        made = mgpu.FragmentedArray.splat(o.zero, shape, **held)
        for column, piece in enumerate(pieces):
            here = index == mgpu.FragmentedArray.splat(o(column), shape, **held, is_signed=True)
            made = here.select(piece.broadcast_in_dim(shape, (0,), **held), made)
        return made.astype(narrow)

    returns = array_type(shape, jnp.bfloat16)
    return ThreadBuilder.emit(make, *numbers, returns=returns, layout=TILE.reduce(1))
