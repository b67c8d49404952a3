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
times, as causal blocks do, are too many for it: so the CTAs of two neighbouring blocks copy each tile together.

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

from jflash._backends.mosaic_gpu import online_softmax
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, WarpgroupOps, pipeline
from jflash._backends.mosaic_gpu.inputs import GmemTile, TileCoord, dropped, operand_pieces
from jflash._backends.mosaic_gpu.inputs.tile_parts import PartsRing
from jflash._backends.mosaic_gpu.kernels.forward import ForwardCta
from jflash._backends.mosaic_gpu.kernels.forward_wide_plan import HALVES, PAIR, WideForwardPlan
from jflash._backends.mosaic_gpu.kernels.launch import Refs
from jflash._backends.mosaic_gpu.online_softmax import Softmax
from jflash._backends.mosaic_gpu.schedule import TileMask, TileRange, tile_range
from jflash._semantics.dropout import HeadSeed


def forward(plan: WideForwardPlan, arrays: Mapping[str, Array], ops: WarpgroupOps) -> dict[str, Array]:
    """Launch the kernel; results as `forward.forward` has them, both in whole blocks of rows."""
    return _Cta.launch(plan, arrays, ops)


class _Copy(NamedTuple):
    """A copy of a part of a tile."""

    share: float
    """Of a tile that has been read when the part's slot is free."""
    issue: Callable[[Any], None]
    """Issues it, given the tile's index."""
    ahead: int
    """How many tiles ahead of the values that are read."""


class _Cta(ForwardCta):
    plan: WideForwardPlan  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, plan: WideForwardPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops)
        if plan.in_pairs:
            block, batch = self.place
            self.place = 2 * block + lax.axis_index(PAIR), batch
        self.batch, self.block, self.tiles = self.item(0)
        self.own_rows = self.rows(self.block)
        self.at = TileCoord(self.batch, self.head, self.own_rows.start, 0)
        self.keys = PartsRing(plan.key_parts, refs.smem.keys, plan.cluster)

    def visited(self, batch: Any, block: Any) -> TileRange:
        plan = self.plan
        number = lax.div(block, 2) if plan.in_pairs else block
        return tile_range.visited(self.inputs, batch, number, plan.rows_of_a_range, plan.tile.keys)

    def rows(self, block: Any) -> Any:
        return pl.ds(self.block_start(block), WARPGROUP_ROWS)

    def run(self) -> None:
        halves = (functools.partial(self.weigh, half) for half in range(HALVES))
        for index, body in enumerate((self.make_weights, *halves, self.copy)):
            pl.when(self.warpgroup == index)(body)

    def _set_registers(self, count: int) -> None:
        pipeline.set_registers(count, self.plan.consumers + 1)

    def make_weights(self) -> None:
        """The first warpgroup makes P of every tile, and what earlier tiles' sums are multiplied with."""
        shared, spec = self.smem, self.plan.spec
        pipeline.release(*(ring.empty for ring in (shared.keys, *shared.biases)))
        self._set_registers(self.plan.registers.weights)
        self._copy_q(0)
        seed = dropped.head_seed(self.inputs, self.at)
        plgpu.barrier_wait(shared.q_full.at[0])

        def visit(index: Array, before: Softmax | None) -> Softmax:
            state = self._softmax(index, before, seed)
            pieces = operand_pieces.split(spec, state.p, self.ops)
            plgpu.barrier_wait(shared.p_empty)
            for target, piece in zip(operand_pieces.of_tile(spec, shared.p), pieces, strict=True):
                target[...] = piece
            shared.rescale[...] = state.rescale
            plgpu.barrier_arrive(shared.p_full)
            return state

        last = lax.fori_loop(1, self.tiles.count, visit, visit(jnp.int32(0), None))
        shared.statistics[0], shared.statistics[1] = last.m, online_softmax.whole(last.l)
        plgpu.barrier_wait(shared.p_empty)
        plgpu.barrier_arrive(shared.p_full)

    def _softmax(self, index: Array, before: Softmax | None, seed: HeadSeed | None) -> Softmax:
        plan, inputs, ops, shape = self.plan, self.inputs, self.ops, self.shape
        at = self.at._replace(key=self.tiles.start(index))
        loaded = self.form.prefetch(inputs, at, plan.tile)
        s = self.keys.product(plan.spec, self.q.at[ops.opaque_zero(index)], index, shape, ops)
        for bias in self.smem.biases:
            plgpu.barrier_wait(bias.full.at[0])
            loaded = loaded | {"bias": ops.load(bias.tiles.at[0])}
            # A copy may overwrite what threads have read.
            plgpu.commit_smem()
            plgpu.barrier_arrive(bias.empty.at[0])
        loaded = loaded | dropped.tile_words(inputs, at, shape, seed)
        return self.form.step(s, TileMask(inputs, self.tiles, index, at, loaded), before)

    def weigh(self, half: int) -> None:
        """Another warpgroup weighs half of the values' columns, and stores what it makes of them."""
        plan, shared, ops, spec = self.plan, self.smem, self.ops, self.plan.spec
        parts = plan.value_parts // HALVES
        own = range(half * parts, (half + 1) * parts)
        pipeline.release(*(shared.values[part].empty for part in own))
        plgpu.barrier_arrive(shared.p_empty)
        self._set_registers(plan.registers.weigh)
        acc_o = tuple(ops.full((WARPGROUP_ROWS, plan.columns), 0) for _ in own)
        acc_o = lax.fori_loop(0, self.tiles.count, functools.partial(self._add_tile, own), acc_o)
        plgpu.barrier_wait(shared.p_full)
        m, l = (ops.load(shared.statistics.at[number], 0) for number in range(2))
        sink = None if plan.splits > 1 else self.inputs.value("sinks", self.batch, self.head)
        result, exponent = self.refs.results["out"].at[self.split, self.batch], self.form.exponent(spec)
        for part, acc in zip(own, acc_o, strict=True):
            out, lse = online_softmax.finish(spec, exponent, m, l, acc, sink)
            columns = pl.ds(part * plan.columns, plan.columns)
            self.part(result, self.block, columns)[...] = out.astype(result.dtype)
            if part == 0:
                self.refs.results["lse"][self.split, self.batch, self.head, self.own_rows] = lse

    def _add_tile(
        self, own: Sequence[int], index: Array, acc_o: tuple[Float[Array, "rows columns"], ...]
    ) -> tuple[Float[Array, "rows columns"], ...]:
        """The sums of some parts, with what a tile of keys adds to them."""
        shared, ops, spec, tile = self.smem, self.ops, self.plan.spec, self.plan.tile
        plgpu.barrier_wait(shared.p_full)
        rescale, still = ops.load(shared.rescale, 0), ops.opaque_zero(index)
        sums = [self.form.rescaled(self.inputs, rescale, acc) for acc in acc_o]
        for number in range(tile.value_tiles):
            p = operand_pieces.of_tile(spec, shared.p, number * tile.value_keys, tile.value_keys)
            p = tuple(map(ops.load, p))
            if number == tile.value_tiles - 1:
                plgpu.barrier_arrive(shared.p_empty)
            slot = pipeline.slot(index * tile.value_tiles + number, tile.stages, still)
            for turn, part in enumerate(own):
                v = shared.values[part]
                plgpu.barrier_wait(v.full.at[slot])
                pieces = operand_pieces.of_tile(spec, v.tiles.at[slot])
                sums[turn] = operand_pieces.add_matmul(spec, sums[turn], p, pieces, ops)
                plgpu.barrier_arrive(v.empty.at[slot])
        return tuple(sums)

    def copy(self) -> None:
        """Copy keys, a tile ahead of values, in the order in which slots become free; and tiles of a bias."""
        shared, last = self.smem, self.tiles.count - 1
        self._set_registers(self.plan.registers.copy)
        keys, values = self._key_copies(), self._value_copies()
        in_turns = sorted((*keys, *values), key=lambda copy: copy.share)

        def copy_tile(index: Array) -> None:
            for copy in in_turns:
                copy.issue(index + copy.ahead)

        for copy in keys:
            copy.issue(jnp.int32(0))
        pipeline.for_each_copy(last, copy_tile, "head", "block", "head_group", "batch")
        for copy in values:
            copy.issue(last)
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

    def _tile(self, first: Any, size: int) -> GmemTile:
        key_head = lax.div(self.head, self.plan.heads // self.plan.spec.key_heads)
        return GmemTile(self.batch, first, size, key_head)

    def _copy_keys(self, part: int, index: Any) -> None:
        first, size = self.tiles.start(index), self.plan.tile.keys
        for bias in self.smem.biases if part == 0 else ():
            plgpu.barrier_wait(bias.empty.at[0])
            source = self.inputs.part("bias", self.batch, self.head).at[self.own_rows, pl.ds(first, size)]
            plgpu.copy_gmem_to_smem(source, bias.tiles.at[0], bias.full.at[0])
        self.keys.copy(self.inputs, "key", self._tile(first, size), index, part)

    def _copy_values(self, number: int, part: int, index: Any) -> None:
        plan, tile, v = self.plan, self.plan.tile, self.smem.values[part]
        slot = lax.rem(index * tile.value_tiles + number, tile.stages)
        source = self._tile(self.tiles.start(index) + number * tile.value_keys, tile.value_keys)
        plgpu.barrier_wait(v.empty.at[slot])
        columns = v.tiles.shape[-1]
        self.inputs.copy_rows("value", source, v.tiles.at[slot], v.full.at[slot], part * columns, plan.cluster)
