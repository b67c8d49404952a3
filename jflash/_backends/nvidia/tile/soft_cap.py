"""The soft cap, factor * cap * tanh(unit * number), as polynomials: without the unit that makes exponentials."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """factor * cap * tanh(unit * number), relative error 1e-6: a short form for small numbers, and one for all.

    The hardware's own tanh has a relative error of 1e-5, more than the rule for numbers allows. By way of an
    exponential a small result would be the difference of large numbers, and the unit that makes exponentials is busy.
    """

    cap: float
    unit: float = 1.0
    factor: float = 1.0
    most: float = math.inf
    """A bound on the results of small numbers."""

    @staticmethod
    def of(products: jax.Array, scale: jax.Array | float, cap: float, **others: float) -> tuple[SoftCap, jax.Array]:
        """The form for products times a scale, and its numbers.

        Where the scale is static and float32 has the constants for it, these are the products themselves.
        """
        if isinstance(scale, jax.Array) or not (2**-20 < cap < 2**20 and 2**-12 < abs(scale / cap) < 2**12):
            return SoftCap(cap, **others), products * (scale * (1 / cap))
        return SoftCap(cap, scale / cap, **others), products

    @property
    def limit(self) -> float:
        """The magnitude below which numbers are small."""
        return min(_SMALL, self.most / (self.factor * self.cap)) / abs(self.unit)

    def of_small(self, numbers: jax.Array) -> jax.Array:
        """The results of small numbers."""
        return _odd(_TANH, numbers, self.unit, self.factor * self.cap)

    def of_any(self, numbers: jax.Array) -> jax.Array:
        """The results of any numbers."""
        unit, largest = self.unit, _LARGE / abs(self.unit)
        numbers = jnp.minimum(jnp.maximum(numbers, -largest), largest)
        return _odd(_NUMERATOR, numbers, unit, self.factor * self.cap) * _reciprocal(_even(_DENOMINATOR, numbers, unit))


def soft_cap(
    products: jax.Array, scale: jax.Array | float, cap: float, all_below: Callable[[jax.Array, float], jax.Array]
) -> jax.Array:
    """cap * tanh(products * scale / cap) of a tile; `all_below` says whether all its magnitudes are below a limit."""
    form, numbers = SoftCap.of(products, scale, cap)

    def capped(numbers: jax.Array) -> jax.Array:
        return lax.cond(all_below(numbers, form.limit), form.of_small, form.of_any, numbers)

    differentiable = jax.custom_jvp(capped)

    @differentiable.defjvp
    def _(numbers: tuple[jax.Array], changes: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        result = capped(*numbers)
        slope = cap * form.unit - result * result * (form.unit / cap)
        return result, slope * changes[0]

    return differentiable(numbers)


# tanh(x) / x as a polynomial in x**2 for |x| <= _SMALL, and as a ratio of two for |x| <= _LARGE, minimax in relative
# error: 1.2e-7 and 1.5e-7. Past that tanh is 1 but for 2.3e-7.
_SMALL = 0.4
_TANH = (0.9999999, -0.33331361, 0.13270976, -0.04755357)
_LARGE = 8.0
_NUMERATOR = (0.99999988, 0.12925662, 0.0029510227, 1.14284173e-5)
_DENOMINATOR = (1.0, 0.46258879, 0.0238155499, 2.38669032e-4, 2.45920745e-7)


def _even(coefficients: Sequence[float], x: jax.Array, unit: float, factor: float = 1.0) -> jax.Array:
    """`factor` times a polynomial in (unit x)**2."""
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

    Negating the bits of exponent and fraction gives 1 / x with an error of 5%. The next step leaves the error's cube,
    and the last step that cube's square.
    """
    guess = lax.bitcast_convert_type(0x7EF311C7 - lax.bitcast_convert_type(x, jnp.int32), jnp.float32)
    error = 1 - x * guess
    guess = guess + guess * (error + error * error)
    return guess * (2 - x * guess)
