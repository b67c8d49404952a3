"""The gradient of a bias with a query and a key axis: a block owns tiles of it and in each meets all who share it.

    each warpgroup that computes, on 64 rows of queries, for each tile of keys:
      for each batch entry and head that share the bias:
        S  = Q K^T
        dP = dO V^T                  the matrix unit runs this, while the warpgroup goes on with
        P  = exp(S - lse)
        dB = dB + P (dP - delta)
    the last warpgroup copies tiles ahead of them into shared memory

Two products again, of the backward's five: what they cost is less than what it would to add up, in device memory, an
array of the bias's size in float32 for every batch entry. A tile has one owner, so every sum has one order.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import spans, tiles
from jflash._backends.mosaic_gpu.inputs import Arrays, Inputs, Place, Rows
from jflash._backends.mosaic_gpu.operations import Operations, Ref, along_rows
from jflash._backends.mosaic_gpu.statistics import PerQuery
from jflash._backends.mosaic_gpu.tiles import ROWS, BiasTiles
from jflash._semantics.spec import Spec

MOST = 4
"""Tiles of keys that a block takes, at most: fewer begin and end more often, more are further apart in what they load.

With 1, 2, 4, 8, 16 and 32 the kernel takes 4.1, 3.8, 3.6, 3.8, 4.3 and 4.5 ms (two entries, 16 heads, 8,192 tokens).
"""


class Buffers(NamedTuple):
    """Shared memory, and its barriers: `filled` when a copy has arrived, `free` when all who need it have read it."""

    query: Ref
    key: Ref
    d_out: Ref
    value: Ref
    bias: Ref
    d_bias: Ref
    bias_filled: Ref
    bias_free: Ref
    key_filled: Ref
    key_free: Ref
    value_filled: Ref
    value_free: Ref


def d_bias(
    spec: Spec,
    arrays: Arrays,
    rows: tuple[PerQuery, PerQuery],
    known_spans: Int[Array, "B blocks 4"] | None,
    tile: BiasTiles,
    operations: Operations,
) -> Float[Array, "#B #N T S"]:
    """The kernel's call: the gradient in the shape and dtype of the bias in `sides`, whose axes are rounded up."""
    query, key, value, d_out, sides = arrays
    batch, length, heads, head_dim = query.shape
    key_heads, value_dim = value.shape[2:]
    columns, value_columns = tiles.round_up(head_dim, 16), tiles.round_up(value_dim, 16)
    group = heads // key_heads
    bias_batch, bias_heads = sides["bias"].shape[:2]
    shared_batch, shared_heads = batch // bias_batch, heads // bias_heads
    blocks, key_tiles = -(-length // tile.rows), -(-key.shape[1] // tile.keys)
    each = 1
    if operations.processors is not None:
        # So many that two blocks are left for every processor.
        tiles_each = key_tiles * blocks * bias_heads * bias_batch // (2 * operations.processors)
        each = max(1, min(tiles_each, MOST))
    parts = -(-key_tiles // each)
    names = [*sides, *([] if known_spans is None else ["spans"])]

    def kernel(
        query_ref: Ref, key_ref: Ref, value_ref: Ref, d_out_ref: Ref, lse_ref: Ref, delta_ref: Ref, *refs: Any
    ) -> None:
        side_refs, (d_bias_ref, *scratch) = refs[: len(names)], refs[len(names) :]
        shared = Buffers(*scratch)
        call = Inputs(spec, operations, dict(zip(names, side_refs, strict=True)))
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        first_row, first_tile = block * tile.rows, lax.axis_index("part") * each
        rows = pl.ds(first_row, tile.rows)
        count = jnp.minimum(each, key_tiles - first_tile)

        def sharer(step: Array, first_key: Array) -> tuple[Array, Array, spans.Walk, Array]:
            """A batch entry and head, and of their tile the walk, and whether anything in it is seen."""
            b = lax.axis_index("batch") + lax.div(step, shared_heads)
            h = lax.axis_index("head") + lax.rem(step, shared_heads)
            walk = spans.walk_keys(call, b, block, tile.rows, tile.keys)
            seen = (first_key < walk.first + walk.count * walk.size) & (first_key + tile.keys > walk.first)
            return b, h, dataclasses.replace(walk, first=first_key, count=jnp.int32(1)), seen

        steps = shared_batch * shared_heads

        @pl.when(warpgroup < tile.warpgroups)
        def _() -> None:
            tiles.release(tile.stages, shared.bias_free)
            plgpu.barrier_arrive(shared.key_free)
            plgpu.barrier_arrive(shared.value_free)
            tiles.registers(tile.warpgroups, copies=False)
            own = pl.ds(warpgroup * ROWS, ROWS)
            own_rows = pl.ds(first_row + warpgroup * ROWS, ROWS)
            shape = (ROWS, tile.keys)

            def own_tile(number: Array, carry: int) -> int:
                slot, index = lax.rem(number, tile.stages), first_tile + number
                plgpu.barrier_wait(shared.bias_filled.at[slot])
                visit = lambda step, total: add_sharer(step, index * tile.keys, shared.bias.at[slot], total)
                total = lax.fori_loop(0, steps, visit, operations.full(shape, 0))
                operations.commit()
                plgpu.barrier_arrive(shared.bias_free.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                shared.d_bias[own] = total.astype(shared.d_bias.dtype)
                operations.commit()
                keys = pl.ds(index * tile.keys, tile.keys)
                target = d_bias_ref.at[lax.axis_index("batch"), lax.axis_index("head"), own_rows, keys]
                plgpu.copy_smem_to_gmem(shared.d_bias.at[own], target)
                return carry

            def add_sharer(step: Array, first_key: Array, bias: Ref, total: Array) -> Array:
                b, h, walk, seen = sharer(step, first_key)

                def add(total: Array) -> Array:
                    place = Place(b, h, first_row + warpgroup * ROWS, first_key)
                    lse = operations.load(lse_ref.at[b, h, own_rows], 0)
                    delta = operations.load(delta_ref.at[b, h, own_rows], 0)
                    words = call.words(place, shape)

                    def differentiate(d_weights: Any, products: Any) -> Array:
                        plgpu.barrier_wait(shared.key_filled)
                        operations.multiply(products, shared.query.at[own], shared.key.T)
                        plgpu.barrier_wait(shared.value_filled)
                        operations.multiply(d_weights, shared.d_out.at[own], shared.value.T)
                        logits = operations.read(products, behind=1)
                        pairs = {"bias": operations.load(bias.at[own])} | words
                        plgpu.barrier_arrive(shared.key_free)
                        logits, pull_back = call.with_gradients(logits, place, shape, pairs, ("bias",))
                        weights = call.exponent(logits, along_rows(lse, shape))
                        weights = call.hide_masked(weights, place, shape, pairs, 0.0)
                        hide = lambda weights: call.hide(weights, place, shape, pairs, 0.0)
                        weights = walk.masked(jnp.int32(0), weights, hide)
                        made = operations.read(d_weights)
                        plgpu.barrier_arrive(shared.value_free)
                        _, d_parameters = pull_back(weights * (made - along_rows(delta, shape)))
                        return d_parameters["bias"]

                    return total + operations.accumulators(differentiate, shape, shape)

                return add(total) if walk.whole is None else lax.cond(seen, add, lambda total: total, total)

            lax.fori_loop(0, count, own_tile, 0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == tile.warpgroups)
        def _() -> None:
            tiles.registers(tile.warpgroups, copies=True)
            zero = lax.axis_index("batch")
            key_columns = tiles.columns(columns, head_dim, zero)
            out_columns = tiles.columns(value_columns, value_dim, zero)
            bias_ref = call.refs["bias"].at[lax.axis_index("batch"), lax.axis_index("head")]

            def copy_tile(number: Array) -> None:
                slot, index = lax.rem(number, tile.stages), first_tile + number
                plgpu.barrier_wait(shared.bias_free.at[slot])
                bias = bias_ref.at[rows, pl.ds(index * tile.keys, tile.keys)]
                plgpu.copy_gmem_to_smem(bias, shared.bias.at[slot], shared.bias_filled.at[slot])
                tiles.for_each_copy(steps, lambda step: copy(step, index * tile.keys), "block")

            def copy(step: Array, first_key: Array) -> None:
                b, h, _walk, seen = sharer(step, first_key)
                key_head = lax.div(h, group)

                @pl.when(seen)
                def _() -> None:
                    plgpu.barrier_wait(shared.key_free)
                    query_tile = Rows(b, first_row, tile.rows, h, key_columns)
                    tile_of_keys = Rows(b, first_key, tile.keys, key_head, key_columns)
                    call.copy_rows("query", query_ref, query_tile, shared.query, shared.key_filled)
                    call.copy_rows("key", key_ref, tile_of_keys, shared.key, shared.key_filled)
                    plgpu.barrier_wait(shared.value_free)
                    d_out_tile, value_tile = (tile._replace(columns=out_columns) for tile in (query_tile, tile_of_keys))
                    call.copy_rows("d_out", d_out_ref, d_out_tile, shared.d_out, shared.value_filled)
                    call.copy_rows("value", value_ref, value_tile, shared.value, shared.value_filled)

            tiles.for_each_copy(count, copy_tile, "block")
            tiles.drain(tile.stages, shared.bias_free)
            plgpu.barrier_wait(shared.key_free)
            plgpu.barrier_wait(shared.value_free)

    dtype, bias_dtype = query.dtype, sides["bias"].dtype
    all_done = plgpu.Barrier(num_arrivals=tile.warpgroups)
    kernel.__name__ = f"jflash_d_bias_{head_dim}_{value_dim}"
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(sides["bias"].shape, bias_dtype),
        grid=(parts, blocks, bias_heads, bias_batch),
        grid_names=("part", "block", "head", "batch"),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            tiles.shared((tile.rows, columns), dtype, head_dim),
            tiles.shared((tile.keys, columns), dtype, head_dim),
            tiles.shared((tile.rows, value_columns), dtype, value_dim),
            tiles.shared((tile.keys, value_columns), dtype, value_dim),
            tiles.shared((tile.stages, tile.rows, tile.keys), bias_dtype),
            tiles.shared((tile.rows, tile.keys), bias_dtype),
            plgpu.Barrier(num_barriers=tile.stages),
            plgpu.Barrier(num_barriers=tile.stages, num_arrivals=tile.warpgroups),
            plgpu.Barrier(num_arrivals=2),
            all_done,
            plgpu.Barrier(num_arrivals=2),
            all_done,
        ],
        compiler_params=tiles.COMPILER,
        interpret=operations.interpret,
    )(
        *(query, key, value, d_out, *rows, *sides.values()),
        *([] if known_spans is None else [known_spans]),
    )
