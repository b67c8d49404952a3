"""A sliding window with sinks: a query sees the last 256 keys, and may give part of its weight to none of them.

`local_window_size=(left, right)` counts keys on both sides of the query's own. `sinks` are a learned logit for each
head. It takes part in the softmax but has no value, so a head that finds nothing in its window can come out near zero.

Sources: Longformer, Beltagy et al. (2020), arXiv:2004.05150, for the window; gpt-oss, OpenAI (2025), arXiv:2508.10925,
for both together. To keep the first tokens in sight instead, see streaming.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array

import jflash

TOKENS, HEADS, HEAD_DIM, WINDOW = 1536, 2, 32, 256


def attend(query: Array, key: Array, value: Array, sinks: Array) -> Array:
    """`sinks` [heads]. The window has `WINDOW` keys, the query's own included."""
    return jflash.attention(query, key, value, local_window_size=(WINDOW - 1, 0), sinks=sinks)


def plain(query: Array, key: Array, value: Array, sinks: Array) -> Array:
    """A column of sinks beside the logits, dropped after the softmax."""
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
    logits = jnp.where((distance >= 0) & (distance < WINDOW), logits, -jnp.inf)
    column = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, column], axis=-1))[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def main() -> Report:
    """Output and gradients, those of the sinks too."""
    arrays = normal(*[(1, TOKENS, HEADS, HEAD_DIM)] * 3, (HEADS,))
    errors = compare([with_gradients(attend)], with_gradients(plain), arrays)
    return report("Sliding window with sinks", errors, *shares(attend, *arrays[:2], arrays[3]))


if __name__ == "__main__":
    main()
