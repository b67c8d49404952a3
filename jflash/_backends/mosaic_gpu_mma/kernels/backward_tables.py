"""The gradients of tables that a score_mod reads by position: a CTA adds up tables of its own.

    for each of the CTA's blocks of queries, for each tile of keys:
      S  = Q K^T
      dP = dO V^T                     copies of the next tile run beside all of this, if there is room for two
      P  = exp(S - lse)
      dS = P (dP - delta)
      table[index] += dS * d score_mod / d table[index]

Two products again, of the backward's seven. What CTAs have added up is summed in the end, so that few add to one number
at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import exponent, logits
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Buffers, along_rows
from jflash._backends.mosaic_gpu.inputs import TileCoord, dropped, score_mod_reads
from jflash._backends.mosaic_gpu.kernels.launch import Launch, Refs
from jflash._backends.mosaic_gpu.schedule import HeadBlocks, TileMask, TileRange, tile_range
from jflash._backends.mosaic_gpu_mma.hardware import MmaOps, Operand
from jflash._backends.mosaic_gpu_mma.kernels import backward_dq
from jflash._backends.mosaic_gpu_mma.kernels.cta import Cta, Tile, TiledPlan
from jflash._semantics.spec import Spec


def shared_memory(spec: Spec, tile: Tile) -> Buffers:
    """The kernel's buffers."""
    return backward_dq.shared_memory(spec, tile)


@dataclasses.dataclass(frozen=True)
class TablesPlan(TiledPlan):
    """The kernel for the gradients of tables, before any array; its tile has one block of rows."""

    schedule: HeadBlocks

    @property
    def launch(self) -> Launch:
        """Of each table, a CTA has one of its own."""
        spec, ctas = self.spec, self.schedule.ctas
        shapes = {name: (spec.batch, ctas, numbers) for name, numbers in score_mod_reads.tables(spec).items()}
        return Launch(
            name=f"jflash_mma_d_tables_{spec.head_dim}_{spec.value_dim}",
            grid=dict(batch=spec.batch, cta=ctas),
            results={f"d_{name}": jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()},
            smem=shared_memory(spec, self.tile),
        )


def backward_tables(plan: TablesPlan, arrays: Mapping[str, Array], ops: MmaOps) -> dict[str, Float[Array, "B numbers"]]:
    """Launch the kernel; by d_ and each array's name, its gradient's part of each batch entry."""
    return {name: made.sum(axis=1) for name, made in _Cta.launch(plan, arrays, ops).items()}


class _Cta(Cta[TablesPlan]):
    def __init__(self, plan: TablesPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops)
        self.batch, self.cta = lax.axis_index("batch"), lax.axis_index("cta")
        own = self.batch, self.cta
        self.sums = {name.removeprefix("d_"): table.at[own] for name, table in refs.results.items()}

    def run(self) -> None:
        """Add its blocks' parts to tables."""
        for table in self.sums.values():
            self.ops.clear(table)
        lax.fori_loop(0, self.plan.schedule.count(self.cta), lambda index, _: self._add_block(index), None)

    def _add_block(self, index: Any) -> None:
        tile, ops, arrays = self.plan.tile, self.ops, self.refs.arrays
        head, block = self.plan.schedule.block(self.cta, index)
        tiles = tile_range.visited(self.inputs, self.batch, block, tile.rows, tile.size)
        at = TileCoord(self.batch, head, block * tile.rows, tiles.first)
        rows = self.batch, head, pl.ds(at.query, WARPGROUP_ROWS)
        # Until all threads have read the last block's tiles.
        ops.wait()
        self.copy("query", self.batch, head, at.query, self.smem.q)
        self.copy("d_out", self.batch, head, at.query, self.smem.do)
        own = self.lent_operands(self.smem.q, self.smem.do)
        self._copy_tile(head, tiles, 0)
        statistics = [ops.load(arrays[name].at[rows], 0) for name in ("lse", "delta")]
        own = own or self.own_operands(self.smem.q, self.smem.do)
        lax.fori_loop(0, tiles.count, lambda number, _: self._visit(number, tiles, at, own, statistics), None)

    def _copy_tile(self, head: Any, tiles: TileRange, index: Any) -> None:
        @pl.when(index < tiles.count)
        def _() -> None:
            key_head = lax.div(head, self.plan.spec.group)
            for name, ring in (("key", self.smem.k), ("value", self.smem.v)):
                self.copy(name, self.batch, key_head, tiles.start(index), ring.at[self.slot(index)])

        self.ops.commit()

    def _visit(
        self, index: Any, tiles: TileRange, first: TileCoord, own: Sequence[Operand], statistics: Sequence[Array]
    ) -> None:
        """Add one tile's part."""
        tile, spec, shared, ops = self.plan.tile, self.plan.spec, self.smem, self.ops
        slot, shape = self.slot(index), (WARPGROUP_ROWS, tile.size)
        at = first._replace(key=tiles.start(index))
        ops.wait()
        if tile.stages > 1:
            self._copy_tile(at.head, tiles, index + 1)
        loaded = self.load(at, shape)
        (s,) = self.add_product(self.zeros(1, tile.size), own[0], shared.k.at[slot], transposed=True)
        (dp,) = self.add_product(self.zeros(1, tile.size), own[1], shared.v.at[slot], transposed=True)
        if tile.stages == 1:
            ops.wait()
            self._copy_tile(at.head, tiles, index + 1)
        lse, delta = (along_rows(statistic, shape) for statistic in statistics)
        mask = TileMask(self.inputs, tiles, index, at, loaded)
        to_p = lambda logits: exponent.exponent(spec)(logits, lse)
        p, pull_back = logits.differentiate(s, mask, to_p, [read.name for read in score_mod_reads.of_tables(spec)])
        p = dropped.signed(self.inputs, at, p)
        _, d_reads = pull_back(dropped.d_logits(spec, p, dp, delta))
        score_mod_reads.add_to_tables(self.inputs, self.inputs.tile(at, shape, loaded), p, d_reads, self.sums)
