"""One rectangle of the problem: some queries by some keys, for some batches and heads, and all that bears on it.

The logits of a tile are `[b, k, g, i, j]`: batch, key head, query head of the group, query row, key. Every array of a
`Tile` broadcasts to that. So the modules that say what attention means (`logits`, `visibility`, `dropout`) are written
once, elementwise, for a backend that holds the whole problem in one tile and for those that walk over many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jflash._semantics.spec import Operands, Spec


class Parameters(NamedTuple):
    """The arrays that shape the logits and may have a gradient.

    A whole call's are laid out as in `Operands`. A tile's broadcast to its logits (`score_mod_arrays`: `[#b, ...]`).
    """

    scale: Float[Array, "#b 1 1 1 1"] | None
    alibi_slopes: Float[Array, "#b k g 1 1"] | None
    bias: Float[Array, "#b #k #g #i #j"] | None
    score_mod_arrays: tuple[Any, ...]
    """The arrays that `score_mod` closes over, `None` for those that are left out."""


PARAMETERS = tuple(name for name in Parameters._fields if name != "score_mod_arrays")
"""The parameters that are one operand each, by name."""


class Tile(NamedTuple):
    """The arrays that decide a tile's logits and who sees whom, each broadcastable to `[b, k, g, i, j]`."""

    parameters: Parameters
    query: Int[Array, "1 1 1 i 1"]
    key: Int[Array, "1 1 1 1 j"]
    first_query: Int[Array, "#b 1 1 1 1"] | None
    first_key: Int[Array, "#b 1 1 1 1"] | None
    position: Int[Array, "#b 1 1 i 1"]
    """The query's place among the keys: its index plus the offset."""
    batch: Int[Array, "b 1 1 1 1"] | None
    head: Int[Array, "#b k g 1 1"] | None
    mask: Bool[Array, "#b #k #g #i #j"] | None
    query_lengths: Int[Array, "#b 1 1 1 1"] | None
    key_lengths: Int[Array, "#b 1 1 1 1"] | None
    query_segments: Int[Array, "#b 1 1 i 1"] | None
    key_segments: Int[Array, "#b 1 1 1 j"] | None
    dropout_seed: UInt32[Array, "b 2"] | None
    mask_mod_arrays: tuple[Array, ...] = ()
    """The arrays that `mask_mod` closes over, each `[#b, *its own shape]`."""
    distance_override: Float[Array, "#b 1 1 i j"] | None = None
    """The `distance` of a backend that does not compute it from `position` and `key`."""
    key_minus_query_override: Int[Array, "#b 1 1 i j"] | None = None
    """The `key_minus_query` of a backend that does not compute it from `indices`."""

    @property
    def distance(self) -> Float[Array, "#b 1 1 i j"] | Int[Array, "#b 1 1 i j"]:
        """The query's position less the key."""
        return self.position - self.key if self.distance_override is None else self.distance_override

    @property
    def indices(self) -> tuple[Int[Array, "#b 1 1 i 1"], Int[Array, "#b 1 1 1 j"]]:
        """The indices of the query and of the key in their whole sequences."""
        query = self.query if self.first_query is None else self.query + self.first_query
        return query, self.key if self.first_key is None else self.key + self.first_key

    @property
    def key_minus_query(self) -> Int[Array, "#b 1 1 i j"]:
        """The key's index less the query's, in their whole sequences."""
        query, key = self.indices
        return key - query if self.key_minus_query_override is None else self.key_minus_query_override


@dataclasses.dataclass(frozen=True)
class TileShape:
    """The size of a tile along each axis."""

    batch: int
    key_heads: int
    queries: int
    keys: int


class Corner(NamedTuple):
    """The indices at which a tile begins, traced or static."""

    batch: Int[Array, ""] | int
    key_head: Int[Array, ""] | int
    query: Int[Array, ""] | int
    key: Int[Array, ""] | int


def cut(array: Array, starts: tuple[Int[Array, ""] | int, ...], sizes: tuple[int, ...]) -> Array:
    """Return the block of `sizes` at `starts`. An axis of size 1 is shared, and taken as it is."""
    sizes = tuple(1 if have == 1 else size for have, size in zip(array.shape, sizes, strict=True))
    if sizes == array.shape:
        return array
    return lax.dynamic_slice(array, _int32(array, starts), sizes, allow_negative_indices=False)


def paste(array: Array, block: Array, starts: tuple[Int[Array, ""] | int, ...]) -> Array:
    """Return `array` with `block` in it at `starts`, in place inside a compiled loop."""
    if block.shape == array.shape:
        return block.astype(array.dtype)
    starts = _int32(array, starts)
    return lax.dynamic_update_slice(array, block.astype(array.dtype), starts, allow_negative_indices=False)


def paste_add(array: Array, block: Array, starts: tuple[Int[Array, ""] | int, ...]) -> Array:
    """Return `array` with `block` added at `starts`, the mirror of `cut`."""
    if block.shape == array.shape:
        return array + block.astype(array.dtype)
    return paste(array, cut(array, starts, block.shape) + block.astype(array.dtype), starts)


def _int32(array: Array, starts: tuple[Int[Array, ""] | int, ...]) -> tuple[Array, ...]:
    """Return `starts` in int32, whatever dtype Python's integers have, and 0 along shared axes."""
    return tuple(
        jnp.asarray(0 if size == 1 else start, jnp.int32) for size, start in zip(array.shape, starts, strict=True)
    )


def zero_padding(array: Float[Array, "B L ..."], lengths: Int[Array, "#B"]) -> Float[Array, "B L ..."]:
    """Return `array` with zeros in rows at or past the length: padding may hold NaN, and 0 * NaN is NaN."""
    index = jnp.arange(array.shape[1])[None]
    inside = index < lengths[:, None]
    return jnp.where(inside.reshape(*inside.shape, *[1] * (array.ndim - 2)), array, 0)


def split_heads(array: Array, axis: int, spec: Spec) -> Array:
    """Return `array` with its heads axis N split into [K, G], or a shared one into [1, 1]."""
    heads = (spec.key_heads, spec.group) if array.shape[axis] == spec.heads else (1, 1)
    return array.reshape(*array.shape[:axis], *heads, *array.shape[axis + 1 :])


def tile_parameters(operands: Operands) -> Parameters:
    """Return the parameters of a whole call."""
    return Parameters(*(getattr(operands, name) for name in Parameters._fields))


def smooth_parameters(operands: Operands) -> Parameters:
    """Return the parameters of a whole call that have a derivative, `None` for other arrays of `score_mod`."""
    smooth = lambda array: array if jnp.issubdtype(array.dtype, jnp.inexact) else None
    return tile_parameters(operands)._replace(score_mod_arrays=tuple(map(smooth, operands.score_mod_arrays)))


class _Part(NamedTuple):
    """The part of an array that a tile takes: the shape to see the array in, where the part begins, and its size."""

    view: tuple[int, ...]
    starts: tuple[Int[Array, ""] | int, ...]
    sizes: tuple[int, ...]


def _by_batch(array: Array, corner: Corner, shape: TileShape) -> _Part:
    return _Part((*array.shape, 1, 1, 1, 1), (corner.batch, 0, 0, 0, 0), (shape.batch, 1, 1, 1, 1))


def _whole(array: Array, corner: Corner, shape: TileShape) -> _Part:
    return _Part(array.shape, (corner.batch, *[0] * (array.ndim - 1)), (shape.batch, *array.shape[1:]))


def _by_head(spec: Spec, array: Array, corner: Corner, shape: TileShape) -> _Part:
    view = (*split_heads(array, 1, spec).shape, 1, 1)
    return _Part(view, (corner.batch, corner.key_head, 0, 0, 0), (shape.batch, shape.key_heads, spec.group, 1, 1))


def _by_pair(spec: Spec, array: Array, corner: Corner, shape: TileShape) -> _Part:
    return _Part(
        split_heads(array, 1, spec).shape,
        (corner.batch, corner.key_head, 0, corner.query, corner.key),
        (shape.batch, shape.key_heads, spec.group, shape.queries, shape.keys),
    )


def _take(array: Array, part: _Part) -> Array:
    return cut(array.reshape(part.view), part.starts, part.sizes)


def _parameter_parts(spec: Spec, whole: Parameters, corner: Corner, shape: TileShape) -> Parameters:
    """Return the parameters with a `_Part` in the place of each array."""
    by_rank: dict[int, Callable[..., _Part]] = {
        1: lambda array: _by_batch(array, corner, shape),
        2: lambda array: _by_head(spec, array, corner, shape),
        4: lambda array: _by_pair(spec, array, corner, shape),
    }
    parts: Any = {name: array for name in PARAMETERS if (array := getattr(whole, name)) is not None}
    parts = {name: by_rank[array.ndim](array) for name, array in parts.items()}
    captured: Any = [None if array is None else _whole(array, corner, shape) for array in whole.score_mod_arrays]
    return whole._replace(**parts, score_mod_arrays=tuple(captured))


def load_parameters(spec: Spec, whole: Parameters, corner: Corner, shape: TileShape) -> Parameters:
    """Return the tile's part of the parameters.

    The bias comes in the accumulator's dtype, so that its gradient is summed in it.
    """
    tile = jax.tree.map(_take, whole, _parameter_parts(spec, whole, corner, shape))
    return tile if tile.bias is None else tile._replace(bias=tile.bias.astype(spec.accumulator))


def add_parameters(spec: Spec, sums: Parameters, tile: Parameters, corner: Corner, shape: TileShape) -> Parameters:
    """Return `sums`, laid out as a whole call's parameters, with a tile's added where `load_parameters` takes them."""

    def add(total: Array, part: _Part, block: Array) -> Array:
        return paste_add(total.reshape(part.view), block, part.starts).reshape(total.shape)

    return jax.tree.map(add, sums, _parameter_parts(spec, sums, corner, shape), tile)


LIMITS = "query_offset", "query_lengths", "key_lengths"
"""Operands that say which keys an entry's queries see, whose values are not known before the call."""

_OFFSET_LIMIT = 2**30
"""Sums of offsets, lengths and sides of a window do not wrap. It is more than callers may give, for parts of a call."""


def in_range[Values: Array | None](spec: Spec, name: str, values: Values) -> Values:
    """Return an operand of `LIMITS`, which may have any int32 values, within the range that counts: lengths from 0 to
    those of the call's queries or keys. A backend reads them by this, as a pass over them would be a kernel more."""
    ranges = dict(query_lengths=(0, spec.query_length), key_lengths=(0, spec.key_length))
    return values if values is None else jnp.clip(values, *ranges.get(name, (-_OFFSET_LIMIT, _OFFSET_LIMIT)))


def load_tile(spec: Spec, operands: Operands, corner: Corner, shape: TileShape) -> Tile:
    """Return the tile of `shape` at `corner`."""
    by_batch = lambda array: None if array is None else _take(array, _by_batch(array, corner, shape))
    by_head = lambda array: None if array is None else _take(array, _by_head(spec, array, corner, shape))
    by_pair = lambda array: None if array is None else _take(array, _by_pair(spec, array, corner, shape))
    b, _, i, j = corner
    query = (i + jnp.arange(shape.queries, dtype=jnp.int32))[None, None, None, :, None]
    key = (j + jnp.arange(shape.keys, dtype=jnp.int32))[None, None, None, None, :]
    limit = lambda name: by_batch(in_range(spec, name, getattr(operands, name)))
    offset = limit("query_offset") if operands.query_offset is not None else spec.query_offset
    assert offset is not None
    query_segments, key_segments = operands.query_segments, operands.key_segments
    if query_segments is not None and key_segments is not None:
        query_segments = cut(query_segments, (b, i), (shape.batch, shape.queries))[:, None, None, :, None]
        key_segments = cut(key_segments, (b, j), (shape.batch, shape.keys))[:, None, None, None, :]
    seed = operands.dropout_seed
    return Tile(
        parameters=load_parameters(spec, tile_parameters(operands), corner, shape),
        query=query,
        key=key,
        first_query=by_batch(operands.first_query),
        first_key=by_batch(operands.first_key),
        position=query + offset,
        batch=by_batch(operands.batch_index),
        head=by_head(operands.head_index),
        mask=by_pair(operands.mask),
        query_lengths=limit("query_lengths"),
        key_lengths=limit("key_lengths"),
        query_segments=query_segments,
        key_segments=key_segments,
        dropout_seed=None if seed is None else cut(seed, (b, 0), (shape.batch, 2)),
        mask_mod_arrays=tuple(_take(array, _whole(array, corner, shape)) for array in operands.mask_mod_arrays),
    )
