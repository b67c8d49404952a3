"""Dropout on a tile in plain array code: what the instructions of `dropout_words` must give."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jflash._semantics import dropout


def words(
    counter: UInt32[Array, ""], middle: UInt32[Array, ""], shape: tuple[int, ...], *, keys_first: bool
) -> UInt32[Array, "rows half_the_columns"]:
    """A tile's words: of each 16 rows, the upper 8 have those of the first queries of four."""
    row, column = jnp.arange(shape[0])[:, None], jnp.arange(shape[1] // 2)
    query, key = (column, dropout.pair(row)) if keys_first else (dropout.pair(row), column)
    first, second = dropout.words(dropout.counter(counter, query, key), middle)
    return jnp.where((row >> 3 & 1) == 0, first, second)


def drop(
    p: Float[Array, "rows columns"],
    words: UInt32[Array, "rows half_the_columns"],
    dropped: int,
    *,
    keys_first: bool,
    signed: bool,
) -> Float[Array, "rows columns"]:
    """A tile without what is dropped or, `signed`, with the sign of that changed."""
    row, column = jnp.arange(p.shape[0])[:, None], jnp.arange(p.shape[1])
    query, key = (column, row) if keys_first else (row, column)
    word = words[row & ~8 | query & 8, dropout.pair(column)]
    return jnp.where(dropout.keeps(word, key, dropped), p, -p if signed else jnp.zeros_like(p))
