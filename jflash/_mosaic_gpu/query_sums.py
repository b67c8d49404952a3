"""dQ of the fused backward: blocks of keys add to sums in device memory, and blocks that begin later round them.

A block waits for its first tiles when it begins, and its last warpgroup, which copies tiles, for the others to be done
with them. In that time they round a share of what earlier blocks summed, and make the sums zero for later ones. So sums
stay in the cache, and few more of them are there than are in use.

The grid's slowest axis counts turns: heads, or where heads share keys, blocks of keys, which all add to the same dQ.
What was summed `lag` turns before is rounded; after the last turn that adds, `lag` more turns do nothing else.

    lag = number of turns    all is summed before anything is rounded
    lag small                there are places for the sums of 2 lag heads: when a head begins, the one that had its
                             place was rounded by the head `lag` before it, for which it waits anyway

A wait is short, or none: blocks for all processors, and as many again, begin between those that a block waits for and
itself. It ends, since a grid's blocks begin in their order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jflash._mosaic_gpu.operations import Operations, Ref
from jflash._mosaic_gpu.tiles import ROWS

SPARE = 3
"""Parts that the warpgroup that copies can round while others are at the last tiles."""


@dataclasses.dataclass(frozen=True)
class Turns:
    """How the sums of all heads share memory."""

    number: int
    """Turns that add."""
    lag: int
    places: int
    """Heads whose sums are there at once."""

    @staticmethod
    def of(heads: int, group: int, blocks: int, batch: int, processors: int | None) -> Turns:
        """For so many heads of queries, `group` of which share keys, and blocks of keys that each head has.

        Causal, a head's longest block takes twice as long as all do on average: it is done when blocks for twice the
        processors, and some more, were begun after it. The last ones of the turn before are always still at work.
        """
        if group > 1:
            return Turns(blocks, blocks, heads)
        lag = heads if processors is None else min(heads, max(2, round(2.2 * processors / (batch * blocks))))
        return Turns(heads, lag, min(heads, 2 * lag))


@dataclasses.dataclass(frozen=True)
class QuerySums:
    """What one block does with the sums `[B, places, L, H]`, with the numbers of warpgroups that have `finished` the
    keys of a head, `[B, K]`, and with dQ `[B, L, N, H]`. L is a multiple of 64."""

    turns: Turns
    operations: Operations
    sums: Ref
    finished: Ref
    d_query: Ref
    scale: float
    """What sums are multiplied with."""
    group: int
    blocks: int
    warpgroups: int
    """Of a block, that compute."""
    batch: Any
    turn: Any
    key_head: Any
    block: Any
    copies: Any
    """Tiles of queries that this block visits."""

    @property
    def adds(self) -> Any:
        """Whether this block has keys."""
        return self.turn < self.turns.number

    def target(self, head: Any, rows: Any, columns: Any) -> Ref:
        """A part of a head's sums."""
        return self.sums.at[self.batch, lax.rem(head, self.turns.places) if self._shared else head, rows, columns]

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
        self.operations.count(self.finished.at[self.batch, self.key_head])

    @property
    def _earlier(self) -> Any:
        """The turn of what is rounded in this one."""
        return self.turn - self.turns.lag

    @property
    def _shared(self) -> bool:
        return self.turns.places < self.d_query.shape[2]

    @property
    def _slice(self) -> Any:
        return self.block if self.group == 1 else self._earlier

    @property
    def _share(self) -> int:
        """Tiles of 64 rows of each head that fall to a block, if so many are left."""
        return -(-self.d_query.shape[1] // (self.blocks * ROWS))

    @property
    def _tiles(self) -> Any:
        """How many tiles this block rounds."""
        left = self.d_query.shape[1] // ROWS - self._slice * self._share
        return jnp.where(self._earlier < 0, 0, jnp.clip(left, 0, self._share) * self.group)

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
        head = jnp.maximum(self._earlier, 0) if self.group == 1 else self.key_head
        finished = self.finished.at[self.batch, head]
        # The warpgroup that copies counts too.
        wait = lambda: self.operations.wait_until(finished, self.blocks * (self.warpgroups + 1))
        pl.when(self._earlier >= 0)(wait)

    def _round(self, first: Any, last: Any, portion: int = 1, every: int = 1) -> None:
        """Some of this block's parts, so many at once."""
        parts = self._parts // portion
        first_head = self._earlier if self.group == 1 else self.key_head * self.group
        first_tile = self._slice * self._share
        size = ROWS // parts

        def round_rows(index: Any, _: None) -> None:
            number = first + index * every
            tile = lax.div(number, parts)
            head = first_head + lax.rem(tile, self.group)
            row = (first_tile + lax.div(tile, self.group)) * ROWS + lax.rem(number, parts) * size
            self._round_rows(head, pl.ds(row, size))

        lax.fori_loop(0, lax.div(last - first + every - 1, every), round_rows, None)

    def _round_rows(self, head: Any, rows: Any) -> None:
        sums = self.target(head, rows, pl.ds(0, self.d_query.shape[3]))
        total = self.operations.load_rows(sums)
        self.d_query[self.batch, rows, head] = (total * self.scale).astype(self.d_query.dtype)
        if self._shared:
            # Each thread overwrites what it has read.
            sums[...] = self.operations.zero_rows(total.shape)
