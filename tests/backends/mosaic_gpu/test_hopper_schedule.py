"""What each CTA of the Hopper forward does, and when: nothing is left out, done twice, or waited for in vain."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_schedules import last, spec
from short_run import cover

from jflash._backends.mosaic_gpu import forward_schedule, smem
from jflash._backends.mosaic_gpu.forward_plan import output_stores, shared_memory, visited_tiles
from jflash._backends.mosaic_gpu.forward_schedule import CtaPlace, DealtTo, Device, ForwardSchedule
from jflash._backends.mosaic_gpu.plan import describe, plan_backward, plan_forward
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_list import TileList

LISTS = [
    ForwardSchedule(blocks, batch, heads, items, pairs, staggered=staggered)
    for blocks in (1, 2, 5, 8)
    for batch, heads, pairs in ((1, 1, 1), (3, 2, 1), (3, 1, 3), (8, 1, 4), (8, 3, 3), (2, 5, 5), (1, 5, 2), (3, 5, 4))
    for items in (1, 2, 3, 8)
    for staggered in (False, True)
]


def every_cta_has_an_item(schedule: ForwardSchedule) -> bool:
    """Also those of lists that have a pair less."""
    return schedule.is_even or (schedule.pairs - 1) * schedule.blocks >= schedule.grid[1]


@cover(2)
@pytest.mark.parametrize("schedule", [*filter(every_cta_has_an_item, LISTS)], ids=str)
def test_every_block_is_an_item_of_one_cta(schedule: ForwardSchedule):
    """Also where lists have pairs of several heads, and some one less, but an item for each CTA."""
    in_turn = lambda index, visited: jnp.where(index == visited, visited + 1, -1)

    def of_cta(place: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        cta = CtaPlace(*place)
        items = [jnp.stack(schedule.item(cta, jnp.int32(index))) for index in range(schedule.items_per_cta)]
        return schedule.each(cta, in_turn), items

    places = [*itertools.product(*map(range, schedule.grid))]
    counts, items = jax.jit(jax.vmap(of_cta))(jnp.array(places, jnp.int32))
    everything = []
    for cta, count in enumerate(np.asarray(counts)):
        taken = [tuple(map(int, item[cta])) for item in map(np.asarray, items[:count])]
        assert schedule.staggered or taken == sorted(taken, key=lambda place: (place[1], place[0], place[2]))
        assert taken
        everything += taken
    every = schedule.heads, schedule.batch, schedule.blocks
    assert sorted(everything) == list(itertools.product(*map(range, every)))


@pytest.mark.parametrize(("items", "ctas"), [(40, 7), (64, 32), (9, 8)])
def test_items_are_dealt_out(items: int, ctas: int):
    """Each once, in their order, and no CTA has an item more to do than another."""
    places, times = tuple((index % 3, index % 2, index) for index in range(items)), tuple(range(items + 5, 5, -1))
    dealt = forward_schedule.deal(places, times, ctas)
    assert sorted(place for own in dealt for place in own) == sorted(places)
    assert all(own == tuple(sorted(own, key=places.index)) for own in dealt)
    work = [sum(times[turn] for *_, turn in own) for own in dealt]
    assert max(work) - min(work) <= max(times)
    table, taken = jax.jit(functools.partial(forward_schedule.table, dealt))(), []

    def take(cta: int, index: int, before: int) -> int:
        """Each CTA of a kernel finds its list in the table."""
        found = DealtTo(table, cta)
        taken.append(tuple(map(int, found.place(index))))
        following = index + 1 if index + 1 < len(dealt[cta]) else None
        given = []
        found.if_next(index, given.append, lambda: given.append(None))
        assert given == [following]
        return before + 1

    with jax.disable_jit():
        counts = [int(DealtTo(table, cta).each(functools.partial(take, cta))) for cta in range(ctas)]
    assert counts == list(map(len, dealt))
    assert taken == [place for own in dealt for place in own]


@pytest.mark.parametrize("empty", [0, 1, 2, 3])
def test_empty_blocks_are_shared_out(empty: int):
    """Some of 4 causal blocks are past the end of a length unknown to the plan: both CTAs still have as much to do."""
    schedule = ForwardSchedule(4, 8, 1, 16, 8, staggered=True)
    to_do = lambda block: 0 if block < empty else 4 - block
    taken = lambda cta: (int(schedule.item(CtaPlace(0, cta, 0), index)[2]) for index in range(16))
    assert len({sum(map(to_do, taken(cta))) for cta in range(2)}) == 1


def ends(schedule: ForwardSchedule, visits: tuple[float, ...], beginning: float) -> float:
    """When the last multiprocessor is done with a forward."""
    apart, ctas, lists = schedule.grid
    axes = apart, ctas, schedule.head_groups, lists

    @functools.cache
    def time(cta: int, pairs: int) -> float:
        places = (int(schedule.place(cta, index)) for index in range(schedule.items_per_cta))
        return beginning + sum(visits[place % len(visits)] for place in places if place < len(visits) * pairs)

    pairs = [schedule.pairs - (number >= schedule.full_lists) for number in range(lists)]
    return last(time(cta, pairs[number]) for _, cta, _, number in itertools.product(*map(range, axes)))


@cover(2)
@pytest.mark.parametrize("beginning", [0.5, 3.0])
@pytest.mark.parametrize(("batch", "heads"), [(1, 3), (16, 16), (12, 40), (1, 300)])
@pytest.mark.parametrize("visits", [(8,) * 8, (9, 7, 5, 3, 1), (32,) * 43, (2.5,) * 7, (1,)], ids=len)
def test_forward_leaves_no_processor_waiting(visits: tuple[float, ...], batch: int, heads: int, beginning: float):
    one = ForwardSchedule(len(visits), batch, heads)
    schedule = forward_schedule.choose(one, visits, Device(132, beginning, 2**16, len(visits))).schedule
    assert every_cta_has_an_item(schedule)
    assert ends(schedule, visits, beginning) <= 1.02 * ends(one, visits, beginning)


@pytest.mark.parametrize(("blocks", "heads"), [(43, 8), (22, 16), (11, 32), (86, 8)])
def test_long_blocks_of_few_heads_begin_first(blocks: int, heads: int):
    """A head has too few blocks for all multiprocessors: they would wait for the last one's."""
    visits = tuple(1.5 * float(blocks - block) for block in range(blocks))
    one = ForwardSchedule(blocks, 1, heads)
    schedule = forward_schedule.choose(one, visits, Device(132, 3.0, 2**15, blocks)).schedule
    assert heads % schedule.head_groups == 0
    assert ends(schedule, visits, 3.0) <= 0.95 * ends(one, visits, 3.0)


def test_ctas_of_long_sequences_take_one_item_and_of_short_ones_many():
    def items(blocks: int, batch: int) -> int:
        device = Device(132, 1.0, 2**16, blocks)
        one = ForwardSchedule(blocks, batch, 16)
        return forward_schedule.choose(one, (blocks,) * blocks, device).schedule.items_per_cta

    assert items(128, 1) == 1
    assert items(4, 32) == 16


@pytest.mark.parametrize(
    ("batch", "length", "heads", "tile", "items", "pairs"),
    [
        (64, 128, 12, (2, 128), 6, 6),
        (64, 197, 12, (4, 64), 6, 6),
        (32, 512, 12, (4, 64), 6, 6),
        (16, 256, 12, (2, 128), 3, 3),
        (4, 1024, 12, (2, 128), 3, 3),
        (8, 1024, 12, (4, 64), 3, 3),
        (1, 2048, 16, (4, 64), 1, 1),
        (2, 4096, 10, (3, 128), 4, 2),
    ],
)
def test_what_was_fastest_of_few_rounds(
    batch: int, length: int, heads: int, tile: tuple[int, int], items: int, pairs: int
):
    """Full calls of BERT's, ViT's and others' shapes, timed with each tile and several schedules on an H200."""
    call = spec(64, 64, batch=batch, heads=heads, key_heads=heads, query_length=length, key_length=length)
    plan = plan_forward(call, 132).plan
    assert (plan.tile.warpgroups, plan.tile.keys) == tile
    assert (plan.schedule.items_per_cta, plan.schedule.pairs) == (items, pairs)


def test_the_bound_on_a_schedule_s_time_is_one():
    """So the schedules that it rules out are slower."""
    one, times, device = ForwardSchedule(3, 8, 40), (3.0, 2.5, 1.0), Device(132, 2.0, 2**15, 3)
    several = list(forward_schedule._with_several_items(one))
    assert {schedule.is_even for schedule in several} == {True, False}
    for schedule in several:
        args = schedule, times, device
        assert forward_schedule._least(*args) <= forward_schedule._time(*args) * (1 + 1e-6)


def test_warpgroups_of_packed_heads_end_within_a_query():
    """117 rows are two of 64, though no 64 rows are whole queries of 13 heads: their times are those of one block."""
    call = spec(112, 112, batch=64, heads=26, key_heads=2, query_length=9, key_length=4096)
    assert visited_tiles(call, 13, 64, 128) == [32, 32]
    plan = plan_forward(call, 132).plan
    assert (plan.packed_heads, plan.schedule.blocks) == (13, 1)


def test_tiles_by_length():
    """Four warpgroups where a block visits few tiles, three where it visits many, two where processors would wait."""

    def warpgroups(length: int, causal: bool, heads: int) -> int:
        call = spec(64, 64, batch=1, heads=heads, key_heads=heads, query_length=length, key_length=length)
        return plan_forward(dataclasses.replace(call, is_causal=causal), 132).plan.tile.warpgroups

    assert [warpgroups(256, causal, 1024) for causal in (False, True)] == [4, 4]
    assert [warpgroups(4096, causal, 1024) for causal in (False, True)] == [3, 3]
    assert [warpgroups(128, causal, 1024) for causal in (False, True)] == [2, 2]
    assert [warpgroups(length, True, 1024) for length in (512, 768, 1024, 2048)] == [4, 3, 3, 3]
    assert warpgroups(1024, True, 16) == 2


@pytest.mark.parametrize(
    ("dims", "length", "options", "warpgroups"),
    [
        *[((80, 80), 2048, {}, 3), ((72, 80), 2048, {}, 3), ((64, 80), 2048, {}, 2)],
        *[((96, 96), 2048, {}, 3), ((96, 96), 256, {}, 2), ((112, 112), 2048, {}, 3), ((128, 128), 8192, {}, 2)],
        # Words for whole tiles are of 64 keys; the soft cap's form leaves no registers.
        *[((80, 80), 2048, dict(dropout_rate=0.1), 2), ((80, 80), 2048, dict(logits_soft_cap=30.0), 2)],
        ((80, 80), 2048, dict(mask_shape=(1, 1, 2048, 2048), operands=("mask",)), 2),
    ],
    ids=str,
)
def test_three_warpgroups_where_they_were_faster(dims: tuple[int, int], length: int, options: dict, warpgroups: int):
    call = spec(*dims, batch=8, query_length=length, key_length=length)
    operands = call.operands.union(options.get("operands", ()))
    call = dataclasses.replace(call, is_causal=True, **options | dict(operands=operands))
    assert plan_forward(call, 132).plan.tile.warpgroups == warpgroups


@pytest.mark.parametrize(("is_causal", "axes"), [(False, ["batch", "block"]), (True, ["block", "batch"])], ids=str)
def test_ctas_that_read_the_same_keys_begin_together(is_causal: bool, axes: list[str]):
    """Causal CTAs are the exception: there the longest begin first."""
    call = spec(128, 128, batch=4, query_length=4096, key_length=4096, is_causal=is_causal)
    assert [axis for axis in plan_forward(call, 132).plan.launch.grid if axis in axes] == axes


@pytest.mark.parametrize(
    ("dims", "bias", "stores"),
    [
        ((128, 128), None, 1),
        ((192, 128), None, 2),
        ((256, 256), None, 2),
        ((256, 256), jnp.bfloat16, 0),
        ((192, 192), jnp.float32, 0),
    ],
    ids=str,
)
def test_output_leaves_in_as_few_stores_as_there_is_room_for(dims: tuple[int, int], bias: Any, stores: int):
    call = spec(*dims, bias)
    tile = plan_forward(call, 132).plan.tile
    assert output_stores(call, tile) == stores
    left = smem.CAPACITY - smem.size(shared_memory(call, tile))
    whole = tile.rows * dims[1] * 2
    assert {0: whole > 2 * left or dims[1] % 128 > 0, 1: whole <= left, 2: left < whole <= 2 * left}[stores]


def test_plans_are_printable_and_made_without_an_array():
    """From a Spec and a number of processors; equal calls have equal plans, which can be keys."""
    for options in ({}, dict(is_causal=True), dict(deterministic=True), dict(query_length=1, heads=16, key_heads=2)):
        call = dataclasses.replace(spec(128, 128), **options)
        for make in (plan_forward, plan_backward):
            assert make(call, 132) == make(call, 132)
            assert hash(make(call, 132)) == hash(make(call, 132))
        text = describe(call, 132)
        for word in ("forward", "backward", "grid", "KiB of shared memory", "copies", "Tiles(", "Schedule("):
            assert word in text
    assert "bias is padded from [1000, 1000] to [1000, 1024]" in describe(
        dataclasses.replace(spec(128, 128, jnp.bfloat16), bias_shape=(1, 1, 1000, 1000)), 132
    )


@pytest.mark.parametrize(("count", "parts"), [(9, 4), (8, 4), (1, 3), (0, 2), (10, 1)])
def test_parts_of_a_range_are_all_of_it(count: int, parts: int):
    """Each tile is one part's; a part may have none."""
    every = tile_range.TileRange(jnp.int32(16), jnp.int32(count), None, 64)
    found = [every.share(index, parts) for index in range(parts)]
    starts = [int(part.start(index)) for part in found for index in range(int(part.count))]
    assert starts == [16 + 64 * index for index in range(count)]


@pytest.mark.parametrize(("count", "parts"), [(4, 3), (4, 1), (1, 3), (0, 2)])
def test_parts_of_a_list_are_all_of_it(count: int, parts: int):
    """CTAs that share a list may have no tile of it; those that split it have one at least, past the end if need be."""
    entries = jnp.array([count, *range(10, 10 + 2 * count, 2), *[9] * (5 - count)])
    every = TileList(entries, 0, entries[0], 64)
    want = [64 * (5 + index) for index in range(count)]
    starts = lambda found: [int(part.start(index)) for part in found for index in range(int(part.count))]
    assert starts([every.share(index, parts) for index in range(parts)]) == want
    split = starts([every.split(jnp.int32(index), parts) for index in range(parts)])
    past_the_end = 4 * 64
    assert [start for start in split if start != past_the_end] == want
    assert len(split) >= parts
