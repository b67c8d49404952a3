"""Cross attention with padding: queries of one sequence see the keys of another, in batches of unequal lengths.

`query_seq_lengths` and `key_value_seq_lengths` say where padding begins. Tiles of padding alone are skipped, rows of
padding come out 0, and nothing that padding holds reaches an output or a gradient: here it is NaN. A mask can say which
keys are padding too. But it skips nothing, it leaves rows of padding to be computed, and with NaN it is of no use.

Source: Vaswani et al. (2017), arXiv:1706.03762, section 3.2.3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array

import jflash

QUERIES, KEYS, HEADS, HEAD_DIM = 192, 640, 2, 32
LENGTHS = ((192, 640), (57, 130), (1, 333))
"""The lengths of queries and keys, for each pair of sequences."""


def attend(query: Array, key: Array, value: Array, lengths: Array) -> Array:
    """`lengths` [batch, 2]: of the queries and of the keys."""
    queries, keys = lengths[:, 0], lengths[:, 1]
    return jflash.attention(query, key, value, query_seq_lengths=queries, key_value_seq_lengths=keys)


def plain(query: Array, key: Array, value: Array, lengths: Array) -> Array:
    """Each pair of sequences alone, cut to its lengths."""

    def one(pair: int, queries: int, keys: int) -> Array:
        q, k, v = query[pair, :queries], key[pair, :keys], value[pair, :keys]
        return jnp.pad(jax.nn.dot_product_attention(q, k, v), ((0, QUERIES - queries), (0, 0), (0, 0)))

    return jnp.stack([one(pair, *both) for pair, both in enumerate(LENGTHS)])


def main() -> Report:
    """Output and gradients; those of padding are 0."""
    lengths = jnp.array(LENGTHS)
    query, key, value = normal((len(LENGTHS), QUERIES, HEADS, HEAD_DIM), *[(len(LENGTHS), KEYS, HEADS, HEAD_DIM)] * 2)

    def with_padding(array: Array, lengths: Array) -> Array:
        return jnp.where(jnp.arange(array.shape[1])[:, None, None] < lengths[:, None, None, None], array, jnp.nan)

    arrays = [with_padding(query, lengths[:, 0]), with_padding(key, lengths[:, 1]), with_padding(value, lengths[:, 1])]
    errors = compare([with_gradients(attend)], with_gradients(plain), [*arrays, lengths])
    seen, _ = shares(attend, query, key, lengths)
    return report("Cross attention with NaN in the padding", errors, seen)


if __name__ == "__main__":
    main()
