"""Integer arithmetic on intervals: a result that might wrap around in the program is unbounded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jflash._semantics.intervals.interval import (
    ANYTHING,
    GRID,
    LEAST,
    MOST,
    Affine,
    Interval,
    bounded,
    constant,
    is_bounded,
    is_small,
    unbounded,
)

_SURE = 2.0**31 - 2.0**12
"""An integer whose size is estimated below this in float32 is below `MOST`."""


def combine(dtype: Any, parts: Sequence[tuple[int, Interval]], added: int = 0) -> Interval:
    """Return a sum of integers times constants, in which what two of them have in common cancels.

    So `query - key` compared with a number is exact, and `query + offset` compared with `key`.
    """
    wide = np.dtype(dtype).itemsize >= 4
    terms: dict[Interval, int] = {}
    for factor, part in parts:
        # In few bits a term need not be the sum that it was made of.
        own = part.affine if part.affine is not None and (wide or part.number is not None) else Affine({part: 1}, 0)
        added += factor * own.constant
        for term, times in own.terms.items():
            terms[term] = terms.get(term, 0) + factor * times
    terms = {term: times for term, times in terms.items() if times}
    shape = np.broadcast_shapes(*(part.shape for _, part in parts))
    if not LEAST < added < MOST or any(not LEAST < times < MOST for times in terms.values()):
        return unbounded(jax.ShapeDtypeStruct(shape, dtype))
    if not terms:
        return constant(np.full(shape, added), dtype)
    if added == 0 and list(terms.values()) == [1] and next(iter(terms)).dtype == dtype:
        return next(iter(terms))
    low = high = jnp.full((1,) * GRID, added, jnp.int32)
    size, known, spread = jnp.float32(abs(added)), (float(added), float(added)), 1
    for term, times in terms.items():
        ends = (term.low, term.high) if times > 0 else (term.high, term.low)
        low, high = low + times * ends[0], high + times * ends[1]
        size = size + abs(times) * jnp.maximum(*(jnp.abs(end.astype(jnp.float32)) for end in ends))
        least, most = term.known if times > 0 else term.known[::-1]
        known = known[0] + times * least, known[1] + times * most
        spread = None if spread is None or term.spread is None else spread + abs(times) * (term.spread - 1)
    largest = abs(added) + sum(abs(times) * max(map(abs, term.known)) for term, times in terms.items())
    if largest >= MOST:
        fits = size < _SURE
        low, high, known, spread = jnp.where(fits, low, LEAST), jnp.where(fits, high, MOST), ANYTHING, None
    facts: dict[str, Any] = dict(known=known, spread=spread, affine=Affine(terms, added) if wide else None)
    if list(terms.values()) == [1] and (blocks := next(iter(terms)).blocks) is not None:
        facts["blocks"] = blocks._replace(offset=blocks.offset + added)
    return bounded(dtype, low, high, **facts)


def product(x: Interval, y: Interval) -> Interval:
    """Return x * y."""
    for one, other in ((x, y), (y, x)):
        if (number := one.number) is not None:
            return combine(x.dtype, [(number, other)])
    ends = [(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    sizes = [jnp.abs(a.astype(jnp.float32)) * jnp.abs(b.astype(jnp.float32)) for a, b in ends]
    fits = functools.reduce(jnp.maximum, sizes) < _SURE
    low, high = hull([a * b for a, b in ends])
    return bounded(x.dtype, jnp.where(fits, low, LEAST), jnp.where(fits, high, MOST))


def hull(corners: Sequence[Array]) -> tuple[Array, Array]:
    """Return the least and the most of some arrays."""
    return functools.reduce(jnp.minimum, corners), functools.reduce(jnp.maximum, corners)


def absolute(x: Interval) -> Interval:
    """Return |x|."""
    low, high = jnp.maximum(jnp.maximum(x.low, -x.high), 0), jnp.maximum(-x.low, x.high)
    fits = is_bounded(x)
    known = max(x.known[0], -x.known[1], 0.0), max(-x.known[0], x.known[1])
    low, high = jnp.where(fits, low, LEAST), jnp.where(fits, high, MOST)
    return bounded(x.dtype, low, high, known=known if is_small(known) else ANYTHING, spread=x.spread)


def quotient(x: Interval, y: Interval, *, floor: bool) -> Interval | None:
    """Return x / y for y > 0, rounded down or towards 0; `None` where y may be anything."""
    if y.known[0] < 1 and y.value is None:
        return None
    by = [jnp.maximum(end, 1) for end in (y.low, y.high)]
    divide: Callable[..., Array] = jnp.floor_divide if floor else lax.div
    low, high = hull([divide(*jnp.broadcast_arrays(end, size)) for end in (x.low, x.high) for size in by])
    fits = (y.low >= 1) & is_bounded(x)
    low, high = jnp.where(fits, low, LEAST), jnp.where(fits, high, MOST)
    size = y.number
    if size is None or size < 1:
        return bounded(x.dtype, low, high)
    down = floor or x.known[0] >= 0
    facts: dict[str, Any] = dict(spread=None if x.spread is None else (x.spread + size - 2) // size + 1)
    if is_small(x.known):
        facts["known"] = tuple(float(int(e) // size if floor or e >= 0 else -(-int(e) // size)) for e in x.known)
    if down and x.blocks is not None and x.blocks.size % size == 0 and x.blocks.offset % size == 0:
        facts["blocks"] = x.blocks._replace(size=x.blocks.size // size, offset=x.blocks.offset // size)
    if down and x.blocks is not None and size % x.blocks.size == 0 and x.blocks.offset % x.blocks.size == 0:
        facts |= dict(value=low.astype(x.dtype), spread=1)
    return bounded(x.dtype, low, high, **facts)


def remainder(x: Interval, y: Interval, *, floor: bool) -> Interval | None:
    """Return what `quotient` leaves of x; `None` where y is not written in the program."""
    size = y.number
    if size is None or size < 1:
        return None
    if is_small(x.known) and x.known[0] >= 0 and x.known[1] < size:
        return x
    floor = floor or x.known[0] >= 0
    divide: Callable[..., Array] = jnp.floor_divide if floor else lax.div
    modulo: Callable[..., Array] = jnp.remainder if floor else lax.rem
    by = jnp.full_like(x.low, size)
    same = divide(x.low, by) == divide(x.high, by)
    least = jnp.zeros_like(x.low) if floor else jnp.where(x.low < 0, jnp.maximum(x.low, 1 - size), 0)
    most = jnp.full_like(x.low, size - 1) if floor else jnp.where(x.high > 0, jnp.minimum(x.high, size - 1), 0)
    low, high = jnp.where(same, modulo(x.low, by), least), jnp.where(same, modulo(x.high, by), most)
    fits = is_bounded(x)
    low, high = jnp.where(fits, low, 0 if floor else 1 - size), jnp.where(fits, high, size - 1)
    spread = size if floor else 2 * size - 1
    return bounded(x.dtype, low, high, known=(0.0 if floor else 1.0 - size, size - 1.0), spread=spread)


def bitwise(name: str, x: Interval, y: Interval) -> Interval:
    """Return `and`, `or` or `xor`: bits above the first in which bounds differ are known."""
    free = (x.low ^ x.high) | (y.low ^ y.high)
    for shift in (1, 2, 4, 8, 16):
        free |= lax.shift_right_logical(*jnp.broadcast_arrays(free, jnp.int32(shift)))
    sure = {"and": x.low & y.low, "or": x.low | y.low, "xor": x.low ^ y.low}[name]
    fits = (free >= 0) & is_bounded(x) & is_bounded(y)
    low, high = jnp.where(fits, sure & ~free, LEAST), jnp.where(fits, sure | free, MOST)
    for one in (x, y) if name == "and" else ():
        inside = (one.low >= 0) & (one.high < MOST)
        low = jnp.where(inside, jnp.maximum(low, 0), low)
        high = jnp.where(inside, jnp.minimum(high, one.high), high)
    return bounded(x.dtype, low, high)


def larger(name: str, x: Interval, y: Interval) -> Interval | None:
    """Return that of two which `max` or `min` takes everywhere, if it is known when the program is traced."""
    for one, other in ((x, y), (y, x)):
        comparable = one.low.ndim == other.low.ndim and is_small(one.known) and is_small(other.known)
        if comparable and (one.known[0] >= other.known[1] if name == "max" else one.known[1] <= other.known[0]):
            return one
    return None


def total(x: Interval, axes: Sequence[int]) -> Interval:
    """Return the sum over own axes."""
    axes = tuple(GRID + axis for axis in axes)
    size = jnp.maximum(jnp.abs(x.low.astype(jnp.float32)), jnp.abs(x.high.astype(jnp.float32))).sum(axes)
    low, high = (end.sum(axis=axes, dtype=jnp.int32) for end in (x.low, x.high))
    fits = size < _SURE
    return bounded(x.dtype, jnp.where(fits, low, LEAST), jnp.where(fits, high, MOST))


def from_value(made: Interval, x: Interval) -> Interval:
    """Return `made`, with the value `x` that each tile has."""
    return dataclasses.replace(made, low=x.low, high=x.high, value=x.value, spread=1)
