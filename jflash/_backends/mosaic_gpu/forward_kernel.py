"""Forward: a CTA owns some rows of queries and walks over the tiles of keys that they can see.

    each consumer warpgroup, on 64 rows of queries:
      S = Q K_0^T;  P, m, l = online softmax of S
      for j = 1, 2, ...:
        S = Q K_j^T                 the matrix unit runs this
        O = O + P V_(j-1)           and this, while the warpgroup goes on with
        P, m, l = online softmax of S
        O = O * rescale
      O = O + P V_last;  out = O / l;  lse = log l + m
    the producer warpgroup copies tiles of keys and values ahead of them into shared memory

Products of float32 are those of its pieces (`operand_pieces`).
Dropout takes from P what it drops when l has been summed (`dropped`).

Sources: FlashAttention-3, arXiv:2407.08608, sections 3.1 (warp specialisation) and 3.2 (the overlap within one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import bf16_columns, piece_products, pipeline
from jflash._backends.mosaic_gpu.forward_copies import CopyingCta
from jflash._backends.mosaic_gpu.forward_plan import ForwardPlan
from jflash._backends.mosaic_gpu.forward_schedule import CtaPlace
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Refs, cta_index
from jflash._backends.nvidia.merge import PIECES
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, round_up
from jflash._backends.nvidia.threads.device_rows import ColumnChunk
from jflash._backends.nvidia.tile import dropped, operand_pieces, softmax
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.softmax import Softmax
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_range import Place, TileContext, VisitedTile, Walk
from jflash._backends.nvidia.walk.work_items import Item


class ForwardCta(CopyingCta):
    """A CTA of the forward; of wide heads' too, which differs where it says so."""

    def __init__(self, plan: ForwardPlan, refs: Refs, ops: WarpgroupOps) -> None:
        heads_apart, *_ = plan.schedule.grid
        head = cta_index("head_group") * heads_apart + cta_index("head")
        self.form, self.shape = plan.form, (WARPGROUP_ROWS, plan.tile.keys)
        has_bias = not self.form.bias_by_mma
        super().__init__(plan, refs, ops, packed_heads=plan.packed_heads, has_bias=has_bias)
        self.q, self.o = refs.smem.q_o
        self.cta_place = CtaPlace(head, cta_index("block"), cta_index("batch"))
        self.work = plan.division.work(refs.arrays, self.cta_place.list)

    def run(self) -> None:
        self.work.run(super().run)

    def item(self, index: Any) -> tuple[Place, Walk]:
        """Return a work item's place and tiles of keys."""
        place = self.place(index)
        return place, self.visited(place)

    def place(self, index: Any) -> Place:
        """Return a work item's place."""
        if isinstance(self.work, Item):
            return Place(self.work.batch, self.cta_place.head, self.work.block)
        return self.place_of(*self.plan.schedule.item(self.cta_place, index))

    def place_of(self, head: Any, batch: Any, turn: Any) -> Place:
        """Return where a schedule's item is. Blocks that see most keys begin first, so that none of them is left at the
        end alone."""
        return Place(batch, head, self.plan.schedule.blocks - 1 - turn)

    def visited(self, place: Place) -> Walk:
        """The tiles of keys that a head's rows see for which one range or list says so, or this CTA's share of them."""
        plan, rows = self.plan, self.plan.rows_of_a_range
        every = tile_range.visited(self.inputs, place, rows, plan.tile.keys, plan.missing_rows)
        return self.work.of(every)

    def rows(self, block: Any) -> Any:
        """The rows of this warpgroup; past the end of all, where a block has fewer."""
        plan, rows, missing = self.plan, self.plan.tile.rows, self.plan.missing_rows
        start = self.block_start(block) + self.warpgroup * WARPGROUP_ROWS
        if missing:
            there = start < (block + 1) * rows - missing
            start = jnp.where(there, start, (plan.schedule.blocks - 1) * rows + self.warpgroup * WARPGROUP_ROWS)
        return pl.ds(start, WARPGROUP_ROWS)

    def copy_queries(self, batch: Any, head: Any, block: Any) -> None:
        """Begin to copy this warpgroup's rows of a block, or let its threads fetch what lies apart."""
        plan, arrays, q = self.plan, self.refs.arrays, self.q.at[self.warpgroup]
        if plan.rows_lie_together:
            query = arrays["query"].at[batch]
            source = self._rows_together(query, head, block, pipeline.columns(q.shape[-1], query, head))
            pipeline.copy_in(source, q, self.smem.q_full.at[self.warpgroup])
            return
        own, column = plan.rows_of(arrays["query"], arrays, batch, head), 0
        first, limit = own.span(self.rows(block).start, plan.rows_of_block(block)[1])
        for chunk in pipeline.chunks_of_columns(q):
            width = chunk.shape[-1]
            chunk[...] = self.ops.fetch_rows(own.ref, first, limit, ColumnChunk(column, q.shape[-1]), width)
            column += width
        plgpu.commit_smem()

    def _rows_together(self, ref: Ref, head: Any, block: Any, columns: Any) -> Ref:
        """Return this warpgroup's rows of a batch entry's queries or output, in some columns, if they lie together."""
        rows, packed = self.rows(block), self.plan.packed_heads
        if packed == 1:
            return ref.at[rows, head, columns]
        return ref.at[0, pl.ds(head * packed + rows.start, rows.size), columns]

    def wait_for_queries(self) -> None:
        """Wait until the rows have come that `copy_queries` last copied for this warpgroup."""
        if self.plan.rows_lie_together:
            plgpu.barrier_wait(self.smem.q_full.at[self.warpgroup])

    def store_output(self, out: Array, batch: Any, head: Any, block: Any, column: int = 0) -> None:
        """Store this warpgroup's rows of a block, from registers: the output's columns from `column` on."""
        plan, result = self.plan, self.refs.results["out"]
        if plan.rows_lie_together:
            rows = self._rows_together(result.at[batch], head, block, pl.ds(column, out.shape[1]))
            rows[...] = out.astype(result.dtype)
            return
        columns, limit = ColumnChunk(column, round_up(result.shape[-1], out.shape[1])), plan.rows_of_block(block)[1]
        own = plan.rows_of(result, self.refs.arrays, batch, head)
        self.ops.store_rows(out, own.ref, *own.span(self.rows(block).start, limit), columns)

    def load_bias(self, tile: Ref) -> dict[str, Array]:
        """A tile of the bias that was copied, by name; it may be overwritten then."""
        bias = self.ops.load(tile)
        # A copy may overwrite what threads have read.
        plgpu.commit_smem()
        return {"bias": bias}

    def sink(self, batch: Any, head: Any, block: Any) -> Array | None:
        """The sink of this warpgroup's rows, or of each of them, if the kernel counts it."""
        return self.plan.sink(self.refs.arrays, self.ops, batch, head, self.rows(block).start, self.work)

    def compute(self) -> None:
        """Copy this warpgroup's queries, attend, and store its output."""
        plan, shared = self.plan, self.smem
        pipeline.release(shared.k.empty, shared.v.empty)
        self.split_registers(copies=False)
        self._copy_item_queries(0)
        if plan.orders_products:
            pl.when(self.warpgroup == plan.tile.warpgroups - 1)(lambda: self.ops.pass_turn(0))
        plan.schedule.each(self.cta_place, self._attend)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _copy_item_queries(self, index: Any) -> None:
        place, _ = self.item(index)
        self.copy_queries(*place)

    def _attend(self, index: Any, visited: Any) -> Any:
        """Attend for one work item; `visited` tiles came before, in others."""
        plan = self.plan
        place, tiles = self.item(index)
        self.wait_for_queries()
        at = TileCoord(place.batch, place.group, self.rows(place.block).start, 0)
        copy_next = lambda: plan.schedule.if_next(self.cta_place, index, self._copy_item_queries)
        state, acc_o = MainLoop(self, tiles, at, visited).run(copy_next if plan.queries_stay else lambda: None)
        sink, exponent = self.sink(*place), self.form.exponent(plan.spec)
        factor, lse = softmax.last_factor(plan.spec, exponent, state.m, softmax.whole(state.l), sink)
        self.store(place, softmax.scaled_rows(acc_o, factor), lse)
        if plan.schedule.items_per_cta > 1 and not plan.queries_stay:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            copy_next()
        return visited + tiles.count

    @property
    def rows_of_tile(self) -> Any:
        """This warpgroup's rows of a block, counted from the block's first."""
        return self.warpgroup_rows

    def store(self, place: Place, out: Array, lse: Array | None, column: int = 0) -> None:
        """Store this warpgroup's rows of a block: the output's columns from `column` on, and the log-sum-exp, if it is
        given. Those of a piece go where it is merged from."""

        def store_piece() -> None:
            number, own = self.work.piece(place.batch, place.block), self.rows_of_tile
            of_piece, lse_of_piece = (self.refs.results[name].at[number, place.group] for name in PIECES)
            columns = ColumnChunk(column, round_up(of_piece.shape[-1], out.shape[1]))
            self.ops.store_rows(out, of_piece, own.start, of_piece.shape[0], columns)
            if lse is not None:
                lse_of_piece[own] = lse

        def store_whole() -> None:
            if lse is not None:
                self.refs.results["lse"][place.batch, place.group, self.rows(place.block)] = lse
            self.store_whole(place, out, column)

        self.work.store(store_whole, store_piece)

    def store_whole(self, place: Place, out: Array, column: int) -> None:
        """Store this warpgroup's rows of a whole walk's output, from shared memory where they lie together."""
        plan, shared, o = self.plan, self.smem, self.o.at[self.warpgroup]
        batch, head, block = place
        if self.o is not self.q and not plan.queries_stay:
            # The output has another layout than the queries, which other warpgroups may still read.
            plgpu.barrier_arrive(shared.q_empty)
            plgpu.barrier_wait(shared.q_empty)
        if plan.stores_registers:
            self.store_output(out, *place)
            return
        result, columns, width = self.refs.results["out"].at[batch], out.shape[1], o.shape[1]
        for first in range(0, columns, width):
            if plan.output_stores > 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            values = lax.slice(out, (0, first), (WARPGROUP_ROWS, first + width))
            some = pipeline.columns(width, result, head) if width == columns else pl.ds(first, width)
            pipeline.store(values, o, result.at[self.rows(block), head, some])


class MainLoop:
    """A warpgroup's walk over the tiles of keys of one work item."""

    def __init__(self, cta: ForwardCta, tiles: Walk, at: TileCoord, visited: Int[Array, ""] | int) -> None:
        """`visited` tiles came before, in other items."""
        self.cta, self.plan, self.smem, self.ops, self.inputs = cta, cta.plan, cta.smem, cta.ops, cta.inputs
        self.every, self.tiles, self.at, self.visited = tiles, tiles, at, visited
        self.seed = dropped.head_seed(self.inputs, at)
        columns, q = self.plan.query_columns_in_registers, cta.q
        self.q_in_registers = self.ops.load(q.at[cta.warpgroup, :, pl.ds(0, columns)]) if columns else None

    def run(self, q_read: Callable[[], None]) -> tuple[Softmax, Float[Array, "rows D"]]:
        """The softmax's state, and O, after all tiles; `q_read` is called when the queries are not needed any more."""
        plan, start, stop = self.plan, 0, self.tiles.count
        # A warpgroup leaves out tiles that only other rows of its CTA see.
        skips = plan.tile.rows > plan.tile.keys
        if skips:
            start, stop, self.tiles = tile_range.own_key_tiles(self.inputs, self.tiles, self.at)
            lax.fori_loop(0, start, self._leave, None)
        state = self._attend(jnp.int32(start), None)
        acc_o = self.ops.full((WARPGROUP_ROWS, plan.columns), 0)
        next_tile = self._attend_beside_product if plan.overlaps else self._attend_after_product
        # A loop that the compiler knows to have one step would be none, and spill registers.
        has_one_step = plan.tile.keys < plan.spec.key_length <= 2 * plan.tile.keys
        end = pipeline.opaque(stop, "head", "block", "batch") if has_one_step else stop
        state, acc_o = lax.fori_loop(start + 1, end, next_tile, (state, acc_o))
        q_read()
        acc_o = self._add_product(stop, state, acc_o)
        if skips:
            lax.fori_loop(stop, self.every.count, self._leave, None)
        return state, acc_o

    def _take_turn(self) -> None:
        if self.plan.orders_products:
            self.ops.take_turn(self.cta.warpgroup)

    def _pass_turn(self) -> None:
        if self.plan.orders_products:
            self.ops.pass_turn(lax.rem(self.cta.warpgroup + 1, self.plan.tile.warpgroups))

    def _slot(self, index: Any) -> Any:
        opaque_zero = pipeline.opaque_zero(index, self.cta.warpgroup)
        return pipeline.slot(self.visited + index, self.plan.tile.stages, opaque_zero)

    def _prefetch(self, tile: VisitedTile) -> dict[str, Array]:
        at = self.at._replace(key=tile.start)
        return self.cta.form.prefetch(self.inputs, at, self.plan.tile.keys, self.plan.tile.warpgroups)

    def _issue_s(self, acc_s: Any, index: Any) -> None:
        spec, warpgroup, slot = self.plan.spec, self.cta.warpgroup, self._slot(index)
        if facts_of(spec).pieces > 1:
            # Registers hold the addresses of one piece's parts for the whole loop, but not those of several.
            warpgroup = warpgroup + pipeline.opaque_zero(index, warpgroup)
        queries, keys = self.cta.q.at[warpgroup], self.smem.k.tiles
        q, k = piece_products.of_tile(spec, queries), piece_products.of_tile(spec, keys.at[slot])
        if self.q_in_registers is not None:
            count = self.q_in_registers.shape[1]
            self.ops.mma(acc_s, self.q_in_registers, keys.at[slot, :, pl.ds(0, count)].T)
            rest = pl.ds(count, keys.shape[-1] - count)
            q, k = (self.cta.q.at[warpgroup, :, rest],), (keys.at[slot, :, rest],)
        piece_products.mma(acc_s, q, operand_pieces.transposed(k), self.ops)
        if self.smem.bias_columns is not None:
            bf16_columns.add_bias(acc_s, self.smem.bias_columns.at[slot], self.ops)

    def _softmax(
        self, s: Array, index: Any, tile: VisitedTile, before: Softmax | None, loaded: dict[str, Array]
    ) -> Softmax:
        slot, at = self._slot(index), self.at._replace(key=tile.start)
        if self.smem.bias is not None:
            loaded = loaded | self.cta.load_bias(self.smem.bias.at[slot, self.cta.warpgroup_rows])
        plgpu.barrier_arrive(self.smem.k.empty.at[slot])
        loaded = loaded | dropped.tile_words(self.inputs, at, self.cta.shape, self.seed)
        return self.cta.form.step(s, TileContext(self.inputs, tile, at, loaded), before)

    def _attend(self, index: Any, before: Softmax | None) -> Softmax:
        tile = self.tiles.tile(index)
        slot, loaded = self._slot(index), self._prefetch(tile)
        plgpu.barrier_wait(self.smem.k.full.at[slot])

        def product(acc_s: Any) -> Array:
            self._issue_s(acc_s, index)
            return self.ops.read(acc_s)

        s = self.ops.accumulators(product, self.cta.shape)
        return self._softmax(s, index, tile, before, loaded)

    def _attend_after_product(self, index: Array, carry: tuple[Softmax, Array]) -> tuple[Softmax, Array]:
        state, acc_o = carry
        acc_o = self._add_product(index, state, acc_o)
        state = self._attend(index, state)
        return state, self.cta.form.rescaled(self.inputs, state.rescale, acc_o)

    def _attend_beside_product(self, index: Array, carry: tuple[Softmax, Array]) -> tuple[Softmax, Array]:
        state, acc_o = carry
        shared, ops, spec, form, tile = self.smem, self.ops, self.plan.spec, self.cta.form, self.tiles.tile(index)
        slot, last = self._slot(index), self._slot(index - 1)
        loaded = self._prefetch(tile)
        # Before any product is issued: ptxas serialises products if registers that one reads are written among them.
        p = operand_pieces.split(spec, state.p, ops)
        keys, warpgroups = self.plan.tile.keys, self.plan.tile.warpgroups
        fence = form.scheduling_fence(spec, keys, warpgroups, is_masked=self.tiles.may_be_partial)
        plgpu.barrier_wait(shared.k.full.at[slot])

        def attend_tile(acc_o: Any) -> Softmax:
            def overlap(acc_s: Any) -> Softmax:
                self._take_turn()
                self._issue_s(acc_s, index)
                plgpu.barrier_wait(shared.v.full.at[last])
                v = piece_products.of_tile(spec, shared.v.tiles.at[last])
                piece_products.mma(acc_o, p, v, ops)
                self._pass_turn()
                s = ops.read(acc_s, pending=piece_products.issued(v))
                new = self._softmax(s, index, tile, state, loaded)
                if fence is not None:
                    # Four threads write one number: racecheck reports it.
                    shared.fence[self.cta.warpgroup] = getattr(new, fence)
                return new

            return ops.accumulators(overlap, self.cta.shape)

        state, (acc_o,) = piece_products.accumulate(spec, attend_tile, acc_o, like=state, ops=ops)
        plgpu.barrier_arrive(shared.v.empty.at[last])
        return state, form.rescaled(self.inputs, state.rescale, acc_o)

    def _add_product(self, stop: Any, state: Softmax, acc_o: Array) -> Array:
        """Add P V of the tile before `stop`."""
        v, last, spec = self.smem.v, self._slot(stop - 1), self.plan.spec
        plgpu.barrier_wait(v.full.at[last])
        p, values = operand_pieces.split(spec, state.p, self.ops), piece_products.of_tile(spec, v.tiles.at[last])
        acc_o = piece_products.add_matmul(spec, acc_o, p, values, self.ops)
        plgpu.barrier_arrive(v.empty.at[last])
        return acc_o

    def _leave(self, index: Array, _: None) -> None:
        """Pass a tile by that no row of this warpgroup sees."""
        # The turn goes round as often for each.
        self._take_turn()
        self._pass_turn()
        slot = self._slot(index)
        for ring in (self.smem.k, self.smem.v):
            plgpu.barrier_wait(ring.full.at[slot])
            plgpu.barrier_arrive(ring.empty.at[slot])
