"""Tangent: a CTA owns some rows of queries and walks over the tiles of keys that they can see, with tQ, tK and tV.

    each consumer warpgroup, on 64 rows of queries, for each tile of keys:
      S   = Q K^T
      tS  = tQ K^T + Q tK^T          the matrix unit runs this, while the warpgroup goes on with
      P   = exp(S - lse)
      l   = l + rowsum(P);  c' = rowsum(P tS of all tiles so far) / l
      tO  = tO + (c - c') O          so that all tiles before are about the new mean, too
      O   = O + P V;  tO = tO + P tV + (P (tS - c')) V;  c = c'
    tO = tO / l;  tlse = c
    the producer warpgroup copies tiles of keys and values, and of their tangents, ahead of them into shared memory

tS is pushed through what else shapes logits, with its tangents. A sink is a key of which l and the first c know, and
that has no value. Dropout takes from P what it drops when l and c are known. What does not move has no product.

tO has no large terms that cancel: what is rounded is P (tS - c), about the mean of what was seen, as plain attention
has it about the whole mean. In P tS - tlse P, the published form, both are rounded, and may be much larger than their
difference (`xla.tangent`). O is accumulated again, as the residual is rounded. l is 1 but for the rounding of lse.

Sources: Cheng Lu and Yang Song, arXiv:2410.11081, appendix F, one sweep without c; FlashAttention-3, arXiv:2407.08608,
section 3.1 (warp specialisation). The running mean is as in Welford's update of a weighted mean (Technometrics, 1962).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import piece_products, pipeline
from jflash._backends.mosaic_gpu.cta import Cta
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.tangent_plan import PARAMETERS, TangentPlan
from jflash._backends.mosaic_gpu.tma_inputs import GmemTile
from jflash._backends.nvidia.launch import Refs
from jflash._backends.nvidia.ops import Ref, along_rows
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import base2, dropped, logits, operand_pieces
from jflash._backends.nvidia.tile.base2 import LOG2_E
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics import score_mod_reads

Rows = Float[Array, "rows"]
Tile = Float[Array, "rows keys"]


def tangent(plan: TangentPlan, arrays: Mapping[str, Array], ops: WarpgroupOps) -> dict[str, Array]:
    """Launch the kernel; t_out `[B, T, N * parts, D]` and t_lse `[B, N, L]`.

    Of `arrays` a tangent is named as its operand with `t_` before it. Values, and their tangents, have the parts of
    their columns for heads.
    """
    return _Cta.launch(plan, arrays, ops)


class _Sums(NamedTuple):
    """What a warpgroup has summed over keys."""

    t_out: Float[Array, "rows D"]
    out: Float[Array, "rows D"]
    l: Rows
    p_ts: Rows

    @property
    def mean(self) -> Rows:
        """Of tS, weighted by P."""
        return self.p_ts / jnp.where(self.l == 0, 1.0, self.l)


class _Cta(Cta[TangentPlan]):
    def __init__(self, plan: TangentPlan, refs: Refs, ops: WarpgroupOps) -> None:
        schedule = plan.schedule
        item = schedule.item(lax.axis_index("wave"), lax.axis_index("item"))
        # With a head of keys for each part of a query head, a head group is one of those.
        self.batch, self.part_head = item.batch, item.head_group
        self.head, self.part = lax.div(item.head_group, plan.parts), lax.rem(item.head_group, plan.parts)
        block = schedule.blocks - 1 - lax.axis_index("block")
        super().__init__(plan, refs, ops)
        moving = {name.removeprefix("t_"): ref for name, ref in refs.arrays.items() if name.startswith("t_")}
        self.tangents = dataclasses.replace(self.inputs, refs=moving)
        q, self.out = refs.smem.q_out
        self.q = dict(zip(plan.q, (q, refs.smem.t_q), strict=False))
        self.tiles = tile_range.visited(self.inputs, item.batch, block, plan.tile.rows, plan.tile.keys)
        self.first_row = block * plan.tile.rows
        pairs = [("t_query", "key"), ("query", "t_key")]
        self.moved_products = [pair for pair in pairs if pair[0] in plan.q and pair[1] in plan.k]

    def compute(self) -> None:
        """Copy its own queries, and walk over the tiles of keys."""
        plan, shared, ops, warpgroup = self.plan, self.smem, self.ops, self.warpgroup
        pipeline.release(shared.k.empty, shared.v.empty)
        pipeline.split_registers(plan.tile.warpgroups, copies=False)
        own_row = self.first_row + warpgroup * WARPGROUP_ROWS
        own = pl.ds(own_row, WARPGROUP_ROWS)
        full = shared.q_full.at[warpgroup]
        for name, target in self.q.items():
            rows = GmemTile(self.batch, own_row, WARPGROUP_ROWS, self.head)
            self.inputs.copy_rows(name, rows, target.at[warpgroup], full)
        lse = ops.load(self.refs.arrays["lse"].at[self.batch, self.head, own], 0)
        plgpu.barrier_wait(full)
        visit = lambda index, sums: self._visit(index, lse, sums)
        sums = lax.fori_loop(0, self.tiles.count, visit, self._start(lse))

        @pl.when(self.part == 0)
        def _() -> None:
            self.refs.results["t_lse"][self.batch, self.head, own] = sums.mean

        factor = dropped.scaled(plan.spec, 1 / jnp.where(sums.l == 0, 1.0, sums.l))
        self._store(sums.t_out * along_rows(factor, sums.t_out.shape), own_row)

    def _store(self, t_out: Float[Array, "rows D"], own_row: Any) -> None:
        result, shared = self.refs.results["t_out"], self.smem
        target = GmemTile(self.batch, own_row, WARPGROUP_ROWS, self.part_head).of(result, t_out.shape[1])
        if self.plan.spec.partial:
            target[...] = t_out
            return
        if shared.q_empty is not None:
            # Where it has another layout, it lies over the queries of other warpgroups too.
            plgpu.barrier_arrive(shared.q_empty)
            plgpu.barrier_wait(shared.q_empty)
        pipeline.store(t_out, self.out.at[self.warpgroup], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _start(self, lse: Rows) -> _Sums:
        """Before any key; a sink has part of the weights."""
        spec, inputs = self.plan.spec, self.inputs
        zeros = lambda: self.ops.full((WARPGROUP_ROWS, self.plan.columns), 0)
        l = self.ops.full((WARPGROUP_ROWS,), 0)
        sink, t_sink = (each.value("sinks", self.batch, self.head) for each in (inputs, self.tangents))
        if sink is not None:
            l = dataclasses.replace(base2.of(spec), factor=LOG2_E)(sink, lse)
        return _Sums(zeros(), zeros(), l, l * (0.0 if t_sink is None else t_sink))

    def _visit(self, index: Array, lse: Rows, sums: _Sums) -> _Sums:
        """Add one tile's part to the sums."""
        plan, spec, shared, ops = self.plan, self.plan.spec, self.smem, self.ops
        slot = lax.rem(index, plan.tile.stages) + pipeline.opaque_zero(index, self.warpgroup)
        own_row = self.first_row + self.warpgroup * WARPGROUP_ROWS
        at = TileCoord(self.batch, self.head, own_row, self.tiles.start(index))
        p, ts = self._probabilities(index, slot, at, lse)
        if shared.biases:
            # A copy may overwrite what threads have read.
            plgpu.commit_smem()
        plgpu.barrier_arrive(shared.k.empty.at[slot])

        l, p_ts = sums.l + p.sum(axis=1), sums.p_ts + (p * ts).sum(axis=1)
        new = sums._replace(l=l, p_ts=p_ts)
        t_out = sums.t_out + along_rows(sums.mean - new.mean, sums.out.shape) * sums.out
        kept = dropped.keep(self.inputs, at, p)
        # Before any product is issued: ptxas serialises products if registers that one reads are written among them.
        centred = operand_pieces.split(spec, kept * (ts - along_rows(new.mean, ts.shape)), ops)
        weights = operand_pieces.split(spec, kept, ops)
        plgpu.barrier_wait(shared.v.full.at[slot])

        def weigh(acc_t_out: Any, acc_out: Any) -> None:
            v = {name: piece_products.of_tile(spec, ref.at[slot]) for name, ref in shared.v.tiles.items()}
            piece_products.mma(acc_out, weights, v["value"], ops)
            piece_products.mma(acc_t_out, centred, v["value"], ops)
            if "t_value" in v:
                piece_products.mma(acc_t_out, weights, v["t_value"], ops)

        _, (t_out, out) = piece_products.accumulate(spec, weigh, t_out, sums.out, like=None, ops=ops)
        plgpu.barrier_arrive(shared.v.empty.at[slot])
        return new._replace(t_out=t_out, out=out)

    def _probabilities(self, index: Array, slot: Array, at: TileCoord, lse: Rows) -> tuple[Tile, Tile]:
        """P and tS."""
        plan, spec, shared, ops = self.plan, self.plan.spec, self.smem, self.ops
        shape, moved = (WARPGROUP_ROWS, plan.tile.keys), self.moved_products
        parameters = [name for name in PARAMETERS if name in plan.moving]
        if "score_mod_arrays" in plan.moving:
            parameters += [read.name for read in score_mod_reads.smooth(spec)]
        packed = self.inputs.load_packed_mask(at, shape)
        plgpu.barrier_wait(shared.k.full.at[slot])

        def make(acc_s: Any, acc_ts: Any = None) -> tuple[Tile, Tile]:
            opaque_index = self.warpgroup + pipeline.opaque_zero(index, self.warpgroup)
            q = {name: piece_products.of_tile(spec, ref.at[opaque_index]) for name, ref in self.q.items()}
            k = {
                name: operand_pieces.transposed(piece_products.of_tile(spec, ref.at[slot]))
                for name, ref in shared.k.tiles.items()
            }
            piece_products.mma(acc_s, q["query"], k["key"], ops)
            for left, right in moved:
                piece_products.mma(acc_ts, q[left], k[right], ops)
            pending = sum(piece_products.issued(k[right]) for _, right in moved)
            bias = lambda name: (
                {"bias": ops.load(shared.biases[name].at[slot, self.warpgroup_rows])} if name in shared.biases else {}
            )
            loaded = packed | bias("bias")
            s = ops.read(acc_s, pending=pending)
            mask = TileContext(self.inputs, self.tiles, index, at, loaded)
            to_p = lambda logits: base2.of(spec)(logits, along_rows(lse, shape))
            p, push = logits.linearize(s, mask, to_p, parameters)
            ts = ops.read(acc_ts) if moved else ops.full(shape, 0)
            along = logits.parameter_tangents(self.tangents, mask, shape, bias("t_bias"), parameters)
            return p, push(ts, along)

        return ops.accumulators(make, *[shape] * (1 + bool(moved)))

    def copy(self) -> None:
        """Copy keys and values, and their tangents."""
        plan, shared = self.plan, self.smem
        pipeline.split_registers(plan.tile.warpgroups, copies=True)
        key_head = lax.div(self.head, plan.spec.group)

        def copy_tile(index: Array) -> None:
            slot = lax.rem(index, plan.tile.stages)
            keys = GmemTile(self.batch, self.tiles.start(index), plan.tile.keys, key_head)
            plgpu.barrier_wait(shared.k.empty.at[slot])
            for name, target in shared.k.tiles.items():
                self.inputs.copy_rows(name, keys, target.at[slot], shared.k.full.at[slot])
            for name, target in shared.biases.items():
                self._copy_bias(name, keys, target.at[slot], shared.k.full.at[slot])
            plgpu.barrier_wait(shared.v.empty.at[slot])
            values = keys._replace(head=key_head * plan.parts + self.part)
            for name, target in shared.v.tiles.items():
                self.inputs.copy_rows(name, values, target.at[slot], shared.v.full.at[slot])

        pipeline.for_each_copy(self.tiles.count, copy_tile, "wave", "item", "block")
        pipeline.drain(shared.k.empty, shared.v.empty)

    def _copy_bias(self, name: str, keys: GmemTile, target: Ref, full: Ref) -> None:
        inputs = self.tangents if name == "t_bias" else self.inputs
        own = pl.ds(self.first_row, self.plan.tile.rows), pl.ds(keys.first, keys.size)
        plgpu.copy_gmem_to_smem(inputs.part("bias", keys.batch, self.head).at[own], target, full)
