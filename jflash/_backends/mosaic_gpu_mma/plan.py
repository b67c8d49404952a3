"""Plans: from the Spec and the platform to kernels, tiles and schedules, before any array."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from jflash import _tuning
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, smem
from jflash._backends.mosaic_gpu.inputs import bias_and_mask
from jflash._backends.mosaic_gpu.kernels.forward_plan import packs
from jflash._backends.mosaic_gpu.kernels.launch import KernelPlan
from jflash._backends.mosaic_gpu.schedule import BackwardSchedule
from jflash._backends.mosaic_gpu_mma.kernels import backward_dbias, backward_dkv, backward_dq, forward
from jflash._backends.mosaic_gpu_mma.kernels.backward_dbias import DbiasPlan
from jflash._backends.mosaic_gpu_mma.kernels.backward_dkv import DkvPlan
from jflash._backends.mosaic_gpu_mma.kernels.backward_dq import DqPlan
from jflash._backends.mosaic_gpu_mma.kernels.cta import Tile
from jflash._backends.mosaic_gpu_mma.kernels.forward import ForwardPlan
from jflash._backends.mosaic_gpu_mma.shared_memory import KIB, SHARED_MEMORY
from jflash._platform import Platform
from jflash._semantics.spec import Spec
from jflash._tuning import TuningKey

_CTAS = 2
"""CTAs that a multiprocessor runs at a time, about."""

_PARAMETERS = ("scale", "alibi_slopes", "bias")
"""Operands that shape logits, whose gradients kernels sum."""


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """A call's backward, known before any array."""

    spec: Spec
    dq: DqPlan
    dkv: tuple[DkvPlan, ...]
    """One kernel for dK and dV, or one for each."""
    dbias: DbiasPlan | None
    """For a bias with a query and a key axis."""


def plan_forward(spec: Spec, platform: Platform) -> ForwardPlan:
    """The plan of a call's forward."""
    packed_heads = spec.group if packs(spec) else 1
    rows, heads = spec.query_length * packed_heads, spec.heads // packed_heads
    few_rows, dims = rows <= WARPGROUP_ROWS, (spec.head_dim, spec.value_dim)
    blocks = 1 if few_rows or max(dims) > 128 else 2
    sizes = [(64, 2), (64, 1), (32, 2), (32, 1)] if max(dims) <= 128 else [(64, 1), (32, 1)]
    candidates = [Tile(blocks, *size) for size in sizes]
    fitting = [tile for tile in candidates if smem.size(forward.shared_memory(spec, tile)) <= _capacity(platform)]
    rows_kind = "short" if few_rows else "long"
    tile = _tuning.choose(TuningKey("mosaic_gpu_mma forward", (*_facts(spec), rows_kind)), fitting)
    share = _CTAS * (platform.processors or 0) // (spec.batch * heads)
    splits = max(1, min(share, spec.key_length // (4 * tile.size))) if rows <= tile.rows else 1
    return ForwardPlan(spec, tile, packed_heads, splits)


def plan_backward(spec: Spec, platform: Platform) -> BackwardPlan:
    """The plan of a call's backward."""
    wanted = tuple(name for name in _PARAMETERS if name in spec.operands - spec.undifferentiated)
    bias_kind = bias_and_mask.bias_kind(spec) if "bias" in wanted else None
    has_bias, by_key = bias_kind == "tile", bias_kind == "column"
    of_dq = tuple(name for name in wanted if name != "bias" or not (has_bias or by_key))
    dq = DqPlan(spec, _dq_tile(spec, platform), of_dq)
    dbias = DbiasPlan(spec, _dbias_tile(spec, platform)) if has_bias else None
    # Both sums together are more than a warpgroup has registers for.
    apart = spec.head_dim + spec.value_dim > 256
    dkv = tuple(
        _plan_dkv(spec, platform, outputs, wants_bias=by_key and "d_key" in outputs)
        for outputs in ([(name,) for name in backward_dkv.BOTH] if apart else [backward_dkv.BOTH])
    )
    return BackwardPlan(spec, dq, dkv, dbias)


def _plan_dkv(spec: Spec, platform: Platform, outputs: tuple[str, ...], *, wants_bias: bool) -> DkvPlan:
    candidates = [Tile(1, *size) for size in ((64, 2), (64, 1), (32, 2), (32, 1))]
    size = lambda tile: smem.size(backward_dkv.shared_memory(spec, tile, outputs))
    fitting = [tile for tile in candidates if size(tile) <= _capacity(platform)]
    tile = _tuning.choose(TuningKey(f"mosaic_gpu_mma {' '.join(outputs)}", _facts(spec)), fitting)
    blocks, processors = pl.cdiv(spec.key_length, tile.rows), platform.processors
    ctas = None if processors is None else _CTAS * processors
    schedule = BackwardSchedule.of(spec.heads, spec.key_heads, blocks, spec.batch, ctas)
    return DkvPlan(spec, tile, dataclasses.replace(schedule, partial=spec.partial), outputs, wants_bias)


def _dq_tile(spec: Spec, platform: Platform) -> Tile:
    blocks = (2, 1) if max(spec.head_dim, spec.value_dim) <= 64 and spec.query_length > WARPGROUP_ROWS else (1,)
    candidates = [Tile(number, *size) for number in blocks for size in ((64, 2), (64, 1), (32, 2), (32, 1))]
    fitting = [tile for tile in candidates if smem.size(backward_dq.shared_memory(spec, tile)) <= _capacity(platform)]
    return _tuning.choose(TuningKey("mosaic_gpu_mma dQ", _facts(spec)), fitting)


def _dbias_tile(spec: Spec, platform: Platform) -> Tile:
    candidates = [Tile(1, size, 1) for size in (64, 32)]
    fitting = [
        tile for tile in candidates if smem.size(backward_dbias.shared_memory(spec, tile)) <= _capacity(platform)
    ]
    return _tuning.choose(TuningKey("mosaic_gpu_mma d_bias", _facts(spec)), fitting)


def _facts(spec: Spec) -> tuple[int, ...]:
    """What tiles are tuned for."""
    return spec.head_dim, spec.value_dim


def _capacity(platform: Platform) -> int:
    assert platform.compute_capability is not None
    return SHARED_MEMORY[platform.compute_capability]


def describe(spec: Spec, platform: Platform) -> str:
    """The forward's and the backward's kernels, tiles and shared memory."""
    forward_plan, backward_plan = plan_forward(spec, platform), plan_backward(spec, platform)
    details = f"{forward_plan.packed_heads} heads packed, keys in {forward_plan.splits} splits"
    kernels = [backward_plan.dq, *backward_plan.dkv, *([backward_plan.dbias] if backward_plan.dbias else [])]
    lines = ["forward:", *_kernel(forward_plan, platform), f"    {details}", "backward:"]
    return "\n".join([*lines, *(line for plan in kernels for line in _kernel(plan, platform))])


def _kernel(plan: KernelPlan, platform: Platform) -> list[str]:
    """A kernel's name, grid, shared memory and tile."""
    launch = plan.launch
    grid = " x ".join(f"{size} {axis}" for axis, size in launch.grid.items())
    return [
        f"  {launch.name}: grid {grid}",
        f"    {smem.size(launch.smem) / KIB:.1f} of {_capacity(platform) / KIB:.1f} KiB of shared memory",
        f"    {vars(plan)['tile']}",
    ]
