"""The evaluation of a jaxpr under a rule that may make something else of an equation than its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

Rule = Callable[[Any, list[Any]], Sequence[Any]]
"""A function from an equation and the values of its inputs to the values of its results."""


def evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], rule: Rule) -> list[Any]:
    """Return the results of a program; a value is whatever the rule makes it."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    get = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for equation in jaxpr.eqns:
        values.update(zip(equation.outvars, rule(equation, list(map(get, equation.invars))), strict=True))
    return list(map(get, jaxpr.outvars))


def apply(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the results of the equation itself: the rule that computes."""
    if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        # There is no public way to bind these again, but as a program.
        atoms = [atom for atom in equation.invars if not isinstance(atom, Literal)]
        given = [x for atom, x in zip(equation.invars, inputs, strict=True) if not isinstance(atom, Literal)]
        nothing = jax.make_jaxpr(lambda: None)().jaxpr
        program = nothing.replace(invars=atoms, outvars=equation.outvars, eqns=[equation])
        return jaxpr_as_fun(ClosedJaxpr(program, ()))(*given)
    results = equation.primitive.bind(*inputs, **equation.params)
    return results if equation.primitive.multiple_results else [results]
