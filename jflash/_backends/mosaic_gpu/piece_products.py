"""Products of operands in pieces by Hopper's matrix unit: one instruction for each pair of pieces, and each panel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.panels import ByWidth, Panels
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.ops import Ref, Tile
from jflash._backends.nvidia.tile.operand_pieces import Pieces, order
from jflash._semantics.spec import Spec


def issued(b: Pieces) -> int:
    """Return how many products one with this right operand is: each of its panels has its own."""
    return sum(b[right].number if isinstance(b[right], Panels) else 1 for _, right in order(len(b)))


def of_tile(spec: Spec, tile: Ref, first: Any = None, columns: int | None = None) -> Pieces:
    """Return the pieces of a tile `[rows, columns]` in shared memory, or some columns of each from `first` on."""
    count = facts_of(spec).pieces
    each = tile.shape[-1] // count
    if first is None:
        return (tile,) if count == 1 else tuple(tile.at[:, pl.ds(index * each, each)] for index in range(count))
    assert columns is not None
    if isinstance(tile, Panels):
        return (tile.columns(first, columns),)
    return tuple(tile.at[:, pl.ds(index * each + first, columns)] for index in range(count))


def by_width(widths: Sequence[int], tiles: Sequence[Pieces]) -> Pieces:
    """Return the one piece of a tile, for products with panels of these widths."""
    return (ByWidth({width: tile for width, (tile,) in zip(widths, tiles, strict=True)}),)


def mma(accumulator: Any, a: Pieces, b: Pieces, ops: WarpgroupOps) -> None:
    """Issue accumulator += a @ b."""
    for left, right in order(len(a)):
        ops.mma(accumulator, a[left], b[right])


def matmul(
    a: Pieces, b: Pieces, shape: tuple[int, int], ops: WarpgroupOps, meanwhile: Callable[[], None] = lambda: None
) -> Tile:
    """Return a @ b, and do something `meanwhile`."""

    def multiply(acc: Any) -> Array:
        mma(acc, a, b, ops)
        meanwhile()
        return ops.read(acc)

    return ops.accumulators(multiply, shape)


def accumulate[Results](
    spec: Spec, body: Callable[..., Results], *acc: Tile, like: Results, ops: WarpgroupOps
) -> tuple[Results, tuple[Tile, ...]]:
    """Return what `ops.accumulate` does, as exact as the call's pieces are.

    The matrix unit truncates where it adds, so that a long sum drifts towards zero: with six products and 500 keys by
    3e-6. So the products of three pieces begin at zero in every tile, and registers add them up, which rounds.
    """
    if facts_of(spec).pieces < 3:
        return ops.accumulate(body, *acc, like=like)
    results, made = ops.accumulate(body, *(ops.full(array.shape, 0) for array in acc), like=like)
    return results, tuple(array + more for array, more in zip(acc, made, strict=True))


def add_matmul(spec: Spec, acc: Tile, a: Pieces, b: Pieces, ops: WarpgroupOps) -> Tile:
    """Return acc + a @ b."""
    _, (acc,) = accumulate(spec, lambda ref: mma(ref, a, b, ops), acc, like=None, ops=ops)
    return acc
