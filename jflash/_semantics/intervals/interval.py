"""Bounds of one value of a program, for every tile of a grid at once.

A grid is `[batch, head, query tile, key tile]`. Bounds are arrays `[*grid, *the value's own shape]`, of size 1 along
axes of the grid that have no part in them. What is not known is unbounded, which is true of every value.

Integers of every dtype are bounded in int32, where `LEAST` and `MOST` stand for no bound. A bool is bounded by False
and True: its lower bound says that it is surely True, its upper one that it may be. A float whose bounds are NaN may be
anything, NaN included.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

GRID = 4
"""The number of a grid's axes."""
MOST, LEAST = 2**31 - 1, -(2**31)
ANYTHING = (-math.inf, math.inf)


class Blocks(NamedTuple):
    """Tile number i along an axis of the grid has the integers from offset + i * size on, `size` of them at most."""

    axis: int
    size: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Affine:
    """A sum of integers times constants, in arithmetic that wraps around as the program's does."""

    terms: Mapping[Interval, int]
    constant: int


@dataclasses.dataclass(frozen=True, eq=False)
class Interval:
    """What a value may be. Two are the same only if they are one object, since equal bounds are not equal values."""

    dtype: np.dtype[Any]
    low: Array
    high: Array
    value: Array | None = None
    """The value itself, in its own dtype, where each tile has one."""
    known: tuple[float, float] = ANYTHING
    """Bounds for the whole grid, known when the program is traced."""
    spread: int | None = None
    """The most integers between the bounds of a tile; `None`: any number."""
    blocks: Blocks | None = None
    """The blocks of integers that tiles have, one after the other; `None`: others."""
    affine: Affine | None = None
    """The sum that it is; `None`: it is a term itself."""
    parts: tuple[Interval, ...] | None = None
    """The elements of a vector, which is how an index of several axes is written."""

    @property
    def kind(self) -> str:
        """The kind of value: "b", "i" or "f" for a bool, an integer or a float."""
        return "b" if self.dtype.kind == "b" else "i" if jnp.issubdtype(self.dtype, jnp.integer) else "f"

    @property
    def shape(self) -> tuple[int, ...]:
        """The value's own shape."""
        return self.low.shape[GRID:]

    @property
    def number(self) -> int | None:
        """The integer that it is everywhere, if the program says so; `None`: it does not."""
        return self.affine.constant if self.affine is not None and not self.affine.terms else None

    def of_rank(self, rank: int) -> Interval:
        """Return a scalar with axes of size 1, as it stands beside arrays."""
        if len(self.shape) == rank:
            return self
        more: Any = lambda bound: (
            None if bound is None else bound.reshape(*bound.shape, *[1] * (rank - len(self.shape)))
        )
        affine = self.affine if self.number is not None else None
        return Interval(
            self.dtype, more(self.low), more(self.high), more(self.value), self.known, self.spread, None, affine
        )


def is_small(known: tuple[float, float]) -> bool:
    """Return whether bounds that are known when the program is traced are bounds, and none of int32's ends."""
    return LEAST < known[0] <= known[1] < MOST


def is_bounded(x: Interval) -> Array | bool:
    """Return whether an integer is bounded on both sides."""
    return True if is_small(x.known) else (x.low > LEAST) & (x.high < MOST)


def point(value: Array) -> Interval:
    """Return the bounds of a value `[*grid, *own shape]` of which each tile has one."""
    dtype = np.dtype(value.dtype)
    if not jnp.issubdtype(dtype, jnp.integer):
        return Interval(dtype, value, value, value, (0, 1) if dtype.kind == "b" else ANYTHING)
    info = jnp.iinfo(dtype)
    fits = info.min >= LEAST and info.max <= MOST
    bound = (value if fits else jnp.clip(value, max(info.min, LEAST), MOST)).astype(jnp.int32)
    return Interval(dtype, bound, bound, value, (float(info.min), float(info.max)), 1)


def constant(value: Any, dtype: Any) -> Interval:
    """Return the bounds of a number or an array that is written in the program."""
    array = np.asarray(value, dtype)
    shape = (1,) * GRID + array.shape
    # An array made in NumPy would be an argument of what is compiled, a number is part of it.
    found = point(jnp.full(shape, array.item(), dtype) if array.size == 1 else jnp.asarray(array).reshape(shape))
    if found.kind == "f" or array.size == 0:
        return found
    known = float(array.min()), float(array.max())
    is_number = found.kind == "i" and array.ndim == 0 and LEAST < array < MOST
    return dataclasses.replace(found, known=known, affine=Affine({}, int(array)) if is_number else None)


def unbounded(aval: Any) -> Interval:
    """Return the bounds of any value of a shape and dtype."""
    dtype, shape = np.dtype(aval.dtype), (1,) * GRID + tuple(aval.shape)
    full = lambda number, dtype: jnp.full(shape, number, dtype)
    if dtype.kind == "b":
        return Interval(dtype, full(False, bool), full(True, bool), known=(0, 1))
    if jnp.issubdtype(dtype, jnp.integer):
        return Interval(dtype, full(LEAST, jnp.int32), full(MOST, jnp.int32))
    return Interval(dtype, full(np.nan, dtype), full(np.nan, dtype))


def bounded(dtype: Any, low: Array, high: Array, **facts: Any) -> Interval:
    """Return a value between bounds, unbounded where it may be NaN or wrap around in an integer of few bits."""
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        if info.min > LEAST or info.max < MOST:
            fits = (low >= max(info.min, LEAST)) & (high <= min(info.max, MOST))
            low, high = jnp.where(fits, low, LEAST), jnp.where(fits, high, MOST)
            if not within(facts.get("known", ANYTHING), dtype):
                facts |= dict(known=ANYTHING, spread=None)
    elif dtype.kind != "b":
        is_nan = jnp.isnan(low) | jnp.isnan(high)
        low, high = jnp.where(is_nan, jnp.nan, low), jnp.where(is_nan, jnp.nan, high)
    return Interval(dtype, low, high, **facts)


def within(known: tuple[float, float], dtype: Any) -> bool:
    """Return whether all of a range are numbers of an integer dtype."""
    info = jnp.iinfo(dtype)
    return info.min <= known[0] and known[1] <= info.max


def as_integers(x: Interval) -> Interval:
    """Return a bool as 0 or 1, and an integer as it is."""
    if x.kind != "b":
        return x
    value = None if x.value is None else x.value.astype(jnp.int32)
    return Interval(np.dtype(np.int32), x.low.astype(jnp.int32), x.high.astype(jnp.int32), value, x.known, 2)


def over_grid(function: Callable[..., Any], *arrays: Array) -> Any:
    """Call `function`, of values' own shapes, with arrays `[*grid, *own shape]`; its results get such a grid too."""
    has = [any(array.shape[axis] > 1 for array in arrays) for axis in range(GRID)]
    for axis in reversed(range(GRID)):
        if has[axis]:
            function = jax.vmap(function, tuple(0 if array.shape[axis] > 1 else None for array in arrays))
    own = [array.reshape([n for n in array.shape[:GRID] if n > 1] + list(array.shape[GRID:])) for array in arrays]
    missing = tuple(axis for axis in range(GRID) if not has[axis])
    return jax.tree.map(lambda result: jnp.expand_dims(result, missing), function(*own))
