"""What kernels whose CTAs own keys have in common: their grid, their walk over queries, and where dK and dV go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma.cta import Cta, MmaOps, TiledPlan
from jflash._backends.mosaic_gpu_mma.products import Operand, Tiles
from jflash._backends.mosaic_gpu_mma.run import MmaBackward
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Refs, cta_index
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import round_up
from jflash._backends.nvidia.tile import dropped
from jflash._backends.nvidia.tile.backward_tile import BackwardTile, TileGradients
from jflash._backends.nvidia.tile.gradient_sums import SummingPlan, Sums
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.tile_order import TileOrder
from jflash._backends.nvidia.walk.tile_range import Place, TileContext, VisitedTile

Carry = tuple[dict[str, Tiles], tuple[Sums, ...]]
"""dK and dV by name, and for each block of keys the sums of parameters' gradients for one head."""


@dataclasses.dataclass(frozen=True)
class KeysPlan(SummingPlan, TiledPlan):
    """A kernel whose CTAs own keys, before any array. It sums parameters' gradients over queries."""

    schedule: BackwardSchedule

    def arrays(self, call: MmaBackward) -> dict[str, Array]:
        blocks = Blocks(self.tile.rows, self.tile.size, self.schedule.heads, of_keys=True)
        return call.read(keys_first=True) | call.visits(blocks)

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        dims = self.spec.head_dim, self.spec.value_dim
        return super().finish(made, changed) | self.schedule.summed(self.spec, made, dims)

    @property
    def key_rows(self) -> int:
        """The rows of all blocks of keys."""
        return self.schedule.blocks * self.tile.rows

    @property
    def gradients(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes in which dK and dV are stored, by name."""
        dims = dict(d_key=round_up(self.spec.head_dim, 8), d_value=round_up(self.spec.value_dim, 8))
        stored = lambda dim: self.schedule.gradient(self.spec, (self.spec.key_length, dim), (self.key_rows, dim))
        return {name: stored(dim) for name, dim in dims.items()}


class KeysCta[Plan: KeysPlan](Cta[Plan]):
    """A CTA that owns keys, and walks over the tiles of queries that see them."""

    sums_place: tuple[Any, ...] = ()
    """Where among a head's sums of parameters' gradients the warpgroup stores its own."""

    def __init__(self, plan: Plan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops, keys_first=True)
        wave, self.block, item = map(cta_index, ("wave", "block", "item"))
        self.item = plan.schedule.item(wave, item)
        self.keys = list(self.blocks_from(self.block * plan.tile.rows))
        tiles = self.visited(Place(self.item.batch, self.item.head_group, self.block))
        self.order = TileOrder(plan.spec, tiles, plan.schedule.heads, self.block, by_head=bool(plan.sums))

    def begin(self, step: Array, copy: Callable[[Any, Any], None]) -> None:
        """Begin what `copy(head, first_query)` copies of a step's tile, if there is such a step."""
        count = self.order.tiles.count

        @pl.when(step < count * self.order.heads)
        def _() -> None:
            head, index = self.order.at(step, count)
            copy(self.item.first_head + head, self.order.tiles.start(index))

        self.ops.commit()

    def walk(self, rows: Sequence[Ref], outputs: Sequence[str]) -> None:
        """Visit all tiles with the CTA's rows, and store dK and dV, or one of both, and the sums for parameters."""
        spec, sums = self.plan.spec, self.plan.sums
        widths = dict(d_key=self.smem.query.shape[-1], d_value=self.smem.d_out.shape[-1])
        acc = {name: self.accumulators(widths[name]) for name in outputs}
        nothing = lambda: tuple(sums.zeros(self.ops) for _ in self.keys)

        def finish_head(head: Any, carry: Carry) -> Carry:
            for keys, of_keys in zip(self.keys, carry[1], strict=True):
                place = self.item.batch, self.item.first_head + head, *self.sums_place, keys
                sums.store(self.refs.results, of_keys, *place)
            return carry[0], nothing()

        held = self.held(rows)
        visit = lambda *place_and_carry: self.visit(held, *place_and_carry)
        acc, _ = self.order.each(visit, (acc, nothing()), finish_head)
        scaled = dict(d_key=lambda dk: dk * facts_of(spec).sums_scale, d_value=lambda dv: dropped.scaled(spec, dv))
        stores_sums, item = self.plan.schedule.stores_sums, self.item
        for name, totals in acc.items():
            head = item.head_group if stores_sums else item.key_head
            result = self.refs.results[name].at[item.batch]
            target = result.at[head] if stores_sums else result.at[:, head]
            self.store(map(scaled[name], totals), target)

    def accumulators(self, width: int) -> Tiles:
        """Return zeros for the gradient of the CTA's rows."""
        return self.zeros(self.plan.tile.blocks, width)

    def visit(self, own: Sequence[Operand], step: Array, head: Any, index: Any, carry: Carry) -> Carry:
        """Add one tile's part to the sums."""
        raise NotImplementedError

    def store(self, totals: Iterable[Array], target: Ref) -> None:
        """Store the gradient of the CTA's rows in `[L, H]`."""
        for keys, total in zip(self.keys, totals, strict=True):
            self.ops.store_rows(total, target, keys.start, target.shape[0])

    def tiles(
        self, visited: VisitedTile, at: Sequence[TileCoord], loaded: Sequence[dict[str, Array]], s: Tiles, lse: Array
    ) -> list[BackwardTile]:
        """Return a visited tile for each block of keys, from its products S."""
        of_block = lambda at, loaded, s: BackwardTile.of(
            TileContext(self.inputs, visited, at, loaded), s, lse, self.plan.differentiated
        )
        return list(map(of_block, at, loaded, s))

    def differentiate(
        self, tiles: Sequence[BackwardTile], dp: Tiles, delta: Array, sums: Sequence[Sums]
    ) -> tuple[list[TileGradients], tuple[Sums, ...]]:
        """Return what each tile gives, and the sums of parameters' gradients with it."""
        gradients = [one.differentiate(of_block, delta) for one, of_block in zip(tiles, dp, strict=True)]
        added = self.plan.sums.added
        return gradients, tuple(added(total, one.parameters) for total, one in zip(sums, gradients, strict=True))
