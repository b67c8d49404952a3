"""Forward: a CTA owns some rows of queries and walks over the tiles of keys that they can see.

    Q = the rows' queries
    for each tile of keys, j:
      S = Q K_j^T                     copies of the next tile run beside this
      P, m, l = online softmax of S
      O = O * rescale + P V_j
    out = O / l;  lse = log l + m

With one stage in shared memory V_j is copied beside Q K_j^T and K_(j+1) beside P V_j. With two, both of the next tile
are copied beside all of this one. Other CTAs of the multiprocessor compute where this one waits.

Products of float32 are those of its pieces (`mosaic_gpu.inputs.operand_pieces`), here and in the backward.

Source: FlashAttention-2, arXiv:2307.08691, sections 3.1 and 3.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import logits, online_softmax
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.mosaic_gpu.inputs import TileCoord, operand_pieces
from jflash._backends.mosaic_gpu.kernels.forward_plan import ForwardShape
from jflash._backends.mosaic_gpu.kernels.launch import Launch, Refs
from jflash._backends.mosaic_gpu.online_softmax import Softmax
from jflash._backends.mosaic_gpu.schedule import TileMask, tile_range
from jflash._backends.mosaic_gpu_mma.hardware import MmaOps, Operand
from jflash._backends.mosaic_gpu_mma.kernels.cta import (
    Cta,
    Tile,
    TiledPlan,
    buffer,
    by_piece,
    columns,
    rows_of_head,
)
from jflash._semantics.spec import Spec


def shared_memory(spec: Spec, tile: Tile) -> Buffers:
    """The kernel's buffers."""
    head_columns, value_columns = columns(spec.head_dim), columns(spec.value_dim)
    return Buffers(
        q=buffer(spec, tile.rows, head_columns),
        k=buffer(spec, tile.stages, tile.size, head_columns),
        v=buffer(spec, tile.stages, tile.size, value_columns),
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


class _Rows(NamedTuple):
    """A block of 64 rows: its softmax's state but for P, and O."""

    m: Float[Array, "rows"]
    l: Float[Array, "rows"]
    acc_o: Float[Array, "rows D"]


def forward(plan: ForwardPlan, arrays: Mapping[str, Array], ops: MmaOps) -> dict[str, Array]:
    """Launch the kernel; out `[splits, B, T, N, D]`, D rounded up to 8, and lse `[splits, B, N, L]`, L to whole blocks.

    With several splits the outputs are float32, and sinks are left to their merge.
    """
    return _Cta.launch(plan, arrays, ops)


class _Cta(Cta[ForwardPlan]):
    def __init__(self, plan: ForwardPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops, packed_heads=plan.packed_heads)
        self.form, tile = logits.form(plan.spec, bias_by_mma=False), plan.tile
        self.batch, self.head, self.split = (lax.axis_index(name) for name in ("batch", "head", "split"))
        # Blocks that see most keys begin first, so that none of them is left at the end alone.
        block = lax.axis_size("block") - 1 - lax.axis_index("block")
        self.first_row = block * tile.rows
        tiles = tile_range.visited(self.inputs, self.batch, block, tile.rows, tile.size)
        self.tiles = tiles.split(self.split, plan.splits)

    def run(self) -> None:
        """Attend, and store the output."""
        plan, spec, ops = self.plan, self.plan.spec, self.ops
        self.copy("query", self.batch, self.head, self.first_row, self.smem.q)
        self._copy_tile("key", 0)
        if plan.tile.stages > 1:
            self._copy_tile("value", 0)
        ops.commit()
        nothing = _Rows(
            ops.full((WARPGROUP_ROWS,), self.form.first_m),
            ops.full((WARPGROUP_ROWS,), 0),
            ops.full((WARPGROUP_ROWS, columns(spec.value_dim)), 0),
        )
        (q,) = self.own_operands(self.smem.q)
        visit = lambda index, every: self._visit(index, q, every)
        every = lax.fori_loop(0, self.tiles.count, visit, (nothing,) * plan.tile.blocks)
        sink = None if plan.splits > 1 else self.inputs.value("sinks", self.batch, self.head)
        results = self.refs.results
        target = results["out"].at[self.split]
        target = rows_of_head(target, self.batch, self.head, heads_first=plan.packed_heads > 1)
        for number, (m, l, acc_o) in enumerate(every):
            out, lse = online_softmax.finish(spec, self.form.exponent(spec), m, l, acc_o, sink)
            first = self._first_row(number)
            results["lse"][self.split, self.batch, self.head, pl.ds(first, WARPGROUP_ROWS)] = lse
            ops.store_rows(out, target, first, plan.rows)

    def _first_row(self, block: int) -> Any:
        return self.first_row + block * WARPGROUP_ROWS

    def _copy_tile(self, name: str, index: Any) -> None:
        plan, ring = self.plan, self.smem.k if name == "key" else self.smem.v
        key_head = lax.div(self.head, plan.heads // plan.spec.key_heads)
        self.copy(name, self.batch, key_head, self.tiles.start(index), ring.at[self.slot(index)])

    def _copy_next(self, index: Any, *names: str) -> None:
        @pl.when(index + 1 < self.tiles.count)
        def _() -> None:
            for name in names:
                self._copy_tile(name, index + 1)

        self.ops.commit()

    def _visit(self, index: Any, q: Operand, every: tuple[_Rows, ...]) -> tuple[_Rows, ...]:
        plan, ops, shared = self.plan, self.ops, self.smem
        tile = plan.tile
        slot = self.slot(index)
        at = [
            TileCoord(self.batch, self.head, self._first_row(number), self.tiles.start(index))
            for number in range(tile.blocks)
        ]
        ops.wait()
        if tile.stages > 1:
            self._copy_next(index, "key", "value")
        else:
            self._copy_tile("value", index)
            ops.commit()
        loaded = [self.load(one, (WARPGROUP_ROWS, tile.size)) for one in at]
        s = self.add_product(self.zeros(tile.blocks, tile.size), q, shared.k.at[slot], transposed=True)
        if tile.stages == 1:
            ops.wait()
            self._copy_next(index, "key")
        states: list[Softmax] = []
        for one, numbers, before, ahead in zip(at, s, every, loaded, strict=True):
            mask = TileMask(self.inputs, self.tiles, index, one, ahead)
            states.append(self.form.step(numbers, mask, Softmax(numbers, before.m, before.l, before.l)))
        acc_o = tuple(
            self.form.rescaled(self.inputs, state.rescale, before.acc_o)
            for state, before in zip(states, every, strict=True)
        )
        p = by_piece(operand_pieces.split(plan.spec, state.p, ops) for state in states)
        acc_o = self.add_product(acc_o, p, shared.v.at[slot], transposed=False)
        return tuple(_Rows(state.m, state.l, acc) for state, acc in zip(states, acc_o, strict=True))
