"""Dropout on the probabilities, drawn by counting: which of them are dropped is a function of the key and of
(batch, head, query, key) alone, so the backward draws the same again and so does every backend.

The bits are two rounds of a 32-bit mixing function (C. Wellons, "Prospecting for Hash Functions", 2018: the
triple-free `lowbias32`, bias 0.17): one over (seed, head, query), shared by a row, one over the key. It is far
cheaper than a block cipher, which would cost more than the attention, and more than good enough to drop by.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from jflash._semantics.spec import Spec
from jflash._semantics.tile import Tile

_GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio: consecutive counters land far apart."""


def mix(bits: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32-bit words in which every input bit moves every output bit with probability near 1/2."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


@jax.jit
def seeds(key: Array, batch: Int[Array, "B"]) -> UInt32[Array, "B 2"]:
    """Two words for every batch entry, from a JAX random key of any implementation."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    counter = batch.astype(jnp.uint32) * jnp.uint32(_GOLDEN)
    first = mix(words[0] ^ counter)
    return jnp.stack([first, mix(words[1] ^ mix(first + counter))], axis=-1)


def keep(spec: Spec, tile: Tile) -> Bool[Array, "b k g i j"]:
    """Which probabilities of a tile stay."""
    assert tile.dropout_seed is not None
    assert tile.head is not None
    first, second = (tile.dropout_seed[:, word][:, None, None, None, None] for word in (0, 1))
    golden = jnp.uint32(_GOLDEN)
    query, key = tile.indices
    head = mix(first + tile.head.astype(jnp.uint32) * golden)
    row = mix(head ^ mix(second + query.astype(jnp.uint32) * golden))
    bits = mix(mix(row + key.astype(jnp.uint32) * golden) ^ second)
    return bits >= jnp.uint32(min(round(spec.dropout_rate * 2**32), 2**32 - 1))
