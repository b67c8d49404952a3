"""Sequences that come split over the devices of a `shard_map`, redistributed so that each device attends by itself.

The redistribution is written in collectives that JAX differentiates. In sharded `jit` the partitioner does it
(`_split`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax
from jaxtyping import Array

from jflash import _sequence
from jflash._ring import Ring, SequenceSplit
from jflash._semantics.spec import HEADS_AXIS, KEYS_AXIS, QUERIES_AXIS, Operands, Spec

Attend = Callable[[Spec, Operands], tuple[Array, Array]]


def all_to_all(attend: Attend, split: SequenceSplit, operands: Operands) -> tuple[Array, Array]:
    """Attend to whole sequences of some heads, and give back the output of all heads for this device's queries."""
    axes, count = split.queries.axes, split.queries.count
    query_length, key_length = split.lengths

    def exchanged(name: str, array: Array) -> Array:
        heads, sequence = HEADS_AXIS.get(name), (QUERIES_AXIS | KEYS_AXIS).get(name)
        if heads is not None and array.shape[heads] == 1:
            heads = None
        if sequence is not None and array.shape[sequence] != (key_length if name in KEYS_AXIS else query_length):
            sequence = None
        if heads is not None and sequence is not None:
            return lax.all_to_all(array, axes, heads, sequence, tiled=True)
        if sequence is not None:
            return lax.all_gather(array, axes, axis=sequence, tiled=True)
        if heads is not None:
            share = array.shape[heads] // count
            return lax.dynamic_slice_in_dim(array, split.queries.own * share, share, heads)
        return array

    given = {name: array for name, array in operands._asdict().items() if isinstance(array, Array)}
    whole = operands._replace(**{name: exchanged(name, array) for name, array in given.items()})
    out, lse = attend(_unsplit(split.call).resized(whole), whole)
    return lax.all_to_all(out, axes, 1, 2, tiled=True), lax.all_to_all(lse, axes, 2, 1, tiled=True)


def gather(attend: Attend, split: SequenceSplit, operands: Operands) -> tuple[Array, Array]:
    """Attend with this device's queries to all keys."""
    present: dict[str, Any] = {name: array for name, array in operands._asdict().items() if array is not None}
    names = [name for name in KEYS_AXIS if name in present]
    keys = {name: lax.all_gather(present[name], split.keys.axes, axis=1, tiled=True) for name in names}
    queries = {name: present[name] for name in ("query", "query_segments") if name in present}
    queries_alone = SequenceSplit(split.call, split.queries, Ring((), 1))
    (pair,) = queries_alone.pairs(0, 0)
    spec, part = _sequence.part_of(queries_alone, _unsplit(split.call), operands, queries, keys, pair, 0)
    whole = part._replace(sinks=operands.sinks)
    return attend(dataclasses.replace(spec, partial=False).resized(whole), whole)


def _unsplit(call: Spec) -> Spec:
    return dataclasses.replace(call, sequence_axes=())
