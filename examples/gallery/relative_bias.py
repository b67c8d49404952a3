"""Relative position bias: a learned number for each head and distance between query and key, with T5's buckets.

The table has a row for each bucket and a column for each head. `by_distance` spreads it over all distances. From there
two ways lead to the logits:

- `attend` looks the number up in each tile. It needs O(T + S) memory, and on a CPU it is the faster one by far. The
  kernels for NVIDIA GPUs do so too, and sum the numbers' gradients, if there are at most 64 KiB of them; else `xla`
  serves.
- `with_bias` makes the array [heads, T, S], which every kernel takes. All its rows are one vector, each
  shifted by one against the row before, so it is made by reshaping, and its gradient comes back as sums along
  diagonals. The array is as large as all logits of one sequence, but no larger for a batch.

Sources: Shaw et al. (2018), arXiv:1803.02155; for the buckets T5, Raffel et al. (2020), arXiv:1910.10683, section 2.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array

import jflash

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 512, 4, 32
BUCKETS, FARTHEST = 32, 128


def bucket(distance: np.ndarray) -> np.ndarray:
    """Return the bucket of the key's place less the query's. Half of the buckets are for keys that come later.

    Half of each half are for one distance each, and the others grow geometrically up to `FARTHEST`.
    """
    half, size = BUCKETS // 2, np.abs(distance)
    exact = half // 2
    growth = np.log(np.maximum(size, exact) / exact) / np.log(FARTHEST / exact)
    coarse = np.minimum(exact + (growth * (half - exact)).astype(int), half - 1)
    return np.where(distance > 0, half, 0) + np.where(size < exact, size, coarse)


def by_distance(table: Array, queries: int, keys: int) -> Array:
    """[heads, queries + keys - 1]: the bias for distances from 1 - queries to keys - 1."""
    return table[bucket(np.arange(1 - queries, keys))].T


def attend(query: Array, key: Array, value: Array, table: Array) -> Array:
    """`table` [buckets, heads]."""
    queries, keys = query.shape[-3], key.shape[-3]
    vectors = by_distance(table, queries, keys)

    def add(logit: Array, batch: Array, head: Array, query_index: Array, key_index: Array) -> Array:
        return logit + vectors[head, key_index - query_index + queries - 1]

    return jflash.attention(query, key, value, score_mod=add)


def shifted_rows(vectors: Array, queries: int, keys: int) -> Array:
    """[heads, queries, keys], where entry (i, j) is entry j - i + queries - 1 of the head's vector."""
    heads, length = vectors.shape
    # Read in rows that are one number shorter than those written, each row begins one place further back.
    written = jnp.broadcast_to(jnp.pad(vectors, ((0, 0), (0, 1)))[:, None], (heads, queries, length + 1))
    read = written.reshape(heads, -1)[:, : queries * length].reshape(heads, queries, length)
    return read[:, :, queries - 1 :]


def with_bias(query: Array, key: Array, value: Array, table: Array) -> Array:
    """The same by an array for all pairs."""
    queries, keys = query.shape[-3], key.shape[-3]
    bias = shifted_rows(by_distance(table, queries, keys), queries, keys)
    return jflash.attention(query, key, value, bias)


def plain(query: Array, key: Array, value: Array, table: Array) -> Array:
    """The table looked up for each pair."""
    distance = np.arange(key.shape[1]) - np.arange(query.shape[1])[:, None]
    bias = jnp.moveaxis(table[bucket(distance)], -1, 0)
    return jax.nn.dot_product_attention(query, key, value, bias=bias[None])


def main() -> Report:
    """Output and gradients, the table's too, in both ways."""
    arrays = normal(*[(BATCH, TOKENS, HEADS, HEAD_DIM)] * 3, (BUCKETS, HEADS))
    errors = compare([with_gradients(way) for way in (attend, with_bias)], with_gradients(plain), arrays)
    return report("Relative position bias", errors, *shares(attend, *arrays[:2], arrays[3]))


if __name__ == "__main__":
    main()
