"""A call with a mask function in parts of queries, so that the function's bits take bounded memory.

Each part is a call of its own: some rows with all keys, whose offset, lengths and first query make positions and
indices come out right. What rows own is put together, and what they share is added up in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jflash import _mesh
from jflash._semantics import visibility
from jflash._semantics.coverage import TILE
from jflash._semantics.spec import QUERIES_AXIS, Operands, Residuals, Spec
from jflash._semantics.tile import in_range
from jflash_metal._tile_lists import MASK_BYTES, told_apart

MOST_BYTES = 2**25
"""The bytes of the bits of one part, unless `TILE` queries take more: 16 for each key of each batch entry and head that
the function tells apart."""


def forward(
    call: Callable[[Spec, Operands], tuple[Array, Array]], spec: Spec, operands: Operands
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Return the results of a forward, which `call` computes of one part."""
    parts = _Parts.of(spec, operands)
    if parts.count == 1:
        return call(spec, operands)
    arrays = parts.padded(operands._asdict())
    out, lse = lax.map(lambda first: call(*parts.call(operands, arrays, first)), parts.starts)
    return parts.joined(out, QUERIES_AXIS["out"]), parts.joined(lse, QUERIES_AXIS["lse"])


def backward(
    call: Callable[[Spec, Operands, Residuals], Operands], spec: Spec, operands: Operands, residuals: Residuals
) -> Operands:
    """Return the gradients of a backward, which `call` computes of one part."""
    parts = _Parts.of(spec, operands)
    if parts.count == 1:
        return call(spec, operands, residuals)
    sees = jnp.swapaxes(residuals.lse > -jnp.inf, 1, 2)
    residuals = residuals._replace(d_out=visibility.of_seeing_rows(spec, residuals.d_out, sees))
    arrays = parts.padded(operands._asdict() | residuals._asdict())
    by_row = {"query"} if spec.bias_shape is None or spec.bias_shape[2] == 1 else {"query", "bias"}

    def gradients(first: Int32[Array, ""]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return a part's gradients of what rows share, and of what they own."""
        part_spec, part = parts.call(operands, arrays, first)
        own = Residuals(**{name: parts.cut(arrays[name], name, first) for name in Residuals._fields})
        found = call(dataclasses.replace(part_spec, partial=True), part, own)._asdict()
        present = {name: array for name, array in found.items() if isinstance(array, jax.Array)}
        shared = {name: array.astype(spec.accumulator) for name, array in present.items() if name not in by_row}
        return shared, {name: array for name, array in present.items() if name in by_row}

    def step(sums: dict[str, Array], first: Int32[Array, ""]) -> tuple[dict[str, Array], dict[str, Array]]:
        shared, owned = gradients(first)
        return jax.tree.map(jnp.add, sums, shared), owned

    shapes, _ = jax.eval_shape(gradients, parts.starts[0])
    zeros = _mesh.varying_alike({name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}, like=operands)
    shared, owned = lax.scan(step, zeros, parts.starts)
    found = shared | {name: parts.joined(array, QUERIES_AXIS[name]) for name, array in owned.items()}
    typed = lambda name, array: array.astype(spec.gradient_dtype(getattr(operands, name).dtype))
    absent: dict[str, Any] = dict.fromkeys(("query", "key", "value"))
    return Operands(**absent | {name: typed(name, array) for name, array in found.items()})


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of a call, all of as many rows, of which the last may have none of the call's at its end."""

    spec: Spec
    rows: int

    @staticmethod
    def of(spec: Spec, operands: Operands) -> _Parts:
        """Return the fewest parts that keep the bits of each in bounds."""
        if spec.mask_mod is None:
            return _Parts(spec, spec.query_length)
        by_batch, by_head = told_apart(spec, operands)
        planes = (spec.batch if by_batch else 1) * (spec.heads if by_head else 1)
        blocks, keys = (-(-length // TILE) for length in (spec.query_length, spec.key_length))
        count = -(-blocks // max(1, MOST_BYTES // (planes * keys * MASK_BYTES)))
        return _Parts(spec, min(spec.query_length, -(-blocks // count) * TILE))

    @property
    def count(self) -> int:
        return -(-self.spec.query_length // self.rows)

    @property
    def starts(self) -> Int32[Array, "parts"]:
        """The first row of each part."""
        return jnp.arange(self.count, dtype=jnp.int32) * self.rows

    def padded(self, arrays: dict[str, Any]) -> dict[str, Array]:
        """Return those arrays that have an entry for each query, with entries for all rows of all parts."""
        more = self.count * self.rows - self.spec.query_length
        found: dict[str, Array] = {}
        for name, axis in QUERIES_AXIS.items():
            array = arrays.get(name)
            if array is not None and array.shape[axis] > 1:
                found[name] = jnp.pad(array, [(0, more if a == axis else 0) for a in range(array.ndim)])
        return found

    def cut(self, array: Array, name: str, first: Int32[Array, ""]) -> Array:
        """Return a part's entries of such an array."""
        return lax.dynamic_slice_in_dim(array, first, self.rows, QUERIES_AXIS[name])

    def joined(self, array: Array, axis: int) -> Array:
        """Return what parts give for their rows, `[parts, ...]`, as one array of the call's rows."""
        array = jnp.moveaxis(array, 0, axis)
        array = array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])
        return lax.slice_in_dim(array, 0, self.spec.query_length, axis=axis)

    def call(self, operands: Operands, arrays: dict[str, Array], first: Int32[Array, ""]) -> tuple[Spec, Operands]:
        """Return the call of the part that begins at row `first`."""
        spec = self.spec
        given = {name: in_range(spec, name, getattr(operands, name)) for name in ("query_offset", "query_lengths")}
        offset = spec.query_offset if given["query_offset"] is None else given["query_offset"]
        lengths = spec.query_length if given["query_lengths"] is None else given["query_lengths"]
        first_query = 0 if operands.first_query is None else operands.first_query
        by_entry = lambda numbers: jnp.reshape(jnp.asarray(numbers, jnp.int32), -1)
        part = operands._replace(
            **{name: self.cut(array, name, first) for name, array in arrays.items() if name in Operands._fields},
            query_offset=by_entry(offset) + first,
            query_lengths=jnp.clip(by_entry(lengths) - first, 0, self.rows),
            first_query=by_entry(first_query) + first,
        )
        return dataclasses.replace(spec.resized(part), query_offset=None, same_segments=False), part
