"""Reads of arrays: a number at an index is between the least and the most that the array has within its bounds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jflash._semantics.intervals.interval import (
    GRID,
    Blocks,
    Interval,
    bounded,
    over_grid,
    unbounded,
)


def gather(params: Any, x: Interval, index: Interval) -> Interval | None:
    """Return one slice of x, at an index that is a vector; `None` for other gathers."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batched = len(numbers.operand_batching_dims) > 0
    if len(index.shape) != 1 or batched or len(numbers.offset_dims) + len(numbers.collapsed_slice_dims) != len(sizes):
        return None
    outside: Array | bool = False
    parts = _elements(index)
    for place, axis in enumerate(numbers.start_index_map):
        start, most = parts[place], x.shape[axis] - sizes[axis]
        outside |= (start.low < 0) | (start.high > most)
        x = dynamic_slice(x, axis, start, sizes[axis])
    squeezed = tuple(GRID + axis for axis in numbers.collapsed_slice_dims)
    squeeze: Any = lambda end: None if end is None else end.squeeze(squeezed)
    x = Interval(x.dtype, squeeze(x.low), squeeze(x.high), squeeze(x.value), x.known)
    if not str(params["mode"]).endswith("FILL_OR_DROP"):
        return x
    anything, found = unbounded(jax.ShapeDtypeStruct(x.shape, x.dtype)), jnp.asarray(outside)
    found = found.reshape(*found.shape, *[1] * len(x.shape))
    return bounded(x.dtype, jnp.where(found, anything.low, x.low), jnp.where(found, anything.high, x.high))


def _elements(index: Interval) -> list[Interval]:
    if index.parts is not None:
        return list(index.parts)
    at: Any = lambda end, place: None if end is None else end[..., place]
    return [
        Interval(index.dtype, at(index.low, n), at(index.high, n), at(index.value, n), index.known, index.spread)
        for n in range(index.shape[0])
    ]


def dynamic_slice(x: Interval, axis: int, start: Interval, size: int) -> Interval:
    """Return `size` elements along an own axis, from `start` on; where they would end late, they begin early."""
    length = x.shape[axis]
    if size == length:
        return x
    if start.value is not None:
        first = jnp.clip(start.value, 0, length - size).astype(jnp.int32)
        take = lambda array: over_grid(lambda own, at: lax.dynamic_slice_in_dim(own, at, size, axis), array, first)
        if x.value is not None:
            return dataclasses.replace(x, low=take(x.low), high=take(x.high), value=take(x.value), affine=None)
        return Interval(x.dtype, take(x.low), take(x.high), known=x.known)
    least, most = (jnp.logical_and, jnp.logical_or) if x.kind == "b" else (jnp.minimum, jnp.maximum)
    if start.blocks is not None and size == 1 and x.low.shape[start.blocks.axis] == 1:
        tiles = start.low.shape[start.blocks.axis]
        low, high = (
            _of_blocks(combine, end, axis, start.blocks, tiles) for combine, end in ((least, x.low), (most, x.high))
        )
        return bounded(x.dtype, low, high, known=x.known)
    bounds = [jnp.clip(end, 0, length - size) for end in (start.low, start.high)]
    levels = min(length, start.spread or length).bit_length()
    extreme = lambda combine, array: over_grid(functools.partial(_extreme, combine, axis, size, levels), array, *bounds)
    return bounded(x.dtype, extreme(least, x.low), extreme(most, x.high), known=x.known)


def _of_blocks(combine: Callable[..., Array], array: Array, axis: int, blocks: Blocks, tiles: int) -> Array:
    """Return for each tile along an axis of the grid the extreme of its block of an own axis."""
    own, each = GRID + axis, blocks.size
    before = -blocks.offset % each
    length = array.shape[own]
    after = -(before + length) % each
    padded = jnp.pad(array, [(before, after) if a == own else (0, 0) for a in range(array.ndim)], mode="edge")
    count = padded.shape[own] // each
    padded = padded.reshape(*padded.shape[:own], count, each, *padded.shape[own + 1 :])
    reduced = _reduced(combine, padded, own + 1)
    # What is before the array, or past its end, is read at the end.
    places = jnp.clip(jnp.arange(tiles) + (blocks.offset + before) // each, 0, count - 1)
    found = jnp.take(reduced, places, axis=own).squeeze(blocks.axis)
    return jnp.expand_dims(jnp.moveaxis(found, own - 1, blocks.axis), own)


def _reduced(combine: Callable[..., Array], array: Array, axis: int) -> Array:
    reduce: dict[Any, Callable[..., Array]] = {
        jnp.minimum: jnp.min, jnp.maximum: jnp.max, jnp.logical_and: jnp.all, jnp.logical_or: jnp.any,
    }  # fmt: skip
    return reduce[combine](array, axis=axis)


def _extreme(
    combine: Callable[..., Array], axis: int, size: int, levels: int, array: Array, low: Array, high: Array
) -> Array:
    """Return the extreme of slices that begin between `low` and `high`.

    Two stretches of 2**level elements cover them (a sparse table, one level at a time).
    """
    level, found, length = 31 - lax.clz(high - low + 1), None, array.shape[axis]
    for current in range(levels):
        if current:
            step = 2 ** (current - 1)
            last = lax.slice_in_dim(array, length - 1, length, axis=axis)
            end = jnp.broadcast_to(last, [step if a == axis else n for a, n in enumerate(array.shape)])
            array = combine(array, jnp.concatenate([lax.slice_in_dim(array, step, length, axis=axis), end], axis=axis))
        firsts = [jnp.clip(first, 0, length - 1) for first in (low, high + 1 - lax.shift_left(jnp.int32(1), level))]
        each = [jnp.take(array, jnp.minimum(first + jnp.arange(size), length - 1), axis=axis) for first in firsts]
        both = combine(*each)
        found = both if found is None else jnp.where(level == current, both, found)
    assert found is not None
    return found
