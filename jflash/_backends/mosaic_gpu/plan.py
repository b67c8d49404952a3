"""Plans: from the Spec and the device's number of multiprocessors to kernels, tiles and schedules, before any array."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.experimental import pallas as pl

from jflash._backends.mosaic_gpu import (
    array_shapes,
    backward_dbias,
    backward_dkv_dq,
    backward_dq,
    backward_fused,
    backward_short,
    backward_wide_plan,
    dq_order,
    forward_kernel,
    forward_plan,
    forward_wide_plan,
    row_statistics,
    smem,
    tangent_kernel,
)
from jflash._backends.mosaic_gpu.array_shapes import whole_dims
from jflash._backends.mosaic_gpu.backward_dbias import DbiasCta, DbiasPlan
from jflash._backends.mosaic_gpu.backward_dkv import DkvCta, DkvPlan
from jflash._backends.mosaic_gpu.backward_dkv_dq import DkvDqCta, DkvDqPlan
from jflash._backends.mosaic_gpu.backward_dq import DqCta, DqPlan
from jflash._backends.mosaic_gpu.backward_fused import FusedCta, FusedPlan
from jflash._backends.mosaic_gpu.backward_short import ShortCta
from jflash._backends.mosaic_gpu.backward_wide import WideCta
from jflash._backends.mosaic_gpu.forward_latent import LatentForwardCta
from jflash._backends.mosaic_gpu.forward_wide import WideForwardCta
from jflash._backends.mosaic_gpu.forward_wide_plan import WideForwardPlan
from jflash._backends.mosaic_gpu.run import VALUES_ALONE
from jflash._backends.mosaic_gpu.tiles import DqTiles, FusedTiles, RowTiles, ShortTiles
from jflash._backends.nvidia.describe import kernels
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Kernel
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.tile import operand_pieces
from jflash._backends.nvidia.tile.gradient_sums import ParameterSums, TableSums, wanted_parameters
from jflash._backends.nvidia.walk import tile_order
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.dbias_schedule import DbiasSchedule
from jflash._semantics import score_mod_reads
from jflash._semantics.spec import Spec

_MOST_COLUMNS = 256
"""The most columns of a sum of 64 rows that a warpgroup's registers hold."""

_MOST_DBIAS_TILES = 4
"""Tiles of keys that a CTA of the bias's gradient takes: fewer begin and end more often, more load what lies apart."""

_TILES_TO_BEGIN = 4
"""Tiles of queries that a CTA of the fused backward could visit while it begins and ends."""

_MOST_COLUMNS_IN_TURNS = 96
"""Up to which registers hold all columns of a tile's dQ beside dK and dV, though not beside pieces of float32. The
warpgroup whose turn it is falls behind by a product, for which there have to be two stages of queries."""


@functools.lru_cache(maxsize=256)
def is_wide(spec: Spec) -> bool:
    """Whether a call needs the kernels of wide heads, in which two warpgroups share columns.

    They serve it where some kernel of narrow heads has no room, in registers or for its smallest tiles in memory. All
    are of one kind: where the backward of narrow heads has no room, their forward spills registers.
    """
    return max(spec.head_dim, spec.value_dim) > _MOST_COLUMNS or not all(map(smem.fits, _smallest(spec)))


def _smallest(spec: Spec) -> Iterator[Buffers]:
    """What narrow heads' kernels declare with their smallest tiles."""
    yield forward_plan.shared_memory(spec, forward_plan.SMALLEST_TILE)
    yield backward_dq.shared_memory(spec, DqTiles(1, 64, 1, 1))
    # A call whose sums go on afterwards is as wide as one whose sums do not.
    whole = dataclasses.replace(spec, partial=False)
    schedule = BackwardSchedule.of(whole, spec.heads, spec.key_heads, 1, None)
    yield DkvPlan(spec, ParameterSums(("bias",)), TableSums(spec), 1, schedule).smem
    if facts_of(spec).has_bias_tiles:
        yield backward_dbias.shared_memory(spec, RowTiles(1, 64, 1))


def plan_forward(spec: Spec, processors: int | None) -> Kernel[Any]:
    """Return the kernel of a call's forward on a device with `processors` multiprocessors; `None` is unknown."""
    if is_wide(spec):
        wide = forward_wide_plan.plan_forward(spec, processors)
        return Kernel(wide, LatentForwardCta if wide.shares_tiles else WideForwardCta)
    return Kernel(forward_plan.plan_forward(spec, processors), forward_kernel.ForwardCta)


def plan_tangent(spec: Spec, moving: frozenset[str], processors: int | None) -> Kernel[Any]:
    """Return the kernel of a call's tangent, where the operands named in `moving` have tangents.

    Where values alone have, it is the forward's, for their tangents in the place of values.
    """
    if moving == VALUES_ALONE:
        return plan_forward(dataclasses.replace(spec, value_is_key=False), processors)
    return Kernel(tangent_kernel.plan_tangent(spec, moving, processors), tangent_kernel.TangentCta)


def plan_backward(spec: Spec, processors: int | None) -> tuple[Kernel[Any], ...]:
    """Return the kernels of a call's backward on a device with `processors` multiprocessors; `None` is unknown."""
    wanted = wanted_parameters(spec)
    bias_kind = facts_of(spec).bias_kind if "bias" in wanted else None
    dbias: tuple[Kernel[Any], ...] = ()
    if bias_kind == "tile":
        wanted = tuple(name for name in wanted if name != "bias")
        dbias = (Kernel(_plan_dbias(spec, processors), DbiasCta),)
    if is_wide(spec):
        wide = backward_wide_plan.plan_backward(spec, processors, wanted)
        return *(Kernel(plan, WideCta) for plan in wide), *dbias
    # Each sum over keys has an owner in the two kernels alone.
    one_kernel = bias_kind != "row"
    if one_kernel and backward_short.suits(spec, processors) and (tile := _short_tiles(spec)) is not None:
        short = backward_short.plan(spec, tile, ParameterSums(wanted), processors)
        return Kernel(short, ShortCta), *dbias
    if one_kernel and (fused := _plan_fused(spec, wanted, processors)) is not None:
        return Kernel(fused, FusedCta), *dbias
    by_key = ParameterSums(("bias",) if bias_kind == "column" else ())
    others = tuple(name for name in wanted if name not in by_key.names)
    has_other_sums = others or score_mod_reads.tables(spec)
    key_blocks = pl.cdiv(spec.key_length, WARPGROUP_ROWS)
    by_keys = BackwardSchedule.of(spec, spec.heads, spec.key_heads, key_blocks, processors)
    of_keys = by_key, TableSums(spec), 2, by_keys
    if one_kernel and not spec.deterministic and not has_other_sums and backward_dkv_dq.suits(spec):
        dkv_dq = _staged(DkvDqPlan(spec, *of_keys))
        if smem.fits(dkv_dq.smem):
            return Kernel(dkv_dq, DkvDqCta), *dbias
    tile = _dq_tiles(spec)
    blocks = pl.cdiv(spec.query_length, tile.rows)
    of_queries = BackwardSchedule.of(spec, spec.heads, spec.heads, blocks, processors)
    tables = TableSums.of(spec, blocks, tile.warpgroups, processors)
    dq = DqPlan(spec, tile, of_queries, ParameterSums(others), tables)
    return Kernel(dq, DqCta), Kernel(_staged(DkvPlan(spec, *of_keys)), DkvCta), *dbias


def _staged[Plan: DkvPlan](plan: Plan) -> Plan:
    """Return the plan with one stage, if shared memory has no room for more."""
    return plan if smem.fits(plan.smem) else dataclasses.replace(plan, stages=1)


def _plan_fused(spec: Spec, wanted: tuple[str, ...], processors: int | None) -> FusedPlan | None:
    """Return the plan of the fused kernel; `None` if none of its tiles fit, or dQ has no order and should have one."""
    lacks_order = spec.deterministic and not dq_order.suits(spec)
    if lacks_order or (tile := _fused_tiles(spec)) is None:
        return None
    accumulated = None if spec.partial else pl.cdiv(spec.query_length, tile.keys)
    splits = 1 if wanted else _splits(spec, tile, processors)
    blocks, in_order = pl.cdiv(spec.key_length, tile.keys) * splits, spec.deterministic
    schedule = BackwardSchedule.of(
        spec, spec.heads, spec.key_heads, blocks, processors, accumulated=accumulated, in_order=in_order
    )
    turned = in_order and (bool(wanted) or tile_order.is_by_head(spec, schedule.heads))
    schedule = dataclasses.replace(schedule, splits=splits, turned=turned)
    tables = TableSums.of(spec, schedule.blocks, tile.warpgroups, processors)
    return FusedPlan(spec, ParameterSums(wanted), tables, tile, schedule)


def _splits(spec: Spec, tile: FusedTiles, processors: int | None) -> int:
    """CTAs that share the queries of a block of keys, where there are fewer blocks than multiprocessors: as many as end
    soonest, if that is a tenth sooner than one. Heads that share keys are divided instead."""
    ctas = spec.batch * spec.heads * pl.cdiv(spec.key_length, tile.keys)
    if processors is None or ctas >= processors or spec.group > 1 or spec.partial:
        return 1
    # Blocks that see different queries would share them elsewhere: no tile would be in the same split of all.
    if spec.deterministic and spec.bounds != (None, None):
        return 1
    tiles = pl.cdiv(spec.query_length, tile.queries)
    ends = lambda splits: pl.cdiv(ctas * splits, processors) * (tiles / splits + _TILES_TO_BEGIN)
    best = min(range(1, max(2, tiles // _TILES_TO_BEGIN + 1)), key=ends)
    return best if ends(best) < 0.9 * ends(1) else 1


def _choose[Tiles](
    spec: Spec, kernel: str, candidates: Sequence[Tiles], room: Callable[[Spec, Tiles], Buffers], *more_facts: int
) -> Tiles | None:
    """Return the fastest of a kernel's tiles that fit in shared memory; `None` if none do."""
    facts = *whole_dims(spec), facts_of(spec).bias_tile_bytes, *facts_of(spec).tuned_pieces, *more_facts
    return smem.choose_tiles(kernel, facts, candidates, functools.partial(room, spec))


def _fused_tiles(spec: Spec) -> FusedTiles | None:
    """Return the fastest tiles of the fused kernel that fit in shared memory and registers; `None` if none do."""
    head_dim, value_dim = whole_dims(spec)
    widest = max(head_dim, value_dim)
    # Tiles of 128 queries leave registers where logits are products times a number and nothing is dropped.
    plain = facts_of(spec).is_plain and spec.dropout_rate == 0 and not facts_of(spec).is_float32
    # What registers add arrives late, and has to arrive before others add.
    adds_registers = not spec.deterministic
    candidates = [FusedTiles(128, 2, adds_registers=adds_registers)] if widest <= 64 and plain else []
    if widest <= 128:
        dq_alternates = 64 < widest <= _MOST_COLUMNS_IN_TURNS and not facts_of(spec).is_float32
        # Copies that add 80 columns do so in blocks of 16, and take longer than registers.
        turns = dict(dq_alternates=dq_alternates, adds_registers=adds_registers and dq_alternates and head_dim == 80)
        # Where bounds leave CTAs few tiles, a third stage takes more time than it saves.
        stages = (3, 2) if dq_alternates and spec.bounds == (None, None) else (2,)
        candidates += [*(FusedTiles(64, number, **turns) for number in stages), FusedTiles(64, 1)]
    return _choose(spec, "backward", candidates, backward_fused.shared_memory)


def _short_tiles(spec: Spec) -> ShortTiles | None:
    """Return the fastest tiles of the kernel for short sequences that fit; `None` where it is not known to be faster.

    Tiles of 128 queries are slower there, and up to 64 columns so is one stage; float32 was not measured.
    """
    widest = max(whole_dims(spec))
    if widest > 128 or facts_of(spec).is_float32:
        return None
    dq_alternates = widest <= _MOST_COLUMNS_IN_TURNS
    candidates = [ShortTiles(key_stages=2, dq_alternates=dq_alternates), ShortTiles(dq_alternates=dq_alternates)]
    if row_statistics.as_columns(spec):
        candidates.append(ShortTiles(columns_of_statistics=False, dq_alternates=dq_alternates))
    if widest > 64:
        candidates.append(ShortTiles(stages=1))
    rows = spec.group * pl.cdiv(spec.query_length, WARPGROUP_ROWS)
    return _choose(spec, "short backward", candidates, backward_short.shared_memory, rows)


def _dq_tiles(spec: Spec) -> DqTiles:
    """Return the fastest tiles of dQ's kernel that fit in shared memory."""
    sizes = [(2, 128, 2, 2)] if max(whole_dims(spec)) <= 64 and not facts_of(spec).is_float32 else []
    sizes += [(2, 64, 2, 2), (2, 64, 2, 1), (1, 64, 2, 1), (1, 64, 1, 1)]
    tile = _choose(spec, "dQ", [DqTiles(*size) for size in sizes], backward_dq.shared_memory)
    assert tile is not None, "the call is a wide one"
    return tile


def _dbias_tiles(spec: Spec) -> list[RowTiles]:
    """Return the tiles that the kernel for the bias's gradient may take."""
    sizes = [(2, 128, 2), (2, 128, 1), (2, 64, 2), (2, 64, 1), (1, 64, 1)]
    return [RowTiles(*size) for size in [*sizes, *[(1, 32, 1)] * is_wide(spec)]]


def _plan_dbias(spec: Spec, processors: int | None) -> DbiasPlan:
    tile = _choose(spec, "d_bias", _dbias_tiles(spec), backward_dbias.shared_memory)
    assert tile is not None, "`fits` says so"
    # Two CTAs are left for every multiprocessor, or made.
    ctas = None if processors is None else 2 * processors
    schedule = DbiasSchedule.of(spec, tile.rows, tile.keys, ctas)
    if not smem.fits(backward_dbias.shared_memory(spec, tile, schedule.splits)):
        schedule = dataclasses.replace(schedule, splits=1)
    tiles_per_cta = 1 if ctas is None else max(1, min(schedule.number // ctas, _MOST_DBIAS_TILES))
    return DbiasPlan(spec, tile, schedule, tiles_per_cta)


def fits(spec: Spec) -> bool:
    """Whether shared memory has room for the smallest tiles of every kernel that a call may need."""
    if not is_wide(spec):
        return True
    dbias = backward_dbias.shared_memory(spec, _dbias_tiles(spec)[-1]) if facts_of(spec).has_bias_tiles else ()
    return smem.fits(dbias) and forward_wide_plan.fits(spec) and backward_wide_plan.fits(spec)


def describe(spec: Spec, processors: int | None) -> str:
    """Return a call's kernels, with tiles, shared memory and schedules, and the copies before them, in words."""
    forward = plan_forward(spec, processors).plan
    form = type(forward.form).__name__
    details = f"logits {form}, {forward.parts}"
    if (products := operand_pieces.products(spec)) > 1:
        details += f", {products} products of pieces for each product"
    if forward.output_stores:
        details += f", output in {forward.output_stores} stores"
    if isinstance(forward, WideForwardPlan) and forward.dealt is not None:
        details += f", lists of up to {max(map(len, forward.dealt))} blocks"
    lines = [*kernels("forward", [forward], smem.CAPACITY), f"    {details}"]
    if spec.pages is None:
        lines += _derivatives(spec, processors)
    copies = array_shapes.copied(spec, packed=forward.row_by_row)
    return "\n".join([*lines, "copies:", *(f"  {copy}" for copy in copies or ["none"])])


def _derivatives(spec: Spec, processors: int | None) -> Iterator[str]:
    """Yield a call's kernels of tangent and backward, in words."""
    if tangent_kernel.fits(spec):
        tangent = plan_tangent(spec, tangent_kernel.MOVING & spec.operands, processors)
        yield from kernels("tangent", [tangent.plan], smem.CAPACITY)
        yield f"    output in {tangent.plan.chunks} chunks of columns"
    yield from kernels("backward", (kernel.plan for kernel in plan_backward(spec, processors)), smem.CAPACITY)
