"""Decoding with a paged cache: sequences of different lengths, in pages of which none needs to be next to another.

`decode` writes a token's key and value of each sequence into their pages, and attends to what the sequence has. A
page table says which pages a sequence has; what it holds past the sequence's end does not matter. So memory is taken
page by page as sequences grow, and two sequences may share the pages of a common beginning.

The pages are donated: under `jax.jit(..., donate_argnums=0)`, or carried by a loop as here, nothing is copied.

Source: PagedAttention, Kwon et al. (2023), arXiv:2309.06180.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _report import Report, compare, normal, report
from jax import Array

import jflash

BATCH, TOKENS, HEADS, KEY_HEADS, HEAD_DIM, PAGE_SIZE = 2, 96, 4, 2, 32, 16

Pages = tuple[Array, Array]
"""The pages of keys and of values, each [pages, page_size, key_heads, head_dim]."""


def decode(pages: Pages, query: Array, key: Array, value: Array, position: Array, table: Array) -> tuple[Pages, Array]:
    """The pages with one more token of each sequence, and what its query, [batch, 1, heads, head_dim], sees in them."""
    filled = jnp.broadcast_to(position + 1, query.shape[:1])
    pages = jflash.update_pages(pages, key, value, filled, table)
    return pages, jflash.attention(query, *pages, page_table=table, key_value_seq_lengths=filled)


def shuffled(batch: int, places: int, page_size: int) -> Array:
    """Return a page table for sequences of up to `places` places, its pages in any order."""
    each = -(-places // page_size)
    return jnp.asarray(np.random.default_rng(0).permutation(batch * each).reshape(batch, each), jnp.int32)


def decode_all(query: Array, key: Array, value: Array) -> Array:
    """Every token in turn, as a function of all queries, keys and values."""
    batch, tokens, heads, head_dim = key.shape
    table = shuffled(batch, tokens, PAGE_SIZE)
    pages = jnp.zeros((2, table.size, PAGE_SIZE, heads, head_dim), key.dtype)
    by_token: Any = [jnp.moveaxis(array, 1, 0)[:, :, None] for array in (query, key, value)]
    advance = lambda pages, token: decode(pages, *token, table)
    _, outs = jax.lax.scan(advance, (pages[0], pages[1]), (*by_token, jnp.arange(tokens)))
    return jnp.moveaxis(outs[:, :, 0], 0, 1)


def plain(query: Array, key: Array, value: Array) -> Array:
    """All tokens at once."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def main() -> Report:
    """Every token's output."""
    arrays = normal((BATCH, TOKENS, HEADS, HEAD_DIM), *[(BATCH, TOKENS, KEY_HEADS, HEAD_DIM)] * 2)
    errors = compare([decode_all], plain, arrays)
    return report(f"Decoding in pages of {PAGE_SIZE}, {TOKENS} tokens", errors, (TOKENS + 1) / (2 * TOKENS))


if __name__ == "__main__":
    main()
