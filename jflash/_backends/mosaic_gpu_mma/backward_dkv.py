"""Backward, two kernels, the second: a CTA owns some keys and walks over the tiles of queries that can see them.

    K, V = the keys'
    for each query head that shares them and each tile of queries, i:
      S^T  = K Q_i^T
      P^T  = exp(S^T - lse_i)
      dV   = dV + P^T dO_i            copies of the next tile run beside all of this, if there is room for two
      dP^T = V dO_i^T
      dS^T = P^T (dP^T - delta_i)
      dK   = dK + dS^T Q_i

With keys as rows, P^T and dS^T are operands as they are in registers. Where registers have no room for both sums, one
launch makes dV and another dK. A CTA alone owns what it sums, so every sum has one order.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma.cta import Cta, Tile, buffer, by_piece, columns
from jflash._backends.mosaic_gpu_mma.device_sums import Sums
from jflash._backends.mosaic_gpu_mma.ops import MmaOps
from jflash._backends.mosaic_gpu_mma.own_keys import KeysPlan
from jflash._backends.mosaic_gpu_mma.products import Operand, Tiles
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import along_columns
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.tile import base2, dropped, operand_pieces
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_order import TileOrder
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics.spec import Spec

BOTH: tuple[str, ...] = ("d_key", "d_value")

Carry = tuple[dict[str, Tiles], tuple[Sums, ...]]
"""dK and dV by name, and for each block of keys the sums of parameters' gradients for one head."""


def shared_memory(spec: Spec, tile: Tile, outputs: tuple[str, ...] = BOTH) -> Buffers:
    """The kernel's buffers."""
    head_columns, value_columns = columns(spec.head_dim), columns(spec.value_dim)
    return Buffers(
        k=None if tile.streams else buffer(spec, tile.rows, head_columns),
        v=buffer(spec, tile.rows, value_columns) if "d_key" in outputs and not tile.streams else None,
        q=buffer(spec, tile.stages, tile.size, head_columns),
        do=buffer(spec, tile.stages, tile.size, value_columns),
    )


@dataclasses.dataclass(frozen=True)
class DkvPlan(KeysPlan):
    """A kernel for dK and dV, or one of them, before any array. It sums the gradient of a bias of keys over queries."""

    outputs: tuple[str, ...]

    @property
    def launch(self) -> Launch:
        """The kernel's grid, results and shared memory."""
        spec = self.spec
        results = {name: gradient for name, gradient in self.gradients.items() if name in self.outputs}
        return Launch(
            name=f"jflash_mma_{'_'.join(self.outputs)}_{spec.head_dim}_{spec.value_dim}",
            grid=self.grid,
            results=results | self.sums.results(spec.batch, spec.heads, self.key_rows),
            smem=shared_memory(spec, self.tile, self.outputs),
        )


def body(plan: DkvPlan, refs: Refs, ops: MmaOps) -> None:
    """Run one warpgroup of the kernel."""
    _Cta(plan, refs, ops).run()


class _Cta(Cta[DkvPlan]):
    def __init__(self, plan: DkvPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops, keys_first=True)
        wave, block, item = map(lax.axis_index, ("wave", "block", "item"))
        self.item = plan.schedule.item(wave, item)
        first = block * plan.tile.rows
        self.keys = [pl.ds(first + number * WARPGROUP_ROWS, WARPGROUP_ROWS) for number in range(plan.tile.blocks)]
        tiles = tile_range.visited(self.inputs, self.item.batch, block, plan.tile.rows, plan.tile.size)
        self.order = TileOrder(plan.spec, tiles, plan.schedule.heads, block, by_head=bool(plan.sums))

    def run(self) -> None:
        """Walk over the tiles of queries, and store the sums."""
        plan, spec, ops, results = self.plan, self.plan.spec, self.ops, self.refs.results
        batch, blocks = self.item.batch, plan.tile.blocks
        buffers = dict(key=self.smem.k) | (dict(value=self.smem.v) if "d_key" in plan.outputs else {})
        place = batch, self.item.key_head, self.keys[0].start
        rows = [self.own_rows(name, *place, buffer) for name, buffer in buffers.items()]
        self._copy_tile(jnp.int32(0))
        nothing = lambda: tuple(plan.sums.zeros(ops) for _ in self.keys)

        def finish_head(head: Any, carry: Carry) -> Carry:
            acc, sums = carry
            for keys, of_keys in zip(self.keys, sums, strict=True):
                plan.sums.store(results, of_keys, batch, self.item.first_head + head, keys)
            return acc, nothing()

        dims = dict(zip(BOTH, (spec.head_dim, spec.value_dim), strict=True))
        start = {name: self.zeros(blocks, columns(dims[name])) for name in plan.outputs}
        own = self.own_operands(*rows)
        visit = lambda *place_and_carry: self._visit(own, *place_and_carry)
        acc, _ = self.order.each(visit, (start, nothing()), finish_head)
        for name, sums in acc.items():
            for keys, total in zip(self.keys, sums, strict=True):
                scaled = dropped.scaled(spec, total) if name == "d_value" else total * base2.sums_scale(spec)
                self._store(name, scaled, keys.start)

    def _store(self, name: str, total: Array, first: Any) -> None:
        target = self.plan.gradient_of(self.refs.results[name], self.item)
        self.ops.store_rows(total, target, first, target.shape[0])

    def _copy_tile(self, step: Array) -> None:
        count = self.order.tiles.count

        @pl.when(step < count * self.order.heads)
        def _() -> None:
            head, index = self.order.at(step, count)
            place = self.item.batch, self.item.first_head + head, self.order.tiles.start(index)
            self.copy("query", *place, self.smem.q.at[self.slot(step)])
            self.copy("d_out", *place, self.smem.do.at[self.slot(step)])

        self.ops.commit()

    def _visit(self, own: Sequence[Operand], step: Array, head: Any, index: Any, carry: Carry) -> Carry:
        """Add one tile's part to the sums."""
        acc, sums = dict(carry[0]), carry[1]
        plan, spec, tile, shared, ops = self.plan, self.plan.spec, self.plan.tile, self.smem, self.ops
        slot, shape = self.slot(step), (WARPGROUP_ROWS, tile.size)
        batch, own_head, start = self.item.batch, self.item.first_head + head, self.order.tiles.start(index)
        at = [TileCoord(batch, own_head, start, keys.start) for keys in self.keys]
        q, do, blocks = shared.q.at[slot], shared.do.at[slot], range(tile.blocks)
        ops.wait()
        if tile.stages > 1:
            self._copy_tile(step + 1)
        rows = batch, own_head, pl.ds(start, tile.size)
        lse, delta = (along_columns(ops.load(self.refs.arrays[name].at[rows], 1), shape) for name in ("lse", "delta"))
        loaded = [self.load(one, shape) for one in at]
        s = self.add_product(self.zeros(tile.blocks, tile.size), own[0], q, transposed=True)
        contexts = [TileContext(self.inputs, self.order.tiles, index, at[block], loaded[block]) for block in blocks]
        tiles = [BackwardTile.of(*both, lse, plan.sums.names) for both in zip(contexts, s, strict=True)]
        if "d_value" in acc:
            kept = by_piece(operand_pieces.split(spec, one.kept, ops) for one in tiles)
            acc["d_value"] = self.add_product(acc["d_value"], kept, do, transposed=False)
        if "d_key" in acc:
            dp = self.add_product(self.zeros(tile.blocks, tile.size), own[1], do, transposed=True)
            gradients = [one.differentiate(dp[block], delta) for block, one in enumerate(tiles)]
            sums = tuple(plan.sums.added(total, one.parameters) for total, one in zip(sums, gradients, strict=True))
            ds = by_piece(operand_pieces.split(spec, one.ds, ops) for one in gradients)
            acc["d_key"] = self.add_product(acc["d_key"], ds, q, transposed=False)
        if tile.stages == 1:
            ops.wait()
            self._copy_tile(step + 1)
        return acc, sums
