"""Which work items each CTA of the forward takes, one after the other: blocks of queries of a head and batch entry.

A CTA begins and ends in about three microseconds. One that takes several items loads what the next one begins with
before the last one ends, and a warpgroup that has less to do begins while others still work on the last. What runs at
the same time shares keys, which stay in the second-level cache.

`ForwardSchedule` counts items out: the blocks of a head and batch entry, or of several such pairs, make one list, from
which they go to CTAs in turn. `deal` makes lists before the call: each item goes to the CTA that should be done first.

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
from jaxtyping import Array, Float, Int

from jflash._backends.nvidia.ops import Ref

MOST_ITEMS = 32
"""The most work items of a CTA, and the most pairs of a head and a batch entry whose blocks make one list."""

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


Place = tuple[Any, Any, Any]
"""The head of an item, its batch entry, and its turn among their blocks."""


class CtaPlace(NamedTuple):
    """Which lists a CTA takes its items from, and which of a list's CTAs it is."""

    head: Any
    """The head whose lists they are, where each is of one head."""
    number: Any
    list: Any


@dataclasses.dataclass(frozen=True)
class ForwardSchedule:
    """How blocks of queries are counted out to CTAs, in the order in which they should begin."""

    blocks: int
    """Blocks of queries of a pair: of a head in a batch entry."""
    batch: int
    heads: int
    items_per_cta: int = 1
    pairs: int = 1
    """Pairs whose blocks make one list: a head with neighbouring batch entries if that divides the batch, or else pairs
    that are as many apart as there are lists, so that lists of neighbouring heads are worked on at the same time."""
    head_groups: int = 1
    """Groups of neighbouring heads; one head of each group is worked on at the same time."""
    staggered: bool = False
    """Whether in a list each pair begins one block later than the pair before. Then a CTA that takes the same place of
    each pair has as much to do as others, whatever blocks turn out to be empty."""

    @property
    def spans_heads(self) -> bool:
        """Whether a list has pairs of several heads."""
        return self.batch % self.pairs != 0

    @property
    def grid(self) -> tuple[int, int, int]:
        """Heads of a group whose lists are apart, CTAs for the blocks of one list, and the number of lists."""
        ctas = -(-self.blocks * self.pairs // self.items_per_cta)
        if self.spans_heads:
            return 1, ctas, -(-self.heads * self.batch // self.pairs)
        return self.heads // self.head_groups, ctas, self.batch // self.pairs

    @property
    def full_lists(self) -> int:
        """Lists that have `pairs`; those that follow have one less."""
        _, _, lists = self.grid
        return self.heads * self.batch - (self.pairs - 1) * lists if self.spans_heads else lists

    @property
    def is_even(self) -> bool:
        """Whether all lists have as many pairs."""
        return self.full_lists == self.grid[2]

    def item(self, cta: CtaPlace, index: Any) -> Place:
        """Return the head of a CTA's `index`-th work item, its batch entry, and its turn among their blocks."""
        place = self.place(cta.number, index)
        if self.pairs == 1:
            return cta.head, cta.list, place
        number, turn = lax.div(place, self.blocks), lax.rem(place, self.blocks)
        if self.staggered:
            turn = lax.rem(turn + number, self.blocks)
        if not self.spans_heads:
            return cta.head, cta.list * self.pairs + number, turn
        _, _, lists = self.grid
        pair = number * lists + cta.list
        return lax.rem(pair, self.heads), lax.div(pair, self.heads), turn

    def place(self, cta: Any, index: Any) -> Any:
        """Return where in the list of blocks a work item is; past the end where no item is left.

        Every other round goes backwards, so that all CTAs have as much to do.
        """
        if self.items_per_cta == 1:
            return cta
        backwards = lax.rem(index, 2) == 1
        _, ctas, _ = self.grid
        return index * ctas + jnp.where(backwards, ctas - 1 - cta, cta)

    def _is_left(self, cta: CtaPlace, index: Any) -> Any:
        place = self.place(cta.number, index)
        if self.is_even:
            return place < self.pairs * self.blocks
        return place < jnp.where(cta.list < self.full_lists, self.pairs, self.pairs - 1) * self.blocks

    def each(self, cta: CtaPlace, body: Callable[[Any, Any], Any]) -> Any:
        """`carry = body(index, carry)` for every work item of a CTA, from 0 on."""
        if self.items_per_cta == 1:
            return body(0, 0)
        left = (jnp.int32(self._is_left(cta, index)) for index in range(self.items_per_cta))
        return lax.fori_loop(0, sum(left), body, jnp.int32(0))

    def if_next(self, cta: CtaPlace, index: Any, body: Callable[[Any], None]) -> None:
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
def choose(one: ForwardSchedule, times: tuple[float, ...], device: Device) -> Choice:
    """Return the schedule that takes the least time, by a model of the device, and that time.

    `one` is that of one work item a CTA. `times` are how long each block of a head takes, in the order in which they
    should begin, in the unit of `device.beginning`.
    """
    time = functools.cache(lambda schedule: _time(schedule, times, device))

    def better(one: ForwardSchedule, others: Iterable[ForwardSchedule]) -> ForwardSchedule:
        """The first of the others that is about as good as the best, if that is worth it."""
        least = [(_least(schedule, times, device), schedule) for schedule in others]
        best = math.inf
        for bound, schedule in sorted(least, key=operator.itemgetter(0)):
            if bound < best:
                best = min(best, time(schedule))
        if time(one) <= _WORTH * best:
            return one
        enough = _ENOUGH * best
        return next(schedule for bound, schedule in least if bound <= enough and time(schedule) <= enough)

    several = tuple(_with_several_items(one))
    # Where lists are not even the compiler does not know how many items a CTA has, and spills more.
    even = (schedule for schedule in several if schedule.is_even)
    # Where a head has too few blocks for all multiprocessors, the long blocks of several heads have to begin first.
    groups = (groups for groups in range(one.head_groups, one.heads + 1) if one.heads % groups == 0)
    more_groups = (dataclasses.replace(one, head_groups=number) for number in groups)
    found = better(better(one, (*even, *more_groups)), several)
    return Choice(found, time(found))


def _with_several_items(one: ForwardSchedule) -> Iterator[ForwardSchedule]:
    """Schedules in which all CTAs take about the same number of items, the fewest first.

    A list has no more pairs than a CTA has items, and several CTAs if a pair has several blocks: what CTAs take at the
    same time is of one pair or two, whose keys they share. Each has an item of a list that is not full.
    """
    for items in range(1, MOST_ITEMS + 1):
        for pairs in range(1, min(items, one.batch * one.heads) + 1):
            groups = one.head_groups if one.batch % pairs == 0 else 1
            schedule = dataclasses.replace(one, items_per_cta=items, pairs=pairs, head_groups=groups)
            _, ctas, _ = schedule.grid
            places = items * ctas
            some_each = schedule.is_even or (schedule.full_lists > 0 and (pairs - 1) * schedule.blocks >= ctas)
            share = ctas > 1 or schedule.blocks == 1
            if (places - schedule.blocks * pairs) * 32 <= places and some_each and share:
                yield schedule


def _least(schedule: ForwardSchedule, times: tuple[float, ...], device: Device) -> float:
    """Return a time that a call takes at least, sooner found than how long it takes."""
    apart, ctas, _ = schedule.grid
    number = math.prod(schedule.grid) * schedule.head_groups
    work = schedule.heads * schedule.batch * sum(times) + number * device.beginning
    full = apart * schedule.head_groups * ctas * schedule.full_lists
    shortest = device.beginning + schedule.blocks * schedule.pairs // ctas * min(times)
    return max(work / _speed(device.processors), -(-full // device.processors) * shortest) * _misses(schedule, device)


def _time(schedule: ForwardSchedule, times: tuple[float, ...], device: Device) -> float:
    """How long a call takes."""
    apart, ctas, lists = schedule.grid
    index, cta = np.arange(schedule.items_per_cta)[:, None], np.arange(ctas)
    place = index * ctas + np.where(index % 2, ctas - 1 - cta, cta)
    of_places = np.asarray(times)[place % schedule.blocks]

    def of_ctas(pairs: int) -> Float[np.ndarray, "ctas"]:
        """Return how long each CTA takes where a list has this number of pairs."""
        return device.beginning + np.where(place < schedule.blocks * pairs, of_places, 0).sum(axis=0)

    full, groups = schedule.full_lists, schedule.head_groups
    both = (of_ctas(schedule.pairs), full), (of_ctas(schedule.pairs - 1), lists - full)
    together = np.concatenate([np.tile(np.repeat(each, groups)[:, None], number) for each, number in both], axis=1)
    return _last(together.ravel(), apart, device.processors) * _misses(schedule, device)


def _misses(schedule: ForwardSchedule, device: Device) -> float:
    """How many times as long a call takes as one whose keys and values all come from the second-level cache."""
    _, ctas, _ = schedule.grid
    at_once = min(schedule.heads * schedule.batch, device.processors / ctas)
    bytes_at_once = device.read_bytes * max(schedule.head_groups, at_once)
    misses = _MISSES * max(0, bytes_at_once - _CACHE)
    if device.tile_bytes > _TILE_FROM_MEMORY:
        of_lists = max(0, at_once * device.read_bytes - _CACHE_OF_LISTS)
        misses += _MISSES_OF_LISTS * of_lists * (device.tile_bytes / _TILE_FROM_MEMORY - 1)
    return 1 + misses


@functools.cache
def _paces(processors: int) -> tuple[float, ...]:
    """How long each multiprocessor takes for what the fastest does in 1, in no order: neighbours differ as much as any
    two."""
    return tuple(1 + _SPREAD * (index * 0.618 % 1) for index in range(processors))


@functools.cache
def _speed(processors: int) -> float:
    """What all multiprocessors do in 1."""
    return sum(1 / pace for pace in _paces(processors))


def _last(times: Float[np.ndarray, "ctas"], repeats: int, processors: int) -> float:
    """When the last CTA ends, if each multiprocessor that is free takes the next one of a repeated list."""
    if repeats * len(times) > 32 * processors:
        return repeats * float(times.sum()) / _speed(processors) + float(times.max())
    free = [(0.0, pace) for pace in _paces(processors)]
    last = 0.0
    for time in itertools.chain.from_iterable(itertools.repeat(times.tolist(), repeats)):
        start, pace = free[0]
        end = start + time * pace
        heapq.heapreplace(free, (end, pace))
        last = max(last, end)
    return last


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

    def place(self, index: Any) -> Place:
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
