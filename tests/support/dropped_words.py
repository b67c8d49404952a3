"""Dropout on a tile in plain array code: what the instructions of `hardware.dropout_words` must give."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jflash._semantics import dropout


def drop(
    p: Float[Array, "rows columns"],
    counter: UInt32[Array, ""],
    middle: UInt32[Array, ""],
    dropped: int,
    *,
    keys_first: bool,
    signed: bool,
) -> Float[Array, "rows columns"]:
    """A tile without what is dropped or, `signed`, with the sign of that changed."""
    rows, columns = (jnp.arange(size, dtype=jnp.uint32) for size in p.shape)
    query, key = (columns[None], rows[:, None]) if keys_first else (rows[:, None], columns[None])
    counters = dropout.counter(counter, dropout.pair(query), dropout.pair(key))
    keep = dropout.survives(counters, middle, query, key, dropped)
    return jnp.where(keep, p, -p if signed else jnp.zeros_like(p))
