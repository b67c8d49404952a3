"""How a kernel has what a `score_mod` reads of its arrays (`program_reads`), and sums the gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.tile import program_reads
from jflash._backends.nvidia.tile.inputs import KernelInputs, Loaded, TileCoord
from jflash._semantics.program_reads import Read, indices, values
from jflash._semantics.score_mod import ScoreMod, elementwise
from jflash._semantics.score_mod_reads import array_name, of_tables, summed
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import Tile


def prepare(arrays: Sequence[Array | None]) -> dict[str, Array]:
    """Return arrays, or their tangents, as kernels take them, by name: `[#B, numbers]`."""
    return program_reads.prepare(arrays, array_name)


def load(inputs: KernelInputs, at: TileCoord, tile: Tile) -> tuple[Any, ...]:
    """Return all that a tile reads of the arrays of `inputs`: a tile of numbers, or one; 0 where there is no array."""
    score_mod = inputs.spec.score_mod
    return () if score_mod is None else program_reads.load(inputs, score_mod, array_name, at, tile)


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
    tile, score_mod = inputs.tile(at, p.shape, loaded), inputs.spec.score_mod
    assert score_mod is not None
    for read in of_tables(inputs.spec):
        numbers = jnp.where(p == 0, 0.0, cotangents[read.name])
        inputs.ops.add_by_index(sums[array_name(read.array)], program_reads.index(score_mod, read, tile), numbers)


@dataclasses.dataclass(frozen=True)
class _Rest:
    """A `score_mod` of a logit, indices, and what is read, for one tile."""

    score_mod: ScoreMod
    key_minus_query: Any

    def __call__(self, logits: Any, *others: Any) -> Any:
        *of_logit, numbers = others

        def scalar(logit: Any, *others: Any) -> Any:
            *of_logit, key_minus_query = others[:5]
            read = program_reads.reader(self.score_mod, others[5:-1])
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
