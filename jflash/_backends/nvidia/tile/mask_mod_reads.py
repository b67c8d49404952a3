"""What a `mask_mod` hides of a tile: its program, of numbers that were read of the arrays that it closes over.

A kernel evaluates it in the tiles that it leaves in part. Numbers may be read at indices that were read before. An
array has no most size: what a tile reads along its queries and its keys is little.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jaxtyping import Array, Bool

from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.tile import program_reads
from jflash._backends.nvidia.tile.inputs import KernelInputs, TileCoord
from jflash._backends.nvidia.tile.lowerable import lowerable
from jflash._semantics import tracing, visibility
from jflash._semantics.mask_mod import MaskMod
from jflash._semantics.program_reads import ELEMENTWISE, analysis
from jflash._semantics.score_mod import elementwise
from jflash._semantics.spec import Spec
from jflash._semantics.tile import Tile

_DTYPES = frozenset({np.dtype(bool), np.dtype(np.int32), np.dtype(np.float32)})

_COLUMNS = 32
"""Columns for which a function is evaluated at a time."""


def unsupported(spec: Spec) -> str | None:
    """Return why kernels cannot take a call's `mask_mod`, in words for the user; `None` if they can."""
    if spec.mask_mod is None:
        return None
    found, jaxpr = analysis(spec.mask_mod), spec.mask_mod.jaxpr
    if found.reason is not None:
        return f"it takes no mask_mod that {found.reason}."
    if (name := next(iter(sorted(found.primitives - ELEMENTWISE)), None)) is not None:
        return f"it takes no mask_mod that computes {name}."
    computed = [atom for equation in tracing.equations(jaxpr.jaxpr) for atom in (*equation.invars, *equation.outvars)]
    dtypes = {np.dtype(atom.aval.dtype) for atom in computed if not isinstance(atom, Literal)}
    if (other := next(iter(sorted(dtypes - _DTYPES, key=str)), None)) is not None:
        return f"it takes no mask_mod that computes in {other}, but in int32, float32 and bool."
    if any(math.prod(array.shape) >= 2**31 for array in jaxpr.consts):
        return "it takes no mask_mod that reads an array of 2**31 numbers or more."
    return None


def columns_together(spec: Spec, columns: int) -> int:
    """Return for how many of a tile's columns a kernel makes its mask at a time.

    What a function makes of a column's index waits in registers for the rows: for all columns, more than there are.
    """
    in_parts = spec.mask_mod is not None and not facts_of(spec).has_packed_mask and columns % _COLUMNS == 0
    return _COLUMNS if in_parts else columns


@dataclasses.dataclass(frozen=True)
class _OfReads:
    """A `mask_mod` of indices, and of what is read in the place of its arrays, for one tile."""

    mask_mod: MaskMod
    key_minus_query: Any

    def __call__(self, batch: Any, head: Any, query: Any, key: Any, numbers: Sequence[Any]) -> Bool[Array, "..."]:
        def scalar(query: Any, batch: Any, head: Any, key: Any, key_minus_query: Any, *numbers: Any) -> Any:
            at = batch, head, query, key
            return jnp.asarray(program_reads.result(self.mask_mod, at, key_minus_query, numbers[:-1]), bool)

        others = batch, head, key, self.key_minus_query, *map(jnp.asarray, numbers)
        return lowerable(lambda query, *others: elementwise(scalar, query, others, ()))(query, *others)


def visible(inputs: KernelInputs, at: TileCoord, tile: Tile) -> Bool[Array, "rows columns"]:
    """Return which logits of a tile count; those of keys past the end do not."""
    spec = inputs.spec
    if spec.mask_mod is not None:
        numbers: Any = program_reads.load(inputs, "mask_mod", at, tile)
        of_reads: Any = _OfReads(spec.mask_mod, tile.key_minus_query)
        spec, tile = dataclasses.replace(spec, mask_mod=of_reads), tile._replace(mask_mod_arrays=numbers)
    if tile.key_lengths is None:
        tile = tile._replace(key_lengths=jnp.int32(spec.key_length))
    seen = visibility.visible(spec, tile)
    assert seen is not None
    return seen
