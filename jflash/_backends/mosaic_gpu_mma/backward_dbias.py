"""The gradient of a bias with a query and a key axis: a CTA owns a tile of it, and visits all heads that share it.

    for each batch entry and head that share the bias:
      S  = Q K^T                      copies of the next Q and K run beside what follows
      dP = dO V^T                     likewise of dO and V
      P  = exp(S - lse)
      dB = dB + P (dP - delta)

Two of the backward's products are made again. They cost less than adding up, in device memory, an array of the bias's
size in float32 for every batch entry. Each warpgroup has 64 rows, and copies some chunks of the keys for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma.cta import Cta, MmaOps, TiledPlan, bias_buffer, buffer, columns
from jflash._backends.mosaic_gpu_mma.products import Tiles
from jflash._backends.mosaic_gpu_mma.run import MmaBackward
from jflash._backends.mosaic_gpu_mma.tiles import DbiasTile
from jflash._backends.nvidia.launch import Launch, Refs, cta_index
from jflash._backends.nvidia.ops import along_rows
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.dbias_schedule import DbiasSchedule
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.tile_range import Place, TileContext, VisitedTile

_OPERANDS = ("query", "key"), ("d_out", "value")
"""The operands of S, and those of dP."""


@dataclasses.dataclass(frozen=True)
class DbiasPlan(TiledPlan):
    """The kernel for the bias's gradient, before any array."""

    tile: DbiasTile
    schedule: DbiasSchedule

    @property
    def chunk(self) -> int:
        """How many keys of a tile a product has, and a warpgroup copies, at a time."""
        return min(self.tile.size // self.tile.blocks, 64)

    def arrays(self, call: MmaBackward) -> dict[str, Array]:
        return call.read() | call.kinds(Blocks(self.tile.rows, self.tile.size))

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        return dict(whole_d_bias=self.schedule.summed(self.spec, made["d_bias"]))

    @property
    def launch(self) -> Launch:
        """The kernel's grid, shared memory, and result in whole tiles of keys."""
        spec, tile, schedule, (_, _, rows, keys) = self.spec, self.tile, self.schedule, self.schedule.shape
        return Launch(
            name=f"jflash_mma_d_bias_{spec.head_dim}_{spec.value_dim}",
            grid=schedule.grid | dict(block=schedule.blocks, tile=schedule.tiles),
            results=dict(d_bias=schedule.stored(spec, rows, round_up(keys, tile.size))),
            smem=self._smem,
            warpgroups=tile.blocks if tile.blocks > 1 else None,
        )

    @property
    def _smem(self) -> Buffers:
        """Each warpgroup's rows, all chunks of keys, and the bias of both."""
        spec, tile, chunks = self.spec, self.tile, self.tile.size // self.chunk
        rows = lambda dim: buffer(spec, tile.blocks, WARPGROUP_ROWS, columns(dim))
        keys = lambda dim: buffer(spec, chunks, self.chunk, columns(dim))
        buffers = dict(query=rows(spec.head_dim), d_out=rows(spec.value_dim))
        buffers |= dict(key=keys(spec.head_dim), value=keys(spec.value_dim))
        bias = bias_buffer(spec, tile.blocks, chunks, WARPGROUP_ROWS, self.chunk)
        if not tile.lends:
            return Buffers(**buffers, bias=bias)
        of_products = (Buffers(**{name: buffers[name] for name in names}) for names in _OPERANDS)
        return Buffers(lent=plgpu.RefUnion(*of_products), bias=bias)


class DbiasCta(Cta[DbiasPlan]):
    """A warpgroup of the kernel for the bias's gradient."""

    def __init__(self, plan: DbiasPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops)
        self.buffers: dict[str, Any] = dict(vars(refs.smem))
        if plan.tile.lends:
            first, second = refs.smem.lent
            self.buffers |= vars(first) | vars(second)
        self.warpgroup: Any = lax.axis_index("warpgroup") if self.warpgroups > 1 else 0
        self.block, self.first_key = cta_index("block"), cta_index("tile") * plan.tile.size
        self.query = self.block * plan.tile.rows + self.warpgroup * WARPGROUP_ROWS
        self.shape = WARPGROUP_ROWS, plan.chunk
        self.keys = [self.first_key + first for first in range(0, plan.tile.size, plan.chunk)]
        """The first key of each chunk."""
        self.first, visits = plan.schedule.own_visits()
        self.stop = self.first + visits

    def run(self) -> None:
        """Add up a tile of the gradient, and store it."""
        schedule, bias = self.plan.schedule, self.smem.bias
        at = [TileCoord(cta_index("batch"), cta_index("head"), self.query, key) for key in self.keys]
        biases: list[Array] = []
        for chunk, of_chunk in enumerate(at):
            if bias is None:
                biases.append(self.load_bias(of_chunk, self.shape))
            else:
                self.copy_bias(of_chunk, bias.at[self.warpgroup, chunk])
        self._copy_ahead(self.first)
        visit = lambda number, totals: self._visit(number, biases, totals)
        totals = lax.fori_loop(self.first, self.stop, visit, self.zeros(len(self.keys), self.plan.chunk))
        target = self.refs.results["d_bias"].at[schedule.place()]
        for total, key in zip(totals, self.keys, strict=True):
            self.ops.store_rows(total, target.at[:, pl.ds(key, self.plan.chunk)], self.query, schedule.shape[2])

    def _copy_ahead(self, visit: Any) -> None:
        """Begin to copy what has room before a visit begins."""
        for product in range(1 if self.plan.tile.lends else 2):
            self._copy(visit, product)

    def _copy(self, visit: Any, product: int) -> None:
        """Begin to copy the operands of a visit's S or dP, if there is such a visit and it sees some of the keys."""

        def copy() -> None:
            rows, keys = _OPERANDS[product]
            (batch, head), own = self.plan.schedule.sharing(visit), self.warpgroup
            self.copy(rows, batch, head, self.query, self.buffers[rows].at[own])
            for chunk in range(0, len(self.keys), self.warpgroups):
                first = self.first_key + (chunk + own) * self.plan.chunk
                key_head = lax.div(head, self.plan.spec.group)
                self.copy(keys, batch, key_head, first, self.buffers[keys].at[chunk + own])

        @pl.when(visit < self.stop)
        def _() -> None:
            _, is_seen = self._tile(visit)
            copy() if is_seen is None else pl.when(is_seen)(copy)

        self.ops.commit()

    def _tile(self, visit: Any) -> tuple[VisitedTile, Any]:
        """Return a visit's tile, and whether its rows see some of the keys; `None` if they all do."""
        place, tile = Place(*self.plan.schedule.sharing(visit), self.block), self.plan.tile
        visited, is_seen = tile_range.seen_tile(self.inputs, place, tile.rows, self.first_key, tile.size)
        return visited, None if visited.is_partial is None else is_seen

    def _visit(self, visit: Any, biases: Sequence[Array], totals: Tiles) -> Tiles:
        """Add one head's part, if its rows see some of the keys."""
        tile, is_seen = self._tile(visit)
        add = lambda totals: self._added(visit, tile, biases, totals)

        def skip(totals: Tiles) -> Tiles:
            self._copy_ahead(visit + 1)
            return totals

        return add(totals) if is_seen is None else lax.cond(is_seen, add, skip, totals)

    def _added(self, visit: Any, tile: VisitedTile, biases: Sequence[Array], totals: Tiles) -> Tiles:
        ops, lends, warpgroups = self.ops, self.plan.tile.lends, self.warpgroups
        # dO and V come while S is made, if they have room of their own.
        pending = 0 if lends else 1
        batch, head = self.plan.schedule.sharing(visit)
        statistics = self.statistics(batch, head, pl.ds(self.query, WARPGROUP_ROWS), 0)
        lse, delta = (along_rows(statistic, self.shape) for statistic in statistics)
        ops.wait(pending, warpgroups=warpgroups)
        s = self._products(visit, 0)
        ops.meet(warpgroups)
        self._copy(visit, 1) if lends else self._copy(visit + 1, 0)
        ops.wait(pending, warpgroups=warpgroups)
        dp = self._products(visit, 1)
        ops.meet(warpgroups)
        self._copy(visit + 1, 0) if lends else self._copy(visit + 1, 1)
        added, bias = list[Array](), self.smem.bias
        for chunk, key in enumerate(self.keys):
            at = TileCoord(batch, head, self.query, key)
            own_bias = biases[chunk] if bias is None else ops.load_rows(bias.at[self.warpgroup, chunk])[0][0]
            loaded = self.inputs.load_packed_mask(at, self.shape) | {"bias": own_bias}
            context = TileContext(self.inputs, tile.part(key, self.plan.chunk), at, loaded)
            gradients = BackwardTile.of(context, s[chunk], lse, ("bias",)).differentiate(dp[chunk], delta)
            added.append(totals[chunk] + gradients.parameters["bias"])
        return tuple(added)

    def _products(self, visit: Any, product: int) -> list[Array]:
        """Return S or dP of this warpgroup's rows and each chunk of the keys."""
        rows, keys = (self.buffers[name] for name in _OPERANDS[product])
        own = rows.at[self.warpgroup]
        zeros = lambda: self.zeros(1, self.plan.chunk)
        return [self.add_product(zeros(), own, keys.at[chunk], transposed=True)[0] for chunk in range(len(self.keys))]
