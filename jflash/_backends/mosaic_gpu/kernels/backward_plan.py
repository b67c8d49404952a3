"""A call's backward before any array: one fused kernel or two, and which kernel makes which gradient.

Of each kernel tiles and schedule are chosen here, and of the fused one shared memory and launch are here too.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jflash import _tuning
from jflash._backends.mosaic_gpu import exponent
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Buffers, round_up, smem
from jflash._backends.mosaic_gpu.inputs import (
    bf16_pieces,
    bias_and_mask,
    operand_pieces,
    row_statistics,
    score_mod_reads,
    whole_dims,
)
from jflash._backends.mosaic_gpu.kernels import backward_dbias, backward_dq, backward_tables, backward_wide_plan
from jflash._backends.mosaic_gpu.kernels.backward_dbias import DbiasPlan
from jflash._backends.mosaic_gpu.kernels.backward_dkv import DkvPlan
from jflash._backends.mosaic_gpu.kernels.backward_dq import DqPlan
from jflash._backends.mosaic_gpu.kernels.backward_tables import TablesPlan
from jflash._backends.mosaic_gpu.kernels.backward_wide_plan import WidePlan
from jflash._backends.mosaic_gpu.kernels.launch import KernelPlan, Launch
from jflash._backends.mosaic_gpu.kernels.widths import is_wide
from jflash._backends.mosaic_gpu.schedule import (
    BackwardSchedule,
    DqTiles,
    FusedTiles,
    HeadBlocks,
    RowTiles,
)
from jflash._backends.mosaic_gpu.schedule.dq_accumulator import DqAccumulator
from jflash._backends.mosaic_gpu.schedule.rounded_by_last import RoundedByLast
from jflash._backends.mosaic_gpu.schedule.rounded_later import RoundedLater
from jflash._semantics.spec import Spec
from jflash._tuning import TuningKey

_MOST_DBIAS_TILES = 4
"""Tiles of keys that a CTA of the bias's gradient takes: fewer begin and end more often, more load what lies apart."""

_PARAMETERS = ("scale", "alibi_slopes", "bias")
"""Operands that shape logits, whose gradients kernels sum."""


def shared_memory(spec: Spec, tile: FusedTiles) -> Buffers:
    """The kernel's buffers, and barriers: `full` when a copy has arrived, `empty` when all readers are done."""
    dims = whole_dims(spec)
    columns, value_columns = map(tile.columns, dims)
    width = columns if tile.split_dq_by_rows else columns // 2
    has_bias_tiles, as_columns = bias_and_mask.has_bias_tiles(spec), row_statistics.as_columns(spec)
    # First lse of all tiles, then delta.
    vectors = smem.vectors(2 * tile.stages, tile.queries)
    operand = functools.partial(operand_pieces.smem_tile, spec)
    ring = functools.partial(operand_pieces.smem_ring, spec, readers=tile.warpgroups)
    handed = smem.barriers(2, arrivals=tile.warpgroups)
    k, v = operand((1, tile.keys, columns), dims[0], part=width), operand((1, tile.keys, value_columns), dims[1])
    return Buffers(
        # Their gradients take the place of keys and values.
        k_dk=smem.reused(k, smem.tile((1, tile.keys, columns), spec.dtype, dims[0], part=width)),
        v_dv=smem.reused(v, smem.tile((1, tile.keys, value_columns), spec.dtype, dims[1])),
        kv_full=smem.barriers(1, arrivals=2 + as_columns),
        q=ring((tile.stages, tile.queries, columns), dims[0], copies=2 + has_bias_tiles, part=width),
        do=ring((tile.stages, tile.queries, value_columns), dims[1], copies=1 if as_columns else 2),
        # Tiles of the bias come and go with the queries.
        bias=smem.tile((tile.stages, tile.queries, tile.keys), spec.bias_dtype) if has_bias_tiles else None,
        statistics=bf16_pieces.smem_tile(tile.stages, tile.queries) if as_columns else vectors,
        # What columns of statistics are multiplied with comes with the keys.
        ones=bf16_pieces.smem_tile(2, WARPGROUP_ROWS) if as_columns else None,
        # dS^T of two steps: while one warpgroup still reads a step's, the other may write the next.
        ds=operand((2, tile.keys, tile.queries), dims[0], part=width),
        dq=smem.tile((tile.warpgroups, WARPGROUP_ROWS, width), jnp.float32, dims[0]),
        ds_full=handed,
        ds_empty=handed,
        finished=smem.barriers(1, arrivals=tile.warpgroups),
        # The CTA's place in the order in which CTAs begin, and for each warpgroup in which those of its work item end.
        ticket=smem.vectors(1, dtype=jnp.int32),
        numbers=smem.vectors(tile.warpgroups, dtype=jnp.int32),
        ticket_drawn=smem.barriers(1),
    )


@dataclasses.dataclass(frozen=True)
class FusedPlan(KernelPlan):
    """One kernel for dQ, dK and dV."""

    tile: FusedTiles
    schedule: BackwardSchedule
    wanted: tuple[str, ...]
    """Parameters whose gradients the kernel sums over queries."""

    @property
    def dq(self) -> type[DqAccumulator]:
        """Which of a work item's CTAs round dQ."""
        if self.schedule.partial:
            return DqAccumulator
        return RoundedLater if self.schedule.room is None else RoundedByLast

    @property
    def launch(self) -> Launch:
        """Waves of CTAs that have keys, and after them those that only round dQ."""
        spec, schedule, shape = self.spec, self.schedule, jax.ShapeDtypeStruct
        dims = whole_dims(spec)
        rows, keys = round_up(spec.query_length, WARPGROUP_ROWS), schedule.blocks * self.tile.keys
        sums = {f"d_{name}": shape((spec.batch, spec.heads, keys), jnp.float32) for name in self.wanted}
        d_query = shape((spec.batch, rows, spec.heads, dims[0]), spec.dtype)
        return Launch(
            name=f"jflash_backward_{dims[0]}_{dims[1]}",
            grid=dict(wave=schedule.waves + self.dq.lag(schedule), block=schedule.blocks, item=schedule.items),
            results=dict(
                **({} if spec.partial else dict(d_query=d_query)),
                d_key=schedule.gradient(spec, keys, dims[0], self.tile.columns(dims[0])),
                d_value=schedule.gradient(spec, keys, dims[1], self.tile.columns(dims[1])),
                **sums,
            ),
            smem=shared_memory(spec, self.tile),
            warpgroups=self.tile.warpgroups + 1,
        )

    def dq_acc(self, margin: int) -> jax.ShapeDtypeStruct:
        """The accumulators of dQ, `[accumulators, L, H]`, with a margin for copies that add."""
        rows = round_up(self.spec.query_length, WARPGROUP_ROWS) + margin
        columns = whole_dims(self.spec)[0] + margin
        return jax.ShapeDtypeStruct((self.dq.accumulators(self.schedule), rows, columns), jnp.float32)


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """A call's backward, known before any array."""

    spec: Spec
    fused: FusedPlan | None
    """One kernel for dQ, dK and dV; or else the two that follow, or those of a wide call."""
    dq: DqPlan | None
    dkv: DkvPlan | None
    dbias: DbiasPlan | None
    """For a bias with a query and a key axis."""
    wide: tuple[WidePlan, ...] = ()
    """A kernel for each of dQ, dK and dV."""
    tables: TablesPlan | None = None
    """For tables that a score_mod reads by position."""


def parameters(spec: Spec) -> tuple[str, ...]:
    """What shapes a call's logits and has a gradient that is asked for: operands, and reads of a score_mod."""
    asked = spec.operands - spec.undifferentiated
    reads = score_mod_reads.summed(spec) if "score_mod_arrays" in asked else []
    return *(name for name in _PARAMETERS if name in asked), *(read.name for read in reads)


def plan_backward(spec: Spec, processors: int | None) -> BackwardPlan:
    """The plan of a call's backward on a device with `processors` multiprocessors; `None` where that is unknown."""
    wanted = parameters(spec)
    bias_kind = bias_and_mask.bias_kind(spec) if "bias" in wanted else None
    dbias = _plan_dbias(spec, processors) if bias_kind == "tile" else None
    if dbias is not None:
        wanted = tuple(name for name in wanted if name != "bias")
    tables = _plan_tables(spec, processors) if score_mod_reads.tables(spec) else None
    if is_wide(spec):
        wide = backward_wide_plan.plan_backward(spec, processors, wanted)
        return BackwardPlan(spec, None, None, None, dbias, wide, tables)
    by_keys = lambda size, accumulated=None: dataclasses.replace(
        BackwardSchedule.of(
            spec.heads,
            spec.key_heads,
            pl.cdiv(spec.key_length, size),
            spec.batch,
            processors,
            accumulated=accumulated,
        ),
        partial=spec.partial,
    )
    # Each sum over keys, and with deterministic=True every sum, has an owner in the two kernels alone.
    fused_tiles = None if spec.deterministic or bias_kind == "row" else choose_fused_tiles(spec)
    if fused_tiles is not None:
        tiles = None if spec.partial else pl.cdiv(spec.query_length, fused_tiles.keys)
        fused = FusedPlan(spec, fused_tiles, by_keys(fused_tiles.keys, tiles), wanted)
        return BackwardPlan(spec, fused, None, None, dbias, tables=tables)
    by_key = bias_kind == "column"
    tile = choose_dq_tiles(spec)
    blocks = pl.cdiv(spec.query_length, tile.rows)
    schedule = BackwardSchedule.of(spec.heads, spec.heads, blocks, spec.batch, processors)
    dq = DqPlan(spec, tile, schedule, tuple(name for name in wanted if name != "bias" or not by_key))
    dkv = DkvPlan(spec, 2, by_keys(WARPGROUP_ROWS), by_key)
    if not smem.fits(dkv.launch.smem):
        dkv = dataclasses.replace(dkv, stages=1)
    return BackwardPlan(spec, None, dq, dkv, dbias, tables=tables)


def choose_fused_tiles(spec: Spec) -> FusedTiles | None:
    """The fastest tiles of the fused kernel that fit in shared memory and registers; `None` if none do.

    Tiles of 128 queries leave registers where logits are products times a number and nothing is dropped.
    """
    head_dim, value_dim = whole_dims(spec)
    widest = max(head_dim, value_dim)
    plain = exponent.is_plain(spec) and spec.dropout_rate == 0 and spec.dtype != jnp.float32
    candidates = [FusedTiles(128, 2)] if widest <= 64 and plain else []
    if widest <= 128:
        candidates += [FusedTiles(64, 2), FusedTiles(64, 1)]
    fitting = [tile for tile in candidates if smem.fits(shared_memory(spec, tile))]
    key = TuningKey("mosaic_gpu backward", _facts(spec))
    return _tuning.choose(key, fitting) if fitting else None


def wide_fits(spec: Spec) -> bool:
    """Whether shared memory has room for the smallest tiles of every kernel of a wide call's backward."""
    if bias_and_mask.has_bias_tiles(spec) and not smem.fits(backward_dbias.shared_memory(spec, _dbias_tiles(spec)[-1])):
        return False
    return backward_wide_plan.fits(spec)


def _facts(spec: Spec) -> tuple[int, ...]:
    """What tiles are tuned for."""
    return *whole_dims(spec), bias_and_mask.bias_tile_bytes(spec), *operand_pieces.facts(spec)


def choose_dq_tiles(spec: Spec) -> DqTiles:
    """The fastest tiles of dQ's kernel that fit in shared memory."""
    head_dim, value_dim = whole_dims(spec)
    sizes = [(2, 128, 2, 2)] if max(head_dim, value_dim) <= 64 and spec.dtype != jnp.float32 else []
    sizes += [(2, 64, 2, 2), (2, 64, 2, 1), (1, 64, 2, 1), (1, 64, 1, 1)]
    candidates = [DqTiles(*size) for size in sizes]
    fitting = [tile for tile in candidates if smem.fits(backward_dq.shared_memory(spec, tile))]
    key = TuningKey("mosaic_gpu dQ", _facts(spec))
    return _tuning.choose(key, fitting)


def _dbias_tiles(spec: Spec) -> list[RowTiles]:
    """The tiles that the kernel for the bias's gradient may take."""
    sizes = [(2, 128, 2), (2, 128, 1), (2, 64, 2), (2, 64, 1), (1, 64, 1)]
    return [RowTiles(*size) for size in [*sizes, *[(1, 32, 1)] * is_wide(spec)]]


def _plan_dbias(spec: Spec, processors: int | None) -> DbiasPlan:
    assert spec.bias_dtype is not None
    assert spec.bias_shape is not None
    fitting = [tile for tile in _dbias_tiles(spec) if smem.fits(backward_dbias.shared_memory(spec, tile))]
    tile = _tuning.choose(TuningKey("mosaic_gpu d_bias", _facts(spec)), fitting)
    each = 1
    if processors is not None:
        # Two CTAs are left for every multiprocessor.
        batch, heads, rows, keys = spec.bias_shape
        tiles = batch * heads * pl.cdiv(rows, tile.rows) * pl.cdiv(keys, tile.keys)
        each = max(1, min(tiles // (2 * processors), _MOST_DBIAS_TILES))
    return DbiasPlan(spec, tile, each)


def _plan_tables(spec: Spec, processors: int | None) -> TablesPlan:
    """Some tiles fit: the smallest take what dQ's kernel, or a wide dQ's, takes without the room for results."""
    sizes = [(2, 64, 2), (2, 64, 1), (1, 64, 1), *[(1, 32, 1)] * is_wide(spec)]
    candidates = [RowTiles(*size) for size in sizes]
    fitting = [tile for tile in candidates if smem.fits(backward_tables.shared_memory(spec, tile))]
    tile = _tuning.choose(TuningKey("mosaic_gpu d_tables", _facts(spec)), fitting)
    blocks = pl.cdiv(spec.query_length, tile.rows)
    return TablesPlan(spec, tile, HeadBlocks.of(spec.heads, blocks, spec.batch, processors))
