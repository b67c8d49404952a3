"""Backward in two kernels, the second: a block owns 64 keys and walks over the queries that can see them.

    two warpgroups, for each query head that shares the keys and each tile of queries:
      S^T = K Q^T                          dP^T = V dO^T
      P^T = exp(S^T - lse)          --->   dS^T = P^T (dP^T - delta)
      dV  = dV + P^T dO                    dK   = dK + dS^T Q
    the last warpgroup copies tiles of queries ahead of them into shared memory

Each warpgroup holds one of the two sums, so that head dims of 256 fit in registers; P^T goes through shared memory.
What a block sums it alone owns, so every sum has one order.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import inputs, spans, statistics, tiles
from jflash._backends.mosaic_gpu import pairs as bias_and_mask
from jflash._backends.mosaic_gpu.inputs import Arrays, Inputs, Place, Rows
from jflash._backends.mosaic_gpu.operations import Operations, Ref, along_columns
from jflash._backends.mosaic_gpu.query_copies import Sources, copy_all
from jflash._backends.mosaic_gpu.query_order import Order
from jflash._backends.mosaic_gpu.statistics import PerQuery
from jflash._backends.mosaic_gpu.tiles import ROWS
from jflash._backends.mosaic_gpu.turns import Turns
from jflash._semantics.spec import Spec

QUERIES = 64
"""Queries of a tile."""


class Buffers(NamedTuple):
    """Shared memory, and its barriers: `filled` when a copy has arrived, `free` when all who need it have read it."""

    key: Ref
    value: Ref
    query: Ref
    d_out: Ref
    bias: Ref | None
    """Tiles of the bias, if it has any; they come and go with the queries."""
    statistics: Sequence[Ref]
    """Vectors of lse and delta."""
    weights: Ref
    slopes: Sequence[Ref]
    """The derivatives of logits by products, of a call that is not plain, and by a bias that `score_mod` changes."""
    keys_filled: Ref
    query_filled: Ref
    query_free: Ref
    d_out_filled: Ref
    d_out_free: Ref
    weights_filled: Ref
    weights_free: Ref
    finished: Ref


def d_key_value(
    spec: Spec,
    arrays: Arrays,
    rows: tuple[PerQuery, PerQuery],
    known_spans: Int[Array, "B blocks 4"] | None,
    wants_bias: bool,
    operations: Operations,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K D"], list[Array]]:
    """The kernel's call: dK, dV, and if wanted the sums over queries of the bias's gradient, `[B, N, keys]`."""
    query, key, value, d_out, sides = arrays
    batch, _, heads, head_dim = query.shape
    length, key_heads, value_dim = value.shape[1:]
    columns, value_columns = tiles.round_up(head_dim, 16), tiles.round_up(value_dim, 16)
    turns = Turns.of(heads, key_heads, -(-length // ROWS), batch, operations.processors)
    has_tiles = bias_and_mask.has_tiles(spec)
    stages = tiles.key_value_stages(columns, value_columns, bias_and_mask.tile_bytes(spec, sides))
    slopes = 0 if inputs.is_plain(spec) else 1
    bends = wants_bias and spec.score_mod is not None
    names = [*sides, *([] if known_spans is None else ["spans"])]
    dtype = query.dtype

    def kernel(
        query_ref: Ref, key_ref: Ref, value_ref: Ref, d_out_ref: Ref, lse_ref: Ref, delta_ref: Ref, *refs: Any
    ) -> None:
        side_refs, (d_key_ref, d_value_ref, *rest) = refs[: len(names)], refs[len(names) :]
        d_bias_refs = [rest.pop(0)] if wants_bias else []
        shared = Buffers(*rest)
        call = Inputs(spec, operations, dict(zip(names, side_refs, strict=True)), keys_first=True)
        turn, block, unit, warpgroup = (lax.axis_index(name) for name in ("turn", "block", "unit", "warpgroup"))
        b, own_set, key_head, first_head = turns.unit(turn, unit)
        first_key = block * ROWS
        own_keys = pl.ds(first_key, ROWS)
        walk = spans.walk_queries(call, b, block, ROWS, QUERIES)
        order = Order.of(spec, walk, turns.heads, block, by_head=wants_bias)
        key_columns = tiles.columns(columns, head_dim, b)
        out_columns = tiles.columns(value_columns, value_dim, b)
        shape = (ROWS, QUERIES)

        @pl.when(warpgroup == 0)
        def _() -> None:
            tiles.release(stages, shared.query_free, shared.d_out_free)
            tiles.registers(2, copies=False)
            keys = Rows(b, first_key, ROWS, key_head, key_columns)
            call.copy_rows("key", key_ref, keys, shared.key, shared.keys_filled)
            values = keys._replace(columns=out_columns)
            call.copy_rows("value", value_ref, values, shared.value, shared.keys_filled)
            plgpu.barrier_wait(shared.keys_filled)

            def visit(step: Array, head: Array, index: Array, sums: Array) -> Array:
                slot = lax.rem(step, stages)
                place = Place(b, first_head + head, walk.start(index), first_key)
                plgpu.barrier_wait(shared.query_filled.at[slot])
                products = operations.product(shared.key, shared.query.at[slot].T, shape)
                lse = along_columns(operations.load(shared.statistics[0].at[slot], 1), shape)
                pairs = call.words(place, shape)
                if shared.bias is not None:
                    pairs["bias"] = operations.load(shared.bias.at[slot].T)
                logits, pull_back = call.with_gradients(products, place, shape, pairs, ("bias",) if bends else ())
                weights = call.hide_masked(call.exponent(logits, lse), place, shape, pairs, 0.0)
                weights = walk.masked(index, weights, lambda weights: call.hide(weights, place, shape, pairs, 0.0))
                plgpu.barrier_wait(shared.weights_free)
                shared.weights[...] = weights.astype(dtype)
                if shared.slopes:
                    slope, slopes = pull_back(operations.full(shape, 1))
                    for ref, values in zip(shared.slopes, [slope, *slopes.values()], strict=True):
                        ref[...] = values.astype(dtype)
                operations.commit()
                plgpu.barrier_arrive(shared.query_free.at[slot])
                plgpu.barrier_arrive(shared.weights_filled)
                plgpu.barrier_wait(shared.d_out_filled.at[slot])
                sums = operations.add_product(sums, weights.astype(dtype), shared.d_out.at[slot])
                plgpu.barrier_arrive(shared.d_out_free.at[slot])
                return sums

            sums = order.each(visit, operations.full((ROWS, value_columns), 0))
            plgpu.barrier_wait(shared.weights_free)
            if turns.sets > 1:
                d_value_ref[b, own_set, own_keys] = sums
                return
            store(operations, sums, shared.value, d_value_ref.at[b, own_keys, key_head, out_columns], shared.finished)

        @pl.when(warpgroup == 1)
        def _() -> None:
            tiles.release(stages, shared.query_free, shared.d_out_free)
            plgpu.barrier_arrive(shared.weights_free)
            tiles.registers(2, copies=False)
            plgpu.barrier_wait(shared.keys_filled)

            def visit(step: Array, head: Array, index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                sums, *totals = carry
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(shared.d_out_filled.at[slot])
                d_weights = operations.product(shared.value, shared.d_out.at[slot].T, shape)
                delta = along_columns(operations.load(shared.statistics[1].at[slot], 1), shape)
                operations.commit()
                plgpu.barrier_arrive(shared.d_out_free.at[slot])
                plgpu.barrier_wait(shared.weights_filled)
                d_logits = operations.load(shared.weights).astype(jnp.float32) * (d_weights - delta)
                slopes = [operations.load(ref).astype(jnp.float32) for ref in shared.slopes]
                d_bias = d_logits * slopes[1] if bends else d_logits
                totals = [total + d_bias.sum(axis=1) for total in totals]
                d_products = d_logits * slopes[0] if slopes else d_logits
                plgpu.barrier_arrive(shared.weights_free)
                plgpu.barrier_wait(shared.query_filled.at[slot])
                sums = operations.add_product(sums, d_products.astype(dtype), shared.query.at[slot])
                plgpu.barrier_arrive(shared.query_free.at[slot])
                return sums, *totals

            def finish_head(head: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                sums, *totals = carry
                for ref, total in zip(d_bias_refs, totals, strict=True):
                    ref[b, first_head + head, own_keys] = total
                return sums, *(total * 0 for total in totals)

            zeros = [operations.full((ROWS,), 0) for _ in d_bias_refs]
            sums, *_ = order.each(visit, (operations.full((ROWS, columns), 0), *zeros), finish_head)
            sums = sums * inputs.sums_scale(spec)
            if turns.sets > 1:
                d_key_ref[b, own_set, own_keys] = sums
                return
            store(operations, sums, shared.key, d_key_ref.at[b, own_keys, key_head, key_columns], shared.finished)

        @pl.when(warpgroup == 2)
        def _() -> None:
            tiles.registers(2, copies=True)

            sources = Sources(query_ref, d_out_ref, (lse_ref, delta_ref), key_columns, out_columns)
            copy_all(call, order, sources, shared, b, first_head, own_keys)

    bar = lambda arrivals: plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals)
    one = plgpu.Barrier()
    kernel.__name__ = f"jflash_d_key_value_{head_dim}_{value_dim}"
    bias_type = jax.ShapeDtypeStruct((batch, heads, turns.blocks * ROWS), jnp.float32)
    d_key, d_value, *d_bias = plgpu.kernel(
        kernel,
        out_type=(
            turns.gradient(key, turns.blocks * ROWS, columns),
            turns.gradient(value, turns.blocks * ROWS, value_columns),
            *([bias_type] if wants_bias else []),
        ),
        grid=(turns.number, turns.blocks, turns.units),
        grid_names=("turn", "block", "unit"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[
            tiles.shared((ROWS, columns), dtype, head_dim),
            tiles.shared((ROWS, value_columns), dtype, value_dim),
            tiles.shared((stages, QUERIES, columns), dtype, head_dim),
            tiles.shared((stages, QUERIES, value_columns), dtype, value_dim),
            tiles.shared((stages, QUERIES, ROWS), sides["bias"].dtype) if has_tiles else None,
            statistics.shared(False, stages, QUERIES),
            tiles.shared((ROWS, QUERIES), dtype),
            [tiles.shared((ROWS, QUERIES), dtype) for _ in range(slopes + bends)],
            plgpu.Barrier(num_arrivals=2),
            bar(2 + has_tiles),
            bar(2),
            bar(2),
            bar(2),
            one,
            one,
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=tiles.COMPILER,
        interpret=operations.interpret,
    )(
        *(query, key, value, d_out, *rows, *sides.values()),
        *([] if known_spans is None else [known_spans]),
    )
    return turns.summed(d_key, key), turns.summed(d_value, value), d_bias


def store(operations: Operations, sums: Float[Array, "keys columns"], staged: Ref, target: Ref, finished: Ref) -> None:
    """Sums into device memory, through shared memory that no warpgroup reads when both have `finished`."""
    plgpu.barrier_arrive(finished)
    plgpu.barrier_wait(finished)
    staged[...] = sums.astype(staged.dtype)
    operations.commit()
    plgpu.copy_smem_to_gmem(staged, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
