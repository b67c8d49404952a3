"""Backward, fused: a CTA owns some keys and walks over the tiles of queries that can see them.

    K, V = the keys'
    for each query head that shares them and each tile of queries, i:
      each warpgroup, for its part of the tile's queries:
        S^T  = K Q_i^T                  copies of the next tile run beside all of this, if there is room for two
        dP^T = V dO_i^T                 so do these products beside the exponentials
        P^T  = exp(S^T - lse_i)
        dS^T = P^T (dP^T - delta_i)     both into shared memory
      when all threads are here, each warpgroup, for its part of the columns:
        dV   = dV + P^T dO_i
        dK   = dK + dS^T Q_i
        dQ_i = dS K                     added to what is in device memory
    dQ is rounded when all CTAs are done (`round_dq`)

These are five products, where kernels in which a CTA owns all that it sums make seven or eight. Additions to dQ come in
any order: a deterministic call takes the other kernels.

Two warpgroups share queries in the first half of a step and columns in the second. So each can make products of two
blocks of 64 keys, for which what is read of B serves twice, and the sums of 128 keys and 128 columns still fit in their
registers. Of 64 rows alone they make pairs (`products`).

One warpgroup has P^T and dS^T in registers as they are needed for dV and dK. Up to 64 columns it holds the sums of 128
keys, if it takes some of the queries at a time. Then a multiprocessor runs two CTAs, which do not wait for each other.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma.copies import ColumnChunk
from jflash._backends.mosaic_gpu_mma.cta import Cta, Tile, bias_buffer, buffer
from jflash._backends.mosaic_gpu_mma.device_sums import Sums
from jflash._backends.mosaic_gpu_mma.ops import MmaOps
from jflash._backends.mosaic_gpu_mma.own_keys import KeysPlan
from jflash._backends.mosaic_gpu_mma.prepared import MmaBackward
from jflash._backends.mosaic_gpu_mma.products import STEP, Operand, Tiles, Transposed, can_pair
from jflash._backends.mosaic_gpu_mma.round_dq import RoundDqPlan
from jflash._backends.nvidia import smem
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import Ref, along_columns
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.tile import base2, dropped
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_order import TileOrder
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics.spec import Spec

Totals = tuple[Sums, ...]
"""Of each block of keys, the sums of parameters' gradients for one head."""

Carry = tuple[Tiles, Tiles, Totals]
"""dK and dV of each block of keys, in the warpgroup's columns; and the sums of parameters' gradients."""


STATISTICS = "lse", "delta"
"""What is known of each query, which comes with it."""


def part_columns(dim: int, warpgroups: int) -> int:
    """Columns of tiles of rows of H or D numbers that are one warpgroup's."""
    return round_up(pl.cdiv(dim, warpgroups), 16)


def shared_memory(spec: Spec, tile: Tile) -> Buffers:
    """The kernel's buffers: tiles of queries, keys and values have one of each warpgroup's columns."""
    parts = tile.warpgroups
    head_columns, value_columns = part_columns(spec.head_dim, parts), part_columns(spec.value_dim, parts)
    return Buffers(
        k=buffer(spec, parts, tile.rows, head_columns),
        v=buffer(spec, parts, tile.rows, value_columns),
        q=buffer(spec, tile.stages, parts, tile.size, head_columns),
        do=buffer(spec, tile.stages, parts, tile.size, value_columns),
        statistics=smem.vectors(tile.stages, len(STATISTICS), tile.size),
        p=buffer(spec, tile.rows, tile.size) if parts > 1 else None,
        ds=buffer(spec, tile.rows, tile.size),
        # Each warpgroup's, of each pass.
        bias=bias_buffer(spec, parts * tile.passes, tile.size // parts // tile.passes, tile.rows),
    )


@dataclasses.dataclass(frozen=True)
class FusedPlan(KeysPlan):
    """The kernel for dQ, dK and dV, before any array. Each warpgroup sums parameters' gradients for itself."""

    together: int
    """Numbers of dQ that one instruction adds."""

    @property
    def launch(self) -> Launch:
        """The kernel's grid, results and shared memory."""
        spec, parts = self.spec, self.tile.warpgroups
        sums = self.sums.results(spec.batch, spec.heads, parts, self.key_rows)
        return Launch(
            name=f"jflash_mma_backward_{spec.head_dim}_{spec.value_dim}",
            grid=self.grid,
            results=self.gradients | sums,
            smem=shared_memory(spec, self.tile),
            warpgroups=parts if parts > 1 else None,
        )

    def states(self, call: MmaBackward) -> dict[str, Array]:
        return dict(dq_acc=jnp.zeros(self.rounding.sums(call.ops.margin), jnp.float32)) | super().states(call)

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        made = super().finish(made, changed)
        of_all_warpgroups = {f"d_{name}": made[f"d_{name}"].sum(axis=2) for name in self.sums.names}
        return made | of_all_warpgroups | dict(dq_acc=changed["dq_acc"])

    @property
    def rounding(self) -> RoundDqPlan:
        """The kernel that rounds what this one adds up."""
        parts = self.tile.warpgroups
        columns = parts * part_columns(self.spec.head_dim, parts)
        return RoundDqPlan(self.spec, columns, self.tile.size, self.together)


def body(plan: FusedPlan, refs: Refs, ops: MmaOps) -> None:
    """Run one warpgroup of the kernel."""
    _Cta(plan, refs, ops).run()


class _Cta(Cta[FusedPlan]):
    def __init__(self, plan: FusedPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops, keys_first=True)
        wave, block, item = map(lax.axis_index, ("wave", "block", "item"))
        self.item = plan.schedule.item(wave, item)
        first = block * plan.tile.rows
        self.keys = [pl.ds(first + number * WARPGROUP_ROWS, WARPGROUP_ROWS) for number in range(plan.tile.blocks)]
        tiles = tile_range.visited(self.inputs, self.item.batch, block, plan.tile.rows, plan.tile.size)
        self.order = TileOrder(plan.spec, tiles, plan.schedule.heads, block, by_head=bool(plan.sums))
        self.warpgroup: Any = lax.axis_index("warpgroup") if plan.tile.warpgroups > 1 else 0
        self.tables = plan.tables.of_warpgroup(
            refs.arrays, self.item.batch, self.item.first_head, block, self.warpgroup
        )
        self.queries = plan.tile.size // plan.tile.warpgroups // plan.tile.passes
        """Of a tile, that are this warpgroup's in a pass."""
        self.adds_dq_between = plan.tile.warpgroups > 1 and plan.tile.stages > 1
        """Whether dQ is made between dK and dV. It is not where copies wait for these."""

    def run(self) -> None:
        """Walk over the tiles of queries, and store dK and dV."""
        plan, ops, shared, results = self.plan, self.ops, self.smem, self.refs.results
        self._copy_part("key", self.item.key_head, self.keys[0].start, shared.k)
        self._copy_part("value", self.item.key_head, self.keys[0].start, shared.v)
        self._copy_bias(jnp.int32(0))
        self._copy_tile(jnp.int32(0))
        nothing = lambda: tuple(plan.sums.zeros(ops) for _ in self.keys)

        def finish_head(head: Any, carry: Carry) -> Carry:
            acc_dk, acc_dv, totals = carry
            for keys, of_keys in zip(self.keys, totals, strict=True):
                place = self.item.batch, self.item.first_head + head, self.warpgroup, keys
                plan.sums.store(results, of_keys, *place)
            return acc_dk, acc_dv, nothing()

        acc_dk, acc_dv = (self._accumulators(plan.tile.rows, ring.shape[-1]) for ring in (shared.q, shared.do))
        parts = range(plan.tile.warpgroups)
        own = self.own_operands(*(tiles.at[part] for tiles in (shared.k, shared.v) for part in parts))
        visit = lambda *place_and_carry: self._visit(own, *place_and_carry)
        acc_dk, acc_dv, _ = self.order.each(visit, (acc_dk, acc_dv, nothing()), finish_head)
        scale = base2.sums_scale(plan.spec)
        self._store("d_key", tuple(total * scale for total in acc_dk))
        self._store("d_value", tuple(dropped.scaled(plan.spec, total) for total in acc_dv))

    def _store(self, name: str, acc: Tiles) -> None:
        target = self.plan.gradient_of(self.refs.results[name], self.item)
        if len(acc) > len(self.keys):
            part = self._part(2 * acc[0].shape[1])
            assert part is not None
            self.ops.store_pair(acc, target, self.keys[0].start, target.shape[0], part)
            return
        for keys, total in zip(self.keys, acc, strict=True):
            self.ops.store_rows(total, target, keys.start, target.shape[0], self._part(total.shape[1]))

    def _accumulators(self, rows: int, width: int) -> Tiles:
        """For products of `rows` in shared memory: blocks of 64, or for 64 rows a pair, if columns can be halved."""
        if self._are_paired(rows, width):
            return self.zeros(2, width // 2)
        return self.zeros(rows // WARPGROUP_ROWS, width)

    def _are_paired(self, rows: int, width: int) -> bool:
        return rows == WARPGROUP_ROWS and self.plan.tile.warpgroups > 1 and can_pair(width)

    def _add_tiles(self, acc: Tiles, a: Ref, b: Ref, steps: Sequence[int]) -> Tiles:
        """acc + a @ b for such accumulators, of some steps of 16 in K."""
        if self._are_paired(a.shape[0], b.shape[1]):
            return self.ops.add_pair_product(acc, a, b, steps=steps)
        return self.add_product(acc, a, b, transposed=False, steps=steps)

    def _part(self, width: int) -> ColumnChunk | None:
        """This warpgroup's columns, of all that have this width together."""
        parts = self.plan.tile.warpgroups
        return ColumnChunk(self.warpgroup * width, parts * width) if parts > 1 else None

    def _copy_part(self, name: str, head: Any, first: Any, target: Ref) -> None:
        """Begin to copy this warpgroup's columns of some rows."""
        self.copy(name, self.item.batch, head, first, target.at[self.warpgroup], self._part(target.shape[-1]))

    def _copy_tile(self, step: Array) -> None:
        count = self.order.tiles.count

        @pl.when(step < count * self.order.heads)
        def _() -> None:
            head, index = self.order.at(step, count)
            place = self.item.first_head + head, self.order.tiles.start(index)
            self._copy_part("query", *place, self.smem.q.at[self.slot(step)])
            self._copy_part("d_out", *place, self.smem.do.at[self.slot(step)])
            own = self.plan.tile.size // self.plan.tile.warpgroups
            first = self.warpgroup * own
            for number, name in enumerate(STATISTICS):
                source = self.refs.arrays[name].at[self.item.batch, place[0]]
                target = self.smem.statistics.at[self.slot(step), number, pl.ds(first, own)]
                self.ops.copy_numbers(source, target, place[1] + first)

        self.ops.commit()

    def _copy_bias(self, step: Array) -> None:
        """Begin to copy this warpgroup's part of a tile of the bias, if that comes through shared memory."""
        bias, count = self.smem.bias, self.order.tiles.count
        if bias is None:
            return

        @pl.when(step < count * self.order.heads)
        def _() -> None:
            head, index = self.order.at(step, count)
            own_head, start = self.item.first_head + head, self.order.tiles.start(index)
            for number in range(self.plan.tile.passes):
                place = self._own_part(number)
                query = start + place * self.queries
                self.copy_bias(TileCoord(self.item.batch, own_head, query, self.keys[0].start), bias.at[place])

        self.ops.commit()

    def _own_part(self, number: int) -> Any:
        """Which part of a tile's queries is this warpgroup's in a pass."""
        return self.warpgroup * self.plan.tile.passes + number

    def _products(self, own: Sequence[Operand], tiles: Ref, first: Any) -> Tiles:
        """Products of the own keys' rows and those of a pass's queries, from `first` of the tile on, of all columns."""
        acc = self.zeros(self.plan.tile.blocks, self.queries)
        for part, rows in enumerate(own):
            acc = self.add_product(acc, rows, tiles.at[part], transposed=True, first_row=first)
        return acc

    def _visit(self, own: Sequence[Operand], step: Array, head: Any, index: Any, carry: Carry) -> Carry:
        """Add one tile's part to the sums."""
        tile, shared, ops = self.plan.tile, self.smem, self.ops
        parts, slot = tile.warpgroups, self.slot(step)
        ops.wait(warpgroups=parts)
        # Parameters of the logits leave few registers: copies, whose addresses take some, are issued before.
        if tile.stages > 1 and not base2.is_plain(self.plan.spec):
            self._copy_tile(step + 1)
        for number in range(tile.passes):
            carry = self._add_pass(own, step, head, index, number, carry)
        acc_dk, acc_dv, totals = carry
        ops.meet(parts)
        # All have read it.
        self._copy_bias(step + 1)
        place = self.item.first_head + head, self.order.tiles.start(index)
        if parts > 1:
            acc_dk, acc_dv = self._add_sums(acc_dk, acc_dv, slot, *place)
        if tile.stages == 1:
            # Neither queries nor d_out are read any more.
            if parts > 1:
                ops.meet(parts)
            self._copy_tile(step + 1)
        if not self.adds_dq_between:
            self._add_dq(*place, shared.ds, self._dq_columns())
        return acc_dk, acc_dv, totals

    def _add_pass(self, own: Sequence[Operand], step: Array, head: Any, index: Any, number: int, carry: Carry) -> Carry:
        """Store P^T and dS^T of a pass, or add what this warpgroup makes of them."""
        acc_dk, acc_dv, totals = carry
        plan, spec, tile, shared, ops = self.plan, self.plan.spec, self.plan.tile, self.smem, self.ops
        parts, shape, blocks = tile.warpgroups, (WARPGROUP_ROWS, self.queries), range(tile.blocks)
        batch, own_head, start = self.item.batch, self.item.first_head + head, self.order.tiles.start(index)
        place = self._own_part(number) * self.queries
        first, first_row = start + place, place if self.queries < tile.size else None
        at = [TileCoord(batch, own_head, first, keys.start) for keys in self.keys]
        q, do = shared.q.at[self.slot(step)], shared.do.at[self.slot(step)]
        is_plain = base2.is_plain(spec)
        statistics = shared.statistics.at[self.slot(step)]
        statistic = lambda number: along_columns(ops.load(statistics.at[number, pl.ds(place, self.queries)], 1), shape)
        loaded = [self.load(one, shape) for one in at]
        s = self._products(own[:parts], q, first_row)
        # Products need what they read at once, and the copies a tile later.
        if tile.stages > 1 and is_plain and number == 0:
            self._copy_tile(step + 1)
        # Before the exponentials, which then run beside these products.
        dp = self._products(own[parts:], do, first_row)
        lse = statistic(0)
        if shared.bias is not None:
            (biases,) = ops.load_rows(shared.bias.at[self._own_part(number)], transposed=True)
            loaded = [some | {"bias": bias} for some, bias in zip(loaded, biases, strict=True)]
        contexts = [TileContext(self.inputs, self.order.tiles, index, at[block], loaded[block]) for block in blocks]
        tiles = [BackwardTile.of(*both, lse, plan.differentiated) for both in zip(contexts, s, strict=True)]
        kept = tuple(one.kept.astype(spec.dtype) for one in tiles)
        if parts > 1:
            ops.store_tile(kept, shared.p, place)
        else:
            acc_dv = self.add_product(acc_dv, (kept,), do.at[0], transposed=False, first_row=first_row)
        delta = statistic(1)
        gradients = [one.differentiate(dp[block], delta) for block, one in enumerate(tiles)]
        totals = tuple(plan.sums.added(total, one.parameters) for total, one in zip(totals, gradients, strict=True))
        ds = tuple(one.ds.astype(spec.dtype) for one in gradients)
        ops.store_tile(ds, shared.ds, place)
        for one, of_tile in zip(tiles, gradients, strict=True):
            one.add_to_tables(self.tables, of_tile, ops.opaque_zero(step))
        if parts == 1:
            acc_dk = self.add_product(acc_dk, (ds,), q.at[0], transposed=False, first_row=first_row)
        return acc_dk, acc_dv, totals

    def _add_sums(self, acc_dk: Tiles, acc_dv: Tiles, slot: Any, head: Any, first: Any) -> tuple[Tiles, Tiles]:
        """Add what two warpgroups stored of a tile of queries.

        An addition to device memory keeps its registers until it is on its way. So dQ is made between the steps of dK
        and dV, of a pair a few columns at a time: there is work until the next registers are free.
        """
        shared, steps = self.smem, self.plan.tile.size // STEP
        do, q = (ring.at[slot, self.warpgroup] for ring in (shared.do, shared.q))
        rows, parts = self._dq_parts() if self.adds_dq_between else (shared.ds, [])
        for step in range(steps):
            for columns in parts[len(parts) * step // steps : len(parts) * (step + 1) // steps]:
                self._add_dq(head, first, rows, columns)
            acc_dv = self._add_tiles(acc_dv, shared.p, do, [step])
            acc_dk = self._add_tiles(acc_dk, shared.ds, q, [step])
        return acc_dk, acc_dv

    def _dq_parts(self) -> tuple[Operand, list[range]]:
        """dS as A, and dQ's columns in parts. Those of a pair are narrow; in one block such a part would have too few
        sums to be made beside each other."""
        columns = self._dq_columns()
        if not can_pair(self.smem.k.shape[-1]):
            return self.smem.ds, [columns]
        rows = self.ops.load_rows(self.smem.ds, transposed=True, paired=True)
        return rows, [columns[first : first + STEP] for first in columns[::STEP]]

    def _dq_columns(self) -> range:
        """This warpgroup's columns of dQ, or half of them if a pair has each half."""
        width = self.smem.k.shape[-1]
        return range(width // 2 if can_pair(width) else width)

    def _add_dq(self, head: Any, first: Any, rows: Operand, columns: range) -> None:
        """Add some columns of a tile's dQ, or of each half of it, to what is in device memory; `rows` are those of dS,
        or its transpose in shared memory."""
        k, together = self.smem.k.at[self.warpgroup], self.plan.together
        target = self.refs.arrays["dq_acc"].at[self.item.batch, head]
        width = k.shape[-1]
        rows = rows if isinstance(rows, tuple) else Transposed(rows)
        place = first, self.warpgroup * width + columns.start
        if can_pair(width):
            dq = self.ops.add_pair_product(self.zeros(2, len(columns)), rows, k, first_column=columns.start)
            self.ops.add_pair(dq, target, *place, together, width // 2)
            return
        zeros = self.zeros(1, len(columns))
        (dq,) = self.add_product(zeros, rows, k, transposed=False, first_column=columns.start)
        self.ops.add_rows(dq, target, *place, together)
