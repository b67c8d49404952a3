"""Backward, two kernels: a CTA owns rows of queries or of keys, and alone adds up their gradients.

    a CTA of queries: Q, dO, lse, delta = the rows'
    for each tile of keys, j, that the rows see:
      S  = Q K_j^T
      dP = dO V_j^T                   copies of the next tile run beside all of this, if there is room for two
      P  = exp(S - lse)
      dS = P (dP - delta)
      dQ = dQ + dS K_j

    a CTA of keys: K, V = the rows'
    for each query head that shares them and each tile of queries, i, that see the rows:
      S^T  = K Q_i^T
      P^T  = exp(S^T - lse_i)
      dV   = dV + P^T dO_i            here too
      dP^T = V dO_i^T
      dS^T = P^T (dP^T - delta_i)
      dK   = dK + dS^T Q_i

With keys as rows, P^T and dS^T are operands as they are in registers. Where registers have no room for both sums, one
launch makes dV and another dK. Every sum has one order. `backward_fused` makes fewer products, for calls that need
none.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, for dQ with the loops exchanged.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma.cta import MmaOps, QueriesCta, TiledPlan, buffers, by_piece, d_query_type
from jflash._backends.mosaic_gpu_mma.own_keys import Carry, KeysCta, KeysPlan
from jflash._backends.mosaic_gpu_mma.products import Operand, Tiles
from jflash._backends.mosaic_gpu_mma.run import MmaBackward
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import along_columns, along_rows
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import operand_pieces
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.gradient_sums import SummingPlan, Sums
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.tile_range import Place, TileContext

DqCarry = tuple[Tiles, tuple[Sums, ...]]
"""dQ of each block of rows, and the sums of parameters' gradients."""


@dataclasses.dataclass(frozen=True)
class DqPlan(SummingPlan, TiledPlan):
    """The kernel for dQ, before any array. It sums parameters' gradients over keys."""

    def arrays(self, call: MmaBackward) -> dict[str, Array]:
        return call.read() | call.visits(Blocks(self.tile.rows, self.tile.size))

    @property
    def launch(self) -> Launch:
        """The kernel's grid, results and shared memory."""
        spec, tile = self.spec, self.tile
        blocks = pl.cdiv(spec.query_length, tile.rows)
        return Launch(
            name=f"jflash_mma_d_query_{spec.head_dim}_{spec.value_dim}",
            grid=dict(batch=spec.batch, head=spec.heads, block=blocks),
            results=dict(d_query=d_query_type(spec)) | self.sums.results(spec.batch, spec.heads, blocks * tile.rows),
            smem=buffers(spec, tile, ("query", "d_out"), ("key", "value")),
        )


class DqCta(QueriesCta[DqPlan]):
    """A CTA of the kernel for dQ."""

    def __init__(self, plan: DqPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops)
        self.rows = list(self.blocks_from(self.first_row))
        self.tables = plan.tables.of_warpgroup(refs.arrays, self.batch, self.head, self.block, 0)
        self.tiles = self.visited(Place(self.batch, self.head, self.block))

    def run(self) -> None:
        """Walk over the tiles of keys, and store dQ."""
        plan, spec, ops, results = self.plan, self.plan.spec, self.ops, self.refs.results
        own = self.cta_rows(["query", "d_out"], self.batch, self.head, self.first_row)
        self.copy_next(0)
        statistics = [list(self.statistics(self.batch, self.head, rows, 0)) for rows in self.rows]
        sums = tuple(plan.sums.zeros(ops) for _ in self.rows)
        start = self.zeros(plan.tile.blocks, self.smem.key.shape[-1]), sums
        held = self.held(own)
        visit = lambda index, carry: self._visit(index, held, statistics, carry)
        acc_dq, sums = lax.fori_loop(0, self.tiles.count, visit, start)
        target = results["d_query"].at[self.batch].at[:, self.head]
        for rows, acc, of_rows in zip(self.rows, acc_dq, sums, strict=True):
            plan.sums.store(results, of_rows, self.batch, self.head, rows)
            ops.store_rows(acc * facts_of(spec).sums_scale, target, rows.start, spec.query_length)

    def _visit(self, index: Any, own: Sequence[Operand], statistics: Any, carry: DqCarry) -> DqCarry:
        """Add one tile's part to dQ and to the sums of parameters' gradients."""
        acc_dq, sums = carry
        plan, tile, ops = self.plan, self.plan.tile, self.ops
        visited, slot, shape = self.tiles.tile(index), self.slot(index), (WARPGROUP_ROWS, tile.size)
        at = self.places(visited)
        ops.wait()
        if tile.stages > 1:
            self.copy_next(index + 1)
        loaded = [self.load(one, shape) for one in at]
        every_s = self.product(own[0], self.smem.key.at[slot])
        every_dp = self.product(own[1], self.smem.value.at[slot])
        every_ds: list[Pieces] = []
        totals: list[Sums] = []
        for block, (s, dp) in enumerate(zip(every_s, every_dp, strict=True)):
            lse, delta = (along_rows(statistic, shape) for statistic in statistics[block])
            context = TileContext(self.inputs, visited, at[block], loaded[block])
            of_block = BackwardTile.of(context, s, lse, plan.differentiated)
            gradients = of_block.differentiate(dp, delta)
            added = plan.sums.of_tile(gradients.parameters)
            totals.append(tuple(map(operator.add, sums[block], added)))
            every_ds.append(operand_pieces.split(plan.spec, gradients.ds, ops))
            of_block.add_to_tables(self.tables, gradients, ops.opaque_zero(index))
        acc_dq = self.add_product(acc_dq, by_piece(every_ds), self.smem.key.at[slot])
        if tile.stages == 1:
            ops.wait()
            self.copy_next(index + 1)
        return acc_dq, tuple(totals)


@dataclasses.dataclass(frozen=True)
class DkvPlan(KeysPlan):
    """A kernel for dK and dV, or one of them, before any array. It sums the gradient of a bias of keys over queries."""

    outputs: tuple[str, ...]

    @property
    def launch(self) -> Launch:
        """The kernel's grid, results and shared memory."""
        spec, results = self.spec, self.gradients
        return Launch(
            name=f"jflash_mma_{'_'.join(self.outputs)}_{spec.head_dim}_{spec.value_dim}",
            grid=self.schedule.grid,
            results={name: results[name] for name in self.outputs}
            | self.sums.results(spec.batch, spec.heads, self.key_rows),
            smem=buffers(spec, self.tile, self.factors, ("query", "d_out")),
        )

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of the arrays whose rows of keys are multiplied; of V for dP alone."""
        return ("key", "value") if "d_key" in self.outputs else ("key",)


class DkvCta(KeysCta[DkvPlan]):
    """A CTA of a kernel for dK and dV, or one of them."""

    def run(self) -> None:
        """Walk over the tiles of queries, and store the sums."""
        rows = self.cta_rows(self.plan.factors, self.item.batch, self.item.key_head, self.keys[0].start)
        self._copy_tile(jnp.int32(0))
        self.walk(rows, self.plan.outputs)

    def _copy_tile(self, step: Array) -> None:
        def copy(head: Any, first: Any) -> None:
            for name in ("query", "d_out"):
                self.copy(name, self.item.batch, head, first, getattr(self.smem, name).at[self.slot(step)])

        self.begin(step, copy)

    def visit(self, own: Sequence[Operand], step: Array, head: Any, index: Any, carry: Carry) -> Carry:
        acc, sums = dict(carry[0]), carry[1]
        tile, spec, ops, slot = self.plan.tile, self.plan.spec, self.ops, self.slot(step)
        q, do, shape = self.smem.query.at[slot], self.smem.d_out.at[slot], (WARPGROUP_ROWS, tile.size)
        visited = self.order.tiles.tile(index)
        own_head, start = self.item.first_head + head, visited.start
        at = [TileCoord(self.item.batch, own_head, start, keys.start) for keys in self.keys]
        ops.wait()
        if tile.stages > 1:
            self._copy_tile(step + 1)
        statistics = self.statistics(self.item.batch, own_head, pl.ds(start, tile.size), 1)
        lse, delta = (along_columns(statistic, shape) for statistic in statistics)
        loaded = [self.load(one, shape) for one in at]
        tiles = self.tiles(visited, at, loaded, self.product(own[0], q), lse)
        if "d_value" in acc:
            kept = by_piece(operand_pieces.split(spec, one.kept, ops) for one in tiles)
            acc["d_value"] = self.add_product(acc["d_value"], kept, do)
        if "d_key" in acc:
            gradients, sums = self.differentiate(tiles, self.product(own[1], do), delta, sums)
            ds = by_piece(operand_pieces.split(spec, one.ds, ops) for one in gradients)
            acc["d_key"] = self.add_product(acc["d_key"], ds, q)
        if tile.stages == 1:
            ops.wait()
            self._copy_tile(step + 1)
        return acc, sums
