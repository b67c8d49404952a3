"""Backward in two kernels, the second: a CTA owns 64 keys and walks over the queries that can see them.

    two consumer warpgroups, for each query head that shares the keys and each tile of queries:
      S^T = K Q^T                          dP^T = V dO^T
      P^T = exp(S^T - lse)          --->   dS^T = P^T (dP^T - delta)
      dV  = dV + P^T dO                    dK   = dK + dS^T Q
    the producer warpgroup copies tiles of queries ahead of them into shared memory

Each consumer holds one of the two sums, so that head dims of 256 fit in registers; P^T goes through shared memory.
A CTA alone owns what it sums, so every sum has one order.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import piece_products, pipeline, smem
from jflash._backends.mosaic_gpu.array_shapes import tile_dims, whole_dims, whole_rows
from jflash._backends.mosaic_gpu.cta import KeysCta, WalkingPlan
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Launch, Refs, cta_index
from jflash._backends.nvidia.ops import Ref, along_columns
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.tile import dropped, operand_pieces
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.gradient_sums import Sums
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.tile_range import TileContext, VisitedTile

QUERIES = 64
"""Queries of a tile."""


@dataclasses.dataclass(frozen=True)
class DkvPlan(WalkingPlan):
    """The kernel for dK and dV, before any array. It sums the gradient of a bias that has one number for each key."""

    name: ClassVar = "d_key_value"
    stages: int
    """Tiles of queries that are in shared memory together."""
    schedule: BackwardSchedule

    @property
    def score_mod_of_bias(self) -> tuple[str, ...]:
        """The bias, if `score_mod` stands between it and the logits: its gradient has another slope than dS."""
        return self.sums.names if self.spec.score_mod is not None else ()

    @property
    def slopes(self) -> int:
        """How many derivatives of the logits go through shared memory."""
        return (not facts_of(self.spec).is_plain) + len(self.score_mod_of_bias)

    @property
    def smem(self) -> Buffers:
        """The kernel's buffers and barriers: `full` when a copy has arrived, `empty` when all readers are done."""
        spec, stages, rows = self.spec, self.stages, WARPGROUP_ROWS
        (head_dim, value_dim), (columns, value_columns) = whole_dims(spec), tile_dims(spec)
        has_bias_tiles, tiles = facts_of(spec).has_bias_tiles, CallTiles.of(spec)
        ring = functools.partial(tiles.ring, readers=2)
        k, v = tiles.operand((rows, columns), head_dim), tiles.operand((rows, value_columns), value_dim)
        dk, dv = tiles.result((rows, columns), head_dim), tiles.result((rows, value_columns), value_dim)
        if self.schedule.stores_sums:
            # Sums leave from registers.
            dk = dv = None
        p = smem.tile((rows, QUERIES), spec.dtype)
        return Buffers(
            keys=Buffers(
                k_dk=smem.reused(k, dk),
                v_dv=smem.reused(v, dv),
                full=smem.barriers(1, arrivals=smem.copies(k, v)),
            ),
            q=ring((stages, QUERIES, columns), head_dim, others=1 + has_bias_tiles),
            do=ring((stages, QUERIES, value_columns), value_dim, others=1),
            # Tiles of the bias come and go with the queries.
            bias=smem.tile((stages, QUERIES, rows), spec.bias_dtype) if has_bias_tiles else None,
            # First lse of all tiles, then delta.
            statistics=smem.vectors(2 * stages, QUERIES),
            # What the first warpgroup hands to the second one.
            p=Buffers(tile=p, slopes=[p] * self.slopes, full=smem.barriers(1), empty=smem.barriers(1)),
            finished=smem.barriers(1, arrivals=2),
        )

    @property
    def visits(self) -> Blocks:
        return Blocks(WARPGROUP_ROWS, QUERIES, self.schedule.heads, of_keys=True)

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        return super().finish(made, changed) | self.schedule.summed(self.spec, made, whole_dims(self.spec))

    @property
    def launch(self) -> Launch:
        spec, schedule = self.spec, self.schedule
        (head_dim, value_dim), (columns, value_columns) = whole_dims(spec), tile_dims(spec)
        rows, keys = whole_rows(spec, spec.key_length), schedule.blocks * WARPGROUP_ROWS
        return Launch(
            name=f"jflash_{self.name}_{head_dim}_{value_dim}",
            grid=schedule.grid,
            results=dict(
                d_key=schedule.gradient(spec, (rows, head_dim), (keys, columns)),
                d_value=schedule.gradient(spec, (rows, value_dim), (keys, value_columns)),
                **self.sums.results(spec.batch, spec.heads, keys),
            ),
            smem=self.smem,
            warpgroups=3,
        )


class DkvCta[Plan: DkvPlan](KeysCta[Plan]):
    """A CTA that has a block of 64 keys."""

    def __init__(self, plan: Plan, refs: Refs, ops: WarpgroupOps) -> None:
        wave, block, item = map(cta_index, ("wave", "block", "item"))
        super().__init__(plan, refs, ops)
        self.item, self.first_key = plan.schedule.item(wave, item), block * WARPGROUP_ROWS
        (self.k, self.dk), (self.v, self.dv) = refs.smem.keys.k_dk, refs.smem.keys.v_dv
        self.order = self.order_of(self.visited(block), block)

    @property
    def sum_rows(self) -> Any:
        return self.key_rows

    @property
    def p(self) -> Ref:
        """P^T of a tile."""
        return self.smem.p.tile

    def run(self) -> None:
        for index, body in enumerate((self.make_dv, self.make_dk, self.copy)):
            pl.when(self.warpgroup == index)(body)

    def make_dv(self) -> None:
        """Make P and dV: the first warpgroup, which copies keys and values."""
        shared = self.smem
        pipeline.release(shared.q.empty, shared.do.empty)
        pipeline.split_registers(2, copies=False)
        self.copy_rows(self.key_tile, shared.keys.full, key=self.k, value=self.v)
        plgpu.barrier_wait(shared.keys.full)
        zeros = self.ops.full((WARPGROUP_ROWS, tile_dims(self.plan.spec)[1]), 0)
        acc_dv = self.order.each(self._add_dv, zeros)
        plgpu.barrier_wait(shared.p.empty)
        self._store(dropped.scaled(self.plan.spec, acc_dv), "d_value", self.dv)

    def _add_dv(self, step: Array, head: Array, index: Array, acc_dv: Array) -> Array:
        shared, ops, spec = self.smem, self.ops, self.plan.spec
        opaque_index, shape = ops.opaque_zero(step), (WARPGROUP_ROWS, QUERIES)
        slot = pipeline.slot(step, self.plan.stages, opaque_index)
        visited = self.order.tiles.tile(index)
        at = self.place(head, visited)
        plgpu.barrier_wait(shared.q.full.at[slot])
        s = self._product(self.k, shared.q.tiles.at[slot], opaque_index)
        lse = along_columns(ops.load(shared.statistics.at[slot], 1), shape)
        loaded = self.inputs.load_packed_mask(at, shape)
        if shared.bias is not None:
            loaded["bias"] = ops.load(shared.bias.at[slot].T)
        context = TileContext(self.inputs, visited, at, loaded)
        tile = BackwardTile.of(context, s, lse, self.plan.score_mod_of_bias)
        plgpu.barrier_wait(shared.p.empty)
        self.p[...] = tile.p.astype(spec.dtype)
        if shared.p.slopes:
            slope, others = tile.pull_back(ops.full(shape, 1))
            for ref, values in zip(shared.p.slopes, [slope, *others.values()], strict=True):
                ref[...] = values.astype(spec.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.q.empty.at[slot])
        plgpu.barrier_arrive(shared.p.full)
        plgpu.barrier_wait(shared.do.full.at[slot])
        kept = operand_pieces.split(spec, tile.kept, ops)
        do = piece_products.of_tile(spec, shared.do.tiles.at[slot])
        free = lambda: plgpu.barrier_arrive(shared.do.empty.at[slot])
        return self.add_matmul(acc_dv, kept, do, free, at, opaque_index)

    def make_dk(self) -> None:
        """Make dS and dK: the second warpgroup."""
        shared, ops = self.smem, self.ops
        pipeline.release(shared.q.empty, shared.do.empty)
        plgpu.barrier_arrive(shared.p.empty)
        pipeline.split_registers(2, copies=False)
        plgpu.barrier_wait(shared.keys.full)

        start = ops.full((WARPGROUP_ROWS, tile_dims(self.plan.spec)[0]), 0), self.plan.sums.zeros(ops)
        acc_dk, _ = self.order.each(self._add_dk, start, self.finish_head)
        self._store(acc_dk * facts_of(self.plan.spec).sums_scale, "d_key", self.dk)

    def _add_dk(self, step: Array, head: Array, index: Array, carry: tuple[Array, Sums]) -> tuple[Array, Sums]:
        acc_dk, sums = carry
        shared, ops, spec, shape = self.smem, self.ops, self.plan.spec, (WARPGROUP_ROWS, QUERIES)
        opaque_index = ops.opaque_zero(step)
        slot = pipeline.slot(step, self.plan.stages, opaque_index)
        plgpu.barrier_wait(shared.do.full.at[slot])
        dp = self._product(self.v, shared.do.tiles.at[slot], opaque_index)
        delta = along_columns(ops.load(shared.statistics.at[self.plan.stages + slot], 1), shape)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.do.empty.at[slot])
        plgpu.barrier_wait(shared.p.full)
        d_logits = dropped.d_logits(spec, ops.load(self.p).astype(jnp.float32), dp, delta)
        slopes = [ops.load(ref).astype(jnp.float32) for ref in shared.p.slopes]
        d_bias = d_logits * slopes[1] if self.plan.score_mod_of_bias else d_logits
        sums = tuple(total + d_bias.sum(axis=1) for total in sums)
        ds = d_logits * slopes[0] if slopes else d_logits
        pieces = self.hand_over(ds, shared.q.full.at[slot])
        q = piece_products.of_tile(spec, shared.q.tiles.at[slot])
        at = self.place(head, self.order.tiles.tile(index))
        free = lambda: plgpu.barrier_arrive(shared.q.empty.at[slot])
        return self.add_matmul(acc_dk, pieces, q, free, at, opaque_index), sums

    def hand_over(self, ds: Float[Array, "keys queries"], q_full: Any) -> Pieces:
        """Signal that this warpgroup has read P, wait for the tile of queries, and return dS^T as an operand."""
        plgpu.barrier_arrive(self.smem.p.empty)
        plgpu.barrier_wait(q_full)
        return operand_pieces.split(self.plan.spec, ds, self.ops)

    def add_matmul(
        self, acc: Array, a: Pieces, b: Pieces, free: Callable[[], None], at: TileCoord, opaque_index: Array
    ) -> Float[Array, "keys columns"]:
        """Return acc + a @ b for the tile `at`, and call `free` when the product has read b."""
        acc = piece_products.add_matmul(self.plan.spec, acc, a, b, self.ops)
        free()
        return acc

    def place(self, head: Any, tile: VisitedTile) -> TileCoord:
        """Return where a tile of queries and the block's keys are, for a head of the group."""
        return TileCoord(self.item.batch, self.item.first_head + head, tile.start, self.first_key)

    def _product(self, fixed: Ref, walked: Ref, opaque_index: Array) -> Float[Array, "keys queries"]:
        """Return S^T from keys and queries, or dP^T from values and dO."""
        fixed = fixed.at[pl.ds(opaque_index * WARPGROUP_ROWS, WARPGROUP_ROWS)]
        a, b = (piece_products.of_tile(self.plan.spec, tile) for tile in (fixed, walked))
        return piece_products.matmul(a, operand_pieces.transposed(b), (WARPGROUP_ROWS, QUERIES), self.ops)

    def _store(self, acc: Float[Array, "keys columns"], name: str, staged: Ref) -> None:
        """Store a sum in float32, or through shared memory that both warpgroups have read."""
        result, item = self.refs.results[name], self.item
        if self.plan.schedule.stores_sums:
            result[item.batch, item.head_group, self.key_rows] = acc
            return
        plgpu.barrier_arrive(self.smem.finished)
        plgpu.barrier_wait(self.smem.finished)
        pipeline.store(acc, staged, self.key_tile.of(result, staged.shape[-1]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy(self) -> None:
        """Copy tiles of queries."""
        pipeline.split_registers(2, copies=True)
        self.copy_queries(early=1)
        pipeline.drain(self.smem.q.empty, self.smem.do.empty)
