"""QK-Clip: a head's largest logit from the log-sum-exp of the forward that a training step makes anyway.

MuonClip shrinks the query and key weights of a head when its largest logit passes a threshold. Plain attention has that
logit in its [T, S] array; a fused one never writes it. But for a query that sees n keys,

    max <= lse <= max + log(n)

so the largest log-sum-exp of a head is never below its largest logit: a head that is clipped by it is clipped enough,
and at most log(n) too much. It is nearest to the maximum where that matters, for a query whose largest logit stands
out. It is loosest where all logits are alike: 8.3 above at 4,096 keys, a twelfth of the usual threshold of 100. Where
that is too loose, one more forward with the scale times beta, and a value of one feature, gives the same bounds of beta
times the logits: of the logits themselves to log(n) / beta.

Source: Kimi K2 (2025), arXiv:2507.20534, section 2.1.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array, lax
from rich.console import Console

import jflash

TOKENS, HEADS, KEY_HEADS, HEAD_DIM = 1024, 4, 2, 32
THRESHOLD = 100.0


def attend(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Causal attention, and for each head [N] a bound of its largest logit, at most log(S) above it."""
    out, lse = jflash.attention(query, key, value, is_causal=True, return_residual=True)
    return out, lax.stop_gradient(lse).max(axis=(0, 1))


def largest_logits(query: Array, key: Array, beta: float = 16.0) -> Array:
    """For each head [N] a bound of its largest causal logit, at most log(S) / beta above it. It costs a forward."""
    scale = beta * query.shape[-1] ** -0.5
    _, lse = jflash.attention(query, key, key[..., :1], is_causal=True, scale=scale, return_residual=True)
    return lse.max(axis=(0, 1)) / beta


def clip(query_weights: Array, key_weights: Array, largest: Array, threshold: float = THRESHOLD) -> tuple[Array, Array]:
    """The weights [F, N, H] and [F, K, H] after an optimizer's step, such that no head has a logit above the threshold.

    The logits of a head whose largest is above the threshold shrink by threshold / largest. Keys that several heads
    share shrink by the root of the least of their factors, and each head's queries by the rest.
    """
    factor = jnp.where(largest > threshold, threshold / largest, 1)
    groups = factor.reshape(key_weights.shape[1], -1)
    of_keys = jnp.sqrt(groups.min(axis=1))
    of_queries = (groups / of_keys[:, None]).reshape(-1)
    return query_weights * of_queries[:, None], key_weights * of_keys[:, None]


def plain_largest(query: Array, key: Array) -> Array:
    """The largest causal logit of each head, from an array of all of them."""
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    logits = jnp.einsum("btnh,bsnh->nbts", query, key, precision="highest") * query.shape[-1] ** -0.5
    return jnp.where(jnp.tri(*logits.shape[2:], dtype=bool), logits, -jnp.inf).max(axis=(1, 2, 3))


def output(query: Array, key: Array, value: Array) -> Array:
    """Return the output of `attend`, with which the model goes on."""
    return attend(query, key, value)[0]


def plain(query: Array, key: Array, value: Array) -> Array:
    """The same by jax.nn."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def main() -> Report:
    """Output and gradients; and what a clip by either bound leaves of logits that are too large."""
    query, key, value = normal(*[(1, TOKENS, heads, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)])
    errors = compare([with_gradients(output)], with_gradients(plain), (query, key, value))
    found = report("Causal, with a bound of each head's largest logit", errors, *shares(output, query, key))
    tokens, query_weights, key_weights = normal((1, TOKENS, 64), (64, HEADS, HEAD_DIM), (64, KEY_HEADS, HEAD_DIM))
    project = lambda *weights: [jnp.einsum("btf,fnh->btnh", tokens, w, precision="highest") for w in weights]
    query_weights, key_weights = 0.55 * query_weights, 0.55 * key_weights
    query, key = project(query_weights, key_weights)
    bounds = {"lse": attend(query, key, key)[1], "16 times": largest_logits(query, key)}
    exact = plain_largest(query, key)
    console = Console(highlight=False)
    console.print(f"  largest logits {exact.round(1)}; log(S) is {math.log(TOKENS):.1f}", soft_wrap=True)
    for name, bound in bounds.items():
        clipped = plain_largest(*project(*clip(query_weights, key_weights, bound)))
        above = (bound - exact).max()
        console.print(f"  by {name}: at most {above:.2f} above; clipped to {clipped.round(1)}", soft_wrap=True)
    return found


if __name__ == "__main__":
    main()
