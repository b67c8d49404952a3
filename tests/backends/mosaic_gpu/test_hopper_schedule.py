"""Which block of the Hopper kernels does what, and when: nothing is left out, done twice, or waited for in vain."""

import dataclasses
import heapq
import itertools
import types
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_run import cover, sampled

from jflash._backends.mosaic_gpu import query_sums, rounds, tiles
from jflash._backends.mosaic_gpu.query_order import Order
from jflash._backends.mosaic_gpu.turns import Turns


@cover(2)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 8])
@pytest.mark.parametrize(("batch", "entries"), [(1, 1), (3, 1), (3, 3), (8, 4)])
@pytest.mark.parametrize("blocks", [1, 2, 5, 8, 13])
def test_rounds_take_every_block_once(blocks: int, batch: int, entries: int, number: int, turned: bool):
    work = rounds.Rounds(blocks, batch, number, entries, turned=turned)
    everything = []
    for member in itertools.product(*map(range, work.grid)):
        turns = []

        def take(index, carry, member=member, turns=turns):
            turns.append(tuple(map(int, work.taken(member, index))))
            return carry

        with jax.disable_jit():
            work.each(member, take)
        assert turned or turns == sorted(turns)
        everything += turns
    assert sorted(everything) == list(itertools.product(range(batch), range(blocks)))


@pytest.mark.parametrize("empty", [0, 1, 2, 3])
def test_blocks_for_nothing_are_shared_out(empty: int):
    """Of 4 causal blocks some are past the end of a length that nobody knew: two members still have as much to do."""
    work = rounds.Rounds(4, 8, 16, 8, turned=True)
    to_do = lambda turn: 0 if turn < empty else 4 - turn
    taken = lambda member: (int(work.taken((member, 0), index)[1]) for index in range(16))
    assert len({sum(map(to_do, taken(member))) for member in range(2)}) == 1


def last(times: Iterable[float]) -> float:
    """When the last of 132 processors is done, each of which takes the next block of the grid when it is free."""
    free = [0.0] * 132
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


def ends(work: rounds.Rounds, visits: tuple[float, ...], heads: int, beginning: float) -> float:
    """When the last processor is done with a forward."""
    axes = heads // work.sections, work.grid[0], work.sections, work.grid[1]

    def time(member: int) -> float:
        places = (int(work.place(member, index)) for index in range(work.number))
        return beginning + sum(visits[place % len(visits)] for place in places if place < len(visits) * work.entries)

    return last(time(member) for _, member, _, _ in itertools.product(*map(range, axes)))


@pytest.mark.parametrize("beginning", [0.5, 3.0])
@pytest.mark.parametrize(("batch", "heads"), [(1, 3), (16, 16), (12, 40), (1, 300)])
@pytest.mark.parametrize("visits", [(8,) * 8, (9, 7, 5, 3, 1), (32,) * 43, (2.5,) * 7, (1,)], ids=len)
def test_rounds_leave_no_processor_waiting(visits: tuple[float, ...], batch: int, heads: int, beginning: float):
    one = rounds.Rounds(len(visits), batch)
    work = rounds.plan(one, visits, heads, rounds.Device(132, beginning, 2**16))
    assert work.batch % work.entries == 0
    without = ends(one, visits, heads, beginning)
    assert ends(work, visits, heads, beginning) <= 1.02 * without


@pytest.mark.parametrize(("blocks", "heads"), [(43, 8), (22, 16), (11, 32), (86, 8)])
def test_long_blocks_of_few_heads_begin_first(blocks: int, heads: int):
    """A head has too few blocks for all processors: they would wait for the last one's."""
    visits = tuple(1.5 * float(blocks - block) for block in range(blocks))
    one = rounds.Rounds(blocks, 1)
    work = rounds.plan(one, visits, heads, rounds.Device(132, 3.0, 2**15))
    assert heads % work.sections == 0
    assert ends(work, visits, heads, 3.0) <= 0.95 * ends(one, visits, heads, 3.0)


def test_long_sequences_take_no_rounds_and_short_ones_many():
    device = rounds.Device(132, 1.0, 2**16)
    assert rounds.plan(rounds.Rounds(128, 1), (128,) * 128, 16, device).number == 1
    assert rounds.plan(rounds.Rounds(4, 32), (4,) * 4, 16, device).number == 16


def test_tiles_by_length():
    """Four warpgroups where a block visits few tiles, three where it visits many, two where processors would wait."""

    def warpgroups(length: int, causal: bool, heads: int) -> int:
        stop = lambda rows: np.arange(length, 0, -rows)[::-1]
        visits = lambda rows, keys: (-(-(stop(rows) if causal else 0 * stop(rows) + length) // keys)).tolist()
        return tiles.forward_tiles(tiles.Sizes(64, 64), length, visits, 132 / heads, 4).warpgroups

    assert [warpgroups(256, causal, 1024) for causal in (False, True)] == [4, 4]
    assert [warpgroups(4096, causal, 1024) for causal in (False, True)] == [3, 3]
    assert [warpgroups(128, causal, 1024) for causal in (False, True)] == [2, 2]
    assert warpgroups(1024, True, 1024) == 4
    assert warpgroups(1024, True, 16) == 2


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        (tiles.Sizes(128, 128), 1),
        (tiles.Sizes(192, 128), 2),
        (tiles.Sizes(256, 256), 2),
        (tiles.Sizes(256, 256, bias_columns=16), 0),
        (tiles.Sizes(256, 256, 2), 0),
        (tiles.Sizes(192, 192, 4), 0),
    ],
    ids=str,
)
def test_output_leaves_in_as_few_parts_as_there_is_room_for(sizes: tiles.Sizes, parts: int):
    tile = tiles.forward_tiles(sizes, 1024, lambda rows, keys: [1024 // keys] * (1024 // rows), 1, 4)
    assert tile.out_parts(sizes) == parts
    left = tiles.SHARED_MEMORY - tile.bytes(sizes, 2)
    whole = tile.rows * sizes.value_dim * 2
    assert {0: whole > 2 * left or sizes.value_dim % 128 > 0, 1: whole <= left, 2: left < whole <= 2 * left}[parts]


@pytest.mark.parametrize(("group", "count"), [(1, 5), (3, 4), (4, 1), (2, 0)])
@pytest.mark.parametrize("kind", ["to the end", "window", "segments", "by head"])
def test_every_tile_of_all_heads_is_visited_once(kind: str, group: int, count: int):
    """In the same order by those that copy tiles and those that compute."""
    spec: Any = types.SimpleNamespace(
        bounds=(3 if kind == "window" else None, 0),
        operands={"query_segments"} if kind == "segments" else set(),
    )
    walk: Any = types.SimpleNamespace(count=count)
    for block in range(3):
        order = Order.of(spec, walk, group, jnp.int32(block), by_head=kind == "by head")
        steps = range(count * group)
        visit = lambda step, head, tile, seen: seen.at[step].set(jnp.array([head, tile]))
        seen = np.asarray(order.each(visit, jnp.full((len(steps) + 1, 2), -1)))[:-1]
        at = [tuple(map(int, order.at(jnp.int32(step), jnp.int32(count)))) for step in steps]
        assert [tuple(place) for place in seen.tolist()] == at
        assert sorted(at) == list(itertools.product(range(group), range(count)))
        if kind == "to the end" and group > 1:
            assert at[:group] == [(head, count - 1) for head in range(group) if count]


def ends_backward(turns: Turns) -> float:
    """When the last processor is done with a causal backward."""
    axes = turns.number, turns.blocks, turns.units
    return last(turns.blocks - block + 1 for _, block, _ in itertools.product(*map(range, axes)))


@pytest.mark.parametrize("blocks", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("sets", "batch"), [(1, 16), (8, 1), (16, 1), (40, 1), (3, 5), (32, 2), (64, 4)])
def test_turns_leave_no_processor_waiting(sets: int, batch: int, blocks: int):
    """Not much longer than where all is one turn, whose longest blocks begin first."""
    of = lambda processors: Turns.of(sets, sets, blocks, batch, processors)
    assert ends_backward(of(132)) <= 1.05 * ends_backward(of(None))


@dataclasses.dataclass(frozen=True)
class Recorded(query_sums.QuerySums):
    """What one block rounds, with the place of its sums, and whom it waits for."""

    awaited: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    rounded: list[tuple[int, int, int, int, int]] = dataclasses.field(default_factory=list)

    def place(self, turn: int, head: int) -> int:
        (place,) = self._sums(turn, head)
        return int(place)

    def _wait(self):
        if not self._is_early:
            self.awaited.add((int(self._earlier.batch), int(self._earlier.set)))

    def _round_rows(self, head, rows):
        earlier, place = self._earlier, self.place(self._earlier_turn, head)
        query_head = earlier.first_head + head
        self.rounded.append((*map(int, (earlier.batch, query_head)), place, int(rows.start), rows.size))


class Places:
    """Sums of which only the place is asked."""

    def __init__(self, number: int):
        self.number = number

    @property
    def at(self) -> "Places":
        return self

    def __getitem__(self, place: int) -> tuple[int]:
        assert 0 <= place < self.number
        return (place,)


@sampled(5)
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
        # Heads that share keys in sets, of one head and of two.
        (12, 4, 3, 1, 192, 64, 132),
        (8, 8, 4, 1, 256, 64, 8),
        (16, 8, 2, 6, 128, 64, 18),
    ],
)
def test_every_sum_is_rounded_once(heads, group, blocks, batch, rows, head_dim, processors):
    """By a block that began after all those that add to it, and before any that has its place in memory."""
    turns = Turns.of(heads, heads // group, blocks, batch, processors)
    places = query_sums.room(turns)
    assert places <= heads * batch
    shape = lambda *sizes: types.SimpleNamespace(shape=sizes)
    begun: list[tuple[int, int]] = []
    # Of each place whose sums it has, and of each head when which of its rows were rounded.
    owners: dict[int, tuple[int, int]] = {}
    rounded: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for turn in range(turns.number + query_sums.lag(turns)):
        for block, unit in itertools.product(range(blocks), range(turns.units)):
            copies = (block * 5 + unit) % 17
            outputs = shape(batch, rows, heads, head_dim)
            with jax.disable_jit():
                own_batch, own_set, _, first_head = map(int, turns.unit(turn, unit))
                taken = Recorded(*(turns, None, Places(places), None, outputs, 1.0, 2), *(turn, block, unit, copies))
                for warpgroup in range(2):
                    taken.begin(warpgroup)
                for index in range(copies + query_sums.SPARE if taken.adds else 0):
                    taken.after_copy(index)
                own_places = [taken.place(turn, head) for head in range(turns.heads)]
            for awaited in taken.awaited:
                assert begun.count(awaited) == blocks
            for entry_of, head, place, first, size in taken.rounded:
                assert {(entry_of, head // turns.heads)} == taken.awaited
                assert owners[place] == (entry_of, head)
                rounded.setdefault((entry_of, head), []).append((first, size, turn))
            if taken.adds:
                begun.append((own_batch, own_set))
                for head, place in enumerate(own_places, first_head):
                    before = owners.get(place, (own_batch, head))
                    if before != (own_batch, head):
                        # Rounded in the turn that this block waits for, or before it.
                        assert taken.awaited
                        parts = rounded[before]
                        assert sum(size for _, size, by in parts if by <= turn - query_sums.lag(turns)) == rows
                    owners[place] = own_batch, head
    assert rounded.keys() == set(itertools.product(range(batch), range(heads)))
    for parts in rounded.values():
        covered = [row for first, size, _ in parts for row in range(first, first + size)]
        assert sorted(covered) == list(range(rows))
