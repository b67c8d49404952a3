"""Comparisons of intervals, and what depends on them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash._semantics.intervals.integers import combine
from jflash._semantics.intervals.interval import (
    LEAST,
    MOST,
    Interval,
    as_integers,
    bounded,
    is_bounded,
    is_small,
)

_MIRRORED = {"gt": "lt", "ge": "le"}


def compare(name: str, x: Interval, y: Interval) -> Interval:
    """Return a comparison, by the name of its primitive."""
    if name in _MIRRORED:
        return compare(_MIRRORED[name], y, x)
    if name == "ne":
        return negation(compare("eq", x, y))
    if x.kind != "f":
        return _compare_integers(name, as_integers(x), as_integers(y))
    surely, maybe = _ordered(name, x.low, x.high, y.low, y.high)
    return Interval(np.dtype(bool), surely, maybe, known=(0, 1))


def negation(x: Interval) -> Interval:
    """Return `not` of a bool."""
    value = None if x.value is None else ~x.value
    return Interval(x.dtype, ~x.high, ~x.low, value, known=(1 - x.known[1], 1 - x.known[0]))


def _compare_integers(name: str, x: Interval, y: Interval) -> Interval:
    surely, maybe = _ordered(name, x.low, x.high, y.low, y.high)
    fits = is_bounded(x) & is_bounded(y)
    # The difference knows what the two have in common.
    apart = combine(np.int32, [(1, x), (-1, y)])
    surely_apart, maybe_apart = _ordered(name, apart.low, apart.high, jnp.int32(0), jnp.int32(0))
    # The ends of int32 stand for what is beyond them too.
    ends = (y.high >= MOST) | (x.low <= LEAST)
    if name == "eq":
        ends |= (x.high >= MOST) | (y.low <= LEAST)
        surely &= fits
    else:
        surely &= (x.high < MOST) & (y.low > LEAST)
    surely |= surely_apart & fits
    maybe = (maybe | ends) & (maybe_apart | ~jnp.asarray(fits))
    known = (0.0, 1.0)
    if is_small(x.known) and is_small(y.known):
        by_ends = _ordered(name, *(np.float64(end) for end in (*x.known, *y.known)))
        by_difference = _ordered(name, *(np.float64(end) for end in (*apart.known, 0, 0)))
        known = float(by_ends[0] | by_difference[0]), float(by_ends[1] & by_difference[1])
    return Interval(np.dtype(bool), surely, maybe, known=known)


def _ordered(name: str, x_low: Any, x_high: Any, y_low: Any, y_high: Any) -> tuple[Any, Any]:
    """Return whether it is surely so, and whether it may be; with a NaN False and True."""
    if name == "eq":
        return (x_low == x_high) & (y_low == y_high) & (x_low == y_low), ~(x_low > y_high) & ~(x_high < y_low)
    if name == "lt":
        return x_high < y_low, ~(x_low >= y_high)
    return x_high <= y_low, ~(x_low > y_high)


def select(which: Interval, cases: Sequence[Interval]) -> Interval:
    """Return one of several values, by a bool or by an index."""
    if which.known[0] == which.known[1]:
        return cases[int(min(max(which.known[0], 0), len(cases) - 1))]
    rank = max(len(x.shape) for x in (which, *cases))
    cases = [case.of_rank(rank) for case in cases]
    low, high = which.of_rank(rank).low, which.of_rank(rank).high
    if which.kind == "b":
        return join(cases, [~low, high])
    return join(cases, [(low <= index) & (index <= high) for index in range(len(cases))])


def join(cases: Sequence[Interval], possible: Sequence[Array]) -> Interval:
    """Return one of several values, where it is known which of them are possible."""
    dtype = cases[0].dtype
    lowest, highest = _extremes(dtype)
    low = functools.reduce(jnp.minimum, [jnp.where(p, x.low, highest) for p, x in zip(possible, cases, strict=True)])
    high = functools.reduce(jnp.maximum, [jnp.where(p, x.high, lowest) for p, x in zip(possible, cases, strict=True)])
    known = min(case.known[0] for case in cases), max(case.known[1] for case in cases)
    return bounded(dtype, low, high, known=known)


def _extremes(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype.kind == "b":
        return np.bool_(False), np.bool_(True)
    if jnp.issubdtype(dtype, jnp.integer):
        return np.int32(LEAST), np.int32(MOST)
    return np.asarray(-np.inf, dtype), np.asarray(np.inf, dtype)
