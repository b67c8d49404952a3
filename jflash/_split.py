"""Which mesh axes split the batch, heads, queries and keys of a call, and what a device does about its sequences.

Where queries and keys are split over the same axes there is a choice:

    ring        keys and values go round (`_sequence`)
    all-to-all  the partitioner redistributes queries, keys and values by heads before the call, and the output after it:
                each device then has whole sequences (DeepSpeed Ulysses, arXiv:2309.14509)
    gather      every device gets all keys and values

What a device has to receive decides.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jflash import _mesh
from jflash._semantics.spec import Spec
from jflash._sequence import Ring, SequenceSplit

HEADS_AXIS: dict[str, int] = {
    "query": 2, "key": 2, "value": 2, "bias": 1, "mask": 1, "alibi_slopes": 1, "sinks": 1, "head_index": 1,
    "out": 2, "lse": 1, "d_out": 2, "d_lse": 1,
}  # fmt: skip
"""Where the arrays of a call have their heads; the others have none."""
QUERIES_AXIS: dict[str, int] = {
    "query": 1, "bias": 2, "mask": 2, "query_segments": 1, "out": 1, "lse": 2, "d_out": 1, "d_lse": 2,
}  # fmt: skip
"""Where they have the queries."""
KEYS_AXIS: dict[str, int] = {"key": 1, "value": 1, "key_segments": 1}
"""Where they have the keys. A bias or mask has those whole on every device: each needs other ones at each step."""


class Named(NamedTuple):
    """An array of a call, by name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def of_keys(self) -> bool:
        """Whether it has key heads."""
        return self.name in ("key", "value")


@dataclasses.dataclass(frozen=True)
class Split:
    """Over which mesh axes what of a call is split."""

    mesh: Mesh | AbstractMesh
    call: Spec
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    reason: str
    """What is done about the sequences, and why, in words for the user."""

    @property
    def one_key_head(self) -> bool:
        """Whether key heads are fewer than devices: each device has all of them, and its queries share one."""
        return self.call.key_heads % _mesh.devices(self.mesh, self.heads) != 0

    @property
    def sequence(self) -> SequenceSplit | None:
        """How the sequences are split; `None`: not."""
        if not (self.queries or self.keys):
            return None
        ring = lambda axes: Ring(axes, _mesh.devices(self.mesh, axes))
        return SequenceSplit(self.call, ring(self.queries), ring(self.keys))

    def axes(self, array: Named) -> list[tuple[str, ...]]:
        """The mesh axes over which each axis of an array is split."""
        call = self.call
        found: list[tuple[str, ...]] = [() for _ in array.shape]
        found[0] = self.batch if array.shape[0] > 1 or call.batch == 1 else ()
        heads = () if array.of_keys and self.one_key_head else self.heads
        for places, axes, size in (
            (HEADS_AXIS, heads, call.heads),
            (QUERIES_AXIS, self.queries, call.query_length),
            (KEYS_AXIS, self.keys, call.key_length),
        ):
            axis = places.get(array.name)
            if axis is not None and (array.shape[axis] > 1 or size == 1):
                found[axis] = axes
        return found

    def sharding(self, array: Named) -> NamedSharding:
        """Of an array."""
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in self.axes(array))))

    def missing(self, array: Named) -> tuple[str, ...]:
        """The mesh axes over which the call is split and an array is not."""
        own = {name for axes in self.axes(array) for name in axes}
        used = dict.fromkeys((*self.batch, *self.heads, *self.queries, *self.keys))
        return tuple(name for name in used if name not in own)

    def key_head(self) -> Array:
        """The key head of this device's queries, where that is one."""
        own = self.call.heads // _mesh.devices(self.mesh, self.heads)
        return lax.axis_index(self.heads) * own // self.call.group


def in_shard_map(call: Spec) -> SequenceSplit | None:
    """How the sequences of one device's part of a `shard_map` are split; `None`: not."""
    if not call.sequence_axes:
        return None
    ring = Ring(call.sequence_axes, lax.axis_size(call.sequence_axes))
    lengths = dict(query_length=call.query_length * ring.count, key_length=call.key_length * ring.count)
    return SequenceSplit(dataclasses.replace(call, **lengths), ring, ring)


def choose(call: Spec, mesh: Mesh | AbstractMesh, query: Any, key: Any) -> Split:
    """What to do with a query and keys that come with these shardings. What does not divide evenly is gathered."""
    batch, queries, heads, _ = map(_mesh.axis_names, _mesh.dimensions(query, 4))
    _, keys, _, _ = map(_mesh.axis_names, _mesh.dimensions(key, 4))
    devices = functools.partial(_mesh.devices, mesh)
    batch = batch if call.batch % devices(batch) == 0 else ()
    one_key_head = call.heads % devices(heads) == 0 and call.group % max(1, call.heads // devices(heads)) == 0
    heads = heads if call.key_heads % devices(heads) == 0 or one_key_head else ()
    queries = queries if call.query_length % devices(queries) == 0 else ()
    keys = tuple(name for name in keys if name not in (*batch, *heads))
    keys = keys if call.key_length % devices(keys) == 0 else ()
    split = Split(mesh, call, batch, heads, queries, keys, "")
    explained = functools.partial(dataclasses.replace, split)
    if not (queries or keys):
        return explained(reason="sequences whole on each device")
    if not keys:
        return explained(reason="queries split, keys and values whole on each device")
    if not queries:
        return explained(reason="keys split: each device attends to its own, then all merge")
    if queries != keys:
        if set(queries).isdisjoint(keys):
            return explained(reason="queries and keys split over different axes: all devices of a row of queries merge")
        return explained(keys=(), reason="gather: queries and keys are split over axes that are partly the same")
    return _for_one_ring(split)


def _for_one_ring(split: Split) -> Split:
    """The choice where queries and keys are split over the same axes."""
    call = split.call
    sequence = split.sequence
    assert sequence is not None
    count = sequence.queries.count
    # In elements of a batch entry, all heads of a device.
    of_queries = call.query_length * call.heads * (call.head_dim + call.value_dim) // count
    of_keys = call.key_length * call.key_heads * (call.head_dim + call.value_dim) // count
    trades = (of_queries + of_keys) // 2 if sequence.zigzag else 0
    ring = of_keys * (len(sequence.steps) - 1) + trades
    all_to_all = (of_queries + of_keys) * (count - 1) // count
    gather = of_keys * (count - 1)
    compared = f"a device receives {{}}, by {{}} {{:.2g}} times as much (forward)"
    divisible = call.key_heads % _mesh.devices(split.mesh, (*split.heads, *split.queries)) == 0
    if divisible and all_to_all <= ring:
        more = ring / max(all_to_all, 1)
        reason = f"all-to-all over heads: a ring would send {more:.2g} times as much"
        return dataclasses.replace(split, heads=(*split.heads, *split.queries), queries=(), keys=(), reason=reason)
    if call.bounds == (None, None) and count * of_keys <= of_queries:
        return dataclasses.replace(
            split, keys=(), reason="gather: all keys and values are less than a device's queries"
        )
    del gather, compared
    return dataclasses.replace(split, reason="ring" + (", zigzag" if sequence.zigzag else ""))
