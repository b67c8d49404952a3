"""The fused backward before any array: its tiles, schedule, shared memory and launch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Buffers, Launch, round_up, smem
from jflash._backends.mosaic_gpu.inputs import bf16_pieces, bias_and_mask, row_statistics, whole_dims
from jflash._backends.mosaic_gpu.kernels.cta import KernelPlan
from jflash._backends.mosaic_gpu.schedule import BackwardSchedule, FusedTiles, dq_accumulator
from jflash._semantics.spec import Spec


def shared_memory(spec: Spec, tile: FusedTiles) -> Buffers:
    """The kernel's buffers, and barriers: `full` when a copy has arrived, `empty` when all readers are done."""
    dims = whole_dims(spec)
    columns, value_columns = map(tile.columns, dims)
    width = columns if tile.split_dq_by_rows else columns // 2
    has_bias_tiles, as_columns = bias_and_mask.has_bias_tiles(spec), row_statistics.as_columns(spec)
    smem_statistics = bf16_pieces.smem_tile if as_columns else row_statistics.smem_vectors
    empty = smem.barriers(tile.stages, arrivals=tile.warpgroups)
    handed = smem.barriers(2, arrivals=tile.warpgroups)
    return Buffers(
        k=smem.tile((1, tile.keys, columns), spec.dtype, dims[0], part=width),
        v=smem.tile((1, tile.keys, value_columns), spec.dtype, dims[1]),
        q=smem.tile((tile.stages, tile.queries, columns), spec.dtype, dims[0], part=width),
        do=smem.tile((tile.stages, tile.queries, value_columns), spec.dtype, dims[1]),
        # Tiles of the bias come and go with the queries.
        bias=smem.tile((tile.stages, tile.queries, tile.keys), spec.bias_dtype) if has_bias_tiles else None,
        statistics=smem_statistics(tile.stages, tile.queries),
        # What columns of statistics are multiplied with comes with the keys.
        ones=bf16_pieces.smem_tile(2, WARPGROUP_ROWS) if as_columns else None,
        # dS^T of two steps: while one warpgroup still reads a step's, the other may write the next.
        ds=smem.tile((2, tile.keys, tile.queries), spec.dtype, dims[0], part=width),
        dq=smem.tile((tile.warpgroups, WARPGROUP_ROWS, width), jnp.float32, dims[0]),
        kv_full=smem.barriers(1, arrivals=2 + as_columns),
        q_full=smem.barriers(tile.stages, arrivals=2 + has_bias_tiles),
        q_empty=empty,
        do_full=smem.barriers(tile.stages, arrivals=1 if as_columns else 2),
        do_empty=empty,
        ds_full=handed,
        ds_empty=handed,
        finished=smem.barriers(1, arrivals=tile.warpgroups),
        # The CTA's place in the order in which CTAs begin.
        ticket=smem.integers(1),
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
    def launch(self) -> Launch:
        """A few waves more than have keys round what the last ones accumulated."""
        spec, schedule, shape = self.spec, self.schedule, jax.ShapeDtypeStruct
        dims = whole_dims(spec)
        rows, keys = round_up(spec.query_length, WARPGROUP_ROWS), schedule.blocks * self.tile.keys
        sums = {f"d_{name}": shape((spec.batch, spec.heads, keys), jnp.float32) for name in self.wanted}
        return Launch(
            name=f"jflash_backward_{dims[0]}_{dims[1]}",
            grid=dict(wave=schedule.waves + dq_accumulator.lag(schedule), block=schedule.blocks, item=schedule.items),
            results=dict(
                d_query=shape((spec.batch, rows, spec.heads, dims[0]), spec.dtype),
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
        return jax.ShapeDtypeStruct((dq_accumulator.accumulators(self.schedule), rows, columns), jnp.float32)
