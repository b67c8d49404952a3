"""Packed documents: several in one sequence, each causal in itself and with positions of its own.

`segment_ids` say which document a token belongs to, and a query sees only keys of its own. With `is_causal=True` that
is causal attention inside each document, as causal compares places in the sequence and a document's are in order. The
ids are sorted, so tiles between documents are skipped, forward and backward.

What depends on positions is the user's code. Here these are rotary embeddings: queries and keys are turned by the
token's place in its document before the call.

Sources: RoFormer, Su et al. (2021), arXiv:2104.09864, for the rotation; Krell et al. (2021), arXiv:2107.02027, for
packing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array

import jflash

LENGTHS = (600, 40, 896)
HEADS, HEAD_DIM = 2, 32


def rotate(array: Array, positions: Array) -> Array:
    """Rotary embedding: turns pairs of coordinates by position times frequency. `positions` [batch, tokens]."""
    half = array.shape[-1] // 2
    angles = positions[:, :, None, None] * 10_000.0 ** (-np.arange(half) / half)
    cosine, sine = jnp.cos(angles).astype(array.dtype), jnp.sin(angles).astype(array.dtype)
    left, right = array[..., :half], array[..., half:]
    return jnp.concatenate([left * cosine - right * sine, left * sine + right * cosine], axis=-1)


def attend(query: Array, key: Array, value: Array, documents: Array) -> Array:
    """`documents` [batch, tokens]: the number of each token's document, sorted."""
    positions = jnp.arange(documents.shape[1]) - jax.vmap(jnp.searchsorted)(documents, documents)
    query, key = rotate(query, positions), rotate(key, positions)
    return jflash.attention(query, key, value, is_causal=True, segment_ids=documents)


def plain(query: Array, key: Array, value: Array, documents: Array) -> Array:
    """One document after the other."""
    positions = jnp.concatenate([jnp.arange(length) for length in LENGTHS])[None]
    arrays = rotate(query, positions), rotate(key, positions), value
    parts = zip(*(jnp.split(array, np.cumsum(LENGTHS)[:-1], axis=1) for array in arrays), strict=True)
    return jnp.concatenate([jax.nn.dot_product_attention(*part, is_causal=True) for part in parts], axis=1)


def main() -> Report:
    """Output and gradients."""
    arrays = normal(*[(1, sum(LENGTHS), HEADS, HEAD_DIM)] * 3)
    documents = jnp.asarray(np.repeat(np.arange(len(LENGTHS)), LENGTHS))[None]
    errors = compare([with_gradients(attend)], with_gradients(plain), [*arrays, documents])
    title = f"{len(LENGTHS)} documents in {sum(LENGTHS):,} tokens"
    return report(title, errors, *shares(attend, *arrays[:2], documents))


if __name__ == "__main__":
    main()
