"""Several blocks of queries that one block of the grid takes, one after the other.

A block of the grid begins and ends in about three microseconds. In rounds, what the next block of queries begins with
is loaded before the last one ends, and a warpgroup that has less to do begins while others still work on the last.

A head's blocks, or those of several batch entries, make one list, from which they are dealt out in turns: so what runs
at the same time shares keys, which stay in the second-level cache.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

MOST = 32
"""The most rounds, and the most batch entries whose blocks make one list."""

# How long things take, in visits to a tile of keys. With these, of what was measured for 23 calls by up to 10 kinds of
# rounds, the fastest is chosen for each, or one that is 0.2% slower on average and 1.5% at most.
_ROUND = 0.3
_SPREAD = 0.05
"""How much longer the slowest multiprocessor takes than the fastest."""
_CACHE = 10 * 2**20
"""Bytes of keys and values, of all heads at work, that are read as fast as any; for every 25 MiB more 2% are lost."""
_MISSES = 0.02 / (25 * 2**20)
_ENOUGH = 1.005
"""The fewest rounds that are as good as that take the least time."""


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How many blocks a head has in each batch entry, in the order in which they should be begun, and how many of them
    one block of the grid takes."""

    blocks: int
    batch: int
    number: int = 1
    entries: int = 1
    """Batch entries whose blocks make one list; a divisor of all."""

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of the grid: for the blocks of some entries, and for all entries."""
        return -(-self.blocks * self.entries // self.number), self.batch // self.entries

    def taken(self, member: tuple[Any, Any], index: Any) -> tuple[Any, Any]:
        """The batch entry, and which of its blocks, that a block of the grid takes in a round."""
        place = self._place(member[0], index)
        if self.entries == 1:
            return member[1], place
        return member[1] * self.entries + lax.div(place, self.blocks), lax.rem(place, self.blocks)

    def _place(self, member: Any, index: Any) -> Any:
        """Where in the list of blocks: every other round in the opposite order, so that all have as much to do; past
        the end where nothing is left."""
        if self.number == 1:
            return member
        backwards = lax.rem(index, 2) == 1
        return index * self.grid[0] + jnp.where(backwards, self.grid[0] - 1 - member, member)

    def _is_left(self, member: tuple[Any, Any], index: Any) -> Any:
        return self._place(member[0], index) < self.blocks * self.entries

    def each(self, member: tuple[Any, Any], body: Callable[[Any, Any], Any]) -> Any:
        """`carry = body(index, carry)` for every round, from 0 on."""
        if self.number == 1:
            return body(0, 0)
        left = (jnp.int32(self._is_left(member, index)) for index in range(self.number))
        return lax.fori_loop(0, sum(left), body, jnp.int32(0))

    def then(self, member: tuple[Any, Any], index: Any, body: Callable[[Any], None]) -> None:
        """`body(index + 1)`, if there is such a round."""
        if self.number > 1:
            pl.when((index + 1 < self.number) & self._is_left(member, index + 1))(lambda: body(index + 1))


@functools.cache
def plan(
    visits: tuple[float, ...], batch: int, heads: int, processors: int, tile_bytes: int, beginning: float
) -> Rounds:
    """The rounds that take the least time, by what is known of the device.

    Args:
      visits: how many tiles of keys each block of a head visits, in the order in which they should be begun.
      batch, heads: how many there are.
      processors: of the device; each runs one block of the grid at a time.
      tile_bytes: of a tile of keys and values.
      beginning: of a block of the grid, and its end: how long they take, in visits to a tile.
    """
    candidates = _candidates(visits, batch)
    times = {rounds: _time(rounds, visits, heads, processors, tile_bytes, beginning) for rounds in candidates}
    enough = _ENOUGH * min(times.values())
    return next(rounds for rounds, time in times.items() if time <= enough)


def _candidates(visits: tuple[float, ...], batch: int) -> Iterator[Rounds]:
    """Those in which all take about the same number of blocks, the fewest rounds first."""
    entries = [number for number in range(1, min(batch, MOST) + 1) if batch % number == 0]
    for number, together in itertools.product(range(1, MOST + 1), entries):
        rounds = Rounds(len(visits), batch, number, together)
        places = number * rounds.grid[0]
        if (places - rounds.blocks * together) * 32 <= places:
            yield rounds


def _time(
    rounds: Rounds, visits: tuple[float, ...], heads: int, processors: int, tile_bytes: int, beginning: float
) -> float:
    """How long a call takes, in visits to a tile."""
    members, groups = rounds.grid
    turns = [beginning] * members
    for index, member in itertools.product(range(rounds.number), range(members)):
        place = index * members + (members - 1 - member if index % 2 else member)
        if place < rounds.blocks * rounds.entries:
            turns[member] += _ROUND + visits[place % rounds.blocks]
    at_work = min(heads * rounds.batch, processors / min(members, rounds.blocks))
    read = at_work * tile_bytes * sum(visits) / len(visits)
    return _last(turns, heads, groups, processors) * (1 + _MISSES * max(0, read - _CACHE))


def _last(turns: list[float], heads: int, groups: int, processors: int) -> float:
    """When the last turn ends, if each processor that is free takes the next one."""
    if heads * groups * len(turns) > 32 * processors:
        return heads * groups * sum(turns) / processors + max(turns)
    # In no order: neighbours differ as much as any two.
    speeds = [1 + _SPREAD * (index * 0.618 % 1) for index in range(processors)]
    free = [(0.0, speed) for speed in speeds]
    last = 0.0
    for turn in itertools.chain.from_iterable(itertools.repeat([turn for turn in turns for _ in range(groups)], heads)):
        start, speed = free[0]
        heapq.heapreplace(free, (start + turn * speed, speed))
        last = max(last, start + turn * speed)
    return last
