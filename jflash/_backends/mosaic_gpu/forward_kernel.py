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

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import bias_columns, piece_products, pipeline
from jflash._backends.mosaic_gpu.cta import Cta
from jflash._backends.mosaic_gpu.forward_plan import ForwardPlan
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.tma_inputs import GmemTile
from jflash._backends.nvidia.launch import Refs
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import dropped, operand_pieces, softmax
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._backends.nvidia.tile.softmax import Softmax
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_range import TileContext, TileRange
from jflash._semantics.dropout import HeadSeed


def forward(plan: ForwardPlan, arrays: Mapping[str, Array], ops: WarpgroupOps) -> dict[str, Array]:
    """Launch the kernel; out `[splits, B, T, N, D]` and lse `[splits, B, N, L]`.

    T and D are whole tiles' here; L is T rounded up to whole blocks, as T is in a partial call. With several splits the
    outputs are float32, and sinks are left to their merge.
    """
    return ForwardCta.launch(plan, arrays, ops)


class ForwardCta(Cta[ForwardPlan]):
    """A CTA of the forward; of wide heads' too, which differs where it says so."""

    def __init__(self, plan: ForwardPlan, refs: Refs, ops: WarpgroupOps) -> None:
        heads = plan.heads // plan.schedule.head_groups
        self.head = lax.axis_index("head_group") * heads + lax.axis_index("head")
        self.split = lax.axis_index("split")
        self.form, self.shape = plan.form, (WARPGROUP_ROWS, plan.tile.keys)
        has_bias = not self.form.bias_by_mma
        super().__init__(plan, refs, ops, packed_heads=plan.packed_heads, has_bias=has_bias)
        q_o = tuple(refs.smem.q_o)
        self.q, self.o = q_o[0], q_o[-1]
        self.place = lax.axis_index("block"), lax.axis_index("batch")

    def item(self, index: Any) -> tuple[Array, Array, TileRange]:
        """A work item's batch entry, block of queries and tiles of keys. Blocks that see most keys begin first, so
        that none of them is left at the end alone."""
        plan = self.plan
        batch, turn = plan.schedule.item(self.place, index)
        block = plan.schedule.blocks - 1 - turn
        return batch, block, self.visited(batch, block)

    def visited(self, batch: Any, number: Any) -> TileRange:
        """The tiles of keys that the `number`-th range of rows sees, or this CTA's share of them."""
        plan, rows = self.plan, self.plan.rows_of_a_range
        every = tile_range.visited(self.inputs, batch, number, rows, plan.tile.keys, plan.missing_rows)
        return every.split(self.split, plan.splits)

    def block_start(self, block: Any) -> Any:
        """The first row of a block."""
        return tile_range.block_start(block, self.plan.tile.rows, self.plan.missing_rows)

    def compute(self) -> None:
        """Copy its own queries, attend, and store its own output."""
        plan, shared = self.plan, self.smem
        pipeline.release(shared.k.empty, shared.v.empty)
        pipeline.split_registers(plan.consumers, copies=False)
        self._copy_q(0)
        if plan.orders_products:
            pl.when(self.warpgroup == plan.consumers - 1)(lambda: self.ops.pass_turn(0))
        plan.schedule.each(self.place, self._attend)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def rows(self, block: Any) -> Any:
        """The rows of this warpgroup; past the end of all, where a block has fewer."""
        plan, missing = self.plan, self.plan.missing_rows
        rows = plan.tile.rows
        start = self.block_start(block) + self.warpgroup * WARPGROUP_ROWS
        if missing:
            there = start < (block + 1) * rows - missing
            start = jnp.where(there, start, (plan.schedule.blocks - 1) * rows + self.warpgroup * WARPGROUP_ROWS)
        return pl.ds(start, WARPGROUP_ROWS)

    def part(self, ref: Ref, head: Any, block: Any, columns: Any) -> Ref:
        """This warpgroup's rows of queries or output."""
        rows = self.rows(block)
        return ref.at[rows, head, columns] if self.plan.packed_heads == 1 else ref.at[head, rows, columns]

    def _copy_q(self, index: Any) -> None:
        batch, block, _ = self.item(index)
        self.copy_queries(batch, self.head, block)

    def copy_queries(self, batch: Any, head: Any, block: Any) -> None:
        """Copy this warpgroup's rows of a block."""
        query, q = self.refs.arrays["query"].at[batch], self.q.at[self.warpgroup]
        source = self.part(query, head, block, pipeline.columns(q.shape[-1], query, head))
        pipeline.copy_in(source, q, self.smem.q_full.at[self.warpgroup])

    def _attend(self, index: Any, visited: Any) -> Any:
        """Attend for one work item; `visited` tiles came before, in others."""
        plan = self.plan
        batch, block, tiles = self.item(index)
        plgpu.barrier_wait(self.smem.q_full.at[self.warpgroup])
        at = TileCoord(batch, self.head, self.rows(block).start, 0)
        copy_next = lambda: plan.schedule.if_next(self.place, index, self._copy_q)
        loop = MainLoop(self, tiles, at, visited)
        state, acc_o = loop.run(q_read=copy_next if plan.queries_stay else lambda: None)
        sink = None if plan.splits > 1 else self.inputs.value("sinks", batch, self.head)
        out, lse = softmax.finish(
            plan.spec, self.form.exponent(plan.spec), state.m, softmax.whole(state.l), acc_o, sink
        )
        self.store(batch, block, out, lse)
        if plan.schedule.items_per_cta > 1 and not plan.queries_stay:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            copy_next()
        return visited + tiles.count

    def store(self, batch: Array, block: Array, out: Array, lse: Array) -> None:
        """Store output and log-sum-exp of this warpgroup's rows."""
        plan, shared = self.plan, self.smem
        o, own_buffer = self.o.at[self.warpgroup], plan.output_parts > 0
        if self.o is not self.q and not plan.queries_stay:
            # The output has another layout than the queries, which other warpgroups may still read.
            plgpu.barrier_arrive(shared.q_empty)
            plgpu.barrier_wait(shared.q_empty)
        self.refs.results["lse"][self.split, batch, self.head, self.rows(block)] = lse
        result = self.refs.results["out"].at[self.split, batch]
        columns, width = out.shape[1], o.shape[1]
        if plan.spec.partial:
            self.part(result, self.head, block, pl.ds(0, columns))[...] = out
            return
        for first in range(0, columns, width):
            if own_buffer:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            values = lax.slice(out, (0, first), (WARPGROUP_ROWS, first + width))
            part = pipeline.columns(width, result, self.head) if width == columns else pl.ds(first, width)
            pipeline.store(values, o, self.part(result, self.head, block, part))

    def copy(self) -> None:
        """Copy keys and values."""
        plan, shared = self.plan, self.smem
        pipeline.split_registers(plan.consumers, copies=True)
        key_head = lax.div(self.head, plan.heads // plan.spec.key_heads)

        def copy_block(index: Any, visited: Any) -> Any:
            batch, block, tiles = self.item(index)

            def copy_tile(index: Array) -> None:
                slot = lax.rem(visited + index, plan.tile.stages)
                keys = GmemTile(batch, tiles.start(index), plan.tile.keys, key_head)
                self._copy_tile(keys, block, slot)

            pipeline.for_each_copy(tiles.count, copy_tile, "head", "block", "head_group", "batch")
            return visited + tiles.count

        plan.schedule.each(self.place, copy_block)
        pipeline.drain(shared.k.empty, shared.v.empty)

    def _copy_tile(self, keys: GmemTile, block: Array, slot: Array) -> None:
        shared, inputs = self.smem, self.inputs
        k, v = shared.k, shared.v
        plgpu.barrier_wait(k.empty.at[slot])
        full = k.full.at[slot]
        inputs.copy_rows("key", keys, k.tiles.at[slot], full)
        if shared.bias_columns is not None:
            source = bias_columns.part(inputs, keys, self.head)
            plgpu.copy_gmem_to_smem(source, shared.bias_columns.at[slot], full)
        if shared.bias is not None:
            own = pl.ds(self.block_start(block), self.plan.tile.rows), pl.ds(keys.first, keys.size)
            source = inputs.part("bias", keys.batch, self.head).at[own]
            plgpu.copy_gmem_to_smem(source, shared.bias.at[slot], full)
        plgpu.barrier_wait(v.empty.at[slot])
        inputs.copy_rows("value", keys, v.tiles.at[slot], v.full.at[slot])


@dataclasses.dataclass(frozen=True)
class MainLoop:
    """A warpgroup's walk over the tiles of keys of one work item."""

    cta: ForwardCta
    tiles: TileRange
    at: TileCoord
    visited: Int[Array, ""] | int
    seed: HeadSeed | None = None
    """That of the head's dropout, from `run` on."""
    own_q: Array | None = None
    """The columns of the queries that stay in registers, if some do, from `run` on."""

    def run(self, q_read: Callable[[], None]) -> tuple[Softmax, Float[Array, "rows D"]]:
        """The softmax's state, and O, after all tiles; `q_read` is called when the queries are not needed any more."""
        plan, ops = self.cta.plan, self.cta.ops
        seed = dropped.head_seed(self.cta.inputs, self.at)
        start, stop, loop = 0, self.tiles.count, dataclasses.replace(self, seed=seed, own_q=self._load_q())
        # A warpgroup leaves out tiles that only other rows of its CTA see.
        skips = plan.skips_tiles
        if skips:
            start, stop, own = tile_range.own_key_tiles(self.cta.inputs, self.tiles, self.at)
            loop = dataclasses.replace(loop, tiles=own)
            lax.fori_loop(0, start, self._leave, None)
        state = loop._attend(jnp.int32(start), None)
        acc_o = ops.full((WARPGROUP_ROWS, plan.columns), 0)
        next_tile = loop._attend_beside_product if plan.overlaps else loop._attend_after_product
        # A loop that the compiler knows to have one step would be none, and spill registers.
        has_one_step = plan.tile.keys < plan.spec.key_length <= 2 * plan.tile.keys
        end = pipeline.opaque(stop, "head", "block") if has_one_step else stop
        state, acc_o = lax.fori_loop(start + 1, end, next_tile, (state, acc_o))
        q_read()
        acc_o = loop._add_product(stop, state, acc_o)
        if skips:
            lax.fori_loop(stop, self.tiles.count, self._leave, None)
        return state, acc_o

    def _take_turn(self) -> None:
        if self.cta.plan.orders_products:
            self.cta.ops.take_turn(self.cta.warpgroup)

    def _pass_turn(self) -> None:
        plan = self.cta.plan
        if plan.orders_products:
            self.cta.ops.pass_turn(lax.rem(self.cta.warpgroup + 1, plan.consumers))

    def _load_q(self) -> Array | None:
        columns = self.cta.plan.query_columns_in_registers
        return self.cta.ops.load(self.cta.q.at[self.cta.warpgroup, :, pl.ds(0, columns)]) if columns else None

    def _slot(self, index: Any) -> Any:
        return pipeline.slot(self.visited + index, self.cta.plan.tile.stages, self._still(index))

    def _still(self, index: Any) -> Any:
        return pipeline.opaque_zero(index, self.cta.warpgroup)

    def _prefetch(self, index: Any) -> dict[str, Array]:
        at = self.at._replace(key=self.tiles.start(index))
        return self.cta.form.prefetch(self.cta.inputs, at, self.cta.plan.tile.keys, self.cta.plan.tile.warpgroups)

    def _issue_s(self, acc_s: Any, index: Any) -> None:
        shared, own, slot = self.cta.smem, self.cta.warpgroup, self._slot(index)
        pieces = functools.partial(piece_products.of_tile, self.cta.plan.spec)
        if operand_pieces.number(self.cta.plan.spec) > 1:
            # Registers hold the addresses of one piece's parts for the whole loop, but not those of several.
            own = own + self._still(index)
        q, k = pieces(self.cta.q.at[own]), pieces(shared.k.tiles.at[slot])
        if self.own_q is not None:
            count, tiles = self.own_q.shape[1], shared.k.tiles
            self.cta.ops.mma(acc_s, self.own_q, tiles.at[slot, :, pl.ds(0, count)].T)
            rest = pl.ds(count, tiles.shape[-1] - count)
            q, k = (self.cta.q.at[own, :, rest],), (tiles.at[slot, :, rest],)
        piece_products.mma(acc_s, q, operand_pieces.transposed(k), self.cta.ops)
        if shared.bias_columns is not None:
            bias_columns.add(acc_s, shared.bias_columns.at[slot], self.cta.ops)

    def _p(self, state: Softmax) -> Pieces:
        return operand_pieces.split(self.cta.plan.spec, state.p, self.cta.ops)

    def _v(self, slot: Any) -> Pieces:
        return piece_products.of_tile(self.cta.plan.spec, self.cta.smem.v.tiles.at[slot])

    def _softmax(self, s: Array, index: Any, before: Softmax | None, loaded: dict[str, Array]) -> Softmax:
        shared, ops, slot = self.cta.smem, self.cta.ops, self._slot(index)
        at = self.at._replace(key=self.tiles.start(index))
        if shared.bias is not None:
            loaded = loaded | {"bias": ops.load(shared.bias.at[slot, self.cta.warpgroup_rows])}
            # A copy may overwrite what threads have read.
            plgpu.commit_smem()
        plgpu.barrier_arrive(shared.k.empty.at[slot])
        loaded = loaded | dropped.tile_words(self.cta.inputs, at, self.cta.shape, self.seed)
        mask = TileContext(self.cta.inputs, self.tiles, index, at, loaded)
        return self.cta.form.step(s, mask, before)

    def _attend(self, index: Any, before: Softmax | None) -> Softmax:
        ops = self.cta.ops
        slot, loaded = self._slot(index), self._prefetch(index)
        plgpu.barrier_wait(self.cta.smem.k.full.at[slot])

        def product(acc_s: Any) -> Array:
            self._issue_s(acc_s, index)
            return ops.read(acc_s)

        s = ops.accumulators(product, self.cta.shape)
        return self._softmax(s, index, before, loaded)

    def _attend_after_product(self, index: Array, carry: tuple[Softmax, Array]) -> tuple[Softmax, Array]:
        state, acc_o = carry
        acc_o = self._add_product(index, state, acc_o)
        state = self._attend(index, state)
        return state, self.cta.form.rescaled(self.cta.inputs, state.rescale, acc_o)

    def _attend_beside_product(self, index: Array, carry: tuple[Softmax, Array]) -> tuple[Softmax, Array]:
        state, acc_o = carry
        cta, shared, ops, tile = self.cta, self.cta.smem, self.cta.ops, self.cta.plan.tile
        slot, last = self._slot(index), self._slot(index - 1)
        loaded = self._prefetch(index)
        # Before any product is issued: ptxas serialises products if registers that one reads are written among them.
        p = self._p(state)
        is_masked = self.tiles.whole is not None
        fence = cta.form.scheduling_fence(cta.plan.spec, tile.keys, tile.warpgroups, is_masked=is_masked)
        plgpu.barrier_wait(shared.k.full.at[slot])

        def attend_tile(acc_o: Any) -> Softmax:
            def overlap(acc_s: Any) -> Softmax:
                self._take_turn()
                self._issue_s(acc_s, index)
                plgpu.barrier_wait(shared.v.full.at[last])
                v = self._v(last)
                piece_products.mma(acc_o, p, v, ops)
                self._pass_turn()
                s = ops.read(acc_s, pending=piece_products.issued(v))
                new = self._softmax(s, index, state, loaded)
                if fence is not None:
                    # Four threads write one number: racecheck reports it.
                    shared.fence[self.cta.warpgroup] = getattr(new, fence)
                return new

            return ops.accumulators(overlap, cta.shape)

        state, (acc_o,) = piece_products.accumulate(cta.plan.spec, attend_tile, acc_o, like=state, ops=ops)
        plgpu.barrier_arrive(shared.v.empty.at[last])
        return state, cta.form.rescaled(cta.inputs, state.rescale, acc_o)

    def _add_product(self, stop: Any, state: Softmax, acc_o: Array) -> Array:
        """Add P V of the tile before `stop`."""
        v, last = self.cta.smem.v, self._slot(stop - 1)
        plgpu.barrier_wait(v.full.at[last])
        acc_o = piece_products.add_matmul(self.cta.plan.spec, acc_o, self._p(state), self._v(last), self.cta.ops)
        plgpu.barrier_arrive(v.empty.at[last])
        return acc_o

    def _leave(self, index: Array, _: None) -> None:
        """Pass a tile by that no row of this warpgroup sees."""
        # The turn goes round as often for each.
        self._take_turn()
        self._pass_turn()
        shared, slot = self.cta.smem, self._slot(index)
        for ring in (shared.k, shared.v):
            plgpu.barrier_wait(ring.full.at[slot])
            plgpu.barrier_arrive(ring.empty.at[slot])
