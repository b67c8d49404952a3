"""Backward, fused: a CTA owns some keys and walks over the tiles of queries that can see them.

    each of two consumer warpgroups, on 64 keys, for each query head that shares them and each tile of queries:
      S^T  = K Q^T
      dP^T = V dO^T                  the matrix unit runs this, while the warpgroup goes on with
      P^T  = exp(S^T - lse)
      dV   = dV + P^T dO             and this, during
      dS^T = P^T (dP^T - delta)      into shared memory, for both
      dK   = dK + dS^T Q
      dQ   = dS K                    of the tile before: one half of it from all keys, added to what is in device memory
    the producer warpgroup copies tiles of queries ahead of them into shared memory

A tile's dQ needs both warpgroups' dS. Made a tile later, it does not bring them into step: one's exponentials can run
beside the other's products. `row_statistics` says how lse and delta come.

delta is what the forward's softmax takes from every dP of a row: sum(dO * O) - d_lse. The additions to dQ come in any
order; `backward_dq` and `backward_dkv` are the backward in which every sum has one order.

Sources: FlashAttention-2, arXiv:2307.08691, algorithm 2; FlashAttention-3, arXiv:2407.08608, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu.exponent import sums_scale
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, WarpgroupOps, pipeline
from jflash._backends.mosaic_gpu.inputs import GmemTile
from jflash._backends.mosaic_gpu.kernels.backward_mainloop import Accumulators, FusedCta
from jflash._backends.mosaic_gpu.kernels.backward_plan import FusedPlan
from jflash._backends.mosaic_gpu.schedule import QueryProducer, dq_accumulator


def backward(plan: FusedPlan, arrays: Mapping[str, Array], dq_acc: Array, ops: WarpgroupOps) -> dict[str, Array]:
    """Launch the kernel; d_query, d_key, d_value, and for each parameter wanted the sums of its gradient `[B, N, L]`.

    `dq_acc` holds zeros.
    """
    launch, schedule = plan.launch, plan.schedule

    def store(refs: Any) -> None:
        results, written = refs
        made = _Kernel.launch(plan, {**arrays, **written}, ops)
        for name, ref in results.items():
            ref[...] = made[name]

    # Not `jax.new_ref`, whose effect JAX cannot lower for several devices (0.11 and 0.12).
    states = {name: jnp.zeros(result.shape, result.dtype) for name, result in launch.results.items()}
    written = dict(dq_acc=dq_acc, counters=jnp.zeros(dq_accumulator.counters(schedule), jnp.int32))
    made, _ = pl.run_state(store)((states, written))
    of_keys = {f"d_{name}": schedule.summed(made[f"d_{name}"], arrays[name]) for name in ("key", "value")}
    return made | of_keys | dict(d_query=made["d_query"][:, : arrays["query"].shape[1]])


class _Kernel(FusedCta):
    def compute(self) -> None:
        """Round some of dQ, and walk over the tiles of queries."""
        pipeline.split_registers(self.plan.tile.warpgroups, copies=False)
        own_keys = pl.ds(self.first_key + self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        width = self.smem.dq.shape[-1]
        self.dq_columns = pl.ds(self.warpgroup * width, width)
        if self.plan.tile.split_dq_by_rows:
            self.dq_columns = pipeline.columns(width, self.refs.results["d_query"], self.item.batch)
        pl.when(self.dq.adds)(self._begin)
        self.dq.begin(self.warpgroup)

        def store_sums(head: Array, sums: tuple[Array, ...]) -> None:
            for name, total in zip(self.plan.wanted, sums, strict=True):
                self.refs.results[f"d_{name}"][self.item.batch, self.item.first_head + head, own_keys] = total

        @pl.when(self.dq.adds)
        def _() -> None:
            pl.when(self.order.tiles.count > 0)(lambda: plgpu.barrier_wait(self.smem.kv_full))
            self._store(self.visit_all(store_sums), own_keys)

    def _begin(self) -> None:
        """Hand empty slots to the producer; the first warpgroup copies the keys and values."""
        shared = self.smem
        pipeline.release(shared.q_empty, shared.do_empty)
        plgpu.barrier_arrive(shared.ds_empty.at[0])

        @pl.when((self.warpgroup == 0) & (self.order.tiles.count > 0))
        def _() -> None:
            keys = GmemTile(self.item.batch, self.first_key, self.plan.tile.keys, self.item.key_head)
            self.inputs.copy_rows("key", keys, shared.k.at[0], shared.kv_full)
            self.inputs.copy_rows("value", keys, shared.v.at[0], shared.kv_full)
            if shared.ones is not None:
                plgpu.copy_gmem_to_smem(self.refs.arrays["ones"], shared.ones, shared.kv_full)

    def _store(self, acc: Accumulators, own_keys: Any) -> None:
        """Store dK and dV: in float32 where several head groups share the keys."""
        shared, item = self.smem, self.item
        results = self.refs.results["d_key"], self.refs.results["d_value"]
        gradients = acc.dk * sums_scale(self.plan.spec), acc.dv
        if self.plan.schedule.head_groups > 1:
            for result, gradient in zip(results, gradients, strict=True):
                result[item.batch, item.head_group, own_keys] = gradient
            plgpu.wait_smem_to_gmem(0)
            self.dq.finish()
            return
        # The other warpgroup reads these keys too.
        plgpu.barrier_arrive(shared.finished)
        plgpu.barrier_wait(shared.finished)
        own = self.own
        for buffer, gradient in zip((shared.k, shared.v), gradients, strict=True):
            buffer[0, own] = gradient.astype(buffer.dtype)
        plgpu.commit_smem()
        for buffer, result in zip((shared.k, shared.v), results, strict=True):
            columns = pipeline.columns(buffer.shape[-1], result, item.batch)
            plgpu.copy_smem_to_gmem(buffer.at[0, own], result.at[item.batch, own_keys, item.key_head, columns])
        # All but these two.
        plgpu.wait_smem_to_gmem(2)
        self.dq.finish()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy(self) -> None:
        """Copy queries, and round dQ beside it."""
        pipeline.split_registers(self.plan.tile.warpgroups, copies=True)

        @pl.when(self.dq.adds)
        def _() -> None:
            keys = pl.ds(self.first_key, self.plan.tile.keys)
            producer = QueryProducer(self.inputs, self.order, self.item, keys)
            producer.copy_all(self.smem, self.dq.after_copy, dq_accumulator.SPARE)
            self.dq.finish()
