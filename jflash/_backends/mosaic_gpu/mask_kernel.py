"""A mask of queries and keys, packed into the words of `mask_bits` once for a call: an eighth of its bytes.

A warpgroup packs 64 x 64 of it at a time, for tiles whose rows are queries, or keys.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Int

from jflash._backends.mosaic_gpu import tiles
from jflash._backends.mosaic_gpu.mask_bits import PIECE, SIZE, THREADS
from jflash._backends.mosaic_gpu.operations import Operations, Ref

SPARE = 4
"""Tiles past the last one, of nothing to be seen, in both directions: where a kernel's tiles may end."""
EACH = 8
"""Tiles of a block."""


def words(
    mask: Bool[Array, "#B #N T S"], keys_first: bool, operations: Operations
) -> Int[Array, "#B #N row_tiles column_tiles 128"]:
    """The kernel's call."""
    batch, heads, queries, keys = mask.shape
    mask = jnp.pad(mask, [(0, 0), (0, 0), (0, 0), (0, -keys % PIECE)])
    query_tiles = -(-queries // SIZE) + SPARE
    blocks = -(-(-(-keys // SIZE) + SPARE) // EACH)
    key_tiles = blocks * EACH

    def kernel(mask_ref: Ref, words_ref: Ref) -> None:
        plane, query, block = (lax.axis_index(name) for name in ("plane", "query", "block"))
        at = lax.div(plane, heads), lax.rem(plane, heads)

        def pack(index: Any, carry: None) -> None:
            key = block * EACH + index
            made = operations.pack(mask_ref, plane, query * SIZE, key * SIZE, keys_first)
            first, second = (key, query) if keys_first else (query, key)
            words_ref[(*at, first, second)] = made

        lax.fori_loop(0, EACH, pack, None)

    kernel.__name__ = f"jflash_mask_{SIZE}"
    shape = (key_tiles, query_tiles) if keys_first else (query_tiles, key_tiles)
    made: Any = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, heads, *shape, THREADS), jnp.int32),
        grid=(batch * heads, query_tiles, blocks),
        grid_names=("plane", "query", "block"),
        compiler_params=tiles.COMPILER,
        interpret=operations.interpret,
    )(mask)
    return made
