"""The mesh axes that split a call's batch, heads, queries and keys, chosen by how queries and keys come split."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jflash import _mesh, _ring, _sequence_strategy
from jflash._ring import Ring, SequenceSplit
from jflash._semantics.spec import HEADS_AXIS, KEYS_AXIS, QUERIES_AXIS, Spec

Axes = Sequence[tuple[str, ...]]
"""The mesh axes over which B, L, N and H of an array are split."""


class Named(NamedTuple):
    """An array of a call, by name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def of_keys(self) -> bool:
        """Whether the array has key heads."""
        return self.name in ("key", "value", "k_scale", "v_scale")


@dataclasses.dataclass(frozen=True)
class Split:
    """The mesh axes over which a call is split."""

    mesh: Mesh | AbstractMesh
    call: Spec
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    reason: str
    """The strategy for the sequences, and its reason, in words for the user."""

    @property
    def one_key_head(self) -> bool:
        """Whether key heads are fewer than devices: each device has all of them, and its queries share one."""
        return self.call.key_heads % _mesh.devices(self.mesh, self.heads) != 0

    @property
    def sequence(self) -> SequenceSplit | None:
        """The split of the sequences; `None`: they are whole."""
        if not (self.queries or self.keys):
            return None
        ring = lambda axes: Ring(axes, _mesh.devices(self.mesh, axes))
        return SequenceSplit(self.call, ring(self.queries), ring(self.keys))

    def axes(self, array: Named) -> list[tuple[str, ...]]:
        """Return the mesh axes over which each axis of an array is split."""
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
        """Return the sharding of an array."""
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in self.axes(array))))

    def missing(self, array: Named) -> tuple[str, ...]:
        """Return the mesh axes over which the call is split and an array is not."""
        own = {name for axes in self.axes(array) for name in axes}
        used = dict.fromkeys((*self.batch, *self.heads, *self.queries, *self.keys))
        return tuple(name for name in used if name not in own)

    def key_head(self) -> Array:
        """Return the key head of this device's queries, if they share one."""
        own = self.call.heads // _mesh.devices(self.mesh, self.heads)
        return lax.axis_index(self.heads) * own // self.call.group


def choose(call: Spec, mesh: Mesh | AbstractMesh, query: Axes, key: Axes) -> Split:
    """Return the split of a call whose queries and keys come split like this. What does not divide evenly is gathered.

    Raises:
      ValueError: if the call names a strategy for its sequences that cannot serve.
    """
    batch, queries, heads, _ = query
    if call.tokens is not None:
        # An entry may have any rows.
        batch, queries = (), ()
    # Any entry may have its keys in any page.
    keys = () if call.pages is not None else tuple(name for name in key[1] if name not in (*batch, *heads))
    devices = functools.partial(_mesh.devices, mesh)
    batch = batch if call.batch % devices(batch) == 0 else ()
    one_key_head = call.heads % devices(heads) == 0 and call.group % max(1, call.heads // devices(heads)) == 0
    heads = heads if call.key_heads % devices(heads) == 0 or one_key_head else ()
    queries = queries if call.query_length % devices(queries) == 0 else ()
    keys = keys if call.key_length % devices(keys) == 0 else ()
    split = Split(mesh, call, batch, heads, queries, keys, "")
    if queries and queries == keys:
        return _of_one_ring(split)
    if not {*queries}.isdisjoint(keys):
        reason = "gather: queries and keys are split over axes that are partly the same"
        return dataclasses.replace(split, keys=(), reason=reason)
    reasons = {
        (False, False): "whole on each device",
        (True, False): "queries split, all keys on each device",
        (False, True): "keys split: each device attends to its own, and the results are merged",
        (True, True): "queries and keys split over different axes: each row of devices merges its results",
    }
    return dataclasses.replace(split, reason=reasons[bool(queries), bool(keys)])


def described(call: Spec, query: Any, key: Any) -> str | None:
    """Say in words for the user what is done about the sequences of such arrays, and why; `None`: they are not
    split."""
    in_shard_map = _ring.in_shard_map(call)
    if in_shard_map is not None:
        return _sequence_strategy.choose(in_shard_map, call.heads, call.key_heads).reason
    shardings = [_mesh.sharding_of(array) for array in (query, key)]
    if not all(isinstance(sharding, NamedSharding) for sharding in shardings):
        return None
    of_query, of_key = map(_mesh.canonical_axes, shardings, (query.ndim, key.ndim))
    split = choose(call, shardings[0].mesh, of_query, of_key)
    return split.reason if of_query[1] or of_key[1] else None


def _of_one_ring(split: Split) -> Split:
    """Return the split where queries and keys come split over the same axes."""
    sequence, key_heads = split.sequence, split.call.key_heads
    assert sequence is not None
    by_heads = _mesh.devices(split.mesh, split.heads)
    name, reason = _sequence_strategy.choose(sequence, split.call.heads // by_heads, max(1, key_heads // by_heads))
    split = dataclasses.replace(split, reason=reason)
    match name:
        case "all_to_all":
            return dataclasses.replace(split, heads=(*split.heads, *split.queries), queries=(), keys=())
        case "gather":
            return dataclasses.replace(split, keys=())
        case _:
            return split
