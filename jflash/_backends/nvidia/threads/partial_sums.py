"""Sums of a tile's rows in parts, each of the columns that are a multiple of their number apart.

A thread adds its own registers: of eight neighbours in a row it has two in the matrix unit's layouts. In operations of
Pallas each addition, and each slice, would have a layout to be found: most of those of a plain forward.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.nvidia.threads.builder import ThreadBuilder, array_type


def of_rows(tile: Float[Array, "64 columns"], parts: int) -> Float[Array, "64 parts"]:
    """Return the sums of every `parts`th column, a multiple of 8 that divides the columns."""
    rows, columns = tile.shape

    def make(_: ThreadBuilder, tile: Any) -> Any:
        return functools.reduce(operator.add, (tile[:, first : first + parts] for first in range(0, columns, parts)))

    return ThreadBuilder.emit(make, tile, returns=array_type((rows, parts), jnp.float32))
