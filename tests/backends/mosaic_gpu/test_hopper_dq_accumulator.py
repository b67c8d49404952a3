"""dQ of the fused backward on Hopper: each accumulator is rounded once, in time, and no CTA waits forever."""

import dataclasses
import itertools
import types
from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_schedules import backward_schedule
from short_run import cover

from jflash._backends.mosaic_gpu import dq_accumulator
from jflash._backends.mosaic_gpu.dq_accumulator import (
    DqAccumulator,
    Layout,
    Place,
    RoundedByLast,
    RoundedLater,
)
from jflash._backends.nvidia.launch import Refs
from jflash._backends.nvidia.smem import Buffers
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule


@dataclasses.dataclass(frozen=True)
class Recorded(DqAccumulator):
    """What one CTA rounds, with the place of its accumulator, and which work items it waits for."""

    awaited: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    rounded: list[tuple[int, int, int, int, int]] = dataclasses.field(default_factory=list)

    def accumulator(self, wave: int, head: int) -> int:
        (place,) = self._acc(wave, head)
        return int(place)

    def wait_for(self, wave: int) -> None:
        item = self.schedule.item(wave, self.place.item)
        self.awaited.add((int(item.batch), int(item.head_group)))

    def _round_rows(self, item, wave, head, rows):
        place, query_head = self.accumulator(wave, head), item.first_head + head
        self.rounded.append((*map(int, (item.batch, query_head)), place, int(rows.start), rows.size))


class RecordedLater(Recorded, RoundedLater):
    """A recorder for CTAs of a later wave, which round dQ."""

    def _wait(self):
        if not self._is_early:
            self.wait_for(self._earlier_wave)

    def visit(self) -> None:
        for warpgroup in range(2):
            self.begin(warpgroup)
        for index in range(self.copies + self.spare if self.adds else 0):
            self.after_copy(index)


class RecordedLast(Recorded, RoundedByLast):
    """A recorder for the last CTA of a work item, which rounds dQ; the counters are those that CTAs share."""

    def _wait(self, wave):
        self.wait_for(wave)
        if self.ops is not None:
            super()._wait(wave)

    def _wait_for_other(self):
        pass


class Counters:
    """Counters in device memory, and the instructions that change them, for CTAs one after the other."""

    def __init__(self):
        self.values: Counter[int] = Counter()

    @property
    def at(self) -> "Counters":
        return self

    def __getitem__(self, index: int) -> int:
        return int(index) if not hasattr(index, "start") else 0

    def wait_for(self, counter: int, value: int) -> None:
        assert self.values[counter] == value

    def take_number(self, counter: int, number: int) -> int:
        self.values[counter] += 1
        return self.values[counter] - 1

    def signal(self, counter: int) -> None:
        self.values[counter] += 1


class Places:
    """Accumulators of which only the place is asked."""

    def __init__(self, number: int):
        self.number = number

    @property
    def at(self) -> "Places":
        return self

    def __getitem__(self, place: int) -> tuple[int]:
        assert 0 <= place < self.number
        return (place,)


@cover(every=10, rest=4)
@pytest.mark.parametrize(
    ("heads", "group", "blocks", "batch", "rows", "head_dim", "processors"),
    [
        (5, 1, 3, 2, 384, 64, 1),
        (4, 1, 1, 3, 64, 128, 2),
        (6, 1, 8, 1, 192, 80, 8),
        (7, 1, 2, 4, 1024, 72, 132),
        (9, 1, 4, 3, 256, 8, 12),
        (6, 3, 5, 2, 640, 64, 4),
        (15, 3, 5, 2, 640, 64, 4),
        (14, 2, 3, 4, 192, 80, 1),
        (2, 2, 2, 12, 128, 64, 5),
        (4, 2, 2, 30, 128, 128, 4),
        (1, 1, 3, 8, 192, 64, 7),
        # Heads that share keys in head groups, of one head and of two.
        (12, 4, 3, 1, 192, 64, 132),
        (8, 8, 4, 1, 256, 64, 8),
        (16, 8, 2, 6, 128, 64, 18),
        # The last tile of rows is not whole.
        (5, 1, 6, 2, 641, 64, 4),
        (4, 1, 3, 2, 333, 80, 3),
        # Small waves, of which several are at work at a time.
        (4, 1, 6, 6, 640, 64, 20),
        (6, 2, 5, 4, 640, 128, 12),
    ],
)
@pytest.mark.parametrize("in_order_of_sums", [False, True])
def test_every_accumulator_is_rounded_once(heads, group, blocks, batch, rows, head_dim, processors, in_order_of_sums):
    """By a CTA that began after all those that add to it, and before any that has its place in memory."""
    whole = -(-rows // 64) * 64
    # Of fewer blocks the last CTA would round.
    accumulated = None if blocks < 5 else -(-rows // 128)
    schedule = backward_schedule(heads, heads // group, blocks, batch, processors, accumulated=accumulated)
    assert schedule.room is None
    places = RoundedLater.accumulators(schedule)
    assert places <= heads * batch
    begun: list[tuple[int, int]] = []
    # Of each place the head whose accumulator it is, and of each head when which of its rows were rounded.
    owners: dict[int, tuple[int, int]] = {}
    rounded: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for wave, block, item in _places(schedule, RoundedLater):
        copies = (block * 5 + item) % 17
        with jax.disable_jit():
            own_batch, own_group, _, first_head = map(int, schedule.item(wave, item))
            refs, columns = _refs(places, (batch, rows, heads, head_dim)), -(-head_dim // 16) * 16
            place, layout = Place(wave, block, item), Layout(columns, in_order_of_sums)
            taken = RecordedLater(schedule, None, refs, 1.0, place, copies, layout)
            taken.visit()
            own_places = [taken.accumulator(wave, head) for head in range(schedule.heads)]
        for awaited in taken.awaited:
            assert begun.count(awaited) == blocks
        for entry_of, head, place, first, size in taken.rounded:
            assert {(entry_of, head // schedule.heads)} == taken.awaited
            assert owners[place] == (entry_of, head)
            rounded.setdefault((entry_of, head), []).append((first, size, wave))
        if taken.adds:
            begun.append((own_batch, own_group))
            for head, place in enumerate(own_places, first_head):
                before = owners.get(place, (own_batch, head))
                if before != (own_batch, head):
                    # Rounded in the wave that this CTA waits for, or before it.
                    assert taken.awaited
                    parts = rounded[before]
                    assert sum(size for _, size, by in parts if by <= wave - RoundedLater.lag(schedule)) == whole
                owners[place] = own_batch, head
    _assert_whole(rounded, batch, heads, rows)


@cover(every=4)
@pytest.mark.parametrize(
    ("heads", "group", "blocks", "batch", "rows", "head_dim", "processors"),
    [
        (5, 1, 4, 8, 512, 64, 12),
        (3, 1, 2, 16, 256, 128, 20),
        (7, 1, 1, 5, 64, 80, 3),
        (4, 1, 3, 31, 448, 96, 16),
        # Keys for one block and queries for four, and the other way round.
        (2, 1, 1, 12, 512, 64, 4),
        (2, 1, 4, 12, 64, 64, 9),
        # Two heads that share keys.
        (8, 2, 2, 8, 256, 64, 4),
        # The last tile of rows is not whole.
        (3, 1, 2, 16, 201, 64, 20),
    ],
)
def test_the_last_of_an_item_rounds_it_once(heads, group, blocks, batch, rows, head_dim, processors):
    """When all have added, and before any adds that has its place in memory."""
    tiles, whole = -(-rows // 128), -(-rows // 64) * 64
    schedule = backward_schedule(heads, heads // group, blocks, batch, processors, accumulated=tiles)
    assert schedule.room is not None
    assert schedule.heads == group
    places, counters = RoundedByLast.accumulators(schedule), Counters()
    assert places < heads * batch
    refs = _refs(places, (batch, rows, heads, head_dim), counters)
    owners: dict[int, tuple[int, int]] = {}
    rounded: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    added: Counter[tuple[int, int]] = Counter()
    for wave, block, item in _places(schedule, RoundedByLast):
        with jax.disable_jit():
            own_batch, own_group, _, first_head = map(int, schedule.item(wave, item))
            taken = RecordedLast(schedule, counters, refs, 1.0, Place(wave, block, item), 0, Layout(head_dim, False))
            taken.begin(0)
            for head in range(schedule.heads):
                place, own = taken.accumulator(wave, head), (own_batch, first_head + head)
                before = owners.setdefault(place, own)
                assert before == own or sum(size for _, size, _ in rounded[before]) == whole
                owners[place] = own
                added[own] += 1
            for warpgroup in range(2):
                taken.finish(warpgroup)
        for entry_of, head, place, first, size in taken.rounded:
            assert (entry_of, head // schedule.heads) == (own_batch, own_group)
            assert owners[place] == (entry_of, head)
            assert added[entry_of, head] == blocks
            rounded.setdefault((entry_of, head), []).append((first, size, wave))
    _assert_whole(rounded, batch, heads, rows)
    assert max(counters.values) < RoundedByLast.counters(schedule)


def _places(schedule: BackwardSchedule, kind: type[DqAccumulator]) -> list[tuple[int, int, int]]:
    """Waves, blocks and items, in the order of tickets."""
    waves = schedule.waves + kind.lag(schedule)
    return list(itertools.product(range(waves), range(schedule.blocks), range(schedule.items)))


def _refs(places: int, shape: tuple[int, ...], counters: Counters | None = None) -> Refs:
    arrays = dict(dq_acc=Places(places), counters=counters)
    return Refs(arrays, dict(d_query=types.SimpleNamespace(shape=shape)), Buffers(numbers=Counters()))


def _assert_whole(rounded: dict[tuple[int, int], list[tuple[int, int, int]]], batch: int, heads: int, rows: int):
    assert rounded.keys() == set(itertools.product(range(batch), range(heads)))
    for parts in rounded.values():
        covered = [row for first, size, _ in parts for row in range(first, first + size)]
        # Rows past the last one of the last tile are not stored.
        assert sorted(covered) == list(range(-(-rows // 64) * 64))


def test_accumulators_of_short_sequences_are_few():
    """For about twice as many CTAs as run at once, of long ones for four waves."""
    for blocks, batch in ((4, 32), (2, 64), (3, 48)):
        schedule = backward_schedule(16, 16, blocks, batch, 132, accumulated=blocks)
        assert RoundedByLast.accumulators(schedule) * blocks <= 2.2 * 132
    schedule = backward_schedule(16, 16, 8, 16, 132, accumulated=8)
    assert schedule.room is None
    assert RoundedLater.accumulators(schedule) * 8 <= 3 * 132
    # One head of many queries, and heads that share keys, would keep the last CTA busy for longer than others.
    assert backward_schedule(16, 16, 4, 16, 132, accumulated=64).room is None
    assert backward_schedule(16, 4, 4, 64, 132, accumulated=4).room is None


@pytest.mark.parametrize("processors", [1, 3, 8, 132])
@pytest.mark.parametrize(("heads", "key_heads", "batch"), [(4, 4, 2), (4, 1, 3), (6, 2, 4), (3, 3, 1)])
def test_accumulators_of_a_part_are_its_gradient(heads: int, key_heads: int, batch: int, processors: int):
    of_whole = backward_schedule(heads, key_heads, 3, batch, processors)
    schedule = dataclasses.replace(of_whole, partial=True)
    acc = jnp.arange(DqAccumulator.accumulators(schedule))[:, None, None]
    gradient = dq_accumulator.unrounded(schedule, acc)
    assert gradient.shape == (batch, 1, heads, 1)
    for wave, number in itertools.product(range(schedule.waves), range(schedule.items)):
        item, place = schedule.item(wave, number), wave * schedule.items + number
        own = gradient[item.batch, 0, item.first_head : item.first_head + schedule.heads, 0]
        assert own.tolist() == [place * schedule.heads + head for head in range(schedule.heads)]


@cover(every=6, rest=3)
@pytest.mark.parametrize("processors", [1, 3, 7])
@pytest.mark.parametrize(("heads", "blocks", "batch"), [(5, 3, 1), (4, 1, 3), (3, 8, 2), (3, 2, 9)])
def test_no_order_of_beginning_is_a_deadlock(heads: int, blocks: int, batch: int, processors: int):
    """A CTA that waits keeps its multiprocessor. With tickets for places all end; with indices some orders do not."""
    of = lambda accumulated: backward_schedule(heads, heads, blocks, batch, processors, accumulated=accumulated)
    generator = np.random.default_rng(0)
    for schedule in (of(None), of(blocks)):
        kind = RecordedLater if schedule.room is None else RecordedLast
        places = _places(schedule, kind)
        awaited = [_awaited(schedule, kind, place) for place in places]
        backwards = range(len(places))[::-1]
        waits = schedule.room is None or schedule.room < schedule.waves
        assert any(awaited) == waits
        if waits:
            assert not _ends(schedule, places, awaited, iter(backwards), processors, generator)
        for order in (backwards, *(generator.permutation(len(places)) for _ in range(5))):
            tickets = itertools.count()
            assert _ends(schedule, places, awaited, (next(tickets) for _ in order), processors, generator)


def _awaited(schedule: BackwardSchedule, kind: type[Recorded], place: tuple[int, int, int]) -> set[tuple[int, int]]:
    """The work items that the CTA of a place waits for."""
    refs = _refs(kind.accumulators(schedule), (schedule.batch, 64, 64, 64), Counters())
    with jax.disable_jit():
        taken = kind(schedule, None, refs, 1.0, Place(*place), 0, Layout(64, False))
        taken.begin(0)
    return taken.awaited


def _ends(schedule, places, awaited, begins: Iterator[int], processors: int, generator: np.random.Generator) -> bool:
    """Whether all CTAs end, if they begin with places in this order, and end in any order."""
    resident: list[int] = []
    ended: list[int] = []
    while True:
        resident += itertools.islice(begins, processors - len(resident))
        if not resident:
            return len(ended) == len(places)
        done = Counter(
            tuple(map(int, schedule.item(wave, item)[:2])) for wave, _, item in map(places.__getitem__, ended)
        )
        ready = [place for place in resident if all(done[item] == schedule.blocks for item in awaited[place])]
        if not ready:
            return False
        ended.append(resident.pop(resident.index(generator.choice(ready))))
