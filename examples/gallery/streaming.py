"""A sliding window that keeps the first tokens in sight, as StreamingLLM does.

Neither `local_window_size` nor any other argument says "and the first four", so it is said in two calls: the window,
and the first keys that have left it. `return_residual=True` gives the log-sum-exp of each, and by it the two are merged
(merging.py says how). The mask of the second call has a row of `FIRST` for each query, no more.

Source: Xiao et al. (2023), arXiv:2309.17453.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array
from merging import merge

import jflash

TOKENS, HEADS, HEAD_DIM, WINDOW, FIRST = 1536, 2, 32, 256, 4


def attend(query: Array, key: Array, value: Array) -> Array:
    """A query sees the last `WINDOW` keys, its own included, and the first `FIRST` of all."""
    has_left = jnp.arange(FIRST) <= jnp.arange(query.shape[1])[:, None] - WINDOW
    return merge(
        jflash.attention(query, key, value, local_window_size=(WINDOW - 1, 0), return_residual=True),
        jflash.attention(query, key[:, :FIRST], value[:, :FIRST], mask=has_left, return_residual=True),
    )


def plain(query: Array, key: Array, value: Array) -> Array:
    """One mask for both."""
    rows, columns = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
    mask = (columns <= rows) & ((columns > rows - WINDOW) | (columns < FIRST))
    return jax.nn.dot_product_attention(query, key, value, mask=mask[None, None])


def main() -> Report:
    """Output and gradients."""
    arrays = normal(*[(1, TOKENS, HEADS, HEAD_DIM)] * 3)
    errors = compare([with_gradients(attend)], with_gradients(plain), arrays)
    title = f"Window of {WINDOW} and the first {FIRST}"
    return report(title, errors, *shares(attend, *arrays[:2]))


if __name__ == "__main__":
    main()
