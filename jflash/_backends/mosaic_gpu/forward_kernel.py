"""Forward: a block owns some rows of queries and walks over the tiles of keys that they can see.

    each warpgroup that computes, on 64 rows of queries:
      S = Q K_0^T;  P, m, l = online softmax of S
      for j = 1, 2, ...:
        S = Q K_j^T                 the matrix unit runs this
        O = O + P V_(j-1)           and this, while the warpgroup goes on with
        P, m, l = online softmax of S
        O = O * correction
      O = O + P V_last;  out = O / l;  lse = log l + m
    the last warpgroup copies tiles of keys and values ahead of them into shared memory

Sources: FlashAttention-3, arXiv:2407.08608, sections 3.1 (warp specialisation) and 3.2 (the overlap within one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import key_columns as bias_of_keys
from jflash._backends.mosaic_gpu import pairs as bias_and_mask
from jflash._backends.mosaic_gpu import softmax, spans, tiles
from jflash._backends.mosaic_gpu.inputs import Inputs, Place, Rows, is_capped, is_plain
from jflash._backends.mosaic_gpu.operations import Operations, Ref
from jflash._backends.mosaic_gpu.rounds import Rounds
from jflash._backends.mosaic_gpu.softmax import Softmax
from jflash._backends.mosaic_gpu.spans import Walk
from jflash._backends.mosaic_gpu.tiles import ROWS, ForwardTiles, Sizes
from jflash._semantics.spec import Spec


class Buffers(NamedTuple):
    """Shared memory, and its barriers: `filled` when a copy has arrived, `free` when all who need it have read it."""

    query: Ref
    out: Ref
    """In the place of `query`, by then `query_free`; apart, whole or for one part after the other, where there are
    several rounds and room."""
    key: Ref
    value: Ref
    bias: Ref | None
    """Tiles of the bias, if it has any; they come and go with the keys."""
    bias_of_keys: Ref | None
    """What `key_columns` has for a tile of keys, and so does that."""
    query_filled: Ref
    key_filled: Ref
    key_free: Ref
    value_filled: Ref
    value_free: Ref
    query_free: Ref
    mark: Ref
    """A number for each row, which nobody reads: see `attend`."""


def sizes(spec: Spec, query: Array, value: Array, sides: dict[str, Array]) -> Sizes:
    """Of a call's tiles."""
    bias_columns = bias_of_keys.COLUMNS if bias_of_keys.are_there(spec) else 0
    return Sizes(query.shape[3], value.shape[3], bias_and_mask.tile_bytes(spec, sides), bias_columns)


def forward(
    spec: Spec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    sides: dict[str, Array],
    known_spans: Int[Array, "B blocks 4"] | None,
    tile: ForwardTiles,
    work: Rounds,
    operations: Operations,
    *,
    packed: int = 1,
    splits: int = 1,
) -> tuple[Float[Array, "splits B T N D"], Float[Array, "splits B N L"]]:
    """The kernel's call. T, S, H and D are multiples of 8 here; L is T rounded up to whole blocks.

    With `packed` heads in the rows, T counts rows and N heads of keys, and queries and output are `[B, N, T, ...]`.
    With several `splits` each takes its part of the keys; the outputs are float32 then, and sinks are left to whoever
    merges them. Which blocks of queries a block of the grid takes, `work` says.
    """
    batch, rows, heads, head_dim = query.shape if packed == 1 else (query.shape[i] for i in (0, 2, 1, 3))
    value_dim = value.shape[3]
    columns, value_columns = tiles.round_up(head_dim, 16), tiles.round_up(value_dim, 16)
    group = heads // key.shape[2]
    blocks, rounds = work.blocks, work.number
    missing = tile.missing(rows)
    sections = work.sections
    has_tiles, has_columns = bias_and_mask.has_tiles(spec), bias_of_keys.are_there(spec)
    names = [*sides, *([] if known_spans is None else ["spans"])]
    out_dtype = query.dtype if splits == 1 else jnp.dtype(jnp.float32)

    beginning = lambda block: spans.beginning(block, tile.rows, missing)

    def kernel(query_ref: Ref, key_ref: Ref, value_ref: Ref, *refs: Any) -> None:
        side_refs, (out_ref, lse_ref, query_or_out, *scratch) = refs[: len(names)], refs[len(names) :]
        call = Inputs(spec, operations, dict(zip(names, side_refs, strict=True)), packed, has_bias=not has_columns)
        shared = Buffers(*(query_or_out if is_union or apart else (query_or_out, query_or_out)), *scratch)
        h = lax.axis_index("section") * (heads // sections) + lax.axis_index("head")
        split, warpgroup = lax.axis_index("split"), lax.axis_index("warpgroup")
        member = lax.axis_index("block"), lax.axis_index("batch")
        key_columns = tiles.columns(columns, head_dim, h)
        out_columns = tiles.columns(value_columns, value_dim, h)

        def taken(index: Any) -> tuple[Array, Array, Walk]:
            """A round's batch entry and block of queries, and its walk. Those that see most keys have the first turns,
            so that none of them is left at the end alone."""
            b, turn = work.taken(member, index)
            block = blocks - 1 - turn
            return b, block, spans.walk_keys(call, b, block, tile.rows, tile.keys, missing).part(split, splits)

        @pl.when(warpgroup < tile.warpgroups)
        def _() -> None:
            tiles.release(tile.stages, shared.key_free, shared.value_free)
            tiles.registers(tile.warpgroups, copies=False)
            own_query, own_out = shared.query.at[warpgroup], shared.out.at[warpgroup]
            part = lambda ref, rows, columns: ref.at[rows, h, columns] if packed == 1 else ref.at[h, rows, columns]

            def own(block: Any) -> Any:
                """The rows of this warpgroup; past the end of all, where a block has fewer."""
                start = beginning(block) + warpgroup * ROWS
                if missing:
                    there = start < (block + 1) * tile.rows - missing
                    start = jnp.where(there, start, (blocks - 1) * tile.rows + warpgroup * ROWS)
                return pl.ds(start, ROWS)

            def copy_query(index: Any) -> None:
                b, block, _ = taken(index)
                source = part(query_ref.at[b], own(block), key_columns)
                plgpu.copy_gmem_to_smem(source, own_query, shared.query_filled.at[warpgroup])

            copy_query(0)

            def attend_block(index: Any, visited: Any) -> Any:
                b, block, walk = taken(index)
                plgpu.barrier_wait(shared.query_filled.at[warpgroup])
                place = Place(b, h, own(block).start, 0)

                copy_next = lambda: work.then(member, index, copy_query)
                read = copy_next if apart else lambda: None
                state, sums = attend(
                    call, tile, shared, walk, place, warpgroup, value_columns, query.dtype, visited, read
                )
                sink = None if splits > 1 else call.value("sinks", b, h)
                out, lse = softmax.finish(call, state, sums, sink)
                if is_union and not apart:
                    plgpu.barrier_arrive(shared.query_free)
                    plgpu.barrier_wait(shared.query_free)
                lse_ref[split, b, h, own(block)] = lse
                for first in range(0, value_columns, width):
                    if apart:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    own_out[...] = lax.slice(out, (0, first), (ROWS, first + width)).astype(out_dtype)
                    operations.commit()
                    target = out_columns if width == value_columns else pl.ds(first, width)
                    plgpu.copy_smem_to_gmem(own_out, part(out_ref.at[split, b], own(block), target))
                if rounds > 1 and not apart:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    copy_next()
                return visited + walk.count

            work.each(member, attend_block)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == tile.warpgroups)
        def _() -> None:
            tiles.registers(tile.warpgroups, copies=True)
            key_head = lax.div(h, group)

            def copy_block(index: Any, visited: Any) -> Any:
                b, block, walk = taken(index)

                def copy(index: Array) -> None:
                    slot = lax.rem(visited + index, tile.stages)
                    keys = Rows(b, walk.start(index), tile.keys, key_head, key_columns)
                    plgpu.barrier_wait(shared.key_free.at[slot])
                    plgpu.copy_gmem_to_smem(keys.of(key_ref), shared.key.at[slot], shared.key_filled.at[slot])
                    if shared.bias_of_keys is not None:
                        source = bias_of_keys.part(call, keys, h)
                        plgpu.copy_gmem_to_smem(source, shared.bias_of_keys.at[slot], shared.key_filled.at[slot])
                    if shared.bias is not None:
                        own = pl.ds(beginning(block), tile.rows), pl.ds(keys.first, tile.keys)
                        source = call.part("bias", b, h).at[own]
                        plgpu.copy_gmem_to_smem(source, shared.bias.at[slot], shared.key_filled.at[slot])
                    plgpu.barrier_wait(shared.value_free.at[slot])
                    values = keys._replace(columns=out_columns)
                    call.copy_rows("value", value_ref, values, shared.value.at[slot], shared.value_filled.at[slot])

                tiles.for_each_copy(walk.count, copy, "head", "block", "section", "batch")
                return visited + walk.count

            work.each(member, copy_block)
            tiles.drain(tile.stages, shared.key_free, shared.value_free)

    filled = plgpu.Barrier(num_barriers=tile.stages)
    free = plgpu.Barrier(num_barriers=tile.stages, num_arrivals=tile.warpgroups)
    order = (rows, heads) if packed == 1 else (heads, rows)
    parts = tile.out_parts(sizes(spec, query, value, sides)) if rounds > 1 else 0
    apart, width = parts > 0, value_columns // max(1, parts)
    out_rows = tiles.shared((tile.warpgroups, ROWS, width), out_dtype)
    query_rows = tiles.shared((tile.warpgroups, ROWS, columns), query.dtype)
    is_union = (columns, query.dtype) != (value_columns, out_dtype)
    kernel.__name__ = f"jflash_forward_{head_dim}_{value_dim}"
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((splits, batch, *order, value_dim), out_dtype),
            jax.ShapeDtypeStruct((splits, batch, heads, blocks * tile.rows), jnp.float32),
        ),
        # The last axis is the fastest.
        grid=(heads // sections, work.grid[0], sections, work.grid[1], splits),
        grid_names=("head", "block", "section", "batch", "split"),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            (query_rows, out_rows) if apart else plgpu.RefUnion(query_rows, out_rows) if is_union else query_rows,
            tiles.shared((tile.stages, tile.keys, columns), key.dtype),
            tiles.shared((tile.stages, tile.keys, value_columns), value.dtype),
            tiles.shared((tile.stages, tile.rows, tile.keys), sides["bias"].dtype) if has_tiles else None,
            bias_of_keys.shared(tile) if has_columns else None,
            plgpu.Barrier(num_barriers=tile.warpgroups),
            plgpu.Barrier(num_barriers=tile.stages, num_arrivals=1 + has_tiles + has_columns),
            free,
            filled,
            free,
            plgpu.Barrier(num_arrivals=tile.warpgroups),
            tiles.vectors((tile.warpgroups, ROWS)),
        ],
        compiler_params=tiles.COMPILER,
        interpret=operations.interpret,
    )(query, key, value, *sides.values(), *([] if known_spans is None else [known_spans]))


def attend(
    call: Inputs,
    tile: ForwardTiles,
    shared: Buffers,
    walk: Walk,
    place: Place,
    warpgroup: Int[Array, ""],
    value_columns: int,
    dtype: Any,
    visited: Int[Array, ""] | int,
    queries_read: Callable[[], None],
) -> tuple[Softmax, Float[Array, "rows D"]]:
    """One warpgroup's rows after all their tiles: the softmax, and the weighted sums of the values.

    `visited` tiles came before, in other rounds; `queries_read` is called when the queries are not needed any more.
    """
    operations, shape = call.operations, (ROWS, tile.keys)
    query = shared.query.at[warpgroup]

    slot_of = lambda index: lax.rem(visited + index, tile.stages)
    mark = _mark(call, tile, is_masked=walk.whole is not None)
    start, stop = 0, walk.count
    if tile.rows > tile.keys:
        start, stop, walk = spans.own_keys(call, walk, place.batch, place.query, ROWS)

    def multiply(products: Any, slot: Any) -> None:
        operations.multiply(products, query, shared.key.at[slot].T)
        if shared.bias_of_keys is not None:
            bias_of_keys.add(products, shared.bias_of_keys.at[slot], operations)

    def place_of(index: Any) -> Place:
        return place._replace(key=walk.start(index))

    def early(index: Any) -> dict[str, Array]:
        """What is loaded before a tile's products are asked for, so that nobody waits: where there are registers."""
        place = place_of(index)
        if not call.has_bias:
            bias = bias_of_keys.are_large(call, place, tile.keys)
        else:
            bias = call.along_keys(place, shape) if tile.warpgroups <= 2 else {}
        return call.words(place, shape) | bias

    def show(
        products: Float[Array, "rows keys"], index: Any, before: Softmax | None, loaded: dict[str, Array]
    ) -> Softmax:
        slot = slot_of(index)
        own = pl.ds(warpgroup * ROWS, ROWS)
        at, pairs = place_of(index), dict(loaded)
        if shared.bias is not None:
            pairs["bias"] = operations.load(shared.bias.at[slot, own])
            # What threads have read, a copy may overwrite.
            operations.commit()
        plgpu.barrier_arrive(shared.key_free.at[slot])
        by_mask = lambda values: call.hide_masked(values, at, shape, pairs, -jnp.inf)
        by_rest = lambda values: call.hide(values, at, shape, pairs, -jnp.inf)
        hide = lambda values: walk.masked(index, by_mask(values), by_rest)
        if is_capped(call.spec):
            hidden = softmax.Hidden(walk.is_partial(index), by_mask, hide)
            return softmax.capped_step(call, products, place.batch, hidden, before, dtype)
        if call.has_bias:
            numbers, unit = call.logits(products, at, shape, pairs), 1.0
        else:
            numbers, unit = bias_of_keys.numbers(call, products, at, loaded)
        return softmax.step(call, hide(numbers), unit, before, dtype)

    def leave(index: Array, carry: int) -> int:
        slot = slot_of(index)
        plgpu.barrier_wait(shared.key_filled.at[slot])
        plgpu.barrier_arrive(shared.key_free.at[slot])
        plgpu.barrier_wait(shared.value_filled.at[slot])
        plgpu.barrier_arrive(shared.value_free.at[slot])
        return carry

    if tile.rows > tile.keys:
        lax.fori_loop(0, start, leave, 0)
    first, loaded = slot_of(jnp.int32(start)), early(start)
    plgpu.barrier_wait(shared.key_filled.at[first])

    def multiplied(products: Any) -> Array:
        multiply(products, first)
        return operations.read(products)

    products = operations.accumulators(multiplied, shape)
    state = show(products, jnp.int32(start), None, loaded)
    sums = operations.full((ROWS, value_columns), 0)

    def body(index: Array, carry: tuple[Softmax, Array]) -> tuple[Softmax, Array]:
        state, sums = carry
        slot, last = slot_of(index), slot_of(index - 1)
        loaded = early(index)
        plgpu.barrier_wait(shared.key_filled.at[slot])

        def attend_tile(sums: Any) -> Softmax:
            def weigh(products: Any) -> Softmax:
                multiply(products, slot)
                plgpu.barrier_wait(shared.value_filled.at[last])
                operations.multiply(sums, state.weights, shared.value.at[last])
                new = show(operations.read(products, behind=1), index, state, loaded)
                if mark is not None:
                    # Four threads write one number: racecheck reports it.
                    shared.mark[warpgroup] = getattr(new, mark)
                return new

            return operations.accumulators(weigh, shape)

        state, (sums,) = operations.accumulate(attend_tile, sums, like=state)
        plgpu.barrier_arrive(shared.value_free.at[last])
        return state, softmax.corrected(call, state, sums)

    state, sums = lax.fori_loop(start + 1, stop, body, (state, sums))
    queries_read()
    last = slot_of(stop - 1)
    plgpu.barrier_wait(shared.value_filled.at[last])
    sums = operations.add_product(sums, state.weights, shared.value.at[last])
    plgpu.barrier_arrive(shared.value_free.at[last])
    if tile.rows > tile.keys:
        lax.fori_loop(stop, walk.count, leave, 0)
    return state, sums


def _mark(call: Inputs, tile: ForwardTiles, *, is_masked: bool) -> str | None:
    """Which part of the softmax is stored for nobody to read, if any.

    The compiler puts behind the wait for the second product whatever nothing needs before that it may not move. The
    maxima should come before it; of three warpgroups the exponentials too, while of two one's run beside the other's
    products. Where logits take more arithmetic than a bias that was loaded ahead, and in tiles of 64 keys that need no
    mask, it does better by itself.
    """
    if tile.warpgroups == 3:
        return "correction"
    if bias_and_mask.has_tiles(call.spec):
        return None
    if is_plain(call.spec) or not call.has_bias:
        return "reference" if tile.keys == 128 or tile.warpgroups == 4 or is_masked else None
    return "correction" if bias_and_mask.bias_kind(call.spec) == "column" and tile.keys == 128 else None
