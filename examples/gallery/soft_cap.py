"""Soft cap: logits are bent so that none is larger than a bound.

`logits_soft_cap=c` turns a scaled logit x into c * tanh(x / c), before bias and mask. A `score_mod` that says the same
alone is computed as the argument. But every backend takes the argument, which a bias or ALiBi may follow.

Source: Gemma 2 (2024), arXiv:2408.00118, section 2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array

import jflash

TOKENS, HEADS, HEAD_DIM, CAP = 1024, 2, 32, 5.0


def attend(query: Array, key: Array, value: Array) -> Array:
    """All are [batch, tokens, heads, head_dim]."""
    return jflash.attention(query, key, value, is_causal=True, logits_soft_cap=CAP)


def plain(query: Array, key: Array, value: Array) -> Array:
    """The formula."""
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    logits = CAP * jnp.tanh(logits / CAP)
    logits = jnp.where(jnp.tri(query.shape[1], dtype=bool), logits, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)


def main() -> Report:
    """Output and gradients, with logits that reach well past the cap."""
    query, key, value = normal(*[(1, TOKENS, HEADS, HEAD_DIM)] * 3)
    arrays = [4 * query, key, value]
    errors = compare([with_gradients(attend)], with_gradients(plain), arrays)
    return report(f"Soft cap of {CAP}, causal", errors, *shares(attend, *arrays[:2]))


if __name__ == "__main__":
    main()
