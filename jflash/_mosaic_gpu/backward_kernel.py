"""Backward, fused: a block owns some keys and walks over the tiles of queries that can see them.

    each of two warpgroups, on 64 keys, for each query head that shares them and each tile of queries:
      S^T  = K Q^T
      dP^T = V dO^T                  the matrix unit runs this, while the warpgroup goes on with
      P^T  = exp(S^T - lse)
      dV   = dV + P^T dO             and this, during
      dS^T = P^T (dP^T - delta)
      dK   = dK + dS^T Q
      dQ   = dS K                    added to what is in device memory
    the last warpgroup copies tiles of queries ahead of them into shared memory

delta is what the forward's softmax takes from every dP of a row: sum(dO * O) - d_lse. The additions to dQ come in any
order; `d_query_kernel` and `d_key_value_kernel`
are the backward in which every sum has one.

Sources: FlashAttention-2, arXiv:2307.08691, algorithm 2; FlashAttention-3, arXiv:2407.08608, section 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._mosaic_gpu import inputs, spans, tiles
from jflash._mosaic_gpu import pairs as bias_and_mask
from jflash._mosaic_gpu.inputs import Inputs, Place
from jflash._mosaic_gpu.operations import Operations, Ref, along_columns
from jflash._mosaic_gpu.query_copies import Sources, copy_all
from jflash._mosaic_gpu.spans import Walk
from jflash._mosaic_gpu.tiles import ROWS, BackwardTiles
from jflash._spec import Spec

WARPGROUPS = 2


class Buffers(NamedTuple):
    """Shared memory, and its barriers: `filled` when a copy has arrived, `free` when all who need it have read it."""

    key: Ref
    value: Ref
    query: Ref
    d_out: Ref
    pairs: Sequence[Ref]
    """Tiles of bias and mask; they come and go with the queries."""
    lse: Ref
    delta: Ref
    d_products: Ref
    d_query: Ref
    keys_filled: Ref
    query_filled: Ref
    query_free: Ref
    d_out_filled: Ref
    d_out_free: Ref
    d_products_filled: Ref
    d_products_free: Ref


class Sums(NamedTuple):
    """What a block's keys gather."""

    d_key: Float[Array, "keys H"]
    d_value: Float[Array, "keys D"]


def backward(
    spec: Spec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    d_out: Float[Array, "B T N D"],
    lse: Float[Array, "B N L"],
    delta: Float[Array, "B N L"],
    sides: dict[str, Array],
    known_spans: Int[Array, "B blocks 4"] | None,
    wanted: tuple[str, ...],
    tile: BackwardTiles,
    operations: Operations,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K D"], dict[str, Array]]:
    """The kernel's call: dQ in float32, dK, dV, and for each parameter `wanted` its gradient's sums `[B, N, keys]`.

    T, S, H and D are multiples of 8 here. `lse` is as the exponent subtracts it and +inf where there is no query or it
    sees nothing, `delta` 0 there; L is T and room for a tile.
    """
    batch, length, heads, head_dim = query.shape
    key_heads, value_dim = value.shape[2:]
    columns, value_columns = tile.columns(head_dim), tile.columns(value_dim)
    width = columns // 2 if tile.split else columns
    group = heads // key_heads
    blocks = -(-key.shape[1] // tile.keys)
    tiled = bias_and_mask.tiled(spec)
    names = [*sides, *([] if known_spans is None else ["spans"])]
    margin = operations.margin
    d_query = jax.new_ref(jnp.zeros((batch, length + margin, heads, head_dim + margin), jnp.float32))

    def kernel(
        query_ref: Ref, key_ref: Ref, value_ref: Ref, d_out_ref: Ref, lse_ref: Ref, delta_ref: Ref, *refs: Any
    ) -> None:
        side_refs, (d_query_ref, *rest) = refs[: len(names)], refs[len(names) :]
        d_key_ref, d_value_ref, *wanted_refs = rest[: 2 + len(wanted)]
        shared = Buffers(*rest[2 + len(wanted) :])
        call = Inputs(spec, operations, dict(zip(names, side_refs, strict=True)), keys_first=True)
        b, key_head, warpgroup = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
        first_key = lax.axis_index("block") * tile.keys
        walk = spans.walk_queries(call, b, lax.axis_index("block"), tile.keys, tile.queries)
        if group > 1:
            # Blocks of one head begin at different tiles: adding to one dQ at once, they would wait for each other.
            walk = dataclasses.replace(walk, turn=lax.axis_index("block"))
        key_columns = tiles.columns(columns, head_dim, b)
        out_columns = tiles.columns(value_columns, value_dim, b)

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            tiles.registers(WARPGROUPS, copies=False)
            own = pl.ds(warpgroup * ROWS, ROWS)
            own_keys = pl.ds(first_key + warpgroup * ROWS, ROWS)
            own_columns = pl.ds(warpgroup * width if tile.split else b * 0, width)

            @pl.when(warpgroup == 0)
            def _() -> None:
                block = pl.ds(first_key, tile.keys)
                plgpu.copy_gmem_to_smem(key_ref.at[b, block, key_head, key_columns], shared.key, shared.keys_filled)
                plgpu.copy_gmem_to_smem(value_ref.at[b, block, key_head, out_columns], shared.value, shared.keys_filled)

            plgpu.barrier_wait(shared.keys_filled)

            def visit(head: Array, index: Array, sums: Sums, others: tuple[Array, ...]) -> Any:
                step = head * walk.count + index
                query_head = key_head * group + head
                place = Place(b, query_head, walk.start(index), first_key + warpgroup * ROWS)
                return visit_tile(
                    call,
                    tile,
                    shared,
                    walk,
                    place,
                    index,
                    step,
                    warpgroup,
                    wanted,
                    sums,
                    others,
                    add=lambda source: operations.add_to(
                        d_query_ref.at[b, pl.ds(walk.start(index), tile.queries), query_head, own_columns], source
                    ),
                )

            def attend_head(head: Array, sums: Sums) -> Sums:
                zeros = tuple(operations.full((ROWS,), 0) for _ in wanted)
                body = lambda index, carry: visit(head, index, *carry)
                sums, others = lax.fori_loop(0, walk.count, body, (sums, zeros))
                for ref, total in zip(wanted_refs, others, strict=True):
                    ref[b, key_head * group + head, own_keys] = total
                return sums

            sums = Sums(operations.full((ROWS, columns), 0), operations.full((ROWS, value_columns), 0))
            sums = lax.fori_loop(0, group, attend_head, sums) if group > 1 else attend_head(jnp.int32(0), sums)
            if tile.split:
                plgpu.barrier_wait(shared.d_products_free)
            plgpu.wait_smem_to_gmem(0)
            # Every warpgroup has read all keys by now.
            shared.key[own] = (sums.d_key * inputs.sums_scale(spec)).astype(key.dtype)
            shared.value[own] = sums.d_value.astype(value.dtype)
            operations.commit()
            plgpu.copy_smem_to_gmem(shared.key.at[own], d_key_ref.at[b, own_keys, key_head, key_columns])
            plgpu.copy_smem_to_gmem(shared.value.at[own], d_value_ref.at[b, own_keys, key_head, out_columns])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            tiles.registers(WARPGROUPS, copies=True)

            sources = Sources(query_ref, d_out_ref, lse_ref, delta_ref, key_columns, out_columns)
            copy_all(call, walk, sources, shared, b, key_head * group, group, pl.ds(first_key, tile.keys))

    dtype, stages = query.dtype, tile.stages
    free = plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS)
    all_done = plgpu.Barrier(num_arrivals=WARPGROUPS)
    kernel.__name__ = f"jflash_backward_{head_dim}_{value_dim}"
    d_key, d_value, *others = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(key.shape, key.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
            *(jax.ShapeDtypeStruct((batch, heads, blocks * tile.keys), jnp.float32) for _ in wanted),
        ),
        grid=(blocks, key_heads, batch) if group > 1 else (key_heads, blocks, batch),
        grid_names=("block", "head", "batch") if group > 1 else ("head", "block", "batch"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[
            tiles.shared((tile.keys, columns), dtype, head_dim, width),
            tiles.shared((tile.keys, value_columns), dtype, value_dim),
            tiles.shared((stages, tile.queries, columns), dtype, head_dim, width),
            tiles.shared((stages, tile.queries, value_columns), dtype, value_dim),
            [tiles.shared((stages, tile.queries, tile.keys), sides[name].dtype) for name in tiled],
            tiles.vectors((stages, tile.queries)),
            tiles.vectors((stages, tile.queries)),
            tiles.shared((tile.keys, tile.queries), dtype, head_dim, width),
            tiles.shared((WARPGROUPS, tile.queries, width), jnp.float32, head_dim),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=stages, num_arrivals=2 + len(tiled)),
            free,
            plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            free,
            all_done,
            all_done,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=operations.interpret,
    )(
        *(query, key, value, d_out, lse, delta, *sides.values()),
        *([] if known_spans is None else [known_spans]),
        d_query,
    )
    return d_query[:, :length, :, :head_dim], d_key, d_value, dict(zip(wanted, others, strict=True))


def visit_tile(
    call: Inputs,
    tile: BackwardTiles,
    shared: Buffers,
    walk: Walk,
    place: Place,
    index: Int[Array, ""],
    step: Int[Array, ""],
    warpgroup: Int[Array, ""],
    wanted: tuple[str, ...],
    sums: Sums,
    others: tuple[Float[Array, "keys"], ...],
    add: Callable[[Ref], None],
) -> tuple[Sums, tuple[Float[Array, "keys"], ...]]:
    """Add one tile's part to all sums; `add` takes dQ's from shared memory."""
    operations, shape = call.operations, (ROWS, tile.queries)
    dtype = call.spec.dtype
    own = pl.ds(warpgroup * ROWS, ROWS)
    slot = lax.rem(step, tile.stages)
    query, d_out = shared.query.at[slot], shared.d_out.at[slot]
    plgpu.barrier_wait(shared.query_filled.at[slot])
    lse = operations.load(shared.lse.at[slot], 1)
    names = bias_and_mask.tiled(call.spec)
    pairs = {n: operations.load(ref.at[slot, :, own].T) for n, ref in zip(names, shared.pairs, strict=True)}

    def weigh(products: Array) -> tuple[Array, Any]:
        logits, pull_back = call.with_gradients(products, place, shape, pairs, wanted)
        weights = call.exponent(logits, along_columns(lse, shape))
        weights = walk.masked(index, weights, lambda weights: call.hide(weights, place, shape, pairs, 0.0))
        return weights.astype(dtype), (weights, pull_back)

    def use(saved: Any, d_weights: Array) -> tuple[Array, tuple[Array, ...]]:
        weights, pull_back = saved
        delta = along_columns(operations.load(shared.delta.at[slot], 1), shape)
        d_products, d_parameters = pull_back(weights * (d_weights - delta))
        totals = tuple(total + d_parameters[name].sum(axis=1) for name, total in zip(wanted, others, strict=True))
        return d_products.astype(dtype), totals

    weights, saved = weigh(operations.product(shared.key.at[own], query.T, shape))
    plgpu.barrier_wait(shared.d_out_filled.at[slot])
    d_weights = operations.product(shared.value.at[own], d_out.T, shape)
    d_value = operations.add_product(sums.d_value, weights, d_out)
    d_products, others = use(saved, d_weights)
    plgpu.barrier_arrive(shared.d_out_free.at[slot])
    if tile.split:
        pl.when(step > 0)(lambda: plgpu.barrier_wait(shared.d_products_free))
    shared.d_products[own] = d_products
    operations.commit()
    if tile.split:
        plgpu.barrier_arrive(shared.d_products_filled)
    d_key = operations.add_product(sums.d_key, d_products, query)
    plgpu.barrier_arrive(shared.query_free.at[slot])
    if tile.split:
        # The other warpgroup's half of the keys is needed only now.
        plgpu.barrier_wait(shared.d_products_filled)
        width = shared.d_query.shape[-1]
        columns = pl.ds(warpgroup * width, width)
        d_query = operations.product(shared.d_products.T, shared.key.at[:, columns], (tile.queries, width))
    else:
        d_query = operations.product(
            shared.d_products.at[own].T, shared.key.at[own], (tile.queries, shared.key.shape[-1])
        )
    if tile.split:
        plgpu.barrier_arrive(shared.d_products_free)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    shared.d_query[warpgroup] = d_query
    operations.commit()
    add(shared.d_query.at[warpgroup])
    return Sums(d_key, d_value), others
