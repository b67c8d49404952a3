"""Forward of wide heads (`widths`): two warpgroups share the columns of a CTA's 64 rows of the output.

    the first warpgroup                                     the second and the third, each with half of V's columns
      S = Q K_j^T
      P, m, l = online softmax of S    --- P, rescale --->    O = O * rescale
                                                              O = O + P V_j
      after the last tile                 --- m, l --->       out = O / l;  lse = log l + m
    the producer warpgroup copies parts of tiles of keys, and of values, ahead of them into shared memory

O of 64 rows and 512 columns takes 256 registers of each thread of one warpgroup, or 128 of two. S is made once: with a
CTA for each half of the columns it would be made twice. Who makes it weighs nothing, so that the next S is made beside
the products of P; and it needs few registers, which the others have.

A part of a tile of keys leaves as soon as it has been read (`tile_parts`), and one of values likewise, so that there is
room for what comes next.

Counted, with H = D = 512: for 64 keys a CTA copies 128 KiB and makes 4.2 million multiply-adds, 32 for each byte. With
256, where a CTA has 128 rows, it makes 64. float32 in two pieces has as many bytes with H = D = 256, and 48 for each.
CTAs that read the same at the same time are served by one read of the second-level cache. Those that begin at different
times, as causal blocks do, are too many for it: so the CTAs of two neighbouring blocks copy each tile together. Such a
pair takes several pairs of blocks, one after the other (`dealt_items`).

Source: FlashMLA (github.com/deepseek-ai/FlashMLA), "A Deep Dive Into The New Flash MLA Kernel", has halves of the
columns in two warpgroups.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import dealt_items, piece_products, pipeline
from jflash._backends.mosaic_gpu.column_chunks import PartsRing
from jflash._backends.mosaic_gpu.forward_kernel import ForwardCta
from jflash._backends.mosaic_gpu.forward_wide_plan import HALVES, PAIR, WideForwardPlan
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.tma_inputs import GmemTile
from jflash._backends.nvidia.launch import Refs
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import dropped, operand_pieces, softmax
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.softmax import Softmax
from jflash._backends.nvidia.walk.tile_range import TileContext, TileRange
from jflash._semantics.dropout import HeadSeed


def forward(plan: WideForwardPlan, arrays: Mapping[str, Array], ops: WarpgroupOps) -> dict[str, Array]:
    """Launch the kernel; results as `forward.forward` has them, both in whole blocks of rows."""
    dealt = {} if plan.dealt is None else {dealt_items.TABLE: plan.dealt.table()}
    return _Cta.launch(plan, {**arrays, **dealt}, ops)


class _Item(NamedTuple):
    """A work item of a CTA."""

    at: TileCoord
    """Of its first tile."""
    block: Any
    """Of 64 rows."""
    tiles: TileRange
    before: Any
    """How many tiles came before, in others."""

    @property
    def stop(self) -> Any:
        """How many come before the next one."""
        return self.before + self.tiles.count


class _Copy(NamedTuple):
    """A copy of a part of a tile."""

    share: float
    """Of a tile that has been read when the part's slot is free."""
    issue: Callable[[_Item, Any], None]
    """Issues it, given the tile's index."""
    ahead: int
    """How many tiles ahead of the values that are read."""


class _Cta(ForwardCta):
    plan: WideForwardPlan  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, plan: WideForwardPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops)
        self.items = refs.arrays.get(dealt_items.TABLE)
        self.has_16_bits = operand_pieces.number(plan.spec) == 1
        # In lists: found before the warpgroups part, 16 bits take 0.98 of the time, float32 1.06 (one H100).
        self.found = self._item(0, 0) if self.items is None or self.has_16_bits else None
        self.keys = PartsRing(plan.key_parts, refs.smem.keys, plan.cluster)

    def rows(self, block: Any) -> Any:
        return pl.ds(self.block_start(block), WARPGROUP_ROWS)

    def run(self) -> None:
        halves = (functools.partial(self.weigh, half) for half in range(HALVES))
        for index, body in enumerate((self.make_weights, *halves, self.copy)):
            pl.when(self.warpgroup == index)(body)

    def _set_registers(self, count: int) -> None:
        pipeline.set_registers(count, self.plan.consumers + 1)

    def _each(self, body: Callable[[Any, _Item], None]) -> None:
        """`body(index, item)` for every work item of this CTA."""
        if self.items is None:
            body(0, self._first_item())
            return

        def visit(index: Any, before: Any) -> Any:
            item = self._item(index, before)
            body(index, item)
            return item.stop

        dealt_items.each(self.items, self.place[0], visit)

    def _if_next(self, index: Any, body: Callable[[Any], None], otherwise: Callable[[], None] = lambda: None) -> None:
        """`body(index + 1)`, if this CTA has such an item, else `otherwise()`."""
        if self.items is None:
            otherwise()
        else:
            dealt_items.if_next(self.items, self.place[0], index, body, otherwise)

    def _item(self, index: Any, before: Any) -> _Item:
        plan = self.plan
        if self.items is None:
            head, (batch, turn) = self.head, plan.schedule.item(self.place, index)
        else:
            head, batch, turn = dealt_items.place(self.items, self.place[0], index)
        number = plan.schedule.blocks - 1 - turn
        block = 2 * number + lax.axis_index(PAIR) if plan.in_pairs else number
        # Not `number`, with which ptxas spills 20 bytes more.
        tiles = self.visited(batch, lax.div(block, 2) if plan.in_pairs else block)
        return _Item(TileCoord(batch, head, self.block_start(block), 0), block, tiles, before)

    def _first_item(self) -> _Item:
        return self._item(0, 0) if self.found is None else self.found

    def _first_tile(self, number: Any) -> Any:
        """The index of an item's first tile: 0. Of plain logits of 16-bit operands ptxas spills less if the compiler
        cannot know that, of others more."""
        is_hidden = self.plan.is_plain and self.has_16_bits
        return self.ops.opaque_zero(jnp.int32(number)) if is_hidden else jnp.int32(0)

    def _copy_own_q(self, item: _Item) -> None:
        self.copy_queries(item.at.batch, item.at.head, item.block)

    def make_weights(self) -> None:
        """The first warpgroup makes P of every tile, and what earlier tiles' sums are multiplied with."""
        shared = self.smem
        pipeline.release(*(ring.empty for ring in (shared.keys, *shared.biases)))
        self._set_registers(self.plan.registers.weights)
        self._copy_own_q(self._first_item())
        self._each(self._make_weights)

    def _make_weights(self, number: Any, item: _Item) -> None:
        shared, plan = self.smem, self.plan
        seed = dropped.head_seed(self.inputs, item.at)
        plgpu.barrier_wait(shared.q_full.at[0])

        def visit(index: Array, before: Softmax | None) -> Softmax:
            state = self._softmax(item, index, before, seed)
            pieces = operand_pieces.split(plan.spec, state.p, self.ops)
            plgpu.barrier_wait(shared.p_empty)
            for target, piece in zip(piece_products.of_tile(plan.spec, shared.p), pieces, strict=True):
                target[...] = piece
            shared.rescale[...] = state.rescale
            plgpu.barrier_arrive(shared.p_full)
            return state

        last = lax.fori_loop(1, item.tiles.count, visit, visit(self._first_tile(number), None))
        self._if_next(number, lambda following: self._copy_own_q(self._item(following, item.stop)))
        shared.statistics[0], shared.statistics[1] = last.m, softmax.whole(last.l)
        plgpu.barrier_wait(shared.p_empty)
        plgpu.barrier_arrive(shared.p_full)

    def _softmax(self, item: _Item, index: Array, before: Softmax | None, seed: HeadSeed | None) -> Softmax:
        plan, inputs, ops, shape = self.plan, self.inputs, self.ops, self.shape
        at = item.at._replace(key=item.tiles.start(index))
        loaded = self.form.prefetch(inputs, at, plan.tile.keys, plan.tile.warpgroups)
        s = self.keys.product(plan.spec, self.q.at[ops.opaque_zero(index)], item.before + index, shape, ops)
        for bias in self.smem.biases:
            plgpu.barrier_wait(bias.full.at[0])
            loaded = loaded | {"bias": ops.load(bias.tiles.at[0])}
            # A copy may overwrite what threads have read.
            plgpu.commit_smem()
            plgpu.barrier_arrive(bias.empty.at[0])
        loaded = loaded | dropped.tile_words(inputs, at, shape, seed)
        return self.form.step(s, TileContext(inputs, item.tiles, index, at, loaded), before)

    def weigh(self, half: int) -> None:
        """Another warpgroup weighs half of the values' columns, and stores what it makes of them."""
        plan, shared = self.plan, self.smem
        parts = plan.value_parts // HALVES
        own = range(half * parts, (half + 1) * parts)
        pipeline.release(*(shared.values[part].empty for part in own))
        plgpu.barrier_arrive(shared.p_empty)
        self._set_registers(plan.registers.weigh)
        self._each(functools.partial(self._weigh, own))

    def _weigh(self, own: Sequence[int], number: Any, item: _Item) -> None:
        plan, shared, ops, spec = self.plan, self.smem, self.ops, self.plan.spec
        acc_o = tuple(ops.full((WARPGROUP_ROWS, plan.columns), 0) for _ in own)
        acc_o = lax.fori_loop(0, item.tiles.count, functools.partial(self._add_tile, own, item), acc_o)
        plgpu.barrier_wait(shared.p_full)
        m, l = (ops.load(shared.statistics.at[which], 0) for which in range(2))
        self._if_next(number, lambda _: plgpu.barrier_arrive(shared.p_empty))
        sink = None if plan.splits > 1 else self.inputs.value("sinks", item.at.batch, item.at.head)
        result, exponent = self.refs.results["out"].at[self.split, item.at.batch], self.form.exponent(spec)
        for part, acc in zip(own, acc_o, strict=True):
            out, lse = softmax.finish(spec, exponent, m, l, acc, sink)
            columns = pl.ds(part * plan.columns, plan.columns)
            self.part(result, item.at.head, item.block, columns)[...] = out.astype(result.dtype)
            if part == 0:
                self.refs.results["lse"][self.split, item.at.batch, item.at.head, self.rows(item.block)] = lse

    def _add_tile(
        self, own: Sequence[int], item: _Item, index: Array, acc_o: tuple[Float[Array, "rows columns"], ...]
    ) -> tuple[Float[Array, "rows columns"], ...]:
        """The sums of some parts, with what a tile of keys adds to them."""
        shared, ops, spec, tile = self.smem, self.ops, self.plan.spec, self.plan.tile
        plgpu.barrier_wait(shared.p_full)
        rescale, opaque_index = ops.load(shared.rescale, 0), ops.opaque_zero(index)
        sums = [self.form.rescaled(self.inputs, rescale, acc) for acc in acc_o]
        for number in range(tile.value_tiles):
            p = piece_products.of_tile(spec, shared.p, number * tile.value_keys, tile.value_keys)
            p = tuple(map(ops.load, p))
            if number == tile.value_tiles - 1:
                plgpu.barrier_arrive(shared.p_empty)
            slot = pipeline.slot((item.before + index) * tile.value_tiles + number, tile.stages, opaque_index)
            for turn, part in enumerate(own):
                v = shared.values[part]
                plgpu.barrier_wait(v.full.at[slot])
                pieces = piece_products.of_tile(spec, v.tiles.at[slot])
                sums[turn] = piece_products.add_matmul(spec, sums[turn], p, pieces, ops)
                plgpu.barrier_arrive(v.empty.at[slot])
        return tuple(sums)

    def copy(self) -> None:
        """Copy keys, a tile ahead of values, in the order in which slots become free; and tiles of a bias."""
        shared = self.smem
        self._set_registers(self.plan.registers.copy)
        keys, values = self._key_copies(), self._value_copies()
        dq_alternates = sorted((*keys, *values), key=lambda copy: copy.share)

        def copy_item(number: Any, item: _Item) -> None:
            last = item.tiles.count - 1

            def copy_tile(index: Array) -> None:
                for copy in dq_alternates:
                    copy.issue(item, index + copy.ahead)

            def copy_last_beside(following: Any) -> None:
                begin = self._item(following, item.stop), jnp.int32(0)
                for copy in dq_alternates:
                    copy.issue(*(begin if copy.ahead else (item, last)))

            def copy_last() -> None:
                for copy in values:
                    copy.issue(item, last)

            pipeline.for_each_copy(last, copy_tile, "head", "block", "head_group", "batch")
            self._if_next(number, copy_last_beside, copy_last)

        first = self._first_item()
        for copy in keys:
            copy.issue(first, jnp.int32(0))
        self._each(copy_item)
        pipeline.drain(*(ring.empty for ring in (shared.keys, *shared.biases, *shared.values)))

    def _key_copies(self) -> Sequence[_Copy]:
        """Of all parts of a tile of keys."""
        number = self.plan.key_parts.number
        return [_Copy((part + 1) / number, functools.partial(self._copy_keys, part), 1) for part in range(number)]

    def _value_copies(self) -> Sequence[_Copy]:
        """Of all values for one tile of keys: both halves are read at once."""
        tiles, parts = self.plan.tile.value_tiles, self.plan.value_parts // HALVES
        copy = lambda tile, part: functools.partial(self._copy_values, tile, part)
        return [
            _Copy((tile * parts + part + 1) / (tiles * parts), copy(tile, half * parts + part), 0)
            for tile, part, half in itertools.product(range(tiles), range(parts), range(HALVES))
        ]

    def _tile(self, item: _Item, first: Any, size: int) -> GmemTile:
        key_head = lax.div(item.at.head, self.plan.heads // self.plan.spec.key_heads)
        return GmemTile(item.at.batch, first, size, key_head)

    def _copy_keys(self, part: int, item: _Item, index: Any) -> None:
        first, size = item.tiles.start(index), self.plan.tile.keys
        for bias in self.smem.biases if part == 0 else ():
            plgpu.barrier_wait(bias.empty.at[0])
            source = self.inputs.part("bias", item.at.batch, item.at.head).at[self.rows(item.block), pl.ds(first, size)]
            plgpu.copy_gmem_to_smem(source, bias.tiles.at[0], bias.full.at[0])
        self.keys.copy(self.inputs, "key", self._tile(item, first, size), item.before + index, part)

    def _copy_values(self, number: int, part: int, item: _Item, index: Any) -> None:
        plan, tile, v = self.plan, self.plan.tile, self.smem.values[part]
        slot = lax.rem((item.before + index) * tile.value_tiles + number, tile.stages)
        source = self._tile(item, item.tiles.start(index) + number * tile.value_keys, tile.value_keys)
        plgpu.barrier_wait(v.empty.at[slot])
        columns = v.tiles.shape[-1]
        self.inputs.copy_rows("value", source, v.tiles.at[slot], v.full.at[slot], part * columns, plan.cluster)
