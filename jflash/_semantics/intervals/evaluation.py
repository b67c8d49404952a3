"""Evaluates a program on intervals, equation by equation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from jflash._semantics import program
from jflash._semantics.intervals import floats, integers, reads, truth
from jflash._semantics.intervals.interval import (
    ANYTHING,
    GRID,
    Interval,
    as_integers,
    bounded,
    constant,
    over_grid,
    point,
    unbounded,
)

_CALLS = frozenset({
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint",
})  # fmt: skip
_MOVING = frozenset({
    "broadcast_in_dim", "concatenate", "copy", "expand_dims", "reshape", "rev", "slice", "squeeze", "stop_gradient",
    "transpose",
})  # fmt: skip
"""Operations whose results are made of numbers of their inputs, each for itself."""
_MONOTONE = frozenset({
    "ceil", "clamp", "floor", "max", "min", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "round", "sign",
})  # fmt: skip
"""Operations that grow with every input, and are exact."""
_ROUNDED = frozenset({"atan", "cbrt", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "sqrt", "tanh"})
"""Operations that grow with their one input, but for rounding."""
_LOOPS = frozenset({"scan", "while"})
_EXACT = _MOVING | _MONOTONE | {"abs", "neg", "select_n", "gather", "dynamic_slice", "iota", "sort"}
"""Operations that round nothing."""


class Evaluation:
    """An evaluation of programs; `unknown` counts the operations that it did not understand, by name."""

    def __init__(self) -> None:
        self.unknown: dict[str, int] = {}

    def __call__(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Interval]) -> list[Interval]:
        """Return the results of a program on intervals."""
        results = program.evaluate(jaxpr, consts, arguments, self._rule)
        return [_as_interval(result, out.aval) for result, out in zip(results, jaxpr.outvars, strict=True)]

    def _rule(self, equation: Any, inputs: list[Any]) -> Sequence[Interval]:
        name, params = equation.primitive.name, equation.params
        xs = [_as_interval(x, variable.aval) for x, variable in zip(inputs, equation.invars, strict=True)]
        if name in _CALLS:
            return self._call(equation, xs)
        if name == "cond":
            results = [self._inner(branch, xs[1:]) for branch in params["branches"]]
            return [truth.select(as_integers(xs[0]), cases) for cases in zip(*results, strict=True)]
        if name not in _LOOPS and name != "dynamic_slice" and all(x.value is not None for x in xs):
            return self._of_values(equation, xs)
        found = self._found(equation, xs)
        if found is not None:
            return [found]
        self.unknown[name] = self.unknown.get(name, 0) + 1
        return [unbounded(variable.aval) for variable in equation.outvars]

    def _inner(self, inner: ClosedJaxpr, xs: Sequence[Interval]) -> list[Interval]:
        consts = [x if isinstance(x, Interval) else point(jnp.asarray(x)[(None,) * GRID]) for x in inner.consts]
        return self(inner.jaxpr, consts, xs)

    def _call(self, equation: Any, xs: list[Interval]) -> Sequence[Interval]:
        inner = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
        inner = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
        avals = [variable.aval for variable in equation.invars]
        if len(xs) == 2 and all(x.kind == "i" and x.shape == () for x in xs):
            # JAX's own divisions are programs of ten equations, whose signs intervals cannot see together.
            by_function: dict[Any, Callable[..., Interval | None]] = {
                jnp.floor_divide: integers.quotient, jnp.remainder: integers.remainder,
            }  # fmt: skip
            for function, rule in by_function.items():
                if _is_program(inner, function, avals) and (found := rule(*xs, floor=True)) is not None:
                    return [found]
        return self._inner(inner, xs)

    def _of_values(self, equation: Any, xs: list[Interval]) -> Sequence[Interval]:
        """Return the equation's own results, as each tile has one value of every input."""
        apply = lambda *values: program.apply(equation, values)
        values: Any = [x.value for x in xs]
        results = over_grid(apply, *values) if xs else [r[(None,) * GRID] for r in apply()]
        made, name = [point(result) for result in results], equation.primitive.name
        if made[0].kind == "f" and name not in _EXACT:
            return [floats.widened(x.dtype, x.low, x.high) for x in made]
        if name in ("add", "sub", "mul", "neg") and xs[0].kind == "i":
            found = self._found(equation, xs)
            assert found is not None
            return [integers.from_value(found, made[0])]
        if name in ("eq", "ne", "lt", "le", "gt", "ge", "select_n", "convert_element_type", "not", "and", "or"):
            # What is known when the program is traced stays known: such is whether an index is negative.
            found = self._found(equation, xs)
            if found is not None and found.known != ANYTHING:
                return [dataclasses.replace(made[0], known=found.known, affine=found.affine)]
        return made

    def _found(self, equation: Any, xs: list[Interval]) -> Interval | None:
        """Return the result's bounds; `None`: the operation is not understood."""
        name, params, out = equation.primitive.name, equation.params, equation.outvars[0].aval
        if name in _MOVING:
            return _moved(equation, xs)
        if name == "select_n":
            return truth.select(xs[0], xs[1:])
        if name == "dynamic_slice":
            x, *starts = xs
            for axis, (start, size) in enumerate(zip(starts, params["slice_sizes"], strict=True)):
                x = reads.dynamic_slice(x, axis, start, size)
            return x
        if name == "gather":
            return reads.gather(params, *xs)
        if name == "convert_element_type":
            return floats.converted(xs[0], out.dtype)
        # An elementwise equation may mix scalars and arrays.
        rank = max((len(x.shape) for x in xs), default=0)
        xs = [x.of_rank(rank) for x in xs]
        if name in ("eq", "ne", "lt", "le", "gt", "ge"):
            return truth.compare(name, *xs)
        kind = xs[0].kind if xs else ""
        rules = {"b": _of_bools, "i": _of_integers, "f": _of_floats}
        found = rules[kind](equation, xs) if kind in rules else None
        if found is None and name in _MONOTONE:
            return _monotone(equation, xs)
        return found


def _as_interval(x: Any, aval: Any) -> Interval:
    return x if isinstance(x, Interval) else constant(x, aval.dtype)


def _of_bools(equation: Any, xs: list[Interval]) -> Interval | None:
    match equation.primitive.name:
        case "not":
            return truth.negation(xs[0])
        case "xor":
            return truth.compare("ne", *xs)
        case "and" | "or" as name:
            pick, combine = (min, jnp.logical_and) if name == "and" else (max, jnp.logical_or)
            known = pick(x.known[0] for x in xs), pick(x.known[1] for x in xs)
            x, y = xs
            return Interval(x.dtype, combine(x.low, y.low), combine(x.high, y.high), known=known)
        case _:
            return None


def _of_integers(equation: Any, xs: list[Interval]) -> Interval | None:
    dtype, params, x = equation.outvars[0].aval.dtype, equation.params, xs[0]
    by = xs[1].number if len(xs) == 2 else None
    match equation.primitive.name:
        case "add":
            return integers.combine(dtype, [(1, x), (1, xs[1])])
        case "sub":
            return integers.combine(dtype, [(1, x), (-1, xs[1])])
        case "neg":
            return integers.combine(dtype, [(-1, x)])
        case "not":
            return integers.combine(dtype, [(-1, x)], -1)
        case "mul":
            return integers.product(x, xs[1])
        case "square":
            return integers.product(absolute := integers.absolute(x), absolute)
        case "integer_pow" if params["y"] == 2:
            return integers.product(absolute := integers.absolute(x), absolute)
        case "abs":
            return integers.absolute(x)
        case "div":
            return integers.quotient(x, xs[1], floor=False)
        case "rem":
            return integers.remainder(x, xs[1], floor=False)
        case "and" | "or" | "xor" as name:
            return integers.bitwise(name, x, xs[1])
        case "shift_left" if by is not None and 0 <= by < 31:
            return integers.combine(dtype, [(2**by, x)])
        case "shift_right_arithmetic" | "shift_right_logical" as name if by is not None and 0 <= by < 31:
            is_signed = name == "shift_right_arithmetic" or x.known[0] >= 0
            return integers.quotient(x, constant(2**by, dtype), floor=True) if is_signed else None
        case "max" | "min" as name:
            return integers.larger(name, x, xs[1])
        case "reduce_sum":
            return integers.total(x, params["axes"])
        case _:
            return None


def _of_floats(equation: Any, xs: list[Interval]) -> Interval | None:
    x = xs[0]
    match equation.primitive.name:
        case "add":
            return floats.add(x, xs[1])
        case "sub":
            return floats.add(x, floats.negative(xs[1]))
        case "neg":
            return floats.negative(x)
        case "mul":
            return floats.multiply(x, xs[1])
        case "div":
            return floats.divide(x, xs[1])
        case "abs":
            return floats.magnitude(x)
        case name if name in _ROUNDED:
            low, high = (_applied(equation, [end]) for end in (x.low, x.high))
            return floats.widened(x.dtype, low, high)
        case _:
            return None


def _moved(equation: Any, xs: list[Interval]) -> Interval:
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape
    known = min(x.known[0] for x in xs), max(x.known[1] for x in xs)
    low, high = (_applied(equation, ends) for ends in ([x.low for x in xs], [x.high for x in xs]))
    found = Interval(xs[0].dtype, low, high, known=known)
    x = xs[0]
    if name == "concatenate" and all(x.parts is not None for x in xs):
        return dataclasses.replace(found, parts=tuple(part for x in xs for part in x.parts or ()))
    if shape == (1,) and x.shape == ():
        return dataclasses.replace(found, parts=(x,))
    if shape == x.shape and name in ("copy", "reshape", "stop_gradient"):
        return x
    return found


def _monotone(equation: Any, xs: list[Interval]) -> Interval:
    name = equation.primitive.name
    low, high = (_applied(equation, ends) for ends in ([x.low for x in xs], [x.high for x in xs]))
    known = min(x.known[0] for x in xs), max(x.known[1] for x in xs)
    if name in ("max", "min"):
        pick = max if name == "max" else min
        known = pick(x.known[0] for x in xs), pick(x.known[1] for x in xs)
    if name == "sign":
        known = (-1.0, 1.0)
    return bounded(equation.outvars[0].aval.dtype, low, high, known=known)


def _applied(equation: Any, ends: Sequence[Array]) -> Array:
    """Apply a primitive of values' own shapes to their bounds."""
    name = equation.primitive.name
    if name in ("max", "min"):
        return (jnp.maximum if name == "max" else jnp.minimum)(*ends)
    if name == "clamp":
        least, x, most = ends
        return jnp.minimum(jnp.maximum(x, least), most)
    params = {key: None if key == "accuracy" else value for key, value in equation.params.items()}
    return over_grid(lambda *own: equation.primitive.bind(*own, **params), *ends)


@functools.lru_cache(maxsize=64)
def _text(function: Any, avals: tuple[Any, ...], x64: bool) -> str:
    del x64  # what is traced depends on it
    arguments = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in avals]
    (equation,) = jax.make_jaxpr(function)(*arguments).eqns
    return str(equation.params["jaxpr"])


def _is_program(inner: ClosedJaxpr, function: Any, avals: Sequence[Any]) -> bool:
    """Return whether a program is what JAX makes of one of its functions.

    Its name does not say so: users' functions may have the same.
    """
    key = tuple((aval.shape, np.dtype(aval.dtype), aval.weak_type) for aval in avals)
    return str(inner) == _text(function, key, bool(jax.config.jax_enable_x64))
