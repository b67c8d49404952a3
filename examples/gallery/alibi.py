"""ALiBi: every head subtracts from a logit the distance between query and key, times a slope of its own.

`alibi_slopes` has a number for each head, and a gradient. The distances are computed in the tiles, so there is no bias
array. Distances count from `query_offset`, as causal does.

Source: Press et al. (2021), arXiv:2108.12409, section 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array

import jflash

TOKENS, HEADS, HEAD_DIM = 1024, 4, 32


def paper_slopes(heads: int) -> Array:
    """Return the paper's slopes for a power of two: a geometric sequence that ends at 2**-8."""
    return jnp.exp2(-8 * (1 + jnp.arange(heads)) / heads)


def attend(query: Array, key: Array, value: Array, slopes: Array) -> Array:
    """`slopes` [heads]."""
    return jflash.attention(query, key, value, is_causal=True, alibi_slopes=slopes)


def plain(query: Array, key: Array, value: Array, slopes: Array) -> Array:
    """The distances as a bias."""
    distance = np.abs(np.arange(query.shape[1])[:, None] - np.arange(key.shape[1]))
    bias = -slopes[:, None, None] * distance
    return jax.nn.dot_product_attention(query, key, value, bias=bias[None], is_causal=True)


def main() -> Report:
    """Output and gradients, those of the slopes too."""
    arrays = [*normal(*[(1, TOKENS, HEADS, HEAD_DIM)] * 3), paper_slopes(HEADS)]
    errors = compare([with_gradients(attend)], with_gradients(plain), arrays)
    no_slopes = jnp.zeros(HEADS)  # far keys are seen too, but with weights that float32 cannot hold
    return report("ALiBi, causal", errors, *shares(attend, *arrays[:2], no_slopes))


if __name__ == "__main__":
    main()
