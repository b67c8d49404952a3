"""A wide call's backward before any array: what each gradient's kernel reads, its tiles, shared memory and launch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu import smem
from jflash._backends.mosaic_gpu.array_shapes import whole_dims
from jflash._backends.mosaic_gpu.column_chunks import ColumnChunks
from jflash._backends.mosaic_gpu.cta import WalkingPlan
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.mosaic_gpu.tiles import WalkedTiles
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Launch
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.tile.gradient_sums import ParameterSums, TableSums
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._semantics.spec import Spec

_BYTES_IN_FLIGHT = 24 * 1024
"""Bytes of chunks that are enough: products of as many take as long as a copy."""

_MOST_COLUMNS = 320
"""Columns that registers hold of a tile of logits and of a warpgroup's half of the sum, together."""


class _Kind(NamedTuple):
    """What a gradient's kernel reads."""

    cta_rows: tuple[str, ...]
    """Arrays of which a CTA has 64 rows: the left operand of S, and that of dP where it is made."""
    weighed: str
    """The array that P or dS is multiplied with, tile by tile: where dP is made, S is made of it too."""
    unweighed: str
    """The array whose tiles are only multiplied with the CTA's rows."""

    @property
    def keys_first(self) -> bool:
        """Whether a CTA's rows are keys."""
        return self.cta_rows[0] == "key"

    @property
    def makes_dp(self) -> bool:
        """Whether the kernel makes dP: dS is weighed, not P."""
        return len(self.cta_rows) > 1

    @property
    def tiles(self) -> Sequence[tuple[int, int]]:
        """Sizes and stages of tiles, the best first."""
        if self.makes_dp:
            # What is weighed is needed early, for S: two tiles of 32 are better than one of 64.
            return (64, 2), (32, 2), (64, 1), (32, 1)
        return (64, 2), (64, 1), (32, 2), (32, 1)


Gradient = Literal["d_query", "d_key", "d_value"]
_KINDS: dict[Gradient, _Kind] = {
    "d_query": _Kind(("query", "d_out"), "key", "value"),
    "d_key": _Kind(("key", "value"), "query", "d_out"),
    "d_value": _Kind(("key",), "d_out", "query"),
}


def _dim(spec: Spec, name: str) -> int:
    return whole_dims(spec)[name in ("value", "d_out", "d_value")]


def _columns(spec: Spec, name: str) -> int:
    """Return the columns of one piece of an array's tiles."""
    return round_up(_dim(spec, name), 32)


def _chunks(spec: Spec, gradient: Gradient) -> ColumnChunks:
    return ColumnChunks.of(spec, _columns(spec, _KINDS[gradient].unweighed))


def shared_memory(spec: Spec, gradient: Gradient, tile: WalkedTiles) -> Buffers:
    """Return buffers, and barriers: `full` when something has arrived or was stored, `empty` when all have read it."""
    kind, has_bias_tiles, tiles = _KINDS[gradient], facts_of(spec).has_bias_tiles, CallTiles.of(spec)
    weighed, chunks = _columns(spec, kind.weighed), _chunks(spec, gradient)
    # Of what is weighed each warpgroup takes half of the columns: whole swizzles both ways.
    widths = {kind.weighed: math.gcd(weighed // 2, tile.size), kind.unweighed: chunks.width}

    def rows(name: str, factor: str) -> Any:
        """Return a buffer for rows whose products are made with tiles of `factor`."""
        shape = 1, WARPGROUP_ROWS, _columns(spec, name)
        return tiles.operand(shape, _dim(spec, name), chunk=widths[factor])

    factors = (kind.weighed, kind.unweighed) if kind.makes_dp else (kind.unweighed,)
    bias = (tile.size, WARPGROUP_ROWS) if kind.keys_first else (WARPGROUP_ROWS, tile.size)
    dp, weights = (smem.tile((WARPGROUP_ROWS, tile.size), dtype) for dtype in (jnp.float32, spec.dtype))
    cta_rows = list(map(rows, kind.cta_rows, factors))
    shape, dim = (tile.stages, tile.size, weighed), _dim(spec, kind.weighed)
    return Buffers(
        cta_rows=cta_rows,
        rows_full=smem.barriers(1, arrivals=smem.copies(*cta_rows)),
        weighed=tiles.ring(shape, dim, readers=2, others=int(has_bias_tiles), chunk=widths[kind.weighed]),
        chunks=chunks.ring(spec, tile.chunk_slots, tile.size, _dim(spec, kind.unweighed), readers=1),
        # Tiles of the bias come and go with what is weighed.
        bias=smem.tile((tile.stages, *bias), spec.bias_dtype) if has_bias_tiles else None,
        # What the second warpgroup hands to the first one, and what takes its place on the way back.
        dp_weights=smem.reused(dp, weights) if kind.makes_dp else smem.reused(weights, None),
        dp_full=smem.barriers(1),
        weights_full=smem.barriers(1),
    )


@dataclasses.dataclass(frozen=True)
class WidePlan(WalkingPlan):
    """The kernel for one gradient of a wide call, before any array. It sums parameters' gradients along the rows."""

    gradient: Gradient
    tile: WalkedTiles
    schedule: BackwardSchedule
    """The schedule of blocks of 64 rows."""

    @property
    def kind(self) -> _Kind:
        """What the kernel reads."""
        return _KINDS[self.gradient]

    @property
    def columns(self) -> int:
        """Columns of the gradient."""
        return _columns(self.spec, self.gradient)

    @property
    def chunks(self) -> ColumnChunks:
        """The chunks of a tile that is not weighed."""
        return _chunks(self.spec, self.gradient)

    @property
    def stores_sums(self) -> bool:
        """Whether the gradient is stored as it was summed, in float32, to be summed on."""
        return self.kind.keys_first and self.schedule.stores_sums

    @property
    def visits(self) -> Blocks:
        return Blocks(WARPGROUP_ROWS, self.tile.size, self.schedule.heads, of_keys=self.kind.keys_first)

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        return super().finish(made, changed) | self.schedule.summed(self.spec, made, whole_dims(self.spec))

    @property
    def launch(self) -> Launch:
        """The launch, whose results are registers stored whole."""
        spec, schedule, rows = self.spec, self.schedule, self.schedule.blocks * WARPGROUP_ROWS
        size, dims = (rows, self.columns), whole_dims(spec)
        result = jax.ShapeDtypeStruct((spec.batch, rows, spec.heads, self.columns), spec.result_dtype)
        if self.kind.keys_first:
            result = schedule.gradient(spec, size, size)
        return Launch(
            name=f"jflash_wide_{self.gradient}_{dims[0]}_{dims[1]}",
            grid=schedule.grid,
            results={self.gradient: result} | self.sums.results(spec.batch, spec.heads, rows),
            smem=shared_memory(spec, self.gradient, self.tile),
            warpgroups=3,
        )


def plan_backward(spec: Spec, processors: int | None, wanted: tuple[str, ...]) -> tuple[WidePlan, ...]:
    """Return the plans of all three gradients; `wanted` are parameters whose gradients are sums along rows."""
    by_key = ("bias",) if "bias" in wanted and facts_of(spec).bias_kind == "column" else ()
    sums = dict(d_query=tuple(name for name in wanted if name not in by_key), d_key=by_key, d_value=())

    def plan(gradient: Gradient) -> WidePlan:
        of_keys = _KINDS[gradient].keys_first
        length, heads = (spec.key_length, spec.key_heads) if of_keys else (spec.query_length, spec.heads)
        schedule = BackwardSchedule.of(spec, spec.heads, heads, pl.cdiv(length, WARPGROUP_ROWS), processors)
        tables = TableSums(spec) if of_keys else TableSums.of(spec, schedule.blocks, 1, processors)
        return WidePlan(spec, ParameterSums(sums[gradient]), tables, gradient, _choose_tiles(spec, gradient), schedule)

    return tuple(map(plan, _KINDS))


def fits(spec: Spec) -> bool:
    """Whether shared memory has room for the smallest whole tiles of every kernel."""
    smallest = lambda gradient: WalkedTiles(32, 1, _chunks(spec, gradient).number)
    return all(smem.fits(shared_memory(spec, gradient, smallest(gradient))) for gradient in _KINDS)


def _choose_tiles(spec: Spec, gradient: Gradient) -> WalkedTiles:
    """Return the fastest tiles, of those with as many chunks as fit, of up to two whole tiles."""
    chunks, most = _chunks(spec, gradient), _MOST_COLUMNS - _columns(spec, gradient) // 2
    room = lambda tile: shared_memory(spec, gradient, tile)
    candidates = list[WalkedTiles]()
    for size, stages in (tile for tile in _KINDS[gradient].tiles if tile[0] <= most):
        in_flight = pl.cdiv(_BYTES_IN_FLIGHT, size * chunks.width * facts_of(spec).operand_dtype.itemsize)
        least = min(chunks.number, max(in_flight, chunks.least))
        tiles = (WalkedTiles(size, stages, slots) for slots in range(2 * chunks.number, least - 1, -1))
        candidates += [tile for tile in tiles if smem.fits(room(tile))][:1]
    facts = *whole_dims(spec), facts_of(spec).bias_tile_bytes, *facts_of(spec).tuned_pieces
    tile = smem.choose_tiles(f"wide {gradient}", facts, candidates, room)
    assert tile is not None, "`fits` says so"
    return tile
