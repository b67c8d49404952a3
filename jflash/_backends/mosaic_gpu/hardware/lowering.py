"""Elementwise functions and their derivatives in primitives that Mosaic GPU lowers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as core


def lowerable[**Arguments, Results](function: Callable[Arguments, Results]) -> Callable[Arguments, Results]:
    """`function` without what Mosaic GPU does not lower: sums that differentiation leaves, and custom derivatives."""

    def lowered(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Results:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        return jax.tree.unflatten(jax.tree.structure(shape), _evaluate(closed.jaxpr, closed.consts, leaves))

    return lowered


def _evaluate(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]
    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        match equation.primitive.name:
            case "add_any":
                results = inputs[0] + inputs[1]
            case "jit" | "pjit":
                inner = equation.params["jaxpr"]
                results = _evaluate(inner.jaxpr, inner.consts, inputs)
            case "custom_jvp_call":
                inner = equation.params["call_jaxpr"]
                results = _evaluate(inner.jaxpr, inner.consts, inputs)
            case _:
                results = equation.primitive.bind(*inputs, **equation.params)
        many = equation.primitive.multiple_results
        values.update(zip(equation.outvars, results if many else [results], strict=True))
    return [read(atom) for atom in jaxpr.outvars]
