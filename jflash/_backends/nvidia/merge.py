"""After a forward whose walks were cut: the output of each cut walk's rows, from those of its pieces.

    for each cut walk, 64 of its rows and some columns, a CTA each:
      m, l, acc = -inf, 0, 0
      for some pieces at a time, with output o and log-sum-exp lse each:
        add exp(lse) to l and exp(lse) o to acc, both relative to m, the largest lse so far
      add the sums of the CTA's other warpgroups, which have taken other pieces
      if there are sinks, add exp(sink) to l
      out = acc / l;  lse = m + log l

CTAs without a cut walk end at once, so only what was cut is read. The others' rows were stored by the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.nvidia.launch import Launch, Refs, cta_index
from jflash._backends.nvidia.ops import Ops
from jflash._backends.nvidia.packing import ForwardShape
from jflash._backends.nvidia.prepared import Prepared
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up, vectors
from jflash._backends.nvidia.threads.device_rows import ColumnChunk
from jflash._backends.nvidia.tile.softmax import normalizer, scaled_rows
from jflash._semantics.online_softmax import finite_or_zero

_COLUMNS = 16
"""Columns of a CTA."""

_TOGETHER = 4
"""Pieces that a warpgroup loads together: its registers hold their tiles beside their sum."""

_MOST_WARPGROUPS = 4

PIECES = "out_of_pieces", "lse_of_pieces"
"""What a forward leaves of pieces, besides its results."""


def results_of_forward(shape: ForwardShape) -> dict[str, jax.ShapeDtypeStruct]:
    """Return what a forward's kernel stores, by name: its results, unless all walks are cut, and those of pieces.

    Of pieces they are a float32 output `[pieces, N, rows, D]`, with as many rows as a tile has that are queries, and
    the log-sum-exp `[pieces, N, L]`, L of whole tiles.
    """
    if shape.division.pieces == 0:
        return shape.results
    of_heads, columns = (shape.division.pieces, shape.heads), round_up(shape.spec.value_dim, 16)
    shapes = (*of_heads, min(shape.rows, shape.tile.rows), columns), (*of_heads, shape.tile.rows)
    pieces = {name: jax.ShapeDtypeStruct(each, jnp.float32) for name, each in zip(PIECES, shapes, strict=True)}
    return pieces if shape.shares is None else shape.results | pieces


def merged(shape: ForwardShape, call: Prepared, made: dict[str, Array]) -> dict[str, Array]:
    """Return a forward's results with those of the walks that were cut, by name."""
    if shape.division.pieces == 0:
        return made
    blocks, columns = shape.tile.rows // WARPGROUP_ROWS, shape.results["out"].shape[-1]
    grid = dict(cut=shape.division.cuts, head=shape.heads, row=blocks, column=pl.cdiv(columns, _COLUMNS))
    # The forward has stored what was not cut.
    stored = {name: made[name] for name in shape.results if name in made}
    # Each has pieces of an average walk to load together; one with few would load its last piece again and again.
    warpgroups = min(max(shape.division.pieces // (shape.division.cuts * _TOGETHER), 1), _MOST_WARPGROUPS)
    launch = Launch(
        name=f"jflash_merge_{shape.spec.value_dim}",
        grid=grid,
        results={} if stored else shape.results,
        smem=Buffers(
            m=vectors(warpgroups, WARPGROUP_ROWS),
            l=vectors(warpgroups, WARPGROUP_ROWS),
            acc=vectors(warpgroups, WARPGROUP_ROWS, _COLUMNS),
        ),
        warpgroups=warpgroups,
    )
    sinks = {} if call.operands.sinks is None else dict(sinks=call.operands.sinks) | shape.sinks(call.operands)
    arrays = call.work(shape.visits, shape.shares) | shape.of_tokens(call.operands) | sinks
    arrays |= {name: made[name] for name in PIECES}
    results, changed = launch.update(lambda refs: _merge(shape, warpgroups, refs, call.ops), arrays, stored, call.ops)
    return results | changed


class _Sums(NamedTuple):
    """Sums over some pieces, for each row."""

    m: Float[Array, "64"]
    """The largest log-sum-exp."""
    l: Float[Array, "64"]
    """The sum of exponentials of log-sum-exps, relative to it."""
    acc: Float[Array, "64 columns"]
    """The sum of outputs, each times that exponential."""

    @staticmethod
    def of(parts: Sequence[_Sums]) -> _Sums:
        """Return the sums over the pieces of all parts."""
        largest = functools.reduce(jnp.maximum, (part.m for part in parts))
        reference = finite_or_zero(largest)
        weights = [jnp.exp(part.m - reference) for part in parts]
        weighed = zip(parts, weights, strict=True)
        l, acc = zip(*((part.l * weight, scaled_rows(part.acc, weight)) for part, weight in weighed), strict=True)
        return _Sums(largest, functools.reduce(jnp.add, l), functools.reduce(jnp.add, acc))


def _merge(shape: ForwardShape, warpgroups: int, refs: Refs, ops: Ops) -> None:
    cut, head, row, column = map(cta_index, ("cut", "head", "row", "column"))
    warpgroup = lax.axis_index("warpgroup")
    batch, block, first_piece, pieces = shape.division.cut(refs.arrays, cut)
    (first, stop), own = shape.rows_of_block(block), row * WARPGROUP_ROWS
    vector, tile = (WARPGROUP_ROWS,), (WARPGROUP_ROWS, _COLUMNS)
    out, lse = ({**refs.arrays, **refs.results}[name] for name in ("out", "lse"))
    out_of_pieces, lse_of_pieces = (refs.arrays[name] for name in PIECES)
    chunk = ColumnChunk(column * _COLUMNS, round_up(out.shape[-1], _COLUMNS))

    def load(index: Any) -> _Sums:
        piece, rows = first_piece + jnp.minimum(index, pieces - 1), pl.ds(own, WARPGROUP_ROWS)
        lse = ops.load(lse_of_pieces.at[piece, head, rows], 0)
        of_piece = out_of_pieces.at[piece, head]
        o = ops.fetch_rows(of_piece, own, of_piece.shape[0], chunk, _COLUMNS)
        # The last piece comes again where there are none left.
        return _Sums(lse + jnp.where(index < pieces, 0.0, -jnp.inf), ops.full(vector, 1), o)

    def add(number: Any, before: _Sums) -> _Sums:
        index = (number * warpgroups + warpgroup) * _TOGETHER
        return _Sums.of([before, *(load(index + turn) for turn in range(_TOGETHER))])

    def add_others(sums: _Sums) -> _Sums:
        m, l, acc = refs.smem.m, refs.smem.l, refs.smem.acc
        m[warpgroup], l[warpgroup], acc[warpgroup] = sums
        ops.meet(warpgroups)
        of = lambda number: _Sums(ops.load(m.at[number], 0), ops.load(l.at[number], 0), ops.load(acc.at[number]))
        return _Sums.of([*map(of, range(warpgroups))])

    def merge() -> None:
        nothing = _Sums(ops.full(vector, -jnp.inf), ops.full(vector, 0), ops.full(tile, 0))
        each = warpgroups * _TOGETHER
        sums = lax.fori_loop(0, lax.div(pieces + (each - 1), each), add, nothing)
        if warpgroups > 1:
            sums = add_others(sums)
        pl.when(warpgroup == 0)(lambda: store(sums))

    def store(sums: _Sums) -> None:
        sink = shape.sink(refs.arrays, ops, batch, head, first + own)
        factor, lse_of_all = normalizer(finite_or_zero(sums.m), sums.l, sink)
        target = shape.rows_of(out, refs.arrays, batch, head)
        ops.store_rows(scaled_rows(sums.acc, factor), target.ref, *target.span(first + own, stop), chunk)

        def store_lse() -> None:
            lse[batch, head, pl.ds(first + own, WARPGROUP_ROWS)] = lse_of_all

        pl.when(column == 0)(store_lse)

    pl.when((pieces > 0) & (first + own < stop))(merge)
