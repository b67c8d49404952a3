"""Backward: every tile is computed again from the log-sum-exp, and what it gives is summed.

    delta = rowsum(dO * O) - dlse
    for each tile:
      P, and modify(Q K^T), computed again
      dP = dO V^T
      dS = P * (dP - delta), taken back through modify
      dQ += dS K;  dV^T += dO^T P;  dK^T += Q^T dS

FlashAttention-2, arXiv:2307.08691, section 3.1.2. XLA's CPU matrix products want the contracted axis of the left factor
last. dV and dK are made transposed for that: then the left factor is the smaller one, and no tile of logits is
transposed.

In a tile that holds all keys delta = rowsum(P * dP) - dlse, as in plain attention: O is rounded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jflash._backends.xla import plans, recompute, tiling
from jflash._backends.xla.recompute import RecomputedTile
from jflash._backends.xla.sums import Place, Terms, tile_sum
from jflash._semantics import online_softmax, visibility
from jflash._semantics.spec import Operands, Residuals, Spec
from jflash._semantics.tile import PARAMETERS, Parameters, smooth_parameters, split_heads


def backward(spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
    """Return the gradients of the operands, `None` for operands that have none."""
    lse = recompute.finite_lse(residuals.lse)
    weighted = jnp.einsum(
        "btnd,btnd->bnt", residuals.d_out.astype(spec.accumulator), residuals.out.astype(spec.accumulator)
    )
    empty = residuals.lse == -jnp.inf
    delta = jnp.where(empty, 0, weighted - residuals.d_lse)
    shape = plans.plan(spec, "backward")
    subtracted = delta
    if tiling.holds_rows(spec, shape):
        subtracted = jnp.where(empty, 0, -residuals.d_lse) if spec.lse_has_cotangent else jnp.zeros_like(delta)
    of_rows = recompute.by_row(spec, lse, recompute.sink_probabilities(operands, lse), subtracted)
    arguments = Terms(
        rows=(split_heads(operands.query, 2, spec), split_heads(residuals.d_out, 2, spec), *of_rows),
        keys=(operands.key, operands.value),
        parameters=(smooth_parameters(operands),),
    )
    (d_query,), (d_key, d_value), (d_parameters,) = tile_sum(spec, shape, _Gradient(spec), operands, arguments)
    typed: Any = lambda gradient, like: None if gradient is None else gradient.astype(spec.gradient_dtype(like.dtype))
    return Operands(
        query=d_query.reshape(operands.query.shape).astype(spec.result_dtype),
        key=d_key.astype(spec.result_dtype),
        value=d_value.astype(spec.result_dtype),
        **{name: typed(getattr(d_parameters, name), getattr(operands, name)) for name in PARAMETERS},
        sinks=online_softmax.sinks_gradient(operands.sinks, lse, delta),
        score_mod_arrays=tuple(map(typed, d_parameters.score_mod_arrays, operands.score_mod_arrays)),
    )


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """The function of one tile whose terms add up to dQ, to dK and dV, and to the parameters' gradients."""

    spec: Spec

    def __call__(self, terms: Terms, place: Place) -> Terms:
        tile = RecomputedTile(self.spec, place)
        query, d_out, lse, sunk, delta = terms.rows
        (key, value), (parameters,) = terms.keys, terms.parameters
        d_out = visibility.of_seeing_rows(self.spec, d_out, lse < jnp.inf)
        query, d_out, key, value = tile.rows(query), tile.rows(d_out), tile.keys(key), tile.keys(value)

        logits, pull_back = jax.vjp(tile.modify, tile.pairs(tile.dot(query, key)), parameters)
        probabilities = tile.probabilities(logits, lse, sunk)
        d_probabilities = tile.drop(tile.pairs(tile.dot(d_out, value)))
        delta = delta[..., None]
        if place.whole_rows:
            delta = delta + (probabilities * d_probabilities).sum(axis=-1, keepdims=True)
        d_products, d_parameters = pull_back(probabilities * (d_probabilities - delta))
        for name in self.spec.undifferentiated.intersection(Parameters._fields):
            d_parameters = d_parameters._replace(**{name: () if name == "score_mod_arrays" else None})
        d_key, d_value = tile.weigh_rows(d_products, query), tile.weigh_rows(tile.drop(probabilities), d_out)
        return Terms((tile.weigh(d_products, key),), (d_key, d_value), (d_parameters,))
