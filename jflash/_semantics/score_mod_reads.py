"""What a `score_mod` reads of the arrays that it closes over: one number at a time, at an index known before the logit.

    score_mod(logit, batch, head, query, key) = rest(logit, batch, head, query, key, array_0[index_0], ...)

A kernel loads the numbers of a tile, and then does the rest elementwise. A number that positions have no part in is one
for all of a tile, and its gradient a sum over a head's logits. Others are gathered from a table, which has to stay in
the multiprocessor's cache, and their gradients are sums by index.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jflash._semantics import program
from jflash._semantics.score_mod import ScoreMod, values_of_64_bits
from jflash._semantics.spec import Spec

MOST_BYTES = 64 * 1024
"""The most that a table may have."""

_DTYPES = (jnp.float32, jnp.int32, jnp.bool_)
_ARGUMENTS = ("logit", "batch", "head", "query", "key")
_POSITIONS = frozenset({"query", "key"})


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of an array: where it begins and how long it is along each axis, and which axes it still has."""

    array: int
    shape: tuple[int, ...]
    """The whole array's."""
    starts: tuple[Any, ...]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]

    def sliced(self, starts: Sequence[Any], sizes: Sequence[int], plus: Callable[[Any, Any, int], Any]) -> Slice:
        """Return a slice of it; `plus` adds an index, which must not exceed a number, to a start."""
        all_starts, all_sizes = list(self.starts), list(self.sizes)
        for axis, start, size in zip(self.axes, starts, sizes, strict=True):
            all_starts[axis] = plus(all_starts[axis], start, all_sizes[axis] - size)
            all_sizes[axis] = size
        return dataclasses.replace(self, starts=tuple(all_starts), sizes=tuple(all_sizes))

    def squeezed(self, dimensions: Sequence[int]) -> Slice:
        """Return it without some of the axes that it has."""
        return dataclasses.replace(self, axes=tuple(a for i, a in enumerate(self.axes) if i not in dimensions))


class _Evaluation(NamedTuple):
    """What is made of a score_mod's program, equation by equation."""

    compute: program.Rule
    """Evaluates an equation between numbers."""
    plus: Callable[[Any, Any, int], Any]
    """Adds an index to a start, as for `Slice.sliced`."""
    read: Callable[[Slice], Any]
    """Evaluates a slice that is one number."""
    refuse: Callable[[Any], list[Any]]
    """Evaluates an equation that does something else with an array."""

    def of(self, score_mod: ScoreMod, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a score_mod's program."""
        whole = lambda at, array: Slice(at, array.shape, (0,) * array.ndim, array.shape, tuple(range(array.ndim)))
        arrays = list(map(whole, itertools.count(), score_mod.jaxpr.consts))
        return self._program(score_mod.jaxpr.jaxpr, arrays, arguments)

    def _program(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        rule = lambda equation, inputs: self._numbers(self._results(equation, inputs))
        return program.evaluate(jaxpr, self._numbers(consts), arguments, rule)

    def _numbers(self, values: Sequence[Any]) -> list[Any]:
        return [self.read(value) if isinstance(value, Slice) and not value.axes else value for value in values]

    def _results(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        operation, params = equation.primitive.name, equation.params
        if operation in ("jit", "pjit") and all(jnp.ndim(const) == 0 for const in params["jaxpr"].consts):
            return self._program(params["jaxpr"].jaxpr, params["jaxpr"].consts, inputs)
        first, *others = inputs or [None]
        if operation not in ("jit", "pjit") and not any(isinstance(value, Slice) for value in inputs):
            return self.compute(equation, inputs)
        if isinstance(first, Slice) and operation == "dynamic_slice":
            return [first.sliced(others, params["slice_sizes"], self.plus)]
        if isinstance(first, Slice) and operation == "slice" and params["strides"] is None:
            starts, stops = params["start_indices"], params["limit_indices"]
            return [first.sliced(starts, [b - a for a, b in zip(starts, stops, strict=True)], self.plus)]
        if isinstance(first, Slice) and operation == "squeeze":
            return [first.squeezed(params["dimensions"])]
        return self.refuse(equation)


class Read(NamedTuple):
    """One number of an array that a score_mod reads."""

    place: int
    """Its place among all reads."""
    array: int
    by_position: bool
    """Whether its index depends on query or key."""

    @property
    def name(self) -> str:
        """Its name as a parameter of logits."""
        return read_name(self.place)


def read_name(place: int) -> str:
    """Return the name that a read has as a parameter of logits."""
    return f"read_{place}"


def array_name(index: int) -> str:
    """Return the name that an array has among a kernel's."""
    return f"score_mod_{index}"


def reads(spec: Spec) -> tuple[Read, ...]:
    """Return all that a call's score_mod reads of its arrays."""
    return () if spec.score_mod is None else _analysis(spec.score_mod)[0]


@functools.lru_cache(maxsize=64)
def _analysis(score_mod: ScoreMod) -> tuple[tuple[Read, ...], str | None]:
    """Return what is read, and why it cannot be."""
    found: list[Read] = []
    reasons: list[str] = []
    # A value here is the names of what it depends on.
    join = lambda *values: frozenset[str]().union(*(value for value in values if isinstance(value, frozenset)))

    def read(part: Slice) -> frozenset[str]:
        needs = join(*part.starts)
        if "logit" in needs:
            reasons.append("reads an array at an index that depends on the logit")
        if "array" in needs:
            reasons.append("reads an array at an index that it read from another")
        found.append(Read(len(found), part.array, not needs.isdisjoint(_POSITIONS)))
        return needs | {"array"}

    def refuse(equation: Any) -> list[Any]:
        reasons.append(f"does something else with an array than to take one number by its index: {equation.primitive}")
        return [frozenset[str]()] * len(equation.outvars)

    def compute(equation: Any, inputs: list[Any]) -> list[Any]:
        # Where indices are computed, all else is traced beside them, and Mosaic GPU lowers no such call.
        if score_mod.jaxpr.consts and equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            reasons.append("closes over arrays and calls a function with a derivative of its own")
        return [join(*inputs)] * len(equation.outvars)

    evaluation = _Evaluation(compute, lambda start, index, _: join(start, index), read, refuse)
    evaluation.of(score_mod, [frozenset({name}) for name in _ARGUMENTS])
    for one in found:
        array = score_mod.jaxpr.consts[one.array]
        if array.dtype not in _DTYPES:
            reasons.append(f"reads an array of {array.dtype}")
        if one.by_position and 4 * math.prod(array.shape) > MOST_BYTES:
            reasons.append(f"reads by position an array of more than {MOST_BYTES // 1024} KiB in float32")
    wide = values_of_64_bits(score_mod.jaxpr.jaxpr)
    reasons += [f"computes in {value.aval.dtype}; x.astype(logit.dtype) makes fewer bits of an x" for value in wide]
    return tuple(found), reasons[0] if reasons else None


def unsupported(spec: Spec) -> str | None:
    """Return why kernels cannot take a call's `score_mod`, in words for the user; `None` if they can."""
    if spec.score_mod is None:
        return None
    if (reason := _analysis(spec.score_mod)[1]) is not None:
        return f"it takes no score_mod that {reason}."
    if spec.deterministic and tables(spec):
        return (
            "with deterministic=True it takes no score_mod that reads by position: its gradient is summed in any order."
        )
    return None


def smooth(spec: Spec) -> list[Read]:
    """Return what is read of arrays that have a gradient."""
    if spec.score_mod is None:
        return []
    dtypes = [array.dtype for array in spec.score_mod.jaxpr.consts]
    return [read for read in reads(spec) if jnp.issubdtype(dtypes[read.array], jnp.inexact)]


def summed(spec: Spec) -> list[Read]:
    """Return the reads whose gradients are sums over positions."""
    return [read for read in smooth(spec) if not read.by_position]


def of_tables(spec: Spec) -> list[Read]:
    """Return the reads whose gradients are sums by index."""
    return [read for read in smooth(spec) if read.by_position]


def tables(spec: Spec) -> dict[str, int]:
    """Return how many numbers each array has that is read by position and whose gradient is asked for, by name."""
    if spec.score_mod is None or "score_mod_arrays" in spec.undifferentiated:
        return {}
    shapes = [array.shape for array in spec.score_mod.jaxpr.consts]
    return {array_name(read.array): math.prod(shapes[read.array]) for read in of_tables(spec)}


def indices(score_mod: ScoreMod, batch: Any, head: Any, query: Any, key: Any, key_minus_query: Any) -> list[Any]:
    """Return where in its flat array each read is, for one logit."""
    found: list[Any] = []

    def read(part: Slice) -> Any:
        strides = [math.prod(part.shape[axis + 1 :]) for axis in range(len(part.shape))]
        found.append(sum((start * stride for start, stride in zip(part.starts, strides, strict=True)), jnp.int32(0)))
        return jnp.zeros((), score_mod.jaxpr.consts[part.array].dtype)

    logit = jnp.zeros((), score_mod.jaxpr.jaxpr.invars[0].aval.dtype)
    values(score_mod, read, [logit, batch, head, query, key], key_minus_query)
    return found


def values(
    score_mod: ScoreMod, read: Callable[[Slice], Any], arguments: Sequence[Any], key_minus_query: Any
) -> list[Any]:
    """Return the results of a score_mod's program.

    Args:
      read: gives one number of an array.
      arguments: the logit, and the indices of batch entry, head, query and key.
      key_minus_query: the difference of the last two. The compiler sees which elements of a tile have one difference,
        and makes once what follows from it.
    """
    query, key = score_mod.jaxpr.jaxpr.invars[-2:]

    def compute(equation: Any, inputs: list[Any]) -> Sequence[Any]:
        if equation.primitive.name == "sub":
            left, right = equation.invars
            if left is key and right is query:
                return [key_minus_query]
            if left is query and right is key:
                return [-key_minus_query]
        return program.apply(equation, inputs)

    def refuse(equation: Any) -> list[Any]:
        raise AssertionError(equation)

    plus = lambda start, index, most: start + lax.clamp(jnp.int32(0), jnp.asarray(index, jnp.int32), jnp.int32(most))
    return _Evaluation(compute, plus, read, refuse).of(score_mod, arguments)
