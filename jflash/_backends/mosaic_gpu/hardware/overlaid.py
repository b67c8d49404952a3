"""Shared memory that has more than one use: as tiles that take each other's place, and as `Panels`.

A kernel declares it as `Overlaid`, and what it is given is `opened` before it begins.
"""

from __future__ import annotations

from typing import Any, Self

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jflash._backends.mosaic_gpu.hardware import panels


@jax.tree_util.register_pytree_node_class
class Overlaid:
    """Groups of tiles that have the same memory, or one tile in panels."""

    def __init__(self, memory: Any, in_panels: tuple[Any, ...], views: int, *, is_tile: bool) -> None:
        """`in_panels` says it of each tile of each group. `views` is how many members the union `memory` has: each
        group's, and if any tile is in panels, each group's as copies see it."""
        self.memory, self.in_panels, self.views, self.is_tile = memory, in_panels, views, is_tile

    @classmethod
    def of(cls, *groups: Any) -> Self:
        """Of groups, each a tile or a tuple of tiles."""
        view = lambda group, index: _each(lambda tile: tile.memory.refs[index], lambda tile: tile, group)
        in_panels = tuple(_each(lambda tile: True, lambda tile: False, group) for group in groups)
        views = [view(group, 0) for group in groups]
        if any(jax.tree.leaves(in_panels)):
            views += [view(group, 1) for group in groups]
        return cls(plgpu.RefUnion(*views), in_panels, len(views), is_tile=False)

    @classmethod
    def of_panels(cls, blocks: tuple[Any, ...], rows: tuple[Any, ...]) -> Self:
        """A tile in panels, as products and as copies see it."""
        return cls(plgpu.RefUnion(blocks, rows), (True,), 2, is_tile=True)

    @property
    def panels(self) -> int:
        """Of a tile."""
        return panels.number(self.memory.refs[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a tile."""
        return panels.shape(self.memory.refs[0])

    @property
    def dtype(self) -> Any:
        """Of a tile."""
        return self.memory.refs[0][0].dtype

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        """For JAX."""
        return (self.memory,), (self.in_panels, self.views, self.is_tile)

    @classmethod
    def tree_unflatten(cls, facts: tuple[Any, ...], memory: tuple[Any]) -> Self:
        """For JAX."""
        in_panels, views, is_tile = facts
        return cls(*memory, in_panels, views, is_tile=is_tile)

    def in_one_view(self) -> Any:
        """Where copies too see blocks: an interpreter gives each member of a union memory of its own."""
        views = self.memory.refs[: len(self.in_panels)]
        memory = views[0] if len(views) == 1 else plgpu.RefUnion(*views)
        return Overlaid(memory, self.in_panels, len(views), is_tile=self.is_tile)

    def opened(self) -> Any:
        """In a kernel: the groups, or the tile."""
        views = (self.memory,) if self.views == 1 else tuple(self.memory)
        number = len(self.in_panels)
        tile = lambda in_panels, blocks, rows: panels.Panels(blocks, rows) if in_panels else blocks
        given = zip(self.in_panels, views[:number], views[-number:], strict=True)
        groups = tuple(jax.tree.map(tile, *group) for group in given)
        return groups[0] if self.is_tile else groups


def opened(references: Any) -> Any:
    """What a kernel uses, from references in the structure of what it has declared."""
    return _each(lambda memory: memory.opened(), lambda leaf: leaf, references)


def in_one_view(declaration: Any) -> Any:
    """A declaration, where copies too see blocks."""
    return _each(lambda memory: memory.in_one_view(), lambda leaf: leaf, declaration)


def _each(of_overlaid: Any, of_others: Any, tree: Any) -> Any:
    is_overlaid = lambda leaf: isinstance(leaf, Overlaid)
    return jax.tree.map(lambda leaf: (of_overlaid if is_overlaid(leaf) else of_others)(leaf), tree, is_leaf=is_overlaid)
