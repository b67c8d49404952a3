"""A call cut in parts, each of some queries and some keys, and the whole call's results from those of the parts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle
from hopper_kernels import canonical
from plain_attention import Call, Results

from jflash._semantics.spec import Operands, Residuals, Spec

Forward = Callable[[Spec, Operands], Any]
Backward = Callable[[Spec, Operands, Residuals], Operands]

_OF_QUERIES = {"query": 1, "query_segments": 1, "bias": 2, "mask": 2}
_OF_KEYS = {"key": 1, "value": 1, "key_segments": 1, "bias": 3, "mask": 3}
"""The axis of each operand that has queries, or keys, unless the operand shares it."""


def run(call: Call, forward: Forward, backward: Backward, **options: object) -> Results:
    """The whole call's results, where queries and keys are cut in two; without cotangents the forward's alone."""
    spec, operands = canonical(call, **options)
    batch = call.query.shape[:-3]
    flat = lambda array: np.asarray(array).reshape(spec.batch, *array.shape[len(batch) :])
    accumulator = spec.accumulator
    out = np.zeros((spec.batch, spec.query_length, spec.heads, spec.value_dim), accumulator)
    lse = np.full((spec.batch, spec.heads, spec.query_length), -np.inf, accumulator)
    for rows, columns in _halves(spec):
        found = forward(*_part(spec, operands, rows, columns))
        assert [array.dtype for array in found] == [accumulator, accumulator]
        out[:, rows], lse[..., rows] = _merged((out[:, rows], lse[..., rows]), tuple(map(np.asarray, found)))
    rounded = out.astype(spec.dtype)
    in_own_shape = rounded.reshape(*batch, *out.shape[1:]), lse.transpose(0, 2, 1).reshape(*batch, *out.shape[1:3])
    if call.d_out is None:
        return Results(*in_own_shape, {})
    residuals = Residuals(rounded, lse, flat(call.d_out), flat(call.d_lse).transpose(0, 2, 1))
    smooth = oracle.split(call)[0]
    sums = {name: np.zeros(getattr(operands, name).shape, accumulator) for name in smooth}
    for rows, columns in _halves(spec):
        of_rows = Residuals(*(array[:, rows] if array.ndim == 4 else array[..., rows] for array in residuals))
        found = backward(*_part(spec, operands, rows, columns), of_rows)
        for name, total in sums.items():
            gradient = getattr(found, name)
            assert gradient.dtype == accumulator, name
            total[_place(name, total, rows, columns)] += gradient
    gradients = {name: sums[name].reshape(array.shape).astype(array.dtype) for name, array in smooth.items()}
    return Results(*in_own_shape, gradients)


def _halves(spec: Spec) -> Iterator[tuple[slice, slice]]:
    cut = lambda length: (slice(0, length // 2), slice(length // 2, length))
    return itertools.product(cut(spec.query_length), cut(spec.key_length))


def _place(name: str, array: Any, rows: slice, columns: slice) -> tuple[slice, ...]:
    """Return where an operand of the whole call has a part's numbers."""
    place = [slice(None)] * array.ndim
    for axes, some in ((_OF_QUERIES, rows), (_OF_KEYS, columns)):
        axis = axes.get(name)
        if axis is not None and array.shape[axis] > 1:
            place[axis] = some
    return tuple(place)


def _part(spec: Spec, operands: Operands, rows: slice, columns: slice) -> tuple[Spec, Operands]:
    """The call of these queries with these keys as if there were no others."""
    given = {name: array for name, array in operands._asdict().items() if name in {**_OF_QUERIES, **_OF_KEYS}}
    cut = {name: array[_place(name, array, rows, columns)] for name, array in given.items() if array is not None}
    first_query, first_key = (jnp.full((1,), some.start, jnp.int32) for some in (rows, columns))
    offset = spec.query_offset if operands.query_offset is None else operands.query_offset

    def lengths(of_all: Any, some: slice) -> Any:
        return None if of_all is None else jnp.clip(of_all - some.start, 0, some.stop - some.start)

    part = operands._replace(
        **cut,
        query_offset=offset + first_query - first_key,
        query_lengths=lengths(operands.query_lengths, rows),
        key_lengths=lengths(operands.key_lengths, columns),
        first_query=first_query,
        first_key=first_key,
    )
    return dataclasses.replace(spec.resized(part), query_offset=None, partial=True), part


def _merged(*parts: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp over the keys of all parts."""
    lse = functools.reduce(np.logaddexp, (lse for _, lse in parts))
    finite = np.where(lse == -np.inf, 0, lse)
    weigh = lambda out, of_part: out * np.exp(of_part - finite).swapaxes(1, 2)[..., None]
    return sum(weigh(*part) for part in parts), lse
