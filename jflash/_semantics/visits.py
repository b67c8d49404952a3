"""What a block visits: a list of tiles, in which those that are seen in part are marked.

`visibility.key_spans` says it as a range, which is exact for causality, windows and lengths. A mask function, a dense
mask and segments leave tiles empty anywhere. Then it is a list of the tiles in the range that no mask hides: a row of
an int32 array,

    [how many tiles are visited, the first one's entry, the next one's entry, ...]

with as many entries as there are tiles. An entry is twice the tile's number, and one more if the tile is seen in part:
only then it needs a mask. Tiles that are seen whole come first, and each kind comes in order. Entries behind those of
visited tiles name a tile past the end, seen in part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Int32

from jflash._semantics import score_mod_as_mask, visibility
from jflash._semantics.coverage import TILE, Coverage
from jflash._semantics.spec import Operands, Spec

Lists = Int32[Array, "#B #N blocks entries"]


def has_map(spec: Spec) -> bool:
    """Return whether a function hides keys by position, so that a map of its tiles is of use."""
    return spec.mask_mod is not None or score_mod_as_mask.hides(spec.score_mod)


def has_gaps(spec: Spec) -> bool:
    """Return whether a function or a mask leaves tiles empty that neither a range nor a segment leaves out."""
    by_pair = spec.mask_shape is not None and min(spec.mask_shape[2:]) > 1
    return has_map(spec) or by_pair


class Cuts(NamedTuple):
    """Where the blocks of an axis begin: one after the other, of `size` places each."""

    number: int
    size: int
    missing: int = 0
    """The places before the axis that the first block has, where there are no rows. The last block may end late."""
    last: int | None = None
    """Where the last block begins at most; `None`: anywhere."""

    @property
    def first(self) -> Int[Array, "blocks"]:
        """The first place of each block."""
        first = jnp.arange(self.number, dtype=jnp.int32) * self.size - self.missing
        return first if self.last is None else jnp.minimum(first, self.last)

    def are(self, tile: int) -> bool:
        """Return whether blocks are tiles of `tile` places, from the first one on."""
        aligned = self.last is None or self.last % tile == 0
        return self.size == tile and self.missing == 0 and aligned


def cuts(length: int, size: int, missing: int = 0, *, early: bool = False) -> Cuts:
    """Return blocks in a row: the first lacks `missing` rows, or the last begins early rather than end late."""
    return Cuts(-(-(length + missing) // size), size, missing, length - size if early else None)


def list_tiles(
    spec: Spec,
    operands: Operands,
    queries: Cuts,
    keys: Cuts,
    *,
    batches: int = 1,
    heads: int = 1,
) -> Lists:
    """Return the tiles of keys that each block of queries visits.

    `batches` entries and `heads` query heads share a list: what any of them sees is visited, and what all see whole is
    whole. Along batch entries or heads that see alike the result has size 1.
    """
    return listed(coverage(spec, operands, queries, keys, batches, heads))


def listed(found: Coverage, spare: int = 0) -> Lists:
    """Return the lists of what a map shows, with entries of `spare` tiles past the end behind those of all tiles.

    An entry with a large number added for a partial tile, and a larger one for an empty tile, is a key of its own to
    sort by. So an entry is what is sorted, and nothing is read through an order.
    """
    count = found.some.shape[-1]
    past_the_end = 2 * count + 1
    behind = past_the_end + 1
    entry = 2 * jnp.arange(count, dtype=jnp.int32)
    key = jnp.where(found.full, entry, behind + jnp.where(found.some, entry + 1, past_the_end))
    visited = found.some.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    key = lax.sort(key, is_stable=False)
    key = _padded(key, key.ndim - 1, 1, spare, past_the_end)
    is_count = jnp.arange(1 + count + spare) == 0
    return jnp.where(is_count, visited, jnp.where(key >= behind, key - behind, key))


def _padded(array: Array, axis: int, before: int, after: int, value: int | bool) -> Array:
    """Return an array with `value` before it and after it, along an axis."""
    widths = [(before, after, 0) if a == axis else (0, 0, 0) for a in range(array.ndim)]
    return lax.pad(array, jnp.asarray(value, array.dtype), widths)


def start(entry: Int32[Array, "..."], size: int) -> Int32[Array, "..."]:
    """Return where the tile of an entry begins."""
    return lax.shift_right_logical(entry, jnp.int32(1)) * size


def is_partial(entry: Int32[Array, "..."]) -> Bool[Array, "..."]:
    """Return whether the tile of an entry needs a mask."""
    return lax.bitwise_and(entry, jnp.int32(1)) == 1


def coverage(
    spec: Spec,
    operands: Operands,
    queries: Cuts,
    keys: Cuts,
    batches: int,
    heads: int,
    of_mask: Coverage | None = None,
) -> Coverage:
    """Return how much all that limits a call shows of its tiles, `[#B, #N, blocks of queries, blocks of keys]`.

    `of_mask` is what the dense mask shows of them, where that was found before.
    """
    found = _in_spans(spec, operands, queries, keys, batches)
    of_mask = _of_mask(operands, queries, keys) if of_mask is None else of_mask
    for part in (_of_functions(spec, operands, queries, keys), of_mask):
        if part is not None:
            found = found & _shared(part, spec.batch, batches, spec.heads, heads)
    if operands.query_segments is not None:
        found = found & _shared(_of_segments(operands, queries, keys), spec.batch, batches, spec.heads, heads)
    inside = (queries.first >= 0) & (queries.first + queries.size <= spec.query_length)
    of_keys = (keys.first >= 0) & (keys.first + keys.size <= spec.key_length)
    inside = (inside[:, None] & of_keys[None])[None, None]
    return Coverage(found.full & found.some & inside, found.some)


def _shared(found: Coverage, batch: int, batches: int, all_heads: int, heads: int) -> Coverage:
    """Return one map for each group of batch entries and heads."""

    def together(array: Array, reduce: Callable[..., Array]) -> Array:
        for axis, have, each in ((0, batch, batches), (1, all_heads, heads)):
            if array.shape[axis] == have > 1:
                parts = array.reshape(*array.shape[:axis], have // each, each, *array.shape[axis + 1 :])
                array = reduce(parts, axis=axis + 1)
        return array

    return Coverage(together(found.full, jnp.all), together(found.some, jnp.any))


def _in_spans(spec: Spec, operands: Operands, queries: Cuts, keys: Cuts, batches: int) -> Coverage:
    """Return what bounds and lengths show, which are ranges. Masks and segments are looked at by tile."""
    spec = dataclasses.replace(spec, mask_mod=None)
    operands = operands._replace(query_segments=None, key_segments=None, mask=None)
    limits = operands.query_offset, operands.query_lengths, operands.key_lengths
    by_batch = any(array is not None and array.shape[0] > 1 for array in limits)
    entries = jnp.arange(0, spec.batch if by_batch else 1, batches if by_batch else 1, dtype=jnp.int32)
    together = batches if by_batch else 1
    of_block = lambda batch, first: visibility.key_spans(spec, operands, batch, together, first, queries.size)
    spans = jax.vmap(jax.vmap(of_block, (None, 0)), (0, None))(entries, queries.first)
    start, full_start, full_stop, stop = (end[:, None, :, None] for end in spans)
    first = keys.first[None, None, None]
    last = first + keys.size
    some = (first < stop) & (last > start) & (stop > start)
    return Coverage((first >= full_start) & (last <= full_stop), some)


def _of_functions(spec: Spec, operands: Operands, queries: Cuts, keys: Cuts) -> Coverage | None:
    """Return what the functions show, whose map is of the whole sequences: some of every tile, if there is no map."""
    if operands.coverage is None:
        unknown = Coverage(jnp.zeros((1, 1, 1, 1), bool), jnp.ones((1, 1, 1, 1), bool))
        return None if spec.mask_mod is None else unknown
    found = Coverage.decoded(operands.coverage)
    return covering(found, queries, keys, operands.first_query, operands.first_key)


def covering(
    found: Coverage,
    queries: Cuts,
    keys: Cuts,
    first_query: Int32[Array, "#B"] | None = None,
    first_key: Int32[Array, "#B"] | None = None,
    *,
    tile: int = TILE,
) -> Coverage:
    """Return the map of other tiles than those of `tile` x `tile`: each shows what all that it meets show."""
    hidden, some = ~found.full, found.some
    for axis, cut, moved in ((2, queries, first_query), (3, keys, first_key)):
        hidden, some = (_any_within(array, axis, cut, moved, tile) for array in (hidden, some))
    return Coverage(~hidden, some)


def _any_within(
    array: Bool[Array, "..."], axis: int, cut: Cuts, moved: Int32[Array, "#B"] | None, tile: int
) -> Bool[Array, "..."]:
    """Return whether a block meets any True along an axis.

    Two stretches of the same number of tiles, a power of two, cover those that a block meets: that many or up to twice
    as many. A running sum would say it too, but XLA makes it slowly on GPUs.
    """
    if moved is None and cut.are(tile):
        return lax.slice_in_dim(array, 0, cut.number, axis=axis)
    least = -(-cut.size // tile)
    most = least + 1
    count, array = array.shape[axis], _padded(array, axis, most, most, False)
    stretch = 1
    while 2 * stretch <= least:
        length = array.shape[axis]
        ends = (
            lax.slice_in_dim(array, 0, length - stretch, axis=axis),
            lax.slice_in_dim(array, stretch, length, axis=axis),
        )
        array, stretch = ends[0] | ends[1], 2 * stretch
    first = cut.first[None] if moved is None else cut.first[None] + moved[:, None]
    begin, end = first // tile, -(-(first + cut.size) // tile)
    length = end - begin
    begin = jnp.clip(begin, -most, count) + most
    last = begin + length - stretch

    def meets(array: Array, begin: Array, last: Array) -> Array:
        take = lambda places: jnp.take(array, places, axis=axis - 1, mode="clip")
        return take(begin) | take(last)

    if first.shape[0] == 1:
        return jax.vmap(meets, (0, None, None))(array, begin[0], last[0])
    array, entries = (array, 0) if array.shape[0] > 1 else (array[0], None)
    return jax.vmap(meets, (entries, 0, 0))(array, begin, last)


def _of_mask(operands: Operands, queries: Cuts, keys: Cuts) -> Coverage | None:
    """Return what a dense mask shows."""
    mask = operands.mask
    if mask is None:
        return None
    *_, rows, columns = mask.shape
    found, _ = Coverage(mask, mask).coarser((TILE if rows > 1 else 1, TILE if columns > 1 else 1))
    whole = lambda length: Cuts(1, min(length, TILE))
    return covering(found, queries if rows > 1 else whole(1), keys if columns > 1 else whole(1))


def _of_segments(operands: Operands, queries: Cuts, keys: Cuts) -> Coverage:
    """Return what segments show: tiles share none if their ids lie apart, or no id's last five bits are in both."""
    assert operands.query_segments is not None
    assert operands.key_segments is not None
    (low_q, high_q, bits_q), (low_k, high_k, bits_k) = map(
        _ids_of_tiles, (operands.query_segments, operands.key_segments)
    )
    rows, columns = (lambda array: array[:, None, :, None]), (lambda array: array[:, None, None, :])
    low, high = jnp.maximum(rows(low_q), columns(low_k)), jnp.minimum(rows(high_q), columns(high_k))
    some = (low <= high) & (rows(bits_q) & columns(bits_k) != 0)
    one = (rows(low_q) == rows(high_q)) & (columns(low_k) == columns(high_k)) & (rows(low_q) == columns(low_k))
    return covering(Coverage(one, some), queries, keys)


def _ids_of_tiles(ids: Int32[Array, "#B L"]) -> tuple[Array, Array, Array]:
    """Return of each tile the least id, the largest, and a set of all ids by their last five bits."""
    padded = jnp.pad(ids, [(0, 0), (0, -ids.shape[1] % TILE)], mode="edge").reshape(ids.shape[0], -1, TILE)
    bit = lax.shift_left(jnp.uint32(1), (padded & 31).astype(jnp.uint32))
    bits = lax.reduce(bit, jnp.uint32(0), lax.bitwise_or, (2,))
    return padded.min(axis=2), padded.max(axis=2), bits
