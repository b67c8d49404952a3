"""The two numbers of a query that the backward takes from its products: lse from S, and delta from dP.

Where queries are a tile's columns, every thread needs those of a quarter of them. The fused backward has them taken off
while products are made, in one of two ways:

Columns: the matrix unit takes them off, as three more columns of each product.

    S^T - lse / scale = [K, 1, 1, 1] [Q, -high, -middle, -low]^T      lse / scale = high + middle + low, in bfloat16

Vectors, where tiles of bias and mask leave no room for that, or a logit is more than a product times the scale: every
thread reads them from shared memory, and sums begin there instead of at 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import inputs, pairs, tiles
from jflash._backends.mosaic_gpu.inputs import Inputs
from jflash._backends.mosaic_gpu.operations import Operations, Ref, along_columns, along_rows
from jflash._backends.mosaic_gpu.tiles import ROWS
from jflash._semantics.spec import Spec

PIECES = 3
"""Numbers of bfloat16 that together have the 24 bits of one of float32."""
STORED = 8
"""Columns in device memory: the pieces of both, in rows of 16 bytes, the least that copies take."""
COLUMNS = 16
"""Columns in shared memory: as many as one product takes. What is not stored is read as 0."""

PerQuery = Float[Array, "B N L"]
"""One number for each query, and room for a tile that begins at the last one."""


def are_columns(spec: Spec) -> bool:
    """Whether a call's products take them as columns."""
    return inputs.is_plain(spec) and not pairs.has_tiles(spec)


def subtrahends(spec: Spec, lse: Float[Array, "B N T"], delta: Float[Array, "B N T"]) -> tuple[PerQuery, PerQuery]:
    """For kernels that subtract them when products are made: lse as the call's exponent has it, and delta.

    `lse` is +inf where there is no query or it sees nothing, and `delta` 0 there.
    """
    exact = inputs.exponent(spec).exact
    return _with_margin(lse if exact else lse * math.log2(math.e), jnp.inf), _with_margin(delta, 0)


def vectors(spec: Spec, lse: Float[Array, "B N T"], delta: Float[Array, "B N T"]) -> tuple[PerQuery, PerQuery]:
    """For the fused backward: what its sums begin at, or lse and -delta where a logit is more than its product."""
    if inputs.is_plain(spec):
        assert spec.scale is not None
        first = _with_margin(-lse / spec.scale, -jnp.inf)
    else:
        first, _ = subtrahends(spec, lse, delta)
    return first, _with_margin(-delta, 0)


def stored_rows(queries: int) -> int:
    """How many rows columns have for so many queries: there is room for a tile that begins at the last one."""
    return tiles.round_up(queries, ROWS) + inputs.MARGIN


def columns(
    spec: Spec, lse: Float[Array, "rows"], delta: Float[Array, "rows"], operations: Operations
) -> Float[Array, "rows 8"]:
    """Some queries' columns, made in a kernel. `lse` is -inf where there is no query or it sees nothing."""
    assert spec.scale is not None
    # Infinity times 0, for the other product, would be NaN.
    least = -float(jnp.finfo(jnp.bfloat16).max)
    first = jnp.where(lse == -jnp.inf, least, jnp.maximum(lse * (-1 / spec.scale), least))
    index = operations.index((lse.shape[0], STORED), 1)
    made = operations.full(index.shape, 0)
    for place, piece in enumerate(pieces(first, operations.rounded) + pieces(-delta, operations.rounded)):
        made = jnp.where(index == place, along_rows(piece, index.shape), made)
    return made.astype(jnp.bfloat16)


def pieces(rest: Float[Array, "..."], rounded: Callable[[Array], Array]) -> list[Float[Array, "..."]]:
    """Numbers that bfloat16 has, whose sum is the given finite one; `rounded` gives the nearest that it has."""
    found: list[Array] = []
    for _ in range(PIECES):
        found.append(rounded(rest))
        rest = rest - found[-1]
    return found


def factors() -> Float[Array, "2 64 16"]:
    """What columns are multiplied with: 1 for the pieces of lse, and of delta."""
    # By operations: `custom_partitioning` takes no function that holds an array.
    number, column = (lax.broadcasted_iota(jnp.int32, (2, ROWS, COLUMNS), axis) for axis in (0, 2))
    return (lax.div(column, PIECES) == number).astype(jnp.bfloat16)


def _with_margin(values: Float[Array, "B N T"], fill: float) -> PerQuery:
    room = [(0, 0), (0, 0), (0, -values.shape[2] % 8 + inputs.MARGIN)]
    return jnp.pad(values, room, constant_values=fill)


def shared(as_columns: bool, stages: int, queries: int) -> list[Any]:
    """Shared memory for some tiles' columns, or their vectors."""
    if as_columns:
        return [tiles.shared((stages, queries, COLUMNS), jnp.bfloat16, STORED)]
    return [tiles.vectors((stages, queries)), tiles.vectors((stages, queries))]


def parts(arrays: Sequence[Ref], batch: Any, head: Any, rows: Any) -> list[Ref]:
    """Some queries' columns, or their vectors, in device memory."""
    if len(arrays) == 1:
        return [arrays[0].at[batch, head, rows, tiles.columns(COLUMNS, STORED, batch)]]
    return [array.at[batch, head, rows] for array in arrays]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A tile's, in shared memory."""

    call: Inputs
    shape: tuple[int, int]
    refs: Sequence[Ref]
    ones: Ref | None
    """For columns."""
    lse: Float[Array, "keys queries"] | None
    """If it is not taken off before the exponent."""

    @staticmethod
    def of(call: Inputs, shape: tuple[int, int], refs: Sequence[Ref], ones: Ref | None) -> Statistics:
        """Those of a tile whose columns, or first vector, have arrived."""
        plain = inputs.is_plain(call.spec)
        lse = None if plain else along_columns(call.operations.load(refs[0], 1), shape)
        return Statistics(call, shape, refs, ones, lse)

    @property
    def products(self) -> int:
        """How many products `multiply` makes."""
        return 1 if self.ones is None else 2

    def multiply(self, accumulator: Any, left: Any, right: Ref, number: int) -> None:
        """Make left @ right less lse / scale (number 0; of a plain call) or less delta (1)."""
        operations = self.call.operations
        if self.ones is None and (number == 1 or self.lse is None):
            operations.begin(accumulator, along_columns(operations.load(self.refs[number], 1), self.shape))
        operations.multiply(accumulator, left, right)
        if self.ones is not None:
            operations.multiply(accumulator, self.ones.at[number], self.refs[0].T)

    def weights(self, logits: Float[Array, "keys queries"]) -> Float[Array, "keys queries"]:
        """P^T, from what `multiply` made of a plain call, or the logits of another."""
        exponent = self.call.exponent
        return exponent.of_difference(logits) if self.lse is None else exponent(logits, self.lse)
