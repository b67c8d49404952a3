"""Elementwise functions and their derivatives, in primitives that a kernel can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def tanh(x: jax.Array) -> jax.Array:
    """tanh(x), absolute error 3e-7: the hardware's own has 1e-5, more than a logit may be off."""
    return _tanh(x)


def _tanh(x: jax.Array) -> jax.Array:
    # From 2**60 on the result is 1 as it is at 2**60.
    return 1 - 2 * _reciprocal(1 + jnp.exp2(jnp.minimum(x * (2 / math.log(2)), 60.0)))


def _reciprocal(x: jax.Array) -> jax.Array:
    """1 / x for 1 <= x <= 2**64, relative error 1e-7, without the unit that also makes exponentials.

    That one takes eight cycles for what others do in one, and a soft cap asks it for two exponentials already. Newton's
    method squares the error, which is 12% where the exponent's bits are negated and the fraction's with them.
    """
    guess = lax.bitcast_convert_type(0x7EF311C7 - lax.bitcast_convert_type(x, jnp.int32), jnp.float32)
    for _ in range(3):
        guess = guess * (2 - x * guess)
    return guess


def _tanh_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    result = _tanh(*primals)
    return result, tangents[0] * (1 - result * result)


tanh.defjvp(_tanh_jvp)


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
