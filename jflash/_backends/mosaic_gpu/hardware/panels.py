"""Tiles in panels of columns, for copies of arrays whose rows are not counted in eights.

Products want a tile in blocks of 8 rows and a swizzle's columns. Pallas describes an array to the copy engine in blocks
too, so that 8 would have to divide its rows, and a block's columns its columns. A panel is one swizzle wide. It has the
same bytes whether it is made of blocks or of rows, and to a copy it is made of rows: those may begin and end anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float


class Panels:
    """A tile `[..., rows, columns]` in shared memory, which stands for a reference to it."""

    def __init__(self, blocks: Any, rows: Any, *, is_transposed: bool = False) -> None:
        """`blocks` and `rows` are the same memory `[panels, ..., rows, width]`, to products and threads, and to
        copies."""
        self._blocks, self._rows, self.is_transposed = blocks, rows, is_transposed

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a reference."""
        number, *leading, width = self._blocks.shape
        return *leading, number * width

    @property
    def dtype(self) -> Any:
        """As of a reference."""
        return self._blocks.dtype

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self._blocks.shape[-1]

    @property
    def number(self) -> int:
        """How many panels there are."""
        return self._blocks.shape[0]

    @property
    def at(self) -> _At:
        """Part of it, by all axes but columns."""
        return _At(self)

    @property
    def T(self) -> Panels:
        """The transpose of `[rows, columns]`, for a product."""
        return Panels(self._blocks, self._rows, is_transposed=not self.is_transposed)

    def columns(self, first: Any, size: int) -> Panels:
        """Some columns, in whole panels; a `first` that is not static is known to be at the beginning of one."""
        index = first // self.width if isinstance(first, int) else lax.div(first, self.width)
        return self.of_panels(pl.ds(index, size // self.width))

    def of_panels(self, *index: Any) -> Panels:
        """By all axes but columns, that of panels first."""
        return Panels(self._blocks.at[index], self._rows.at[index], is_transposed=self.is_transposed)

    def __setitem__(self, index: Any, values: Float[Array, "rows columns"]) -> None:
        """By all axes but columns."""
        for panel in range(self.number):
            first = panel * self.width
            self._blocks.at[panel][index] = lax.slice(values, (0, first), (values.shape[0], first + self.width))

    def of_products(self) -> list[Any]:
        """References to the panels, as products take them."""
        panels = [self._blocks.at[panel] for panel in range(self.number)]
        return [panel.T for panel in panels] if self.is_transposed else panels

    def of_copies(self, source: Any) -> Iterator[tuple[Any, Any]]:
        """References to the panels, as copies take them, with what of an array `[rows, columns]` each is copied from or
        to."""
        for panel in range(self.number):
            columns = source if self.number == 1 else source.at[:, pl.ds(panel * self.width, self.width)]
            yield self._rows.at[panel], columns


class _At:
    def __init__(self, panels: Panels) -> None:
        self._panels = panels

    def __getitem__(self, index: Any) -> Panels:
        return self._panels.of_panels(slice(None), *(index if isinstance(index, tuple) else (index,)))


def panel(tile: Any, first: Any, width: int) -> Any:
    """A reference to the panel of a tile that begins at a column; or to as many columns of a tile without panels."""
    return tile.columns(first, width).of_products()[0] if isinstance(tile, Panels) else tile.at[:, pl.ds(first, width)]


def products(accumulator: Any, a: Any, b: Panels) -> Iterator[tuple[Any, Any, Any]]:
    """The products that make `accumulator += a @ b`: each one's accumulator, left and right."""
    right = b.of_products()
    if b.is_transposed:
        for left, panel in zip(a.of_products(), right, strict=True):
            yield accumulator, left, panel
    elif b.number == 1:
        yield accumulator, a, right[0]
    else:
        for number, panel in enumerate(right):
            yield accumulator.at[:, pl.ds(number * b.width, b.width)], a, panel
