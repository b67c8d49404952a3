"""Prefill and decode in one call: sequences with one token or many in this step, all with their keys in one cache.

The queries of all sequences stand one after the other, and `cu_q_lens` says where each sequence begins. A sequence that
decodes has one query, one whose prompt is computed has a piece of it. Each token sees its sequence up to itself. Shapes
are static and contents are not, so one compiled program serves every step. The arguments are those of JAX's kernel for
TPUs.

Source: ragged paged attention, jax.experimental.pallas.ops.tpu.ragged_paged_attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from _report import Report, compare, normal, report
from jax import Array

import jflash

HEADS, KEY_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 32, 16
STEP = (1, 97), (40, 40), (1, 3), (33, 130)
"""Tokens in this step, and keys with them, of each sequence."""


def attend(q: Array, kv_pages: Array, kv_lens: Array, page_indices: Array, cu_q_lens: Array, num_seqs: Array) -> Array:
    """`q` is [tokens, heads, head_dim], `kv_pages` [pages, page_size, 2 * key_heads, head_dim]: key 0, value 0, ..."""
    return jflash.ragged_paged_attention(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale=q.shape[-1] ** -0.5
    )


def described(step: Sequence[tuple[int, int]], page_size: int) -> tuple[Array, Array, Array, Array]:
    """The last four arguments of `attend`, with room for one more sequence, and each page anywhere."""
    tokens, keys = np.array(step).T
    pages = -(-keys // page_size)
    order = np.random.default_rng(0).permutation(pages.sum())
    table = np.full((len(step) + 1, pages.max()), -1)
    for row, (first, count) in enumerate(zip(np.cumsum(pages) - pages, pages, strict=True)):
        table[row, :count] = order[first : first + count]
    stops = np.cumsum(tokens)
    arrays = [*keys, 0], table, [0, *stops, stops[-1]], [len(step)]
    kv_lens, page_indices, cu_q_lens, num_seqs = (jnp.asarray(array, jnp.int32) for array in arrays)
    return kv_lens, page_indices, cu_q_lens, num_seqs


def one_by_one(q: Array, kv_pages: Array, *batch: Array) -> Array:
    """Each sequence by itself, with plain attention on keys and values that were taken out of their pages."""
    outs, first = [], 0
    for (tokens, keys), pages in zip(STEP, batch[1], strict=False):
        taken = kv_pages[pages].reshape(1, -1, *kv_pages.shape[2:])[:, :keys]
        mask = np.tri(tokens, keys, keys - tokens, dtype=bool)
        query = q[None, first : first + tokens]
        outs.append(jax.nn.dot_product_attention(query, taken[:, :, 0::2], taken[:, :, 1::2], mask=mask)[0])
        first += tokens
    return jnp.concatenate(outs)


def main() -> Report:
    """One step of four sequences."""
    batch = described(STEP, PAGE_SIZE)
    tokens = sum(tokens for tokens, _ in STEP)
    pages = int(batch[1].max()) + 1
    arrays = normal((tokens, HEADS, HEAD_DIM), (pages, PAGE_SIZE, 2 * KEY_HEADS, HEAD_DIM))
    errors = compare([attend], one_by_one, [*arrays, *batch])
    seen = sum(tokens * keys - tokens * (tokens - 1) / 2 for tokens, keys in STEP)
    return report(f"A step of {len(STEP)} sequences", errors, seen / sum(tokens * keys for tokens, keys in STEP))


if __name__ == "__main__":
    main()
