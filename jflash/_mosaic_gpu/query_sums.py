"""dQ of the fused backward: blocks of keys add to sums in device memory, and blocks that begin later round them.

A block waits for its first tiles when it begins. Until they are there, it rounds a slice of what earlier blocks summed,
and makes the sums zero for later ones. So they stay in the cache, and no more of them are there than are in use.

The grid's slowest axis counts turns: heads, or where heads share keys, blocks of keys, which all add to the same dQ.
What was summed `lag` turns before is rounded; after the last turn that adds, `lag` more turns do nothing else. With

    lag = number of turns              all is summed before anything is rounded
    lag small, places = 2 * lag        a head takes the place of the one `places` before it, which the head `lag` before
                                       has rounded, for which a block waits anyway

A wait is short, or none, since there are blocks for all processors, and as many again, between those that a block waits
for and itself. It ends, since they were begun before: blocks begin in the order of the grid.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jflash._mosaic_gpu.operations import Operations, Ref
from jflash._mosaic_gpu.tiles import ROWS


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
        """For so many heads of queries, `group` of which share keys, and blocks of keys that each head has."""
        if group > 1:
            return Turns(blocks, blocks, heads)
        lag = heads if processors is None else min(heads, max(1, round(2 * processors / (batch * blocks))))
        return Turns(heads, lag, min(heads, 2 * lag))


@dataclasses.dataclass(frozen=True)
class QuerySums:
    """What one block does with the sums `[B, places, L, H]`, with the numbers of warpgroups that have `finished` the
    keys of a head, `[B, K]`, and with dQ `[B, L, N, H]`."""

    turns: Turns
    operations: Operations
    sums: Ref
    finished: Ref
    d_query: Ref
    batch: Any
    turn: Any
    key_head: Any
    block: Any
    """Which of keys, if that is not the turn."""
    group: int
    blocks: int
    warpgroups: int
    """Of a block, that add or round."""
    scale: float
    """What sums are multiplied with."""

    def target(self, head: Any, rows: Any, columns: Any) -> Ref:
        """A part of a head's sums."""
        return self.sums.at[self.batch, lax.rem(head, self.turns.places) if self._shared else head, rows, columns]

    def wait(self) -> None:
        """Until what this block rounds is summed, and there is room for what it adds."""
        head = jnp.maximum(self._earlier, 0) if self.group == 1 else self.key_head
        finished = self.finished.at[self.batch, head]
        ready = lambda: self.operations.wait_until(finished, self.blocks * self.warpgroups)
        pl.when(self._earlier >= 0)(ready)

    @property
    def tiles(self) -> Any:
        """How many tiles of 64 rows fall to this block."""
        return jnp.clip(self.d_query.shape[1] // ROWS - self._slice * self._share, 0, self._share) * self.group

    @property
    def parts(self) -> int:
        """How many parts a tile has, of 8 numbers for each thread, if so many come out even."""
        numbers = {rows: rows * self.d_query.shape[3] for rows in (64, 32, 16, 8)}
        return ROWS // next((rows for rows, size in numbers.items() if size <= 1024 and size % 128 == 0), 16)

    def round(self, first: Any, last: Any, every: int = 1, parts: int = 1) -> None:
        """Some of this block's tiles, or of their parts, by their numbers."""
        head = self._earlier if self.group == 1 else self.key_head * self.group
        rows = ROWS // parts

        def round_rows(index: Any, _: None) -> None:
            number = first + index * every
            tile = lax.div(number, parts)
            row = (self._slice * self._share + lax.div(tile, self.group)) * ROWS + lax.rem(number, parts) * rows
            self._round(head + lax.rem(tile, self.group), pl.ds(row, rows))

        last = jnp.where(self._earlier >= 0, last, 0)
        lax.fori_loop(0, lax.div(last - first + every - 1, every), round_rows, None)

    def finish(self) -> None:
        """One warpgroup has done all that falls to it, and the copies that add are done."""
        self.operations.count(self.finished.at[self.batch, self.key_head])

    @property
    def _earlier(self) -> Any:
        return self.turn - self.turns.lag

    @property
    def _slice(self) -> Any:
        return self.block if self.group == 1 else self._earlier

    @property
    def _share(self) -> int:
        """Tiles of one head that fall to a block, if so many are left."""
        return -(-self.d_query.shape[1] // (self.blocks * ROWS))

    @property
    def _shared(self) -> bool:
        return self.turns.places < self.d_query.shape[2]

    def _round(self, head: Any, rows: Any) -> None:
        sums = self.target(head, rows, pl.ds(0, self.d_query.shape[3]))
        total = self.operations.load_rows(sums)
        self.d_query[self.batch, rows, head] = (total * self.scale).astype(self.d_query.dtype)
        if self._shared:
            # Each thread overwrites what it has read.
            sums[...] = self.operations.zero_rows(total.shape)
