"""Elementwise functions and their derivatives, in primitives that a kernel can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero


def soft_cap(products: jax.Array, scale: jax.Array | float, cap: float) -> jax.Array:
    """cap * tanh(products * scale / cap), relative error 1e-6, without the unit that makes exponentials.

    The hardware's own tanh has 1e-5, more than a logit may be off. By way of an exponential what is small would be the
    difference of what is large, and off by a part of the cap.
    """
    return _capped(products, scale, cap)


def _soft_cap(products: jax.Array, scale: jax.Array | float, cap: float) -> jax.Array:
    return _ratio(products * (scale / cap), 1.0, cap)


def _soft_cap_jvp(cap: float, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    (products, scale), (d_products, d_scale) = primals, tangents
    result = _soft_cap(products, scale, cap)
    slope = 1 - jnp.square(result * (1 / cap))
    changes = [(scale, d_products), (products, d_scale)]
    parts = [by * change for by, change in changes if not isinstance(change, SymbolicZero)]
    return result, slope * sum(parts[1:], start=parts[0])


def soft_cap_by_size(
    products: jax.Array, scale: jax.Array | float, cap: float, below_two: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """`soft_cap`, without its derivative, in a third of the steps where all products are small.

    `below_two` tells whether all of a tile is between -2 and 2.
    """
    unit = _SMALL / 2
    small = lambda x: _polynomial(_TANH, x * x, unit, cap * unit) * x
    x = products * (scale * (1 / unit / cap))
    return lax.cond(below_two(x), small, lambda x: _ratio(x, unit, cap), x)


# tanh(x) / x as a polynomial in x**2 for |x| <= _SMALL, and as a ratio of two for |x| <= _LARGE, minimax in relative
# error: 1.2e-7 and 1.5e-7. Past that tanh is 1 but for 2.3e-7.
_SMALL = 0.4
_TANH = (0.9999999, -0.33331361, 0.13270976, -0.04755357)
_LARGE = 8.0
_NUMERATOR = (0.99999988, 0.12925662, 0.0029510227, 1.14284173e-5)
_DENOMINATOR = (1.0, 0.46258879, 0.0238155499, 2.38669032e-4, 2.45920745e-7)


def _polynomial(coefficients: Sequence[float], square: jax.Array, unit: float, factor: float) -> jax.Array:
    """`factor` times a polynomial in x**2, of which `square` is known, x in so many units."""
    scaled = [factor * coefficient * unit ** (2 * power) for power, coefficient in enumerate(coefficients)]
    result = jnp.full_like(square, scaled[-1])
    for coefficient in scaled[-2::-1]:
        result = result * square + coefficient
    return result


def _ratio(x: jax.Array, unit: float, cap: float) -> jax.Array:
    """cap * tanh(x * unit)."""
    x = jnp.minimum(jnp.maximum(x, -_LARGE / unit), _LARGE / unit)
    square = x * x
    denominator = _polynomial(_DENOMINATOR, square, unit, 1.0)
    return _polynomial(_NUMERATOR, square, unit, cap * unit) * x * _reciprocal(denominator)


_capped = jax.custom_jvp(_soft_cap, nondiff_argnums=(2,))
# Zeros that JAX made itself would be placed on a mesh, where there is one, and a kernel cannot do that.
_capped.defjvp(_soft_cap_jvp, symbolic_zeros=True)


def _reciprocal(x: jax.Array) -> jax.Array:
    """1 / x for 1 <= x <= 2**64, relative error 1e-7, without the unit that also makes exponentials.

    That one takes eight cycles for what others do in one. The exponent's bits negated, and the fraction's with them,
    are off by 5%; the next step leaves the error's cube, and the last one that's square.
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
