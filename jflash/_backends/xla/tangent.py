"""Tangent: how output and log-sum-exp move with the operands, linear in the operands' tangents (tQ, tK, ...).

    for each tile:
      P, and modify(Q K^T), computed again
      tS = tQ K^T + Q tK^T, pushed through modify with the parameters' tangents
      c = rowsum(P * tS) / rowsum(P)
      l += rowsum(P);  tlse += rowsum(P * tS)
      O += P V;  tO += P tV + (P * (tS - c)) V + c P V
    tlse /= l
    tO = (tO - tlse O) / l

Cheng Lu and Yang Song, arXiv:2410.11081, appendix F, do without c. In bfloat16 their form has several times the error
of plain attention where few keys matter, or where all are alike: it rounds P * tS, and then subtracts what all of P *
tS has in common. Around the mean of the tile, the rounded numbers are no larger than those of plain attention; and P V,
rounded, stands on both sides of the subtraction. l is 1 but for rounding: the log-sum-exp is one rounded number, and
its error would be in every P of a row.

A tile that holds all keys has tlse at once: tO = P tV + (P * (tS - tlse)) V, as in plain attention.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash import _primitive
from jflash._backends.xla import plans, recompute, tiling
from jflash._backends.xla.recompute import RecomputedTile
from jflash._backends.xla.sums import Place, Terms, tile_sum
from jflash._semantics.spec import Operands, Results, Spec
from jflash._semantics.tile import smooth_parameters, split_heads, tile_parameters


def tangent(spec: Spec, operands: Operands, results: Results, tangents: Operands) -> Results:
    """Return the tangents of out and log-sum-exp; `None` stands for an operand's tangent of 0."""
    lse = recompute.finite_lse(results.lse)
    sunk = recompute.sink_probabilities(operands, lse)
    t_sunk = jnp.zeros_like(lse)
    if tangents.sinks is not None:
        t_sunk = sunk * tangents.sinks.astype(lse.dtype)[..., None]
    pushed = tile_parameters(tangents)
    arrays = pushed.score_mod_arrays or (None,) * len(operands.score_mod_arrays)
    by_head = lambda array: None if array is None else split_heads(array, 2, spec)
    rows = (by_head(operands.query), by_head(tangents.query), *recompute.by_row(spec, lse, sunk))
    keys = (operands.key, operands.value, tangents.key, tangents.value)
    parameters = (smooth_parameters(operands), pushed._replace(score_mod_arrays=arrays))

    (t_sunk,) = recompute.by_row(spec, t_sunk)
    shape = plans.plan(spec, "backward")
    summed = lambda function, *more: tile_sum(spec, shape, function, operands, Terms((*rows, *more), keys, parameters))
    if tiling.holds_rows(spec, shape):
        (t_out, t_lse), _, _ = summed(_WholeRows(spec), t_sunk)
    else:
        (t_out, out, t_lse, total), _, _ = summed(_AboutTheMean(spec))
        total = jax.lax.stop_gradient(total + rows[3])
        total = jnp.where(total == 0, 1, total)
        t_lse = (t_lse + t_sunk) / total
        t_out = (t_out - t_lse[..., None] * out) / total[..., None]
    t_lse = jnp.swapaxes(t_lse.reshape(results.out.shape[:3]), 1, 2)
    return Results(t_out.reshape(results.out.shape).astype(spec.result_dtype), t_lse)


class _Pushed:
    """A tile computed again, and the tangents of its logits."""

    def __init__(self, spec: Spec, terms: Terms, place: Place):
        tile = RecomputedTile(spec, place)
        query, t_query, lse, sunk, *_ = terms.rows
        key, value, t_key, t_value = terms.keys
        parameters, t_parameters = terms.parameters
        of_rows: Any = lambda array: None if array is None else tile.rows(array)
        of_keys: Any = lambda array: None if array is None else tile.keys(array)
        query, t_query, key, t_key = of_rows(query), of_rows(t_query), of_keys(key), of_keys(t_key)

        products, t_products = tile.pairs(tile.dot(query, key)), None
        factors = [pair for pair in ((t_query, key), (query, t_key)) if pair[0] is not None and pair[1] is not None]
        if factors:
            # tQ K^T + Q tK^T as one product: a tile of logits is written once.
            t_products = tile.pairs(tile.dot(*(jnp.concatenate(side, axis=-1) for side in zip(*factors, strict=True))))
        self.tile, self.value, self.t_value = tile, of_keys(value), of_keys(t_value)
        self.probabilities = tile.probabilities(tile.modify(products, parameters), lse, sunk)
        self.t_logits = jnp.zeros_like(products)
        if factors or jax.tree.leaves(t_parameters):
            self.t_logits = _primitive.tangents_of(tile.modify, (products, parameters), (t_products, t_parameters))

    def weighted(self, centre: Float[Array, "b k g i 1"] | float) -> Float[Array, "b k g i j"]:
        """Return P * (tS - centre). A key that is not seen has no part in it, whatever its logit's tangent is."""
        return jnp.where(self.probabilities == 0, 0, self.probabilities * (self.t_logits - centre))

    def weigh(self, weights: Float[Array, "b k g i j"], keys: Float[Array, "b k j H"]) -> Float[Array, "b k g i H"]:
        """Return the sum over keys, after dropout."""
        return self.tile.weigh(self.tile.drop(weights), keys)


@dataclasses.dataclass(frozen=True)
class _AboutTheMean:
    """The function of one tile whose terms add up to tO, O, tlse and l."""

    spec: Spec

    def __call__(self, terms: Terms, place: Place) -> Terms:
        pushed = _Pushed(self.spec, terms, place)
        total, t_lse = pushed.probabilities.sum(axis=-1), pushed.weighted(0).sum(axis=-1)
        # The mean cancels, whatever it is, so it has no derivative.
        mean = jax.lax.stop_gradient(t_lse / jnp.where(total == 0, 1, total))[..., None]
        values = [array for array in (pushed.value, pushed.t_value) if array is not None]
        out, *more = jnp.split(pushed.weigh(pushed.probabilities, jnp.concatenate(values, axis=-1)), len(values), -1)
        t_out = sum(more, start=pushed.weigh(pushed.weighted(mean), pushed.value) + mean * out)
        return Terms((t_out, out, t_lse, total), (), ())


@dataclasses.dataclass(frozen=True)
class _WholeRows:
    """The function of a tile that has all keys of its rows, and so gives their tO and tlse at once.

    The last array of rows is the sinks' part of tlse.
    """

    spec: Spec

    def __call__(self, terms: Terms, place: Place) -> Terms:
        pushed, (*_, t_sunk) = _Pushed(self.spec, terms, place), terms.rows
        if place.fresh is not None:
            t_sunk = jnp.where(place.fresh, t_sunk, 0)
        t_lse = pushed.weighted(0).sum(axis=-1) + t_sunk
        t_out = pushed.weigh(pushed.weighted(t_lse[..., None]), pushed.value)
        if pushed.t_value is not None:
            t_out = t_out + pushed.weigh(pushed.probabilities, pushed.t_value)
        return Terms((t_out, t_lse), (), ())
