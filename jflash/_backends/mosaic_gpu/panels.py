"""Tiles in panels of columns, for copies of arrays whose rows are not counted in eights.

Products want a tile in blocks of 8 rows and a swizzle's columns. Pallas describes an array to the copy engine in blocks
too, so that 8 would have to divide its rows, and a block's columns its columns. A panel is one swizzle wide. It has the
same bytes whether it is made of blocks or of rows, and to a copy it is made of rows: those may begin and end anywhere.

Fewer panels are fewer copies and products. So as many as can be are of the widest swizzle, and others of what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float


class Panels:
    """A tile `[..., rows, columns]` in shared memory, which stands for a reference to it."""

    def __init__(self, blocks: Sequence[Any], rows: Sequence[Any], *, is_transposed: bool = False) -> None:
        """`blocks` and `rows` are the same memory, to products and threads, and to copies: for panels of each width an
        array `[panels, ..., rows, width]`."""
        self._blocks, self._rows, self.is_transposed = blocks, rows, is_transposed

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that a reference to it would have."""
        return shape(self._blocks)

    @property
    def dtype(self) -> Any:
        """The dtype that a reference to it would have."""
        return self._blocks[0].dtype

    @property
    def widths(self) -> list[int]:
        """The columns of a panel of each kind."""
        return [some.shape[-1] for some in self._blocks]

    @property
    def number(self) -> int:
        """How many panels there are."""
        return number(self._blocks)

    @property
    def at(self) -> _At:
        """What indices of all axes but columns choose, as of a reference."""
        return _At(self)

    @property
    def T(self) -> Panels:
        """The transpose of `[rows, columns]`, for a product."""
        return Panels(self._blocks, self._rows, is_transposed=not self.is_transposed)

    def columns(self, first: Any, size: int) -> Panels:
        """Return some columns, in whole panels of a tile whose panels are alike.

        A `first` that is not static is known to be at the beginning of one.
        """
        (blocks,) = self._blocks
        width = blocks.shape[-1]
        index = first // width if isinstance(first, int) else lax.div(first, width)
        return self.of_panels(pl.ds(index, size // width))

    def of_panels(self, *index: Any) -> Panels:
        """Return what indices of all axes but columns choose, that of panels first."""
        blocks, rows = ([ref.at[index] for ref in refs] for refs in (self._blocks, self._rows))
        return Panels(blocks, rows, is_transposed=self.is_transposed)

    def __setitem__(self, index: Any, values: Float[Array, "rows columns"]) -> None:
        """Store values where indices of all axes but columns choose."""
        for panel, first in _each(self._blocks):
            panel[index] = lax.slice(values, (0, first), (values.shape[0], first + panel.shape[-1]))

    def of_products(self) -> list[Any]:
        """Return references to the panels, as products take them."""
        return [panel.T if self.is_transposed else panel for panel, _ in _each(self._blocks)]

    def of_copies(self, source: Any) -> Iterator[tuple[Any, Any]]:
        """Yield references to the panels, as copies take them, each with its columns of an array `[rows, columns]`."""
        for panel, first in _each(self._rows):
            yield panel, source if self.number == 1 else source.at[:, pl.ds(first, panel.shape[-1])]


def shape(panels: Sequence[Any]) -> tuple[int, ...]:
    """Return a tile's shape, from arrays of its panels."""
    *leading, _ = panels[0].shape[1:]
    return *leading, sum(some.shape[0] * some.shape[-1] for some in panels)


def number(panels: Sequence[Any]) -> int:
    """Return how many panels there are in arrays of them."""
    return sum(some.shape[0] for some in panels)


def _each(panels: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """Yield each panel, and its first column."""
    first = 0
    for some in panels:
        for index in range(some.shape[0]):
            yield some.at[index], first
            first += some.shape[-1]


class _At:
    def __init__(self, panels: Panels) -> None:
        self._panels = panels

    def __getitem__(self, index: Any) -> Panels:
        return self._panels.of_panels(slice(None), *(index if isinstance(index, tuple) else (index,)))


class ByWidth:
    """A tile `[rows, columns]` whose products with panels want it in their swizzle: the same in each of them."""

    def __init__(self, tiles: Mapping[int, Any]) -> None:
        """`tiles` are references, by the panels' width."""
        self._tiles = tiles

    @property
    def T(self) -> ByWidth:
        """The transpose."""
        return ByWidth({width: tile.T for width, tile in self._tiles.items()})

    def beside(self, panel: Any) -> Any:
        """Return the tile as a product with this panel takes it."""
        return self._tiles[panel.shape[-1]]


def panel(tile: Any, first: Any, width: int) -> Any:
    """Return a reference to the panel that begins at a column; or to as many columns of a tile without panels."""
    return tile.columns(first, width).of_products()[0] if isinstance(tile, Panels) else tile.at[:, pl.ds(first, width)]


def products(accumulator: Any, a: Any, b: Panels) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the products that make `accumulator += a @ b`: each one's accumulator, left and right."""
    right = b.of_products()
    if b.is_transposed:
        for left, panel in zip(a.of_products(), right, strict=True):
            yield accumulator, left, panel
    elif b.number == 1:
        yield accumulator, a, right[0]
    else:
        first = 0
        for panel in right:
            left = a.beside(panel) if isinstance(a, ByWidth) else a
            yield accumulator.at[:, pl.ds(first, panel.shape[-1])], left, panel
            first += panel.shape[-1]
