"""Block-sparse attention that data chooses: each block of queries attends to the blocks of keys that matter most to it.

The choice is made at run time, by the mean of each block, for every head, and is part of the same compiled program. A
table of bits says what was chosen, and `mask_mod` reads it. What was not chosen is not visited, forward or backward.
Queries, keys and values get gradients through what was chosen; the choice itself has none.

Sources: MoBA, Lu et al. (2025), arXiv:2502.13189; native sparse attention, Yuan et al. (2025), arXiv:2502.11089.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array
from rich.console import Console

import jflash

TOKENS, HEADS, HEAD_DIM = 2048, 2, 32
BLOCK, CHOSEN = 128, 3
"""Tokens in a block, and how many blocks of the past each block of queries sees besides its own."""


def choose(query: Array, key: Array) -> Array:
    """`[batch, heads, blocks, blocks]`: whether the first block, of queries, attends to the second, of keys."""
    query, key = jax.lax.stop_gradient((query, key))
    batch, tokens, heads, _ = query.shape
    mean = lambda array: array.reshape(batch, tokens // BLOCK, BLOCK, heads, -1).mean(axis=2)
    scores = jnp.einsum("binh,bjnh->bnij", mean(query), mean(key))
    place = jnp.arange(tokens // BLOCK)
    past = place < place[:, None]
    scores = jnp.where(past, scores, -jnp.inf)
    least = jax.lax.top_k(scores, CHOSEN)[0][..., -1:]
    return (past & (scores >= least)) | (place == place[:, None])


def attend(query: Array, key: Array, value: Array) -> Array:
    """All are [batch, tokens, heads, head_dim]."""
    table = choose(query, key)
    sees = lambda b, h, i, j: table[b, h, i // BLOCK, j // BLOCK] & (j <= i)
    return jflash.attention(query, key, value, mask_mod=sees)


def plain(query: Array, key: Array, value: Array) -> Array:
    """The table spread over all pairs."""
    wide = choose(query, key).repeat(BLOCK, axis=2).repeat(BLOCK, axis=3)
    return jax.nn.dot_product_attention(query, key, value, mask=wide, is_causal=True)


def main() -> Report:
    """Output and gradients, and how many tiles are visited."""
    arrays = normal(*[(1, TOKENS, HEADS, HEAD_DIM)] * 3)
    table = choose(*arrays[:2])
    sees = lambda b, h, i, j: table[b, h, i // BLOCK, j // BLOCK] & (j <= i)
    tiles = jflash.tile_map(sees, heads=HEADS, query_length=TOKENS, key_length=TOKENS)
    line = f"the table: {tiles.visited:.0%} of its tiles visited, {tiles.partial:.0%} with a mask"
    Console(highlight=False).print(line)
    errors = compare([with_gradients(attend)], with_gradients(plain), arrays)
    return report(f"Blocks of {BLOCK}, chosen by data", errors, *shares(attend, *arrays[:2]))


if __name__ == "__main__":
    main()
