"""A wide call's backward before any array: what each gradient's kernel reads, its tiles, shared memory and launch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jflash import _tuning
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Buffers, round_up, smem
from jflash._backends.mosaic_gpu.inputs import CallTiles, bias_and_mask, operand_pieces, whole_dims
from jflash._backends.mosaic_gpu.kernels.launch import KernelPlan, Launch
from jflash._backends.mosaic_gpu.schedule import BackwardSchedule, WalkedTiles
from jflash._semantics.spec import Spec
from jflash._tuning import TuningKey

_TILES = (WalkedTiles(64, 2), WalkedTiles(32, 2), WalkedTiles(64, 1), WalkedTiles(32, 1))


class _Kind(NamedTuple):
    """What a gradient's kernel reads."""

    own: tuple[str, ...]
    """Arrays of which a CTA has 64 rows: the left operand of S, and that of dP where it is made."""
    walked: tuple[str, str]
    """Arrays whose tiles it walks over, likewise."""
    summed: int
    """Which of these two is weighed."""

    @property
    def keys_first(self) -> bool:
        return self.own[0] == "key"

    @property
    def makes_dp(self) -> bool:
        """Whether it makes dP: dS is weighed, not P."""
        return len(self.own) > 1


Gradient = Literal["d_query", "d_key", "d_value"]
_KINDS: dict[Gradient, _Kind] = {
    "d_query": _Kind(("query", "d_out"), ("key", "value"), 0),
    "d_key": _Kind(("key", "value"), ("query", "d_out"), 0),
    "d_value": _Kind(("key",), ("query", "d_out"), 1),
}


def _dim(spec: Spec, name: str) -> int:
    return whole_dims(spec)[name in ("value", "d_out", "d_value")]


def shared_memory(spec: Spec, gradient: Gradient, tile: WalkedTiles) -> Buffers:
    """The kernel's buffers, and barriers: `full` when a copy has arrived or something was stored, `empty` when all
    readers are done."""
    kind, has_bias_tiles, tiles = _KINDS[gradient], bias_and_mask.has_bias_tiles(spec), CallTiles.of(spec)

    def buffer(index: int, rows: tuple[int, ...], make: Any, **ring: int) -> Any:
        """An array's; of what is weighed each warpgroup takes half of the columns, by whole swizzles both ways."""
        dim = _dim(spec, kind.walked[index])
        columns = round_up(dim, 32)
        part = math.gcd(columns // 2, tile.size) if index == kind.summed else columns
        return make((*rows, columns), dim, part=part, **ring)

    def ring(index: int) -> Buffers:
        readers = 2 if index == kind.summed else 1
        others = int(has_bias_tiles and index == 0)
        return buffer(index, (tile.stages, tile.size), tiles.ring, readers=readers, others=others)

    bias = (WARPGROUP_ROWS, tile.size) if not kind.keys_first else (tile.size, WARPGROUP_ROWS)
    dp, weights = (smem.tile((WARPGROUP_ROWS, tile.size), dtype) for dtype in (jnp.float32, spec.dtype))
    own = [buffer(index, (1, WARPGROUP_ROWS), tiles.operand) for index in range(len(kind.own))]
    return Buffers(
        own=own,
        own_full=smem.barriers(1, arrivals=smem.copies(*own)),
        walked=[ring(index) for index in range(2)],
        # Tiles of the bias come and go with what S is made of.
        bias=smem.tile((tile.stages, *bias), spec.bias_dtype) if has_bias_tiles else None,
        # What the second warpgroup hands to the first one, and what takes its place on the way back.
        dp_weights=smem.reused(dp, weights) if kind.makes_dp else (weights,),
        dp_full=smem.barriers(1),
        weights_full=smem.barriers(1),
    )


@dataclasses.dataclass(frozen=True)
class WidePlan(KernelPlan):
    """The kernel for one gradient of a wide call, before any array."""

    gradient: Gradient
    tile: WalkedTiles
    schedule: BackwardSchedule
    """Of blocks of 64 rows."""
    wanted: tuple[str, ...]
    """Parameters whose gradients the kernel sums along the rows."""

    @property
    def kind(self) -> _Kind:
        """What the kernel reads."""
        return _KINDS[self.gradient]

    @property
    def columns(self) -> int:
        """Columns of the gradient."""
        return round_up(_dim(self.spec, self.gradient), 32)

    @property
    def stores_sums(self) -> bool:
        """Whether the gradient is stored as it was summed, in float32, to be summed on."""
        return self.kind.keys_first and self.schedule.stores_sums

    @property
    def launch(self) -> Launch:
        """Registers are stored whole."""
        spec, schedule, rows = self.spec, self.schedule, self.schedule.blocks * WARPGROUP_ROWS
        shape = (spec.batch, rows, spec.key_heads if self.kind.keys_first else spec.heads, self.columns)
        result = jax.ShapeDtypeStruct(shape, spec.result_dtype)
        if self.stores_sums:
            result = schedule.gradient(spec, rows, 0, self.columns)
        sums = jax.ShapeDtypeStruct((spec.batch, spec.heads, rows), jnp.float32)
        dims = whole_dims(spec)
        return Launch(
            name=f"jflash_wide_{self.gradient}_{dims[0]}_{dims[1]}",
            grid=dict(wave=schedule.waves, block=schedule.blocks, item=schedule.items),
            results={self.gradient: result, **{f"d_{name}": sums for name in self.wanted}},
            smem=shared_memory(spec, self.gradient, self.tile),
            warpgroups=3,
        )


def plan_backward(spec: Spec, processors: int | None, wanted: tuple[str, ...]) -> tuple[WidePlan, ...]:
    """The plans of all three gradients; `wanted` are parameters whose gradients are sums along rows."""
    by_key = ("bias",) if "bias" in wanted and bias_and_mask.bias_kind(spec) == "column" else ()
    sums = dict(d_query=tuple(name for name in wanted if name not in by_key), d_key=by_key, d_value=())

    def plan(gradient: Gradient) -> WidePlan:
        of_keys = _KINDS[gradient].keys_first
        length, heads = (spec.key_length, spec.key_heads) if of_keys else (spec.query_length, spec.heads)
        schedule = BackwardSchedule.of(spec.heads, heads, pl.cdiv(length, WARPGROUP_ROWS), spec.batch, processors)
        schedule = dataclasses.replace(schedule, partial=spec.partial)
        return WidePlan(spec, gradient, _choose_tiles(spec, gradient), schedule, sums[gradient])

    return tuple(map(plan, _KINDS))


def fits(spec: Spec) -> bool:
    """Whether shared memory has room for the smallest tiles of every kernel."""
    return all(smem.fits(shared_memory(spec, gradient, _TILES[-1])) for gradient in _KINDS)


def _choose_tiles(spec: Spec, gradient: Gradient) -> WalkedTiles:
    fitting = [tile for tile in _TILES if smem.fits(shared_memory(spec, gradient, tile))]
    facts = *whole_dims(spec), bias_and_mask.bias_tile_bytes(spec), *operand_pieces.facts(spec)
    return _tuning.choose(TuningKey(f"mosaic_gpu wide {gradient}", facts), fitting)
