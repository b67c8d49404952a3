"""Forward: a CTA owns some rows of queries and walks over the tiles of keys that they can see.

    Q = the rows' queries
    for each tile of keys, j:
      S = Q K_j^T                     copies of the next tile run beside this
      P, m, l = online softmax of S
      O = O * rescale + P V_j
    out = O / l;  lse = log l + m

With one stage in shared memory V_j is copied beside Q K_j^T and K_(j+1) beside P V_j. With two, both of the next tile
are copied beside all of this one. Other CTAs of the multiprocessor compute where this one waits.

A warp has 16 rows of each block of 64, and P in registers as P V_j takes it. Where registers hold O of one block alone,
what is read of V_j would serve 16 rows. There O is a pair (`products`): a warp has 32 rows of O and half of
its columns. It reads half as much of V_j, and P from shared memory.

Products of float32 are those of its pieces (`operand_pieces`), here and in the backward.

Source: FlashAttention-2, arXiv:2307.08691, sections 3.1 and 3.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.cta import (
    Cta,
    PartlyHeld,
    Streamed,
    Tile,
    TiledPlan,
    bias_buffer,
    buffer,
    by_piece,
    columns,
    rows_of_head,
)
from jflash._backends.mosaic_gpu_mma.ops import MmaOps
from jflash._backends.mosaic_gpu_mma.products import Operand, Tiles
from jflash._backends.nvidia import smem
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.packing import ForwardShape
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.tile import logits, operand_pieces, softmax
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.softmax import Softmax
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics.spec import Spec


def shared_memory(spec: Spec, tile: Tile) -> Buffers:
    """The kernel's buffers."""
    head_columns, value_columns = columns(spec.head_dim), columns(spec.value_dim)
    return Buffers(
        q=None if tile.streams else buffer(spec, tile.rows, head_columns),
        k=buffer(spec, tile.stages, tile.size, head_columns),
        v=buffer(spec, tile.stages, tile.size, value_columns),
        p=buffer(spec, tile.rows, tile.size) if tile.paired else None,
        factors=smem.vectors(tile.rows) if tile.paired else None,
        bias=bias_buffer(spec, tile.stages, tile.blocks, WARPGROUP_ROWS, tile.size),
    )


@dataclasses.dataclass(frozen=True)
class ForwardPlan(ForwardShape, TiledPlan):
    """A call's forward, known before any array."""

    packed_heads: int = 1
    """Query heads that share keys and are interleaved in the rows of one tile."""
    splits: int = 1
    """CTAs that share the keys of a tile of queries; their float32 outputs are merged afterwards."""

    @property
    def launch(self) -> Launch:
        """Queries and output are `[B, T, N, D]`, or with packed heads `[B, N, T, D]`.

        Blocks of one head follow one another, so that what runs at the same time shares keys. Along all but the fastest
        axis CUDA counts no further than 65,535.
        """
        spec, blocks = self.spec, pl.cdiv(self.rows, self.tile.rows)
        order = (self.rows, self.heads) if self.packed_heads == 1 else (self.heads, self.rows)
        out = jax.ShapeDtypeStruct((self.splits, spec.batch, *order, round_up(spec.value_dim, 8)), self.out_dtype)
        lse = jax.ShapeDtypeStruct((self.splits, spec.batch, self.heads, blocks * self.tile.rows), jnp.float32)
        return Launch(
            name=f"jflash_mma_forward_{spec.head_dim}_{spec.value_dim}",
            grid=dict(split=self.splits, batch=spec.batch, head=self.heads, block=blocks),
            results=dict(out=out, lse=lse),
            smem=shared_memory(spec, self.tile),
        )


class _State(NamedTuple):
    """What a CTA knows of its rows after some tiles."""

    statistics: tuple[_Statistics, ...]
    """Of each block of 64 rows."""
    acc_o: Tiles
    """O of each block; or a pair."""


class _Statistics(NamedTuple):
    """Of a block's rows, as in `Softmax`."""

    m: Float[Array, "rows"]
    l: Float[Array, "rows *parts"]


def forward(plan: ForwardPlan, arrays: Mapping[str, Array], ops: MmaOps) -> dict[str, Array]:
    """Launch the kernel; out `[splits, B, T, N, D]`, D rounded up to 8, and lse `[splits, B, N, L]`, L to whole blocks.

    With several splits the outputs are float32, and sinks are left to their merge.
    """
    return (_PairedCta if plan.tile.paired else _Cta).launch(plan, arrays, ops)


class _Cta(Cta[ForwardPlan]):
    def __init__(self, plan: ForwardPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops, packed_heads=plan.packed_heads)
        tile = plan.tile
        self.form = logits.form(plan.spec, sums_in_parts=tile.sums_in_parts)
        self.batch, self.head, self.split = (lax.axis_index(name) for name in ("batch", "head", "split"))
        # Blocks that see most keys begin first, so that none of them is left at the end alone.
        block = lax.axis_size("block") - 1 - lax.axis_index("block")
        self.first_row = block * tile.rows
        tiles = tile_range.visited(self.inputs, self.batch, block, tile.rows, tile.size)
        self.tiles = tiles.split(self.split, plan.splits)

    def run(self) -> None:
        """Attend, and store the output."""
        plan, ops, tile = self.plan, self.ops, self.plan.tile
        rows = self.own_rows("query", self.batch, self.head, self.first_row, self.smem.q)
        self._copy_tile("key", 0)
        if tile.stages > 1:
            self._copy_tile("value", 0)
        ops.commit()
        parts = (softmax.PARTS_OF_L,) if tile.sums_in_parts else ()
        nothing = _Statistics(ops.full((WARPGROUP_ROWS,), self.form.first_m), ops.full((WARPGROUP_ROWS, *parts), 0))
        before = _State((nothing,) * tile.blocks, self.no_output())
        (q,) = self.own_operands(rows)
        statistics, acc_o = lax.fori_loop(
            0, self.tiles.count, lambda index, state: self._visit(index, q, state), before
        )
        sink = None if plan.splits > 1 else self.inputs.value("sinks", self.batch, self.head)
        factors: list[Array] = []
        for number, (m, l) in enumerate(statistics):
            exponent, first = self.form.exponent(plan.spec), self._first_row(number)
            factor, lse = softmax.last_factor(plan.spec, exponent, m, softmax.whole(l), sink)
            self.refs.results["lse"][self.split, self.batch, self.head, pl.ds(first, WARPGROUP_ROWS)] = lse
            factors.append(factor)
        target = self.refs.results["out"].at[self.split]
        target = rows_of_head(target, self.batch, self.head, heads_first=plan.packed_heads > 1)
        self.store(acc_o, factors, target)

    def no_output(self) -> Tiles:
        """O before the first tile."""
        return self.zeros(self.plan.tile.blocks, columns(self.plan.spec.value_dim))

    def store(self, acc_o: Tiles, factors: Sequence[Array], target: Ref) -> None:
        """Store O, each row times its factor."""
        for number, (acc, factor) in enumerate(zip(acc_o, factors, strict=True)):
            out = softmax.scaled_rows(acc, factor)
            self.ops.store_rows(out, target, self._first_row(number), self.plan.rows)

    def add_values(self, index: Any, states: Sequence[Softmax], acc_o: Tiles) -> Tiles:
        """O after a tile, from its P."""
        rescaled = [
            self.form.rescaled(self.inputs, state.rescale, acc) for state, acc in zip(states, acc_o, strict=True)
        ]
        p = by_piece(operand_pieces.split(self.plan.spec, state.p, self.ops) for state in states)
        return self.add_product(tuple(rescaled), p, self.smem.v.at[self.slot(index)], transposed=False)

    def values_arrive(self, index: Any) -> None:
        """With one stage: the tile's values are here and its keys are read. Begin to copy the next ones."""
        self.ops.wait()
        self._copy_next(index, "key")

    def _first_row(self, block: int) -> Any:
        return self.first_row + block * WARPGROUP_ROWS

    def _copy_tile(self, name: str, index: Any) -> None:
        plan, ring = self.plan, self.smem.k if name == "key" else self.smem.v
        key_head = lax.div(self.head, plan.heads // plan.spec.key_heads)
        self.copy(name, self.batch, key_head, self.tiles.start(index), ring.at[self.slot(index)])
        if name == "value" and self.smem.bias is not None:
            for number, at in enumerate(self._places(index)):
                self.copy_bias(at, self.smem.bias.at[self.slot(index), number])

    def _places(self, index: Any) -> list[TileCoord]:
        """Of a tile of keys, by block."""
        key = self.tiles.start(index)
        return [TileCoord(self.batch, self.head, self._first_row(block), key) for block in range(self.plan.tile.blocks)]

    def _bias(self, index: Any, block: int) -> dict[str, Array]:
        """A tile of the bias that has come to shared memory, by name, if it comes there."""
        if self.smem.bias is None:
            return {}
        ((tile,),) = self.ops.load_rows(self.smem.bias.at[self.slot(index), block])
        return {"bias": tile}

    def _copy_next(self, index: Any, *names: str) -> None:
        @pl.when(index + 1 < self.tiles.count)
        def _() -> None:
            for name in names:
                self._copy_tile(name, index + 1)

        self.ops.commit()

    def _visit(self, index: Any, q: Operand | PartlyHeld | Streamed, before: _State) -> _State:
        ops, tile = self.ops, self.plan.tile
        places, shape = self._places(index), (WARPGROUP_ROWS, tile.size)
        ops.wait()
        if tile.stages > 1:
            self._copy_next(index, "key", "value")
        else:
            self._copy_tile("value", index)
            ops.commit()
        loaded = [self.load(at, shape) for at in places]
        s = self.add_product(self.zeros(tile.blocks, tile.size), q, self.smem.k.at[self.slot(index)], transposed=True)
        # Where P goes through shared memory, one barrier is for both.
        if tile.stages == 1 and not tile.paired:
            self.values_arrive(index)
        states: list[Softmax] = []
        for block, (at, numbers, (m, l)) in enumerate(zip(places, s, before.statistics, strict=True)):
            mask = TileContext(self.inputs, self.tiles, index, at, loaded[block] | self._bias(index, block))
            states.append(self.form.step(numbers, mask, Softmax(numbers, m, l, m)))
        acc_o = self.add_values(index, states, before.acc_o)
        return _State(tuple(_Statistics(state.m, state.l) for state in states), acc_o)


class _PairedCta(_Cta):
    """Of 64 rows, whose O is a pair."""

    def no_output(self) -> Tiles:
        return self.zeros(2, columns(self.plan.spec.value_dim) // 2)

    def store(self, acc_o: Tiles, factors: Sequence[Array], target: Ref) -> None:
        (factor,) = factors
        # The last tile's factors have been read.
        self.ops.meet(1)
        self.smem.factors[...] = factor
        self.ops.meet(1)
        self.ops.store_pair(self.ops.scaled_pair(acc_o, self.smem.factors), target, self.first_row, self.plan.rows)

    def add_values(self, index: Any, states: Sequence[Softmax], acc_o: Tiles) -> Tiles:
        (state,) = states
        self.ops.store_tile((state.p,), self.smem.p, 0)
        self.smem.factors[...] = state.rescale
        self.values_arrive(index)
        acc_o = self.ops.scaled_pair(acc_o, self.smem.factors)
        return self.ops.add_pair_product(acc_o, self.smem.p, self.smem.v.at[self.slot(index)])
