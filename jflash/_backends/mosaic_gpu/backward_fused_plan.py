"""The fused backward before any array: shared memory, launch, and what becomes of its results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jflash._backends.mosaic_gpu import bf16_columns, dq_accumulator, row_statistics, smem
from jflash._backends.mosaic_gpu.array_shapes import block_dims, in_panels, tile_dims, whole_dims, whole_rows
from jflash._backends.mosaic_gpu.dq_accumulator import DqAccumulator, RoundedByLast, RoundedLater
from jflash._backends.mosaic_gpu.prepared import HopperBackward
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.mosaic_gpu.tiles import FusedTiles
from jflash._backends.nvidia import bias_and_mask
from jflash._backends.nvidia.launch import Launch
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.threads import sums
from jflash._backends.nvidia.tile.base2 import sums_scale
from jflash._backends.nvidia.tile.gradient_sums import SummingPlan
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._semantics.spec import Spec


@dataclasses.dataclass(frozen=True)
class QueryWalkPlan(SummingPlan):
    """A kernel whose CTAs walk over the tiles of queries that see a block of keys."""

    tile: FusedTiles

    @property
    def dq_width(self) -> int:
        """Columns of a tile's dQ that a warpgroup makes."""
        return dq_width(self.spec, self.tile)

    def arrays(self, call: HopperBackward) -> dict[str, Array]:
        """Return whole tiles, row statistics as the products or accumulators take them, and what shapes logits."""
        made = call.row_sums(as_columns=as_columns(self.spec, self.tile), dq_acc=self.dq_acc(call.ops.margin))
        statistics = row_statistics.for_fused(self.spec, call.lse, made["delta"], made.get("columns"))
        return call.around_keys | call.tiles | statistics | call.ranges(self.tile.keys, of_keys=True)

    def dq_acc(self, margin: int) -> jax.ShapeDtypeStruct | None:
        """Return the accumulators of dQ in device memory, if the kernel has any; copies that add want a margin."""
        return None


def dq_width(spec: Spec, tile: FusedTiles) -> int:
    """Return the columns of a tile's dQ that a warpgroup makes."""
    columns = tile.columns(tile_dims(spec)[0])
    return columns // 2 if tile.halves == "columns" else columns


def _columns_of_product(spec: Spec, tile: FusedTiles) -> int | None:
    """Return how many columns of queries and keys a product takes, if not all."""
    return dq_width(spec, tile) if tile.halves == "columns" else None


def as_columns(spec: Spec, tile: FusedTiles) -> bool:
    """Return whether products subtract row statistics."""
    return tile.columns_of_statistics and row_statistics.as_columns(spec)


def keys_and_values(spec: Spec, tile: FusedTiles, stages: int = 1) -> tuple[Any, Any]:
    """Return buffers for the keys and the values of `stages` blocks."""
    dims, columns, value_columns = whole_dims(spec), *map(tile.columns, tile_dims(spec))
    tiles = CallTiles.of(spec)
    k = tiles.operand((stages, tile.keys, columns), dims[0], part=_columns_of_product(spec, tile))
    return k, tiles.operand((stages, tile.keys, value_columns), dims[1])


def gradients(spec: Spec, tile: FusedTiles) -> tuple[Any, Any]:
    """Return buffers for dK and dV of a block."""
    dims, columns, value_columns = whole_dims(spec), *map(tile.columns, tile_dims(spec))
    tiles = CallTiles.of(spec)
    dk = tiles.result((1, tile.keys, columns), dims[0], part=_columns_of_product(spec, tile))
    return dk, tiles.result((1, tile.keys, value_columns), dims[1])


def ds(spec: Spec, tile: FusedTiles) -> tuple[Any, ...]:
    """Return buffers for dS^T of two steps: while one warpgroup still reads a step's, the other may write the next.

    There is one in each swizzle of the keys, with whose columns dS is multiplied.
    """
    shape, tiles = (2, tile.keys, tile.queries), CallTiles(spec, in_panels=False)
    if in_panels(spec):
        panels = smem.panels_of(tile.columns(tile_dims(spec)[0]), spec.dtype, _columns_of_product(spec, tile))
        return tuple(tiles.operand(shape, part=width) for width in panels)
    return (tiles.operand(shape, whole_dims(spec)[0], part=dq_width(spec, tile)),)


def walked(spec: Spec, tile: FusedTiles) -> dict[str, Any]:
    """Return buffers and barriers of what is walked over, by name.

    A barrier `full` completes a phase when a copy has arrived, `empty` when all readers are done.
    """
    dims, columns, value_columns = whole_dims(spec), *map(tile.columns, tile_dims(spec))
    has_bias_tiles, in_columns = bias_and_mask.has_bias_tiles(spec), as_columns(spec, tile)
    # First lse of all tiles, then delta.
    vectors = smem.vectors(2 * tile.stages, tile.queries)
    ring = functools.partial(CallTiles.of(spec).ring, readers=tile.warpgroups)
    early = 1 if in_columns else row_statistics.early(spec)
    handed = smem.barriers(2, arrivals=tile.warpgroups)
    q = (tile.stages, tile.queries, columns)
    return dict(
        q=ring(q, dims[0], others=early + has_bias_tiles, part=_columns_of_product(spec, tile)),
        do=ring((tile.stages, tile.queries, value_columns), dims[1], others=0 if in_columns else 2 - early),
        # Tiles of the bias come and go with the queries.
        bias=smem.tile((tile.stages, tile.queries, tile.keys), spec.bias_dtype) if has_bias_tiles else None,
        statistics=bf16_columns.smem_tile(tile.stages, tile.queries) if in_columns else vectors,
        # What columns of statistics are multiplied with.
        ones=bf16_columns.smem_tile(2, WARPGROUP_ROWS) if in_columns else None,
        ds_full=handed,
        ds_empty=handed,
        finished=smem.barriers(1, arrivals=tile.warpgroups),
    )


def shared_memory(spec: Spec, tile: FusedTiles) -> Buffers:
    """Return the kernel's buffers and barriers."""
    (k, v), (dk, dv) = keys_and_values(spec, tile), gradients(spec, tile)
    dq = (tile.warpgroups, WARPGROUP_ROWS, dq_width(spec, tile))
    return Buffers(
        # Their gradients take the place of keys and values.
        k_dk=smem.reused(k, dk),
        v_dv=smem.reused(v, dv),
        kv_full=smem.barriers(1, arrivals=smem.copies(k, v) + as_columns(spec, tile)),
        **walked(spec, tile),
        ds=ds(spec, tile),
        # What copies add from.
        dq=None if tile.adds_registers else smem.tile(dq, jnp.float32, block_dims(spec)[0]),
        # The CTA's place in the order in which CTAs begin, and for each warpgroup in which those of its work item end.
        # One vector: another would begin a kilobyte later.
        numbers=smem.vectors(1 + tile.warpgroups, dtype=jnp.int32),
        ticket_drawn=smem.barriers(1),
    )


@dataclasses.dataclass(frozen=True)
class FusedPlan(QueryWalkPlan):
    """One kernel for dQ, dK and dV, which adds dQ in device memory."""

    schedule: BackwardSchedule

    @property
    def dq(self) -> type[DqAccumulator]:
        """Which of a work item's CTAs round dQ."""
        if self.schedule.partial:
            return DqAccumulator
        return RoundedLater if self.schedule.room is None else RoundedByLast

    @property
    def launch(self) -> Launch:
        """The launch, with waves of CTAs that have keys, and after them those that only round dQ."""
        spec, schedule, dims = self.spec, self.schedule, whole_dims(self.spec)
        rows, key_rows = (whole_rows(spec, length) for length in (spec.query_length, spec.key_length))
        keys = schedule.blocks * self.tile.keys
        columns, value_columns = map(self.tile.columns, tile_dims(spec))
        d_query = jax.ShapeDtypeStruct((spec.batch, rows, spec.heads, dims[0]), spec.dtype)
        return Launch(
            name=f"jflash_backward_{dims[0]}_{dims[1]}",
            grid=dict(wave=schedule.waves + self.dq.lag(schedule), block=schedule.blocks, item=schedule.items),
            results=dict(
                **({} if spec.partial else dict(d_query=d_query)),
                d_key=schedule.gradient(spec, (key_rows, dims[0]), (keys, columns)),
                d_value=schedule.gradient(spec, (key_rows, dims[1]), (keys, value_columns)),
                **self.sums.results(spec.batch, spec.heads, keys),
            ),
            smem=shared_memory(spec, self.tile),
            warpgroups=self.tile.warpgroups + 1,
        )

    @property
    def acc_columns(self) -> int:
        """Columns of an accumulator of dQ."""
        columns = block_dims(self.spec)[0]
        return round_up(columns, sums.COLUMNS) if self.tile.adds_registers else columns

    def dq_acc(self, margin: int) -> jax.ShapeDtypeStruct:
        # Registers add whole tiles, of which one may begin at the last query.
        room = max(margin, self.tile.queries if self.tile.adds_registers else 0)
        rows = round_up(self.spec.query_length, WARPGROUP_ROWS) + room
        return jax.ShapeDtypeStruct((self.dq.accumulators(self.schedule), rows, self.acc_columns + margin), jnp.float32)

    def states(self, call: HopperBackward) -> dict[str, Array]:
        counters = jnp.zeros(self.dq.counters(self.schedule), jnp.int32)
        return dict(dq_acc=call.row_sums()["dq_acc"], counters=counters, **super().states(call))

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        made = super().finish(made, changed) | self.schedule.summed(self.spec, made, whole_dims(self.spec))
        if not self.schedule.partial:
            return made
        acc = changed["dq_acc"][:, :, : self.acc_columns]
        acc = sums.as_rows(acc) if self.tile.adds_registers else acc
        return made | dict(d_query=dq_accumulator.unrounded(self.schedule, acc) * sums_scale(self.spec))
