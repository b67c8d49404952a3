"""Backward in two kernels, the first: a CTA owns some rows of queries and walks over the keys that they can see.

    each consumer warpgroup, on 64 rows of queries, for each tile of keys:
      S  = Q K^T
      dP = dO V^T                    the matrix unit runs this, while the warpgroup goes on with
      P  = exp(S - lse)
      dS = P (dP - delta)
      dQ = dQ + dS K
    the producer warpgroup copies tiles of keys and values ahead of them into shared memory

A CTA alone owns what it sums, so every sum has one order. So have the sums over keys of a bias that has only a query
axis; the fused backward (`backward`) would have to add them up in device memory.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, with the loops exchanged.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import piece_products, pipeline, smem
from jflash._backends.mosaic_gpu.array_shapes import tile_dims, whole_dims, whole_rows
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.prepared import HopperBackward
from jflash._backends.mosaic_gpu.query_rows import QueryRowsCta, QueryRowsPlan, Walked
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.mosaic_gpu.tiles import DqTiles
from jflash._backends.nvidia import bias_and_mask
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import along_rows
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.tile import base2, operand_pieces
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.gradient_sums import SummingPlan
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics.spec import Spec

Carry = tuple[Array, tuple[Array, ...]]
"""A warpgroup's dQ, and its sums of parameters' gradients."""


def shared_memory(spec: Spec, tile: DqTiles) -> Buffers:
    """Return the kernel's buffers and barriers: `full` when a copy has arrived, `empty` when all readers are done."""
    (head_dim, value_dim), (columns, value_columns) = whole_dims(spec), tile_dims(spec)
    has_bias_tiles = bias_and_mask.has_bias_tiles(spec)
    tiles, rows = CallTiles.of(spec), (tile.warpgroups, WARPGROUP_ROWS)
    ring = functools.partial(tiles.ring, readers=tile.warpgroups)
    q, dq = tiles.operand((*rows, columns), head_dim), tiles.result((*rows, columns), head_dim)
    q_dq = smem.reused(q, None if spec.partial else dq)
    do = tiles.operand((*rows, value_columns), value_dim)
    return Buffers(
        # dQ takes the place of the queries. A partial call's leaves from registers.
        q_dq=q_dq,
        q_empty=None if q_dq.is_one_layout else smem.barriers(1, arrivals=tile.warpgroups),
        do=do,
        rows_full=smem.barriers(tile.warpgroups, arrivals=smem.copies(q, do)),
        k=ring((tile.stages, tile.keys, columns), head_dim),
        v=ring((tile.value_stages, tile.keys, value_columns), value_dim, others=has_bias_tiles),
        # Tiles of the bias come and go with the values.
        bias=smem.tile((tile.value_stages, tile.rows, tile.keys), spec.bias_dtype) if has_bias_tiles else None,
    )


@dataclasses.dataclass(frozen=True)
class DqPlan(SummingPlan, QueryRowsPlan):
    """The kernel for dQ, before any array. It sums parameters' gradients over keys."""

    tile: DqTiles

    def arrays(self, call: HopperBackward) -> dict[str, Array]:
        return call.tiles | call.rows | call.around_queries | call.ranges(self.tile.rows)

    @property
    def launch(self) -> Launch:
        """The launch, whose results have whole blocks of rows in a partial call."""
        spec, schedule, shape = self.spec, self.schedule, jax.ShapeDtypeStruct
        (head_dim, value_dim), all_rows = whole_dims(spec), schedule.blocks * self.tile.rows
        rows, columns = whole_rows(spec, spec.query_length), head_dim
        if spec.partial:
            # Registers are stored whole.
            rows, columns = all_rows, tile_dims(spec)[0]
        d_query = shape((spec.batch, rows, spec.heads, columns), spec.result_dtype)
        return Launch(
            name=f"jflash_d_query_{head_dim}_{value_dim}",
            grid=self.grid,
            results=dict(d_query=d_query, **self.sums.results(spec.batch, spec.heads, all_rows)),
            smem=shared_memory(spec, self.tile),
            warpgroups=self.tile.warpgroups + 1,
        )


def body(plan: DqPlan, refs: Refs, ops: WarpgroupOps) -> None:
    """Run one warpgroup of the kernel."""
    _Cta(plan, refs, ops).run()


class _Cta(QueryRowsCta[DqPlan]):
    def __init__(self, plan: DqPlan, refs: Refs, ops: WarpgroupOps) -> None:
        schedule = plan.schedule
        item = schedule.item(lax.axis_index("wave"), lax.axis_index("item"))
        # With a head of keys for each query head, a head group is a query head.
        self.batch, self.head = item.batch, item.head_group
        block = schedule.blocks - 1 - lax.axis_index("block")
        super().__init__(plan, refs, ops)
        self.q, self.dq = refs.smem.q_dq
        self.tiles = tile_range.visited(self.inputs, item.batch, block, plan.tile.rows, plan.tile.keys)
        self.first_row = block * plan.tile.rows
        self.tables = plan.tables.of_warpgroup(refs.arrays, self.batch, self.head, block, self.warpgroup)

    def walked(self) -> Sequence[Walked]:
        tile, shared = self.plan.tile, self.smem
        bias = {} if shared.bias is None else dict(bias=shared.bias)
        values = bias | dict(value=shared.v.tiles)
        return Walked(shared.k, tile.stages, dict(key=shared.k.tiles)), Walked(shared.v, tile.value_stages, values)

    def compute(self) -> None:
        """Copy this warpgroup's rows, and walk over the tiles of keys."""
        shared, ops, results = self.smem, self.ops, self.refs.results
        pipeline.release(shared.k.empty, shared.v.empty)
        pipeline.split_registers(self.plan.tile.warpgroups, copies=False)
        rows, full = pl.ds(self.own_row, WARPGROUP_ROWS), shared.rows_full.at[self.warpgroup]
        self.copy_own(dict(query=self.q, d_out=shared.do), full)
        statistics = [ops.load(self.refs.arrays[name].at[self.batch, self.head, rows], 0) for name in ("lse", "delta")]
        plgpu.barrier_wait(full)
        start = ops.full((WARPGROUP_ROWS, tile_dims(self.plan.spec)[0]), 0), self.plan.sums.zeros(ops)
        visit = lambda index, carry: self._visit(index, statistics, carry)
        acc_dq, sums = lax.fori_loop(0, self.tiles.count, visit, start)
        self.plan.sums.store(results, sums, self.batch, self.head, rows)
        self.store_in_place(acc_dq * base2.sums_scale(self.plan.spec), self.dq, results["d_query"], self.head)

    def _visit(self, index: Array, statistics: Sequence[Array], carry: Carry) -> Carry:
        """Add what one tile gives to dQ and to the sums of parameters' gradients."""
        acc_dq, sums = carry
        tile, spec, shared, ops = self.plan.tile, self.plan.spec, self.smem, self.ops
        warpgroup, shape = self.warpgroup, (WARPGROUP_ROWS, tile.keys)
        opaque_index = pipeline.opaque_zero(index, warpgroup)
        key_slot, value_slot = (
            pipeline.slot(index, stages, opaque_index) for stages in (tile.stages, tile.value_stages)
        )
        at = TileCoord(self.batch, self.head, self.own_row, self.tiles.start(index))
        pieces = functools.partial(piece_products.of_tile, spec)
        k, v = pieces(shared.k.tiles.at[key_slot]), pieces(shared.v.tiles.at[value_slot])
        loaded = self.inputs.load_packed_mask(at, shape)
        plgpu.barrier_wait(shared.k.full.at[key_slot])

        def differentiate(acc_s: Any, acc_dp: Any) -> tuple[Pieces, tuple[Array, ...]]:
            own = warpgroup + opaque_index
            piece_products.mma(acc_s, pieces(self.q.at[own]), operand_pieces.transposed(k), ops)
            plgpu.barrier_wait(shared.v.full.at[value_slot])
            piece_products.mma(acc_dp, pieces(shared.do.at[own]), operand_pieces.transposed(v), ops)
            if shared.bias is not None:
                loaded["bias"] = ops.load(shared.bias.at[value_slot, self.warpgroup_rows])
            s = ops.read(acc_s, pending=piece_products.issued(v))
            lse, delta = (along_rows(statistic, shape) for statistic in statistics)
            context = TileContext(self.inputs, self.tiles, index, at, loaded)
            tile = BackwardTile.of(context, s, lse, self.plan.differentiated)
            gradients = tile.differentiate(ops.read(acc_dp), delta)
            added = self.plan.sums.of_tile(gradients.parameters)
            tile.add_to_tables(self.tables, gradients, opaque_index)
            return operand_pieces.split(spec, gradients.ds, ops), added

        ds, added = ops.accumulators(differentiate, shape, shape)
        if shared.bias is not None:
            plgpu.commit_smem()
        plgpu.barrier_arrive(shared.v.empty.at[value_slot])
        acc_dq = piece_products.add_matmul(spec, acc_dq, ds, k, ops)
        plgpu.barrier_arrive(shared.k.empty.at[key_slot])
        return acc_dq, tuple(map(operator.add, sums, added))
