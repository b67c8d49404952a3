"""dQ of the fused backward: blocks of keys add to sums in device memory, and blocks that begin later round them.

A block waits for its first tiles when it begins, and its last warpgroup, which copies tiles, for the others to be done
with them. In that time they round a share of what earlier blocks summed, and make the sums zero for later ones. So sums
stay in the cache, and few more of them are there than are in use.

What was summed `lag` of the grid's `turns` before is rounded; after the last turn, `lag` more do nothing else. There
are places for the sums of 2 lag turns: when one begins, the one that had its place was rounded by the turn `lag` before
it, for which it waits anyway.

A wait is short, or none: about as many blocks as keep all processors busy twice begin between those that a block waits
for and itself. It ends, since a grid's blocks begin in their order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jflash._backends.mosaic_gpu.operations import Operations, Ref
from jflash._backends.mosaic_gpu.tiles import ROWS
from jflash._backends.mosaic_gpu.turns import Turns, Unit

SPARE = 3
"""Parts that the warpgroup that copies can round while others are at the last tiles."""


def lag(turns: Turns) -> int:
    """When a turn begins, the last blocks of the one before are always still at work."""
    return min(turns.number, 2)


def places(turns: Turns) -> int:
    """The turns for whose sums there is room."""
    return min(turns.number, 2 * lag(turns))


def room(turns: Turns) -> int:
    """The heads of queries for whose sums there is room."""
    return places(turns) * turns.units * turns.heads


@dataclasses.dataclass(frozen=True)
class QuerySums:
    """What one block does with the sums `[places, L, H]`, with the numbers of warpgroups that have `finished` the keys
    of a set of heads, `[B, sets]`, and with dQ `[B, L, N, H]`. L is a multiple of 64."""

    turns: Turns
    operations: Operations
    sums: Ref
    finished: Ref
    d_query: Ref
    scale: float
    """What sums are multiplied with."""
    warpgroups: int
    """Of a block, that compute."""
    turn: Any
    block: Any
    unit: Any
    copies: Any
    """Tiles of queries that this block visits."""

    @property
    def adds(self) -> Any:
        """Whether this block has keys."""
        return self.turn < self.turns.number

    def target(self, head: Any, rows: Any, columns: Any) -> Ref:
        """A part of the sums of one of the set's heads."""
        return self._sums(self.turn, head).at[rows, columns]

    def begin(self, warpgroup: Any) -> None:
        """For a warpgroup that computes, before it adds: round what the copies leave no time for."""
        self._wait()
        # The last one comes first: the first is still at the copies of the block's keys.
        first = lax.div(self._beside_copies, self._portion) + self.warpgroups - 1 - warpgroup
        self._round(first, self._tiles * (self._parts // self._portion), self._portion, self.warpgroups)

    def after_copy(self, index: Any) -> None:
        """For the warpgroup that copies: round a part of a tile, as it has registers for 8 numbers a thread."""
        pl.when(index == 0)(self._wait)
        self._round(index, jnp.minimum(index + 1, self._beside_copies))

    def finish(self) -> None:
        """A warpgroup has rounded what falls to it, and what it added is there."""
        own = self.turns.unit(self.turn, self.unit)
        self.operations.count(self.finished.at[own.batch, own.set])

    @property
    def _is_early(self) -> Any:
        """Whether nothing is to be rounded yet."""
        return self.turn < lag(self.turns)

    @property
    def _earlier_turn(self) -> Any:
        return jnp.maximum(self.turn - lag(self.turns), 0)

    @property
    def _earlier(self) -> Unit:
        """What is rounded: all heads of its set, and of their rows a part for each block."""
        return self.turns.unit(self._earlier_turn, self.unit)

    def _sums(self, turn: Any, head: Any) -> Ref:
        """Of this block's unit in a turn."""
        place = lax.rem(turn, places(self.turns)) * self.turns.units + self.unit
        return self.sums.at[place * self.turns.heads + head]

    @property
    def _share(self) -> int:
        """Tiles of 64 rows of each head that fall to a block, if so many are left."""
        return -(-self.d_query.shape[1] // (self.turns.blocks * ROWS))

    @property
    def _tiles(self) -> Any:
        """How many tiles this block rounds."""
        left = self.d_query.shape[1] // ROWS - self.block * self._share
        return jnp.where(self._is_early, 0, jnp.clip(left, 0, self._share) * self.turns.heads)

    @property
    def _parts(self) -> int:
        """Of a tile: as many numbers as 8 for each thread, or what comes out even."""
        numbers = {rows: rows * self.d_query.shape[3] for rows in (64, 32, 16, 8)}
        return ROWS // next((rows for rows, size in numbers.items() if size <= 1024 and size % 128 == 0), 16)

    @property
    def _portion(self) -> int:
        """Parts that a warpgroup that computes takes at once: 32 numbers for each thread, or a tile."""
        return min(self._parts, 4)

    @property
    def _beside_copies(self) -> Any:
        """How many parts are rounded one by one, after each copy and after them all."""
        parts = jnp.minimum(self.copies + SPARE, self._tiles * self._parts)
        return jnp.where(self.adds, lax.div(parts, self._portion) * self._portion, 0)

    def _wait(self) -> None:
        """Until what is rounded here is summed, and there is room for what is added."""
        finished = self.finished.at[self._earlier.batch, self._earlier.set]
        # The warpgroup that copies counts too.
        wait = lambda: self.operations.wait_until(finished, self.turns.blocks * (self.warpgroups + 1))
        pl.when(~self._is_early)(wait)

    def _round(self, first: Any, last: Any, portion: int = 1, every: int = 1) -> None:
        """Some of this block's parts, so many at once."""
        parts = self._parts // portion
        first_tile = self.block * self._share
        size = ROWS // parts

        def round_rows(index: Any, _: None) -> None:
            number = first + index * every
            tile = lax.div(number, parts)
            row = (first_tile + lax.div(tile, self.turns.heads)) * ROWS + lax.rem(number, parts) * size
            self._round_rows(lax.rem(tile, self.turns.heads), pl.ds(row, size))

        lax.fori_loop(0, lax.div(last - first + every - 1, every), round_rows, None)

    def _round_rows(self, head: Any, rows: Any) -> None:
        sums = self._sums(self._earlier_turn, head).at[rows, pl.ds(0, self.d_query.shape[3])]
        total = self.operations.load_rows(sums)
        earlier = self._earlier
        rounded = (total * self.scale).astype(self.d_query.dtype)
        self.d_query[earlier.batch, rows, earlier.first_head + head] = rounded
        if places(self.turns) < self.turns.number:
            # Each thread overwrites what it has read.
            sums[...] = self.operations.zero_rows(total.shape)
