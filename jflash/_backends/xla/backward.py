"""Backward: every tile is computed again from the log-sum-exp, and what it gives is summed.

    delta = rowsum(dO * O) - dlse
    for each tile:
      P  = exp(modify(Q K^T) - lse)
      dP = dO V^T
      dS = P * (dP - delta), taken back through modify
      dQ += dS K;  dV^T += dO^T P;  dK^T += Q^T dS

FlashAttention-2, arXiv:2307.08691, section 3.1.2. XLA's CPU matrix products want the contracted axis of the left factor
last. dV and dK are made transposed for that: then the left factor is the smaller one, and no tile of logits is
transposed.

A tile that holds all keys has what a row sums over, and does as plain attention does, to the same error:

    P = exp(S - m) / l;  delta = rowsum(P * dP) - dlse

The log-sum-exp and O are rounded, and S is not computed again to the last bit. That shows where a row sees few keys.

exp(S - m) and l are written as the forward writes them. Where one tile is the whole call, a program with both passes
computes them once: as fast as if they were kept, and `jax.checkpoint` still has them forgotten.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.xla import tiling
from jflash._backends.xla.sums import Place, Terms, tile_sum
from jflash._semantics import dropout, online_softmax
from jflash._semantics.logits import may_end_in_rounding, modify_logits, without_unseen
from jflash._semantics.spec import Operands, Residuals, Spec
from jflash._semantics.tile import Parameters, split_heads, tile_parameters


def backward(spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
    """The gradients of the operands, `None` for those that have none."""
    empty = residuals.lse == -jnp.inf
    # A row that saw no key: P = exp(S - inf) = 0 makes everything of it zero, to any order of derivative.
    lse = jnp.where(empty, jnp.inf, residuals.lse)
    weighted = jnp.einsum(
        "btnd,btnd->bnt", residuals.d_out.astype(spec.accumulator), residuals.out.astype(spec.accumulator)
    )
    delta = jnp.where(empty, 0, weighted - residuals.d_lse)
    all_keys = tiling.plan(spec, "backward").keys == spec.key_length
    sunk = jnp.zeros_like(lse)
    if operands.sinks is not None:
        sunk = jnp.exp(operands.sinks.astype(lse.dtype)[..., None] - lse)

    by_row = lambda array: split_heads(jnp.swapaxes(array, 1, 2), 2, spec)
    whole = tile_parameters(operands)
    smooth = [jnp.issubdtype(array.dtype, jnp.inexact) for array in whole.score_mod_arrays]
    captured = list(zip(whole.score_mod_arrays, smooth, strict=True))
    differentiable = whole._replace(score_mod_arrays=tuple(array for array, s in captured if s))
    discrete = operands._replace(
        scale=None, bias=None, alibi_slopes=None, score_mod_arrays=tuple(array for array, s in captured if not s)
    )
    arguments = Terms(
        rows=(
            split_heads(operands.query, 2, spec),
            split_heads(residuals.d_out, 2, spec),
            by_row(lse),
            by_row(jnp.where(empty, 0, -residuals.d_lse) if all_keys else delta),
            by_row(sunk),
        ),
        keys=(operands.key, operands.value),
        parameters=(differentiable,),
    )

    def tile_gradient(terms: Terms, place: Place) -> Terms:
        return _tile_gradient(spec, smooth, all_keys, terms, place)

    sums = tile_sum(spec, tile_gradient, discrete, arguments)
    (d_query,), (d_key, d_value), (d_parameters,) = sums
    d_arrays = iter(d_parameters.score_mod_arrays)
    d_captured: Any = [
        next(d_arrays).astype(array.dtype) if s and "score_mod_arrays" not in spec.undifferentiated else None
        for array, s in captured
    ]
    typed = lambda gradient, like: None if gradient is None else gradient.astype(like.dtype)
    return Operands(
        query=d_query.reshape(operands.query.shape).astype(spec.dtype),
        key=d_key.astype(spec.dtype),
        value=d_value.astype(spec.dtype),
        bias=typed(d_parameters.bias, operands.bias),
        scale=d_parameters.scale,
        alibi_slopes=d_parameters.alibi_slopes,
        sinks=online_softmax.sinks_gradient(operands.sinks, lse, delta),
        score_mod_arrays=tuple(d_captured),
    )


def _tile_gradient(spec: Spec, smooth: list[bool], all_keys: bool, terms: Terms, place: Place) -> Terms:
    """What one tile adds to dQ, to dK and dV, and to the parameters' gradients."""
    query, d_out, lse, delta, sunk = terms.rows
    key, value = terms.keys
    (parameters,) = terms.parameters
    batch, heads, group, rows, _ = query.shape
    tile = place.tile
    query, d_out = (tiling.zero_padding(array, tile.query, tile.query_lengths) for array in (query, d_out))
    if place.visible is not None:
        key, value = (tiling.zero_padded_keys(array, tile) for array in (key, value))
    if place.fresh is not None:
        lse = jnp.where(place.fresh[None, None, None], lse, jnp.inf)

    query, d_out = (array.reshape(batch, heads, group * rows, -1) for array in (query, d_out))
    lse, delta, sunk = lse[..., None], delta[..., None], sunk[..., None]
    pairs = lambda array: array.reshape(batch, heads, group, rows, -1)
    flat = lambda array: array.astype(spec.dtype).reshape(batch, heads, group * rows, -1)

    discrete_arrays = tile.parameters.score_mod_arrays
    visible = place.visible

    def modify(products: Float[Array, "b k g i j"], parameters: Parameters) -> Float[Array, "b k g i j"]:
        some, rest = iter(parameters.score_mod_arrays), iter(discrete_arrays)
        arrays = tuple(next(some) if s else next(rest) for s in smooth)
        whole = parameters._replace(score_mod_arrays=arrays)
        whole = without_unseen(spec, whole, visible)
        return modify_logits(spec, products, tile._replace(parameters=whole))

    logits, pull_back = jax.vjp(modify, pairs(tiling.dot(spec, query, key, (3, 3))), parameters)
    logits = logits if visible is None else jnp.where(visible, logits, -jnp.inf)
    if all_keys:
        exponentials, largest = online_softmax.exponentials(logits, rounded=may_end_in_rounding(spec))
        weight = jnp.exp(largest[..., None] - lse)
        # 1 but for rounding, so it has no derivative.
        total = lax.stop_gradient(weight * exponentials.sum(axis=-1, keepdims=True) + sunk)
        probabilities = exponentials * (weight / jnp.where(total == 0, 1, total))
    else:
        probabilities = online_softmax.exp(logits - lse)
    d_probabilities = pairs(tiling.dot(spec, d_out, value, (3, 3)))
    kept = probabilities
    if spec.dropout_rate > 0:
        keep = dropout.keep(spec, tile)
        kept = jnp.where(keep, probabilities / (1 - spec.dropout_rate), 0)
        d_probabilities = jnp.where(keep, d_probabilities / (1 - spec.dropout_rate), 0)
    if all_keys:
        delta = delta + (probabilities * d_probabilities).sum(axis=-1, keepdims=True)
    d_logits = probabilities * (d_probabilities - delta)
    d_products, d_parameters = pull_back(d_logits)
    for name in spec.undifferentiated.intersection(Parameters._fields):
        d_parameters = d_parameters._replace(**{name: () if name == "score_mod_arrays" else None})

    columns = lambda array: jnp.swapaxes(array, 2, 3)
    d_value = columns(tiling.dot(spec, columns(d_out), flat(kept), (3, 2)))
    d_key = columns(tiling.dot(spec, columns(query), flat(d_products), (3, 2)))
    d_query = pairs(tiling.dot(spec, flat(d_products), key, (3, 2)))
    return Terms((d_query,), (d_key, d_value), (d_parameters,))
