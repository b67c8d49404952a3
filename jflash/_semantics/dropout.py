"""Dropout on the probabilities, drawn by counting.

Whether a probability is dropped is a function of the key and of (batch, head, query, key) alone, so the backward draws
the same again and so does every backend.

Four probabilities share a counter: those of two queries and two keys that are 8 apart, i and i + 8, j and j + 8. A
thread of a GPU's matrix unit holds all four, whether queries or keys are a tile's rows, so nothing is computed twice.
No two such groups have the same counter within 2**16 queries by 2**16 keys. The counter is mixed once for the group,
and then for each query into a word. The halves of the word decide for the two keys, by 15 bits each: the kernels
compare both halves at once, for which each needs a spare bit.

The mixing is that of C. Wellons ("Prospecting for Hash Functions", 2018: `lowbias32`), with one half of the seed added
before and the other in the middle, and without the last step: ten instructions for four probabilities. Over all 2**32
counters the 16 outcomes of a group are as frequent as those of independent draws: chi-square is 0.6, 7 and 9, of 15
degrees of freedom, at rates of 0.5, 0.1 and 0.01. A block cipher would cost more than the attention.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from jflash._semantics.spec import Spec
from jflash._semantics.tile import Tile

RATES = 2**15
"""The number of dropout rates: each is a multiple of 1 / RATES."""

GOLDEN = 0x9E3779B9
"""The quotient of 2**32 and the golden ratio: consecutive multiples land far apart."""

FACTORS = 0x7FEB352D, 0x846CA68B
"""The factors of `lowbias32`."""

SHIFTS_AND_FACTORS = (15, FACTORS[1]), (13, 0xD35A2D97)
"""The last steps of mixing, for the first query of a group and for the second: `lowbias32`'s own, and different ones
for the same counter."""


def possible_rate(rate: float) -> float:
    """Return the multiple of 1 / RATES that is nearest to `rate`, and neither 0 nor 1 unless `rate` is."""
    return min(max(round(rate * RATES), 1), RATES - 1) / RATES if rate > 0 else 0.0


def mix(bits: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Return 32-bit words through a bijection in which every input bit moves every output bit with probability near
    1/2."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(FACTORS[0])
    bits = (bits ^ (bits >> 15)) * jnp.uint32(FACTORS[1])
    return bits ^ (bits >> 16)


@jax.jit
def seeds(key: Array, batch: Int[Array, "B"]) -> UInt32[Array, "B 2"]:
    """Return two words for every batch entry, from a JAX random key of any implementation."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    counter = batch.astype(jnp.uint32) * jnp.uint32(GOLDEN)
    first = mix(words[0] ^ counter)
    return jnp.stack([first, mix(words[1] ^ mix(first + counter))], axis=-1)


class HeadSeed(NamedTuple):
    """The two words of a batch entry's head."""

    before: UInt32[Array, "..."]
    """The word that is added to the counter before it is mixed."""
    middle: UInt32[Array, "..."]
    """The word that joins in the middle of mixing."""


def head_seed(spec: Spec, seed: tuple[Array, Array], head: Int[Array, "..."]) -> HeadSeed:
    """Return the seed of a head, from the two words of its batch entry."""
    counted = 0 if spec.broadcast_dropout else head.astype(jnp.uint32) * jnp.uint32(GOLDEN)
    before = mix(seed[0] + counted)
    return HeadSeed(before, mix(seed[1] ^ before))


def dropped(spec: Spec) -> int:
    """Return how many of the `RATES` values of a probability's bits, from 0 on, drop it."""
    return round(spec.dropout_rate * RATES)


def keep(spec: Spec, seed: HeadSeed, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
    """Return which probabilities stay, in the shape to which all arguments broadcast."""
    return survives(counter(seed.before, pair(query), pair(key)), seed.middle, query, key, dropped(spec))


def counter(first: UInt32[Array, "..."], queries: Int[Array, "..."], keys: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """Return the counter of a pair of queries and a pair of keys, both counted from where the counter is `first`."""
    return first + queries.astype(jnp.uint32) * jnp.uint32(GOLDEN) + keys.astype(jnp.uint32)


def survives(
    counter: UInt32[Array, "..."],
    middle: UInt32[Array, "..."],
    query: Int[Array, "..."],
    key: Int[Array, "..."],
    dropped: int,
) -> Bool[Array, "..."]:
    """Return whether a query's and key's bits of the counter's words are none of the `dropped` values."""
    first, second = words(counter, middle)
    return keeps(jnp.where((query >> 3 & 1) == 0, first, second), key, dropped)


def words(
    counter: UInt32[Array, "..."], middle: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Return the words of a counter: for the first query of a group, and for the second."""
    mixed = (counter ^ (counter >> 16)) * jnp.uint32(FACTORS[0])
    first, second = ((mixed ^ (mixed >> shift) ^ middle) * jnp.uint32(factor) for shift, factor in SHIFTS_AND_FACTORS)
    return first, second


def keeps(word: UInt32[Array, "..."], key: Int[Array, "..."], dropped: int) -> Bool[Array, "..."]:
    """Return whether a word's bits for a key are none of the `dropped` values."""
    bits = word >> ((key >> 3 & 1).astype(jnp.uint32) * 16) & jnp.uint32(RATES - 1)
    return bits >= jnp.uint32(dropped)


def pair(index: Int[Array, "..."]) -> Int[Array, "..."]:
    """Return the number of the pair that a query or key is in: 0 to 7 for the first 16 indices, and so on."""
    return (index >> 4) * 8 | index & 7


def keep_tile(spec: Spec, tile: Tile) -> Bool[Array, "b k g i j"]:
    """Return which probabilities of a tile stay."""
    assert tile.dropout_seed is not None
    assert tile.head is not None
    first, second = (tile.dropout_seed[:, word].reshape(-1, *[1] * (tile.query.ndim - 1)) for word in (0, 1))
    query, key = tile.indices
    return keep(spec, head_seed(spec, (first, second), tile.head), query, key)
