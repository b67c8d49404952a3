"""The gradient of a bias with a query and a key axis: a CTA owns a tile of it, and visits all heads that share it.

    for each batch entry and head that share the bias:
      S  = Q K^T
      dP = dO V^T
      P  = exp(S - lse)
      dB = dB + P (dP - delta)

Two of the backward's products are made again. They cost less than adding up, in device memory, an array of the bias's
size in float32 for every batch entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import exponent, logits
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Buffers, along_rows, round_up
from jflash._backends.mosaic_gpu.inputs import TileCoord, dropped
from jflash._backends.mosaic_gpu.kernels.launch import Launch, Refs
from jflash._backends.mosaic_gpu.schedule import DbiasSchedule, TileMask, tile_range
from jflash._backends.mosaic_gpu_mma.hardware import MmaOps
from jflash._backends.mosaic_gpu_mma.kernels import backward_dq
from jflash._backends.mosaic_gpu_mma.kernels.cta import Cta, Tile, TiledPlan, lending
from jflash._semantics.spec import Spec


def shared_memory(spec: Spec, tile: Tile) -> Buffers:
    """The kernel's buffers."""
    whole = backward_dq.shared_memory(spec, dataclasses.replace(tile, lends=False))
    return lending(whole, ("q", "k"), ("do", "v")) if tile.lends else whole


@dataclasses.dataclass(frozen=True)
class DbiasPlan(TiledPlan):
    """The kernel for the bias's gradient, before any array."""

    schedule: DbiasSchedule

    @property
    def launch(self) -> Launch:
        """The result is in whole tiles of keys."""
        spec, schedule, (_, _, rows, keys) = self.spec, self.schedule, self.schedule.shape
        return Launch(
            name=f"jflash_mma_d_bias_{spec.head_dim}_{spec.value_dim}",
            grid=schedule.grid | dict(block=schedule.blocks, tile=schedule.tiles),
            results=dict(d_bias=schedule.stored(spec, rows, round_up(keys, self.tile.size))),
            smem=shared_memory(spec, self.tile),
        )


def backward_dbias(plan: DbiasPlan, arrays: Mapping[str, Array], ops: MmaOps) -> Float[Array, "#B #N T S"]:
    """Launch the kernel; the gradient in the bias's shape."""
    return plan.schedule.summed(plan.spec, _Cta.launch(plan, arrays, ops)["d_bias"])


class _Cta(Cta[DbiasPlan]):
    def __init__(self, plan: DbiasPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops)
        self.block, self.first_key = lax.axis_index("block"), lax.axis_index("tile") * plan.tile.size
        self.rows = pl.ds(self.block * plan.tile.rows, WARPGROUP_ROWS)

    def run(self) -> None:
        """Add up a tile of the gradient, and store it."""
        tile, schedule, shape = self.plan.tile, self.plan.schedule, (WARPGROUP_ROWS, self.plan.tile.size)
        own = lax.axis_index("batch"), lax.axis_index("head")
        bias = self.load(TileCoord(*own, self.rows.start, self.first_key), shape)["bias"]
        first, visits = schedule.own_visits()
        visit = lambda step, total: self._visit(first + step, bias, total)
        total = lax.fori_loop(0, visits, visit, self.ops.full(shape, 0))
        target = self.refs.results["d_bias"].at[schedule.place()]
        columns = target.at[:, pl.ds(self.first_key, tile.size)]
        self.ops.store_rows(total, columns, self.rows.start, schedule.shape[2])

    def _visit(self, visit: Any, bias: Array, total: Array) -> Array:
        """Add one head's part."""
        tile, (batch, head) = self.plan.tile, self.plan.schedule.sharing(visit)
        tiles = tile_range.visited(self.inputs, batch, self.block, tile.rows, tile.size)
        seen = (self.first_key < tiles.first + tiles.count * tiles.size) & (self.first_key + tile.size > tiles.first)
        own = dataclasses.replace(tiles, first=self.first_key, count=jnp.int32(1))
        at = TileCoord(batch, head, self.rows.start, self.first_key)
        add = lambda total: total + self._part(at, own, bias)
        return add(total) if tiles.whole is None else lax.cond(seen, add, lambda total: total, total)

    def _part(self, at: TileCoord, tiles: Any, bias: Array) -> Array:
        shared, ops, spec, shape = self.smem, self.ops, self.plan.spec, (WARPGROUP_ROWS, self.plan.tile.size)
        key_head, lends = lax.div(at.head, spec.group), self.plan.tile.lends
        ops.wait()
        self.copy("query", at.batch, at.head, at.query, shared.q)
        self.copy("key", at.batch, key_head, at.key, shared.k.at[0])
        copy_others = lambda: (
            self.copy("d_out", at.batch, at.head, at.query, shared.do),
            self.copy("value", at.batch, key_head, at.key, shared.v.at[0]),
        )
        if not lends:
            copy_others()
        ops.commit()
        rows = at.batch, at.head, self.rows
        lse, delta = (along_rows(ops.load(self.refs.arrays[name].at[rows], 0), shape) for name in ("lse", "delta"))
        loaded = self.inputs.load_packed_mask(at, shape) | {"bias": bias}
        ops.wait()
        (s,) = self.add_product(self.zeros(1, shape[1]), shared.q, shared.k.at[0], transposed=True)
        if lends:
            ops.wait()
            copy_others()
            ops.commit()
            ops.wait()
        (dp,) = self.add_product(self.zeros(1, shape[1]), shared.do, shared.v.at[0], transposed=True)
        mask = TileMask(self.inputs, tiles, jnp.int32(0), at, loaded)
        to_p = lambda logits: exponent.exponent(spec)(logits, lse)
        p, pull_back = logits.differentiate(s, mask, to_p, ("bias",))
        p = dropped.signed(self.inputs, at, p)
        _, d_parameters = pull_back(dropped.d_logits(spec, p, dp, delta))
        return d_parameters["bias"]
