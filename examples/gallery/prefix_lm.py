"""Prefix language model: the first tokens of a sequence see each other, those that follow are causal.

Each sequence has its own prefix, and four ways lead there. `with_mask_mod` says it in a line, and skips what no query
sees; it is not served by kernels yet. `attend` takes two calls: causal over everything, and the part of the prefix
above the diagonal, which lengths cut off and an offset of one keeps apart from the first. Their outputs are merged by
log-sum-exp. Between them they compute the tiles that some query sees, and no others. `with_mask` takes an array of all
pairs, of which tiles are skipped on a CPU alone, and of a `with_score_mod` none are.

Source: T5, Raffel et al. (2020), arXiv:1910.10683, section 3.2.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array
from merging import merge

import jflash

TOKENS, HEADS, HEAD_DIM = 1024, 2, 32
PREFIXES = (300, 700)


def attend(query: Array, key: Array, value: Array, prefix: Array) -> Array:
    """`prefix` [batch]: how many tokens of each sequence see each other."""
    lengths = dict(query_seq_lengths=prefix, key_value_seq_lengths=prefix)
    # From one place further on, a window without a left side begins behind the query's own key.
    above = dict(query_offset=1, local_window_size=(0, key.shape[1]), return_residual=True, **lengths)
    return merge(
        jflash.attention(query, key, value, is_causal=True, return_residual=True),
        jflash.attention(query, key, value, **above),
    )


def with_mask(query: Array, key: Array, value: Array, prefix: Array) -> Array:
    """The same in one call, of full attention's cost."""
    rows, columns = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
    mask = (columns <= rows) | (columns < prefix[:, None, None, None])
    return jflash.attention(query, key, value, mask=mask)


def with_score_mod(query: Array, key: Array, value: Array, prefix: Array) -> Array:
    """The same without an array of all pairs."""

    def hide(logit: Array, batch: Array, head: Array, query_index: Array, key_index: Array) -> Array:
        return jnp.where((key_index <= query_index) | (key_index < prefix[batch]), logit, -jnp.inf)

    return jflash.attention(query, key, value, score_mod=hide)


def with_mask_mod(query: Array, key: Array, value: Array, prefix: Array) -> Array:
    """The same in one call, which skips too."""
    sees = lambda batch, head, query_index, key_index: (key_index <= query_index) | (key_index < prefix[batch])
    return jflash.attention(query, key, value, mask_mod=sees)


def plain(query: Array, key: Array, value: Array, prefix: Array) -> Array:
    """The mask with jax.nn."""
    rows, columns = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
    mask = (columns <= rows) | (columns < prefix[:, None, None, None])
    return jax.nn.dot_product_attention(query, key, value, mask=mask)


def main() -> Report:
    """Output and gradients, and the output in the two other ways."""
    prefix = jnp.array(PREFIXES)
    arrays = normal(*[(len(PREFIXES), TOKENS, HEADS, HEAD_DIM)] * 3)
    errors = compare([with_gradients(attend)], with_gradients(plain), [*arrays, prefix])
    errors |= compare([with_mask_mod, with_mask, with_score_mod], plain, [*arrays, prefix])
    return report("Prefix language model", errors, *shares(attend, *arrays[:2], prefix))


if __name__ == "__main__":
    main()
