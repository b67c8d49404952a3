"""The gradient of a bias with a query and a key axis: a CTA owns tiles of it, and visits all heads that share each.

    each consumer warpgroup, on 64 rows of queries, for each tile of keys:
      for each batch entry and head that share the bias:
        S  = Q K^T
        dP = dO V^T                  the matrix unit runs this, while the warpgroup goes on with
        P  = exp(S - lse)
        dB = dB + P (dP - delta)
    the producer warpgroup copies tiles ahead of them into shared memory

Two products again, of the backward's five. They cost less than adding up, in device memory, an array of the bias's size
in float32 for every batch entry.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import piece_products, pipeline, smem
from jflash._backends.mosaic_gpu.array_shapes import tile_dims, whole_dims
from jflash._backends.mosaic_gpu.cta import Cta
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.pipeline import GmemTile
from jflash._backends.mosaic_gpu.run import HopperBackward
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.mosaic_gpu.tiles import RowTiles
from jflash._backends.nvidia.launch import KernelPlan, Launch, Refs, cta_index
from jflash._backends.nvidia.ops import Ref, along_rows
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.tile import operand_pieces
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.walk import dbias_schedule, tile_range
from jflash._backends.nvidia.walk.dbias_schedule import DbiasSchedule
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.tile_range import Place, TileContext, VisitedTile
from jflash._semantics.spec import Spec


def shared_memory(spec: Spec, tile: RowTiles, splits: int = 1) -> Buffers:
    """Return the kernel's buffers and barriers: `full` when a copy has arrived, `empty` when all readers are done."""
    (head_dim, value_dim), (columns, value_columns) = whole_dims(spec), tile_dims(spec)
    barriers = lambda *tiles: Buffers(
        full=smem.barriers(1, arrivals=smem.copies(*tiles)), empty=smem.barriers(1, arrivals=tile.warpgroups)
    )
    operand = CallTiles.of(spec).operand
    q, k = (operand((rows, columns), head_dim) for rows in (tile.rows, tile.keys))
    do, v = (operand((rows, value_columns), value_dim) for rows in (tile.rows, tile.keys))
    return Buffers(
        q=q,
        k=k,
        do=do,
        v=v,
        bias=smem.ring(smem.tile((tile.stages, tile.rows, tile.keys), spec.bias_dtype), readers=tile.warpgroups),
        d_bias=smem.tile((tile.rows, tile.keys), dbias_schedule.stored_dtype(spec, splits)),
        qk=barriers(q, k),
        vo=barriers(do, v),
    )


@dataclasses.dataclass(frozen=True)
class DbiasPlan(KernelPlan):
    """The kernel for the bias's gradient, before any array."""

    tile: RowTiles
    schedule: DbiasSchedule
    tiles_per_cta: int
    """Tiles of keys that a CTA takes."""

    def arrays(self, call: HopperBackward) -> dict[str, Array]:
        return call.tiles | call.rows | call.around() | call.kinds(Blocks(self.tile.rows, self.tile.keys))

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        return dict(whole_d_bias=self.schedule.summed(self.spec, made["d_bias"]))

    @property
    def launch(self) -> Launch:
        """The launch, whose result is in whole tiles."""
        spec, schedule, (head_dim, value_dim) = self.spec, self.schedule, whole_dims(self.spec)
        _, _, rows, keys = schedule.shape
        return Launch(
            name=f"jflash_d_bias_{head_dim}_{value_dim}",
            grid=dict(tiles=pl.cdiv(schedule.tiles, self.tiles_per_cta), block=schedule.blocks) | schedule.grid,
            results=dict(d_bias=schedule.stored(spec, round_up(rows, 8), round_up(keys, 64))),
            smem=shared_memory(spec, self.tile, schedule.splits),
            warpgroups=self.tile.warpgroups + 1,
        )


class DbiasCta(Cta[DbiasPlan]):
    """A CTA that makes tiles of the bias's gradient."""

    def __init__(self, plan: DbiasPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops)
        self.block = cta_index("block")
        self.first_row, self.first_tile = self.block * plan.tile.rows, cta_index("tiles") * plan.tiles_per_cta
        self.count = jnp.minimum(plan.tiles_per_cta, pl.cdiv(plan.spec.key_length, plan.tile.keys) - self.first_tile)
        self.first_visit, self.visits = plan.schedule.own_visits()
        self.query_rows = pl.ds(self.first_row + self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def sharing_head(self, step: Array, first_key: Array) -> tuple[Array, Array, VisitedTile, Array]:
        """Return a batch entry and head that share the bias, their tile, and whether any of it is seen."""
        place, tile = Place(*self.plan.schedule.sharing(step), self.block), self.plan.tile
        return place.batch, place.group, *tile_range.seen_tile(self.inputs, place, tile.rows, first_key, tile.keys)

    def compute(self) -> None:
        """Add up tiles of the gradient, and store them."""
        tile, shared, ops = self.plan.tile, self.smem, self.ops
        pipeline.release(shared.bias.empty, shared.qk.empty, shared.vo.empty)
        pipeline.split_registers(tile.warpgroups, copies=False)

        def make_tile(number: Array, _: None) -> None:
            slot, index = lax.rem(number, tile.stages), self.first_tile + number
            plgpu.barrier_wait(shared.bias.full.at[slot])
            bias = shared.bias.tiles.at[slot]
            visit = lambda step, total: self._add_head(self.first_visit + step, index * tile.keys, bias, total)
            total = lax.fori_loop(0, self.visits, visit, ops.full((WARPGROUP_ROWS, tile.keys), 0))
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.bias.empty.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            shared.d_bias[self.warpgroup_rows] = total.astype(shared.d_bias.dtype)
            plgpu.commit_smem()
            keys = pl.ds(index * tile.keys, tile.keys)
            place = *self.plan.schedule.place(), self.query_rows, keys
            plgpu.copy_smem_to_gmem(shared.d_bias.at[self.warpgroup_rows], self.refs.results["d_bias"].at[place])

        lax.fori_loop(0, self.count, make_tile, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _add_head(self, step: Array, first_key: Array, bias: Ref, total: Array) -> Array:
        """Return a tile of the gradient with what one head adds to it."""
        batch, head, tile, seen = self.sharing_head(step, first_key)
        rows = self.warpgroup_rows
        if max(self.smem.q.shape[1], self.smem.do.shape[1]) > 256:
            # The compiler would spill the addresses of all these columns.
            rows = pl.ds((self.warpgroup + self.ops.opaque_zero(step)) * WARPGROUP_ROWS, WARPGROUP_ROWS)
        at = TileCoord(batch, head, self.query_rows.start, first_key)
        add = lambda total: total + self._of_head(at, tile, bias, rows)
        return add(total) if tile.is_partial is None else lax.cond(seen, add, lambda total: total, total)

    def _of_head(self, at: TileCoord, visited: VisitedTile, bias: Ref, rows: Any) -> Array:
        shared, ops, spec, shape = self.smem, self.ops, self.plan.spec, (WARPGROUP_ROWS, self.plan.tile.keys)
        pieces = functools.partial(piece_products.of_tile, spec)
        queries = at.batch, at.head, self.query_rows
        lse, delta = (ops.load(self.refs.arrays[name].at[queries], 0) for name in ("lse", "delta"))
        packed_mask = self.inputs.load_packed_mask(at, shape)

        def differentiate(acc_dp: Any, acc_s: Any) -> Array:
            plgpu.barrier_wait(shared.qk.full)
            piece_products.mma(acc_s, pieces(shared.q.at[rows]), operand_pieces.transposed(pieces(shared.k)), ops)
            plgpu.barrier_wait(shared.vo.full)
            v = operand_pieces.transposed(pieces(shared.v))
            piece_products.mma(acc_dp, pieces(shared.do.at[rows]), v, ops)
            s = ops.read(acc_s, pending=piece_products.issued(v))
            loaded = {"bias": ops.load(bias.at[self.warpgroup_rows])} | packed_mask
            plgpu.barrier_arrive(shared.qk.empty)
            context = TileContext(self.inputs, visited, at, loaded)
            tile = BackwardTile.of(context, s, along_rows(lse, shape), ("bias",))
            dp = ops.read(acc_dp)
            plgpu.barrier_arrive(shared.vo.empty)
            return tile.differentiate(dp, along_rows(delta, shape)).parameters["bias"]

        return ops.accumulators(differentiate, shape, shape)

    def copy(self) -> None:
        """Copy tiles of all arrays."""
        tile, shared = self.plan.tile, self.smem
        pipeline.split_registers(tile.warpgroups, copies=True)
        rows = pl.ds(self.first_row, tile.rows)
        bias_ref = self.inputs.refs["bias"].at[cta_index("batch"), cta_index("head")]

        def copy_tile(number: Array) -> None:
            slot, index = lax.rem(number, tile.stages), self.first_tile + number
            plgpu.barrier_wait(shared.bias.empty.at[slot])
            bias = bias_ref.at[rows, pl.ds(index * tile.keys, tile.keys)]
            plgpu.copy_gmem_to_smem(bias, shared.bias.tiles.at[slot], shared.bias.full.at[slot])
            copy_head = lambda step: self._copy_head(self.first_visit + step, index * tile.keys)
            pipeline.for_each_copy(self.visits, copy_head, "block")

        pipeline.for_each_copy(self.count, copy_tile, "block")
        pipeline.drain(shared.bias.empty, shared.qk.empty, shared.vo.empty)

    def _copy_head(self, step: Array, first_key: Array) -> None:
        tile, shared = self.plan.tile, self.smem
        batch, head, _tile, seen = self.sharing_head(step, first_key)

        @pl.when(seen)
        def _() -> None:
            plgpu.barrier_wait(shared.qk.empty)
            queries = GmemTile(batch, self.first_row, tile.rows, head)
            keys = GmemTile(batch, first_key, tile.keys, lax.div(head, self.plan.spec.group))
            self.inputs.copy_rows("query", queries, shared.q, shared.qk.full)
            self.inputs.copy_rows("key", keys, shared.k, shared.qk.full)
            plgpu.barrier_wait(shared.vo.empty)
            self.inputs.copy_rows("d_out", queries, shared.do, shared.vo.full)
            self.inputs.copy_rows("value", keys, shared.v, shared.vo.full)
