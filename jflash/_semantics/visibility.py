"""The rule of which keys a query may see, for single pairs and for whole blocks of queries.

`visible` is the rule, elementwise. `key_spans` is the same rule for a block of query rows: outside [start, stop) no row
sees a key, so those tiles are never visited; inside [full_start, full_stop) every row sees every key, so those tiles
carry no mask.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import Tile, cut, in_range


def visible(spec: Spec, tile: Tile) -> Bool[Array, "#b #k #g #i #j"] | None:
    """Return True where the query of a tile may see the key; `None` when all may."""
    left, right = spec.bounds
    conditions: list[Array] = []
    # Kernels compare every key with the bounds, so all rules that name a query's last key are made one number first.
    last: list[Array] = []
    if right is not None:
        last.append(tile.position + right)
    if tile.key_lengths is not None:
        last.append(tile.key_lengths - 1)
    if tile.query_lengths is not None:
        last.append(jnp.where(tile.query < tile.query_lengths, spec.key_length - 1, -1))
    if left is None and last:
        conditions.append(tile.key <= functools.reduce(jnp.minimum, last))
    elif left is not None:
        first = jnp.maximum(tile.position - left, 0)
        count = functools.reduce(jnp.minimum, last, jnp.int32(spec.key_length - 1)) - first + 1
        # As unsigned numbers, keys before the first are past the last.
        conditions.append((tile.key - first).astype(jnp.uint32) < jnp.maximum(count, 0).astype(jnp.uint32))
    if tile.query_segments is not None and tile.key_segments is not None:
        conditions.append(tile.query_segments == tile.key_segments)
    if tile.mask is not None:
        conditions.append(tile.mask)
    if spec.mask_mod is not None:
        assert tile.batch is not None
        assert tile.head is not None
        query, key = tile.indices
        conditions.append(spec.mask_mod(tile.batch, tile.head, query, key, tile.mask_mod_arrays))
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def limited(spec: Spec) -> bool:
    """Return whether anything keeps some query from some key."""
    names = {"mask", "query_lengths", "key_lengths", "query_segments"}
    return spec.bounds != (None, None) or spec.mask_mod is not None or not names.isdisjoint(spec.operands)


def every_row_sees(spec: Spec) -> bool:
    """Return whether every row sees some key, masks aside, as far as is known when a call is traced."""
    if not {"query_lengths", "key_lengths"}.isdisjoint(spec.operands):
        return False
    if spec.query_offset is None or spec.mask_mod is not None:
        return False
    left, right = spec.bounds
    first, last = spec.query_offset, spec.query_offset + spec.query_length - 1
    if "query_segments" in spec.operands:
        # Of the keys of its segment a query is sure to have its own.
        sees_own = (right is None or first + right >= 0) and (left is None or first - left <= 0)
        return spec.same_segments and spec.query_length == spec.key_length and sees_own
    return (right is None or first + right >= 0) and (left is None or last - left < spec.key_length)


def hidden_rows_have_cotangents(spec: Spec) -> bool:
    """Return whether d_out may have rows of queries that see no key, by who sees whom or by logits of -inf.

    It is said of what is known when a call is traced, and of rows before a query length: what is behind one, backends
    leave out by its index. A partial call's d_out has no such rows.
    """
    unpadded = dataclasses.replace(spec, operands=spec.operands - {"query_lengths"})
    by_logit = spec.score_mod is not None or not {"mask", "bias"}.isdisjoint(spec.operands)
    return not spec.partial and (by_logit or not every_row_sees(unpadded))


def of_seeing_rows(spec: Spec, d_out: Float[Array, "*rows D"], sees: Bool[Array, "*rows"]) -> Float[Array, "*rows D"]:
    """Return d_out with 0 for queries that see no key: theirs has nowhere to go, and 0 * NaN is NaN."""
    return jnp.where(sees[..., None], d_out, 0) if hidden_rows_have_cotangents(spec) else d_out


class Spans(NamedTuple):
    """Four numbers in order: 0 <= start <= full_start <= full_stop <= stop <= the number of keys, or of queries."""

    start: Int[Array, ""]
    full_start: Int[Array, ""]
    full_stop: Int[Array, ""]
    stop: Int[Array, ""]


def query_spans(
    spec: Spec,
    operands: Operands,
    batch: Int[Array, ""] | int,
    batches: int,
    first: Int[Array, ""] | int,
    keys: int,
) -> Spans:
    """Return the spans of queries that see keys [first, first + keys): `key_spans` with the roles exchanged.

    Key j is seen from position p when p - left <= j <= p + right, so from rows i = p - offset with j - offset - right
    <= i <= j - offset + left.
    """
    left, right = spec.bounds
    exchanged = dataclasses.replace(
        spec,
        query_length=spec.key_length,
        key_length=spec.query_length,
        is_causal=False,
        window=(right, left),
        query_offset=None if spec.query_offset is None else -spec.query_offset,
    )
    offset = in_range(spec, "query_offset", operands.query_offset)
    return key_spans(
        exchanged,
        operands._replace(
            query_offset=None if offset is None else -offset,
            query_lengths=operands.key_lengths,
            key_lengths=operands.query_lengths,
            query_segments=operands.key_segments,
            key_segments=operands.query_segments,
        ),
        batch,
        batches,
        first,
        keys,
    )


def key_spans(
    spec: Spec,
    operands: Operands,
    batch: Int[Array, ""] | int,
    batches: int,
    first: Int[Array, ""] | int,
    rows: int,
) -> Spans:
    """Return the spans of keys that query rows [first, first + rows) of batch entries [batch, batch + batches) see.

    They are exact for causal calls, windows and lengths. For segment ids they are exact when ids are sorted, and never
    too small. Offsets and lengths may also be scalars: those of the one entry that is asked for.
    """
    int32 = jnp.int32
    last = first + rows - 1

    def extremes(name: str) -> tuple[Array, Array]:
        array = in_range(spec, name, getattr(operands, name))
        if array.ndim == 0:
            return array, array
        taken = cut(array, (batch,), (batches,))
        return jnp.min(taken), jnp.max(taken)

    start, stop = jnp.zeros((), int32), jnp.full((), spec.key_length, int32)
    full_start, full_stop = start, stop
    least_offset = most_offset = spec.query_offset
    if operands.query_offset is not None:
        least_offset, most_offset = extremes("query_offset")
    assert least_offset is not None
    assert most_offset is not None
    left, right = spec.bounds
    if left is not None:
        start = jnp.maximum(start, first + least_offset - left)
        full_start = jnp.maximum(full_start, last + most_offset - left)
    if right is not None:
        stop = jnp.minimum(stop, last + most_offset + right + 1)
        full_stop = jnp.minimum(full_stop, first + least_offset + right + 1)
    if operands.key_lengths is not None:
        least, most = extremes("key_lengths")
        stop = jnp.minimum(stop, most)
        full_stop = jnp.minimum(full_stop, least)
    if operands.query_lengths is not None:
        least, most = extremes("query_lengths")
        stop = jnp.where(first < most, stop, start)
        full_stop = jnp.where(last < least, full_stop, start)
    if operands.query_segments is not None and operands.key_segments is not None:
        queries = cut(operands.query_segments, (batch, first), (batches, rows))
        keys = cut(operands.key_segments, (batch, 0), (batches, spec.key_length))
        lowest, highest = queries.min(axis=1, keepdims=True), queries.max(axis=1, keepdims=True)
        position = jnp.arange(spec.key_length, dtype=int32)
        some = jnp.any((keys >= lowest) & (keys <= highest), axis=0)
        every = jnp.all((keys == lowest) & (keys == highest), axis=0)
        start = jnp.maximum(start, jnp.min(jnp.where(some, position, spec.key_length)))
        stop = jnp.minimum(stop, jnp.max(jnp.where(some, position + 1, 0)))
        every_start = jnp.min(jnp.where(every, position, spec.key_length))
        every_stop = jnp.max(jnp.where(every, position + 1, 0))
        unbroken = jnp.sum(every) == every_stop - every_start
        full_start = jnp.maximum(full_start, every_start)
        full_stop = jnp.where(unbroken, jnp.minimum(full_stop, every_stop), start)
    if operands.mask is not None or spec.mask_mod is not None:
        full_stop = start
    stop = jnp.clip(stop, 0, spec.key_length)
    start = jnp.clip(start, 0, stop)
    full_start = jnp.clip(full_start, start, stop)
    full_stop = jnp.clip(full_stop, full_start, stop)
    return Spans(start, full_start, full_stop, stop)
