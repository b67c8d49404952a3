"""What a fused backward does with a block of keys: it walks over the tiles of queries that can see them.

    each of two consumer warpgroups, on 64 keys, for each query head that shares them and each tile of queries:
      S^T  = K Q^T
      dP^T = V dO^T                  the matrix unit runs this, while the warpgroup goes on with
      P^T  = exp(S^T - lse)
      dV   = dV + P^T dO             and this, during
      dS^T = P^T (dP^T - delta)      into shared memory, for both
      dK   = dK + dS^T Q
      dQ   = dS K                    of the tile before: one half of it from all keys, added to what there is
    the producer warpgroup copies tiles of queries ahead of them into shared memory

A tile's dQ needs both warpgroups' dS. Made a tile later, it does not bring them into step: one's exponentials can run
beside the other's products. For half of dQ's columns the matrix unit reads as much of dS as for all. So where registers
hold all, a warpgroup makes the whole dQ of every other tile. `row_statistics` says how lse and delta come.

Sources: FlashAttention-2, arXiv:2307.08691, algorithm 2; FlashAttention-3, arXiv:2407.08608, section 3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import bf16_columns, piece_products, pipeline, row_statistics, smem
from jflash._backends.mosaic_gpu.array_shapes import in_panels, tile_dims, whole_dims
from jflash._backends.mosaic_gpu.cta import KeysCta, WalkingPlan
from jflash._backends.mosaic_gpu.dq_order import AnyOrder
from jflash._backends.mosaic_gpu.row_statistics import RowStatistics
from jflash._backends.mosaic_gpu.run import HopperBackward
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.mosaic_gpu.tiles import FusedTiles
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.ops import Ref, Tile
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import dropped, operand_pieces
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.gradient_sums import Sums
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics.spec import Spec


@dataclasses.dataclass(frozen=True)
class WalkBuffers:
    """Shared memory of a block of keys, and of the tiles of queries that are walked over."""

    spec: Spec
    tile: FusedTiles

    @property
    def as_columns(self) -> bool:
        """Whether products subtract row statistics."""
        return self.tile.columns_of_statistics and row_statistics.as_columns(self.spec)

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of tiles of queries and keys, and of dO and values."""
        head_dim, value_dim = tile_dims(self.spec)
        return self.tile.columns(head_dim), self.tile.columns(value_dim)

    @property
    def dq_width(self) -> int:
        """Columns of a tile's dQ that a warpgroup makes."""
        return self.columns[0] // 2 if self.tile.halves == "columns" else self.columns[0]

    @property
    def _chunk(self) -> int | None:
        """Columns of queries and keys that a product takes, if not all."""
        return self.dq_width if self.tile.halves == "columns" else None

    def keys_and_values(self, stages: int = 1) -> tuple[Any, Any]:
        """Return buffers for the keys and the values of `stages` blocks."""
        return self._of_blocks(CallTiles.of(self.spec).operand, stages)

    def gradients(self) -> tuple[Any, Any]:
        """Return buffers for dK and dV of a block."""
        return self._of_blocks(CallTiles.of(self.spec).result, 1)

    def _of_blocks(self, buffer: Callable[..., Any], blocks: int) -> tuple[Any, Any]:
        (head_dim, value_dim), (columns, value_columns) = whole_dims(self.spec), self.columns
        rows = blocks, self.tile.keys
        return buffer((*rows, columns), head_dim, chunk=self._chunk), buffer((*rows, value_columns), value_dim)

    def ds(self) -> tuple[Any, ...]:
        """Return buffers for dS^T of two steps: one warpgroup may write a step's while the other reads the last one.

        There is one in each swizzle of the keys, with whose columns dS is multiplied.
        """
        shape, tiles = (2, self.tile.keys, self.tile.queries), CallTiles(self.spec, in_panels=False)
        if in_panels(self.spec):
            panels = smem.panels_of(self.columns[0], self.spec.dtype, self._chunk)
            return tuple(tiles.operand(shape, chunk=width) for width in panels)
        return (tiles.operand(shape, whole_dims(self.spec)[0], chunk=self.dq_width),)

    def walked(self) -> dict[str, Any]:
        """Return what is walked over, by name. `full` waits for copies into a tile, `empty` for all who read it."""
        spec, tile, has_bias_tiles = self.spec, self.tile, facts_of(self.spec).has_bias_tiles
        (head_dim, value_dim), (columns, value_columns) = whole_dims(spec), self.columns
        # First lse of all tiles, then delta.
        vectors = smem.vectors(2 * tile.stages, tile.queries)
        ring = functools.partial(CallTiles.of(spec).ring, readers=tile.warpgroups)
        early = 1 if self.as_columns else row_statistics.early(spec)
        later = 0 if self.as_columns else 2 - early
        handed = smem.barriers(2, arrivals=tile.warpgroups)
        return dict(
            q=ring((tile.stages, tile.queries, columns), head_dim, others=early + has_bias_tiles, chunk=self._chunk),
            do=ring((tile.stages, tile.queries, value_columns), value_dim, others=later),
            # Tiles of the bias come and go with the queries.
            bias=smem.tile((tile.stages, tile.queries, tile.keys), spec.bias_dtype) if has_bias_tiles else None,
            statistics=bf16_columns.smem_tile(tile.stages, tile.queries) if self.as_columns else vectors,
            # What columns of statistics are multiplied with.
            ones=bf16_columns.smem_tile(2, WARPGROUP_ROWS) if self.as_columns else None,
            ds_full=handed,
            ds_empty=handed,
            finished=smem.barriers(1, arrivals=tile.warpgroups),
        )


@dataclasses.dataclass(frozen=True)
class QueryWalkPlan(WalkingPlan):
    """A kernel whose CTAs walk over the tiles of queries that see a block of keys."""

    tile: FusedTiles

    @property
    def buffers(self) -> WalkBuffers:
        """The shared memory of the walk."""
        return WalkBuffers(self.spec, self.tile)

    @property
    def alignment(self) -> int:
        """What divides the index at which a tile of queries begins."""
        return 8

    @property
    def rows_read(self) -> int:
        """The rows of queries that tiles read: the last one that may begin before their end is read whole."""
        return (self.spec.query_length - 1) // self.alignment * self.alignment + self.tile.queries

    def arrays(self, call: HopperBackward) -> dict[str, Array]:
        """Return whole tiles, row statistics as the products or accumulators take them, and what shapes logits."""
        column_rows = self.rows_read if self.buffers.as_columns else None
        made = call.row_sums(column_rows=column_rows, dq_acc=self.dq_acc(call.ops.margin))
        statistics = row_statistics.for_fused(self.spec, call.lse, made["delta"], made.get("columns"))
        return call.around(keys_first=True) | call.tiles | statistics | call.visits(self.visits)

    def dq_acc(self, margin: int) -> jax.ShapeDtypeStruct | None:
        """Return the accumulators of dQ in device memory, if the kernel has any; copies that add want a margin."""
        return None


class Step(NamedTuple):
    """Where a step's queries are."""

    head: Int[Array, ""]
    """The head, counted in its head group."""
    eighth: Int[Array, ""]
    """An eighth of the first query's index: so the compiler knows that the index is a multiple of 8."""


class Accumulators(NamedTuple):
    """dK and dV of a warpgroup's keys."""

    dk: Float[Array, "keys H"]
    dv: Float[Array, "keys D"]


_Carry = tuple[Accumulators, Sums, Step]
"""The loop's state: accumulators, the sums of parameters' gradients for one head, and the step before."""


class QueryWalkCta[Plan: QueryWalkPlan](KeysCta[Plan]):
    """A CTA whose warpgroups make dK and dV of a block of keys, and shares of dQ."""

    gradients: tuple[Ref, Ref]
    """Shared memory for dK and dV of the block."""
    ds: tuple[Ref, ...]
    """Shared memory for dS^T of two steps, `[2, keys, queries]`, in each swizzle of the keys."""

    @property
    def sum_rows(self) -> Any:
        """The keys of this warpgroup."""
        return pl.ds(self.first_key + self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @property
    def tables(self) -> dict[str, Ref]:
        """This warpgroup's sums of tables' gradients."""
        block, item = lax.div(self.first_key, self.plan.tile.keys), self.item
        return self.plan.tables.of_warpgroup(self.refs.arrays, item.batch, item.first_head, block, self.warpgroup)

    additions = AnyOrder()
    """The order of additions to dQ."""

    def turn(self, step: Any, at: Step) -> Any:
        """Return a number that is even if the first warpgroup makes a step's dQ, where they take turns."""
        return step

    def dq_target(self, at: Step) -> Any:
        """Return where this warpgroup's share of a step's dQ is added to; called before the share is made."""
        raise NotImplementedError

    def add_to_dq(self, target: Any, dq: Tile) -> None:
        """Add this warpgroup's share of a step's dQ to its target."""
        raise NotImplementedError

    def copy_keys(self, full: Any) -> None:
        """Copy the block's keys and values."""
        self.copy_rows(self.key_tile, full, key=self.k.at[0], value=self.v.at[0])

    def copy_ones(self, full: Any) -> None:
        """Copy what columns of statistics are multiplied with, if the kernel has them."""
        if self.smem.ones is not None:
            plgpu.copy_gmem_to_smem(self.refs.arrays["ones"], self.smem.ones, full)

    def scaled(self, acc: Accumulators) -> tuple[Array, Array]:
        """Return dK and dV from what was accumulated."""
        return acc.dk * facts_of(self.plan.spec).sums_scale, dropped.scaled(self.plan.spec, acc.dv)

    def store_rounded(self, acc: Accumulators) -> None:
        """Issue copies of dK and dV, when both warpgroups are done with the block."""
        shared, item, rows = self.smem, self.item, self.warpgroup_rows
        results = self.refs.results["d_key"], self.refs.results["d_value"]
        gradients = self.scaled(acc)
        plgpu.barrier_arrive(shared.finished)
        plgpu.barrier_wait(shared.finished)
        for buffer, gradient in zip(self.gradients, gradients, strict=True):
            buffer[0, rows] = gradient.astype(buffer.dtype)
        plgpu.commit_smem()
        for buffer, result in zip(self.gradients, results, strict=True):
            columns = pipeline.columns(buffer.shape[-1], result, item.batch)
            pipeline.copy_out(buffer.at[0, rows], result.at[item.batch, self.sum_rows, item.key_head, columns])

    def visit_all(self) -> Accumulators:
        """Return dK and dV after all tiles; the sums of parameters' gradients are stored after each head."""
        ops, dims = self.ops, [gradient.shape[2] for gradient in self.gradients]
        acc = Accumulators(*(ops.full((WARPGROUP_ROWS, dim), 0) for dim in dims))
        start = (acc, self.plan.sums.zeros(ops), Step(jnp.int32(0), jnp.int32(0)))
        acc, _, before = self.order.each(self._visit, start, self.finish_head)
        steps = self.order.tiles.count * self.order.heads
        last, nothing = steps - 1, lambda: None
        makes_dq = (steps > 0) & self._is_turn(last, before)
        lax.cond(makes_dq, lambda: self._make_dq(last, before, nothing), lambda: self._leave_dq(last, nothing))
        # No barrier may end in the middle of its phase.
        plgpu.barrier_wait(self.smem.ds_empty.at[lax.rem(steps, 2)])
        return acc

    def _visit(self, step: Array, head: Array, index: Array, carry: _Carry) -> _Carry:
        """Add what one tile gives to the accumulators, and what the tile before gives to dQ."""
        (acc, sums, before), spec = carry, self.plan.spec
        visited = self.order.tiles.tile(index)
        start = visited.start
        key = self.first_key + self.warpgroup * WARPGROUP_ROWS
        at = TileCoord(self.item.batch, self.item.first_head + head, start, key)
        smem, ops, shape = self.smem, self.ops, (WARPGROUP_ROWS, self.plan.tile.queries)
        slot, parity = lax.rem(step, self.plan.tile.stages), lax.rem(step, 2)
        opaque_index = pipeline.opaque_zero(step, self.warpgroup)
        pieces = functools.partial(piece_products.of_tile, spec)
        q, do = pieces(smem.q.tiles.at[slot]), pieces(smem.do.tiles.at[slot])
        k, v = (pieces(ref.at[opaque_index].at[self.warpgroup_rows]) for ref in (self.k, self.v))
        loaded = self.inputs.load_packed_mask(at, shape)
        plgpu.barrier_wait(smem.q.full.at[slot])
        slots = range(0, smem.statistics.shape[0], self.plan.tile.stages)
        refs = [smem.statistics.at[first + slot] for first in slots]
        statistics = RowStatistics(self.inputs, shape, refs, smem.ones)
        if smem.bias is not None:
            loaded["bias"] = ops.load(smem.bias.at[slot, :, self.warpgroup_rows].T)
        context = TileContext(self.inputs, visited, at, loaded)

        def add(acc_dk: Any, acc_dv: Any) -> tuple[Array, ...]:
            def differentiate(acc_dp: Any, acc_s: Any) -> tuple[Pieces, tuple[Array, ...]]:
                statistics.begin(acc_s, acc_dp)
                statistics.mma(acc_s, k, operand_pieces.transposed(q), 0)
                plgpu.barrier_wait(smem.do.full.at[slot])
                statistics.mma(acc_dp, v, operand_pieces.transposed(do), 1)
                s = ops.read(acc_s, pending=statistics.issued(do))
                tile = BackwardTile.of(context, s, statistics.lse, self.plan.differentiated)
                kept = operand_pieces.split(spec, tile.kept, ops)
                piece_products.mma(acc_dv, kept, do, ops)
                dp = ops.read(acc_dp, pending=piece_products.issued(do))
                gradients = tile.differentiate(dp, statistics.delta())
                totals = self.plan.sums.added(sums, gradients.parameters)
                tile.add_to_tables(self.tables, gradients, opaque_index)
                return self._hand_over(gradients.ds, parity), totals

            ds, totals = ops.accumulators(differentiate, shape, shape)
            piece_products.mma(acc_dk, ds, q, ops)

            def free() -> None:
                plgpu.barrier_arrive(smem.ds_empty.at[1 - parity])
                plgpu.barrier_arrive(smem.do.empty.at[slot])
                plgpu.barrier_arrive(smem.q.empty.at[slot])

            last, makes_dq = step - 1, (step > 0) & self._is_turn(step - 1, before)
            ops.cond(makes_dq, lambda: self._make_dq(last, before, free), lambda: self._leave_dq(last, free))
            return totals

        sums, (dk, dv) = piece_products.accumulate(spec, add, acc.dk, acc.dv, like=sums, ops=ops)
        return Accumulators(dk, dv), sums, Step(jnp.int32(head), lax.div(visited.start, 8))

    def _hand_over(self, ds: Array, parity: Array) -> Pieces:
        """Return dS^T as an operand of this warpgroup's dK, and store it for both warpgroups' dQ."""
        spec = self.plan.spec
        pieces = operand_pieces.split(spec, ds, self.ops)
        plgpu.barrier_wait(self.smem.ds_empty.at[parity])
        for buffer in self.ds:
            for piece, target in zip(pieces, piece_products.of_tile(spec, buffer.at[parity]), strict=True):
                target[self.warpgroup_rows] = piece
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem.ds_full.at[parity])
        return pieces

    def _is_turn(self, step: Array, at: Step) -> Any:
        """Return whether this warpgroup makes dQ of a step, or a half of it."""
        tile = self.plan.tile
        return lax.rem(self.turn(step, at), tile.warpgroups) == self.warpgroup if tile.dq_alternates else True

    def _leave_dq(self, step: Array, then: Callable[[], None]) -> None:
        """Leave a step's dQ, if there is such a step, to the other warpgroup, and call `then`."""
        if self.plan.tile.dq_alternates:
            # Who waits for a barrier waits for each of its phases.
            pl.when(step >= 0)(lambda: plgpu.barrier_wait(self.smem.ds_full.at[lax.rem(step, 2)]))
        self.additions.end(step + 1)
        self.additions.await_turn(step)
        then()

    def _make_dq(self, step: Array, at: Step, made: Callable[[], None]) -> None:
        """Make this warpgroup's share of a step's dQ, and call `made` after its products."""
        halves, ops, width = self.plan.tile.halves, self.ops, self.plan.buffers.dq_width
        target = self.dq_target(at)
        parity = lax.rem(step, 2)
        plgpu.barrier_wait(self.smem.ds_full.at[parity])
        k = self.k.at[pipeline.opaque_zero(step, self.warpgroup)]
        pieces = functools.partial(piece_products.of_tile, self.plan.spec)
        rows: tuple[Any, ...] = (self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS) if halves == "rows" else ()
        columns: tuple[Any, ...] = (self.warpgroup * width, width) if halves == "columns" else ()
        each = [pieces(buffer.at[parity], *rows) for buffer in self.ds]
        ds = operand_pieces.transposed(each[0] if len(each) == 1 else piece_products.by_width(k.widths, each))
        self.additions.end(step + 1)
        await_turn = functools.partial(self.additions.await_turn, step)
        dq = piece_products.matmul(ds, pieces(k, *columns), (WARPGROUP_ROWS, width), ops, await_turn)
        made()
        self.add_to_dq(target, dq)
