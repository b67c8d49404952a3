"""What a kernel makes of a `score_mod`, with what was read for its arrays (`program_reads`), and their gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jflash._backends.nvidia.tile import program_reads
from jflash._semantics.program_reads import Read, indices
from jflash._semantics.score_mod import ScoreMod, elementwise
from jflash._semantics.score_mod_reads import array_name, summed
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import Tile


@dataclasses.dataclass(frozen=True)
class _Rest:
    """A `score_mod` of a logit, indices, and what is read, for one tile."""

    score_mod: ScoreMod
    key_minus_query: Any

    def __call__(self, logits: Any, *others: Any) -> Any:
        *of_logit, numbers = others

        def scalar(logit: Any, *others: Any) -> Any:
            *of_logit, key_minus_query = others[:5]
            result = program_reads.result(self.score_mod, [logit, *of_logit], key_minus_query, others[5:-1])
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
