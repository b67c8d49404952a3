"""Decoding with a cache, token by token: a cache of all tokens, and a ring buffer of the last ones.

`decode` writes a token's key and value behind those that the cache has. `key_value_seq_lengths` says how much of the
cache is filled, and the rest is skipped. That is all a single query needs, as it sees everything that is filled. For
several new tokens at once, add `is_causal=True` and `query_offset=position`.

`decode_in_ring` keeps as many tokens as a sliding window sees: the newest takes the place of the oldest. Softmax does
not care in which order keys come, so it needs no window and no positions. Rotary embeddings go on the keys before they
are written.

Sources: Shazeer (2019), arXiv:1911.02150, for the cache; Mistral 7B, Jiang et al. (2023), arXiv:2310.06825, for the
ring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report
from jax import Array

import jflash

BATCH, TOKENS, HEADS, KEY_HEADS, HEAD_DIM, WINDOW = 2, 96, 4, 2, 32, 24

Cache = tuple[Array, Array]
"""Keys and values, each [batch, places, key_heads, head_dim]."""


def write(cache: Cache, key: Array, value: Array, place: Array) -> Cache:
    """One token's key and value."""
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(c, new, place, 1) for c, new in zip(cache, (key, value), strict=True)
    )
    return keys, values


def decode(cache: Cache, query: Array, key: Array, value: Array, position: Array) -> tuple[Cache, Array]:
    """The cache with one more token, and what this token's query, [batch, 1, heads, head_dim], sees in it."""
    keys, values = cache = write(cache, key, value, position)
    filled = jnp.broadcast_to(position + 1, query.shape[:1])
    return cache, jflash.attention(query, keys, values, key_value_seq_lengths=filled)


def decode_in_ring(cache: Cache, query: Array, key: Array, value: Array, position: Array) -> tuple[Cache, Array]:
    """The same for a cache of the last tokens only."""
    places = cache[0].shape[1]
    keys, values = cache = write(cache, key, value, position % places)
    filled = jnp.broadcast_to(jnp.minimum(position + 1, places), query.shape[:1])
    return cache, jflash.attention(query, keys, values, key_value_seq_lengths=filled)


def all_tokens(step: Callable[..., tuple[Cache, Array]], places: int) -> Callable[..., Array]:
    """Decode each token in turn, as a function of all queries, keys and values."""

    def decode_all(query: Array, key: Array, value: Array) -> Array:
        batch, tokens, heads, head_dim = key.shape
        cache = jnp.zeros((2, batch, places, heads, head_dim), key.dtype)
        by_token: Any = [jnp.moveaxis(array, 1, 0)[:, :, None] for array in (query, key, value)]
        advance = lambda cache, token: step(cache, *token)
        _, outs = jax.lax.scan(advance, (cache[0], cache[1]), (*by_token, jnp.arange(tokens)))
        return jnp.moveaxis(outs[:, :, 0], 0, 1)

    return decode_all


def plain(window: int) -> Callable[..., Array]:
    """All tokens at once."""
    return lambda query, key, value: jax.nn.dot_product_attention(
        query, key, value, is_causal=True, local_window_size=(window - 1, 0)
    )


def main() -> Report:
    """Every token's output with both caches."""
    arrays = normal((BATCH, TOKENS, HEADS, HEAD_DIM), *[(BATCH, TOKENS, KEY_HEADS, HEAD_DIM)] * 2)
    (whole,) = compare([all_tokens(decode, TOKENS)], plain(TOKENS), arrays).values()
    (ring,) = compare([all_tokens(decode_in_ring, WINDOW)], plain(WINDOW), arrays).values()
    errors = {"output, cache of all tokens": whole, "output, ring buffer": ring}
    return report(f"Decoding, {TOKENS} tokens, a ring of {WINDOW}", errors, (TOKENS + 1) / (2 * TOKENS))


if __name__ == "__main__":
    main()
