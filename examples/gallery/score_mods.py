"""Any function of one logit: `score_mod(logit, batch, head, query_index, key_index)`.

It is applied inside the tiles, forward and backward, and differentiated there. Arrays that it closes over have
gradients. A key whose logit it makes -inf is not seen, but no tile is skipped for that: `is_causal`, windows, lengths
and segments are what skips. Outside `jax.jit`, keep one function object for all calls, as a new one compiles anew.

Sources: Scalable-Softmax, Nakanishi (2025), arXiv:2501.19399; strided heads after Child et al. (2019), arXiv:1904.10509
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array

import jflash

BATCH, TOKENS, HEADS, HEAD_DIM, STRIDE = 2, 256, 4, 32, 4

ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]
"""A function on scalars. Each function below takes arrays that broadcast just as well, and so `plain` uses it too."""


def tanh_gate(gates: Array) -> ScoreMod:
    """A learned factor for each head, kept between -1 and 1."""
    return lambda logit, b, head, i, j: logit * jnp.tanh(gates[head])


def scalable_softmax(gates: Array) -> ScoreMod:
    """Logits grow with the logarithm of the keys before a query, so that long contexts do not flatten the softmax."""
    return lambda logit, b, head, i, j: logit * gates[head] * jnp.log(i + 2.0).astype(logit.dtype)


def strided(gates: Array) -> ScoreMod:
    """Odd heads see every fourth key back from their own, even heads all; they are scaled by the gates."""
    return lambda logit, b, head, i, j: jnp.where(
        (head % 2 == 0) | ((i - j) % STRIDE == 0), logit * gates[head], -jnp.inf
    )


MODS = (tanh_gate, scalable_softmax, strided)


def attend(
    query: Array, key: Array, value: Array, gates: Array, make: Callable[[Array], ScoreMod] = tanh_gate
) -> Array:
    """`gates` [heads]."""
    return jflash.attention(query, key, value, is_causal=True, score_mod=make(gates))


def plain(query: Array, key: Array, value: Array, gates: Array, make: Callable[[Array], ScoreMod] = tanh_gate) -> Array:
    """The function of all logits at once."""
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    index = jnp.ix_(*map(jnp.arange, logits.shape))
    logits = jnp.where(index[3] <= index[2], make(gates)(logits, *index), -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)


def main() -> Report:
    """Output and gradients, those of the gates too, with each function."""
    arrays = normal(*[(BATCH, TOKENS, HEADS, HEAD_DIM)] * 3, (HEADS,))
    errors = {}
    for make in MODS:
        of = lambda attention, make=make: lambda query, key, value, gates: attention(query, key, value, gates, make)
        found = compare([with_gradients(of(attend))], with_gradients(of(plain)), arrays)
        errors |= {f"{name}, {make.__name__}": pair for name, pair in found.items()}
    return report("score_mod, causal", errors, *shares(attend, *arrays[:2], arrays[3]))


if __name__ == "__main__":
    main()
