"""Which work items each CTA of the forward takes, one after the other: blocks of queries of a head and batch entry.

A CTA begins and ends in about three microseconds. One that takes several items loads what the next one begins with
before the last one ends, and a warpgroup that has less to do begins while others still work on the last. What runs at
the same time shares keys, which stay in the second-level cache.

`ForwardSchedule` counts items out: a head's blocks, or those of several batch entries, make one list, from which they
go to CTAs in turn. `deal` makes lists before the call: each item goes to the CTA that should be done first.

`choose` asks a model of the device, fitted to measurements:
examples/benchmarks/experiments/2026-11-22-forward-schedule.md.

Source: R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969): list scheduling.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Int

from jflash._backends.nvidia.ops import Ref

MOST_ITEMS = 32
"""The most work items of a CTA, and the most batch entries whose blocks make one list."""

ITEM_TIME = 0.3
"""How long a work item takes beside its tiles, in visits to a tile of keys, where it was not timed (`tiles.PACES`)."""
BEGIN_BY_STORES = (0.6, 1.0, 1.5)
"""How long a CTA takes to begin and end there, in visits, by the stores in which its output leaves. With none the next
item's queries wait for it, which takes half of what several items save."""
_SPREAD = 0.05
"""How much longer the slowest multiprocessor takes than the fastest."""
_CACHE = 10 * 2**20
"""Bytes of keys and values, of all heads at work, that are read at full speed."""
_MISSES = 0.0008 / 2**20
"""The part of the time that every byte beyond `_CACHE` adds."""
_CACHE_OF_LISTS = 20 * 2**20
"""Bytes of keys and values that stay in the cache until a CTA reads them again, for its next block."""
_MISSES_OF_LISTS = 0.008 / 2**20
"""The part of the time that every byte beyond `_CACHE_OF_LISTS` adds, for tiles of twice `_TILE_FROM_MEMORY`."""
_TILE_FROM_MEMORY = 2**15
"""Bytes of a tile of keys and values that device memory gives to every CTA while it visits the tile before."""

_WORTH = 1.025
"""A schedule with several items a CTA, or more head groups, is taken where a call takes so much longer without it."""
_ENOUGH = 1.006
"""Among schedules within this of the best, the first is taken."""


@dataclasses.dataclass(frozen=True)
class ForwardSchedule:
    """How a head's blocks of queries are counted out to CTAs, in the order in which they should begin."""

    blocks: int
    """Blocks of queries that a head has in a batch entry."""
    batch: int
    items_per_cta: int = 1
    entries: int = 1
    """Batch entries whose blocks make one list; the last list has those that are left."""
    head_groups: int = 1
    """Groups of neighbouring heads; one head of each group is worked on at the same time."""
    staggered: bool = False
    """Whether in a list each entry begins one block later than the entry before. Then a CTA that takes the same place
    of each entry has as much to do as others, whatever blocks turn out to be empty."""

    @property
    def grid(self) -> tuple[int, int]:
        """CTAs for the blocks of one list, and the number of lists."""
        return -(-self.blocks * self.entries // self.items_per_cta), -(-self.batch // self.entries)

    @property
    def entries_of_last(self) -> int:
        """Batch entries of the last list."""
        return self.batch - (self.grid[1] - 1) * self.entries

    def item(self, cta: tuple[Any, Any], index: Any) -> tuple[Any, Any]:
        """Return the batch entry of a CTA's `index`-th work item, and which of its blocks that is."""
        place = self.place(cta[0], index)
        if self.entries == 1:
            return cta[1], place
        entry, block = lax.div(place, self.blocks), lax.rem(place, self.blocks)
        if self.staggered:
            block = lax.rem(block + entry, self.blocks)
        return cta[1] * self.entries + entry, block

    def place(self, cta: Any, index: Any) -> Any:
        """Return where in the list of blocks a work item is; past the end where no item is left.

        Every other round goes backwards, so that all CTAs have as much to do.
        """
        if self.items_per_cta == 1:
            return cta
        backwards = lax.rem(index, 2) == 1
        return index * self.grid[0] + jnp.where(backwards, self.grid[0] - 1 - cta, cta)

    def _is_left(self, cta: tuple[Any, Any], index: Any) -> Any:
        place, blocks = self.place(cta[0], index), self.blocks * self.entries
        if self.entries_of_last == self.entries:
            return place < blocks
        return place < jnp.minimum(blocks, self.blocks * self.batch - cta[1] * blocks)

    def each(self, cta: tuple[Any, Any], body: Callable[[Any, Any], Any]) -> Any:
        """`carry = body(index, carry)` for every work item of a CTA, from 0 on."""
        if self.items_per_cta == 1:
            return body(0, 0)
        left = (jnp.int32(self._is_left(cta, index)) for index in range(self.items_per_cta))
        return lax.fori_loop(0, sum(left), body, jnp.int32(0))

    def if_next(self, cta: tuple[Any, Any], index: Any, body: Callable[[Any], None]) -> None:
        """`body(index + 1)`, if there is such a work item."""
        if self.items_per_cta > 1:
            pl.when((index + 1 < self.items_per_cta) & self._is_left(cta, index + 1))(lambda: body(index + 1))


class Device(NamedTuple):
    """What a call runs on, and how."""

    processors: int
    """Multiprocessors; each runs one CTA at a time."""
    beginning: float
    """How long a CTA takes to begin and end."""
    tile_bytes: int
    """Bytes of a tile of keys and one of values."""
    visits: float
    """Tiles that a block of queries visits, on average."""

    @property
    def read_bytes(self) -> float:
        """Bytes of keys and values that a block of queries visits, on average."""
        return self.tile_bytes * self.visits


class Choice(NamedTuple):
    """A schedule, and how long a call takes with it."""

    schedule: ForwardSchedule
    time: float


@functools.cache
def choose(one: ForwardSchedule, times: tuple[float, ...], heads: int, device: Device) -> Choice:
    """Return the schedule that takes the least time, by a model of the device, and that time.

    `one` is that of one work item a CTA. `times` are how long each block of a head takes, in the order in which they
    should begin; the unit is the caller's, and that of `device.beginning`.
    """
    time = functools.cache(lambda schedule: _time(schedule, times, heads, device))

    def better(one: ForwardSchedule, others: Iterable[ForwardSchedule]) -> ForwardSchedule:
        """The first of the others that is about as good as the best, if that is worth it."""
        least = [(_least(schedule, times, heads, device), schedule) for schedule in others]
        best = math.inf
        for bound, schedule in sorted(least, key=operator.itemgetter(0)):
            if bound < best:
                best = min(best, time(schedule))
        if time(one) <= _WORTH * best:
            return one
        enough = _ENOUGH * best
        return next(schedule for bound, schedule in least if bound <= enough and time(schedule) <= enough)

    several = tuple(_with_several_items(one))
    whole_lists = (schedule for schedule in several if one.batch % schedule.entries == 0)
    # Where a head has too few blocks for all multiprocessors, the long blocks of several heads have to begin first.
    groups = (groups for groups in range(one.head_groups, heads + 1) if heads % groups == 0)
    more_groups = (dataclasses.replace(one, head_groups=number) for number in groups)
    found = better(better(one, (*whole_lists, *more_groups)), several)
    return Choice(found, time(found))


def _with_several_items(one: ForwardSchedule) -> Iterator[ForwardSchedule]:
    """Schedules in which all CTAs take about the same number of items, the fewest first.

    A list has no more entries than a CTA has items: what its CTAs take at the same time is of one entry or two. Of the
    last list, which may have fewer, each CTA has an item.
    """
    for items in range(1, MOST_ITEMS + 1):
        for entries in range(1, min(items, one.batch) + 1):
            schedule = dataclasses.replace(one, items_per_cta=items, entries=entries)
            ctas, _ = schedule.grid
            places = items * ctas
            some_each = schedule.entries_of_last * schedule.blocks >= ctas
            if (places - schedule.blocks * entries) * 32 <= places and some_each:
                yield schedule


def _least(schedule: ForwardSchedule, times: tuple[float, ...], heads: int, device: Device) -> float:
    """Return a time that a call takes at least, sooner found than how long it takes."""
    ctas, lists = schedule.grid
    number = ctas * lists * heads
    work = heads * schedule.batch * sum(times) + number * device.beginning
    # A CTA of the last list may have less to do than others.
    full = number - ctas * heads * (schedule.entries_of_last < schedule.entries)
    shortest = device.beginning + schedule.blocks * schedule.entries // ctas * min(times)
    return max(work / device.processors, -(-full // device.processors) * shortest)


def _time(schedule: ForwardSchedule, times: tuple[float, ...], heads: int, device: Device) -> float:
    """How long a call takes."""
    ctas, lists = schedule.grid

    def of_ctas(blocks: int) -> list[float]:
        each = [device.beginning] * ctas
        for index, cta in itertools.product(range(schedule.items_per_cta), range(ctas)):
            place = index * ctas + (ctas - 1 - cta if index % 2 else cta)
            if place < blocks:
                each[cta] += times[place % schedule.blocks]
        return each

    whole, last = (of_ctas(schedule.blocks * entries) for entries in (schedule.entries, schedule.entries_of_last))
    groups, pairs = schedule.head_groups, zip(whole, last, strict=True)
    together = [time for pair in pairs for _ in range(groups) for time in [pair[0]] * (lists - 1) + [pair[1]]]
    at_once = min(heads * schedule.batch, device.processors / ctas)
    of_lists = at_once * device.read_bytes
    misses = _MISSES * max(0, device.read_bytes * max(groups, at_once) - _CACHE)
    if device.tile_bytes > _TILE_FROM_MEMORY:
        misses += _MISSES_OF_LISTS * max(0, of_lists - _CACHE_OF_LISTS) * (device.tile_bytes / _TILE_FROM_MEMORY - 1)
    return _last(together, heads // groups, device.processors) * (1 + misses)


def _last(times: list[float], repeats: int, processors: int) -> float:
    """When the last CTA ends, if each multiprocessor that is free takes the next one of a repeated list."""
    if repeats * len(times) > 32 * processors:
        return repeats * sum(times) / processors + max(times)
    # In no order: neighbours differ as much as any two.
    free = [(0.0, 1 + _SPREAD * (index * 0.618 % 1)) for index in range(processors)]
    last = 0.0
    for time in itertools.chain.from_iterable(itertools.repeat(times, repeats)):
        start, speed = free[0]
        heapq.heapreplace(free, (start + time * speed, speed))
        last = max(last, start + time * speed)
    return last


Place = tuple[int, int, int]
"""The head of an item, its batch entry, and its turn among their blocks."""


Lists = tuple[tuple[Place, ...], ...]
"""A list of items for each of as many CTAs as run at once."""


@functools.lru_cache(maxsize=64)
def deal(places: tuple[Place, ...], times: tuple[float, ...], ctas: int) -> Lists:
    """Deal out items, given in the order in which they should begin; `times` are how long each turn takes."""
    lists = [list[Place]() for _ in range(ctas)]
    free = [(0.0, cta) for cta in range(ctas)]
    for place in places:
        start, cta = free[0]
        lists[cta].append(place)
        heapq.heapreplace(free, (start + times[place[2]], cta))
    return tuple(map(tuple, lists))


def table(lists: Lists) -> Int[Array, "ctas places 3"]:
    """The lists as kernels read them: for each CTA the number of its items, and their places."""
    return _table.bind(lists=lists)


class DealtTo(NamedTuple):
    """A CTA's own list, in a kernel."""

    table: Ref
    cta: Any

    def each(self, body: Callable[[Any, Any], Any]) -> Any:
        """`carry = body(index, carry)` for every item, from 0 on."""
        return lax.fori_loop(0, self.table[self.cta, 0, 0], body, jnp.int32(0))

    def if_next(self, index: Any, body: Callable[[Any], None], otherwise: Callable[[], None]) -> None:
        """`body(index + 1)`, if there is such an item, else `otherwise()`."""
        lax.cond(index + 1 < self.table[self.cta, 0, 0], lambda: body(index + 1), otherwise)

    def place(self, index: Any) -> tuple[Any, Any, Any]:
        """The `index`-th item's place."""
        head, batch, turn = (self.table[self.cta, 1 + index, part] for part in range(3))
        return head, batch, turn


def _values(lists: Lists) -> Int[np.ndarray, "ctas places 3"]:
    table = np.zeros((len(lists), 1 + max(map(len, lists)), 3), np.int32)
    for row, places in zip(table, lists, strict=True):
        row[0], row[1 : 1 + len(places)] = len(places), places
    return table


# `custom_partitioning` refuses arrays that a traced function closes over, as this would be.
_table = Primitive("jflash_items")
_table.def_impl(lambda lists: jnp.asarray(_values(lists)))
_table.def_abstract_eval(lambda lists: ShapedArray(_values(lists).shape, jnp.int32))
mlir.register_lowering(_table, lambda _, lists: [mlir.ir_constant(_values(lists))])
