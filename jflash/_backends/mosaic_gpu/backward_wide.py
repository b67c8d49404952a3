"""Backward of wide heads (`plan.is_wide`): a kernel for each gradient, in which a CTA owns 64 rows of it.

    the gradient     its rows have     and walk over
    dQ = dS K        Q, dO             K, V
    dK = dS^T Q      K, V              Q, dO             all tiles transposed
    dV = P^T dO      K                 Q, dO             likewise; of the steps below only S and P

    the first warpgroup, with half of dQ's columns      the second, with the other half
      S  = Q K^T                                          dP = dO V^T, of the next tile
      P  = exp(S - lse)
      dS = P (dP - delta)            <--- dP ---
      dQ = dQ + dS K                 --- dS --->          dQ = dQ + dS K
    the producer warpgroup copies tiles of what is walked over ahead of them into shared memory

64 rows of dK and dV, of 512 columns each, take twice the registers of a CTA. So each gradient has a kernel, and S is
made three times, dP twice. dP goes through shared memory in float32: the first warpgroup alone takes it back to the
products, and to the parameters of the logits. P or dS of a float32 call goes back whole, as pieces may take more room
than dP has; each warpgroup splits it. The second one is a tile ahead with dP.

What is walked over and not weighed, as V here, comes in chunks (`column_chunks`). A few are enough, so that there is
room for two tiles of what is weighed: with one, S of a tile waits until dQ of the last one is made and K was copied.

A CTA alone owns what it sums, so every sum has one order.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, with a loop for each gradient.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import piece_products, pipeline
from jflash._backends.mosaic_gpu.backward_wide_plan import WidePlan
from jflash._backends.mosaic_gpu.column_chunks import ChunkRing
from jflash._backends.mosaic_gpu.cta import WalkingCta
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.pipeline import GmemTile
from jflash._backends.mosaic_gpu.source_tile import SourceTile
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Refs, cta_index
from jflash._backends.nvidia.ops import Tile, along_columns, along_rows
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import dropped, operand_pieces
from jflash._backends.nvidia.tile.backward_tile import BackwardTile, TileGradients
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.walk.tile_range import TileContext, VisitedTile


class WideCta(WalkingCta[WidePlan]):
    """A CTA that makes 64 rows of a gradient."""

    def __init__(self, plan: WidePlan, refs: Refs, ops: WarpgroupOps) -> None:
        kind, wave, number = plan.kind, cta_index("wave"), cta_index("item")
        super().__init__(plan, refs, ops)
        self.item, block = plan.schedule.item(wave, number), cta_index("block")
        if not kind.keys_first:
            # Later queries may see more keys: the longest blocks begin first.
            block = plan.schedule.blocks - 1 - block
        self.key_head = self.item.key_head if kind.keys_first else lax.div(self.item.first_head, plan.spec.group)
        self.head = self.key_head if kind.keys_first else self.item.first_head
        """The head of the CTA's rows."""
        self.first_row = block * WARPGROUP_ROWS
        self.cta_rows = pl.ds(self.first_row, WARPGROUP_ROWS)
        self.order = self.order_of(self.visited(block), block)
        self.tables = plan.tables.of_warpgroup(refs.arrays, self.item.batch, self.item.first_head, block, 0)
        self.shape = WARPGROUP_ROWS, plan.tile.size
        self.chunks = ChunkRing(plan.chunks, refs.smem.chunks)
        dp, self.weights = refs.smem.dp_weights
        self.dp = dp if kind.makes_dp else None

    def run(self) -> None:
        for index, body in enumerate((self.make_weights, self.make_dp, self.copy)):
            pl.when(self.warpgroup == index)(body)

    @property
    def sum_rows(self) -> Any:
        return self.cta_rows

    def place(self, head: Any, tile: VisitedTile) -> TileCoord:
        """Return where a tile is that a head's walk visits."""
        queries, keys = self.first_row, tile.start
        if self.plan.kind.keys_first:
            queries, keys = keys, queries
        return TileCoord(self.item.batch, self.item.first_head + head, queries, keys)

    def make_weights(self) -> None:
        """Make P or dS, and half of the gradient: the first warpgroup, which copies the CTA's rows."""
        plan, shared = self.plan, self.smem
        pipeline.release(shared.weighed.empty, *[shared.chunks.empty] * (not plan.kind.makes_dp))
        pipeline.split_registers(2, copies=False)
        rows = GmemTile(self.item.batch, self.first_row, WARPGROUP_ROWS, self.head)
        buffers = (buffer.at[0] for buffer in shared.cta_rows)
        self.copy_rows(rows, shared.rows_full, **dict(zip(plan.kind.cta_rows, buffers, strict=True)))
        plgpu.barrier_wait(shared.rows_full)
        start = self.ops.full((WARPGROUP_ROWS, plan.columns // 2), 0), plan.sums.zeros(self.ops)
        acc, _ = self.order.each(self._visit, start, self.finish_head)
        self._store(0, acc)

    def _visit(self, step: Any, head: Any, index: Any, carry: tuple[Array, tuple[Array, ...]]) -> Any:
        """Add what one tile gives to the first half of the gradient and to the sums of parameters' gradients."""
        (acc, sums), plan, shared, inputs, ops = carry, self.plan, self.smem, self.inputs, self.ops
        visited = self.order.tiles.tile(index)
        slot, at = lax.rem(step, plan.tile.stages), self.place(head, visited)
        loaded = inputs.load_packed_mask(at, self.shape)
        lse, delta = (self._statistic(name, at) for name in ("lse", "delta"))
        s = self._s(step, slot)
        if shared.bias is not None:
            if not plan.kind.makes_dp:
                plgpu.barrier_wait(shared.weighed.full.at[slot])
            bias = shared.bias.at[slot]
            loaded["bias"] = ops.load(bias.T if plan.kind.keys_first else bias)
            # A copy may overwrite what threads have read.
            plgpu.commit_smem()
        context = TileContext(inputs, visited, at, loaded)
        tile = BackwardTile.of(context, s, lse, plan.differentiated)
        gradients = TileGradients(tile.kept, {})
        plgpu.barrier_wait(shared.dp_full)
        if self.dp is not None:
            dp = ops.load(self.dp)
            # All threads have loaded it before one of them stores.
            plgpu.commit_smem()
            gradients = tile.differentiate(dp, delta)
        sums = plan.sums.added(sums, gradients.parameters)
        weights = gradients.ds.astype(plan.spec.dtype)
        self.weights[...] = weights
        plgpu.barrier_arrive(shared.weights_full)
        tile.add_to_tables(self.tables, gradients)
        if not plan.kind.makes_dp and shared.bias is None:
            plgpu.barrier_wait(shared.weighed.full.at[slot])
        return self._add(0, acc, weights, slot), sums

    def make_dp(self) -> None:
        """Make dP, a tile ahead, or say when P may be stored, and half of the gradient: the second warpgroup."""
        plan, shared = self.plan, self.smem
        pipeline.release(shared.weighed.empty, *[shared.chunks.empty] * plan.kind.makes_dp)
        pipeline.split_registers(2, copies=False)
        plgpu.barrier_wait(shared.rows_full)

        steps = self.order.tiles.count * self.order.heads
        pl.when(steps > 0)(lambda: self._hand_dp(self._dp(0)))

        def hand_next(step: Any) -> Array:
            dp = self._dp(step + 1)
            weights = self._take_weights(step)
            self._hand_dp(dp)
            return weights

        def visit(step: Any, acc: Array) -> Array:
            weights = lax.cond(step + 1 < steps, hand_next, self._take_weights, step)
            slot = lax.rem(step, plan.tile.stages)
            plgpu.barrier_wait(shared.weighed.full.at[slot])
            return self._add(1, acc, weights, slot)

        self._store(1, lax.fori_loop(0, steps, visit, self.ops.full((WARPGROUP_ROWS, plan.columns // 2), 0)))

    def _dp(self, step: Any) -> Array | None:
        """Return a step's dP, if the kernel needs it."""
        return self._by_chunks(1, step) if self.plan.kind.makes_dp else None

    def _hand_dp(self, dp: Array | None) -> None:
        if self.dp is not None:
            self.dp[...] = dp
        plgpu.barrier_arrive(self.smem.dp_full)

    def _take_weights(self, _: Any) -> Array:
        plgpu.barrier_wait(self.smem.weights_full)
        weights = self.ops.load(self.weights)
        # All threads have loaded them before one of them stores.
        plgpu.commit_smem()
        return weights

    def _statistic(self, name: str, at: TileCoord) -> Tile:
        """Return lse or delta of a tile's queries, repeated."""
        along, axis = (along_columns, 1) if self.plan.kind.keys_first else (along_rows, 0)
        queries = pl.ds(at.query, self.shape[axis])
        return along(self.ops.load(self.refs.arrays[name].at[at.batch, at.head, queries], axis), self.shape)

    def _s(self, step: Any, slot: Any) -> Tile:
        """Return a step's S, of what is weighed too if the kernel makes dP.

        If not, its chunks come first: who waits for what is weighed before they are read waits forever, if there is no
        room for all of them.
        """
        if not self.plan.kind.makes_dp:
            return self._by_chunks(0, step)
        plgpu.barrier_wait(self.smem.weighed.full.at[slot])
        opaque_index = self.ops.opaque_zero(step)
        fixed, walked = self.smem.cta_rows[0].at[opaque_index], self.smem.weighed.tiles.at[slot + opaque_index]
        fixed, walked = (piece_products.of_tile(self.plan.spec, tile) for tile in (fixed, walked))
        return piece_products.matmul(fixed, operand_pieces.transposed(walked), self.shape, self.ops)

    def _by_chunks(self, number: int, step: Any) -> Tile:
        """Return a step's S (number 0) or dP (1), from chunks of a tile."""
        fixed = self.smem.cta_rows[number].at[self.ops.opaque_zero(step)]
        return self.chunks.product(self.plan.spec, fixed, step, self.shape, self.ops)

    def _add(self, half: int, acc: Tile, weights: Array, slot: Any) -> Array:
        """Return a warpgroup's half of the gradient, with what a tile adds to it."""
        ring, width, spec = self.smem.weighed, acc.shape[1], self.plan.spec
        weighed = piece_products.of_tile(spec, ring.tiles.at[slot], half * width, width)
        acc = piece_products.add_matmul(spec, acc, operand_pieces.split(spec, weights, self.ops), weighed, self.ops)
        plgpu.barrier_arrive(ring.empty.at[slot])
        return acc

    def _store(self, half: int, acc: Tile) -> None:
        plan, result, width = self.plan, self.refs.results[self.plan.gradient], acc.shape[1]
        spec, columns = plan.spec, pl.ds(half * width, width)
        scaled = dropped.scaled(spec, acc) if plan.gradient == "d_value" else acc * facts_of(spec).sums_scale
        if plan.stores_sums:
            result[self.item.batch, self.item.head_group, self.cta_rows, columns] = scaled
        else:
            result[self.item.batch, self.cta_rows, self.head, columns] = scaled.astype(result.dtype)

    def copy(self) -> None:
        """Copy tiles of what is walked over."""
        pipeline.split_registers(2, copies=True)
        self.copy_each(self._copy_tile)
        pipeline.drain(self.smem.chunks.empty, self.smem.weighed.empty)

    def _copy_tile(self, step: Any, count: Any) -> None:
        plan, shared, inputs = self.plan, self.smem, self.inputs
        head, index = self.order.at(step, count)
        visited = self.order.tiles.tile(index)
        at = self.place(head, visited)
        first, from_head = visited.start, at.head if plan.kind.keys_first else self.key_head
        tile = GmemTile(self.item.batch, first, plan.tile.size, from_head)
        # What dP is made of is needed, and its slot is free, a tile ahead of what is weighed.
        for chunk in range(plan.chunks.number):
            self.chunks.copy(SourceTile(inputs, tile), plan.kind.unweighed, step, chunk)
        ring, slot = shared.weighed, lax.rem(step, plan.tile.stages)
        plgpu.barrier_wait(ring.empty.at[slot])
        inputs.copy_rows(plan.kind.weighed, tile, ring.tiles.at[slot], ring.full.at[slot])
        if shared.bias is not None:
            queries, keys = self.cta_rows, pl.ds(first, plan.tile.size)
            if plan.kind.keys_first:
                queries, keys = keys, queries
            source = inputs.part("bias", self.item.batch, at.head).at[queries, keys]
            plgpu.copy_gmem_to_smem(source, shared.bias.at[slot], ring.full.at[slot])
