"""A mask of queries and keys, packed once for a call into an eighth of its bytes.

A warpgroup packs 64 x 64 elements at a time, for tiles whose rows are queries, or keys.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jflash._backends.nvidia.launch import Launch, Refs, cta_index
from jflash._backends.nvidia.ops import Ops
from jflash._backends.nvidia.threads.builder import THREADS
from jflash._backends.nvidia.threads.packed_mask import KEYS_PER_LOAD, SIZE
from jflash._semantics.coverage import Coverage

_SPARE_TILES = 4
"""Tiles past the last one, of nothing to be seen, in both directions: where a kernel's tiles may end."""
_TILES_PER_CTA = 8


def pack_mask(
    mask: Bool[Array, "#B #N T S"], ops: Ops, *, keys_first: bool = False
) -> Int[Array, "#B #N row_tiles column_tiles 128"]:
    """Return the words of a mask, for tiles whose rows are queries or, with `keys_first`, keys."""
    batch, heads, queries, keys = mask.shape
    mask = jnp.pad(mask, [(0, 0), (0, 0), (0, 0), (0, -keys % KEYS_PER_LOAD)])
    query_tiles = -(-queries // SIZE) + _SPARE_TILES
    blocks = -(-(-(-keys // SIZE) + _SPARE_TILES) // _TILES_PER_CTA)
    key_tiles = blocks * _TILES_PER_CTA

    def kernel(refs: Refs) -> None:
        plane, query, block = (cta_index(name) for name in ("plane", "query", "block"))
        at = lax.div(plane, heads), lax.rem(plane, heads)

        def pack(index: Any, carry: None) -> None:
            key = block * _TILES_PER_CTA + index
            words = ops.pack_mask(refs.arrays["mask"], plane, query * SIZE, key * SIZE, keys_first)
            row, column = (key, query) if keys_first else (query, key)
            refs.results["words"][(*at, row, column)] = words

        lax.fori_loop(0, _TILES_PER_CTA, pack, None)

    shape = (key_tiles, query_tiles) if keys_first else (query_tiles, key_tiles)
    launch = Launch(
        name=f"jflash_mask_{SIZE}",
        grid=dict(plane=batch * heads, query=query_tiles, block=blocks),
        results=dict(words=jax.ShapeDtypeStruct((batch, heads, *shape, THREADS), jnp.int32)),
    )
    return launch.run(kernel, dict(mask=mask), ops)["words"]


def coverage(words: Int[Array, "#B #N row_tiles column_tiles 128"], *, keys_first: bool = False) -> Coverage:
    """Return how much a packed mask shows of each of its tiles of 64 x 64, of which those past its ends are empty."""
    found = Coverage(jnp.all(words == -1, axis=-1), jnp.any(words != 0, axis=-1))
    return found.transposed() if keys_first else found
