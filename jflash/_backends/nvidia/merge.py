"""After a forward whose long walks were cut: the output of each cut walk's rows, from those of its pieces.

    for each cut walk, 64 of its rows and 64 columns, a CTA each:
      m, l, acc = -inf, 0, 0
      for each piece, with output o and log-sum-exp lse:
        add exp(lse) to l and exp(lse) o to acc, both relative to m, the largest lse so far
      if there are sinks, add exp(sink) to l
      out = acc / l;  lse = m + log l

CTAs without a cut walk end at once, so only what was cut is read. The others' rows were stored by the forward.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.nvidia.launch import Launch, Refs, cta_index
from jflash._backends.nvidia.ops import Ops
from jflash._backends.nvidia.packing import ForwardShape
from jflash._backends.nvidia.prepared import Prepared
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, round_up
from jflash._backends.nvidia.threads.device_rows import ColumnChunk
from jflash._backends.nvidia.tile.softmax import normalizer, scaled_rows
from jflash._backends.nvidia.walk.work_items import ITEMS, Cut, Shares
from jflash._semantics.online_softmax import finite_or_zero

_COLUMNS = 64
"""Columns of a CTA: of more, sums and what is added to them would fill a thread's registers."""

PIECES = "out_of_pieces", "lse_of_pieces"
"""What a forward leaves of pieces, besides its results."""


def of_pieces(shape: ForwardShape) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the results of pieces that a forward stores, by name; nothing if no walk is cut.

    They are a float32 output `[pieces, N, rows, D]`, with as many rows as a tile has that are queries, and the
    log-sum-exp `[pieces, N, L]`, L of whole tiles.
    """
    if shape.shares is None:
        return {}
    of_heads, columns = (shape.shares.pieces, shape.heads), round_up(shape.spec.value_dim, 16)
    shapes = (*of_heads, min(shape.rows, shape.tile.rows), columns), (*of_heads, shape.tile.rows)
    return {name: jax.ShapeDtypeStruct(each, jnp.float32) for name, each in zip(PIECES, shapes, strict=True)}


def merged(shape: ForwardShape, call: Prepared, made: dict[str, Array]) -> dict[str, Array]:
    """Return a forward's results with those of the walks that were cut, by name."""
    if (shares := shape.shares) is None:
        return made
    blocks, columns = shape.tile.rows // WARPGROUP_ROWS, made["out"].shape[-1]
    ctas = dict(cut=shares.cuts, head=shape.heads, row=blocks, column=pl.cdiv(columns, _COLUMNS))
    launch = Launch(f"jflash_merge_{shape.spec.value_dim}", ctas, results={})
    sinks = {} if call.operands.sinks is None else dict(sinks=call.operands.sinks) | shape.sinks(call.operands)
    arrays = call.work(shape.visits, shares) | shape.of_tokens(call.operands) | sinks
    arrays |= {name: made[name] for name in PIECES}
    results = dict(out=made["out"], lse=made["lse"])
    return launch.update(lambda refs: _merge(shape, shares, refs, call.ops), arrays, results, call.ops)[1]


def _merge(shape: ForwardShape, shares: Shares, refs: Refs, ops: Ops) -> None:
    cut, head, row, column = map(cta_index, ("cut", "head", "row", "column"))
    batch, block, first_piece, pieces = Cut.read(refs.arrays[ITEMS], shares, cut)
    out, lse = (refs.arrays[name] for name in PIECES)
    (first, stop), own = shape.rows_of_block(block), row * WARPGROUP_ROWS
    vector, tile = (WARPGROUP_ROWS,), (WARPGROUP_ROWS, _COLUMNS)

    def add(index: Any, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        (m, l, acc), piece = before, first_piece + index
        lse_of_piece = ops.load(lse.at[piece, head, pl.ds(own, WARPGROUP_ROWS)], 0)
        o = ops.load_tile(out.at[piece, head], own, column * _COLUMNS, tile, transposed=False)
        largest = jnp.maximum(m, lse_of_piece)
        reference = finite_or_zero(largest)
        shrink, weight = jnp.exp(m - reference), jnp.exp(lse_of_piece - reference)
        return largest, l * shrink + weight, scaled_rows(acc, shrink) + scaled_rows(o, weight)

    def merge() -> None:
        nothing = ops.full(vector, -jnp.inf), ops.full(vector, 0), ops.full(tile, 0)
        m, l, acc = lax.fori_loop(0, pieces, add, nothing)
        factor, lse_of_all = normalizer(finite_or_zero(m), l, shape.sink(refs.arrays, ops, batch, head, first + own))
        target = shape.rows_of(refs.arrays["out"], refs.arrays, (0, batch), head)
        chunk = ColumnChunk(column * _COLUMNS, round_up(target.ref.shape[-1], _COLUMNS))
        ops.store_rows(scaled_rows(acc, factor), target.ref, *target.span(first + own, stop), chunk)

        def store_lse() -> None:
            rows = pl.ds(first + own, WARPGROUP_ROWS)
            refs.arrays["lse"][0, batch, head, rows] = lse_of_all

        pl.when(column == 0)(store_lse)

    pl.when((pieces > 0) & (first + own < stop))(merge)
