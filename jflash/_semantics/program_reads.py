"""What a user's function of scalars reads of the arrays that it closes over: one number at a time, by an index.

    f(logit, batch, head, query, key) = rest(logit, batch, head, query, key, array_0[index_0], array_1[index_1], ...)

A kernel loads the numbers of a tile, and then does the rest elementwise. `score_mod` is such a function, and so is
`mask_mod`, which has no logit. A few neighbours in an array, as in `jnp.any(table[query] == key)`, are as many numbers.
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

ELEMENTWISE = frozenset({
    "abs", "add", "and", "clamp", "convert_element_type", "cos", "div", "eq", "exp", "exp2", "ge", "gt",
    "integer_pow", "le", "log", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "rem", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sqrt", "square", "sub", "tanh",
    "xor",
})  # fmt: skip
"""Operations on each number of an array."""
_FOLDS = {"reduce_or": lax.bitwise_or, "reduce_and": lax.bitwise_and, "reduce_max": lax.max, "reduce_min": lax.min}
"""Operations that make one number of an array, and what they make of two."""
_MOST_NUMBERS = 16
"""The most numbers that are evaluated one by one."""

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


class _Few(NamedTuple):
    """An array of one axis and few numbers, each of which is evaluated on its own."""

    numbers: tuple[Any, ...]


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
    fold: Callable[[Callable[..., Any], Any, Any], Any]
    """Evaluates an operation that makes one number of two."""

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
        is_scalar = not any(isinstance(value, Slice | _Few) for value in inputs) and not _has_axes(equation)
        if operation not in ("jit", "pjit") and is_scalar:
            return self.compute(equation, inputs)
        if isinstance(first, Slice) and operation == "dynamic_slice":
            return [first.sliced(others, params["slice_sizes"], self.plus)]
        if isinstance(first, Slice) and operation == "slice" and params["strides"] is None:
            starts, stops = params["start_indices"], params["limit_indices"]
            return [first.sliced(starts, [b - a for a, b in zip(starts, stops, strict=True)], self.plus)]
        if isinstance(first, Slice) and operation == "squeeze":
            return [first.squeezed(params["dimensions"])]
        few = [self._few(value) for value in inputs]
        return self.refuse(equation) if None in few else self._of_few(equation, [value for value in few if value])

    def _few(self, value: Any) -> _Few | None:
        """Return an input as a few numbers; `None` if it is an array of many, or of none, or of several axes."""
        if not isinstance(value, Slice):
            return value if isinstance(value, _Few) else _Few((value,))
        (axis, *others) = value.axes
        size = value.sizes[axis]
        if others or not 0 < size <= _MOST_NUMBERS:
            return None
        one = lambda place: value.sliced([place], [1], self.plus).squeezed([0])
        return _Few(tuple(self.read(one(place)) for place in range(size)))

    def _of_few(self, equation: Any, inputs: Sequence[_Few]) -> Sequence[Any]:
        """Evaluate an equation of few numbers."""
        operation, shape = equation.primitive.name, equation.outvars[0].aval.shape
        fold = _FOLDS.get(operation)
        if fold is not None and shape == ():
            return [functools.reduce(functools.partial(self.fold, fold), inputs[0].numbers)]
        sizes = {len(few.numbers) for few in inputs} - {1}
        if len(shape) != 1 or shape[0] > _MOST_NUMBERS or len(equation.outvars) > 1:
            return self.refuse(equation)
        if operation == "concatenate":
            return [_Few(tuple(itertools.chain.from_iterable(few.numbers for few in inputs)))]
        if len(sizes) > 1:
            return self.refuse(equation)
        each = zip(*(few.numbers * (shape[0] if len(few.numbers) == 1 else 1) for few in inputs), strict=True)
        if operation == "broadcast_in_dim":
            return [_Few(tuple(number for (number,) in each))]
        if operation not in ELEMENTWISE:
            return self.refuse(equation)
        return [_Few(tuple(self.compute(equation, list(numbers))[0] for numbers in each))]


class Read(NamedTuple):
    """One number of an array that a function reads."""

    place: int
    """The place of this read among all reads."""
    array: int
    needs: frozenset[str]
    """The names of the arguments on which its index depends, and `array` if it depends on another read."""

    @property
    def by_position(self) -> bool:
        """Whether its index depends on query or key."""
        return not self.needs.isdisjoint(_POSITIONS)

    @property
    def name(self) -> str:
        """The name of this read as a parameter of logits."""
        return read_name(self.place)


def _has_axes(equation: Any) -> bool:
    return any(len(variable.aval.shape) > 0 for variable in equation.outvars)


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
        taken = f"a number, or up to {_MOST_NUMBERS} neighbours, by its index"
        reasons.append(f"does something else with an array than to take {taken}: {equation.primitive}")
        return [frozenset[str]()] * len(equation.outvars)

    def compute(equation: Any, inputs: list[Any]) -> list[Any]:
        primitives.add(equation.primitive.name)
        # Where indices are computed, all else is traced beside them, and Mosaic GPU lowers no such call.
        if function.jaxpr.consts and equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            reasons.append("closes over arrays and calls a function with a derivative of its own")
        return [join(*inputs)] * len(equation.outvars)

    plus = lambda start, index, _: join(start, index)
    evaluation = _Evaluation(compute, plus, read, refuse, lambda _, *numbers: join(*numbers))
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
    fold = lambda operation, one, other: operation(one, other)
    return _Evaluation(compute, plus, read, refuse, fold).of(function, arguments)


def number(function: Function, part: Slice, number: Any) -> Any:
    """Return a number in the dtype of its array, where kernels have none of bool."""
    dtype = _dtype(function, part)
    return number != 0 if dtype == jnp.bool_ else jnp.asarray(number, dtype)


def _dtype(function: Function, part: Slice) -> Any:
    return function.jaxpr.consts[part.array].dtype
