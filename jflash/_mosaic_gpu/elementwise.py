"""Elementwise functions and their derivatives, in primitives that a kernel can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero


def soft_cap(products: jax.Array, scale: jax.Array | float, cap: float) -> jax.Array:
    """cap * tanh(products * scale / cap), absolute error 5e-7 of the cap.

    The hardware's own tanh has 1e-5, more than a logit may be off. It is 1 - 2 / (1 + exp(2 x)), of which the constants
    are taken together.
    """
    return _capped(products, scale, cap)


def _soft_cap(products: jax.Array, scale: jax.Array | float, cap: float) -> jax.Array:
    return _from_exponent(products * (scale * (2 / math.log(2) / cap)), cap)


def _from_exponent(exponent: jax.Array, cap: float) -> jax.Array:
    # From 2**60 on the result is the cap as it is at 2**60.
    return cap - (2 * cap) * _reciprocal(1 + jnp.exp2(jnp.minimum(exponent, 60.0)))


def _soft_cap_jvp(cap: float, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    (products, scale), (d_products, d_scale) = primals, tangents
    result = _soft_cap(products, scale, cap)
    slope = 1 - jnp.square(result * (1 / cap))
    changes = [(scale, d_products), (products, d_scale)]
    parts = [by * change for by, change in changes if not isinstance(change, SymbolicZero)]
    return result, slope * sum(parts[1:], start=parts[0])


_SMALL = 0.5
_TANH = (0.99999946, -0.33326319, 0.13190295, -0.04440219)
"""tanh(x) / x for |x| <= _SMALL as a polynomial in x**2, minimax in relative error: 5.5e-7."""


def soft_cap_by_size(
    products: jax.Array, scale: jax.Array | float, cap: float, below_two: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """`soft_cap`, without its derivative, in half as many steps and no exponential where all products are small.

    `below_two` tells whether all of a tile is between -2 and 2.
    """
    x = products * (scale * (2 / _SMALL / cap))

    def small(x: jax.Array) -> jax.Array:
        square, half = x * x, _SMALL / 2
        factors = [cap * coefficient * half ** (2 * power + 1) for power, coefficient in enumerate(_TANH)]
        result = jnp.full_like(x, factors[-1])
        for factor in factors[-2::-1]:
            result = result * square + factor
        return result * x

    large = lambda x: _from_exponent(x * (_SMALL / math.log(2)), cap)
    return lax.cond(below_two(x), small, large, x)


_capped = jax.custom_jvp(_soft_cap, nondiff_argnums=(2,))
# Zeros that JAX made itself would be placed on a mesh, where there is one, and a kernel cannot do that.
_capped.defjvp(_soft_cap_jvp, symbolic_zeros=True)


def _reciprocal(x: jax.Array) -> jax.Array:
    """1 / x for 1 <= x <= 2**64, relative error 1e-7, without the unit that also makes exponentials.

    That one takes eight cycles for what others do in one, and a soft cap asks it for two exponentials already. The
    exponent's bits negated, and the fraction's with them, are off by 5%; the next step leaves the error's cube, and the
    last one that's square.
    """
    guess = lax.bitcast_convert_type(0x7EF311C7 - lax.bitcast_convert_type(x, jnp.int32), jnp.float32)
    error = 1 - x * guess
    guess = guess + guess * (error + error * error)
    return guess * (2 - x * guess)


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
