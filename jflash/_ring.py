"""The devices over which sequences are split, and which parts of a sequence each of them has and sees.

Where causality would leave the first devices idle, each device trades the second half of its chunk for that of its
mirror image among the devices (zigzag). Then it has a half from either end of the sequence, and all devices have the
same to do at every step. Halves are traded at the entry and back at the exit: callers see none of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jflash._semantics.spec import KEYS_AXIS, QUERIES_AXIS, Spec

_SEQUENCE_AXIS = QUERIES_AXIS | KEYS_AXIS

CUT_AS_USED = ("bias", "mask")
"""The arrays that go with no chunk, though they have queries and keys."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices along some mesh axes, major first."""

    axes: tuple[str, ...]
    count: int

    @property
    def own(self) -> Int[Array, ""] | int:
        """The index of this device."""
        return lax.axis_index(self.axes) if self.count > 1 else 0

    def shift(self, arrays: Any, by: int) -> Any:
        """Return all arrays sent `by` devices on."""
        if by % self.count == 0:
            return arrays
        return self._send(arrays, [(device, (device + by) % self.count) for device in range(self.count)])

    def mirror(self, arrays: Any) -> Any:
        """Return all arrays traded with the mirror image of this device."""
        return self._send(arrays, [(device, self.count - 1 - device) for device in range(self.count)])

    def _send(self, arrays: Any, pairs: list[tuple[int, int]]) -> Any:
        """Send one message for each dtype: XLA lets one message run beside the kernels, and waits for any others."""
        leaves, tree = jax.tree.flatten(arrays)
        by_dtype: dict[Any, list[int]] = {}
        for index, leaf in enumerate(leaves):
            by_dtype.setdefault(leaf.dtype, []).append(index)
        for indices in by_dtype.values():
            own = [leaves[index] for index in indices]
            message = own[0] if len(own) == 1 else jnp.concatenate([array.reshape(-1) for array in own])
            message = lax.ppermute(message, self.axes, pairs)
            ends = list(itertools.accumulate(array.size for array in own))
            parts = [message] if len(own) == 1 else jnp.split(message, ends[:-1])
            for index, part in zip(indices, parts, strict=True):
                leaves[index] = part.reshape(leaves[index].shape)
        return tree.unflatten(leaves)


class Pair(NamedTuple):
    """A run of a device's queries and a run of a device's keys.

    A run is the whole chunk, or in a zigzag one of its two halves.
    """

    queries: Int[Array, ""] | int
    keys: Int[Array, ""] | int
    same: bool = False
    """Whether both are the same part of the sequence."""
    all_visible: bool = False
    """Whether causality and windows let every query see every key."""


@dataclasses.dataclass(frozen=True)
class SequenceSplit:
    """The split of a call's sequences over devices."""

    call: Spec
    """The call as it would be on one device."""
    queries: Ring
    keys: Ring

    @property
    def ring(self) -> bool:
        """Whether keys have to travel to the queries."""
        return self.queries.axes == self.keys.axes

    @property
    def zigzag(self) -> bool:
        """Whether halves are traded: where causality alone decides who sees whom, and there are halves."""
        spec = self.call
        by_pair = any(shape is not None and shape[2] > 1 for shape in (spec.bias_shape, spec.mask_shape))
        square = spec.query_length == spec.key_length and spec.query_offset == 0
        even = spec.query_length % (2 * self.queries.count) == 0
        return self.ring and square and even and not by_pair and spec.bounds == (None, 0)

    @property
    def steps(self) -> range:
        """The distances, in devices back, from which the keys of each step come; negative: on.

        Steps whose keys no query sees are left out.
        """
        count, bounds, offset = self.queries.count, self.call.bounds, self.call.query_offset
        if not self.ring:
            return range(1)
        queries, keys = self.lengths
        if self.zigzag or offset is None or queries != keys:
            return range(count)

        def seen(distance: int) -> bool:
            """Return whether some query sees a chunk at this distance before its own."""
            (left, right), position = bounds, distance * keys + offset
            return (left is None or position - left < keys) and (right is None or position + queries + right > 0)

        distances = [distance for distance in range(1 - count, count) if seen(distance)]
        # Two distances may be the same way round the ring: one of them will do.
        return range(distances[0], distances[0] + min(len(distances), count)) if distances else range(1)

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys that a device has."""
        return self.call.query_length // self.queries.count, self.call.key_length // self.keys.count

    def enter(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Return a device's chunks as runs, along a new axis in front."""
        if not self.zigzag:
            return {name: array[None] for name, array in arrays.items()}
        halves = {name: jnp.split(array, 2, _SEQUENCE_AXIS[name]) for name, array in arrays.items()}
        received = self.queries.mirror({name: second for name, (_, second) in halves.items()})
        return {name: self._in_order(jnp.stack([first, received[name]])) for name, (first, _) in halves.items()}

    def leave(self, runs: dict[str, Array]) -> dict[str, Array]:
        """Return runs as a device's chunks: the way back from `enter`."""
        if not self.zigzag:
            return {name: array[0] for name, array in runs.items()}
        halves = {name: self._in_order(array) for name, array in runs.items()}
        received = self.queries.mirror({name: second for name, (_, second) in halves.items()})
        joined = lambda name: jnp.concatenate([halves[name][0], received[name]], _SEQUENCE_AXIS[name])
        return {name: joined(name) for name in runs}

    def _in_order(self, halves: Array) -> Array:
        """Return the halves, earlier one first.

        The second half of the devices keeps the later of its halves, and so has them the other way round.
        """
        in_order = 2 * self.queries.own < self.queries.count
        return lax.select(jnp.broadcast_to(in_order, halves.shape), halves, halves[::-1])

    def first(self, device: Int[Array, ""] | int, run: Int[Array, ""] | int, length: int) -> Int[Array, ""]:
        """Return where in its sequence a run of a device's chunk of `length` begins."""
        if not self.zigzag:
            return jnp.asarray(device * length, jnp.int32)
        low = self._low(device)
        return jnp.where(run == 0, low, 2 * self.queries.count - 1 - low) * (length // 2)

    def _low(self, device: Int[Array, ""] | int) -> Int[Array, ""]:
        """Return the earlier of a device's halves in a zigzag; the other is as far from the end."""
        return jnp.minimum(2 * device, 2 * self.queries.count - 1 - 2 * device)

    def pairs(self, step: Int[Array, ""] | int, source: Int[Array, ""] | int) -> list[Pair]:
        """Return which runs of this device's queries see which runs of the keys of `source`."""
        if not self.zigzag:
            return [Pair(0, 0, all_visible=self.call.bounds == (None, None))]
        if isinstance(step, int) and step == 0:
            return [Pair(0, 0, same=True), Pair(1, 1, same=True), Pair(1, 0, all_visible=True)]
        # Late queries see all early keys. Of two devices, the one with the earlier early half has the later late half:
        # so either its late queries see the other's late keys, or its early queries see the other's early keys.
        both = jnp.where(self._low(source) < self._low(self.queries.own), 0, 1)
        return [Pair(1, 0, all_visible=True), Pair(both, both, all_visible=True)]


def in_shard_map(call: Spec) -> SequenceSplit | None:
    """Return how the sequences of one device's part of a `shard_map` are split; `None`: not at all."""
    if not call.sequence_axes:
        return None
    ring = Ring(call.sequence_axes, lax.axis_size(call.sequence_axes))
    lengths = dict(query_length=call.query_length * ring.count, key_length=call.key_length * ring.count)
    return SequenceSplit(dataclasses.replace(call, **lengths), ring, ring)
