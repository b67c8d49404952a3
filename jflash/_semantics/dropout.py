"""Dropout on the probabilities, drawn by counting: which of them are dropped is a function of the key and of
(batch, head, query, key) alone, so the backward draws the same again and so does every backend.

A word of 32 bits decides for the keys j and j + 8 of one query, by 16 bits each. A thread of a GPU's matrix unit holds
both of them, whether keys are a tile's rows or its columns, so no word need be made twice. Its counter is of the query
and the pair of keys; no two have the same within 2**16 queries by 2**16 keys. It is mixed as by C. Wellons
("Prospecting for Hash Functions", 2018: `lowbias32`), with one half of the seed added before and the other in the
middle, and without the last step: seven instructions for two probabilities. A block cipher would cost more than the
attention.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from jflash._semantics.spec import Spec
from jflash._semantics.tile import Tile

RATES = 2**16
"""A dropout rate is a multiple of 1 / RATES."""

GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio: consecutive multiples land far apart."""

FACTORS = 0x7FEB352D, 0x846CA68B
"""Those of `lowbias32`."""


def possible_rate(rate: float) -> float:
    """The rate at which words can drop that is nearest to `rate`; not 0 or 1, unless `rate` is."""
    return min(max(round(rate * RATES), 1), RATES - 1) / RATES if rate > 0 else 0.0


def mix(bits: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32-bit words in which every input bit moves every output bit with probability near 1/2."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(FACTORS[0])
    bits = (bits ^ (bits >> 15)) * jnp.uint32(FACTORS[1])
    return bits ^ (bits >> 16)


@jax.jit
def seeds(key: Array, batch: Int[Array, "B"]) -> UInt32[Array, "B 2"]:
    """Two words for every batch entry, from a JAX random key of any implementation."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    counter = batch.astype(jnp.uint32) * jnp.uint32(GOLDEN)
    first = mix(words[0] ^ counter)
    return jnp.stack([first, mix(words[1] ^ mix(first + counter))], axis=-1)


class HeadSeed(NamedTuple):
    """The two words of a batch entry's head."""

    before: UInt32[Array, "..."]
    """Added to the counter before it is mixed."""
    middle: UInt32[Array, "..."]
    """Joins in the middle."""


def head_seed(spec: Spec, seed: tuple[Array, Array], head: Int[Array, "..."]) -> HeadSeed:
    """That of a head, from the two words of its batch entry."""
    counted = 0 if spec.broadcast_dropout else head.astype(jnp.uint32) * jnp.uint32(GOLDEN)
    before = mix(seed[0] + counted)
    return HeadSeed(before, mix(seed[1] ^ before))


def dropped(spec: Spec) -> int:
    """How many of the `RATES` values of a probability's bits, from 0 on, drop it."""
    return round(spec.dropout_rate * RATES)


def keep(spec: Spec, seed: HeadSeed, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
    """Which probabilities stay, in the shape to which all broadcast."""
    return survives(counter(seed.before, query, pair_of_keys(key)), seed.middle, key, dropped(spec))


def counter(first: UInt32[Array, "..."], query: Int[Array, "..."], pair: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """The counter of a query and a pair of keys, both counted from where the counter is `first`."""
    return first + query.astype(jnp.uint32) * jnp.uint32(GOLDEN) + pair.astype(jnp.uint32)


def survives(
    counter: UInt32[Array, "..."], middle: UInt32[Array, "..."], key: Int[Array, "..."], dropped: int
) -> Bool[Array, "..."]:
    """Whether a key's half of the counter's word is none of the `dropped` values."""
    bits = (counter ^ (counter >> 16)) * jnp.uint32(FACTORS[0])
    bits = (bits ^ (bits >> 15) ^ middle) * jnp.uint32(FACTORS[1])
    bits = bits >> ((key >> 3 & 1).astype(jnp.uint32) * 16) & jnp.uint32(RATES - 1)
    return bits >= jnp.uint32(dropped)


def pair_of_keys(key: Int[Array, "..."]) -> Int[Array, "..."]:
    """The number of the pair that a key is in: 0 to 7 for the first 16 keys, and so on."""
    return (key >> 4) * 8 | key & 7


def keep_tile(spec: Spec, tile: Tile) -> Bool[Array, "b k g i j"]:
    """Which probabilities of a tile stay."""
    assert tile.dropout_seed is not None
    assert tile.head is not None
    first, second = (tile.dropout_seed[:, word][:, None, None, None, None] for word in (0, 1))
    query, key = tile.indices
    return keep(spec, head_seed(spec, (first, second), tile.head), query, key)
