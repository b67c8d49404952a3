"""Attention over keys in two parts, merged by their log-sum-exps.

Softmax over all keys is the average of the parts' outputs, weighted by the sums of their exponentials, whose logarithms
`return_residual=True` gives. So parts of the keys can be attended to at different times, from different caches or on
different devices. The log-sum-exp has a gradient, and so the merged output has the right one. Where a query sees no key
of a part, that part's log-sum-exp is -inf and its weight 0.

`query_offset` says where the queries stand among the keys of a part, and may be negative.

Source: online softmax, Milakov and Gimelshein (2018), arXiv:1805.02867.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array

import jflash

TOKENS, HEADS, HEAD_DIM = 1024, 2, 32


def merge(*parts: tuple[Array, Array]) -> Array:
    """One output of those of several parts, each with its log-sum-exp. Every query must see a key of some part."""
    outs, lses = map(jnp.stack, zip(*parts, strict=True))
    weights = jax.nn.softmax(lses, axis=0)
    return (weights[..., None] * outs).sum(axis=0)


def attend(query: Array, key: Array, value: Array) -> Array:
    """Causal attention, the two halves of the keys apart."""
    half = key.shape[1] // 2
    causal = dict(is_causal=True, return_residual=True)
    return merge(
        jflash.attention(query, key[:, :half], value[:, :half], **causal),
        jflash.attention(query, key[:, half:], value[:, half:], query_offset=-half, **causal),
    )


def plain(query: Array, key: Array, value: Array) -> Array:
    """All keys at once."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def main() -> Report:
    """Output and gradients."""
    arrays = normal(*[(1, TOKENS, HEADS, HEAD_DIM)] * 3)
    errors = compare([with_gradients(attend)], with_gradients(plain), arrays)
    return report("Two halves of the keys, causal", errors, *shares(attend, *arrays[:2]))


if __name__ == "__main__":
    main()
