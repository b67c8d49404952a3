"""A call's tangent before any array: tiles, parts of the output's columns, shared memory, schedule and launch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jflash import _tuning
from jflash._backends.mosaic_gpu import smem
from jflash._backends.mosaic_gpu.array_shapes import tile_dims, whole_dims, whole_rows
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.mosaic_gpu.tiles import RowTiles
from jflash._backends.nvidia import bias_and_mask
from jflash._backends.nvidia.launch import KernelPlan, Launch
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.tile import base2, operand_pieces
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._semantics.spec import Spec
from jflash._tuning import TuningKey

PARAMETERS = ("scale", "alibi_slopes", "bias")
"""Operands that shape logits, whose tangents the kernel takes."""

MOVING = frozenset({"query", "key", "value", "sinks", "score_mod_arrays", *PARAMETERS})
"""Operands whose tangents the kernel takes."""

SMALLEST_TILE = RowTiles(1, 64, 1)

_WIDTHS = (128, 64, 32)
"""Columns of the output that a CTA may take: with those of its tangent they fill registers."""


@dataclasses.dataclass(frozen=True)
class TangentPlan(KernelPlan):
    """A call's tangent, known before any array."""

    moving: frozenset[str]
    """Operands that have a tangent."""
    parts: int
    """Parts of the output's columns, of CTAs of their own, which each make the logits again. In device memory a part is
    a head: columns are split as heads are."""
    tile: RowTiles
    schedule: BackwardSchedule
    """Every part of a head has blocks of its own, here of queries."""

    @property
    def q(self) -> tuple[str, ...]:
        """The arrays whose rows are queries."""
        return "query", *self._tangents("query")

    @property
    def k(self) -> tuple[str, ...]:
        """The arrays whose rows are keys, that logits are made of."""
        return "key", *self._tangents("key")

    @property
    def v(self) -> tuple[str, ...]:
        """The arrays whose rows are keys, that are weighed."""
        return "value", *self._tangents("value")

    @property
    def biases(self) -> tuple[str, ...]:
        """The arrays whose tiles are copied: the bias, if it has both axes, and its tangent."""
        return ("bias", *self._tangents("bias")) if bias_and_mask.has_bias_tiles(self.spec) else ()

    def _tangents(self, name: str) -> tuple[str, ...]:
        return (f"t_{name}",) if name in self.moving else ()

    @property
    def dims(self) -> tuple[int, int]:
        """H, and D of a part, as copies of tiles want them."""
        head_dim, _ = whole_dims(self.spec)
        return head_dim, _part_columns(self.spec, self.parts)

    @property
    def columns(self) -> int:
        """Columns of a part's tiles."""
        return tile_dims(self.part)[1]

    @property
    def part(self) -> Spec:
        """The spec in which a part's columns are all."""
        return dataclasses.replace(self.spec, value_dim=self.dims[1])

    @property
    def launch(self) -> Launch:
        """The output's tangent is `[B, T, N * parts, D]`."""
        spec, schedule, (head_dim, value_dim) = self.spec, self.schedule, self.dims
        all_rows = schedule.blocks * self.tile.rows
        rows, columns = whole_rows(self.part, spec.query_length), value_dim
        if spec.partial:
            # Registers are stored whole.
            rows, columns = all_rows, self.columns
        shape = jax.ShapeDtypeStruct
        t_out = shape((spec.batch, rows, spec.heads * self.parts, columns), spec.result_dtype)
        t_lse = shape((spec.batch, spec.heads, all_rows), jnp.float32)
        return Launch(
            name=f"jflash_tangent_{head_dim}_{value_dim}",
            grid=dict(wave=schedule.waves, block=schedule.blocks, item=schedule.items),
            results=dict(t_out=t_out, t_lse=t_lse),
            smem=self.shared_memory(self.tile),
            warpgroups=self.tile.warpgroups + 1,
        )

    def shared_memory(self, tile: RowTiles) -> Buffers:
        """The kernel's buffers, and barriers: `full` when a copy has arrived, `empty` when all readers are done."""
        spec, (head_dim, value_dim), (columns, value_columns) = self.part, self.dims, tile_dims(self.part)
        rows = tile.warpgroups, WARPGROUP_ROWS
        tiles_of = CallTiles.of(spec)
        q, out = tiles_of.operand((*rows, columns), head_dim), tiles_of.result((*rows, value_columns), value_dim)
        q_out = smem.reused(q, None if spec.partial else out)

        def ring(names: tuple[str, ...], columns: int, dim: int, others: int = 0) -> Buffers:
            tiles = {name: tiles_of.operand((tile.stages, tile.keys, columns), dim) for name in names}
            full = smem.barriers(tile.stages, arrivals=smem.copies(*tiles.values()) + others)
            return Buffers(tiles=tiles, full=full, empty=smem.barriers(tile.stages, arrivals=tile.warpgroups))

        return Buffers(
            # The output's tangent takes the place of the queries. A partial call's leaves from registers.
            q_out=q_out,
            q_empty=None if q_out.is_one_layout else smem.barriers(1, tile.warpgroups),
            t_q=q if "query" in self.moving else None,
            q_full=smem.barriers(tile.warpgroups, arrivals=smem.copies(q) * len(self.q)),
            k=ring(self.k, columns, head_dim, len(self.biases)),
            v=ring(self.v, value_columns, value_dim),
            # They come and go with the keys.
            biases={name: smem.tile((tile.stages, tile.rows, tile.keys), spec.bias_dtype) for name in self.biases},
        )


def plan_tangent(spec: Spec, moving: frozenset[str], processors: int | None) -> TangentPlan:
    """The plan of a call's tangent on a device with `processors` multiprocessors; `None` where that is unknown."""
    plan = _smallest(spec, moving)
    assert plan is not None
    tile = _choose_tile(plan)
    heads, blocks = spec.heads * plan.parts, pl.cdiv(spec.query_length, tile.rows)
    schedule = BackwardSchedule.of_call(spec, heads, heads, blocks, processors)
    return dataclasses.replace(plan, tile=tile, schedule=schedule)


def fits(spec: Spec) -> bool:
    """Whether shared memory has room for the smallest tiles, whatever moves."""
    return _smallest(spec, MOVING & spec.operands) is not None


def _smallest(spec: Spec, moving: frozenset[str]) -> TangentPlan | None:
    """The plan with the smallest tile, and the fewest parts with which that fits."""
    widths = _WIDTHS[1:] if spec.dtype == jnp.float32 else _WIDTHS
    schedule = BackwardSchedule(1, 1, 1, spec.batch, 1, 1)
    every = (TangentPlan(spec, moving, pl.cdiv(spec.value_dim, w), SMALLEST_TILE, schedule) for w in widths)
    return next((plan for plan in every if smem.fits(plan.launch.smem)), None)


def _part_columns(spec: Spec, parts: int) -> int:
    """A part's columns in device memory."""
    _, columns = whole_dims(dataclasses.replace(spec, value_dim=pl.cdiv(spec.value_dim, parts)))
    return columns


def _choose_tile(plan: TangentPlan) -> RowTiles:
    """The fastest tile that fits in shared memory and registers."""
    spec = plan.spec
    warpgroups = 1 if spec.query_length <= WARPGROUP_ROWS else 2
    is_masked = tile_range.is_limited(spec) or spec.key_length % 128 != 0
    sizes = [(warpgroups, 64, 2), (warpgroups, 64, 1), (1, 64, 2), (1, 64, 1)]
    if max(plan.dims) <= 64 and spec.dtype != jnp.float32 and base2.is_plain(spec):
        deep, wide, three = (warpgroups, 64, 4), (warpgroups, 128, 2), (3, 64, 3)
        # Of 128 keys, a tile that needs a mask leaves too few registers.
        sizes = [deep, wide, three, *sizes] if is_masked else [wide, deep, three, *sizes]
    fitting = [tile for tile in (RowTiles(*size) for size in sizes) if smem.fits(plan.shared_memory(tile))]
    facts = *plan.dims, bias_and_mask.bias_tile_bytes(spec), *operand_pieces.facts(spec), int(is_masked)
    return _tuning.choose(TuningKey("mosaic_gpu tangent", (*facts, *sorted(plan.moving))), fitting)
