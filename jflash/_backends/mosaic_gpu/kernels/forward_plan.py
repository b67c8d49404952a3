"""A call's forward before any array: its tiles, schedule, shared memory and launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jflash._backends.mosaic_gpu import logits
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Buffers, Launch, round_up, smem
from jflash._backends.mosaic_gpu.inputs import bf16_pieces, bias_and_mask, whole_dims
from jflash._backends.mosaic_gpu.kernels.cta import KernelPlan
from jflash._backends.mosaic_gpu.schedule import ForwardSchedule, RowTiles
from jflash._semantics.spec import Spec


def shared_memory(spec: Spec, tile: RowTiles, out_dtype: Any, output_parts: int = 0) -> Buffers:
    """The kernel's buffers, and barriers: `full` when a copy has arrived, `empty` when all readers are done.

    `output_parts` is that of the plan.
    """
    columns, value_columns = round_up(spec.head_dim, 16), round_up(spec.value_dim, 16)
    has_bias_tiles, bias_by_mma = bias_and_mask.has_bias_tiles(spec), logits.form(spec).bias_by_mma
    q = smem.tile((tile.warpgroups, WARPGROUP_ROWS, columns), spec.dtype)
    o = smem.tile((tile.warpgroups, WARPGROUP_ROWS, value_columns // max(1, output_parts)), out_dtype)
    alike: Any = (q,) if (columns, spec.dtype) == (value_columns, out_dtype) else plgpu.RefUnion(q, o)
    empty = smem.barriers(tile.stages, arrivals=tile.warpgroups)
    return Buffers(
        # The output takes the place of the queries, or has a buffer of its own.
        q_o=(q, o) if output_parts else alike,
        k=smem.tile((tile.stages, tile.keys, columns), spec.dtype),
        v=smem.tile((tile.stages, tile.keys, value_columns), spec.dtype),
        # What there is of a bias comes and goes with the keys: its tiles, or columns that the matrix unit adds.
        bias=smem.tile((tile.stages, tile.rows, tile.keys), spec.bias_dtype) if has_bias_tiles else None,
        bias_columns=bf16_pieces.smem_tile(tile.stages, tile.keys) if bias_by_mma else None,
        q_full=smem.barriers(tile.warpgroups),
        k_full=smem.barriers(tile.stages, arrivals=1 + has_bias_tiles + bias_by_mma),
        k_empty=empty,
        v_full=smem.barriers(tile.stages),
        v_empty=empty,
        q_empty=smem.barriers(1, arrivals=tile.warpgroups),
        # A number for each row that is stored as a scheduling fence, and never read.
        fence=smem.vectors((tile.warpgroups, WARPGROUP_ROWS)),
    )


@dataclasses.dataclass(frozen=True)
class ForwardPlan(KernelPlan):
    """A call's forward, known before any array."""

    tile: RowTiles
    schedule: ForwardSchedule
    packed_heads: int = 1
    """Query heads that share keys and are interleaved in the rows of one tile."""
    splits: int = 1
    """CTAs that share the keys of a tile of queries; their float32 outputs are merged afterwards."""
    output_parts: int = 0
    """Parts in which the output leaves from a buffer of its own; 0: it takes the place of the queries."""

    @property
    def rows(self) -> int:
        """Rows of queries of a head."""
        return self.spec.query_length * self.packed_heads

    @property
    def heads(self) -> int:
        """Heads of the rows."""
        return self.spec.heads // self.packed_heads

    @property
    def out_dtype(self) -> Any:
        """The dtype in which the kernel stores the output."""
        return self.spec.dtype if self.splits == 1 else jnp.dtype(jnp.float32)

    @property
    def missing_rows(self) -> int:
        """Rows that the first block of queries lacks."""
        return self.tile.missing(self.rows)

    @property
    def launch(self) -> Launch:
        """Queries and output are `[B, T, N, D]`, or with packed heads `[B, N, T, D]`."""
        spec, schedule, (head_dim, value_dim) = self.spec, self.schedule, whole_dims(self.spec)
        rows = round_up(self.rows, 8)
        order = (rows, self.heads) if self.packed_heads == 1 else (self.heads, rows)
        out = (self.splits, spec.batch, *order, value_dim)
        lse = (self.splits, spec.batch, self.heads, schedule.blocks * self.tile.rows)
        ctas, lists = schedule.grid
        groups = schedule.head_groups
        return Launch(
            name=f"jflash_forward_{head_dim}_{value_dim}",
            grid=dict(head=self.heads // groups, block=ctas, head_group=groups, batch=lists, split=self.splits),
            results=dict(out=jax.ShapeDtypeStruct(out, self.out_dtype), lse=jax.ShapeDtypeStruct(lse, jnp.float32)),
            smem=shared_memory(spec, self.tile, self.out_dtype, self.output_parts),
            warpgroups=self.tile.warpgroups + 1,
        )
