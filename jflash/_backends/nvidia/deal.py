"""Before a forward on a paged cache: the list of its items of work, from lengths and offsets (`work_items`).

    each CTA, of a warpgroup, a thread for each of 128 walks:
      for all walks: tiles into shared memory
      share = ceil(sum of tiles / shares)
      for all walks: pieces into shared memory
      for all walks: count those that are longer, and their pieces
      store the walk's items behind the pieces of all longer walks, and the walk behind all longer ones if it is cut
      clear a share of the rows of which nothing is stored

Nothing is sorted, and no CTA waits for another: each finds the tiles of all walks, and compares its own with them. XLA
makes such a list by three kernels (examples/benchmarks/experiments/2026-11-29-lists.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from jflash._backends.nvidia.launch import Launch, Refs, cta_index
from jflash._backends.nvidia.ops import Ops
from jflash._backends.nvidia.smem import Buffers, round_up, vectors
from jflash._backends.nvidia.threads.builder import THREADS
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.work_items import COLUMNS, LEAST, Shares
from jflash._semantics.spec import Operands, Spec

_UNROLLED = 8
"""Walks whose tiles are loaded together."""


def deal(spec: Spec, operands: Operands, visited: Blocks, shares: Shares, ops: Ops) -> Int[Array, "rows 5"]:
    """Return the list that kernels read, of `shares.items` items and `shares.cuts` cut walks, one in a row.

    An item has its batch entry, its block, the tiles of the walk before it and its own, and what it is: 0 for none, 1
    for a whole walk, 2 for a piece. A cut walk has its batch entry, its block, its first item and its pieces, 0 for
    none.
    """
    walks = round_up(shares.walks, THREADS)
    launch = Launch(
        name="jflash_deal",
        grid=dict(walks=walks // THREADS),
        results=dict(rows=jax.ShapeDtypeStruct((shares.items + shares.cuts, COLUMNS), jnp.int32)),
        smem=Buffers(tiles=vectors(walks, dtype=jnp.int32), pieces=vectors(walks, dtype=jnp.int32)),
    )
    return launch.run(lambda refs: _deal(spec, visited, shares, refs, ops), tile_range.limits(operands), ops)["rows"]


def _deal(spec: Spec, visited: Blocks, shares: Shares, refs: Refs, ops: Ops) -> None:
    tiles_of, pieces_of, rows, thread = refs.smem.tiles, refs.smem.pieces, refs.results["rows"], ops.threads()
    blocks, ctas = shares.walks // spec.batch, tiles_of.shape[0] // THREADS
    chunk_of = lambda number: pl.ds(number * THREADS, THREADS)
    each_chunk = lambda body: lax.fori_loop(0, ctas, lambda number, _: body(number), None)

    def find(chunk: Any) -> None:
        walk = jnp.minimum(chunk * THREADS + thread, shares.walks - 1)
        entry, block = _place(walk, blocks)
        limits = {name: ops.gather_by_thread(array, entry) for name, array in refs.arrays.items()}
        tiles_of[chunk_of(chunk)] = _tiles(spec, visited, limits, block)

    each_chunk(find)
    ops.meet()
    total = _each(shares.walks, lambda walk, total: total + tiles_of[walk], jnp.int32(0))
    share = jnp.maximum(lax.div(total + (shares.shares - 1), shares.shares), LEAST)

    def cut(chunk: Any) -> None:
        tiles = ops.load_strided(tiles_of.at[chunk_of(chunk)], 1)
        pieces_of[chunk_of(chunk)] = jnp.maximum(lax.div(2 * tiles + share, 2 * share), 1)

    each_chunk(cut)
    ops.meet()
    number = cta_index("walks")
    own = number * THREADS + thread
    tiles, pieces = (ops.load_strided(ref.at[chunk_of(number)], 1) for ref in (tiles_of, pieces_of))

    def compare(walk: Any, counts: tuple[Array, ...]) -> tuple[Array, ...]:
        rank, start, most, items, cuts = counts
        others, made = tiles_of[walk], pieces_of[walk]
        is_longer = (others > tiles) | ((others == tiles) & (walk < own))
        longer, before = (jnp.where(is_longer, number, 0) for number in (1, made))
        return rank + longer, start + before, jnp.maximum(most, made), items + made, cuts + jnp.int32(made > 1)

    zeros, nothing = thread * 0, jnp.int32(0)
    rank, start, most, items, cuts = _each(shares.walks, compare, (zeros, zeros, nothing, nothing, nothing))
    is_one = own < shares.walks
    entry, block = _place(own, blocks)
    begin = lambda piece: lax.div(piece * tiles, pieces)

    def store(piece: Any, _: None) -> None:
        of_walk = begin(piece), begin(piece + 1) - begin(piece), jnp.where(pieces > 1, 2, 1)
        ops.scatter_by_thread(rows, start + piece, is_one & (piece < pieces), entry, block, *of_walk)

    def clear(from_row: Any, stop: int) -> None:
        def some(number: Any, _: None) -> None:
            row = from_row + number * (ctas * THREADS) + own
            ops.scatter_by_thread(rows, row, row < stop, *[0] * COLUMNS)

        lax.fori_loop(0, lax.div(stop - from_row + (ctas * THREADS - 1), ctas * THREADS), some, None)

    lax.fori_loop(0, most, store, None)
    ops.scatter_by_thread(rows, shares.items + rank, is_one & (pieces > 1), entry, block, start, pieces, 0)
    clear(items, shares.items)
    clear(shares.items + cuts, shares.items + shares.cuts)


def _each(walks: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """Return `carry = body(walk, carry)` after all walks, of which some are loaded together."""
    together = walks // _UNROLLED * _UNROLLED
    carry = lax.fori_loop(0, together, body, start, unroll=_UNROLLED) if together else start
    return lax.fori_loop(together, walks, body, carry) if together < walks else carry


def _place(walk: Int[Array, "128"], blocks: int) -> tuple[Int[Array, "128"], Array]:
    """Return each walk's batch entry and block, of which an entry has some number."""
    # Mosaic GPU (jax 0.12) cannot give threads a vector that folds to a constant.
    return (lax.div(walk, blocks), lax.rem(walk, blocks)) if blocks > 1 else (walk, jnp.int32(0))


def _tiles(spec: Spec, visited: Blocks, limits: dict[str, Int[Array, "128"]], block: Array) -> Int[Array, "128"]:
    """Return how many tiles each walk has."""

    def of_one(limits: dict[str, Int[Array, ""]], block: Int[Array, ""]) -> Int[Array, ""]:
        row = tile_range.block_start(block, visited.rows, visited.missing)
        spans = tile_range.key_spans(spec, limits, row, visited.rows)
        return tile_range.of_spans(spec, spans, visited.size)[1]

    return jax.vmap(of_one, (0, 0 if block.shape else None))(limits, block)
