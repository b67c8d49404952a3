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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma.cta import STATISTICS, MmaOps, bias_buffer, buffer
from jflash._backends.mosaic_gpu_mma.own_keys import Carry, KeysCta, KeysPlan
from jflash._backends.mosaic_gpu_mma.products import STEP, Operand, Tiles, Transposed, can_pair
from jflash._backends.mosaic_gpu_mma.round_dq import RoundDqPlan
from jflash._backends.mosaic_gpu_mma.run import MmaBackward
from jflash._backends.mosaic_gpu_mma.tiles import FusedTile
from jflash._backends.nvidia import smem
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import Ref, along_columns
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.threads.device_rows import ColumnChunk
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.walk.tile_range import VisitedTile


@dataclasses.dataclass(frozen=True)
class FusedPlan(KeysPlan):
    """The kernel for dQ, dK and dV, before any array. Each warpgroup sums parameters' gradients for itself."""

    tile: FusedTile
    together: int
    """Numbers of dQ that one instruction adds."""

    @property
    def launch(self) -> Launch:
        """The kernel's grid, results and shared memory; of queries, keys and values each warpgroup has some columns."""
        spec, tile, shares = self.spec, self.tile, self.tile.warpgroups
        head_columns, value_columns = self._columns(spec.head_dim), self._columns(spec.value_dim)
        return Launch(
            name=f"jflash_mma_backward_{spec.head_dim}_{spec.value_dim}",
            grid=self.schedule.grid,
            results=self.gradients | self.sums.results(spec.batch, spec.heads, shares, self.key_rows),
            smem=Buffers(
                key=buffer(spec, shares, tile.rows, head_columns),
                value=buffer(spec, shares, tile.rows, value_columns),
                query=buffer(spec, tile.stages, shares, tile.size, head_columns),
                d_out=buffer(spec, tile.stages, shares, tile.size, value_columns),
                statistics=smem.vectors(tile.stages, len(STATISTICS), tile.size),
                p=buffer(spec, tile.rows, tile.size) if shares > 1 else None,
                ds=buffer(spec, tile.rows, tile.size),
                bias=bias_buffer(spec, shares * tile.passes, self.queries, tile.rows),
            ),
            warpgroups=shares if shares > 1 else None,
        )

    @property
    def queries(self) -> int:
        """How many of a tile's queries are a warpgroup's in a pass."""
        return self.tile.size // self.tile.warpgroups // self.tile.passes

    def _columns(self, dim: int) -> int:
        """Return how many columns of tiles of rows of H or D numbers are one warpgroup's."""
        return round_up(pl.cdiv(dim, self.tile.warpgroups), STEP)

    def states(self, call: MmaBackward) -> dict[str, Array]:
        return dict(dq_acc=jnp.zeros(self.rounding.sums(call.ops.margin), jnp.float32)) | super().states(call)

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        made = super().finish(made, changed)
        of_all_warpgroups = {f"d_{name}": made[f"d_{name}"].sum(axis=2) for name in self.sums.names}
        return made | of_all_warpgroups | dict(dq_acc=changed["dq_acc"])

    @property
    def rounding(self) -> RoundDqPlan:
        """The kernel that rounds what this one adds up."""
        columns = self.tile.warpgroups * self._columns(self.spec.head_dim)
        return RoundDqPlan(self.spec, columns, self.tile.size, self.together)


class FusedCta(KeysCta[FusedPlan]):
    """A warpgroup of the fused kernel."""

    def __init__(self, plan: FusedPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops)
        self.warpgroup: Any = lax.axis_index("warpgroup") if self.warpgroups > 1 else 0
        self.sums_place = (self.warpgroup,)
        place = self.item.batch, self.item.first_head, self.block, self.warpgroup
        self.tables = plan.tables.of_warpgroup(refs.arrays, *place)
        self.adds_dq_between = self.warpgroups > 1 and plan.tile.stages > 1
        """Whether dQ is made between dK and dV. It is not where copies wait for these."""

    def run(self) -> None:
        """Walk over the tiles of queries, and store dK and dV."""
        shared = self.smem
        for name in ("key", "value"):
            self._copy_columns(name, self.item.key_head, self.keys[0].start, getattr(shared, name))
        self._copy_bias(jnp.int32(0))
        self._copy_tile(jnp.int32(0))
        rows = [array.at[share] for array in (shared.key, shared.value) for share in range(self.warpgroups)]
        self.walk(rows, ("d_key", "d_value"))

    def accumulators(self, width: int) -> Tiles:
        """Return zeros of blocks of 64 keys; of a pair if two warpgroups have 64, and columns can be halved."""
        is_pair = len(self.keys) == 1 and self.warpgroups > 1 and can_pair(width)
        return self.zeros(2, width // 2) if is_pair else super().accumulators(width)

    def _are_pair(self, acc: Sequence[Array]) -> bool:
        return len(acc) > len(self.keys)

    def store(self, totals: Iterable[Array], target: Ref) -> None:
        totals = tuple(totals)
        if self._are_pair(totals):
            columns = self._column_share(2 * totals[0].shape[1])
            self.ops.store_pair(totals, target, self.keys[0].start, target.shape[0], columns)
            return
        for keys, total in zip(self.keys, totals, strict=True):
            self.ops.store_rows(total, target, keys.start, target.shape[0], self._column_share(total.shape[1]))

    def _column_share(self, width: int) -> ColumnChunk | None:
        """Return this warpgroup's columns of an array; `None` if it has all. Each warpgroup has `width`."""
        return ColumnChunk(self.warpgroup * width, self.warpgroups * width) if self.warpgroups > 1 else None

    def _copy_columns(self, name: str, head: Any, first: Any, target: Ref) -> None:
        """Begin to copy this warpgroup's columns of some rows."""
        columns = self._column_share(target.shape[-1])
        self.copy(name, self.item.batch, head, first, target.at[self.warpgroup], columns)

    def _copy_tile(self, step: Array) -> None:
        def copy(head: Any, first: Any) -> None:
            slot, queries = self.slot(step), self.plan.tile.size // self.warpgroups
            for name in ("query", "d_out"):
                self._copy_columns(name, head, first, getattr(self.smem, name).at[slot])
            place = self.warpgroup * queries
            for number, name in enumerate(STATISTICS):
                source = self.refs.arrays[name].at[self.item.batch, head]
                target = self.smem.statistics.at[slot, number, pl.ds(place, queries)]
                self.ops.copy_numbers(source, target, first + place)

        self.begin(step, copy)

    def _copy_bias(self, step: Array) -> None:
        """Begin to copy this warpgroup's queries of a tile of the bias, if that comes through shared memory."""

        def copy(head: Any, first: Any) -> None:
            for number in range(self.plan.tile.passes):
                share = self._share(number)
                at = TileCoord(self.item.batch, head, first + share * self.plan.queries, self.keys[0].start)
                self.copy_bias(at, self.smem.bias.at[share])

        if self.smem.bias is not None:
            self.begin(step, copy)

    def _share(self, number: int) -> Any:
        """Return which share of a tile's queries is this warpgroup's in a pass."""
        return self.warpgroup * self.plan.tile.passes + number

    def _products(self, own: Sequence[Operand], tiles: Ref, first: Any) -> Tiles:
        """Return products of the CTA's keys and a pass's queries, from `first` of the tile on, of all columns."""
        acc = self.zeros(self.plan.tile.blocks, self.plan.queries)
        for share, rows in enumerate(own):
            acc = self.add_product(acc, rows, tiles.at[share], transposed=True, first_row=first)
        return acc

    def visit(self, own: Sequence[Operand], step: Array, head: Any, index: Any, carry: Carry) -> Carry:
        tile, shared, ops = self.plan.tile, self.smem, self.ops
        shares, slot = self.warpgroups, self.slot(step)
        visited = self.order.tiles.tile(index)
        ops.wait(warpgroups=shares)
        # Parameters of the logits leave few registers: copies, whose addresses take some, are issued before.
        if tile.stages > 1 and not facts_of(self.plan.spec).is_plain:
            self._copy_tile(step + 1)
        for number in range(tile.passes):
            carry = self._add_pass(own, step, head, visited, number, carry)
        acc, totals = carry
        ops.meet(shares)
        # All have read it.
        self._copy_bias(step + 1)
        place = self.item.first_head + head, visited.start
        if shares > 1:
            acc = self._add_sums(acc, slot, *place)
        if tile.stages == 1:
            # Neither queries nor d_out are read any more.
            if shares > 1:
                ops.meet(shares)
            self._copy_tile(step + 1)
        if not self.adds_dq_between:
            self._add_dq(*place, Transposed(shared.ds), self._dq_columns())
        return acc, totals

    def _add_pass(
        self, own: Sequence[Operand], step: Array, head: Any, visited: VisitedTile, number: int, carry: Carry
    ) -> Carry:
        """Store P^T and dS^T of a pass, or add what this warpgroup makes of them."""
        acc, sums = dict(carry[0]), carry[1]
        spec, tile, shared, ops = self.plan.spec, self.plan.tile, self.smem, self.ops
        shares, queries = self.warpgroups, self.plan.queries
        own_head, start = self.item.first_head + head, visited.start
        place = self._share(number) * queries
        first_row, shape = place if queries < tile.size else None, (WARPGROUP_ROWS, queries)
        at = [TileCoord(self.item.batch, own_head, start + place, keys.start) for keys in self.keys]
        q, do, statistics = (ring.at[self.slot(step)] for ring in (shared.query, shared.d_out, shared.statistics))
        statistic = lambda name: along_columns(
            ops.load(statistics.at[STATISTICS.index(name), pl.ds(place, queries)], 1), shape
        )
        loaded = [self.load(one, shape) for one in at]
        s = self._products(own[:shares], q, first_row)
        # Products need what they read at once, and the copies a tile later.
        if tile.stages > 1 and facts_of(spec).is_plain and number == 0:
            self._copy_tile(step + 1)
        # Before the exponentials, which then run beside these products.
        dp = self._products(own[shares:], do, first_row)
        lse = statistic("lse")
        if shared.bias is not None:
            (biases,) = ops.load_rows(shared.bias.at[self._share(number)], transposed=True)
            loaded = [some | {"bias": bias} for some, bias in zip(loaded, biases, strict=True)]
        tiles = self.tiles(visited, at, loaded, s, lse)
        kept = tuple(one.kept.astype(spec.dtype) for one in tiles)
        add = lambda name, a, b: self.add_product(acc[name], (a,), b.at[0], first_row=first_row)
        if shares > 1:
            ops.store_tile(kept, shared.p, place)
        else:
            acc["d_value"] = add("d_value", kept, do)
        gradients, sums = self.differentiate(tiles, dp, statistic("delta"), sums)
        ds = tuple(one.ds.astype(spec.dtype) for one in gradients)
        ops.store_tile(ds, shared.ds, place)
        for one, of_tile in zip(tiles, gradients, strict=True):
            one.add_to_tables(self.tables, of_tile, ops.opaque_zero(step))
        if shares == 1:
            acc["d_key"] = add("d_key", ds, q)
        return acc, sums

    def _add_sums(self, acc: dict[str, Tiles], slot: Any, head: Any, first: Any) -> dict[str, Tiles]:
        """Add what two warpgroups stored of a tile of queries.

        An addition to device memory keeps its registers until it is on its way. So dQ is made between the steps of dK
        and dV, of a pair a few columns at a time: there is work until the next registers are free.
        """
        acc, shared, steps = dict(acc), self.smem, self.plan.tile.size // STEP
        do, q = (ring.at[slot, self.warpgroup] for ring in (shared.d_out, shared.query))
        rows, chunks = self._dq_chunks() if self.adds_dq_between else (Transposed(shared.ds), [])
        for step in range(steps):
            for columns in chunks[len(chunks) * step // steps : len(chunks) * (step + 1) // steps]:
                self._add_dq(head, first, rows, columns)
            for name, a, b in (("d_value", shared.p, do), ("d_key", shared.ds, q)):
                acc[name] = self.add_product(acc[name], a, b, steps=[step], paired=self._are_pair(acc[name]))
        return acc

    def _dq_chunks(self) -> tuple[Operand, list[range]]:
        """Return dS as A, and dQ's columns in chunks. Those of a pair are narrow; in one block such a chunk would have
        too few sums to be made beside each other."""
        columns = self._dq_columns()
        if not can_pair(self.smem.key.shape[-1]):
            return Transposed(self.smem.ds), [columns]
        rows = self.ops.load_rows(self.smem.ds, transposed=True, paired=True)
        return rows, [columns[first : first + STEP] for first in columns[::STEP]]

    def _dq_columns(self) -> range:
        """Return this warpgroup's columns of dQ, or half of them if a pair has each half."""
        width = self.smem.key.shape[-1]
        return range(width // 2 if can_pair(width) else width)

    def _add_dq(self, head: Any, first: Any, rows: Operand, columns: range) -> None:
        """Add some columns of a tile's dQ, or of each half, to device memory; `rows` are dS."""
        k = self.smem.key.at[self.warpgroup]
        target = self.refs.arrays["dq_acc"].at[self.item.batch, head]
        width = k.shape[-1]
        place = first, self.warpgroup * width + columns.start
        paired = can_pair(width)
        zeros = self.zeros(2 if paired else 1, len(columns))
        dq = self.add_product(zeros, rows, k, first_column=columns.start, paired=paired)
        self.ops.add_rows(dq, target, *place, self.plan.together, width // 2)
