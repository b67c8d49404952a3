"""float32 numbers as columns of bfloat16 pieces, which the matrix unit adds to products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jflash._backends.mosaic_gpu import pipeline, smem
from jflash._backends.nvidia.ops import Ref

PIECES = 3
"""bfloat16 numbers that together have the 24 bits of one float32 number."""
STORED_COLUMNS = 8
"""Columns in device memory: up to two numbers' pieces, in rows of 16 bytes, the least that copies take."""
SMEM_COLUMNS = 16
"""Columns in shared memory: K of the matrix unit's instruction. Copies read 0 for what is not stored."""


def smem_tile(*rows: int) -> Any:
    """Shared memory for the columns of some tiles, `[*rows, 16]`."""
    return smem.tile((*rows, SMEM_COLUMNS), jnp.bfloat16, STORED_COLUMNS)


def of_rows(ref: Ref, rows: Any, batch: Any) -> Ref:
    """The columns of some rows, in device memory, of a batch entry's `[L, 8]`."""
    return ref.at[rows, pipeline.columns(SMEM_COLUMNS, ref, batch)]
