"""The gradient of a bias with a query and a key axis: a CTA owns a tile of it, and visits all heads that share it.

    for each batch entry and head that share the bias:
      S  = Q K^T                      copies of the next Q and K run beside what follows
      dP = dO V^T                     likewise of dO and V
      P  = exp(S - lse)
      dB = dB + P (dP - delta)

Two of the backward's products are made again. They cost less than adding up, in device memory, an array of the bias's
size in float32 for every batch entry. Each warpgroup has 64 rows, and copies some parts of the keys for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma.cta import Cta, Tile, TiledPlan, bias_buffer, buffer, columns, lending
from jflash._backends.mosaic_gpu_mma.ops import MmaOps
from jflash._backends.mosaic_gpu_mma.prepared import MmaBackward
from jflash._backends.mosaic_gpu_mma.products import Tiles
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import Ref, along_rows
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.dbias_schedule import DbiasSchedule
from jflash._backends.nvidia.walk.tile_range import TileContext, TileRange
from jflash._semantics.spec import Spec


def part_of_keys(tile: Tile) -> int:
    """How many keys of a tile a product has, and a warpgroup copies, at a time."""
    return min(tile.size // tile.warpgroups, 64)


def shared_memory(spec: Spec, tile: Tile) -> Buffers:
    """The kernel's buffers: of each warpgroup its rows, its part of the keys, and the bias of these and those."""
    own, width = tile.warpgroups, part_of_keys(tile)
    parts, head_columns, value_columns = tile.size // width, columns(spec.head_dim), columns(spec.value_dim)
    whole = Buffers(
        q=None if tile.streams else buffer(spec, own, WARPGROUP_ROWS, head_columns),
        do=None if tile.streams else buffer(spec, own, WARPGROUP_ROWS, value_columns),
        k=buffer(spec, parts, width, head_columns),
        v=buffer(spec, parts, width, value_columns),
        bias=bias_buffer(spec, own, parts, WARPGROUP_ROWS, width),
    )
    return lending(whole, ("q", "k"), ("do", "v")) if tile.lends else whole


@dataclasses.dataclass(frozen=True)
class DbiasPlan(TiledPlan):
    """The kernel for the bias's gradient, before any array."""

    schedule: DbiasSchedule

    def arrays(self, call: MmaBackward) -> dict[str, Array]:
        return call.of_queries | call.ranges(self.tile.rows)

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        return dict(whole_d_bias=self.schedule.summed(self.spec, made["d_bias"]))

    @property
    def launch(self) -> Launch:
        """The result is in whole tiles of keys."""
        spec, schedule, (_, _, rows, keys) = self.spec, self.schedule, self.schedule.shape
        return Launch(
            name=f"jflash_mma_d_bias_{spec.head_dim}_{spec.value_dim}",
            grid=schedule.grid | dict(block=schedule.blocks, tile=schedule.tiles),
            results=dict(d_bias=schedule.stored(spec, rows, round_up(keys, self.tile.size))),
            smem=shared_memory(spec, self.tile),
            warpgroups=self.tile.warpgroups if self.tile.warpgroups > 1 else None,
        )


def body(plan: DbiasPlan, refs: Refs, ops: MmaOps) -> None:
    """Run one warpgroup of the kernel."""
    _Cta(plan, refs, ops).run()


class _Cta(Cta[DbiasPlan]):
    def __init__(self, plan: DbiasPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops)
        tile = plan.tile
        self.warpgroup: Any = lax.axis_index("warpgroup") if tile.warpgroups > 1 else 0
        self.block, self.first_key = lax.axis_index("block"), lax.axis_index("tile") * tile.size
        self.query = self.block * tile.rows + self.warpgroup * WARPGROUP_ROWS
        self.width = part_of_keys(tile)
        self.parts = [self.first_key + first for first in range(0, tile.size, self.width)]
        """The first key of each part."""
        self.first, visits = plan.schedule.own_visits()
        self.stop = self.first + visits

    def run(self) -> None:
        """Add up a tile of the gradient, and store it."""
        ops, schedule, shared = self.ops, self.plan.schedule, self.smem
        own = [TileCoord(lax.axis_index("batch"), lax.axis_index("head"), self.query, key) for key in self.parts]
        biases: list[Array] = []
        for part, at in enumerate(own):
            if shared.bias is None:
                biases.append(self.load_bias(at, (WARPGROUP_ROWS, self.width)))
            else:
                self.copy_bias(at, shared.bias.at[self.warpgroup, part])
        self._copy_ahead(self.first)
        visit = lambda number, totals: self._visit(number, biases, totals)
        totals = lax.fori_loop(self.first, self.stop, visit, self.zeros(len(self.parts), self.width))
        target = self.refs.results["d_bias"].at[schedule.place()]
        for total, key in zip(totals, self.parts, strict=True):
            ops.store_rows(total, target.at[:, pl.ds(key, self.width)], self.query, schedule.shape[2])

    def _copy_first(self, visit: Any) -> None:
        """Begin to copy what a visit's S is made of."""
        self._copy(visit, ("query", self.smem.q), ("key", self.smem.k))

    def _copy_second(self, visit: Any) -> None:
        """Begin to copy what its dP is made of."""
        self._copy(visit, ("d_out", self.smem.do), ("value", self.smem.v))

    def _copy_ahead(self, visit: Any) -> None:
        """Begin to copy what has room before a visit begins."""
        self._copy_first(visit)
        if not self.plan.tile.lends:
            self._copy_second(visit)

    def _copy(self, visit: Any, of_rows: tuple[str, Ref | None], of_keys: tuple[str, Ref]) -> None:
        def copy() -> None:
            (batch, head), own = self.plan.schedule.sharing(visit), self.warpgroup
            if of_rows[1] is not None:
                self.copy(of_rows[0], batch, head, self.query, of_rows[1].at[own])
            for part in range(0, len(self.parts), self.plan.tile.warpgroups):
                first = self.first_key + (part + own) * self.width
                key_head = lax.div(head, self.plan.spec.group)
                self.copy(of_keys[0], batch, key_head, first, of_keys[1].at[part + own])

        @pl.when(visit < self.stop)
        def _() -> None:
            _, is_seen = self._tiles(visit)
            copy() if is_seen is None else pl.when(is_seen)(copy)

        self.ops.commit()

    def _tiles(self, visit: Any) -> tuple[TileRange, Any]:
        """What a visit's rows see, and whether they see some of the keys; `None` if they all do."""
        tile, (batch, _) = self.plan.tile, self.plan.schedule.sharing(visit)
        tiles = tile_range.visited(self.inputs, batch, self.block, tile.rows, tile.size)
        if tiles.whole is None:
            return tiles, None
        stop = tiles.first + tiles.count * tiles.size
        return tiles, (self.first_key < stop) & (self.first_key + tile.size > tiles.first)

    def _visit(self, visit: Any, biases: Sequence[Array], totals: Tiles) -> Tiles:
        """Add one head's part."""
        tiles, is_seen = self._tiles(visit)
        add = lambda totals: self._added(visit, tiles, biases, totals)

        def skip(totals: Tiles) -> Tiles:
            self._copy_ahead(visit + 1)
            return totals

        return add(totals) if is_seen is None else lax.cond(is_seen, add, skip, totals)

    def _added(self, visit: Any, tiles: TileRange, biases: Sequence[Array], totals: Tiles) -> Tiles:
        shared, ops, shape = self.smem, self.ops, (WARPGROUP_ROWS, self.width)
        lends, warpgroups = self.plan.tile.lends, self.plan.tile.warpgroups
        # dO and V come while S is made, if they have room of their own.
        pending = 0 if lends else 1
        batch, head = self.plan.schedule.sharing(visit)
        rows = batch, head, pl.ds(self.query, WARPGROUP_ROWS)
        lse, delta = (along_rows(ops.load(self.refs.arrays[name].at[rows], 0), shape) for name in ("lse", "delta"))
        ops.wait(pending, warpgroups=warpgroups)
        s = self._products(visit, "query", shared.q, shared.k)
        ops.meet(warpgroups)
        self._copy_second(visit) if lends else self._copy_first(visit + 1)
        ops.wait(pending, warpgroups=warpgroups)
        dp = self._products(visit, "d_out", shared.do, shared.v)
        ops.meet(warpgroups)
        self._copy_first(visit + 1) if lends else self._copy_second(visit + 1)
        added: list[Array] = []
        for part, key in enumerate(self.parts):
            at, of_part = TileCoord(batch, head, self.query, key), dict(first=key, count=jnp.int32(1), size=self.width)
            bias = biases[part] if shared.bias is None else ops.load_rows(shared.bias.at[self.warpgroup, part])[0][0]
            loaded = self.inputs.load_packed_mask(at, shape) | {"bias": bias}
            context = TileContext(self.inputs, dataclasses.replace(tiles, **of_part), jnp.int32(0), at, loaded)
            gradients = BackwardTile.of(context, s[part], lse, ("bias",)).differentiate(dp[part], delta)
            added.append(totals[part] + gradients.parameters["bias"])
        return tuple(added)

    def _products(self, visit: Any, name: str, rows: Ref | None, keys: Ref) -> list[Array]:
        """Of this warpgroup's rows and each part of the keys."""
        own = (
            self.streamed(name, *self.plan.schedule.sharing(visit), self.query)
            if rows is None
            else rows.at[self.warpgroup]
        )
        every = range(len(self.parts))
        return [self.add_product(self.zeros(1, self.width), own, keys.at[part], transposed=True)[0] for part in every]
