"""Which blocks of queries each CTA of the forward takes, one after the other.

A CTA begins and ends in about three microseconds. Where it takes several work items, it loads what the next one begins
with before the last one ends, and a warpgroup that has less to do begins while others still work on the last.

A head's blocks, or those of several batch entries, make one list, from which they are dealt out: so what runs at the
same time shares keys, which stay in the second-level cache.
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

from jflash._backends.mosaic_gpu import timing_model

MOST_ITEMS = 32
"""The most work items of a CTA, and the most batch entries whose blocks make one list."""


@dataclasses.dataclass(frozen=True)
class ForwardSchedule:
    """How a head's blocks of queries are dealt out to CTAs, in the order in which they should begin."""

    blocks: int
    """Of queries, that a head has in a batch entry."""
    batch: int
    items_per_cta: int = 1
    entries: int = 1
    """Batch entries whose blocks make one list; a divisor of all."""
    head_groups: int = 1
    """Groups of neighbouring heads; one head of each group is worked on at the same time."""
    staggered: bool = False
    """Whether in a list each entry begins one block later than the entry before. Then a CTA that takes the same place
    of each entry has as much to do as others, whatever blocks turn out to be empty."""

    @property
    def grid(self) -> tuple[int, int]:
        """CTAs for the blocks of one list, and the number of lists."""
        return -(-self.blocks * self.entries // self.items_per_cta), self.batch // self.entries

    def item(self, cta: tuple[Any, Any], index: Any) -> tuple[Any, Any]:
        """The batch entry, and which of its blocks, of a CTA's `index`-th work item."""
        place = self.place(cta[0], index)
        if self.entries == 1:
            return cta[1], place
        entry, block = lax.div(place, self.blocks), lax.rem(place, self.blocks)
        if self.staggered:
            block = lax.rem(block + entry, self.blocks)
        return cta[1] * self.entries + entry, block

    def place(self, cta: Any, index: Any) -> Any:
        """Where in the list of blocks a work item is: every other round goes backwards, so that all CTAs have as much
        to do; past the end where no item is left."""
        if self.items_per_cta == 1:
            return cta
        backwards = lax.rem(index, 2) == 1
        return index * self.grid[0] + jnp.where(backwards, self.grid[0] - 1 - cta, cta)

    def _is_left(self, cta: tuple[Any, Any], index: Any) -> Any:
        return self.place(cta[0], index) < self.blocks * self.entries

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
    """How long a CTA takes to begin and end, in visits to a tile."""
    tile_bytes: int
    """Of a tile of keys and values."""


@functools.cache
def choose(one: ForwardSchedule, visits: tuple[float, ...], heads: int, device: Device) -> ForwardSchedule:
    """The schedule that takes the least time, by a model of the device.

    Args:
      one: the call, with one work item a CTA.
      visits: how many tiles of keys each block of a head visits, in the order in which they should begin.
      heads: of queries.
      device: what the call runs on.
    """
    time = functools.cache(lambda schedule: _time(schedule, visits, heads, device))
    return _better(_better(one, _several_items(one), time), _more_groups(one, heads), time)


def _better(
    one: ForwardSchedule, others: Iterable[ForwardSchedule], time: Callable[[ForwardSchedule], float]
) -> ForwardSchedule:
    """The first of the others that are as good as the best, if that is worth it."""
    times = {schedule: time(schedule) for schedule in others}
    least = min(times.values())
    if time(one) <= timing_model.WORTH * least:
        return one
    return next(schedule for schedule, time in times.items() if time <= timing_model.ENOUGH * least)


def _more_groups(one: ForwardSchedule, heads: int) -> Iterator[ForwardSchedule]:
    """As many head groups, and more: where a head has too few blocks for all multiprocessors, the long blocks of
    several heads have to begin first."""
    for groups in range(one.head_groups, heads + 1):
        if heads % groups == 0:
            yield dataclasses.replace(one, head_groups=groups)


def _several_items(one: ForwardSchedule) -> Iterator[ForwardSchedule]:
    """Those in which all CTAs take about the same number of items, the fewest first.

    Of no more entries than there are items: then what the CTAs of a list take at the same time is of one entry or two.
    """
    for items in range(1, MOST_ITEMS + 1):
        for entries in (entries for entries in range(1, items + 1) if one.batch % entries == 0):
            schedule = dataclasses.replace(one, items_per_cta=items, entries=entries)
            places = items * schedule.grid[0]
            if (places - schedule.blocks * entries) * 32 <= places:
                yield schedule


def _time(schedule: ForwardSchedule, visits: tuple[float, ...], heads: int, device: Device) -> float:
    """How long a call takes, in visits to a tile."""
    ctas, lists = schedule.grid
    times = [device.beginning] * ctas
    for index, cta in itertools.product(range(schedule.items_per_cta), range(ctas)):
        place = index * ctas + (ctas - 1 - cta if index % 2 else cta)
        if place < schedule.blocks * schedule.entries:
            times[cta] += timing_model.ITEM + visits[place % schedule.blocks]
    at_work = min(heads * schedule.batch, max(schedule.head_groups, device.processors / ctas))
    read = at_work * device.tile_bytes * sum(visits) / len(visits)
    together = [time for time in times for _ in range(schedule.head_groups * lists)]
    last = _last(together, heads // schedule.head_groups, device.processors)
    return last * (1 + timing_model.MISSES * max(0, read - timing_model.CACHE))


def _last(times: list[float], repeats: int, processors: int) -> float:
    """When the last CTA ends, if each multiprocessor that is free takes the next one of a repeated list."""
    if repeats * len(times) > 32 * processors:
        return repeats * sum(times) / processors + max(times)
    # In no order: neighbours differ as much as any two.
    free = [(0.0, 1 + timing_model.SPREAD * (index * 0.618 % 1)) for index in range(processors)]
    last = 0.0
    for time in itertools.chain.from_iterable(itertools.repeat(times, repeats)):
        start, speed = free[0]
        heapq.heapreplace(free, (start + time * speed, speed))
        last = max(last, start + time * speed)
    return last
