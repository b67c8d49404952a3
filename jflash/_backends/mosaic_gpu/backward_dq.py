"""Backward in two kernels, the first: a CTA owns some rows of queries and walks over the keys that they can see.

    each consumer warpgroup, on 64 rows of queries, for each tile of keys:
      S  = Q K^T
      dP = dO V^T                    the matrix unit runs this, while the warpgroup goes on with
      P  = exp(S - lse)
      dS = P (dP - delta)
      dQ = dQ + dS K
    the producer warpgroup copies tiles of keys and values ahead of them into shared memory

A CTA alone owns what it sums, so every sum has one order. So have the sums over keys of a bias that has only a query
axis; the fused backward would have to add them up in device memory.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, with the loops exchanged.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import piece_products, pipeline, smem
from jflash._backends.mosaic_gpu.array_shapes import tile_dims, whole_dims
from jflash._backends.mosaic_gpu.cta import QueryRowsCta, QueryRowsPlan, Walked, in_place_of_queries
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.run import HopperBackward
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.mosaic_gpu.tiles import DqTiles
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import along_rows
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.tile import operand_pieces
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.gradient_sums import SummingPlan
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics.spec import Spec

Carry = tuple[Array, tuple[Array, ...]]
"""A warpgroup's dQ, and its sums of parameters' gradients."""


def shared_memory(spec: Spec, tile: DqTiles) -> Buffers:
    """Return the kernel's buffers and barriers: `full` when a copy has arrived, `empty` when all readers are done."""
    (head_dim, value_dim), (columns, value_columns) = whole_dims(spec), tile_dims(spec)
    has_bias_tiles = facts_of(spec).has_bias_tiles
    tiles, rows = CallTiles.of(spec), (tile.warpgroups, WARPGROUP_ROWS)
    ring = functools.partial(tiles.ring, readers=tile.warpgroups)
    q, do = tiles.operand((*rows, columns), head_dim), tiles.operand((*rows, value_columns), value_dim)
    return Buffers(
        **in_place_of_queries(spec, q, tiles.result((*rows, columns), head_dim), tile.warpgroups),
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
        return call.read(self.visits)

    @property
    def launch(self) -> Launch:
        """The launch, whose results have whole blocks of rows in a partial call."""
        spec, (head_dim, value_dim) = self.spec, whole_dims(self.spec)
        return Launch(
            name=f"jflash_d_query_{head_dim}_{value_dim}",
            grid=self.schedule.grid,
            results=dict(
                d_query=self.result(spec, spec.heads, 0), **self.sums.results(spec.batch, spec.heads, self.all_rows)
            ),
            smem=shared_memory(spec, self.tile),
            warpgroups=self.tile.warpgroups + 1,
        )


class DqCta(QueryRowsCta[DqPlan]):
    """A CTA that makes rows of dQ."""

    def __init__(self, plan: DqPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops)
        self.tables = plan.tables.of_warpgroup(refs.arrays, self.batch, self.head, self.block, self.warpgroup)

    def walked(self) -> Sequence[Walked]:
        shared = self.smem
        bias = {} if shared.bias is None else dict(bias=shared.bias)
        return (shared.k, dict(key=shared.k.tiles)), (shared.v, bias | dict(value=shared.v.tiles))

    def compute(self) -> None:
        """Copy this warpgroup's rows, and walk over the tiles of keys."""
        spec, sums, results = self.plan.spec, self.plan.sums, self.refs.results
        statistics = self.begin(dict(query=self.q, d_out=self.smem.do), "lse", "delta")
        start = self.ops.full((WARPGROUP_ROWS, tile_dims(spec)[0]), 0), sums.zeros(self.ops)
        visit = lambda index, carry: self._visit(index, statistics, carry)
        acc_dq, totals = lax.fori_loop(0, self.tiles.count, visit, start)
        sums.store(results, totals, self.batch, self.head, self.query_rows)
        self.store_in_place(acc_dq * facts_of(spec).sums_scale, results["d_query"], self.head)

    def _visit(self, index: Array, statistics: Sequence[Array], carry: Carry) -> Carry:
        """Add what one tile gives to dQ and to the sums of parameters' gradients."""
        acc_dq, sums = carry
        tile, spec, shared, ops = self.plan.tile, self.plan.spec, self.smem, self.ops
        warpgroup, shape = self.warpgroup, (WARPGROUP_ROWS, tile.keys)
        opaque_index = pipeline.opaque_zero(index, warpgroup)
        key_slot, value_slot = (pipeline.slot(index, n, opaque_index) for n in (tile.stages, tile.value_stages))
        visited = self.tiles.tile(index)
        at = TileCoord(self.batch, self.head, self.warpgroup_row, visited.start)
        pieces = functools.partial(piece_products.of_tile, spec)
        k, v = pieces(shared.k.tiles.at[key_slot]), pieces(shared.v.tiles.at[value_slot])
        loaded = self.inputs.load_packed_mask(at, shape)
        plgpu.barrier_wait(shared.k.full.at[key_slot])

        def differentiate(acc_s: Any, acc_dp: Any) -> tuple[Pieces, tuple[Array, ...]]:
            place = warpgroup + opaque_index
            piece_products.mma(acc_s, pieces(self.q.at[place]), operand_pieces.transposed(k), ops)
            plgpu.barrier_wait(shared.v.full.at[value_slot])
            piece_products.mma(acc_dp, pieces(shared.do.at[place]), operand_pieces.transposed(v), ops)
            if shared.bias is not None:
                loaded["bias"] = ops.load(shared.bias.at[value_slot, self.warpgroup_rows])
            s = ops.read(acc_s, pending=piece_products.issued(v))
            lse, delta = (along_rows(statistic, shape) for statistic in statistics)
            context = TileContext(self.inputs, visited, at, loaded)
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
