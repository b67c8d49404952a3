"""Backward, fused: a block owns some keys and walks over the tiles of queries that can see them.

    each of two warpgroups, on 64 keys, for each query head that shares them and each tile of queries:
      S^T  = K Q^T
      dP^T = V dO^T                  the matrix unit runs this, while the warpgroup goes on with
      P^T  = exp(S^T - lse)
      dV   = dV + P^T dO             and this, during
      dS^T = P^T (dP^T - delta)      into shared memory, for both
      dK   = dK + dS^T Q
      dQ   = dS K                    of the tile before: one half of it from all keys, added to what is in device memory
    the last warpgroup copies tiles of queries ahead of them into shared memory

A tile's dQ needs both warpgroups' dS. Made a tile later, it does not bring them into step: one's exponentials can run
beside the other's products. `statistics` tells how lse and delta come.

delta is what the forward's softmax takes from every dP of a row: sum(dO * O) - d_lse. The additions to dQ come in any
order; `d_query_kernel` and `d_key_value_kernel` are the backward in which every sum has one.

Sources: FlashAttention-2, arXiv:2307.08691, algorithm 2; FlashAttention-3, arXiv:2407.08608, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import inputs, query_sums, spans, statistics, tiles
from jflash._backends.mosaic_gpu import pairs as bias_and_mask
from jflash._backends.mosaic_gpu.inputs import Arrays, Inputs, Place, Rows
from jflash._backends.mosaic_gpu.operations import Operations, Ref
from jflash._backends.mosaic_gpu.query_copies import Sources, copy_all
from jflash._backends.mosaic_gpu.query_order import Order
from jflash._backends.mosaic_gpu.query_sums import SPARE, QuerySums
from jflash._backends.mosaic_gpu.spans import Walk
from jflash._backends.mosaic_gpu.statistics import Statistics
from jflash._backends.mosaic_gpu.tiles import ROWS, BackwardTiles
from jflash._backends.mosaic_gpu.turns import Turns
from jflash._semantics.spec import Spec

WARPGROUPS = 2


class Buffers(NamedTuple):
    """Shared memory, and its barriers: `filled` when a copy has arrived, `free` when all who need it have read it."""

    key: Ref
    value: Ref
    query: Ref
    d_out: Ref
    bias: Ref | None
    """Tiles of the bias, if it has any; they come and go with the queries."""
    statistics: Sequence[Ref]
    """Columns, or vectors of lse and delta: see `statistics`."""
    ones: Ref | None
    """What columns are multiplied with; it comes with the keys."""
    d_products: Ref
    """dS^T of two steps: while one warpgroup still reads a step's, the other may write the next."""
    d_query: Ref
    keys_filled: Ref
    query_filled: Ref
    query_free: Ref
    d_out_filled: Ref
    d_out_free: Ref
    d_products_filled: Ref
    d_products_free: Ref
    finished: Ref


class Step(NamedTuple):
    """Where a step's queries are."""

    head: Int[Array, ""]
    """Of the block's set."""
    eighth: Int[Array, ""]
    """An eighth of the first one's index, so that the compiler knows that it is a multiple."""


class Sums(NamedTuple):
    """What a block's keys gather."""

    d_key: Float[Array, "keys H"]
    d_value: Float[Array, "keys D"]


def backward(
    spec: Spec,
    arrays: Arrays,
    beginnings: tuple[Array, Array],
    zeros: Float[Array, "places L H"],
    known_spans: Int[Array, "B blocks 4"] | None,
    wanted: tuple[str, ...],
    tile: BackwardTiles,
    operations: Operations,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K D"], dict[str, Array]]:
    """The kernel's call: dQ, dK, dV, and for each parameter `wanted` its gradient's sums `[B, N, keys]`.

    `beginnings` are columns and their factors, or vectors, of `statistics`; `zeros` are of `sums_type`.
    """
    query, key, value, d_out, sides = arrays
    batch, length, heads, head_dim = query.shape
    key_heads, value_dim = value.shape[2:]
    columns, value_columns = tile.columns(head_dim), tile.columns(value_dim)
    width = columns if tile.by_rows else columns // 2
    has_tiles = bias_and_mask.has_tiles(spec)
    names = [*sides, *([] if known_spans is None else ["spans"])]
    as_columns = statistics.are_columns(spec)
    turns = _turns(arrays, tile, operations)
    whole = tiles.round_up(length, ROWS)

    def kernel(
        query_ref: Ref, key_ref: Ref, value_ref: Ref, d_out_ref: Ref, first_ref: Ref, second_ref: Ref, *refs: Any
    ) -> None:
        side_refs, (sums_ref, finished_ref, *rest) = refs[: len(names)], refs[len(names) :]
        d_query_ref, d_key_ref, d_value_ref, *wanted_refs = rest[: 3 + len(wanted)]
        shared = Buffers(*rest[3 + len(wanted) :])
        beginning_refs = [first_ref] if as_columns else [first_ref, second_ref]
        call = Inputs(spec, operations, dict(zip(names, side_refs, strict=True)), keys_first=True)
        turn, block, unit, warpgroup = (lax.axis_index(name) for name in ("turn", "block", "unit", "warpgroup"))
        b, own_set, key_head, first_head = turns.unit(turn, unit)
        first_key = block * tile.keys
        walk = spans.walk_queries(call, b, block, tile.keys, tile.queries)
        order = Order.of(spec, walk, turns.heads, block, by_head=bool(wanted))
        d_query = QuerySums(
            *(turns, operations, sums_ref, finished_ref, d_query_ref, inputs.sums_scale(spec), WARPGROUPS),
            *(turn, block, unit, walk.count * turns.heads),
        )
        key_columns = tiles.columns(columns, head_dim, b)
        out_columns = tiles.columns(value_columns, value_dim, b)

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            tiles.registers(WARPGROUPS, copies=False)
            own = pl.ds(warpgroup * ROWS, ROWS)
            own_keys = pl.ds(first_key + warpgroup * ROWS, ROWS)
            own_columns = key_columns if tile.by_rows else pl.ds(warpgroup * width, width)

            @pl.when(d_query.adds)
            def _() -> None:
                tiles.release(tile.stages, shared.query_free, shared.d_out_free)
                plgpu.barrier_arrive(shared.d_products_free.at[0])

                @pl.when((warpgroup == 0) & (walk.count > 0))
                def _() -> None:
                    keys = Rows(b, first_key, tile.keys, key_head, key_columns)
                    call.copy_rows("key", key_ref, keys, shared.key.at[0], shared.keys_filled)
                    values = keys._replace(columns=out_columns)
                    call.copy_rows("value", value_ref, values, shared.value.at[0], shared.keys_filled)
                    if shared.ones is not None:
                        plgpu.copy_gmem_to_smem(second_ref, shared.ones, shared.keys_filled)

            d_query.begin(warpgroup)

            def add_d_query(step: Array, at: Step, made: Callable[[], None]) -> None:
                first = at.eighth * 8
                rows = pl.ds(first + warpgroup * ROWS, ROWS) if tile.by_rows else pl.ds(first, tile.queries)
                target = d_query.target(at.head, rows, own_columns)
                add_half(tile, operations, shared, step, warpgroup, target, made)

            def visit(step: Array, head: Array, index: Array, carry: tuple[Sums, tuple[Array, ...], Step]) -> Any:
                sums, others, before = carry
                place = Place(b, first_head + head, walk.start(index), first_key + warpgroup * ROWS)
                last = lambda made: add_d_query(step - 1, before, made)
                sums, others = visit_tile(
                    call, tile, shared, walk, place, index, step, warpgroup, wanted, sums, others, last
                )
                return sums, others, Step(jnp.int32(head), lax.div(walk.start(index), 8))

            def nothing() -> tuple[Array, ...]:
                return tuple(operations.full((ROWS,), 0) for _ in wanted)

            def finish_head(head: Array, carry: tuple[Sums, tuple[Array, ...], Step]) -> Any:
                sums, others, before = carry
                for ref, total in zip(wanted_refs, others, strict=True):
                    ref[b, first_head + head, own_keys] = total
                return sums, nothing(), before

            @pl.when(d_query.adds)
            def _() -> None:
                pl.when(walk.count > 0)(lambda: plgpu.barrier_wait(shared.keys_filled))
                sums = Sums(operations.full((ROWS, columns), 0), operations.full((ROWS, value_columns), 0))
                sums, _, before = order.each(visit, (sums, nothing(), Step(jnp.int32(0), jnp.int32(0))), finish_head)
                steps = walk.count * turns.heads
                pl.when(steps > 0)(lambda: add_d_query(steps - 1, before, lambda: None))
                # No barrier may end in the middle of its phase.
                plgpu.barrier_wait(shared.d_products_free.at[lax.rem(steps, 2)])
                d_key, d_value = sums.d_key * inputs.sums_scale(spec), sums.d_value
                if turns.sets > 1:
                    d_key_ref[b, own_set, own_keys] = d_key
                    d_value_ref[b, own_set, own_keys] = d_value
                    plgpu.wait_smem_to_gmem(0)
                    d_query.finish()
                    return
                # The other warpgroup reads these keys too.
                plgpu.barrier_arrive(shared.finished)
                plgpu.barrier_wait(shared.finished)
                shared.key[0, own] = d_key.astype(key.dtype)
                shared.value[0, own] = d_value.astype(value.dtype)
                operations.commit()
                plgpu.copy_smem_to_gmem(shared.key.at[0, own], d_key_ref.at[b, own_keys, key_head, key_columns])
                plgpu.copy_smem_to_gmem(shared.value.at[0, own], d_value_ref.at[b, own_keys, key_head, out_columns])
                # All but these two.
                plgpu.wait_smem_to_gmem(2)
                d_query.finish()
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            tiles.registers(WARPGROUPS, copies=True)

            @pl.when(d_query.adds)
            def _() -> None:
                sources = Sources(query_ref, d_out_ref, beginning_refs, key_columns, out_columns)
                keys = pl.ds(first_key, tile.keys)
                copy_all(call, order, sources, shared, b, first_head, keys, d_query.after_copy, SPARE)
                d_query.finish()

    dtype, stages = query.dtype, tile.stages
    free = plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS)
    handed = plgpu.Barrier(num_barriers=2, num_arrivals=WARPGROUPS)
    kernel.__name__ = f"jflash_backward_{head_dim}_{value_dim}"
    results = (
        jax.ShapeDtypeStruct((batch, whole, heads, head_dim), dtype),
        turns.gradient(key, turns.blocks * tile.keys, columns),
        turns.gradient(value, turns.blocks * tile.keys, value_columns),
        *(jax.ShapeDtypeStruct((batch, heads, turns.blocks * tile.keys), jnp.float32) for _ in wanted),
    )
    run = plgpu.kernel(
        kernel,
        out_type=results,
        grid=(turns.number + query_sums.lag(turns), turns.blocks, turns.units),
        grid_names=("turn", "block", "unit"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[
            tiles.shared((1, tile.keys, columns), dtype, head_dim, part=width),
            tiles.shared((1, tile.keys, value_columns), dtype, value_dim),
            tiles.shared((stages, tile.queries, columns), dtype, head_dim, part=width),
            tiles.shared((stages, tile.queries, value_columns), dtype, value_dim),
            tiles.shared((stages, tile.queries, tile.keys), sides["bias"].dtype) if has_tiles else None,
            statistics.shared(as_columns, stages, tile.queries),
            tiles.shared((2, ROWS, statistics.COLUMNS), jnp.bfloat16) if as_columns else None,
            tiles.shared((2, tile.keys, tile.queries), dtype, head_dim, part=width),
            tiles.shared((WARPGROUPS, ROWS, width), jnp.float32, head_dim),
            plgpu.Barrier(num_arrivals=3 if as_columns else 2),
            plgpu.Barrier(num_barriers=stages, num_arrivals=2 + has_tiles),
            free,
            plgpu.Barrier(num_barriers=stages, num_arrivals=1 if as_columns else 2),
            free,
            handed,
            handed,
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        compiler_params=tiles.COMPILER,
        interpret=operations.interpret,
    )

    def store(refs: tuple[Ref, ...]) -> None:
        *result_refs, sums, finished = refs
        known = () if known_spans is None else (known_spans,)
        made = run(query, key, value, d_out, *beginnings, *sides.values(), *known, sums, finished)
        for ref, result in zip(result_refs, made, strict=True):
            ref[...] = result

    # Not `jax.new_ref`, whose effect JAX cannot lower for several devices (0.11 and 0.12).
    states = tuple(jnp.zeros(result.shape, result.dtype) for result in results)
    stored: Any = pl.run_state(store)((*states, zeros, jnp.zeros((batch, key_heads * turns.sets), jnp.int32)))
    d_query, d_key, d_value, *others = stored[: len(results)]
    d_key, d_value = turns.summed(d_key, key), turns.summed(d_value, value)
    return d_query[:, :length], d_key, d_value, dict(zip(wanted, others, strict=True))


def sums_type(arrays: Arrays, tile: BackwardTiles, operations: Operations) -> jax.ShapeDtypeStruct:
    """In what dQ is summed, `[places, L, H]`."""
    _, length, _, head_dim = arrays.query.shape
    rows, columns = tiles.round_up(length, ROWS) + operations.margin, head_dim + operations.margin
    heads = query_sums.room(_turns(arrays, tile, operations))
    return jax.ShapeDtypeStruct((heads, rows, columns), jnp.float32)


def _turns(arrays: Arrays, tile: BackwardTiles, operations: Operations) -> Turns:
    batch, keys, key_heads, _ = arrays.key.shape
    return Turns.of(arrays.query.shape[2], key_heads, -(-keys // tile.keys), batch, operations.processors)


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
    add_last_d_query: Callable[[Callable[[], None]], None],
) -> tuple[Sums, tuple[Float[Array, "keys"], ...]]:
    """Add one tile's part to the sums, and the last one's to dQ.

    `add_last_d_query` is not called in the first step; it is given what to call when all products are made.
    """
    operations, shape = call.operations, (ROWS, tile.queries)
    dtype = call.spec.dtype
    own = pl.ds(warpgroup * ROWS, ROWS)
    slot, parity = lax.rem(step, tile.stages), lax.rem(step, 2)
    still = tiles.moving_zero(step, warpgroup)
    query, d_out = shared.query.at[slot], shared.d_out.at[slot]
    key, value = shared.key.at[still], shared.value.at[still]
    pairs = call.words(place, shape)
    plgpu.barrier_wait(shared.query_filled.at[slot])
    numbers = Statistics.of(call, shape, [ref.at[slot] for ref in shared.statistics], shared.ones)
    if shared.bias is not None:
        pairs["bias"] = operations.load(shared.bias.at[slot, :, own].T)

    def add(d_key: Any, d_value: Any) -> tuple[Array, ...]:
        def differentiate(d_weights: Any, products: Any) -> tuple[Array, tuple[Array, ...]]:
            numbers.multiply(products, key.at[own], query.T, 0)
            plgpu.barrier_wait(shared.d_out_filled.at[slot])
            numbers.multiply(d_weights, value.at[own], d_out.T, 1)
            products = operations.read(products, behind=numbers.products)
            logits, pull_back = call.with_gradients(products, place, shape, pairs, wanted)
            weights = call.hide_masked(numbers.weights(logits), place, shape, pairs, 0.0)
            weights = walk.masked(index, weights, lambda weights: call.hide(weights, place, shape, pairs, 0.0))
            operations.multiply(d_value, weights.astype(dtype), d_out)
            d_products, d_parameters = pull_back(weights * operations.read(d_weights, behind=1))
            totals = tuple(total + d_parameters[name].sum(axis=1) for name, total in zip(wanted, others, strict=True))
            d_products = d_products.astype(dtype)
            plgpu.barrier_wait(shared.d_products_free.at[parity])
            shared.d_products.at[parity][own] = d_products
            operations.commit()
            plgpu.barrier_arrive(shared.d_products_filled.at[parity])
            return d_products, totals

        d_products, totals = operations.accumulators(differentiate, shape, shape)
        operations.multiply(d_key, d_products, query)

        def free() -> None:
            plgpu.barrier_arrive(shared.d_products_free.at[1 - parity])
            plgpu.barrier_arrive(shared.d_out_free.at[slot])
            plgpu.barrier_arrive(shared.query_free.at[slot])

        operations.choose(step > 0, lambda: add_last_d_query(free), free)
        return totals

    others, (d_key, d_value) = operations.accumulate(add, sums.d_key, sums.d_value, like=others)
    return Sums(d_key, d_value), others


def add_half(
    tile: BackwardTiles,
    operations: Operations,
    shared: Buffers,
    step: Array,
    warpgroup: Array,
    target: Ref,
    made: Callable[[], None],
) -> None:
    """Add a warpgroup's half of a step's dQ to `target`; calls `made` when all products are made."""
    parity = lax.rem(step, 2)
    plgpu.barrier_wait(shared.d_products_filled.at[parity])
    staged, width = shared.d_products.at[parity], shared.d_query.shape[-1]
    key = shared.key.at[tiles.moving_zero(step, warpgroup)]

    def multiply(d_query: Any) -> Array:
        if tile.by_rows:
            operations.multiply(d_query, staged.at[:, pl.ds(warpgroup * ROWS, ROWS)].T, key)
        else:
            operations.multiply(d_query, staged.T, key.at[:, pl.ds(warpgroup * width, width)])
        return operations.read(d_query)

    half = operations.accumulators(multiply, (ROWS, width))
    made()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    shared.d_query[warpgroup] = half
    operations.commit()
    operations.add_to(target, shared.d_query.at[warpgroup])
