"""How a kernel has what a function of scalars reads of its arrays (`_semantics.program_reads`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

from jflash._backends.nvidia.tile.inputs import KernelInputs, TileCoord, shared_index
from jflash._backends.nvidia.tile.lowerable import lowerable
from jflash._semantics.program_reads import Function, Read, analysis, indices, number, values
from jflash._semantics.score_mod import elementwise
from jflash._semantics.tile import Tile

Kind = Literal["score_mod", "mask_mod"]
"""A call's function; with `_` and their number behind it, the names that its arrays have among a kernel's."""


def prepare(kind: Kind, arrays: Sequence[Array | None]) -> dict[str, Array]:
    """Return a function's arrays, or their tangents, as kernels take them, by name: `[#B, numbers]`."""
    prepared: dict[str, Array] = {}
    for place, array in enumerate(arrays):
        if array is not None:
            dtype = jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32
            prepared[f"{kind}_{place}"] = array.reshape(array.shape[0], -1).astype(dtype)
    return prepared


def load(inputs: KernelInputs, kind: Kind, at: TileCoord, tile: Tile) -> tuple[Any, ...]:
    """Return all that a tile reads of the arrays of `inputs`: a tile of numbers, or one; 0 where there is no array."""
    function, loaded = getattr(inputs.spec, kind), list[Any]()
    if function is None:
        return ()
    for read in analysis(function).reads:
        ref = inputs.refs.get(f"{kind}_{read.array}")
        if ref is None:
            loaded.append(0.0)
            continue
        entry = shared_index(ref, at.batch, None)[0]
        place = index(function, read, tile, loaded if "array" in read.needs else ())
        loaded.append(inputs.ops.gather(ref.at[entry], place) if _differs(read, tile) else ref[entry, place])
    return tuple(loaded)


def _differs(read: Read, tile: Tile) -> bool:
    """Return whether a tile's elements read different numbers; where heads are packed, its rows have their own."""
    return read.by_position or ("head" in read.needs and _is_tile(tile.head))


def _is_tile(value: Any) -> bool:
    return jnp.ndim(value) > 0


def index(function: Function, read: Read, tile: Tile, numbers: Sequence[Any] = ()) -> Any:
    """Return where in the flat array a tile's number is, or its numbers are; `numbers` as for `indices`."""

    def scalar(query: Any, batch: Any, head: Any, key: Any, key_minus_query: Any, *numbers: Any) -> Any:
        return indices(function, batch, head, query, key, key_minus_query, numbers[:-1])[read.place]

    if not _differs(read, tile):
        # What differs between elements has no part in the index.
        zero, known = jnp.int32(0), list[Any]([tile.head, *numbers])
        head, *others = (jnp.zeros((), value.dtype) if _is_tile(value) else value for value in known)
        return scalar(zero, tile.batch, head, zero, zero, *others, ())
    query, key = tile.indices
    others: Any = tile.batch, tile.head, key, tile.key_minus_query, *numbers
    return lowerable(lambda query, *others: elementwise(scalar, query, others, ()))(query, *others)


def result(function: Function, arguments: Sequence[Any], key_minus_query: Any, numbers: Sequence[Any]) -> Any:
    """Return the result of a function's program for one element, from the numbers that it reads in their order."""
    remaining = iter(numbers)
    read = lambda part: number(function, part, next(remaining))
    return values(function, read, arguments, key_minus_query)[0]
