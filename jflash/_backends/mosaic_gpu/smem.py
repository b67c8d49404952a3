"""Tiles in Hopper's shared memory: swizzles, rings that copies run ahead in, and memory that has more than one use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jflash import _tuning
from jflash._backends.mosaic_gpu import array_shapes, panels
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.smem import Buffers, barriers, in_one_view, opened, size, vectors
from jflash._semantics.spec import Spec
from jflash._tuning import TuningKey

__all__ = ["CAPACITY", "CallTiles", "Overlaid", "barriers", "choose_tiles", "copies", "fits", "panels_of", "reused"]
__all__ += ["ring", "size", "tile", "vectors"]

CAPACITY = 227 * 1024
"""Bytes that a CTA may have on Hopper (CUDA programming guide, compute capability 9.0)."""


def tile(shape: tuple[int, ...], dtype: Any, *divides: int, chunk: int | None = None, in_panels: bool = False) -> Any:
    """Return shared memory for tiles `[..., rows, columns]`, in the widest swizzle whose columns divide theirs.

    Swizzled, eight rows of 16 bytes lie in different banks, as the matrix unit reads them.

    Args:
      shape, dtype: of the tiles.
      divides: more numbers that a swizzle's columns must divide or exceed: the columns of an array in device memory
        that tiles are copied from or to, or of the tiles that they are multiplied with.
      chunk: the columns, in whole swizzles, that a product takes of these tiles, or of others in the same swizzle.
      in_panels: whether they are `Panels`, whose copies do not ask what `divides` an array's columns.
    """
    if not in_panels:
        whole = (shape[-1], chunk or shape[-1])
        fits = lambda n: all(m % n == 0 for m in whole) and all(m <= n or m % n == 0 for m in divides)
        return plgpu.SMEM(shape, dtype, transforms=_transforms(next(filter(fits, _widths(dtype))), dtype))
    blocks, rows = [], []
    for width, number in panels_of(shape[-1], dtype, chunk).items():
        panels, transforms = (number, *shape[:-1], width), _transforms(width, dtype)
        blocks.append(plgpu.SMEM(panels, dtype, transforms=transforms))
        rows.append(plgpu.SMEM(panels, dtype, transforms=transforms[1:]))
    return Overlaid(plgpu.RefUnion(tuple(blocks), tuple(rows)), (True,), 2, is_tile=True)


def panels_of(columns: int, dtype: Any, chunk: int | None = None) -> dict[int, int]:
    """Return how many panels a tile's columns are, by their width: as few as can be, but equal ones for a `chunk`. The
    arguments are those of `tile`."""
    if chunk is not None:
        width = next(n for n in _widths(dtype) if columns % n == chunk % n == 0)
        return {width: columns // width}
    found: dict[int, int] = {}
    for width in _widths(dtype):
        number, columns = divmod(columns, width)
        found |= {width: number} if number else {}
    return found


def _widths(dtype: Any) -> list[int]:
    """Return the columns of each swizzle, the widest first."""
    return [swizzle // np.dtype(dtype).itemsize for swizzle in (128, 64, 32)]


def _transforms(width: int, dtype: Any) -> tuple[Any, ...]:
    """Return the layout that products take, in swizzles of a number of columns."""
    tiling, swizzling = plgpu.TilingTransform, plgpu.SwizzleTransform
    return tiling((8, width)), swizzling(width * np.dtype(dtype).itemsize)  # pyright: ignore[reportAbstractUsage]


def ring(
    tiles: Any, *, readers: int, others: int = 0, parts: int = 1, mends: bool = False, cluster: str | None = None
) -> Buffers:
    """Return `tiles`, `[slots, rows, columns]`, that are copied ahead of their readers, and for each slot two barriers.

    `full` completes a phase when a slot's tile, in `parts` copies of rows, and as many `others` have arrived, `empty`
    when all readers are done: of each CTA along the axis `cluster`, if copies are for all of them. If the warpgroup
    that copies `mends` a tile before others read it, `full` has one barrier more, of copies that this warpgroup waits
    for.
    """
    slots = tiles.shape[0]
    full, empty = barriers(slots + mends, arrivals=parts * copies(tiles) + others), barriers(slots, arrivals=readers)
    if cluster is not None:
        empty = plgpu.ClusterBarrier(collective_axes=(cluster,), num_barriers=slots, num_arrivals=readers)
    return Buffers(tiles=tiles, full=full, empty=empty)


def copies(*tiles: Any) -> int:
    """Return how many copies tiles take: one for each panel."""
    return sum(tile.panels if isinstance(tile, Overlaid) else 1 for tile in tiles)


_STATIC: Any = dict(static=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Reused:
    """Shared memory for two tiles, of which the second takes the place of the first; a kernel has them as a pair."""

    memory: Any
    is_one_layout: bool = dataclasses.field(metadata=_STATIC)

    def in_one_view(self) -> Reused:
        """Return the declaration for an interpreter."""
        return dataclasses.replace(self, memory=in_one_view(self.memory))

    def opened(self) -> tuple[Any, Any]:
        """Return both tiles."""
        memory = opened(self.memory)
        return (memory, memory) if self.is_one_layout else memory


def reused(first: Any, then: Any | None) -> Reused:
    """Return shared memory for tiles of which `then` takes the place of `first`; with `None` those are alone."""
    alike = then is None or (first.shape, first.dtype) == (then.shape, then.dtype)
    return Reused(first if alike else Overlaid.of(first, then), is_one_layout=alike)


def fits(declaration: Any) -> bool:
    """Return whether a CTA may have what a kernel declares."""
    return size(declaration) <= CAPACITY


def choose_tiles[T](
    kernel: str, facts: tuple[int | str, ...], candidates: Sequence[T], room: Callable[[T], Buffers]
) -> T | None:
    """Return the tiles that were measured fastest on this device, else the first that fit; `None` if none do.

    Args:
      kernel: its name, under which tuned tiles are stored.
      facts: all that the answer may depend on, besides the device.
      candidates: dataclasses of whole numbers and booleans, the best first.
      room: the buffers that a kernel with such tiles declares.
    """
    fitting = [tiles for tiles in candidates if fits(room(tiles))]
    return _tuning.choose(TuningKey(f"mosaic_gpu {kernel}", facts), fitting) if fitting else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Overlaid:
    """Groups of tiles that have the same memory, or one tile in panels."""

    memory: Any
    in_panels: tuple[Any, ...] = dataclasses.field(metadata=_STATIC)
    """Whether each tile of each group is in panels."""
    views: int = dataclasses.field(metadata=_STATIC)
    """Members of the union `memory`: each group, and if any tile is in panels, each group as copies see it."""
    is_tile: bool = dataclasses.field(metadata=_STATIC)

    @staticmethod
    def of(*groups: Any) -> Overlaid:
        """Return the memory of groups, each a tile or a tuple of tiles."""
        view = lambda group, index: _each(lambda tile: tile.memory.refs[index], lambda tile: tile, group)
        in_panels = tuple(_each(lambda tile: True, lambda tile: False, group) for group in groups)
        views = [view(group, 0) for group in groups]
        if any(jax.tree.leaves(in_panels)):
            views += [view(group, 1) for group in groups]
        return Overlaid(plgpu.RefUnion(*views), in_panels, len(views), is_tile=False)

    @property
    def panels(self) -> int:
        """How many panels a tile has."""
        return panels.number(self.memory.refs[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tile."""
        return panels.shape(self.memory.refs[0])

    @property
    def dtype(self) -> Any:
        """The dtype of a tile."""
        return self.memory.refs[0][0].dtype

    def in_one_view(self) -> Overlaid:
        """Return it with views in which copies too see blocks: an interpreter gives each view memory of its own."""
        views = self.memory.refs[: len(self.in_panels)]
        memory = views[0] if len(views) == 1 else plgpu.RefUnion(*views)
        return dataclasses.replace(self, memory=memory, views=len(views))

    def opened(self) -> Any:
        """Return the groups, or the tile, as a kernel uses them."""
        views = (self.memory,) if self.views == 1 else tuple(self.memory)
        number = len(self.in_panels)
        tile = lambda in_panels, blocks, rows: panels.Panels(blocks, rows) if in_panels else blocks
        given = zip(self.in_panels, views[:number], views[-number:], strict=True)
        groups = tuple(jax.tree.map(tile, *group) for group in given)
        return groups[0] if self.is_tile else groups


def _each(of_overlaid: Any, of_others: Any, tree: Any) -> Any:
    is_overlaid = lambda leaf: isinstance(leaf, Overlaid)
    return jax.tree.map(lambda leaf: (of_overlaid if is_overlaid(leaf) else of_others)(leaf), tree, is_leaf=is_overlaid)


@dataclasses.dataclass(frozen=True)
class CallTiles:
    """How a kernel declares its tiles: as by `tile`, with the columns of one piece."""

    spec: Spec
    in_panels: bool

    @classmethod
    def of(cls, spec: Spec) -> Self:
        """Return how any kernel but the forward declares tiles; that one has rules of its own for panels."""
        return cls(spec, array_shapes.in_panels(spec))

    def operand(self, shape: tuple[int, ...], *divides: int, chunk: int | None = None) -> Any:
        """Return tiles `[..., rows, columns]` of an operand, with all its pieces."""
        pieces, dtype = facts_of(self.spec).pieces, facts_of(self.spec).operand_dtype
        chunk = shape[-1] if chunk is None and pieces > 1 else chunk
        shape, divides = (*shape[:-1], pieces * shape[-1]), tuple(pieces * width for width in divides)
        return tile(shape, dtype, *divides, chunk=chunk, in_panels=self.in_panels)

    def ring(self, shape: tuple[int, ...], *divides: int, chunk: int | None = None, **options: Any) -> Buffers:
        """Return a `ring` of an operand's tiles, with its other options."""
        return ring(self.operand(shape, *divides, chunk=chunk), **options)

    def result(self, shape: tuple[int, ...], *divides: int, chunk: int | None = None) -> Any:
        """Return tiles `[..., rows, columns]` of a result."""
        return tile(shape, self.spec.dtype, *divides, chunk=chunk, in_panels=self.in_panels)
