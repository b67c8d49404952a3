"""One device's part of a call whose sequences are split over devices.

A device has a chunk of the queries and a chunk of the keys. It calls the backend for its queries and each chunk of keys
as if there were no others, with the offset and the lengths that make positions come out right, and merges what the
calls give by their log-sum-exps.

Where queries and keys are split over the same devices, keys and values go round the ring of devices (Ring Attention,
arXiv:2310.01889). Each step is sent while the one before is computed. In the backward their gradients go round with
them, so that memory does not grow with the number of devices.

Where causality would leave the first devices idle, each device trades the second half of its chunk for that of its
mirror image among the devices (zigzag). Then it has a half from either end of the sequence, and all devices have the
same to do at every step. Halves are traded at the entry and back at the exit: callers see none of it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jflash import _operation
from jflash._mesh import varying_alike
from jflash._semantics import online_softmax
from jflash._semantics.spec import Operands, Residuals, Results, Spec

_QUERIES_AXIS = {"query": 1, "query_segments": 1, "out": 1, "lse": 2, "d_out": 1, "d_lse": 2}
"""Where the arrays that go with the queries have them. A bias or mask goes with no chunk: it is cut as it is used."""
_KEYS_AXIS = {"key": 1, "value": 1, "key_segments": 1}
_AXES = _QUERIES_AXIS | _KEYS_AXIS


class Backend(Protocol):
    """The functions of a backend, as in `_dispatch`."""

    def forward(self, spec: Spec, operands: Operands, /) -> Any: ...
    def tangent(self, spec: Spec, operands: Operands, results: Results, tangents: Operands, /) -> Results: ...
    def backward(self, spec: Spec, operands: Operands, residuals: Residuals, /) -> Operands: ...


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
        """All arrays sent `by` devices on."""
        if by % self.count == 0:
            return arrays
        return self._send(arrays, [(device, (device + by) % self.count) for device in range(self.count)])

    def mirror(self, arrays: Any) -> Any:
        """All arrays traded with the mirror image of this device."""
        return self._send(arrays, [(device, self.count - 1 - device) for device in range(self.count)])

    def _send(self, arrays: Any, pairs: list[tuple[int, int]]) -> Any:
        """One message for each dtype: of several, XLA lets one run beside the kernels and waits for the others."""
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
    """A run of a device's queries and a run of a device's keys: the whole chunk, or in a zigzag one of two halves."""

    queries: Int[Array, ""] | int
    keys: Int[Array, ""] | int
    same: bool = False
    """Whether both are the same part of the sequence."""
    all_visible: bool = False
    """Whether causality and windows let every query see every key."""


@dataclasses.dataclass(frozen=True)
class SequenceSplit:
    """How the sequences of a call are split."""

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
        """How many devices back the keys of each step come from; negative: on. Only those that some query sees."""
        count, bounds, offset = self.queries.count, self.call.bounds, self.call.query_offset
        if not self.ring:
            return range(1)
        queries, keys = self.lengths
        if self.zigzag or offset is None or queries != keys:
            return range(count)

        def seen(distance: int) -> bool:
            """Whether some query sees a chunk so many chunks before its own."""
            (left, right), position = bounds, distance * keys + offset
            return (left is None or position - left < keys) and (right is None or position + queries + right > 0)

        distances = [distance for distance in range(1 - count, count) if seen(distance)]
        # Of two distances that are the same way round the ring, one will do.
        return range(distances[0], distances[0] + min(len(distances), count)) if distances else range(1)

    @property
    def lengths(self) -> tuple[int, int]:
        """How many queries and keys a device has."""
        return self.call.query_length // self.queries.count, self.call.key_length // self.keys.count

    def enter(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """A device's chunks as runs, along a new axis in front."""
        if not self.zigzag:
            return {name: array[None] for name, array in arrays.items()}
        halves = {name: jnp.split(array, 2, _AXES[name]) for name, array in arrays.items()}
        received = self.queries.mirror({name: second for name, (_, second) in halves.items()})
        return {name: self._in_order(jnp.stack([first, received[name]])) for name, (first, _) in halves.items()}

    def leave(self, runs: dict[str, Array]) -> dict[str, Array]:
        """The way back."""
        if not self.zigzag:
            return {name: array[0] for name, array in runs.items()}
        halves = {name: self._in_order(array) for name, array in runs.items()}
        received = self.queries.mirror({name: second for name, (_, second) in halves.items()})
        return {name: jnp.concatenate([first, received[name]], _AXES[name]) for name, (first, _) in halves.items()}

    def _in_order(self, halves: Array) -> Array:
        """The second half of the devices keeps the later of its halves, and so has them the other way round."""
        in_order = 2 * self.queries.own < self.queries.count
        return lax.select(jnp.broadcast_to(in_order, halves.shape), halves, halves[::-1])

    def first(self, device: Int[Array, ""] | int, run: Int[Array, ""] | int, length: int) -> Int[Array, ""]:
        """Where in its sequence a run of a device's chunk of `length` begins."""
        if not self.zigzag:
            return jnp.asarray(device * length, jnp.int32)
        low = self._low(device)
        return jnp.where(run == 0, low, 2 * self.queries.count - 1 - low) * (length // 2)

    def _low(self, device: Int[Array, ""] | int) -> Int[Array, ""]:
        """The earlier of a device's halves in a zigzag; the other is as far from the end."""
        return jnp.minimum(2 * device, 2 * self.queries.count - 1 - 2 * device)

    def pairs(self, step: Int[Array, ""] | int, source: Int[Array, ""] | int) -> list[Pair]:
        """Which runs of this device's queries see which runs of the keys of `source`."""
        if not self.zigzag:
            return [Pair(0, 0, all_visible=self.call.bounds == (None, None))]
        if isinstance(step, int) and step == 0:
            return [Pair(0, 0, same=True), Pair(1, 1, same=True), Pair(1, 0, all_visible=True)]
        # Late queries see all early keys. Of two devices, the one with the earlier early half has the later late half:
        # so either its late queries see the other's late keys, or its early queries see the other's early keys.
        both = jnp.where(self._low(source) < self._low(self.queries.own), 0, 1)
        return [Pair(1, 0, all_visible=True), Pair(both, both, all_visible=True)]


def in_shard_map(call: Spec) -> SequenceSplit | None:
    """How the sequences of one device's part of a `shard_map` are split; `None`: not."""
    if not call.sequence_axes:
        return None
    ring = Ring(call.sequence_axes, lax.axis_size(call.sequence_axes))
    lengths = dict(query_length=call.query_length * ring.count, key_length=call.key_length * ring.count)
    return SequenceSplit(dataclasses.replace(call, **lengths), ring, ring)


def forward(backend: Backend, split: SequenceSplit, operands: Operands) -> Results:
    """This device's rows."""
    return _forward(lambda spec, part: Results(*backend.forward(spec, part)), split, operands)


def tangent(
    backend: Backend, split: SequenceSplit, operands: Operands, results: Results, tangents: Operands
) -> Results:
    """The tangent of each pair is the backend's; JAX knows that of what is done with them."""
    del results

    def attend(spec: Spec, part: Operands) -> Results:
        @jax.custom_jvp
        def pair(part: Operands) -> Results:
            return Results(*backend.forward(spec, part))

        def with_tangent(primals: tuple[Operands], pushed: tuple[Any]) -> tuple[Results, Results]:
            made = pair(*primals)
            moved = jax.tree.map(lambda t: None if isinstance(t, SymbolicZero) else t, pushed[0])
            return made, backend.tangent(spec, *primals, made, moved)

        pair.defjvp(with_tangent, symbolic_zeros=True)
        return pair(part)

    return _operation.tangents_of(lambda whole: _forward(attend, split, whole), (operands,), (tangents,))


def _forward(attend: Callable[[Spec, Operands], Results], split: SequenceSplit, operands: Operands) -> Results:
    spec = split.call.resized(operands)
    queries, keys = _enter(split, operands._asdict())

    def visit(step: Any, source: Any, keys: dict[str, Array], sums: Results) -> tuple[Any, Results]:
        for pair in split.pairs(step, source):
            own, theirs = _at(queries, pair.queries), _at(keys, pair.keys)
            made = attend(*part_of(split, spec, operands, own, theirs, pair, source))
            merged = _merge(_at(sums, pair.queries), made)
            sums = jax.tree.map(functools.partial(_put, run=pair.queries), sums, merged)
        return (), sums

    query = queries["query"]
    nothing = Results(
        jnp.zeros((*query.shape[:-1], spec.value_dim), spec.accumulator),
        jnp.full((*query.shape[:2], spec.heads, query.shape[2]), -jnp.inf, spec.accumulator),
    )
    _, (out, lse) = _around(split, keys, varying_alike(nothing, like=operands), visit)
    if not split.ring and split.keys.count > 1:
        total = _log_sum(lax.all_gather(lse, split.keys.axes))
        out, lse = lax.psum(out * _by_row(_weight(lse, total)), split.keys.axes), total
    if operands.sinks is not None:
        sinks = jnp.broadcast_to(operands.sinks[None, :, :, None].astype(lse.dtype), lse.shape)
        total = jnp.where(lse == -jnp.inf, lse, _log_sum(jnp.stack([lse, sinks])))
        out, lse = out * _by_row(_weight(lse, total)), total
    return Results(**split.leave({"out": out.astype(spec.dtype), "lse": lse}))


def backward(backend: Backend, split: SequenceSplit, operands: Operands, residuals: Residuals) -> Operands:
    """The gradients: complete for this device's chunks, for what devices share this device's part of a sum."""
    spec = split.call.resized(operands)
    queries, keys = _enter(split, operands._asdict() | residuals._asdict())
    zeros = lambda array: varying_alike(jnp.zeros(array.shape, spec.accumulator), like=operands)
    asked = [name for name in ("key", "value") if name not in spec.undifferentiated]

    def visit(step: Any, source: Any, keys: dict[str, Array], sums: Any) -> tuple[dict[str, Array], Any]:
        d_query, d_shared = sums
        d_keys = {name: zeros(keys[name]) for name in asked}
        for pair in split.pairs(step, source):
            own = _at(queries, pair.queries)
            part_spec, part = part_of(split, spec, operands, own, _at(keys, pair.keys), pair, source)
            found = backend.backward(part_spec, part, Residuals(**{name: own[name] for name in Residuals._fields}))
            if d_query is not None:
                d_query = _add(d_query, found.query, pair.queries)
            d_keys = {name: _add(d_keys[name], getattr(found, name), pair.keys) for name in asked}
            first_key = split.first(source, pair.keys, split.lengths[1])
            d_shared = {name: _add_shared(name, total, found, first_key) for name, total in d_shared.items()}
        return d_keys, (d_query, d_shared)

    d_shared = {name: jax.tree.map(zeros, getattr(operands, name)) for name in _shared(spec, operands)}
    d_query = None if "query" in spec.undifferentiated else zeros(queries["query"])
    d_keys, (d_query, d_shared) = _around(split, keys, (d_query, d_shared), visit)
    runs = d_keys if d_query is None else {"query": d_query, **d_keys}
    typed = lambda gradient, like: gradient.astype(like.dtype)
    absent: dict[str, Any] = dict.fromkeys(("query", "key", "value"))
    return Operands(
        **absent | split.leave({name: run.astype(spec.dtype) for name, run in runs.items()}),
        **{name: jax.tree.map(typed, total, getattr(operands, name)) for name, total in d_shared.items()},
        sinks=_sinks_gradient(split, spec, operands, residuals),
    )


def _enter(split: SequenceSplit, arrays: dict[str, Array | None]) -> tuple[dict[str, Array], dict[str, Array]]:
    """The runs that go with queries, and with keys."""
    present = {name: array for name in _AXES if (array := arrays.get(name)) is not None}
    runs = split.enter(present)
    of = lambda axes: {name: run for name, run in runs.items() if name in axes}
    return of(_QUERIES_AXIS), of(_KEYS_AXIS)


def _around(split: SequenceSplit, keys: dict[str, Array], sums: Any, visit: Callable[..., Any]) -> tuple[Any, Any]:
    """`visit` the keys of each step. What it gives for keys is summed and comes home to their device."""
    if not split.ring:
        return visit(0, split.keys.own, keys, sums)
    ring, first, last = split.queries, split.steps.start, split.steps.stop - 1
    source = lambda step: (ring.own - step) % ring.count
    add = functools.partial(jax.tree.map, jnp.add)
    keys = ring.shift(keys, first)
    # Keys are sent on before they are used, to travel while the device computes; and so are the sums.
    following = ring.shift(keys, 1) if last > first else keys
    of_keys, sums = visit(first, source(first), keys, sums)

    def body(carry: Any, step: Int[Array, ""]) -> Any:
        keys, of_keys, sums = carry
        following, of_keys = ring.shift((keys, of_keys), 1)
        more, sums = visit(step, source(step), keys, sums)
        return (following, add(of_keys, more), sums), None

    if last > first:
        carry = following, of_keys, sums
        if last > first + 1:
            carry, _ = lax.scan(body, carry, jnp.arange(first + 1, last, dtype=jnp.int32))
        keys, of_keys, sums = carry
        more, sums = visit(last, source(last), keys, sums)
        of_keys = add(ring.shift(of_keys, 1), more)
    return ring.shift(of_keys, -last), sums


def part_of(
    split: SequenceSplit,
    spec: Spec,
    operands: Operands,
    queries: dict[str, Array],
    keys: dict[str, Array],
    pair: Pair,
    source: Int[Array, ""] | int,
) -> tuple[Spec, Operands]:
    """The call of one run of queries with one run of keys."""
    query_length, key_length = split.lengths
    first_query = split.first(split.queries.own, pair.queries, query_length)
    first_key = split.first(source, pair.keys, key_length)
    query_count, key_count = queries["query"].shape[1], keys["key"].shape[1]
    inside = lambda lengths, first, most: None if lengths is None else jnp.clip(lengths - first, 0, most)
    offset = operands.query_offset if spec.query_offset is None else spec.query_offset
    # What is known before the call makes better kernels.
    static = pair.same and spec.query_offset is not None
    static = static or (pair.all_visible and operands.alibi_slopes is None)
    if not static:
        assert offset is not None
        offset = jnp.reshape(offset + (first_query - first_key), -1)
    indexed = spec.score_mod is not None or spec.dropout_rate > 0
    part = operands._replace(
        **{name: queries[name] for name in ("query", "query_segments") if name in queries},
        **keys,
        bias=_columns(operands.bias, first_key, key_count),
        mask=_columns(operands.mask, first_key, key_count),
        sinks=None,
        query_offset=None if static else offset,
        query_lengths=inside(operands.query_lengths, first_query, query_count),
        key_lengths=inside(operands.key_lengths, first_key, key_count),
        first_query=first_query[None] if indexed else None,
        first_key=first_key[None] if indexed else None,
    )
    bounds: dict[str, Any] = dict(is_causal=False, window=None) if pair.all_visible else {}
    static_offset = (spec.query_offset if pair.same else 0) if static else None
    return dataclasses.replace(
        spec.resized(part), query_offset=static_offset, partial=True, sequence_axes=(), **bounds
    ), part


def _columns(array: Array | None, first: Int[Array, ""], count: int) -> Array | None:
    """A bias or mask of some keys."""
    if array is None or array.shape[3] == 1:
        return array
    return lax.dynamic_slice_in_dim(array, first, count, 3)


def _at(arrays: Any, run: Int[Array, ""] | int) -> Any:
    return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, run, 0, keepdims=False), arrays)


def _put(array: Array, part: Array, run: Int[Array, ""] | int) -> Array:
    return lax.dynamic_update_index_in_dim(array, part, run, 0)


def _add(total: Array, part: Array, run: Int[Array, ""] | int) -> Array:
    return _put(total, _at(total, run) + part, run)


def _merge(one: Results, other: Results) -> Results:
    """The results over two chunks of keys from those over each."""
    lse = _log_sum(jnp.stack([one.lse, other.lse]))
    weighted = lambda part: part.out * _by_row(_weight(part.lse, lse))
    return Results(weighted(one) + weighted(other), lse)


def _log_sum(parts: Float[Array, "parts *rows"]) -> Float[Array, "*rows"]:
    """log(sum(exp(parts))), and with it every derivative finite where all parts are -inf."""
    largest = lax.stop_gradient(online_softmax.finite_or_zero(parts.max(axis=0)))
    total = jnp.exp(parts - largest).sum(axis=0)
    return jnp.where(total == 0, -jnp.inf, largest + jnp.log(jnp.where(total == 0, 1, total)))


def _weight(part: Float[Array, "*rows"], whole: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """What a part of the keys has of a row's probabilities."""
    return jnp.where(whole == -jnp.inf, 0, jnp.exp(part - online_softmax.finite_or_zero(whole)))


def _by_row(array: Float[Array, "*run B N T"]) -> Float[Array, "*run B T N 1"]:
    return jnp.swapaxes(array, -1, -2)[..., None]


def _shared(spec: Spec, operands: Operands) -> list[str]:
    """The operands whose gradient every pair adds to."""
    names = ("bias", "scale", "alibi_slopes", "score_mod_arrays")
    return [name for name in names if name in spec.operands - spec.undifferentiated]


def _add_shared(name: str, total: Any, found: Operands, first_key: Int[Array, ""]) -> Any:
    part = getattr(found, name)
    if name != "bias" or total.shape[3] == 1:
        return jax.tree.map(lambda total, part: total if part is None else total + part, total, part)
    here = lax.dynamic_slice_in_dim(total, first_key, part.shape[3], 3) + part
    return lax.dynamic_update_slice_in_dim(total, here, first_key, 3)


def _sinks_gradient(split: SequenceSplit, spec: Spec, operands: Operands, residuals: Residuals) -> Array | None:
    if operands.sinks is None:
        return None
    wide = lambda array: array.astype(spec.accumulator)
    empty = residuals.lse == -jnp.inf
    # Devices that have the same queries would each count them.
    counted = ~empty & jnp.asarray(split.ring or split.keys.own == 0)
    weighted = jnp.einsum("btnd,btnd->bnt", wide(residuals.d_out), wide(residuals.out))
    delta = jnp.where(counted, weighted - residuals.d_lse, 0)
    return online_softmax.sinks_gradient(operands.sinks, jnp.where(empty, jnp.inf, residuals.lse), delta)
