"""Forward of wide heads (`plan.is_wide`): two warpgroups share the columns of a CTA's 64 rows of the output.

    the first warpgroup                                     the second and the third, each with half of V's columns
      S = Q K_j^T
      P, m, l = online softmax of S    --- P, rescale --->    O = O * rescale
                                                              O = O + P V_j
      after the last tile                 --- m, l --->       out = O / l;  lse = log l + m
    the producer warpgroup copies chunks of tiles of keys, and of values, ahead of them into shared memory

O of 64 rows and 512 columns takes 256 registers of each thread of one warpgroup, or 128 of two. S is made once: with a
CTA for each half of the columns it would be made twice. Who makes it weighs nothing, so that the next S is made beside
the products of P; and it needs few registers, which the others have.

A chunk of a tile of keys or of values leaves as soon as it has been read, so that there is room for what comes next.

For each byte that it copies a CTA makes half as many multiply-adds as one of 128 rows and 256 columns. CTAs that read
the same at the same time are served by one read of the second-level cache. Those that begin at different times, as
causal blocks do, are too many for it: so the CTAs of two neighbouring blocks copy each tile together. Such a pair takes
several pairs of blocks, one after the other (`forward_schedule.deal`).

Source: FlashMLA (github.com/deepseek-ai/FlashMLA), "A Deep Dive Into The New Flash MLA Kernel", has halves of the
columns in two warpgroups.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import piece_products, pipeline
from jflash._backends.mosaic_gpu.column_chunks import ChunkRing
from jflash._backends.mosaic_gpu.forward_kernel import ForwardCta
from jflash._backends.mosaic_gpu.forward_schedule import DealtTo
from jflash._backends.mosaic_gpu.forward_wide_plan import HALVES, ITEMS, PAIR, WEIGHTS, WideForwardPlan
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.pipeline import GmemTile
from jflash._backends.mosaic_gpu.source_tile import SourceTile
from jflash._backends.nvidia import cache_rows
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Refs
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import dropped, operand_pieces, softmax
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._backends.nvidia.tile.softmax import Softmax
from jflash._backends.nvidia.walk.tile_range import Place, TileContext, Walk
from jflash._semantics.dropout import HeadSeed

Sums = tuple[Float[Array, "rows columns"], ...]
"""O of some chunks of the values' columns."""


class _Item(NamedTuple):
    """A work item of a CTA."""

    at: TileCoord
    """Where the item's first tile of logits begins."""
    block: Any
    """The number of the item's block of 64 rows."""
    tiles: Walk
    before: Any
    """How many tiles came before, in other items."""

    @property
    def stop(self) -> Any:
        """How many tiles come before the next item."""
        return self.before + self.tiles.count


class WideForwardCta(ForwardCta):
    """A CTA of the forward of wide heads."""

    plan: WideForwardPlan  # pyright: ignore[reportIncompatibleVariableOverride]
    copied = "key"
    """The array whose tiles are multiplied with queries."""

    def __init__(self, plan: WideForwardPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops)
        self.dealt = DealtTo(refs.arrays[ITEMS], self.cta_place.number) if ITEMS in refs.arrays else None
        self.has_16_bits = facts_of(plan.spec).pieces == 1
        # In lists: found before the warpgroups part, kernels of 16 bits are faster and those of float32 slower.
        self.found = self._item(0, 0) if self.dealt is None or self.has_16_bits else None
        self.keys = ChunkRing(plan.key_chunks, refs.smem.keys, PAIR if plan.in_pairs else None)

    def rows(self, block: Any) -> Any:
        return pl.ds(self.block_start(block), WARPGROUP_ROWS)

    @property
    def rows_of_tile(self) -> Any:
        return pl.ds(0, WARPGROUP_ROWS)

    def store_whole(self, place: Place, out: Array, column: int) -> None:
        self.store_output(out, *place, column)

    def run(self) -> None:
        self.work.run(self._run_warpgroup)

    def _run_warpgroup(self) -> None:
        halves = (functools.partial(self.weigh, half) for half in range(HALVES))
        for index, body in enumerate((self.make_weights, *halves, self.copy)):
            pl.when(self.warpgroup == index)(body)

    def _set_registers(self, count: int) -> None:
        pipeline.set_registers(count, 2 + HALVES)

    def _each(self, body: Callable[[Any, _Item], None]) -> None:
        """`body(index, item)` for every work item of this CTA."""
        if self.dealt is None:
            body(0, self._first_item())
            return

        def visit(index: Any, before: Any) -> Any:
            item = self._item(index, before)
            body(index, item)
            return item.stop

        self.dealt.each(visit)

    def _if_next(self, index: Any, body: Callable[[Any], None], otherwise: Callable[[], None] = lambda: None) -> None:
        """`body(index + 1)`, if this CTA has such an item, else `otherwise()`."""
        if self.dealt is None:
            otherwise()
        else:
            self.dealt.if_next(index, body, otherwise)

    def _item(self, index: Any, before: Any) -> _Item:
        plan = self.plan
        batch, head, number = self.place(index) if self.dealt is None else self.place_of(*self.dealt.place(index))
        block = 2 * number + lax.axis_index(PAIR) if plan.in_pairs else number
        # Not `number`, with which ptxas spills 20 bytes more.
        tiles = self.visited(Place(batch, head, lax.div(block, 2) if plan.in_pairs else block))
        return _Item(TileCoord(batch, head, self.block_start(block), 0), block, tiles, before)

    def _first_item(self) -> _Item:
        return self._item(0, 0) if self.found is None else self.found

    def _copy_queries(self, item: _Item) -> None:
        self.copy_queries(item.at.batch, item.at.head, item.block)

    def make_weights(self) -> None:
        """The first warpgroup makes P of every tile, and what earlier tiles' sums are multiplied with."""
        shared = self.smem
        pipeline.release(*(ring.empty for ring in (shared.keys, *shared.biases)))
        self._set_registers(self.plan.registers.weights)
        self._copy_queries(self._first_item())
        self._each(self._make_weights)

    def _make_weights(self, number: Any, item: _Item) -> None:
        shared, plan = self.smem, self.plan
        seed = dropped.head_seed(self.inputs, item.at)
        self.wait_for_queries()

        def visit(index: Array, before: tuple[Softmax, Sums] | None) -> tuple[Softmax, Sums]:
            softmax_before, own = (None, self.zeros(WEIGHTS)) if before is None else before
            state = self._softmax(item, index, softmax_before, seed)
            pieces = operand_pieces.split(plan.spec, state.p, self.ops)
            plgpu.barrier_wait(shared.handed.empty)
            for target, piece in zip(piece_products.of_tile(plan.spec, shared.handed.p), pieces, strict=True):
                target[...] = piece
            shared.handed.rescale[...] = state.rescale
            plgpu.barrier_arrive(shared.handed.full)
            return state, self.add_own(item.before + index, state, pieces, own)

        # Of plain logits of 16-bit operands ptxas spills less if the compiler cannot know that 0 is 0, of others more.
        is_hidden = plan.is_plain and self.has_16_bits
        first = self.ops.opaque_zero(jnp.int32(number)) if is_hidden else jnp.int32(0)
        last, own = lax.fori_loop(1, item.tiles.count, visit, visit(first, None))
        self._if_next(number, lambda following: self._copy_queries(self._item(following, item.stop)))
        m, l = last.m, softmax.whole(last.l)
        shared.handed.statistics[0], shared.handed.statistics[1] = m, l
        plgpu.barrier_wait(shared.handed.empty)
        plgpu.barrier_arrive(shared.handed.full)
        self._store_sums(item, WEIGHTS, own, m, l)

    def zeros(self, number: int) -> Sums:
        """What a warpgroup's sums begin with."""
        return tuple(self.ops.full((WARPGROUP_ROWS, width), 0) for _, width in self.plan.sums[number])

    def add_own(self, step: Any, state: Softmax, p: Pieces, sums: Sums) -> Sums:
        """The sums of the warpgroup that makes P, with what a tile adds to them; it has none here."""
        return sums

    def _softmax(self, item: _Item, index: Array, before: Softmax | None, seed: HeadSeed | None) -> Softmax:
        plan, inputs, ops, shape = self.plan, self.inputs, self.ops, self.shape
        tile = item.tiles.tile(index)
        at = item.at._replace(key=tile.start)
        loaded = self.form.prefetch(inputs, at, plan.tile.keys, plan.tile.warpgroups)
        s = self.keys.product(plan.spec, self.q.at[ops.opaque_zero(index)], item.before + index, shape, ops)
        for bias in self.smem.biases:
            plgpu.barrier_wait(bias.full.at[0])
            loaded = loaded | self.load_bias(bias.tiles.at[0])
            plgpu.barrier_arrive(bias.empty.at[0])
        loaded = loaded | dropped.tile_words(inputs, at, shape, seed)
        return self.form.step(s, TileContext(inputs, tile, at, loaded), before)

    def weigh(self, half: int) -> None:
        """Another warpgroup weighs half of the values' columns, and stores what it makes of them."""
        pipeline.release(*self.weighed(half))
        plgpu.barrier_arrive(self.smem.handed.empty)
        self._set_registers(self.plan.registers.weigh)
        self._each(functools.partial(self._weigh, half))

    def weighed(self, half: int) -> Sequence[Ref]:
        """The barriers that say which slots are empty of what a warpgroup weighs."""
        return [self.smem.values[chunk].empty for chunk in self._chunks(half)]

    def _chunks(self, half: int) -> range:
        number = self.plan.value_chunks // HALVES
        return range(half * number, (half + 1) * number)

    def _weigh(self, half: int, number: Any, item: _Item) -> None:
        shared, ops = self.smem, self.ops
        acc_o = self.zeros(half)
        acc_o = lax.fori_loop(0, item.tiles.count, functools.partial(self._add_tile, half, item), acc_o)
        plgpu.barrier_wait(shared.handed.full)
        m, l = (ops.load(shared.handed.statistics.at[which], 0) for which in range(2))
        self._if_next(number, lambda _: plgpu.barrier_arrive(shared.handed.empty))
        self._store_sums(item, half, acc_o, m, l)

    def _store_sums(self, item: _Item, number: int, sums: Sums, m: Array, l: Array) -> None:
        """Store a warpgroup's columns of the output, and with the first ones the log-sum-exp."""
        if not sums:
            return
        (batch, head, *_), block, spec = item.at, item.block, self.plan.spec
        sink, exponent = self.sink(batch, head, block), self.form.exponent(spec)
        for (first, _), acc in zip(self.plan.sums[number], sums, strict=True):
            factor, lse = softmax.last_factor(spec, exponent, m, l, sink)
            out, place = softmax.scaled_rows(acc, factor), Place(batch, head, block)
            self.store(place, out, lse if first == 0 else None, first)

    def _add_tile(self, half: int, item: _Item, index: Array, acc_o: Sums) -> Sums:
        """The sums of half of the columns, with what a tile of keys adds to them."""
        shared = self.smem
        plgpu.barrier_wait(shared.handed.full)
        rescale, opaque_zero = self.ops.load(shared.handed.rescale, 0), self.ops.opaque_zero(index)
        sums = [self.form.rescaled(self.inputs, rescale, acc) for acc in acc_o]
        return self.add_values(half, item.before + index, opaque_zero, sums)

    def add_values(self, half: int, step: Any, opaque_zero: Any, sums: list[Array]) -> Sums:
        """The sums of half of the columns, with P V of a step's tile."""
        shared, ops, spec, tile = self.smem, self.ops, self.plan.spec, self.plan.tile
        for number in range(tile.value_tiles):
            p = piece_products.of_tile(spec, shared.handed.p, number * tile.value_keys, tile.value_keys)
            p = tuple(map(ops.load, p))
            if number == tile.value_tiles - 1:
                plgpu.barrier_arrive(shared.handed.empty)
            slot = pipeline.slot(step * tile.value_tiles + number, tile.stages, opaque_zero)
            for turn, chunk in enumerate(self._chunks(half)):
                v = shared.values[chunk]
                plgpu.barrier_wait(v.full.at[slot])
                pieces = piece_products.of_tile(spec, v.tiles.at[slot])
                sums[turn] = piece_products.add_matmul(spec, sums[turn], p, pieces, ops)
                plgpu.barrier_arrive(v.empty.at[slot])
        return tuple(sums)

    def copy(self) -> None:
        """Copy keys, a tile ahead of values, and tiles of a bias."""
        shared, copies = self.smem, self._copies()
        self._set_registers(self.plan.registers.copy)

        def issue(keys: tuple[_Item, Any] | None, values: tuple[_Item, Any] | None) -> None:
            """Copy an item's tile of keys, and a tile's values, if there are such ones."""
            for of_keys, copy in copies:
                place = keys if of_keys else values
                if place is not None:
                    copy(*place)

        def copy_item(number: Any, item: _Item) -> None:
            last = item.tiles.count - 1
            copy_tile = lambda index: issue((item, index + 1), (item, index))
            copy_last_beside = lambda following: issue((self._item(following, item.stop), jnp.int32(0)), (item, last))
            pipeline.for_each_copy(last, copy_tile, "head", "block", "head_group", "batch")
            self._if_next(number, copy_last_beside, lambda: issue(None, (item, last)))

        issue((self._first_item(), jnp.int32(0)), None)
        self._each(copy_item)
        pipeline.drain(*(ring.empty for ring in (shared.keys, *shared.biases, *shared.values)))

    def _copies(self) -> list[tuple[bool, Callable[[_Item, Any], None]]]:
        """The copies of a tile of keys, and of a tile's values, in the order in which their slots become free.

        Whether a copy is of keys stands before it; it is issued with an item, and a tile's index there.
        """
        key_chunks, tiles = self.plan.key_chunks.number, self.plan.tile.value_tiles
        found: list[tuple[float, bool, Callable[[_Item, Any], None]]] = []
        # The first number is the share of a tile that has been read then. Both halves of the values are read at once.
        for chunk in range(key_chunks):
            found.append(((chunk + 1) / key_chunks, True, functools.partial(self._copy_keys, chunk)))
        of_half = self.plan.value_chunks // HALVES
        for tile, turn, half in itertools.product(range(tiles), range(of_half), range(HALVES)):
            copy = functools.partial(self._copy_values, tile, half * of_half + turn)
            found.append(((tile * of_half + turn + 1) / (tiles * of_half), False, copy))
        return [(of_keys, copy) for _, of_keys, copy in sorted(found, key=lambda copy: copy[0])]

    def _tile(self, item: _Item, first: Any, size: int) -> SourceTile:
        keys = GmemTile(item.at.batch, first, size, self.key_head(item.at.head))
        return SourceTile(self.inputs, keys, mends=cache_rows.mends(self.plan.spec))

    def _copy_keys(self, chunk: int, item: _Item, index: Any) -> None:
        first, size = item.tiles.start(index), self.plan.tile.keys
        for bias in self.smem.biases if chunk == 0 else ():
            plgpu.barrier_wait(bias.empty.at[0])
            source = self.inputs.part("bias", item.at.batch, item.at.head).at[self.rows(item.block), pl.ds(first, size)]
            plgpu.copy_gmem_to_smem(source, bias.tiles.at[0], bias.full.at[0])
        self.keys.copy(self._tile(item, first, size), self.copied, item.before + index, chunk)

    def _copy_values(self, number: int, chunk: int, item: _Item, index: Any) -> None:
        tile, v = self.plan.tile, self.smem.values[chunk]
        slot = lax.rem((item.before + index) * tile.value_tiles + number, tile.stages)
        source = self._tile(item, item.tiles.start(index) + number * tile.value_keys, tile.value_keys)
        plgpu.barrier_wait(v.empty.at[slot])
        source.copy("value", v, slot, chunk * v.tiles.shape[-1], self.keys.cluster)
