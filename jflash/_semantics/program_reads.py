"""What a user's function of scalars reads of the arrays that it closes over: one number at a time, by an index.

    f(logit, batch, head, query, key) = rest(logit, batch, head, query, key, array_0[index_0], array_1[index_1], ...)

A kernel loads the numbers of a tile, and then does the rest elementwise. `score_mod` is such a function, and so is
`mask_mod`, which has no logit.
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
from jflash._semantics.mask_mod import MaskMod
from jflash._semantics.score_mod import ScoreMod

Function = ScoreMod | MaskMod

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
    """What is made of a function's program, equation by equation."""

    compute: program.Rule
    """Evaluates an equation between numbers."""
    plus: Callable[[Any, Any, int], Any]
    """Adds an index to a start, as for `Slice.sliced`."""
    read: Callable[[Slice], Any]
    """Evaluates a slice that is one number."""
    refuse: Callable[[Any], list[Any]]
    """Evaluates an equation that does something else with an array."""

    def of(self, function: Function, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a function's program."""
        whole = lambda at, array: Slice(at, array.shape, (0,) * array.ndim, array.shape, tuple(range(array.ndim)))
        arrays = list(map(whole, itertools.count(), function.jaxpr.consts))
        return self._program(function.jaxpr.jaxpr, arrays, arguments)

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
    """One number of an array that a function reads."""

    place: int
    """Its place among all reads."""
    array: int
    needs: frozenset[str]
    """The names of the arguments on which its index depends, and `array` if it depends on another read."""

    @property
    def by_position(self) -> bool:
        """Whether its index depends on query or key."""
        return not self.needs.isdisjoint(_POSITIONS)

    @property
    def name(self) -> str:
        """Its name as a parameter of logits."""
        return read_name(self.place)


def read_name(place: int) -> str:
    """Return the name that a read has as a parameter of logits."""
    return f"read_{place}"


class Analysis(NamedTuple):
    """What a function reads, and what it computes with."""

    reads: tuple[Read, ...]
    primitives: frozenset[str]
    """The names of the operations between numbers."""
    reason: str | None
    """What it does with its arrays that a kernel cannot do, in words that follow "a function that"; `None`: nothing."""


@functools.lru_cache(maxsize=64)
def analysis(function: Function) -> Analysis:
    """Return what a function reads of its arrays, and with what it computes."""
    found: list[Read] = []
    reasons: list[str] = []
    primitives: set[str] = set()
    # A value here is the names of what it depends on.
    join = lambda *values: frozenset[str]().union(*(value for value in values if isinstance(value, frozenset)))

    def read(part: Slice) -> frozenset[str]:
        found.append(Read(len(found), part.array, join(*part.starts)))
        return found[-1].needs | {"array"}

    def refuse(equation: Any) -> list[Any]:
        reasons.append(f"does something else with an array than to take one number by its index: {equation.primitive}")
        return [frozenset[str]()] * len(equation.outvars)

    def compute(equation: Any, inputs: list[Any]) -> list[Any]:
        primitives.add(equation.primitive.name)
        # Where indices are computed, all else is traced beside them, and Mosaic GPU lowers no such call.
        if function.jaxpr.consts and equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            reasons.append("closes over arrays and calls a function with a derivative of its own")
        return [join(*inputs)] * len(equation.outvars)

    evaluation = _Evaluation(compute, lambda start, index, _: join(start, index), read, refuse)
    names = _ARGUMENTS[-len(function.jaxpr.jaxpr.invars) :]
    evaluation.of(function, [frozenset({name}) for name in names])
    for one in found:
        if "logit" in one.needs:
            reasons.append("reads an array at an index that depends on the logit")
        array = function.jaxpr.consts[one.array]
        if array.dtype not in _DTYPES:
            reasons.append(f"reads an array of {array.dtype}")
    return Analysis(tuple(found), frozenset(primitives), reasons[0] if reasons else None)


def indices(
    function: Function, batch: Any, head: Any, query: Any, key: Any, key_minus_query: Any, numbers: Sequence[Any] = ()
) -> list[Any]:
    """Return where in its flat array each read is, for one element.

    An index that another read has a part in needs the `numbers` of all reads before its own.
    """
    found: list[Any] = []

    def read(part: Slice) -> Any:
        strides = [math.prod(part.shape[axis + 1 :]) for axis in range(len(part.shape))]
        found.append(sum((start * stride for start, stride in zip(part.starts, strides, strict=True)), jnp.int32(0)))
        known = len(found) <= len(numbers)
        return number(function, part, numbers[len(found) - 1]) if known else jnp.zeros((), _dtype(function, part))

    at = [batch, head, query, key]
    if isinstance(function, ScoreMod):
        at = [jnp.zeros((), function.jaxpr.jaxpr.invars[0].aval.dtype), *at]
    values(function, read, at, key_minus_query)
    return found


def values(
    function: Function, read: Callable[[Slice], Any], arguments: Sequence[Any], key_minus_query: Any
) -> list[Any]:
    """Return the results of a function's program.

    Args:
      function: the function.
      read: gives one number of an array.
      arguments: the function's: the logit, if it has one, and the indices of batch entry, head, query and key.
      key_minus_query: the difference of the last two. The compiler sees which elements of a tile have one difference,
        and makes once what follows from it.
    """
    query, key = function.jaxpr.jaxpr.invars[-2:]

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
    return _Evaluation(compute, plus, read, refuse).of(function, arguments)


def number(function: Function, part: Slice, number: Any) -> Any:
    """Return a number in the dtype of its array, where kernels have none of bool."""
    dtype = _dtype(function, part)
    return number != 0 if dtype == jnp.bool_ else jnp.asarray(number, dtype)


def _dtype(function: Function, part: Slice) -> Any:
    return function.jaxpr.consts[part.array].dtype
