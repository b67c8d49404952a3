"""`MmaOps` on any machine: plain array code for Pallas' interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import matrix_unit
from interpreter import CommonInterpreter, sums_of_rows
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.cta import MmaOps
from jflash._backends.mosaic_gpu_mma.paged_copies import CachedRows
from jflash._backends.mosaic_gpu_mma.products import STEP, STEPS_OF_PIECES, Chosen, Operand, Tiles, Transposed
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.threads import sums
from jflash._backends.nvidia.threads.device_rows import ColumnChunk
from jflash._backends.nvidia.tile import operand_pieces


def _pieces(ref: Ref) -> Array:
    """An operand's pieces, `[pieces, rows, columns]`; or itself as one."""
    return ref[...].reshape(-1, *ref.shape[-2:])


def _left(a: Operand) -> Array:
    """The pieces of A, `[pieces, rows, K]`."""
    if isinstance(a, tuple):
        return jnp.stack(list(map(jnp.concatenate, a)))
    return _pieces(a.ref).mT if isinstance(a, Transposed) else _pieces(a)


def _add_products(acc: Array, left: Array, right: Array, order: Sequence[tuple[int, int]]) -> Array:
    """Add products of pieces as the kernels do: those of a few steps of K are one sum of the matrix unit's."""
    steps, depth = STEPS_OF_PIECES, matrix_unit.DEPTH
    missing = -left.shape[2] % (steps * depth)
    a, b = (jnp.stack(chosen) for chosen in zip(*((left[i], right[j]) for i, j in order), strict=True))
    a = jnp.pad(a, [(0, 0), (0, 0), (0, missing)]).reshape(len(order), a.shape[1], -1, steps, depth)
    b = jnp.pad(b, [(0, 0), (0, missing), (0, 0)]).reshape(len(order), -1, steps, depth, b.shape[2])
    # Each sum's steps, in their order.
    a = a.transpose(2, 0, 3, 1, 4).reshape(a.shape[2], -1, a.shape[1], depth)
    b = b.swapaxes(0, 1).reshape(b.shape[1], -1, depth, b.shape[4])
    nothing = jnp.zeros((a.shape[2], b.shape[3]), jnp.float32)

    def add_step(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        return matrix_unit.add(total, jnp.dot(*pair, preferred_element_type=jnp.float32)), None

    return lax.scan(lambda acc, pairs: (acc + lax.scan(add_step, nothing, pairs)[0], None), acc, (a, b))[0]


def _joined(pair: Tiles) -> Float[Array, "64 columns"]:
    """The rows of which a pair of blocks consists."""
    return jnp.stack(pair).reshape(2, 2, 2, 16, -1).transpose(1, 0, 3, 2, 4).reshape(64, -1)


def _pair(rows: Float[Array, "64 columns"]) -> Tiles:
    """The pair of blocks that has the rows."""
    # Rows: two warps', block, 16. Columns: which of the two.
    return tuple(rows.reshape(2, 2, 16, 2, -1).transpose(1, 0, 3, 2, 4).reshape(2, 64, -1))


def _together(pair: Tiles) -> Float[Array, "64 columns"]:
    """The rows of A that a pair of blocks consists of, which two warps each have."""
    return _joined(pair)[:, : pair[0].shape[1]]


def _of_steps(left: Array, right: Array, steps: Sequence[int] | None) -> tuple[Array, Array]:
    """Return what of operands `[..., rows, K]` and `[..., K, columns]` belongs to steps in K."""
    if steps is None:
        return left, right
    some = slice(STEP * steps[0], STEP * (steps[-1] + 1))
    has_others = left.shape[-1] > STEP * len(steps)
    return left[..., some] if has_others else left, right[..., some, :]


class MmaInterpreter(CommonInterpreter, MmaOps):
    """The operations of a warpgroup that is a CTA. Copies arrive at once: a wait that is missing does not show."""

    def add_product(
        self, acc: Tiles, a: Operand, b: Ref, chosen: Chosen, *, first_row: Any = None, paired: bool = False
    ) -> Tiles:
        order, transposed, steps, first_column, by_warp = chosen
        if by_warp:
            quarters = b[...].astype(a[0][0].dtype).reshape(4, -1, b.shape[1])
            rows = a[0][0].reshape(4, 16, -1)
            product = "wqh,wkh->wqk" if transposed else "wqk,wkd->wqd"
            made = jnp.einsum(product, rows, quarters, preferred_element_type=jnp.float32)
            return (acc[0] + made.reshape(64, -1),)
        if paired:
            assert first_row is None
            left, right = _of_steps(_together(a[0]) if isinstance(a, tuple) else _left(a)[0], b[...], steps)
            halves = right.reshape(len(right), 2, -1)[..., first_column : first_column + acc[0].shape[1]]
            made = jnp.dot(left, halves.reshape(len(right), -1), preferred_element_type=jnp.float32)
            return _pair(_joined(acc) + made)
        left, right = _left(a), _pieces(b)
        if first_row is not None:
            right = lax.dynamic_slice_in_dim(right, first_row, acc[0].shape[1] if transposed else left.shape[2], axis=1)
        right = right.mT if transposed else right
        left, right = _of_steps(left, right, steps)
        right = right[..., first_column : first_column + acc[0].shape[1]]
        total = jnp.concatenate(acc)
        if len(order) == 1:
            # What the matrix unit cuts off from a sum is less than what 16 bits cut off from an operand.
            total += jnp.dot(left[0], right[0], preferred_element_type=jnp.float32)
        else:
            total = _add_products(total, left, right, order)
        return tuple(jnp.split(total, len(acc)))

    def load_rows(
        self,
        ref: Ref,
        *,
        columns: int | None = None,
        transposed: bool = False,
        paired: bool = False,
        beside_bytes: bool = False,
    ) -> tuple[Tiles, ...]:
        pieces = _pieces(ref)
        if ref.shape[0] == 16:
            return ((jnp.tile(ref[...], (4, 1)),),)
        pieces = (pieces.mT if transposed else pieces)[..., :columns]
        if paired:
            # Each warp of two that share rows has all of their columns.
            return tuple(_pair(jnp.concatenate([piece, piece], axis=1)) for piece in pieces)
        return tuple(tuple(jnp.split(piece, len(piece) // 64)) for piece in pieces)

    def sum_of_warps(self, values: Float[Array, "64 columns"], scratch: Ref, *, made_of_bytes: bool) -> Any:
        return jnp.tile(values.reshape(4, 16, -1).sum(axis=0), (4, 1))

    def scaled_pair(self, pair: Tiles, factors: Ref) -> Tiles:
        return _pair(_joined(pair) * factors[...][:, None])

    def copy_rows(self, source: Ref, target: Ref, first: Any, limit: Any, columns: ColumnChunk | None = None) -> None:
        rows, number, width = first + jnp.arange(target.shape[-2]), math.prod(target.shape[:-2]), target.shape[-1]
        every = source[...].reshape(-1, source.shape[-1])
        found = jnp.where((rows < limit)[:, None], every.at[rows].get(mode="clip"), 0)
        pieces = found.reshape(len(rows), number, -1).swapaxes(0, 1)
        whole, column = (width, 0) if columns is None else (columns.whole, columns.first)
        pieces = jnp.pad(pieces, [(0, 0), (0, 0), (0, max(whole - pieces.shape[2], 0))])
        target[...] = lax.dynamic_slice_in_dim(pieces, column, width, axis=2).reshape(target.shape)

    def copy_cached_rows(self, rows: CachedRows, target: Ref, first: Any, limit: Any) -> None:
        place, size = first + jnp.arange(target.shape[-2]), rows.page_size
        page = jnp.where(place < limit, rows.page_numbers[...][place // size - first // size], 0)
        numbers = rows.cache[...].astype(jnp.float32)[page * size + place % size]
        if rows.scales is not None:
            numbers *= rows.scales[...].at[page].get(mode="clip")[:, None]
        found = jnp.where((place < limit)[:, None], numbers, 0)
        if target.ndim == 3:
            pieces = operand_pieces.split_numbers(found, target.shape[0])
            found = jnp.stack(pieces)
        missing = target.shape[-1] - found.shape[-1]
        target[...] = jnp.pad(found, [(0, 0)] * (found.ndim - 1) + [(0, missing)]).astype(target.dtype)

    def load_page_scales(
        self, scales: Ref, page_numbers: Ref, page_size: int, first: Any, limit: Any, shape: tuple[int, int]
    ) -> Float[Array, "64 columns"]:
        key = first + jnp.arange(4 * shape[1])
        numbers = page_numbers[...][key // page_size - first // page_size]
        found = jnp.where(key < limit, scales[...].at[numbers].get(mode="clip"), 0)
        return jnp.repeat(found.reshape(4, -1), 16, axis=0)

    def copy_page_numbers(self, table: Ref, target: Ref, first: Any) -> None:
        target[...] = table[...].at[first + jnp.arange(target.shape[0])].get(mode="clip")

    def copy_numbers(self, source: Ref, target: Ref, first: Any) -> None:
        target[...] = source[pl.ds(first, target.shape[0])]

    def commit(self) -> None:
        """Nothing."""

    def wait(self, pending: int = 0, *, warpgroups: int = 1) -> None:
        self.meet(warpgroups)

    def store_tile(self, values: Tiles, target: Ref, first_column: Any) -> None:
        target[:, pl.ds(first_column, values[0].shape[1])] = jnp.concatenate(values)

    def store_pair(self, pair: Tiles, target: Ref, first: Any, limit: Any, columns: ColumnChunk | None = None) -> None:
        self.store_rows(_joined(pair), target, first, limit, columns)

    def add_rows(self, blocks: Tiles, target: Ref, row: Any, column: Any, together: int, half: int) -> None:
        parts = [*blocks] if len(blocks) == 1 else jnp.split(_joined(blocks), 2, axis=1)
        for number, values in enumerate(parts):
            self._add_to_sums(values, target, row, column + number * half, together)

    def _add_to_sums(
        self, values: Float[Array, "rows columns"], target: Ref, row: Any, column: Any, together: int
    ) -> None:
        groups, units = values.shape[0] // 8, values.shape[1] // 16
        if together == 4:
            numbers = sums_of_rows(values)
        else:
            # Group, row; unit, eight, pair, neighbour.
            numbers = values.reshape(groups, 8, units, 2, 4, 2).transpose(0, 2, 3, 5, 1, 4)
        own = target.at[pl.ds(lax.div(row, 8), groups), pl.ds(lax.div(column, 16), units)]
        own[...] = own[...] + numbers.reshape(groups, units, 128)

    def load_sums(self, source: Ref, row: Any, columns: int, together: int) -> Float[Array, "64 columns"]:
        found = source[pl.ds(lax.div(row, 8), 8)]
        if together == 4:
            return sums.as_rows(found.reshape(64, columns))
        return found.reshape(8, columns // 16, 2, 2, 8, 4).transpose(0, 4, 1, 2, 5, 3).reshape(64, columns)
