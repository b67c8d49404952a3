"""Backward in two kernels, the first: a block owns some rows of queries and walks over the keys that they can see.

    each warpgroup that computes, on 64 rows of queries, for each tile of keys:
      S  = Q K^T
      dP = dO V^T                    the matrix unit runs this, while the warpgroup goes on with
      P  = exp(S - lse)
      dS = P (dP - delta)
      dQ = dQ + dS K

What a block sums it alone owns, so every sum has one order. So are the sums over keys of a bias that has only a query
axis; the fused backward (`backward_kernel`) would have to add them up in device memory.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, with the loops exchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import inputs, spans, tiles
from jflash._backends.mosaic_gpu import pairs as bias_and_mask
from jflash._backends.mosaic_gpu.inputs import Arrays, Inputs, Place, Rows
from jflash._backends.mosaic_gpu.operations import Operations, Ref, along_rows
from jflash._backends.mosaic_gpu.statistics import PerQuery
from jflash._backends.mosaic_gpu.tiles import ROWS, QueryTiles
from jflash._backends.mosaic_gpu.turns import Turns
from jflash._semantics.spec import Spec


class Buffers(NamedTuple):
    """Shared memory, and its barriers: `filled` when a copy has arrived, `free` when all who need it have read it."""

    query: Ref
    d_out: Ref
    key: Ref
    value: Ref
    bias: Ref | None
    """Tiles of the bias, if it has any; they come and go with the values."""
    rows_filled: Ref
    key_filled: Ref
    key_free: Ref
    value_filled: Ref
    value_free: Ref


def d_query(
    spec: Spec,
    arrays: Arrays,
    rows: tuple[PerQuery, PerQuery],
    known_spans: Int[Array, "B blocks 4"] | None,
    wanted: tuple[str, ...],
    tile: QueryTiles,
    operations: Operations,
) -> tuple[Float[Array, "B T N H"], dict[str, Array]]:
    """The kernel's call: dQ, and for each parameter `wanted` its gradient's sums over keys, `[B, N, rows]`."""
    query, key, value, d_out, sides = arrays
    batch, length, heads, head_dim = query.shape
    key_heads, value_dim = value.shape[2:]
    columns, value_columns = tiles.round_up(head_dim, 16), tiles.round_up(value_dim, 16)
    group = heads // key_heads
    # Here every head has blocks of its own, of queries.
    turns = Turns.of(heads, heads, -(-length // tile.rows), batch, operations.processors)
    has_tiles = bias_and_mask.has_tiles(spec)
    names = [*sides, *([] if known_spans is None else ["spans"])]

    def kernel(
        query_ref: Ref, key_ref: Ref, value_ref: Ref, d_out_ref: Ref, lse_ref: Ref, delta_ref: Ref, *refs: Any
    ) -> None:
        side_refs, rest = refs[: len(names)], list(refs[len(names) :])
        d_query_ref = rest.pop(0)
        wanted_refs = [rest.pop(0) for _ in wanted]
        shared = Buffers(*rest)
        call = Inputs(spec, operations, dict(zip(names, side_refs, strict=True)))
        b, h = turns.unit(lax.axis_index("turn"), lax.axis_index("unit"))[:2]
        block, warpgroup = turns.blocks - 1 - lax.axis_index("block"), lax.axis_index("warpgroup")
        first_row = block * tile.rows
        walk = spans.walk_keys(call, b, block, tile.rows, tile.keys)
        key_columns = tiles.columns(columns, head_dim, b)
        out_columns = tiles.columns(value_columns, value_dim, b)

        @pl.when(warpgroup < tile.warpgroups)
        def _() -> None:
            tiles.release(tile.key_stages, shared.key_free)
            tiles.release(tile.value_stages, shared.value_free)
            tiles.registers(tile.warpgroups, copies=False)
            own_row = first_row + warpgroup * ROWS
            own = pl.ds(own_row, ROWS)
            filled = shared.rows_filled.at[warpgroup]
            rows = Rows(b, own_row, ROWS, h, key_columns)
            call.copy_rows("query", query_ref, rows, shared.query.at[warpgroup], filled)
            rows = rows._replace(columns=out_columns)
            call.copy_rows("d_out", d_out_ref, rows, shared.d_out.at[warpgroup], filled)
            shape = (ROWS, tile.keys)
            lse = operations.load(lse_ref.at[b, h, own], 0)
            delta = operations.load(delta_ref.at[b, h, own], 0)
            plgpu.barrier_wait(filled)

            def visit(index: Array, carry: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
                sums, totals = carry
                key_slot, value_slot = lax.rem(index, tile.key_stages), lax.rem(index, tile.value_stages)
                place = Place(b, h, first_row + warpgroup * ROWS, walk.start(index))
                own_rows = pl.ds(warpgroup * ROWS, ROWS)
                key, value = shared.key.at[key_slot], shared.value.at[value_slot]
                words = call.words(place, shape)
                plgpu.barrier_wait(shared.key_filled.at[key_slot])

                def differentiate(products: Any, d_weights: Any) -> tuple[Array, tuple[Array, ...]]:
                    still = warpgroup + tiles.moving_zero(index, warpgroup)
                    operations.multiply(products, shared.query.at[still], key.T)
                    plgpu.barrier_wait(shared.value_filled.at[value_slot])
                    operations.multiply(d_weights, shared.d_out.at[still], value.T)
                    pairs = dict(words)
                    if shared.bias is not None:
                        pairs["bias"] = operations.load(shared.bias.at[value_slot, own_rows])
                    logits = operations.read(products, behind=1)
                    logits, pull_back = call.with_gradients(logits, place, shape, pairs, wanted)
                    weights = call.exponent(logits, along_rows(lse, shape))
                    weights = call.hide_masked(weights, place, shape, pairs, 0.0)
                    hide = lambda weights: call.hide(weights, place, shape, pairs, 0.0)
                    weights = walk.masked(index, weights, hide)
                    d_logits = weights * (operations.read(d_weights) - along_rows(delta, shape))
                    d_products, d_parameters = pull_back(d_logits)
                    added = tuple(d_parameters[name].sum(axis=1) for name in wanted)
                    return d_products.astype(query.dtype), added

                d_products, added = operations.accumulators(differentiate, shape, shape)
                if has_tiles:
                    operations.commit()
                plgpu.barrier_arrive(shared.value_free.at[value_slot])
                sums = operations.add_product(sums, d_products, key)
                plgpu.barrier_arrive(shared.key_free.at[key_slot])
                return sums, tuple(total + more for total, more in zip(totals, added, strict=True))

            zeros = tuple(operations.full((ROWS,), 0) for _ in wanted)
            sums, totals = lax.fori_loop(0, walk.count, visit, (operations.full((ROWS, columns), 0), zeros))
            for ref, total in zip(wanted_refs, totals, strict=True):
                ref[b, h, own] = total
            shared.query[warpgroup] = (sums * inputs.sums_scale(spec)).astype(query.dtype)
            operations.commit()
            plgpu.copy_smem_to_gmem(shared.query.at[warpgroup], d_query_ref.at[b, own, h, key_columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == tile.warpgroups)
        def _() -> None:
            tiles.registers(tile.warpgroups, copies=True)
            key_head = lax.div(h, group)

            def copy(index: Array) -> None:
                key_slot, value_slot = lax.rem(index, tile.key_stages), lax.rem(index, tile.value_stages)
                first_key = walk.start(index)
                plgpu.barrier_wait(shared.key_free.at[key_slot])
                rows = Rows(b, first_key, tile.keys, key_head, key_columns)
                call.copy_rows("key", key_ref, rows, shared.key.at[key_slot], shared.key_filled.at[key_slot])
                plgpu.barrier_wait(shared.value_free.at[value_slot])
                filled = shared.value_filled.at[value_slot]
                if shared.bias is not None:
                    source = call.part("bias", b, h).at[pl.ds(first_row, tile.rows), pl.ds(first_key, tile.keys)]
                    plgpu.copy_gmem_to_smem(source, shared.bias.at[value_slot], filled)
                rows = rows._replace(columns=out_columns)
                call.copy_rows("value", value_ref, rows, shared.value.at[value_slot], filled)

            tiles.for_each_copy(walk.count, copy, "turn", "unit", "block")
            tiles.drain(tile.key_stages, shared.key_free)
            tiles.drain(tile.value_stages, shared.value_free)

    dtype = query.dtype
    bar = lambda stages, arrivals: plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals)
    kernel.__name__ = f"jflash_d_query_{head_dim}_{value_dim}"
    result, *totals = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(query.shape, dtype),
            *(jax.ShapeDtypeStruct((batch, heads, turns.blocks * tile.rows), jnp.float32) for _ in wanted),
        ),
        grid=(turns.number, turns.blocks, turns.units),
        grid_names=("turn", "block", "unit"),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            tiles.shared((tile.warpgroups, ROWS, columns), dtype, head_dim),
            tiles.shared((tile.warpgroups, ROWS, value_columns), dtype, value_dim),
            tiles.shared((tile.key_stages, tile.keys, columns), dtype, head_dim),
            tiles.shared((tile.value_stages, tile.keys, value_columns), dtype, value_dim),
            tiles.shared((tile.value_stages, tile.rows, tile.keys), sides["bias"].dtype) if has_tiles else None,
            bar(tile.warpgroups, 2),
            bar(tile.key_stages, 1),
            bar(tile.key_stages, tile.warpgroups),
            bar(tile.value_stages, 1 + has_tiles),
            bar(tile.value_stages, tile.warpgroups),
        ],
        compiler_params=tiles.COMPILER,
        interpret=operations.interpret,
    )(
        *(query, key, value, d_out, *rows, *sides.values()),
        *([] if known_spans is None else [known_spans]),
    )
    return result, dict(zip(wanted, totals, strict=True))
