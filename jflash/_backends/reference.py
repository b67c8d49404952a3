"""Plain softmax attention: the definition of what every backend computes, in O(T*S) memory.

JAX differentiates it, forwards and backwards, to any order.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._platform import Platform
from jflash._semantics import dropout, pages, visibility
from jflash._semantics.logits import modify_logits, without_unseen
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import Corner, TileShape, load_tile, split_heads, zero_padding

DIFFERENTIATED_BY_JAX = True


def unsupported(spec: Spec, platform: Platform) -> str | None:
    """Return `None`: the definition refuses no call."""
    del spec, platform
    return None


def forward(spec: Spec, operands: Operands) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Return the output in the results' dtype and the log-sum-exp in the accumulator's."""
    everything = TileShape(spec.batch, spec.key_heads, spec.query_length, spec.key_length)
    tile = load_tile(spec, operands, Corner(0, 0, 0, 0), everything)
    dtype = spec.accumulator
    if spec.pages is not None:
        operands = pages.gathered(spec, operands)

    query = split_heads(operands.query, 2, spec).astype(dtype)
    key, value = operands.key.astype(dtype), operands.value.astype(dtype)
    if operands.query_lengths is not None:
        query = zero_padding(query, operands.query_lengths)
    if operands.key_lengths is not None:
        key, value = zero_padding(key, operands.key_lengths), zero_padding(value, operands.key_lengths)

    products = jnp.einsum("bikgh,bjkh->bkgij", query, key, precision=spec.precision)
    visible = visibility.visible(spec, tile)
    tile = tile._replace(parameters=without_unseen(spec, tile.parameters, visible))
    logits = modify_logits(spec, products, tile)
    seen = logits > -jnp.inf
    seen |= jnp.isnan(logits)
    if visible is not None:
        seen &= visible
    empty = ~jnp.any(seen, axis=-1, keepdims=True)

    # An unseen logit is replaced before exp, so that an infinity or NaN that it held reaches no gradient either.
    largest = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True)
    if operands.sinks is not None:
        sinks = split_heads(operands.sinks, 1, spec)[..., None, None]
        largest = jnp.maximum(largest, sinks)
    else:
        sinks = None
    largest = jnp.where(empty, 0, lax.stop_gradient(largest))
    exponentials = jnp.where(seen, jnp.exp(jnp.where(seen, logits, 0) - largest), 0)
    total = exponentials.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(jnp.where(empty, 0, sinks) - largest)
    total = jnp.where(empty, 1, total)
    probabilities = exponentials / total
    if spec.dropout_rate > 0:
        probabilities = jnp.where(dropout.keep_tile(spec, tile), probabilities / (1 - spec.dropout_rate), 0)

    out = jnp.einsum("bkgij,bjkd->bikgd", probabilities, value, precision=spec.precision)
    # The cotangent of a row that saw no key reaches nothing, even if it is NaN.
    out = jnp.where(jnp.moveaxis(empty, 3, 1), 0, out)
    lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
    return (
        out.reshape(spec.batch, spec.query_length, spec.heads, spec.value_dim).astype(spec.result_dtype),
        lse.reshape(spec.batch, spec.heads, spec.query_length),
    )
