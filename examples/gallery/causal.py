"""Causal attention: a query sees its own key and all that come before it.

`is_causal=True`. Tiles above the diagonal are neither loaded nor computed. Where the queries are the last of a longer
sequence, `query_offset` says at which key the first of them stands.

Source: Vaswani et al. (2017), arXiv:1706.03762, section 3.2.3.
"""

from __future__ import annotations

import jax
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array

import jflash

TOKENS, HEADS, HEAD_DIM = 1536, 2, 32


def attend(query: Array, key: Array, value: Array) -> Array:
    """All are [batch, tokens, heads, head_dim]."""
    return jflash.attention(query, key, value, is_causal=True)


def plain(query: Array, key: Array, value: Array) -> Array:
    """The same, with a number for every pair."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def main() -> Report:
    """Output and gradients."""
    arrays = normal(*[(1, TOKENS, HEADS, HEAD_DIM)] * 3)
    errors = compare([with_gradients(attend)], with_gradients(plain), arrays)
    return report("Causal attention", errors, *shares(attend, *arrays[:2]))


if __name__ == "__main__":
    main()
