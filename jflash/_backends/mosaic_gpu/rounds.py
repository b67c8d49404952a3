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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

MOST = 32
"""The most rounds, and the most batch entries whose blocks make one list."""

# How long things take, in visits to a tile of keys. With these, for 12 calls that were measured with up to 10 kinds of
# rounds, those chosen are the fastest or 0.7% slower on average (one H200, head dims 64 and 128).
_ROUND = 0.3
_SPREAD = 0.05
"""How much longer the slowest multiprocessor takes than the fastest."""
_CACHE = 10 * 2**20
"""Bytes of keys and values, of all heads at work, that are read as fast as any; for every MiB more 0.08% is lost."""
_MISSES = 0.0008 / 2**20
_WORTH, _ENOUGH = 1.025, 1.006
"""Rounds, or more sections, are taken where a call takes so much longer without, and the fewest of those that are as
good as the best."""


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How many blocks a head has in each batch entry, in the order in which they should be begun, and how many of them
    one block of the grid takes."""

    blocks: int
    batch: int
    number: int = 1
    entries: int = 1
    """Batch entries whose blocks make one list; a divisor of all."""
    sections: int = 1
    """Into how many sections heads are divided, of each of which one is worked on at the same time."""
    turned: bool = False
    """Whether in a list each entry begins one block later than the entry before. Then whoever takes of each entry the
    same place has as much to do as others, whatever blocks there are for nothing."""

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of the grid: for the blocks of some entries, and for all entries."""
        return -(-self.blocks * self.entries // self.number), self.batch // self.entries

    def taken(self, member: tuple[Any, Any], index: Any) -> tuple[Any, Any]:
        """The batch entry, and which of its blocks, that a block of the grid takes in a round."""
        place = self.place(member[0], index)
        if self.entries == 1:
            return member[1], place
        entry, block = lax.div(place, self.blocks), lax.rem(place, self.blocks)
        if self.turned:
            block = lax.rem(block + entry, self.blocks)
        return member[1] * self.entries + entry, block

    def place(self, member: Any, index: Any) -> Any:
        """Where in the list of blocks: every other round in the opposite order, so that all have as much to do; past
        the end where nothing is left."""
        if self.number == 1:
            return member
        backwards = lax.rem(index, 2) == 1
        return index * self.grid[0] + jnp.where(backwards, self.grid[0] - 1 - member, member)

    def _is_left(self, member: tuple[Any, Any], index: Any) -> Any:
        return self.place(member[0], index) < self.blocks * self.entries

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


class Device(NamedTuple):
    """What a call runs on, and how."""

    processors: int
    """Each runs one block of the grid at a time."""
    beginning: float
    """How long a block of the grid takes to begin and end, in visits to a tile."""
    tile_bytes: int
    """Of a tile of keys and values."""


@functools.cache
def plan(one: Rounds, visits: tuple[float, ...], heads: int, device: Device) -> Rounds:
    """The rounds that take the least time, by what is known of the device.

    Args:
      one: the call, without rounds.
      visits: how many tiles of keys each block of a head visits, in the order in which they should be begun.
      heads: how many there are.
      device: what the call runs on.
    """
    time = functools.cache(lambda rounds: _time(rounds, visits, heads, device))
    return _better(_better(one, _candidates(one), time), _sections(one, heads), time)


def _better(one: Rounds, others: Iterable[Rounds], time: Callable[[Rounds], float]) -> Rounds:
    """The first of the others that are as good as the best, if that is worth it."""
    times = {rounds: time(rounds) for rounds in others}
    least = min(times.values())
    if time(one) <= _WORTH * least:
        return one
    return next(rounds for rounds, time in times.items() if time <= _ENOUGH * least)


def _sections(one: Rounds, heads: int) -> Iterator[Rounds]:
    """As many sections, and more: where a head has too few blocks for all processors, the long ones of several heads
    have to begin first."""
    for sections in range(one.sections, heads + 1):
        if heads % sections == 0:
            yield dataclasses.replace(one, sections=sections)


def _candidates(one: Rounds) -> Iterator[Rounds]:
    """Those in which all take about the same number of blocks, the fewest rounds first.

    Of no more entries than there are rounds: then what a list's members take at the same time is of one entry or two.
    """
    for number in range(1, MOST + 1):
        for entries in (entries for entries in range(1, number + 1) if one.batch % entries == 0):
            rounds = dataclasses.replace(one, number=number, entries=entries)
            places = number * rounds.grid[0]
            if (places - rounds.blocks * entries) * 32 <= places:
                yield rounds


def _time(rounds: Rounds, visits: tuple[float, ...], heads: int, device: Device) -> float:
    """How long a call takes, in visits to a tile."""
    members, groups = rounds.grid
    turns = [device.beginning] * members
    for index, member in itertools.product(range(rounds.number), range(members)):
        place = index * members + (members - 1 - member if index % 2 else member)
        if place < rounds.blocks * rounds.entries:
            turns[member] += _ROUND + visits[place % rounds.blocks]
    at_work = min(heads * rounds.batch, max(rounds.sections, device.processors / members))
    read = at_work * device.tile_bytes * sum(visits) / len(visits)
    together = [turn for turn in turns for _ in range(rounds.sections * groups)]
    return _last(together, heads // rounds.sections, device.processors) * (1 + _MISSES * max(0, read - _CACHE))


def _last(turns: list[float], times: int, processors: int) -> float:
    """When the last turn ends, if each processor that is free takes the next one, all turns so many times."""
    if times * len(turns) > 32 * processors:
        return times * sum(turns) / processors + max(turns)
    # In no order: neighbours differ as much as any two.
    free = [(0.0, 1 + _SPREAD * (index * 0.618 % 1)) for index in range(processors)]
    last = 0.0
    for turn in itertools.chain.from_iterable(itertools.repeat(turns, times)):
        start, speed = free[0]
        heapq.heapreplace(free, (start + turn * speed, speed))
        last = max(last, start + turn * speed)
    return last
