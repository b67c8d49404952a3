"""A tile computed again from the log-sum-exp: the first step of the backward and the tangent.

    S = modify(Q K^T), -inf where masked
    P = exp(S - lse)

A tile that holds all keys has all that a row sums over, and does as plain attention does, to the same error:

    P = exp(S - m) / l

The log-sum-exp is rounded, and S is not computed again to the last bit. That shows where a row sees few keys.

exp(S - m) and l are written as the forward writes them. Where one tile is the whole call, a program with both passes
computes them once: as fast as if they were kept, and `jax.checkpoint` still has them forgotten.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.xla import tiling
from jflash._backends.xla.sums import Place
from jflash._semantics import dropout, online_softmax
from jflash._semantics.logits import may_end_in_rounding, modify_logits, without_unseen
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import Parameters, split_heads


def finite_lse(lse: Float[Array, "B N T"]) -> Float[Array, "B N T"]:
    """Return the log-sum-exp with +inf for rows that saw no key.

    Then P = exp(S - inf) = 0 makes everything of such a row zero, to any order of derivative.
    """
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def sink_probabilities(operands: Operands, lse: Float[Array, "B N T"]) -> Float[Array, "B N T"]:
    """Return the share of each row's softmax that goes to a sink."""
    if operands.sinks is None:
        return jnp.zeros_like(lse)
    return jnp.exp(operands.sinks.astype(lse.dtype)[..., None] - lse)


def by_row(spec: Spec, *arrays: Float[Array, "B N T"]) -> tuple[Float[Array, "B T K G"], ...]:
    """Return arrays of one number for each row, as `Terms.rows` has them."""
    return tuple(split_heads(jnp.swapaxes(array, 1, 2), 2, spec) for array in arrays)


@dataclasses.dataclass(frozen=True)
class RecomputedTile:
    """A tile whose products are laid out `[b, k, (g i), j]` and whose logits `[b, k, g, i, j]`."""

    spec: Spec
    place: Place

    def rows(self, array: Float[Array, "b k g i H"]) -> Float[Array, "b k gi H"]:
        """Return rows as a factor of products, with padding as zeros."""
        tile = self.place.tile
        clean = tiling.zero_padding(array, tile.query, tile.query_lengths)
        return clean.reshape(*array.shape[:2], -1, array.shape[-1])

    def keys(self, array: Float[Array, "b k j H"]) -> Float[Array, "b k j H"]:
        """Return keys or values as a factor of products, with padding as zeros."""
        return array if self.place.visible is None else tiling.zero_padded_keys(array, self.place.tile)

    def dot(self, left: Float[Array, "b k m h"], right: Float[Array, "b k n h"]) -> Float[Array, "b k m n"]:
        """Return the product over the last axes."""
        return tiling.products(self.spec, self.place.shape, left, right)

    def weigh(self, weights: Float[Array, "b k g i j"], keys: Float[Array, "b k j H"]) -> Float[Array, "b k g i H"]:
        """Return the sum over keys, with weights in the call's dtype."""
        return self.pairs(tiling.dot(self.spec, self.flat(weights), keys, (3, 2)))

    def weigh_rows(self, weights: Float[Array, "b k g i j"], rows: Float[Array, "b k gi H"]) -> Float[Array, "b k j H"]:
        """Return the sum over rows. The product is of its transpose: then no tile of logits is transposed."""
        columns = lambda array: jnp.swapaxes(array, 2, 3)
        return columns(tiling.dot(self.spec, columns(rows), self.flat(weights), (3, 2)))

    def pairs(self, products: Float[Array, "b k gi j"]) -> Float[Array, "b k g i j"]:
        """Return products with query heads and rows taken apart."""
        return tiling.pairs(self.spec, products)

    def flat(self, weights: Float[Array, "b k g i j"]) -> Float[Array, "b k gi j"]:
        """Return weights as a factor of products, in the call's dtype."""
        batch, heads, *_, keys = weights.shape
        return weights.astype(self.spec.dtype).reshape(batch, heads, -1, keys)

    def modify(self, products: Float[Array, "b k g i j"], parameters: Parameters) -> Float[Array, "b k g i j"]:
        """Return the logits, where they are seen. `parameters` are those that have a derivative."""
        tile = self.place.tile
        given = zip(parameters.score_mod_arrays, tile.parameters.score_mod_arrays, strict=True)
        arrays = tuple(discrete if smooth is None else smooth for smooth, discrete in given)
        whole = without_unseen(self.spec, parameters._replace(score_mod_arrays=arrays), self.place.visible)
        return modify_logits(self.spec, products, tile._replace(parameters=whole))

    def probabilities(
        self, logits: Float[Array, "b k g i j"], lse: Float[Array, "b k g i"], sunk: Float[Array, "b k g i"]
    ) -> Float[Array, "b k g i j"]:
        """Return P. `sunk` is the share of each row's softmax that goes to a sink."""
        lse, sunk = lse[..., None], sunk[..., None]
        if self.place.whole_rows and may_end_in_rounding(self.spec):
            logits = lax.optimization_barrier(logits)
        if self.place.visible is not None:
            logits = jnp.where(self.place.visible, logits, -jnp.inf)
        if self.place.whole_rows and "sinks" not in self.spec.operands:
            found = online_softmax.probabilities(logits, lse)
            return found if self.place.fresh is None else jnp.where(self.place.fresh[:, None], found, 0)
        if self.place.fresh is not None:
            lse = jnp.where(self.place.fresh[:, None], lse, jnp.inf)
        if not self.place.whole_rows:
            return online_softmax.exp(logits - lse)
        exponentials, largest = online_softmax.exponentials(logits)
        weight = jnp.exp(largest[..., None] - lse)
        # The total is 1 but for rounding, so it has no derivative.
        total = lax.stop_gradient(weight * exponentials.sum(axis=-1, keepdims=True) + sunk)
        return exponentials * (weight / jnp.where(total == 0, 1, total))

    def drop(self, array: Float[Array, "b k g i j"]) -> Float[Array, "b k g i j"]:
        """Return probabilities, or their gradients, after dropout."""
        if self.spec.dropout_rate == 0:
            return array
        return jnp.where(dropout.keep_tile(self.spec, self.place.tile), array / (1 - self.spec.dropout_rate), 0)
