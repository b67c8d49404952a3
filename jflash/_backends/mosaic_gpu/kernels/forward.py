"""Forward: a CTA owns some rows of queries and walks over the tiles of keys that they can see.

    each consumer warpgroup, on 64 rows of queries:
      S = Q K_0^T;  P, m, l = online softmax of S
      for j = 1, 2, ...:
        S = Q K_j^T                 the matrix unit runs this
        O = O + P V_(j-1)           and this, while the warpgroup goes on with
        P, m, l = online softmax of S
        O = O * rescale
      O = O + P V_last;  out = O / l;  lse = log l + m
    the producer warpgroup copies tiles of keys and values ahead of them into shared memory

Sources: FlashAttention-3, arXiv:2407.08608, sections 3.1 (warp specialisation) and 3.2 (the overlap within one).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import online_softmax
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Ref, WarpgroupOps, pipeline
from jflash._backends.mosaic_gpu.inputs import GmemTile, TileCoord, bias_columns
from jflash._backends.mosaic_gpu.kernels.forward_mainloop import ForwardCta, MainLoop
from jflash._backends.mosaic_gpu.kernels.forward_plan import ForwardPlan


def forward(plan: ForwardPlan, arrays: Mapping[str, Array], ops: WarpgroupOps) -> dict[str, Array]:
    """Launch the kernel; out `[splits, B, T, N, D]` and lse `[splits, B, N, L]`.

    T and D are whole tiles' here; L is T rounded up to whole blocks. With several splits the outputs are float32, and
    sinks are left to their merge.
    """
    return _Kernel.launch(plan, arrays, ops)


class _Kernel(ForwardCta):
    def compute(self) -> None:
        """Copy its own queries, attend, and store its own output."""
        plan, shared = self.plan, self.smem
        pipeline.release(shared.k_empty, shared.v_empty)
        pipeline.split_registers(plan.tile.warpgroups, copies=False)
        self._copy_q(0)
        plan.schedule.each(self.place, self._attend)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _rows(self, block: Any) -> Any:
        """The rows of this warpgroup; past the end of all, where a block has fewer."""
        plan, missing = self.plan, self.plan.missing_rows
        rows = plan.tile.rows
        start = self.block_start(block) + self.warpgroup * WARPGROUP_ROWS
        if missing:
            there = start < (block + 1) * rows - missing
            start = jnp.where(there, start, (plan.schedule.blocks - 1) * rows + self.warpgroup * WARPGROUP_ROWS)
        return pl.ds(start, WARPGROUP_ROWS)

    def _part(self, ref: Ref, block: Any, columns: Any) -> Ref:
        """This warpgroup's rows of queries or output."""
        head, rows = self.head, self._rows(block)
        return ref.at[rows, head, columns] if self.plan.packed_heads == 1 else ref.at[head, rows, columns]

    def _copy_q(self, index: Any) -> None:
        batch, block, _ = self.item(index)
        query, q = self.refs.arrays["query"].at[batch], self.q.at[self.warpgroup]
        source = self._part(query, block, pipeline.columns(q.shape[-1], query, self.head))
        plgpu.copy_gmem_to_smem(source, q, self.smem.q_full.at[self.warpgroup])

    def _attend(self, index: Any, visited: Any) -> Any:
        """Attend for one work item; `visited` tiles came before, in others."""
        plan = self.plan
        batch, block, tiles = self.item(index)
        plgpu.barrier_wait(self.smem.q_full.at[self.warpgroup])
        at = TileCoord(batch, self.head, self._rows(block).start, 0)
        copy_next = lambda: plan.schedule.if_next(self.place, index, self._copy_q)
        own_buffer = plan.output_parts > 0
        loop = MainLoop(self, tiles, at, visited)
        state, acc_o = loop.run(q_read=copy_next if own_buffer else lambda: None)
        sink = None if plan.splits > 1 else self.inputs.value("sinks", batch, self.head)
        out, lse = online_softmax.finish(self.form.exponent(plan.spec), state, acc_o, sink)
        self._store(batch, block, out, lse)
        if plan.schedule.items_per_cta > 1 and not own_buffer:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            copy_next()
        return visited + tiles.count

    def _store(self, batch: Array, block: Array, out: Array, lse: Array) -> None:
        plan, shared = self.plan, self.smem
        o, own_buffer = self.o.at[self.warpgroup], plan.output_parts > 0
        if self.o is not self.q and not own_buffer:
            # The output has another layout than the queries, which other warpgroups may still read.
            plgpu.barrier_arrive(shared.q_empty)
            plgpu.barrier_wait(shared.q_empty)
        self.refs.results["lse"][self.split, batch, self.head, self._rows(block)] = lse
        result = self.refs.results["out"].at[self.split, batch]
        columns, width = out.shape[1], o.shape[1]
        for first in range(0, columns, width):
            if own_buffer:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o[...] = lax.slice(out, (0, first), (WARPGROUP_ROWS, first + width)).astype(plan.out_dtype)
            plgpu.commit_smem()
            part = pipeline.columns(width, result, self.head) if width == columns else pl.ds(first, width)
            plgpu.copy_smem_to_gmem(o, self._part(result, block, part))

    def copy(self) -> None:
        """Copy keys and values."""
        plan, shared = self.plan, self.smem
        pipeline.split_registers(plan.tile.warpgroups, copies=True)
        key_head = lax.div(self.head, plan.heads // plan.spec.key_heads)

        def copy_block(index: Any, visited: Any) -> Any:
            batch, block, tiles = self.item(index)

            def copy_tile(index: Array) -> None:
                slot = lax.rem(visited + index, plan.tile.stages)
                keys = GmemTile(batch, tiles.start(index), plan.tile.keys, key_head)
                self._copy_keys(keys, block, slot)

            pipeline.for_each_copy(tiles.count, copy_tile, "head", "block", "head_group", "batch")
            return visited + tiles.count

        plan.schedule.each(self.place, copy_block)
        pipeline.drain(shared.k_empty, shared.v_empty)

    def _copy_keys(self, keys: GmemTile, block: Array, slot: Array) -> None:
        shared, inputs = self.smem, self.inputs
        full = shared.k_full.at[slot]
        plgpu.barrier_wait(shared.k_empty.at[slot])
        inputs.copy_rows("key", keys, shared.k.at[slot], full)
        if shared.bias_columns is not None:
            source = bias_columns.part(inputs, keys, self.head)
            plgpu.copy_gmem_to_smem(source, shared.bias_columns.at[slot], full)
        if shared.bias is not None:
            own = pl.ds(self.block_start(block), self.plan.tile.rows), pl.ds(keys.first, keys.size)
            source = inputs.part("bias", keys.batch, self.head).at[own]
            plgpu.copy_gmem_to_smem(source, shared.bias.at[slot], full)
        plgpu.barrier_wait(shared.v_empty.at[slot])
        inputs.copy_rows("value", keys, shared.v.at[slot], shared.v_full.at[slot])
