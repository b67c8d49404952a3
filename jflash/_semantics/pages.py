"""Keys and values in the pages of a cache.

Key j of a batch entry is row j % page_size of page `page_table[entry, j // page_size]`, and so is value j. A call with
pages means what the same call means with keys and values that were taken out of them (`gathered`). A backend that walks
over tiles takes out those of one tile at a time (`load`). What lies past an entry's length is not looked up, so the
table may hold anything there: the first row of the cache comes in its place, and is padding, as in any call with
lengths.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import Corner, TileShape, cut


def load(
    spec: Spec, operands: Operands, corner: Corner, shape: TileShape
) -> tuple[Float[Array, "b k j H"], Float[Array, "b k j D"]]:
    """Return a tile's keys and values, scaled if the cache is, in the query's dtype."""
    pages, table, lengths = spec.pages, operands.page_table, operands.key_lengths
    assert pages is not None
    assert table is not None
    assert lengths is not None
    place = (corner.key + jnp.arange(shape.keys, dtype=jnp.int32))[None]
    number = cut(table, (corner.batch, 0), (shape.batch, table.shape[1]))[:, place[0] // pages.size]
    inside = place < cut(lengths, (corner.batch,), (shape.batch,))[:, None]
    page, row = jnp.where(inside, number, 0), jnp.where(inside, place % pages.size, 0)
    value_at = spec.head_dim if pages.interleaved else 0

    def take(cache: Array, scale: Array | None, first: int, features: int) -> Array:
        taken = _take(cache, page * pages.size + row, corner, shape, first, features)
        if scale is not None:
            taken = taken.astype(spec.accumulator) * _take(scale[..., None], page, corner, shape, 0, 1)
        return jnp.broadcast_to(taken.astype(spec.dtype), (shape.batch, *taken.shape[1:]))

    return (
        take(operands.key, operands.k_scale, 0, spec.head_dim),
        take(operands.value, operands.v_scale, value_at, spec.value_dim),
    )


def _take(
    array: Array, row: Int32[Array, "#b j"], corner: Corner, shape: TileShape, first: int, features: int
) -> Array:
    """Return rows of an array `[#B, #rows, #K, features]`, for the tile's key heads, as `[#b, #k, #j, features]`."""
    zero = jnp.zeros((1, 1), jnp.int32)
    entry = zero if array.shape[0] == 1 else corner.batch + jnp.arange(shape.batch, dtype=jnp.int32)[:, None]
    row = zero if array.shape[1] == 1 else row
    head, heads = (0, 1) if array.shape[2] == 1 else (corner.key_head, shape.key_heads)
    # The features are a part of each index: a slice of the cache, made before a loop, would be a copy of it.
    starts = jnp.broadcast_arrays(entry, row, zero + head, zero + first)
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(2, 3), collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 2, 3)
    )
    taken = lax.gather(array, jnp.stack(starts, axis=-1), dimensions, (1, 1, heads, features), mode="clip")
    return jnp.moveaxis(taken, 1, 2)


def gathered(spec: Spec, operands: Operands) -> Operands:
    """Return the operands of the same call with keys and values `[B, S, K, ...]` instead of pages."""
    whole = TileShape(spec.batch, spec.key_heads, spec.query_length, spec.key_length)
    key, value = (jnp.moveaxis(array, 1, 2) for array in load(spec, operands, Corner(0, 0, 0, 0), whole))
    return operands._replace(key=key, value=value, page_table=None, k_scale=None, v_scale=None)
