"""Elementwise functions and their derivatives, in primitives that a kernel can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """factor * cap * tanh(unit * number), relative error 1e-6: in few steps where all numbers are small, or of any.

    Numbers are products as they are, where they can be: to multiply them first takes a tenth of what the rest does.

    The hardware's own tanh has 1e-5, more than a logit may be off. By way of an exponential what is small would be the
    difference of what is large, and off by a part of the cap; and the unit that makes exponentials is busy.
    """

    cap: float
    unit: float = 1.0
    factor: float = 1.0
    most: float = math.inf
    """No result of a small number is larger."""

    @staticmethod
    def of(products: jax.Array, scale: jax.Array | float, cap: float, **others: float) -> tuple[SoftCap, jax.Array]:
        """The form for products times a scale, and its numbers: the products, if the scale is known beforehand and
        float32 has the constants for it."""
        if isinstance(scale, jax.Array) or not (2**-20 < cap < 2**20 and 2**-12 < abs(scale / cap) < 2**12):
            return SoftCap(cap, **others), products * (scale * (1 / cap))
        return SoftCap(cap, scale / cap, **others), products

    @property
    def limit(self) -> float:
        """Numbers are small whose sizes are below it."""
        return min(_SMALL, self.most / (self.factor * self.cap)) / abs(self.unit)

    def of_small(self, numbers: jax.Array) -> jax.Array:
        """The results of small numbers."""
        return _odd(_TANH, numbers, self.unit, self.factor * self.cap)

    def of_any(self, numbers: jax.Array) -> jax.Array:
        """The results of any numbers."""
        unit, largest = self.unit, _LARGE / abs(self.unit)
        numbers = jnp.minimum(jnp.maximum(numbers, -largest), largest)
        return _odd(_NUMERATOR, numbers, unit, self.factor * self.cap) * _reciprocal(_even(_DENOMINATOR, numbers, unit))


Vote = Callable[[jax.Array, float], jax.Array]
"""Whether the sizes of all of a tile are below a limit."""


def soft_cap(products: jax.Array, scale: jax.Array | float, cap: float, are_below: Vote) -> jax.Array:
    """A tile's cap * tanh(products * scale / cap)."""
    form, numbers = SoftCap.of(products, scale, cap)
    return _differentiable(form, are_below, numbers)


def _capped(form: SoftCap, are_below: Vote, numbers: jax.Array) -> jax.Array:
    return lax.cond(are_below(numbers, form.limit), form.of_small, form.of_any, numbers)


def _capped_jvp(
    form: SoftCap, are_below: Vote, numbers: tuple[jax.Array], changes: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    result = _capped(form, are_below, *numbers)
    slope = form.cap * form.unit - result * result * (form.unit / form.cap)
    return result, slope * changes[0]


_differentiable = jax.custom_jvp(_capped, nondiff_argnums=(0, 1))
_differentiable.defjvp(_capped_jvp)


# tanh(x) / x as a polynomial in x**2 for |x| <= _SMALL, and as a ratio of two for |x| <= _LARGE, minimax in relative
# error: 1.2e-7 and 1.5e-7. Past that tanh is 1 but for 2.3e-7.
_SMALL = 0.4
_TANH = (0.9999999, -0.33331361, 0.13270976, -0.04755357)
_LARGE = 8.0
_NUMERATOR = (0.99999988, 0.12925662, 0.0029510227, 1.14284173e-5)
_DENOMINATOR = (1.0, 0.46258879, 0.0238155499, 2.38669032e-4, 2.45920745e-7)


def _even(coefficients: Sequence[float], x: jax.Array, unit: float, factor: float = 1.0) -> jax.Array:
    """`factor` times a polynomial in x**2, x in so many units."""
    scaled = [factor * coefficient * unit ** (2 * power) for power, coefficient in enumerate(coefficients)]
    square = x * x
    result = jnp.full_like(square, scaled[-1])
    for coefficient in scaled[-2::-1]:
        result = result * square + coefficient
    return result


def _odd(coefficients: Sequence[float], x: jax.Array, unit: float, factor: float) -> jax.Array:
    """`_even`, times x."""
    return _even(coefficients, x, unit, factor * unit) * x


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
