"""Says how much of each tile of queries and keys a mask function shows: nothing, a part, or all.

The first pass evaluates the function's program on intervals (`intervals`), over whole tiles, in time that grows with
their number. What it calls empty or full is so; what it calls partial may be either. It looks at tiles of 32 x 32 where
those are few enough: they tell apart what lies in aligned blocks, and a tile that has a full one and an empty one is
partial for sure. A second pass evaluates the function on the pairs of the tiles that are left in doubt, and is exact.
It runs where those are more than the tiles of one edge that goes through the whole mask (`allowed`). Causal attention,
a window and sorted documents leave fewer, and what could be gained there is less than the pass costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int8, Int32

from jflash._semantics.intervals import Blocks, Evaluation, Interval, point
from jflash._semantics.mask_mod import MaskMod

TILE = 128
"""The rows, and the columns, of a tile of the map."""
SMALLER = 32
"""The rows, and the columns, of the tiles that the first pass looks at."""
_MOST_SMALLER = 2**22
"""The most tiles of that size that it looks at; of a larger map it looks at whole tiles."""
AT_ONCE = 64
"""The number of tiles whose pairs are evaluated at once: 2**20 pairs."""


class Coverage(NamedTuple):
    """How much tiles show, `[#B, #N, query tiles, key tiles]`, of size 1 along axes that have no part in it."""

    full: Bool[Array, "#B #N I J"]
    """Whether every query of a tile sees every key."""
    some: Bool[Array, "#B #N I J"]
    """Whether some query may see some key."""

    def __and__(self, other: Coverage) -> Coverage:
        """Return what two masks show together, as far as is known."""
        return Coverage(self.full & other.full, self.some & other.some)

    @property
    def partial(self) -> Bool[Array, "#B #N I J"]:
        """Whether a tile needs a mask."""
        return self.some & ~self.full

    def encoded(self) -> Int8[Array, "#B #N I J"]:
        """Return 0, 1 and 2 for empty, partial and full."""
        return self.some.astype(jnp.int8) + self.full.astype(jnp.int8)

    @staticmethod
    def decoded(array: Int8[Array, "#B #N I J"]) -> Coverage:
        """Return what `encoded` encoded."""
        return Coverage(array == 2, array > 0)

    def transposed(self) -> Coverage:
        """Return the map with queries and keys exchanged."""
        return Coverage(*(jnp.swapaxes(array, 2, 3) for array in self))

    def coarser(self, by: tuple[int, int]) -> tuple[Coverage, Bool[Array, "#B #N I J"]]:
        """Return the map of tiles `by` times as large along both axes, and which may be partial and need not be."""
        empty, partial, full = 1, 2, 4
        kinds = jnp.where(self.full, full, jnp.where(self.some, partial, empty)).astype(jnp.int8)
        *outer, i, j = kinds.shape
        kinds = jnp.pad(kinds, [(0, 0)] * len(outer) + [(0, -i % by[0]), (0, -j % by[1])])
        kinds = kinds.reshape(*outer, -(-i // by[0]), by[0], -(-j // by[1]), by[1])
        # One reduction, so that XLA keeps no array of what is reduced.
        kinds = lax.reduce(kinds, jnp.int8(0), lax.bitwise_or, (len(outer) + 1, len(outer) + 3))
        found = Coverage(kinds == full, kinds != empty)
        return found, found.partial & (kinds & (empty | full) != empty | full)


class Grid(NamedTuple):
    """The tiles of a call."""

    batch: int
    heads: int
    queries: int
    keys: int
    tile: int = TILE
    """The rows, and the columns, of a tile."""

    @property
    def tiles(self) -> tuple[int, int]:
        """The number of tiles along queries and keys."""
        return -(-self.queries // self.tile), -(-self.keys // self.tile)

    @property
    def times(self) -> int:
        """The number of them that make a tile of the map, along each axis."""
        return TILE // self.tile


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4, 5))
def of_mask_mod(
    mask_mod: MaskMod, arrays: tuple[Array, ...], batch: int, heads: int, queries: int, keys: int
) -> Int8[Array, "#B #N I J"]:
    """Return how much a function shows of each tile of 128 x 128, encoded; `arrays` have their own shapes."""
    by_batch, by_head, *_ = mask_mod.looks_at
    grid = Grid(batch if by_batch else 1, heads if by_head else 1, queries, keys)
    # XLA would evaluate at compile time, slowly, what is made of a program's own constants.
    arrays = lax.optimization_barrier(arrays)
    number = grid.batch * grid.heads * grid.tiles[0] * grid.tiles[1]
    fine = grid._replace(tile=SMALLER) if number * (TILE // SMALLER) ** 2 <= _MOST_SMALLER else grid
    found, _ = by_intervals(mask_mod, arrays, fine)
    found, doubtful = found.coarser((fine.times, fine.times))
    if number <= allowed(grid):
        return found.encoded()
    # What the second pass needs, its tiles' places, is made only if there is one.
    return lax.cond(
        doubtful.sum(dtype=jnp.int32) > allowed(grid),
        lambda found: refined(mask_mod, arrays, grid, found, doubtful).encoded(),
        Coverage.encoded,
        found,
    )


def allowed(grid: Grid) -> int:
    """Return how many tiles in doubt are too few for a second pass.

    They are as many as one edge has that goes through the whole mask, for each batch entry and head on which it
    depends.
    """
    return sum(grid.tiles) * grid.batch * grid.heads


def by_intervals(mask_mod: MaskMod, arrays: Sequence[Array], grid: Grid) -> tuple[Coverage, dict[str, int]]:
    """Return what intervals know, and how many operations of which name they did not understand."""
    evaluation = Evaluation()
    consts = [point(array[None, None, None, None]) for array in arrays]
    (seen,) = evaluation(mask_mod.jaxpr.jaxpr, consts, indices(grid))
    shape = jnp.broadcast_shapes(seen.low.shape, (1, 1, *grid.tiles))
    return Coverage(jnp.broadcast_to(seen.low, shape), jnp.broadcast_to(seen.high, shape)), evaluation.unknown


def indices(grid: Grid) -> list[Interval]:
    """Return the function's arguments, bounded for all tiles."""

    def each(axis: int, count: int) -> Interval:
        number = jnp.arange(count, dtype=jnp.int32).reshape([count if a == axis else 1 for a in range(4)])
        return Interval(np.dtype(np.int32), number, number, number, (0, count - 1), 1)

    def along(axis: int, count: int) -> Interval:
        tiles = -(-count // grid.tile)
        low = (jnp.arange(tiles, dtype=jnp.int32) * grid.tile).reshape([tiles if a == axis else 1 for a in range(4)])
        high = jnp.minimum(low + grid.tile, count) - 1
        return Interval(
            np.dtype(np.int32), low, high, low if count == 1 else None, (0, count - 1), grid.tile,
            Blocks(axis, grid.tile, 0),
        )  # fmt: skip

    return [each(0, grid.batch), each(1, grid.heads), along(2, grid.queries), along(3, grid.keys)]


def refined(
    mask_mod: MaskMod, arrays: Sequence[Array], grid: Grid, found: Coverage, doubtful: Bool[Array, "#B #N I J"]
) -> Coverage:
    """Return `found` with the doubtful tiles looked at pair by pair."""
    shape = found.some.shape
    of_tile = jnp.arange(grid.tile, dtype=jnp.int32)
    given = tuple(arrays)
    shown, hidden = 1, 2

    def look(place: Int32[Array, ""]) -> Array:
        batch, head, i, j = jnp.unravel_index(place, shape)
        query, key = i.astype(jnp.int32) * grid.tile + of_tile, j.astype(jnp.int32) * grid.tile + of_tile
        one = lambda q, k: mask_mod.scalar(batch.astype(jnp.int32), head.astype(jnp.int32), q, k, given)
        seen = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(query, key)
        inside = (query < grid.queries)[:, None] & (key < grid.keys)[None]
        pairs = jnp.where(inside, jnp.where(seen, shown, hidden), 0).astype(jnp.int8)
        # One reduction, so that XLA keeps no array of pairs.
        kinds = lax.reduce(pairs, jnp.int8(0), lax.bitwise_or, (0, 1))
        return Coverage(kinds == shown, kinds != hidden).encoded()

    return Coverage.decoded(with_marked(doubtful, look, found.encoded().reshape(-1)).reshape(shape))


def with_marked[Arrays](
    marked: Bool[Array, "..."], look: Callable[[Int32[Array, ""]], Arrays], arrays: Arrays
) -> Arrays:
    """Return arrays of an entry for each tile with the entries of marked tiles set to what `look` returns for them.

    `look` gets a tile's place in the flat order of `marked`. It is called for a few tiles at a time, so memory is
    bounded, and for no others.
    """
    number = marked.size
    (places,) = jnp.nonzero(marked.reshape(-1), size=number, fill_value=number)
    places = jnp.pad(places.astype(jnp.int32), (0, AT_ONCE), constant_values=number)
    count = marked.sum(dtype=jnp.int32)

    def step(carry: tuple[Int32[Array, ""], Arrays]) -> tuple[Int32[Array, ""], Arrays]:
        first, arrays = carry
        some = lax.dynamic_slice(places, (first,), (AT_ONCE,))
        found = jax.vmap(look)(jnp.minimum(some, number - 1))
        return first + AT_ONCE, jax.tree.map(lambda array, new: array.at[some].set(new, mode="drop"), arrays, found)

    return lax.while_loop(lambda carry: carry[0] < count, step, (jnp.int32(0), arrays))[1]
