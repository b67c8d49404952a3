"""One device's part of a call whose sequences are split over devices.

A device has a chunk of the queries and a chunk of the keys. It calls the backend for its queries and each chunk of keys
as if there were no others, with the offset and the lengths that make positions come out right, and merges what the
calls give by their log-sum-exps.

Where queries and keys are split over the same devices, keys and values go round the ring of devices (Ring Attention,
arXiv:2310.01889). Each step is sent while the one before is computed. In the backward their gradients go round with
them, so that memory does not grow with the number of devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jflash import _primitive
from jflash._mesh import varying_alike
from jflash._ring import CUT_AS_USED, Pair, SequenceSplit
from jflash._semantics import online_softmax, visibility
from jflash._semantics.spec import KEYS_AXIS, QUERIES_AXIS, Operands, Residuals, Results, Spec
from jflash._semantics.tile import Parameters, in_range

Attend = Callable[[Spec, Operands], Results]
"""A function that attends with one chunk of queries to one chunk of keys."""


class Backend(Protocol):
    """The functions of a backend, as in `_dispatch`."""

    def forward(self, spec: Spec, operands: Operands, /) -> Any: ...
    def backward(self, spec: Spec, operands: Operands, residuals: Residuals, /) -> Operands: ...


def forward(backend: Backend, split: SequenceSplit, operands: Operands) -> Results:
    """Return the results for this device's rows."""
    return _forward(lambda spec, part: Results(*backend.forward(spec, part)), split, operands)


def tangent(attend: Attend, split: SequenceSplit, operands: Operands, tangents: Operands) -> Results:
    """Return the tangents of the results for this device's rows.

    `attend` has tangents of its own; JAX knows the tangents of what is done with its results.
    """
    return _primitive.tangents_of(lambda whole: _forward(attend, split, whole), (operands,), (tangents,))


def _forward(attend: Attend, split: SequenceSplit, operands: Operands) -> Results:
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
    """Return the gradients: complete for this device's chunks, and this device's part of the sum for arrays that are
    shared."""
    spec = split.call.resized(operands)
    sees = jnp.swapaxes(residuals.lse > -jnp.inf, 1, 2)
    residuals = residuals._replace(d_out=visibility.of_seeing_rows(split.call, residuals.d_out, sees))
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
    """Return the runs that go with queries, and those that go with keys."""
    names = [name for name in (*QUERIES_AXIS, *KEYS_AXIS) if name not in CUT_AS_USED]
    present = {name: array for name in names if (array := arrays.get(name)) is not None}
    runs = split.enter(present)
    of = lambda axes: {name: run for name, run in runs.items() if name in axes}
    return of(QUERIES_AXIS), of(KEYS_AXIS)


def _around(split: SequenceSplit, keys: dict[str, Array], sums: Any, visit: Callable[..., Any]) -> tuple[Any, Any]:
    """Call `visit` on the keys of each step. What it gives for keys is summed and comes home to their device."""
    if not split.ring:
        return visit(0, split.keys.own, keys, sums)
    ring, first, last = split.queries, split.steps.start, split.steps.stop - 1
    source = lambda step: (ring.own - step) % ring.count
    add = functools.partial(jax.tree.map, jnp.add)
    keys = ring.shift(keys, first)
    # Keys are sent on before they are used, to travel while the device computes. The sums travel with them.
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
    """Return the call of one run of queries with one run of keys."""
    query_length, key_length = split.lengths
    first_query = split.first(split.queries.own, pair.queries, query_length)
    first_key = split.first(source, pair.keys, key_length)
    query_count, key_count = queries["query"].shape[1], keys["key"].shape[1]
    # Any int32 may be given, and must not wrap.
    inside = lambda lengths, first, most: (
        None if lengths is None else jnp.clip(jnp.maximum(lengths, 0) - first, 0, most)
    )
    offset = in_range(spec, "query_offset", operands.query_offset) if spec.query_offset is None else spec.query_offset
    # An offset that is known before the call makes better kernels.
    static = pair.same and spec.query_offset is not None
    static = static or (pair.all_visible and operands.alibi_slopes is None)
    if not static:
        assert offset is not None
        offset = jnp.reshape(offset + (first_query - first_key), -1)
    indexed = spec.score_mod is not None or spec.mask_mod is not None or spec.dropout_rate > 0
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
        spec.resized(part), query_offset=static_offset, partial=True, sequence_axes=(), same_segments=False, **bounds
    ), part


def _columns(array: Array | None, first: Int[Array, ""], count: int) -> Array | None:
    """Return the part of a bias or mask that belongs to some keys."""
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
    """Return the results over two chunks of keys from those over each."""
    lse = _log_sum(jnp.stack([one.lse, other.lse]))
    weighted = lambda part: part.out * _by_row(_weight(part.lse, lse))
    return Results(weighted(one) + weighted(other), lse)


def _log_sum(parts: Float[Array, "parts *rows"]) -> Float[Array, "*rows"]:
    """Return log(sum(exp(parts))), whose derivatives of every order are finite where all parts are -inf."""
    largest = lax.stop_gradient(online_softmax.finite_or_zero(parts.max(axis=0)))
    total = jnp.exp(parts - largest).sum(axis=0)
    return jnp.where(total == 0, -jnp.inf, largest + jnp.log(jnp.where(total == 0, 1, total)))


def _weight(part: Float[Array, "*rows"], whole: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return the share that a part of the keys has in a row's probabilities."""
    return jnp.where(whole == -jnp.inf, 0, jnp.exp(part - online_softmax.finite_or_zero(whole)))


def _by_row(array: Float[Array, "*run B N T"]) -> Float[Array, "*run B T N 1"]:
    return jnp.swapaxes(array, -1, -2)[..., None]


def _shared(spec: Spec, operands: Operands) -> list[str]:
    """Return the operands whose gradient every pair adds to."""
    return [name for name in Parameters._fields if name in spec.operands - spec.undifferentiated]


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
    # Without this, every device that has the same queries would count them.
    counted = ~empty & jnp.asarray(split.ring or split.keys.own == 0)
    weighted = jnp.einsum("btnd,btnd->bnt", wide(residuals.d_out), wide(residuals.out))
    delta = jnp.where(counted, weighted - residuals.d_lse, 0)
    return online_softmax.sinks_gradient(operands.sinks, jnp.where(empty, jnp.inf, residuals.lse), delta)
