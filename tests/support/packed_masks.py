"""Packed masks in plain array code: what the instructions of `packed_mask` must give."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jflash._backends.nvidia.threads.builder import THREADS
from jflash._backends.nvidia.threads.packed_mask import SIZE


def pack(mask: Any, plane: Any, query: Any, key: Any, keys_first: bool) -> Int[Array, "128"]:
    """The words of 64 x 64 elements of a mask `[#B, #N, T, S]`."""
    _, heads, queries, keys = mask.shape
    rows, columns = query + jnp.arange(SIZE), key + jnp.arange(SIZE)
    whole = mask[lax.div(plane, heads), lax.rem(plane, heads)]
    tile = whole[jnp.minimum(rows, queries - 1)][:, jnp.minimum(columns, keys - 1)]
    tile &= (rows < queries)[:, None] & (columns < keys)
    tile = tile.T if keys_first else tile
    # Warp, half, row; j, pair, k.
    bits = tile.reshape(4, 2, 8, 8, 4, 2).transpose(0, 2, 4, 1, 3, 5).reshape(THREADS, 32)
    powers = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)
    return lax.bitcast_convert_type(jnp.where(bits, powers, 0).sum(axis=1, dtype=jnp.uint32), jnp.int32)


def expand(words: Int[Array, "tiles 128"], shape: tuple[int, ...]) -> Bool[Array, "64 columns"]:
    """A tile of booleans from its words; of one word's columns, the first ones."""
    bits = (words[:, :, None] >> jnp.arange(32)) & 1
    # Tile; warp, row, pair; half, j, k.
    bits = bits.reshape(-1, 4, 8, 4, 2, 8, 2)
    return bits.transpose(1, 4, 2, 0, 5, 3, 6).reshape(shape[0], -1)[:, : shape[1]] != 0
