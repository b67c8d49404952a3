"""The gradients of tables that a score_mod reads by position: each warpgroup adds up tables of its own.

    each consumer warpgroup, on 64 rows of queries, for each of the CTA's blocks, for each tile of keys:
      S  = Q K^T
      dP = dO V^T                    the matrix unit runs this, while the warpgroup goes on with
      P  = exp(S - lse)
      dS = P (dP - delta)
      table[index] += dS * d score_mod / d table[index]
    the producer warpgroup copies tiles ahead of them into shared memory

Two products again, of the backward's five. In the kernels that make dQ, dK and dV registers are short, and additions by
index take more of them. What warpgroups have added up is summed in the end, so that few add to one number at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import exponent, logits
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Buffers, pipeline, smem
from jflash._backends.mosaic_gpu.hardware.warpgroup import WarpgroupOps, along_rows
from jflash._backends.mosaic_gpu.inputs import (
    CallTiles,
    GmemTile,
    TileCoord,
    bias_and_mask,
    dropped,
    operand_pieces,
    score_mod_reads,
    tile_dims,
    whole_dims,
)
from jflash._backends.mosaic_gpu.kernels.launch import Cta, KernelPlan, Launch, Refs
from jflash._backends.mosaic_gpu.schedule import HeadBlocks, RowTiles, TileMask, TileRange, tile_range
from jflash._semantics.spec import Spec


def shared_memory(spec: Spec, tile: RowTiles) -> Buffers:
    """The kernel's buffers, and barriers: `full` when a copy has arrived, `empty` when all readers are done."""
    (head_dim, value_dim), (columns, value_columns) = whole_dims(spec), tile_dims(spec)
    has_bias_tiles = bias_and_mask.has_bias_tiles(spec)
    tiles = CallTiles.of(spec)
    ring = functools.partial(tiles.ring, readers=tile.warpgroups)
    q, do = tiles.operand((tile.rows, columns), head_dim), tiles.operand((tile.rows, value_columns), value_dim)
    return Buffers(
        q=q,
        do=do,
        rows_full=smem.barriers(1, arrivals=smem.copies(q, do)),
        rows_empty=smem.barriers(1, arrivals=tile.warpgroups),
        k=ring((tile.stages, tile.keys, columns), head_dim),
        v=ring((tile.stages, tile.keys, value_columns), value_dim, others=has_bias_tiles),
        # Tiles of the bias come and go with the values.
        bias=smem.tile((tile.stages, tile.rows, tile.keys), spec.bias_dtype) if has_bias_tiles else None,
    )


@dataclasses.dataclass(frozen=True)
class TablesPlan(KernelPlan):
    """The kernel for the gradients of tables, before any array."""

    tile: RowTiles
    schedule: HeadBlocks

    @property
    def launch(self) -> Launch:
        """Of each table, a warpgroup has one of its own."""
        spec, (head_dim, value_dim) = self.spec, whole_dims(self.spec)
        owners = spec.batch, self.schedule.ctas, self.tile.warpgroups
        shapes = {name: (*owners, numbers) for name, numbers in score_mod_reads.tables(spec).items()}
        return Launch(
            name=f"jflash_d_tables_{head_dim}_{value_dim}",
            grid=dict(batch=spec.batch, cta=self.schedule.ctas),
            results={f"d_{name}": jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()},
            smem=shared_memory(spec, self.tile),
            warpgroups=self.tile.warpgroups + 1,
        )


def backward_tables(
    plan: TablesPlan, arrays: Mapping[str, Array], ops: WarpgroupOps
) -> dict[str, Float[Array, "B numbers"]]:
    """Launch the kernel; by d_ and each array's name, its gradient's part of each batch entry."""
    return {name: made.sum(axis=(1, 2)) for name, made in _Cta.launch(plan, arrays, ops).items()}


class _Cta(Cta[TablesPlan]):
    def __init__(self, plan: TablesPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops)
        self.batch, self.cta = lax.axis_index("batch"), lax.axis_index("cta")
        self.count = plan.schedule.count(self.cta)

    def block(self, index: Any) -> tuple[Any, Any, TileRange]:
        """Of one of its blocks the head, the first row and the tiles of keys."""
        head, block = self.plan.schedule.block(self.cta, index)
        rows, keys = self.plan.tile.rows, self.plan.tile.keys
        return head, block * rows, tile_range.visited(self.inputs, self.batch, block, rows, keys)

    def compute(self) -> None:
        """Add its blocks' parts to tables."""
        tile, shared, ops, arrays = self.plan.tile, self.smem, self.ops, self.refs.arrays
        pipeline.release(shared.rows_empty, shared.k.empty, shared.v.empty)
        pipeline.split_registers(tile.warpgroups, copies=False)
        place = self.batch, self.cta, self.warpgroup
        sums = {name.removeprefix("d_"): table.at[place] for name, table in self.refs.results.items()}
        for table in sums.values():
            ops.clear(table)

        def own_block(index: Array, _: None) -> None:
            head, first_row, tiles = self.block(index)
            at = TileCoord(self.batch, head, first_row + self.warpgroup * WARPGROUP_ROWS, tiles.first)
            own = self.batch, head, pl.ds(at.query, WARPGROUP_ROWS)
            statistics = [ops.load(arrays[name].at[own], 0) for name in ("lse", "delta")]
            plgpu.barrier_wait(shared.rows_full)
            visit = lambda number, _: self._visit(number, tiles, at, statistics, sums)
            lax.fori_loop(0, tiles.count, visit, None)
            plgpu.barrier_arrive(shared.rows_empty)

        lax.fori_loop(0, self.count, own_block, None)

    def _visit(self, index: Array, tiles: TileRange, first: TileCoord, statistics: Sequence[Array], sums: Any) -> None:
        """Add one tile's part."""
        tile, spec, shared, ops = self.plan.tile, self.plan.spec, self.smem, self.ops
        shape, slot = (WARPGROUP_ROWS, tile.keys), lax.rem(index, tile.stages)
        at = first._replace(key=tiles.start(index))
        pieces = functools.partial(operand_pieces.of_tile, spec)
        loaded = self.inputs.load_packed_mask(at, shape)

        def add(acc_dp: Any, acc_s: Any) -> None:
            k, v = (operand_pieces.transposed(pieces(ring.tiles.at[slot])) for ring in (shared.k, shared.v))
            # The compiler would spill the addresses of all columns of a wide head.
            still = pl.ds((self.warpgroup + ops.opaque_zero(index)) * WARPGROUP_ROWS, WARPGROUP_ROWS)
            plgpu.barrier_wait(shared.k.full.at[slot])
            operand_pieces.mma(acc_s, pieces(shared.q.at[still]), k, ops)
            plgpu.barrier_wait(shared.v.full.at[slot])
            operand_pieces.mma(acc_dp, pieces(shared.do.at[still]), v, ops)
            if shared.bias is not None:
                loaded["bias"] = ops.load(shared.bias.at[slot, self.own])
            s = ops.read(acc_s, pending=operand_pieces.issued(v))
            plgpu.barrier_arrive(shared.k.empty.at[slot])
            lse, delta = (along_rows(statistic, shape) for statistic in statistics)
            mask = TileMask(self.inputs, tiles, index, at, loaded)
            to_p = lambda logits: exponent.exponent(spec)(logits, lse)
            p, pull_back = logits.differentiate(s, mask, to_p, [read.name for read in score_mod_reads.of_tables(spec)])
            dp = ops.read(acc_dp)
            if shared.bias is not None:
                plgpu.commit_smem()
            plgpu.barrier_arrive(shared.v.empty.at[slot])
            p = dropped.signed(self.inputs, at, p)
            _, d_reads = pull_back(dropped.d_logits(spec, p, dp, delta))
            score_mod_reads.add_to_tables(self.inputs, self.inputs.tile(at, shape, loaded), p, d_reads, sums)

        ops.accumulators(add, shape, shape)

    def copy(self) -> None:
        """Copy its blocks' queries, and keys and values for each."""
        tile, shared = self.plan.tile, self.smem
        pipeline.split_registers(tile.warpgroups, copies=True)

        def copy_block(index: Array) -> None:
            head, first_row, tiles = self.block(index)
            plgpu.barrier_wait(shared.rows_empty)
            rows = GmemTile(self.batch, first_row, tile.rows, head)
            self.inputs.copy_rows("query", rows, shared.q, shared.rows_full)
            self.inputs.copy_rows("d_out", rows, shared.do, shared.rows_full)
            copy_tile = lambda number: self._copy_tile(rows, tiles, number)
            pipeline.for_each_copy(tiles.count, copy_tile, "cta")

        pipeline.for_each_copy(self.count, copy_block, "cta")
        pipeline.drain(shared.rows_empty, shared.k.empty, shared.v.empty)

    def _copy_tile(self, rows: GmemTile, tiles: TileRange, index: Array) -> None:
        tile, shared = self.plan.tile, self.smem
        slot, first_key = lax.rem(index, tile.stages), tiles.start(index)
        keys = GmemTile(self.batch, first_key, tile.keys, lax.div(rows.head, self.plan.spec.group))
        plgpu.barrier_wait(shared.k.empty.at[slot])
        self.inputs.copy_rows("key", keys, shared.k.tiles.at[slot], shared.k.full.at[slot])
        plgpu.barrier_wait(shared.v.empty.at[slot])
        full = shared.v.full.at[slot]
        if shared.bias is not None:
            own = pl.ds(rows.first, tile.rows), pl.ds(first_key, tile.keys)
            source = self.inputs.part("bias", self.batch, rows.head).at[own]
            plgpu.copy_gmem_to_smem(source, shared.bias.at[slot], full)
        self.inputs.copy_rows("value", keys, shared.v.tiles.at[slot], full)
