"""A call's forward before any array: its tiles, schedule, shared memory and launch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jflash._backends.mosaic_gpu import logits
from jflash._backends.mosaic_gpu.hardware import smem
from jflash._backends.mosaic_gpu.hardware.launch import Launch
from jflash._backends.mosaic_gpu.hardware.smem import WARPGROUP_ROWS, round_up
from jflash._backends.mosaic_gpu.inputs import bias_and_mask, bias_columns
from jflash._backends.mosaic_gpu.inputs.prepare import whole_dim
from jflash._backends.mosaic_gpu.schedule.forward_schedule import ForwardSchedule
from jflash._backends.mosaic_gpu.schedule.tiles import ForwardTiles
from jflash._semantics.spec import Spec


class SharedMemory(NamedTuple):
    """Buffers, and barriers: `full` when a copy has arrived, `empty` when all readers are done."""

    q_o: Any
    """Queries; the output takes their place, or follows as a second buffer."""
    k: Any
    v: Any
    bias: Any
    """Tiles of the bias, if it has any; they come and go with the keys."""
    bias_columns: Any
    """Columns of the bias of keys, if the matrix unit adds it; likewise."""
    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    q_empty: Any
    fence: Any
    """A number for each row that is stored as a scheduling fence, and never read."""

    @property
    def q(self) -> Any:
        """Queries, a tile for each warpgroup."""
        return self.q_o[0] if isinstance(self.q_o, tuple) else self.q_o

    @property
    def o(self) -> Any:
        """The output, or a part of it, for each warpgroup."""
        return self.q_o[1] if isinstance(self.q_o, tuple) else self.q_o


def shared_memory(spec: Spec, tile: ForwardTiles, out_dtype: Any, output_parts: int = 0) -> SharedMemory:
    """The kernel's declaration. `output_parts` is that of the plan."""
    columns, value_columns = round_up(spec.head_dim, 16), round_up(spec.value_dim, 16)
    has_bias_tiles, bias_by_mma = bias_and_mask.has_bias_tiles(spec), logits.form(spec).bias_by_mma
    q = smem.tile((tile.warpgroups, WARPGROUP_ROWS, columns), spec.dtype)
    o = smem.tile((tile.warpgroups, WARPGROUP_ROWS, value_columns // max(1, output_parts)), out_dtype)
    if output_parts:
        q_o: Any = (q, o)
    else:
        q_o = q if (columns, spec.dtype) == (value_columns, out_dtype) else plgpu.RefUnion(q, o)
    empty = smem.barriers(tile.stages, arrivals=tile.warpgroups)
    return SharedMemory(
        q_o=q_o,
        k=smem.tile((tile.stages, tile.keys, columns), spec.dtype),
        v=smem.tile((tile.stages, tile.keys, value_columns), spec.dtype),
        bias=smem.tile((tile.stages, tile.rows, tile.keys), spec.bias_dtype) if has_bias_tiles else None,
        bias_columns=bias_columns.smem_tile(tile.stages, tile.keys) if bias_by_mma else None,
        q_full=smem.barriers(tile.warpgroups),
        k_full=smem.barriers(tile.stages, arrivals=1 + has_bias_tiles + bias_by_mma),
        k_empty=empty,
        v_full=smem.barriers(tile.stages),
        v_empty=empty,
        q_empty=smem.barriers(1, arrivals=tile.warpgroups),
        fence=smem.vectors((tile.warpgroups, WARPGROUP_ROWS)),
    )


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """A call's forward, known before any array."""

    spec: Spec
    tile: ForwardTiles
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
    def smem(self) -> SharedMemory:
        """What a CTA has of shared memory."""
        return shared_memory(self.spec, self.tile, self.out_dtype, self.output_parts)

    @property
    def launch(self) -> Launch:
        """The kernel's launch. Queries and output are `[B, T, N, D]`, or with packed heads `[B, N, T, D]`."""
        spec, schedule = self.spec, self.schedule
        rows = round_up(self.rows, 8)
        order = (rows, self.heads) if self.packed_heads == 1 else (self.heads, rows)
        out = (self.splits, spec.batch, *order, whole_dim(spec.value_dim))
        lse = (self.splits, spec.batch, self.heads, schedule.blocks * self.tile.rows)
        return Launch(
            name=f"jflash_forward_{whole_dim(spec.head_dim)}_{whole_dim(spec.value_dim)}",
            grid=dict(
                head=self.heads // schedule.head_groups,
                block=schedule.grid[0],
                head_group=schedule.head_groups,
                batch=schedule.grid[1],
                split=self.splits,
            ),
            results=dict(out=jax.ShapeDtypeStruct(out, self.out_dtype), lse=jax.ShapeDtypeStruct(lse, jnp.float32)),
            smem=self.smem,
            warpgroups=self.tile.warpgroups + 1,
        )
