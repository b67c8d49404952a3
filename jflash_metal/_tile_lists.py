"""The lists of the tiles that blocks visit, and the packed masks of tiles that a mask function shows in part.

No Python function enters a shader. So a `mask_mod` is evaluated here, on the pairs of the tiles that are seen in part,
and a shader reads the bits (shaders/tile_mask.h). A shader walks over a list in order (shaders/walk.h), so that what
lies between two tiles is known when the later one comes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from jflash._semantics import visits
from jflash._semantics.coverage import TILE, with_marked
from jflash._semantics.spec import Operands, Spec

_WORD = 32
MASK_BYTES = TILE * TILE // 8
"""The bytes of the mask of a tile."""


def tile_lists(spec: Spec, operands: Operands) -> dict[str, Array]:
    """Return the arrays that the shaders bind: the lists of both sides, and the masks if there is a `mask_mod`."""
    queries, keys = visits.cuts(spec.query_length, TILE), visits.cuts(spec.key_length, TILE)
    found = visits.coverage(spec, operands, queries, keys, batches=1, heads=1)
    arrays = dict(key_tiles=_in_order(visits.listed(found)), query_tiles=_in_order(visits.listed(found.transposed())))
    if spec.mask_mod is not None:
        arrays["tile_masks"] = _packed(spec, operands, found.partial)
    return arrays


def _in_order(lists: visits.Lists) -> visits.Lists:
    """Return the lists with the entries of full and of partial tiles together in the order of tiles."""
    return jnp.concatenate([lists[..., :1], jnp.sort(lists[..., 1:], axis=-1)], axis=-1)


def _packed(
    spec: Spec, operands: Operands, partial: Bool[Array, "#B #N I J"]
) -> UInt32[Array, "#B #N I J queries words"]:
    """Return the bits of the mask function for the tiles that are seen in part, and 0 for others.

    Batch entries and heads that the function does not tell apart share them.
    """
    by_batch, by_head = told_apart(spec, operands)
    partial = partial if by_batch else jnp.any(partial, axis=0, keepdims=True)
    partial = partial if by_head else jnp.any(partial, axis=1, keepdims=True)
    shape = (spec.batch if by_batch else 1, spec.heads if by_head else 1, *partial.shape[2:])
    partial = jnp.broadcast_to(partial, shape)
    words = jnp.zeros((partial.size, TILE, TILE // _WORD), jnp.uint32)
    words = with_marked(partial, lambda place: _bits(spec, operands, jnp.unravel_index(place, shape)), words)
    return words.reshape(*shape, *words.shape[1:])


def told_apart(spec: Spec, operands: Operands) -> tuple[bool, bool]:
    """Return whether the mask function may show one batch entry, or one head, what it does not show another."""
    assert spec.mask_mod is not None
    by_batch, by_head, *_ = spec.mask_mod.looks_at
    moved = (*operands.mask_mod_arrays, operands.first_query, operands.first_key, operands.head_index)
    return by_batch or any(array is not None and array.shape[0] > 1 for array in moved), by_head


def _bits(spec: Spec, operands: Operands, tile: Sequence[Int[Array, ""]]) -> UInt32[Array, "queries words"]:
    """Return the bits of one tile, by its batch entry, head and places."""
    assert spec.mask_mod is not None
    assert operands.batch_index is not None
    assert operands.head_index is not None
    batch, head, i, j = (index.astype(jnp.int32) for index in tile)
    of_entry = lambda array: array[batch if array.shape[0] > 1 else 0]
    own = of_entry(operands.batch_index), of_entry(operands.head_index)[head]
    arrays = tuple(map(of_entry, operands.mask_mod_arrays))
    see = functools.partial(spec.mask_mod.scalar, *own, arrays=arrays)
    within = jnp.arange(TILE, dtype=jnp.int32)
    first_query, first_key = (
        0 if first is None else of_entry(first) for first in (operands.first_query, operands.first_key)
    )
    query, key = i * TILE + within + first_query, j * TILE + within + first_key
    seen = jax.vmap(jax.vmap(see, (None, 0)), (0, None))(query, key).reshape(TILE, -1, _WORD)
    bit = jnp.uint32(1) << jnp.arange(_WORD, dtype=jnp.uint32)
    return jnp.sum(jnp.where(seen, bit, 0), axis=-1, dtype=jnp.uint32)
