"""How a kernel has what a `score_mod` reads of its arrays (`_semantics.score_mod_reads`), and sums the gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.tile.inputs import KernelInputs, Loaded, TileCoord, shared_index
from jflash._semantics.score_mod import ScoreMod, elementwise
from jflash._semantics.score_mod_reads import Read, Slice, array_name, indices, of_tables, reads, summed, values
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import Tile


def prepare(arrays: Sequence[Array | None]) -> dict[str, Array]:
    """Return arrays, or their tangents, as kernels take them, by name: `[#B, numbers]`."""
    prepared: dict[str, Array] = {}
    for index, array in enumerate(arrays):
        if array is not None:
            dtype = jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32
            prepared[array_name(index)] = array.reshape(array.shape[0], -1).astype(dtype)
    return prepared


def load(inputs: KernelInputs, at: TileCoord, tile: Tile) -> tuple[Any, ...]:
    """Return all that a tile reads of the arrays of `inputs`: a tile of numbers, or one; 0 where there is no array."""

    def number(read: Read) -> Any:
        ref = inputs.refs.get(array_name(read.array))
        if ref is None:
            return 0.0
        entry, index = shared_index(ref, at.batch, None)[0], _index(inputs.spec, read, tile)
        return inputs.ops.gather(ref.at[entry], index) if read.by_position else ref[entry, index]

    return tuple(map(number, reads(inputs.spec)))


def add_to_tables(
    inputs: KernelInputs,
    at: TileCoord,
    loaded: Loaded,
    p: Array,
    cotangents: Mapping[str, Array],
    sums: Mapping[str, Ref],
) -> None:
    """Add the cotangents of what a tile reads by position, by the reads' names, to tables of sums by the arrays' names,
    if there are any.

    The indices are made of `at`. With an opaque zero in it they are not those of `load` to the compiler, which would
    keep a tile's in registers, or spill them. Where a probability is 0, what is read there counts for nothing.
    """
    if not sums:
        return
    tile = inputs.tile(at, p.shape, loaded)
    for read in of_tables(inputs.spec):
        numbers = jnp.where(p == 0, 0.0, cotangents[read.name])
        inputs.ops.add_by_index(sums[array_name(read.array)], _index(inputs.spec, read, tile), numbers)


def _index(spec: Spec, read: Read, tile: Tile) -> Any:
    """Return where in the flat array a tile's number is, or its numbers are."""
    score_mod = spec.score_mod
    assert score_mod is not None

    def scalar(query: Any, batch: Any, head: Any, key: Any, key_minus_query: Any, _: Any) -> Any:
        return indices(score_mod, batch, head, query, key, key_minus_query)[read.place]

    if not read.by_position:
        zero = jnp.int32(0)
        return scalar(zero, tile.batch, tile.head, zero, zero, ())
    query, key = tile.indices
    others: Any = tile.batch, tile.head, key, tile.key_minus_query
    return elementwise(scalar, query, others, ())


@dataclasses.dataclass(frozen=True)
class _Rest:
    """A `score_mod` of a logit, indices, and what is read, for one tile."""

    score_mod: ScoreMod
    key_minus_query: Any

    def __call__(self, logits: Any, *others: Any) -> Any:
        *of_logit, numbers = others

        def scalar(logit: Any, *others: Any) -> Any:
            *of_logit, key_minus_query = others[:5]
            remaining = iter(others[5:-1])

            def read(part: Slice) -> Any:
                number, dtype = next(remaining), self.score_mod.jaxpr.consts[part.array].dtype
                return number != 0 if dtype == jnp.bool_ else jnp.asarray(number, dtype)

            (result,) = values(self.score_mod, read, [logit, *of_logit], key_minus_query)
            return jnp.asarray(result, logit.dtype)

        return elementwise(scalar, logits, (*of_logit, self.key_minus_query, *map(jnp.asarray, numbers)), ())


def rest(spec: Spec, tile: Tile) -> Spec:
    """Return the call whose `score_mod`, of a tile's logits, takes what was read for its arrays."""
    if spec.score_mod is None:
        return spec
    of_reads: Any = _Rest(spec.score_mod, tile.key_minus_query)
    return dataclasses.replace(spec, score_mod=of_reads)


def gradients(spec: Spec, operands: Operands, sums: Mapping[str, Array]) -> tuple[Any, ...]:
    """Return the gradients of the arrays, `None` for those that have none.

    `sums` has, as d_ and a read's name, what its gradients sum to for each row of a head, `[B, N, L]`: of reads that
    positions have no part in; and as d_ and the name of an array that is read by position, `[B, numbers]`, those sums.
    """
    totals: list[Any] = [None] * len(operands.score_mod_arrays)
    for place, array in enumerate(operands.score_mod_arrays):
        of_table = sums.get(f"d_{array_name(place)}")
        if of_table is not None:
            totals[place] = of_table if array.shape[0] > 1 else of_table.sum(axis=0)
    for read in summed(spec):
        total = sums.get(f"d_{read.name}")
        if total is not None:
            array, index = operands.score_mod_arrays[read.array], _by_head(spec, operands, read)
            # Not a scatter, which may add in any order.
            is_read = index[..., None] == jnp.arange(math.prod(array.shape[1:]))
            found = jnp.where(is_read, total.sum(axis=2)[..., None], 0).sum(axis=1 if array.shape[0] > 1 else (0, 1))
            before = totals[read.array]
            totals[read.array] = found if before is None else before + found
    shaped = lambda total, like: total.reshape(like.shape).astype(spec.gradient_dtype(like.dtype))
    every = zip(totals, operands.score_mod_arrays, strict=True)
    return tuple(None if total is None else shaped(total, like) for total, like in every)


def _by_head(spec: Spec, operands: Operands, read: Read) -> Array:
    """Return where in the flat array each head's number is, `[B, N]`."""
    score_mod, zero, shape = spec.score_mod, jnp.int32(0), (spec.batch, spec.heads)
    assert score_mod is not None
    assert operands.batch_index is not None
    assert operands.head_index is not None
    one = lambda batch, head: jnp.asarray(indices(score_mod, batch, head, zero, zero, zero)[read.place])
    batch, head = (jnp.broadcast_to(index, shape) for index in (operands.batch_index[:, None], operands.head_index))
    return jnp.broadcast_to(jax.vmap(jax.vmap(one))(batch, head), shape)
