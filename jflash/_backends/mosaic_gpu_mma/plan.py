"""Plans: from the Spec and the platform to kernels, tiles and schedules, before any array."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl

from jflash import _tuning
from jflash._backends.mosaic_gpu_mma import SHARED_MEMORY, device_sums, forward_few_rows, round_dq
from jflash._backends.mosaic_gpu_mma.backward_dbias import DbiasCta, DbiasPlan
from jflash._backends.mosaic_gpu_mma.backward_fused import FusedCta, FusedPlan
from jflash._backends.mosaic_gpu_mma.backward_owned import DkvCta, DkvPlan, DqCta, DqPlan
from jflash._backends.mosaic_gpu_mma.cta import TiledPlan, columns
from jflash._backends.mosaic_gpu_mma.forward_few_rows import FewRowsCta, FewRowsPlan
from jflash._backends.mosaic_gpu_mma.forward_kernel import ForwardCta, ForwardPlan, PairedForwardCta
from jflash._backends.mosaic_gpu_mma.products import can_pair
from jflash._backends.mosaic_gpu_mma.tiles import TILES, FusedTile, Tile
from jflash._backends.nvidia import describe, smem
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Kernel
from jflash._backends.nvidia.packing import packs
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile.gradient_sums import ParameterSums, TableSums, wanted_parameters
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.dbias_schedule import DbiasSchedule
from jflash._backends.nvidia.walk.work_items import Shares, Splits
from jflash._platform import Platform
from jflash._semantics.spec import Spec
from jflash._tuning import TuningKey

_TILES_OF_A_SPLIT = 4
"""Minimum tiles of keys per split."""

_CTAS = 2
"""CTAs that a multiprocessor runs at a time, about."""


def plan_forward(spec: Spec, platform: Platform) -> Kernel[ForwardPlan]:
    """Return the kernel of a call's forward."""
    packed_heads = spec.group if packs(spec) else 1
    rows, heads = spec.query_length * packed_heads, spec.heads // packed_heads
    kernel, kind, cta = _form_of_forward(spec), ForwardPlan, ForwardCta
    if forward_few_rows.serves(spec):
        of_bytes = " of bytes" * forward_few_rows.stays_in_bytes(spec)
        kernel, kind, cta = f"forward, few rows{of_bytes}", FewRowsPlan, FewRowsCta
    elif rows <= WARPGROUP_ROWS:
        kernel = "forward, short"
    whole = lambda tile: Splits(spec.batch, pl.cdiv(rows, tile.rows))
    plan = _choose(spec, platform, kernel, lambda tile: kind(spec, tile, whole(tile), packed_heads))
    tile, blocks = plan.tile, whole(plan.tile).blocks
    # Of splits, a CTA of several blocks of 64 rows takes the room of as many.
    ctas, least = _ctas(platform, tile.blocks), _TILES_OF_A_SPLIT * tile.size
    shares = Shares.of(spec, heads, blocks, tile.size, _ctas(platform, 1))
    division = shares or Splits.of(spec, heads, blocks, ctas, least)
    cta = PairedForwardCta if tile.paired else cta
    return Kernel(dataclasses.replace(plan, division=division), cta)


def _form_of_forward(spec: Spec) -> str:
    """Return what the forward's tiles depend on besides head dims: how many registers logits and masks leave."""
    is_biased = facts_of(spec).bias_kind in ("tile", "column") or spec.logits_soft_cap is not None
    if is_biased or facts_of(spec).is_float32:
        return "forward"
    if not facts_of(spec).is_plain or spec.dropout_rate > 0 or spec.mask_mod is not None:
        return "forward, unbiased"
    return "forward, causal" if spec.is_causal else "forward, plain"


def plan_backward(spec: Spec, platform: Platform) -> tuple[Kernel[Any], ...]:
    """Return the kernels of a call's backward."""
    wanted = wanted_parameters(spec)
    bias_kind = facts_of(spec).bias_kind if "bias" in wanted else None
    others: tuple[Kernel[Any], ...] = ()
    if bias_kind == "tile":
        of_tile = lambda tile: DbiasSchedule.of(spec, tile.rows, tile.size, _ctas(platform, tile.blocks))
        dbias = _choose(spec, platform, "d_bias", lambda tile: DbiasPlan(spec, tile, of_tile(tile)))
        others = (Kernel(dbias, DbiasCta),)
        wanted = tuple(name for name in wanted if name != "bias")
    # Each sum over keys, and with deterministic=True or in float32 every sum, has an owner in the other kernels alone.
    if not spec.deterministic and bias_kind != "row" and not facts_of(spec).is_float32:
        make = functools.partial(_fused, spec, platform, ParameterSums(wanted))
        if _fitting(spec, platform, "backward", make):
            fused = _choose(spec, platform, "backward", make)
            return Kernel(fused, FusedCta), Kernel(fused.rounding, round_dq.RoundDqCta), *others
    by_key = ("bias",) if bias_kind == "column" else ()
    sums = ParameterSums(tuple(name for name in wanted if name not in by_key))
    tables = lambda tile: TableSums.of(spec, pl.cdiv(spec.query_length, tile.rows), 1, platform.processors)
    dq = _choose(spec, platform, "d_query", lambda tile: DqPlan(spec, tile, sums, tables(tile)))
    both = ("d_key", "d_value")
    # Both sums together may be more than a warpgroup has registers for.
    launches = [both] if spec.head_dim + spec.value_dim <= 256 else [(name,) for name in both]
    dkv = (_plan_dkv(spec, platform, outputs, by_key) for outputs in launches)
    return Kernel(dq, DqCta), *(Kernel(plan, DkvCta) for plan in dkv), *others


def _fused(spec: Spec, platform: Platform, sums: ParameterSums, tile: FusedTile) -> FusedPlan:
    schedule = _schedule(spec, platform, tile.rows, tile.warpgroups)
    tables = TableSums.of(spec, schedule.blocks, tile.warpgroups, platform.processors)
    return FusedPlan(spec, tile, sums, tables, schedule, device_sums.together(_capability(platform)))


def _plan_dkv(spec: Spec, platform: Platform, outputs: tuple[str, ...], by_key: tuple[str, ...]) -> DkvPlan:
    sums = ParameterSums(by_key if "d_key" in outputs else ())
    make = lambda tile: DkvPlan(spec, tile, sums, TableSums(spec), _schedule(spec, platform, tile.rows), outputs)
    return _choose(spec, platform, " ".join(outputs), make)


def _ctas(platform: Platform, warpgroups: int) -> int | None:
    """Return about how many CTAs of some warpgroups the device runs at a time; `None` where it is not known."""
    return None if platform.processors is None else _CTAS * platform.processors // warpgroups


def _schedule(spec: Spec, platform: Platform, rows: int, warpgroups: int = 1) -> BackwardSchedule:
    """Return the schedule of a kernel whose CTAs own some rows of keys."""
    blocks, ctas = pl.cdiv(spec.key_length, rows), _ctas(platform, warpgroups)
    return BackwardSchedule.of(spec, spec.heads, spec.key_heads, blocks, ctas)


def _choose[Plan: TiledPlan](spec: Spec, platform: Platform, kernel: str, make: Callable[[Any], Plan]) -> Plan:
    """Return a kernel's plan with the fastest of its tiles that fit in shared memory."""
    facts = spec.head_dim, spec.value_dim, *facts_of(spec).tuned_pieces
    fitting = _fitting(spec, platform, kernel, make)
    return make(_tuning.choose(TuningKey(f"mosaic_gpu_mma {kernel}", facts), fitting))


def _fitting(spec: Spec, platform: Platform, kernel: str, make: Callable[[Any], TiledPlan]) -> list[Tile]:
    """Return the tiles with which a kernel's plan fits in shared memory."""
    is_forward, head_dim = kernel.startswith("forward"), spec.head_dim
    # The forward's registers hold O. For keys as much as twice as wide as values its shared memory has room, if they
    # are of 16 bits.
    width = max(spec.value_dim, head_dim // 2 if is_forward and not facts_of(spec).is_float32 else head_dim)
    listed = TILES[kernel][facts_of(spec).pieces]
    tiles = next(tiles for most, tiles in listed.items() if width <= most)
    # For 10.x the compiler spills hundreds of bytes of a pair.
    has_pairs = can_pair(columns(spec.value_dim)) and float(_capability(platform)) < 10
    capacity = SHARED_MEMORY[_capability(platform)]
    fits = lambda tile: smem.size(make(tile).launch.smem) <= capacity
    return [tile for tile in tiles if (has_pairs or not getattr(tile, "paired", False)) and fits(tile)]


def fits(spec: Spec, platform: Platform) -> bool:
    """Return whether shared memory has room for every kernel of a call: that of dQ wants most."""
    no_sums = ParameterSums(), TableSums(spec)
    return bool(_fitting(spec, platform, "d_query", lambda tile: DqPlan(spec, tile, *no_sums)))


def _capability(platform: Platform) -> str:
    assert platform.compute_capability is not None
    return platform.compute_capability


def described(spec: Spec, platform: Platform) -> str:
    """Return a call's kernels, tiles and shared memory in words; with pages it has no backward."""
    forward, capacity = plan_forward(spec, platform).plan, SHARED_MEMORY[_capability(platform)]
    lines = [*describe.kernels("forward", [forward], capacity), f"    {forward.parts}"]
    if spec.pages is None:
        lines += describe.kernels("backward", (kernel.plan for kernel in plan_backward(spec, platform)), capacity)
    return "\n".join(lines)
