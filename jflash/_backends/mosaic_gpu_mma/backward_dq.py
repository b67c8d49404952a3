"""Backward, two kernels, the first: a CTA owns some rows of queries and walks over the tiles of keys that they can see.

    Q, dO, lse, delta = the rows'
    for each tile of keys, j:
      S  = Q K_j^T
      dP = dO V_j^T                   copies of the next tile run beside all of this, if there is room for two
      P  = exp(S - lse)
      dS = P (dP - delta)
      dQ = dQ + dS K_j

A CTA alone owns what it sums, so every sum has one order. `backward` makes fewer products, for calls that need none.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, with the loops exchanged.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma.cta import Cta, Tile, TiledPlan, buffer, by_piece, columns, rows_of_head
from jflash._backends.mosaic_gpu_mma.device_sums import Sums
from jflash._backends.mosaic_gpu_mma.ops import MmaOps
from jflash._backends.mosaic_gpu_mma.prepared import MmaBackward
from jflash._backends.mosaic_gpu_mma.products import Operand, Tiles
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import along_rows
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.tile import base2, operand_pieces
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.gradient_sums import SummingPlan
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics.spec import Spec

Carry = tuple[Tiles, tuple[Sums, ...]]
"""dQ of each block of rows, and the sums of parameters' gradients."""


def shared_memory(spec: Spec, tile: Tile) -> Buffers:
    """The kernel's buffers."""
    head_columns, value_columns = columns(spec.head_dim), columns(spec.value_dim)
    return Buffers(
        q=None if tile.streams else buffer(spec, tile.rows, head_columns),
        do=None if tile.streams else buffer(spec, tile.rows, value_columns),
        k=buffer(spec, tile.stages, tile.size, head_columns),
        v=buffer(spec, tile.stages, tile.size, value_columns),
    )


@dataclasses.dataclass(frozen=True)
class DqPlan(SummingPlan, TiledPlan):
    """The kernel for dQ, before any array. It sums parameters' gradients over keys."""

    def arrays(self, call: MmaBackward) -> dict[str, Array]:
        return call.of_queries | call.ranges(self.tile.rows)

    @property
    def launch(self) -> Launch:
        """The kernel's grid, results and shared memory."""
        spec, shape = self.spec, jax.ShapeDtypeStruct
        blocks = pl.cdiv(spec.query_length, self.tile.rows)
        d_query = (spec.batch, spec.query_length, spec.heads, round_up(spec.head_dim, 8))
        sums = self.sums.results(spec.batch, spec.heads, blocks * self.tile.rows)
        return Launch(
            name=f"jflash_mma_d_query_{spec.head_dim}_{spec.value_dim}",
            grid=dict(batch=spec.batch, head=spec.heads, block=blocks),
            results=dict(d_query=shape(d_query, spec.result_dtype)) | sums,
            smem=shared_memory(spec, self.tile),
        )


def body(plan: DqPlan, refs: Refs, ops: MmaOps) -> None:
    """Run one warpgroup of the kernel."""
    _Cta(plan, refs, ops).run()


class _Cta(Cta[DqPlan]):
    def __init__(self, plan: DqPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops)
        self.batch, self.head = lax.axis_index("batch"), lax.axis_index("head")
        block = lax.axis_size("block") - 1 - lax.axis_index("block")
        self.rows = [pl.ds(block * plan.tile.rows + number * WARPGROUP_ROWS, WARPGROUP_ROWS) for number in self._blocks]
        self.tables = plan.tables.of_warpgroup(refs.arrays, self.batch, self.head, block, 0)
        self.tiles = tile_range.visited(self.inputs, self.batch, block, plan.tile.rows, plan.tile.size)

    @property
    def _blocks(self) -> range:
        return range(self.plan.tile.blocks)

    def run(self) -> None:
        """Walk over the tiles of keys, and store dQ."""
        plan, spec, ops, results = self.plan, self.plan.spec, self.ops, self.refs.results
        place = self.batch, self.head, self.rows[0].start
        rows = self.own_rows("query", *place, self.smem.q), self.own_rows("d_out", *place, self.smem.do)
        self._copy_tile(0)
        statistics = [
            [ops.load(self.refs.arrays[name].at[self.batch, self.head, rows], 0) for name in ("lse", "delta")]
            for rows in self.rows
        ]
        sums = tuple(plan.sums.zeros(ops) for _ in self._blocks)
        start = self.zeros(plan.tile.blocks, columns(spec.head_dim)), sums
        own = self.own_operands(*rows)
        visit = lambda index, carry: self._visit(index, own, statistics, carry)
        acc_dq, sums = lax.fori_loop(0, self.tiles.count, visit, start)
        target = rows_of_head(results["d_query"], self.batch, self.head)
        for rows, acc, of_rows in zip(self.rows, acc_dq, sums, strict=True):
            plan.sums.store(results, of_rows, self.batch, self.head, rows)
            ops.store_rows(acc * base2.sums_scale(spec), target, rows.start, spec.query_length)

    def _copy_tile(self, index: Any) -> None:
        @pl.when(index < self.tiles.count)
        def _() -> None:
            key_head = lax.div(self.head, self.plan.spec.group)
            for name, ring in (("key", self.smem.k), ("value", self.smem.v)):
                self.copy(name, self.batch, key_head, self.tiles.start(index), ring.at[self.slot(index)])

        self.ops.commit()

    def _visit(self, index: Any, own: Sequence[Operand], statistics: Any, carry: Carry) -> Carry:
        """Add one tile's part to dQ and to the sums of parameters' gradients."""
        acc_dq, sums = carry
        plan, tile, spec, shared, ops = self.plan, self.plan.tile, self.plan.spec, self.smem, self.ops
        slot, shape = self.slot(index), (WARPGROUP_ROWS, tile.size)
        at = [TileCoord(self.batch, self.head, rows.start, self.tiles.start(index)) for rows in self.rows]
        ops.wait()
        if tile.stages > 1:
            self._copy_tile(index + 1)
        loaded = [self.load(one, shape) for one in at]
        every_s = self.add_product(self.zeros(tile.blocks, tile.size), own[0], shared.k.at[slot], transposed=True)
        every_dp = self.add_product(self.zeros(tile.blocks, tile.size), own[1], shared.v.at[slot], transposed=True)
        every_ds: list[Pieces] = []
        totals: list[Sums] = []
        for block, (one, s, dp) in enumerate(zip(at, every_s, every_dp, strict=True)):
            lse, delta = (along_rows(statistic, shape) for statistic in statistics[block])
            context = TileContext(self.inputs, self.tiles, index, one, loaded[block])
            of_block = BackwardTile.of(context, s, lse, plan.differentiated)
            gradients = of_block.differentiate(dp, delta)
            added = plan.sums.of_tile(gradients.parameters)
            totals.append(tuple(map(operator.add, sums[block], added)))
            every_ds.append(operand_pieces.split(spec, gradients.ds, ops))
            of_block.add_to_tables(self.tables, gradients, ops.opaque_zero(index))
        acc_dq = self.add_product(acc_dq, by_piece(every_ds), shared.k.at[slot], transposed=False)
        if tile.stages == 1:
            ops.wait()
            self._copy_tile(index + 1)
        return acc_dq, tuple(totals)
