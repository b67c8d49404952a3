"""Plans: from the Spec and the platform to kernels, tiles and schedules, before any array."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jflash import _tuning
from jflash._backends.mosaic_gpu_mma import (
    backward_dbias,
    backward_dkv,
    backward_dq,
    backward_fused,
    device_sums,
    forward_kernel,
    round_dq,
)
from jflash._backends.mosaic_gpu_mma.backward_dbias import DbiasPlan
from jflash._backends.mosaic_gpu_mma.backward_dkv import DkvPlan
from jflash._backends.mosaic_gpu_mma.backward_dq import DqPlan
from jflash._backends.mosaic_gpu_mma.backward_fused import FusedPlan
from jflash._backends.mosaic_gpu_mma.cta import Tile, columns
from jflash._backends.mosaic_gpu_mma.float32_tiles import FLOAT32_TILES
from jflash._backends.mosaic_gpu_mma.forward_kernel import ForwardPlan
from jflash._backends.mosaic_gpu_mma.products import can_pair
from jflash._backends.mosaic_gpu_mma.shared_memory import KIB, SHARED_MEMORY
from jflash._backends.nvidia import bias_and_mask, smem
from jflash._backends.nvidia.launch import Kernel, KernelPlan
from jflash._backends.nvidia.packing import packs
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.tile import base2, operand_pieces
from jflash._backends.nvidia.tile.gradient_sums import ParameterSums, TableSums, wanted_parameters
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.dbias_schedule import DbiasSchedule
from jflash._platform import Platform
from jflash._semantics.spec import Spec
from jflash._tuning import TuningKey


def _tiles(*fields: tuple[int, ...]) -> tuple[Tile, ...]:
    return tuple(Tile(*numbers) for numbers in fields)


_CTAS = 2
"""CTAs that a multiprocessor runs at a time, about."""

_FORWARD = {
    64: _tiles((2, 64, 1), (2, 64, 2), (2, 64, 1, 1)),
    128: _tiles((2, 64, 1), (2, 64, 2), (1, 64, 1), (1, 64, 2, 1)),
    256: _tiles((1, 64, 1), (1, 32, 2, 1), (1, 32, 1)),
}
_IN_PARTS = {128: (Tile(2, 64, 1, sums_in_parts=True), *_FORWARD[128])}
# Other logits than products leave no registers for tiles of 128 keys, and for what is held of Q.
_OF_PRODUCTS = {
    64: (Tile(2, 128, 1), *_FORWARD[64]),
    256: (Tile(1, 64, 1, held_columns=128, paired=True, sums_in_parts=True), *_FORWARD[256]),
}
_FORWARDS: Mapping[str, Mapping[int, Sequence[Tile]]] = {
    "forward": _FORWARD,
    "unbiased forward": _FORWARD | _IN_PARTS,
    "plain forward": _FORWARD | _OF_PRODUCTS,
    "causal forward": _FORWARD | _OF_PRODUCTS | _IN_PARTS,
}
"""The forward's, by what logits are (`_form_of_forward`)."""

TILES: Mapping[str, Mapping[int, Sequence[Tile]]] = {
    **_FORWARDS,
    "short": {128: _tiles((1, 64, 2), (1, 64, 1)), 256: _tiles((1, 64, 1), (1, 32, 1))},
    "backward": {
        64: _tiles((2, 64, 2, 0, 1, 2), (2, 64, 2, 4, 2), (1, 64, 2), (1, 64, 1)),
        128: _tiles((2, 64, 2, 0, 2), (2, 64, 1, 0, 2), (1, 64, 1), (1, 64, 2), (1, 64, 1, 0, 2)),
        256: _tiles((1, 64, 2, 0, 2), (1, 64, 1, 0, 2)),
    },
    "dQ": {
        64: _tiles((2, 64, 2), (2, 32, 2, 1), (1, 64, 2, 2)),
        128: _tiles((2, 32, 2), (1, 64, 2, 2), (1, 64, 2)),
        256: _tiles((1, 32, 1), (1, 32, 1, 1)),
    },
    "d_key d_value": {
        64: _tiles((2, 32, 2), (1, 64, 2, 2), (1, 64, 2)),
        128: _tiles((1, 64, 1), (1, 32, 2, 2), (1, 32, 2, 1)),
        # One of both dims is 128 at most.
        256: _tiles((1, 32, 2), (1, 32, 1)),
    },
    "d_key": {256: _tiles((1, 32, 1), (1, 32, 2, 1))},
    "d_value": {256: _tiles((1, 64, 1), (1, 32, 1, 1))},
    "d_bias": {
        128: _tiles((1, 128, 1), (2, 128, 1, 0, 2), (1, 64, 1)),
        256: (*_tiles((2, 64, 1, 0, 2), (1, 64, 1), (1, 32, 1)), Tile(1, 32, 1, lends=True)),
    },
}
"""Each kernel's tiles up to a head dim (`_width`); some fit in 99 KiB. First comes the fastest on an H100, causal with
4,096 tokens, of those that were measured there. Operands held in registers were in "backward" alone."""


def plan_forward(spec: Spec, platform: Platform) -> ForwardPlan:
    """The plan of a call's forward."""
    packed_heads = spec.group if packs(spec) else 1
    rows, heads = spec.query_length * packed_heads, spec.heads // packed_heads
    kernel = "short" if rows <= WARPGROUP_ROWS else _form_of_forward(spec)
    tile = _choose(spec, platform, kernel, lambda tile: forward_kernel.shared_memory(spec, tile))
    share = _CTAS * (platform.processors or 0) // (spec.batch * heads)
    splits = max(1, min(share, spec.key_length // (4 * tile.size))) if rows <= tile.rows else 1
    return ForwardPlan(spec, tile, packed_heads, splits)


def _form_of_forward(spec: Spec) -> str:
    """What the forward's tiles depend on besides head dims: how many registers logits and masks leave."""
    is_biased = bias_and_mask.bias_kind(spec) in ("tile", "column") or spec.logits_soft_cap is not None
    if is_biased or spec.dtype == jnp.float32:
        return "forward"
    if not base2.is_plain(spec) or spec.dropout_rate > 0:
        return "unbiased forward"
    return "causal forward" if spec.is_causal else "plain forward"


def plan_backward(spec: Spec, platform: Platform) -> tuple[Kernel[Any], ...]:
    """Return the kernels of a call's backward."""
    wanted = wanted_parameters(spec)
    bias_kind = bias_and_mask.bias_kind(spec) if "bias" in wanted else None
    dbias: tuple[Kernel[Any], ...] = ()
    if bias_kind == "tile":
        tile = _choose(spec, platform, "d_bias", lambda tile: backward_dbias.shared_memory(spec, tile))
        schedule = DbiasSchedule.of(spec, tile.rows, tile.size, _ctas(platform, tile))
        dbias = (Kernel(DbiasPlan(spec, tile, schedule), backward_dbias.body),)
        wanted = tuple(name for name in wanted if name != "bias")
    # Each sum over keys, and with deterministic=True every sum, has an owner in the other kernels alone.
    if not spec.deterministic and bias_kind != "row" and (fused := _plan_fused(spec, platform, wanted)):
        return Kernel(fused, backward_fused.body), Kernel(fused.rounding, round_dq.body), *dbias
    by_key = ("bias",) if bias_kind == "column" else ()
    tile = _choose(spec, platform, "dQ", lambda tile: backward_dq.shared_memory(spec, tile))
    tables = TableSums.of(spec, pl.cdiv(spec.query_length, tile.rows), 1, platform.processors)
    dq = DqPlan(spec, tile, ParameterSums(tuple(name for name in wanted if name not in by_key)), tables)
    dkv = (_plan_dkv(spec, platform, outputs, by_key) for outputs in _outputs_of_dkv(spec))
    return Kernel(dq, backward_dq.body), *(Kernel(plan, backward_dkv.body) for plan in dkv), *dbias


def _ctas(platform: Platform, tile: Tile) -> int | None:
    """CTAs that the device runs at a time, about; `None` where its multiprocessors are not counted."""
    return None if platform.processors is None else _CTAS * platform.processors // tile.warpgroups


def _plan_fused(spec: Spec, platform: Platform, wanted: tuple[str, ...]) -> FusedPlan | None:
    """If its operands are of 16 bits, and a tile of its own fits."""
    shared_memory = lambda tile: backward_fused.shared_memory(spec, tile)
    capability = _capability(platform)
    if spec.dtype == jnp.float32 or not _fitting(spec, capability, "backward", shared_memory):
        return None
    tile = _choose(spec, platform, "backward", shared_memory)
    together = device_sums.together(capability)
    schedule = _schedule(spec, platform, tile)
    sums_of_tables = TableSums.of(spec, schedule.blocks, tile.warpgroups, platform.processors)
    return FusedPlan(spec, tile, ParameterSums(wanted), sums_of_tables, schedule, together)


def _schedule(spec: Spec, platform: Platform, tile: Tile) -> BackwardSchedule:
    """Of a kernel whose CTAs own keys."""
    blocks, ctas = pl.cdiv(spec.key_length, tile.rows), _ctas(platform, tile)
    schedule = BackwardSchedule.of_call(spec, spec.heads, spec.key_heads, blocks, ctas)
    return dataclasses.replace(schedule, partial=spec.partial)


def _plan_dkv(spec: Spec, platform: Platform, outputs: tuple[str, ...], by_key: tuple[str, ...]) -> DkvPlan:
    shared_memory = lambda tile: backward_dkv.shared_memory(spec, tile, outputs)
    tile = _choose(spec, platform, " ".join(outputs), shared_memory)
    sums = ParameterSums(by_key if "d_key" in outputs else ())
    return DkvPlan(spec, tile, sums, TableSums.none(spec), _schedule(spec, platform, tile), outputs)


def _choose(spec: Spec, platform: Platform, kernel: str, shared_memory: Callable[[Tile], Buffers]) -> Tile:
    """The fastest of a kernel's tiles that fit in shared memory."""
    fitting = _fitting(spec, _capability(platform), kernel, shared_memory)
    facts = spec.head_dim, spec.value_dim, *operand_pieces.facts(spec)
    return _tuning.choose(TuningKey(f"mosaic_gpu_mma {kernel}", facts), fitting)


def _fitting(spec: Spec, capability: str, kernel: str, shared_memory: Callable[[Tile], Buffers]) -> list[Tile]:
    """A kernel's tiles that fit in shared memory."""
    listed = FLOAT32_TILES.get(operand_pieces.number(spec), TILES)[kernel]
    tiles = next(tiles for most, tiles in listed.items() if _width(spec, kernel) <= most)
    # For 10.x the compiler spills hundreds of bytes of a pair.
    has_pairs = can_pair(columns(spec.value_dim)) and float(capability) < 10
    capacity = SHARED_MEMORY[capability]
    return [tile for tile in tiles if smem.size(shared_memory(tile)) <= capacity and (has_pairs or not tile.paired)]


def _width(spec: Spec, kernel: str) -> int:
    """The head dim by which tiles are listed: the larger one.

    The forward's registers hold O. For keys as much as twice as wide as values its shared memory has room, if they are
    of 16 bits.
    """
    is_forward, head_dim = kernel in _FORWARDS, spec.head_dim
    return max(spec.value_dim, head_dim // 2 if is_forward and spec.dtype != jnp.float32 else head_dim)


def _outputs_of_dkv(spec: Spec) -> list[tuple[str, ...]]:
    """What each kernel of dK and dV makes: both sums together may be more than a warpgroup has registers for."""
    apart = spec.head_dim + spec.value_dim > 256
    return [(name,) for name in backward_dkv.BOTH] if apart else [backward_dkv.BOTH]


def _capability(platform: Platform) -> str:
    assert platform.compute_capability is not None
    return platform.compute_capability


def describe(spec: Spec, platform: Platform) -> str:
    """The forward's and the backward's kernels, tiles and shared memory."""
    forward_plan, backward = plan_forward(spec, platform), plan_backward(spec, platform)
    details = f"{forward_plan.packed_heads} heads packed, keys in {forward_plan.splits} splits"
    lines = ["forward:", *_kernel(forward_plan, platform), f"    {details}", "backward:"]
    return "\n".join([*lines, *(line for kernel in backward for line in _kernel(kernel.plan, platform))])


def _kernel(plan: KernelPlan, platform: Platform) -> list[str]:
    """A kernel's name, grid and shared memory, and if it has one its tile."""
    launch, capacity = plan.launch, SHARED_MEMORY[_capability(platform)]
    grid = " x ".join(f"{size} {axis}" for axis, size in launch.grid.items())
    return [
        f"  {launch.name}: grid {grid}",
        f"    {smem.size(launch.smem) / KIB:.1f} of {capacity / KIB:.1f} KiB of shared memory",
        *([f"    {vars(plan)['tile']}"] if "tile" in vars(plan) else []),
    ]
