"""float32 numbers as columns of bfloat16 pieces, which the matrix unit adds to products."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Array, Float

PIECES = 3
"""bfloat16 numbers that together have the 24 bits of one float32 number."""
STORED_COLUMNS = 8
"""Columns in device memory: up to two numbers' pieces, in rows of 16 bytes, the least that copies take."""
SMEM_COLUMNS = 16
"""Columns in shared memory: K of the matrix unit's instruction. Copies read 0 for what is not stored."""


def split(rest: Float[Array, "..."], rounded: Callable[[Array], Array]) -> list[Float[Array, "..."]]:
    """bfloat16 numbers whose sum is the given finite number; `rounded` gives the nearest bfloat16."""
    pieces: list[Array] = []
    for _ in range(PIECES):
        pieces.append(rounded(rest))
        rest = rest - pieces[-1]
    return pieces
