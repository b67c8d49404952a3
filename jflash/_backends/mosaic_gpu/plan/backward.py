"""The backward's plan: one fused kernel or two, their tiles and schedules, and which kernel makes which gradient."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from jflash import _tuning
from jflash._backends.mosaic_gpu import exponent
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, smem
from jflash._backends.mosaic_gpu.inputs import bias_and_mask, whole_dims
from jflash._backends.mosaic_gpu.kernels import backward_dbias, backward_dkv, backward_dq, backward_plan
from jflash._backends.mosaic_gpu.kernels.backward_dbias import DbiasPlan
from jflash._backends.mosaic_gpu.kernels.backward_dkv import DkvPlan
from jflash._backends.mosaic_gpu.kernels.backward_dq import DqPlan
from jflash._backends.mosaic_gpu.kernels.backward_plan import FusedPlan
from jflash._backends.mosaic_gpu.schedule import BackwardSchedule, DqTiles, FusedTiles, RowTiles
from jflash._semantics.spec import Spec
from jflash._tuning import TuningKey

_MOST_DBIAS_TILES = 4
"""Tiles of keys that a CTA of the bias's gradient takes: fewer begin and end more often, more load what lies further
apart."""

_PARAMETERS = ("scale", "alibi_slopes", "bias")
"""Operands that shape logits, whose gradients kernels sum."""


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """A call's backward, known before any array."""

    spec: Spec
    fused: FusedPlan | None
    """One kernel for dQ, dK and dV; or else the two that follow."""
    dq: DqPlan | None
    dkv: DkvPlan | None
    dbias: DbiasPlan | None
    """For a bias with a query and a key axis."""


def plan_backward(spec: Spec, processors: int | None) -> BackwardPlan:
    """The plan of a call's backward on a device with `processors` multiprocessors; `None` where that is unknown."""
    wanted = tuple(name for name in _PARAMETERS if name in spec.operands - spec.undifferentiated)
    bias_kind = bias_and_mask.bias_kind(spec) if "bias" in wanted else None
    dbias = _plan_dbias(spec, processors) if bias_kind == "tile" else None
    if dbias is not None:
        wanted = tuple(name for name in wanted if name != "bias")
    by_keys = lambda size: BackwardSchedule.of(
        spec.heads, spec.key_heads, pl.cdiv(spec.key_length, size), spec.batch, processors
    )
    # Each sum over keys, and with deterministic=True every sum, has an owner in the two kernels alone.
    fused_tiles = None if spec.deterministic or bias_kind == "row" else choose_fused_tiles(spec)
    if fused_tiles is not None:
        fused = FusedPlan(spec, fused_tiles, by_keys(fused_tiles.keys), wanted)
        return BackwardPlan(spec, fused, None, None, dbias)
    by_key = bias_kind == "column"
    tile = choose_dq_tiles(spec)
    blocks = pl.cdiv(spec.query_length, tile.rows)
    schedule = BackwardSchedule.of(spec.heads, spec.heads, blocks, spec.batch, processors)
    dq = DqPlan(spec, tile, schedule, tuple(name for name in wanted if name != "bias" or not by_key))
    slopes = backward_dkv.slopes(spec, wants_bias=by_key)
    stages = 2 if smem.fits(backward_dkv.shared_memory(spec, 2, slopes)) else 1
    dkv = DkvPlan(spec, stages, by_keys(WARPGROUP_ROWS), by_key)
    return BackwardPlan(spec, None, dq, dkv, dbias)


def choose_fused_tiles(spec: Spec) -> FusedTiles | None:
    """The fastest tiles of the fused kernel that fit in shared memory and registers; `None` if none do.

    Tiles of 128 queries leave registers where logits are products times a number; others spill.
    """
    head_dim, value_dim = whole_dims(spec)
    widest = max(head_dim, value_dim)
    candidates = [FusedTiles(128, 2)] if widest <= 64 and exponent.is_plain(spec) else []
    if widest <= 128:
        candidates += [FusedTiles(64, 2), FusedTiles(64, 1)]
    fitting = [tile for tile in candidates if smem.fits(backward_plan.shared_memory(spec, tile))]
    key = TuningKey("mosaic_gpu backward", (head_dim, value_dim, bias_and_mask.bias_tile_bytes(spec)))
    return _tuning.choose(key, fitting) if fitting else None


def choose_dq_tiles(spec: Spec) -> DqTiles:
    """The fastest tiles of dQ's kernel that fit in shared memory."""
    head_dim, value_dim = whole_dims(spec)
    sizes = [(2, 128, 2, 2)] if max(head_dim, value_dim) <= 64 else []
    sizes += [(2, 64, 2, 2), (2, 64, 2, 1), (1, 64, 2, 1), (1, 64, 1, 1)]
    candidates = [DqTiles(*size) for size in sizes]
    fitting = [tile for tile in candidates if smem.fits(backward_dq.shared_memory(spec, tile))]
    key = TuningKey("mosaic_gpu dQ", (head_dim, value_dim, bias_and_mask.bias_tile_bytes(spec)))
    return _tuning.choose(key, fitting)


def _plan_dbias(spec: Spec, processors: int | None) -> DbiasPlan:
    assert spec.bias_dtype is not None
    assert spec.bias_shape is not None
    sizes = ((2, 128, 2), (2, 128, 1), (2, 64, 2), (2, 64, 1), (1, 64, 1))
    candidates = [RowTiles(*size) for size in sizes]
    fitting = [tile for tile in candidates if smem.fits(backward_dbias.shared_memory(spec, tile))]
    tile = _tuning.choose(TuningKey("mosaic_gpu d_bias", (*whole_dims(spec), spec.bias_dtype.itemsize)), fitting)
    each = 1
    if processors is not None:
        # Two CTAs are left for every multiprocessor.
        batch, heads, rows, keys = spec.bias_shape
        tiles = batch * heads * pl.cdiv(rows, tile.rows) * pl.cdiv(keys, tile.keys)
        each = max(1, min(tiles // (2 * processors), _MOST_DBIAS_TILES))
    return DbiasPlan(spec, tile, each)
