"""Forward: a CTA owns some rows of queries and walks over the tiles of keys that they can see.

    Q = the rows' queries
    for each tile of keys, j:
      S = Q K_j^T                     copies of the next tile run beside this
      P, m, l = online softmax of S
      O = O * rescale + P V_j
    out = O / l;  lse = log l + m

With one stage in shared memory V_j is copied beside Q K_j^T and K_(j+1) beside P V_j. With two, both of the next tile
are copied beside all of this one. Other CTAs of the multiprocessor compute where this one waits.

A warp has 16 rows of each block of 64, and P in registers as P V_j takes it. Where registers hold O of one block alone,
what is read of V_j would serve 16 rows. There O is a pair (`products`): a warp has 32 rows of O and half of
its columns. It reads half as much of V_j, and P from shared memory.

Products of float32 are those of its pieces (`operand_pieces`), here and in the backward.

Source: FlashAttention-2, arXiv:2307.08691, sections 3.1 and 3.3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.cta import MmaOps, QueriesCta, TiledPlan, bias_buffer, buffer, buffers, by_piece
from jflash._backends.mosaic_gpu_mma.products import STEP, Operand, Tiles
from jflash._backends.mosaic_gpu_mma.run import MmaCall
from jflash._backends.mosaic_gpu_mma.tiles import ForwardTile
from jflash._backends.nvidia import merge, smem
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.merge import PIECES
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.packing import EntryRows, ForwardShape
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.threads.device_rows import ColumnChunk
from jflash._backends.nvidia.tile import logits, operand_pieces, softmax
from jflash._backends.nvidia.tile.softmax import Softmax
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.tile_range import Place, TileContext
from jflash._backends.nvidia.walk.work_items import Division, Item, Shares


@dataclasses.dataclass(frozen=True)
class ForwardPlan(ForwardShape, TiledPlan):
    """A call's forward, known before any array."""

    tile: ForwardTile
    division: Division
    packed_heads: int = 1
    """Query heads that share keys and are interleaved in the rows of one tile."""

    @property
    def visits(self) -> Blocks:
        return Blocks(max(self.tile.rows // self.packed_heads, 1), self.tile.size, self.packed_heads)

    def arrays(self, call: MmaCall) -> dict[str, Array]:
        operands = call.operands
        arrays = dict(query=operands.query)
        if self.spec.pages is None:
            arrays |= dict(key=operands.key, value=operands.value)
        arrays = {name: call.in_chunks(array) for name, array in arrays.items()} | call.cache | call.others
        return (
            arrays
            | call.packed_mask()
            | self.sinks(operands)
            | call.visits(self.visits)
            | call.work(self.visits, self.shares)
        )

    @property
    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        out = (*self.out_rows, self.spec.heads, round_up(self.spec.value_dim, 8))
        lse = (self.spec.batch, self.heads, round_up(self.rows, self.tile.rows))
        return dict(out=jax.ShapeDtypeStruct(out, self.spec.result_dtype), lse=jax.ShapeDtypeStruct(lse, jnp.float32))

    @property
    def launch(self) -> Launch:
        """The kernel's grid, results and shared memory.

        Queries and output are `[B, T, N, D]`, with D rounded up to 8; lse is `[B, N, L]`, L of whole blocks. Blocks of
        one head follow one another, so that what runs at the same time shares keys. Along all but the fastest axis CUDA
        counts no further than 65,535. With items of work these are what "batch" counts.
        """
        spec, division = self.spec, self.division
        if isinstance(division, Shares):
            grid = dict(batch=division.items, head=self.heads, block=1)
        else:
            grid = dict(split=division.each, batch=spec.batch, head=self.heads, block=division.blocks)
        return Launch(
            name=f"jflash_mma_forward_{spec.head_dim}_{spec.value_dim}",
            grid=grid,
            results=merge.results_of_forward(self),
            smem=self.smem,
        )

    @property
    def smem(self) -> Buffers:
        """The kernel's shared memory."""
        spec, tile = self.spec, self.tile
        return buffers(
            *(spec, tile, ("query",), ("key", "value")),
            p=buffer(spec, tile.rows, tile.size) if tile.paired else None,
            factors=smem.vectors(tile.rows) if tile.paired else None,
            bias=bias_buffer(spec, tile.stages, tile.blocks, WARPGROUP_ROWS, tile.size),
        )


Statistics = tuple[Float[Array, "rows"], Float[Array, "rows *parts"]]
"""m and l of a block's rows, as in `Softmax`."""

State = tuple[tuple[Statistics, ...], Tiles]
"""What a CTA knows of its rows after some tiles: the statistics of each block, and O in blocks, or a pair."""


class ForwardCta(QueriesCta[ForwardPlan]):
    """A CTA of the forward, with O in blocks of 64 rows."""

    def __init__(self, plan: ForwardPlan, refs: Refs, ops: MmaOps, **options: Any) -> None:
        super().__init__(plan, refs, ops, packed_heads=plan.packed_heads, **options)
        self.keys, self.chosen = plan.tile.size, dict[str, Any]()
        """The columns of a tile of logits; and what products take of a tile of keys or values, as for `add_product`."""
        self.form = logits.form(plan.spec, sums_in_parts=plan.tile.sums_in_parts)
        self.work = plan.division.work(refs.arrays, self.batch)
        if isinstance(self.work, Item):
            self.batch, self.block = self.work.batch, self.work.block
            self.first_row = self.block * plan.tile.rows
        if plan.spec.pages is not None:
            self.key_limit = self.inputs.value("key_lengths", self.batch)
        self.tiles = self.work.of(self.visited(Place(self.batch, self.head, self.block)))

    def run(self) -> None:
        self.work.run(self.attend)

    def attend(self) -> None:
        """Attend, and store the output."""
        ops, tile = self.ops, self.plan.tile
        is_paged = self.plan.spec.pages is not None
        if is_paged:
            self.copy_page_numbers(0)
        rows = self.cta_rows(["query"], self.batch, self.head, self.first_row)
        if is_paged:
            ops.commit()
            ops.wait()
        self.copy_keys(0, ("key",) if tile.stages == 1 else ("key", "value"))
        ops.commit()
        parts = (softmax.PARTS_OF_L,) if tile.sums_in_parts else ()
        nothing = ops.full((WARPGROUP_ROWS,), self.form.first_m), ops.full((WARPGROUP_ROWS, *parts), 0)
        before = (nothing,) * tile.blocks, self.no_output()
        q = self.held_queries(rows)
        visit = lambda index, state: self.visit(index, q, state)
        self.finish(*lax.fori_loop(0, self.tiles.count, visit, before))

    def finish(self, statistics: Sequence[Statistics], acc_o: Tiles) -> None:
        """Store what a walk, or a piece of one, comes to."""
        plan, results = self.plan, self.refs.results

        def store(own: EntryRows, lse: Ref, first: Any, limit: Any) -> None:
            factors: list[Array] = []
            for rows, (m, l) in zip(self.blocks_from(first), statistics, strict=True):
                sink = plan.sink(self.refs.arrays, self.ops, self.batch, self.head, rows.start, self.work)
                exponent = self.form.exponent(plan.spec)
                factor, lse[rows] = softmax.last_factor(plan.spec, exponent, m, softmax.whole(l), sink)
                factors.append(factor)
            self.store(acc_o, factors, own.ref, *own.span(first, limit))

        def store_whole() -> None:
            own = plan.rows_of(results["out"], self.refs.arrays, self.batch, self.head)
            store(own, results["lse"].at[self.batch, self.head], self.first_row, plan.rows)

        def store_piece() -> None:
            out, lse = (results[name].at[self.work.piece(self.batch, self.block), self.head] for name in PIECES)
            store(EntryRows(out), lse, jnp.int32(0), out.shape[0])

        self.work.store(store_whole, store_piece)

    def no_output(self) -> Tiles:
        """Return O before the first tile."""
        return self.zeros(self.plan.tile.blocks, self.smem.value.shape[-1])

    def store(self, acc_o: Tiles, factors: Sequence[Array], target: Ref, first: Any, limit: Any) -> None:
        """Store O, each row times its factor, in rows of the target from `first` to below `limit`."""
        for rows, acc, factor in zip(self.blocks_from(first), acc_o, factors, strict=True):
            self.ops.store_rows(softmax.scaled_rows(acc, factor), target, rows.start, limit)

    def add_values(self, index: Any, states: Sequence[Softmax], acc_o: Tiles) -> Tiles:
        """Return O after a tile, from its P."""
        rescale = functools.partial(self.form.rescaled, self.inputs)
        rescaled = tuple(rescale(state.rescale, acc) for state, acc in zip(states, acc_o, strict=True))
        p = by_piece(operand_pieces.split(self.plan.spec, state.p, self.ops) for state in states)
        return self.add_product(rescaled, p, self.smem.value.at[self.slot(index)], **self.chosen)

    def values_arrive(self, index: Any) -> None:
        """With one stage: wait for the tile's values, when its keys are read, and begin to copy the next ones."""
        self.ops.wait()
        self.copy_next(index + 1, ("key",))

    def copy(self, name: str, batch: Any, head: Any, first: Any, target: Ref, chunk: ColumnChunk | None = None) -> None:
        if name != "query" or self.plan.spec.tokens is None:
            super().copy(name, batch, head, first, target, chunk)
            return
        own = self.plan.rows_of(self.refs.arrays[name], self.refs.arrays, batch, head)
        self.ops.copy_rows(own.ref, target, *own.span(first, self.plan.rows), chunk)

    def copy_keys(self, index: Any, names: Sequence[str] = ("key", "value")) -> None:
        super().copy_keys(index, names)
        if "value" in names and self.smem.bias is not None:
            for number, at in enumerate(self.places(self.tiles.tile(index))):
                self.copy_bias(at, self.smem.bias.at[self.slot(index), number])

    def held_queries(self, rows: Sequence[Any]) -> list[tuple[Operand, dict[str, Any]]]:
        """Return Q as operands, and which steps of K each has: registers may have the first, shared memory the rest."""
        steps = self.plan.tile.held_columns // STEP
        if not steps:
            return [(held, {}) for held in self.held(rows)]
        self.ops.wait()
        (q,), every = rows, range(rows[0].shape[-1] // STEP)
        held = self.ops.load_rows(q, columns=steps * STEP)
        return [(held, dict(steps=every[:steps])), (q, dict(steps=every[steps:]))]

    def products(self, index: Any, q: Sequence[tuple[Operand, dict[str, Any]]]) -> Tiles:
        """Return Q K^T of a tile."""
        s = self.zeros(self.plan.tile.blocks, self.keys)
        for rows, options in q:
            s = self.add_product(s, rows, self.smem.key.at[self.slot(index)], transposed=True, **self.chosen, **options)
        return s

    def _bias(self, index: Any, block: int) -> dict[str, Array]:
        """Load a tile of the bias that has come to shared memory, by name, if it comes there."""
        if self.smem.bias is None:
            return {}
        ((tile,),) = self.ops.load_rows(self.smem.bias.at[self.slot(index), block])
        return {"bias": tile}

    def visit(self, index: Any, q: Sequence[tuple[Operand, dict[str, Any]]], before: State) -> State:
        """Return what the CTA knows after a tile."""
        ops, tile = self.ops, self.plan.tile
        visited, shape = self.tiles.tile(index), (WARPGROUP_ROWS, self.keys)
        places = self.places(visited)
        ops.wait()
        if tile.stages > 1:
            self.copy_next(index + 1)
        else:
            self.copy_keys(index, ("value",))
            ops.commit()
        loaded = [self.load(at, shape) for at in places]
        s = self.products(index, q)
        # Where P goes through shared memory, one barrier is for both.
        if tile.stages == 1 and not tile.paired:
            self.values_arrive(index)
        states: list[Softmax] = []
        for block, (at, numbers, (m, l)) in enumerate(zip(places, s, before[0], strict=True)):
            loaded[block] |= self._bias(index, block)
            context = TileContext(self.inputs, visited, at, loaded[block])
            states.append(self.form.step(numbers, context, Softmax(numbers, m, l, m)))
        acc_o = self.add_values(index, states, before[1])
        return tuple((state.m, state.l) for state in states), acc_o


class PairedForwardCta(ForwardCta):
    """A CTA of the forward with 64 rows, whose O is a pair."""

    def no_output(self) -> Tiles:
        return self.zeros(2, self.smem.value.shape[-1] // 2)

    def store(self, acc_o: Tiles, factors: Sequence[Array], target: Ref, first: Any, limit: Any) -> None:
        # The last tile's factors have been read.
        self.ops.meet()
        (self.smem.factors[...],) = factors
        self.ops.meet()
        pair = self.ops.scaled_pair(acc_o, self.smem.factors)
        self.ops.store_pair(pair, target, first, limit)

    def add_values(self, index: Any, states: Sequence[Softmax], acc_o: Tiles) -> Tiles:
        (state,) = states
        self.ops.store_tile((state.p,), self.smem.p, 0)
        self.smem.factors[...] = state.rescale
        self.values_arrive(index)
        acc_o = self.ops.scaled_pair(acc_o, self.smem.factors)
        return self.add_product(acc_o, self.smem.p, self.smem.value.at[self.slot(index)], paired=True)
