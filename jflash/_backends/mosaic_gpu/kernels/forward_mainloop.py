"""The forward's main loop: one warpgroup's online softmax over the tiles of keys of one work item."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import logits
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Refs, WarpgroupOps, round_up
from jflash._backends.mosaic_gpu.inputs import TileCoord, bias_columns
from jflash._backends.mosaic_gpu.kernels.cta import Cta
from jflash._backends.mosaic_gpu.kernels.forward_plan import ForwardPlan
from jflash._backends.mosaic_gpu.online_softmax import Softmax
from jflash._backends.mosaic_gpu.schedule import TileMask, TileRange, tile_range


class ForwardCta(Cta[ForwardPlan]):
    """The place of a CTA in the grid, and the work items that it takes."""

    def __init__(self, plan: ForwardPlan, refs: Refs, ops: WarpgroupOps) -> None:
        heads = plan.heads // plan.schedule.head_groups
        self.head = lax.axis_index("head_group") * heads + lax.axis_index("head")
        self.split = lax.axis_index("split")
        self.form, self.shape = logits.form(plan.spec), (WARPGROUP_ROWS, plan.tile.keys)
        has_bias = not self.form.bias_by_mma
        super().__init__(plan, refs, ops, packed_heads=plan.packed_heads, has_bias=has_bias)
        q_o = tuple(refs.smem.q_o)
        self.q, self.o = q_o[0], q_o[-1]
        self.place = lax.axis_index("block"), lax.axis_index("batch")

    def item(self, index: Any) -> tuple[Array, Array, TileRange]:
        """A work item's batch entry, block of queries and tiles of keys. Blocks that see most keys begin first, so
        that none of them is left at the end alone."""
        plan = self.plan
        batch, turn = plan.schedule.item(self.place, index)
        block = plan.schedule.blocks - 1 - turn
        tile = plan.tile
        tiles = tile_range.key_tiles(self.inputs, batch, block, tile.rows, tile.keys, plan.missing_rows)
        return batch, block, tiles.split(self.split, plan.splits)

    def block_start(self, block: Any) -> Any:
        """The first row of a block."""
        return tile_range.block_start(block, self.plan.tile.rows, self.plan.missing_rows)


@dataclasses.dataclass(frozen=True)
class MainLoop:
    """A warpgroup's walk over the tiles of keys of one work item."""

    cta: ForwardCta
    tiles: TileRange
    at: TileCoord
    visited: Int[Array, ""] | int

    def run(self, q_read: Callable[[], None]) -> tuple[Softmax, Float[Array, "rows D"]]:
        """The softmax's state, and O, after all tiles; `q_read` is called when the queries are not needed any more."""
        plan, ops = self.cta.plan, self.cta.ops
        start, stop, loop = 0, self.tiles.count, self
        # A warpgroup leaves out tiles that only other rows of its CTA see.
        skips = plan.tile.rows > plan.tile.keys
        if skips:
            start, stop, own = tile_range.own_key_tiles(self.cta.inputs, self.tiles, self.at)
            loop = dataclasses.replace(self, tiles=own)
            lax.fori_loop(0, start, self._leave, None)
        state = loop._first_tile(start)
        acc_o = ops.full((WARPGROUP_ROWS, round_up(plan.spec.value_dim, 16)), 0)
        state, acc_o = lax.fori_loop(start + 1, stop, loop._next_tile, (state, acc_o))
        q_read()
        acc_o = loop._last_product(stop, state, acc_o)
        if skips:
            lax.fori_loop(stop, self.tiles.count, self._leave, None)
        return state, acc_o

    def _slot(self, index: Any) -> Any:
        return lax.rem(self.visited + index, self.cta.plan.tile.stages)

    def _prefetch(self, index: Any) -> dict[str, Array]:
        at = self.at._replace(key=self.tiles.start(index))
        return self.cta.form.prefetch(self.cta.inputs, at, self.cta.plan.tile)

    def _issue_s(self, acc_s: Any, slot: Any) -> None:
        shared = self.cta.smem
        self.cta.ops.mma(acc_s, self.cta.q.at[self.cta.warpgroup], shared.k.at[slot].T)
        if shared.bias_columns is not None:
            bias_columns.add(acc_s, shared.bias_columns.at[slot], self.cta.ops)

    def _softmax(self, s: Array, index: Any, before: Softmax | None, loaded: dict[str, Array]) -> Softmax:
        shared, ops, slot = self.cta.smem, self.cta.ops, self._slot(index)
        at = self.at._replace(key=self.tiles.start(index))
        if shared.bias is not None:
            loaded = loaded | {"bias": ops.load(shared.bias.at[slot, self.cta.own])}
            # A copy may overwrite what threads have read.
            plgpu.commit_smem()
        plgpu.barrier_arrive(shared.k_empty.at[slot])
        mask = TileMask(self.cta.inputs, self.tiles, index, at, loaded)
        return self.cta.form.step(s, mask, before, self.cta.plan.spec.dtype)

    def _first_tile(self, start: Any) -> Softmax:
        ops = self.cta.ops
        slot, loaded = self._slot(jnp.int32(start)), self._prefetch(start)
        plgpu.barrier_wait(self.cta.smem.k_full.at[slot])

        def product(acc_s: Any) -> Array:
            self._issue_s(acc_s, slot)
            return ops.read(acc_s)

        s = ops.accumulators(product, self.cta.shape)
        return self._softmax(s, jnp.int32(start), None, loaded)

    def _next_tile(self, index: Array, carry: tuple[Softmax, Array]) -> tuple[Softmax, Array]:
        state, acc_o = carry
        cta, shared, ops = self.cta, self.cta.smem, self.cta.ops
        slot, last = self._slot(index), self._slot(index - 1)
        loaded = self._prefetch(index)
        is_masked = self.tiles.whole is not None
        fence = cta.form.scheduling_fence(cta.plan.spec, cta.plan.tile, is_masked=is_masked)
        plgpu.barrier_wait(shared.k_full.at[slot])

        def attend_tile(acc_o: Any) -> Softmax:
            def overlap(acc_s: Any) -> Softmax:
                self._issue_s(acc_s, slot)
                plgpu.barrier_wait(shared.v_full.at[last])
                ops.mma(acc_o, state.p, shared.v.at[last])
                new = self._softmax(ops.read(acc_s, pending=1), index, state, loaded)
                if fence is not None:
                    # Four threads write one number: racecheck reports it.
                    shared.fence[self.cta.warpgroup] = getattr(new, fence)
                return new

            return ops.accumulators(overlap, cta.shape)

        state, (acc_o,) = ops.accumulate(attend_tile, acc_o, like=state)
        plgpu.barrier_arrive(shared.v_empty.at[last])
        return state, cta.form.rescaled(cta.inputs, state, acc_o)

    def _last_product(self, stop: Any, state: Softmax, acc_o: Array) -> Array:
        shared, last = self.cta.smem, self._slot(stop - 1)
        plgpu.barrier_wait(shared.v_full.at[last])
        acc_o = self.cta.ops.add_matmul(acc_o, state.p, shared.v.at[last])
        plgpu.barrier_arrive(shared.v_empty.at[last])
        return acc_o

    def _leave(self, index: Array, _: None) -> None:
        """Pass a tile by that no row of this warpgroup sees."""
        shared, slot = self.cta.smem, self._slot(index)
        for full, empty in ((shared.k_full, shared.k_empty), (shared.v_full, shared.v_empty)):
            plgpu.barrier_wait(full.at[slot])
            plgpu.barrier_arrive(empty.at[slot])
