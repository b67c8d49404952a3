"""Shared memory: how tiles are laid out in it, and how many bytes a kernel's declaration takes.

A kernel declares its buffers and barriers once, as `Buffers` of the types made here. The same structure is what it
allocates (its scratch types), what its tiles are chosen by (`size`), and, with references for types, what it uses.
"""

from __future__ import annotations

import math
import types
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jflash._backends.mosaic_gpu.hardware.overlaid import Overlaid

WARPGROUP_ROWS = 64
"""Rows of a tile that one warpgroup works on: M of the matrix unit's instruction."""

CAPACITY = 227 * 1024
"""Bytes that a CTA may have on Hopper (CUDA programming guide, compute capability 9.0)."""

_ALIGNMENT, _BARRIER = 1024, 8
"""Pallas begins every buffer at a multiple of 1024 bytes; a barrier takes 8."""


@jax.tree_util.register_pytree_node_class
class Buffers(types.SimpleNamespace):
    """Buffers and barriers by name: types in a kernel's declaration, references in the kernel."""

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """For JAX: what the names stand for, and the names."""
        return tuple(vars(self).values()), tuple(vars(self))

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], buffers: tuple[Any, ...]) -> Self:
        """For JAX."""
        return cls(**dict(zip(names, buffers, strict=True)))


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def tile(shape: tuple[int, ...], dtype: Any, *divides: int, part: int | None = None, in_panels: bool = False) -> Any:
    """Shared memory for tiles `[..., rows, columns]`, in the widest swizzle whose columns divide theirs.

    Swizzled, eight rows of 16 bytes lie in different banks, as the matrix unit reads them.

    Args:
      shape, dtype: of the tiles.
      divides: more numbers that a swizzle's columns must divide or exceed: the columns of an array in device memory
        that tiles are copied from or to, or of the tiles that they are multiplied with.
      part: the columns that a product takes of these tiles, or of others with the same swizzle: whole swizzles too.
      in_panels: whether they are `Panels`, whose copies do not ask what `divides` an array's columns.
    """
    if not in_panels:
        whole = (shape[-1], part or shape[-1])
        fits = lambda n: all(m % n == 0 for m in whole) and all(m <= n or m % n == 0 for m in divides)
        return plgpu.SMEM(shape, dtype, transforms=_transforms(next(filter(fits, _widths(dtype))), dtype))
    blocks, rows = [], []
    for width, number in panels_of(shape[-1], dtype, part).items():
        panels, transforms = (number, *shape[:-1], width), _transforms(width, dtype)
        blocks.append(plgpu.SMEM(panels, dtype, transforms=transforms))
        rows.append(plgpu.SMEM(panels, dtype, transforms=transforms[1:]))
    return Overlaid.of_panels(tuple(blocks), tuple(rows))


def panels_of(columns: int, dtype: Any, part: int | None = None) -> dict[int, int]:
    """How many panels a tile's columns are, by their width: as few as can be, but equal ones where a `part` asks for
    them. Arguments as for `tile`."""
    if part is not None:
        width = next(n for n in _widths(dtype) if columns % n == part % n == 0)
        return {width: columns // width}
    found: dict[int, int] = {}
    for width in _widths(dtype):
        number, columns = divmod(columns, width)
        found |= {width: number} if number else {}
    return found


def _widths(dtype: Any) -> list[int]:
    """Columns of each swizzle, the widest first."""
    return [swizzle // np.dtype(dtype).itemsize for swizzle in (128, 64, 32)]


def _transforms(width: int, dtype: Any) -> tuple[Any, ...]:
    """Of the layout that products take, in swizzles of a number of columns."""
    tiling, swizzling = plgpu.TilingTransform, plgpu.SwizzleTransform
    return tiling((8, width)), swizzling(width * np.dtype(dtype).itemsize)  # pyright: ignore[reportAbstractUsage]


def ring(
    shape: tuple[int, ...],
    dtype: Any,
    *divides: int,
    readers: int,
    others: int = 0,
    part: int | None = None,
    in_panels: bool = False,
    cluster: str | None = None,
) -> Buffers:
    """`tiles`, `[slots, rows, columns]`, that are copied ahead of their readers, and for each slot two barriers.

    `full` completes a phase when a slot's tile and as many `others` have arrived, `empty` when all readers are done: of
    each CTA along the axis `cluster`, if copies are for all of them. Others as for `tile`.
    """
    tiles = tile(shape, dtype, *divides, part=part, in_panels=in_panels)
    full, empty = barriers(shape[0], arrivals=copies(tiles) + others), barriers(shape[0], arrivals=readers)
    if cluster is not None:
        empty = plgpu.ClusterBarrier(collective_axes=(cluster,), num_barriers=shape[0], num_arrivals=readers)
    return Buffers(tiles=tiles, full=full, empty=empty)


def copies(*tiles: Any) -> int:
    """How many copies tiles take: one for each panel."""
    return sum(tile.panels if isinstance(tile, Overlaid) else 1 for tile in tiles)


def reused(first: Any, then: Any) -> Any:
    """Shared memory for tiles of which `then` takes the place of `first`: a tuple of both, or of one if it serves."""
    alike = (first.shape, first.dtype) == (then.shape, then.dtype)
    return (first,) if alike else Overlaid.of(first, then)


def vectors(*shape: int, dtype: Any = jnp.float32) -> Any:
    """Shared memory for vectors `[..., length]`."""
    return plgpu.SMEM(shape, dtype)


def barriers(number: int, arrivals: int = 1) -> Any:
    """Barriers that complete a phase after `arrivals` arrivals."""
    return plgpu.Barrier(num_barriers=number, num_arrivals=arrivals)


def size(declaration: Any) -> int:
    """Bytes that a declaration takes; what a union holds shares its bytes."""

    def taken(leaf: Any) -> int:
        if isinstance(leaf, plgpu.Barrier | plgpu.ClusterBarrier):
            return int(np.prod(leaf.num_barriers)) * _BARRIER
        return round_up(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize, _ALIGNMENT)

    return sum(map(taken, jax.tree.leaves(declaration)))


def fits(declaration: Any) -> bool:
    """Whether a CTA may have what a kernel declares."""
    return size(declaration) <= CAPACITY
