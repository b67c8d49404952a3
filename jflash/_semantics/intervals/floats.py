"""Floating-point arithmetic on intervals, and conversions.

A kernel need not round as is rounded here: bounds are a few units in the last place wider than what is computed of
them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash._semantics.intervals.integers import hull
from jflash._semantics.intervals.interval import (
    ANYTHING,
    LEAST,
    MOST,
    Affine,
    Interval,
    as_integers,
    bounded,
    constant,
    is_bounded,
    is_small,
    within,
)
from jflash._semantics.intervals.truth import compare

_UNITS = 64
"""The most units in the last place by which two ways to compute a number may differ."""


def widened(dtype: Any, low: Array, high: Array) -> Interval:
    """Return bounds of what is rounded; what underflows may be 0."""
    info = jnp.finfo(dtype)
    far = lambda end: jnp.where(jnp.isinf(end), 0, jnp.abs(end) * (_UNITS * info.eps) + info.tiny).astype(dtype)
    return bounded(dtype, low - far(low), high + far(high))


def add(x: Interval, y: Interval) -> Interval:
    """Return x + y. An infinity at one end may meet one of the other sign inside."""
    opposite = jnp.isnan(x.low + y.high) | jnp.isnan(x.high + y.low)
    return widened(x.dtype, jnp.where(opposite, jnp.nan, x.low + y.low), x.high + y.high)


def negative(x: Interval) -> Interval:
    """Return -x."""
    return bounded(x.dtype, -x.high, -x.low)


def multiply(x: Interval, y: Interval) -> Interval:
    """Return x * y, known where both are finite."""
    low, high = hull([a * b for a in (x.low, x.high) for b in (y.low, y.high)])
    return widened(x.dtype, jnp.where(_finite(x) & _finite(y), low, jnp.nan), high)


def divide(x: Interval, y: Interval) -> Interval:
    """Return x / y, known where both are finite and y is positive."""
    low, high = hull([a / b for a in (x.low, x.high) for b in (y.low, y.high)])
    return widened(x.dtype, jnp.where(_finite(x) & _finite(y) & (y.low > 0), low, jnp.nan), high)


def magnitude(x: Interval) -> Interval:
    """Return |x|."""
    return bounded(x.dtype, jnp.maximum(jnp.maximum(x.low, -x.high), 0), jnp.maximum(-x.low, x.high))


def _finite(x: Interval) -> Array:
    return jnp.isfinite(x.low) & jnp.isfinite(x.high)


def converted(x: Interval, dtype: Any) -> Interval:
    """Return x in another dtype."""
    dtype = np.dtype(dtype)
    if dtype == x.dtype:
        return x
    value = None if x.value is None else x.value.astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return _to_float(x, dtype)
    if dtype.kind == "b":
        return dataclasses.replace(compare("ne", x, constant(0, x.dtype)), value=value)
    if x.kind == "f":
        inside = (jnp.abs(x.low) < 2.0**30) & (jnp.abs(x.high) < 2.0**30)
        low, high = (jnp.where(inside, end, 0).astype(jnp.int32) for end in (x.low, x.high))
        return bounded(dtype, jnp.where(inside, low, LEAST), jnp.where(inside, high, MOST))
    x = as_integers(x)
    if dtype == jnp.uint32 and x.dtype == np.int32 and x.known[0] < 0:
        # Negative numbers become large ones. In arithmetic that wraps around they are the same.
        low = jnp.where(x.low >= 0, x.low, jnp.where(x.high < 0, MOST, 0))
        high = jnp.where(x.low >= 0, x.high, MOST)
        return Interval(dtype, low, high, value, affine=x.affine or Affine({x: 1}, 0))
    if not within(x.known, dtype):
        return dataclasses.replace(bounded(dtype, x.low, x.high), value=value)
    affine = x.affine or Affine({x: 1}, 0)
    return Interval(dtype, x.low, x.high, value, x.known, x.spread, x.blocks, affine)


def _to_float(x: Interval, dtype: np.dtype[Any]) -> Interval:
    low, high = (end.astype(dtype) for end in (x.low, x.high))
    if x.kind == "f":
        exact = jnp.finfo(dtype).bits > jnp.finfo(x.dtype).bits
        return bounded(dtype, low, high) if exact else widened(dtype, low, high)
    if is_small(x.known) and max(map(abs, x.known)) < 2 ** jnp.finfo(dtype).nmant:
        return Interval(dtype, low, high)
    found = widened(dtype, low, high)
    if x.kind == "b":
        return found
    fits = is_bounded(x)
    return Interval(dtype, jnp.where(fits, found.low, jnp.nan), jnp.where(fits, found.high, jnp.nan), None, ANYTHING)
