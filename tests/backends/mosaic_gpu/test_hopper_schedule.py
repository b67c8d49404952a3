"""Which CTA of the Hopper kernels does what, and when: nothing is left out, done twice, or waited for in vain."""

import dataclasses
import functools
import heapq
import itertools
import types
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_run import cover

from jflash._backends.mosaic_gpu import forward_schedule, smem
from jflash._backends.mosaic_gpu.backward_fused import FusedPlan
from jflash._backends.mosaic_gpu.backward_short import ShortPlan
from jflash._backends.mosaic_gpu.forward_plan import output_stores, shared_memory
from jflash._backends.mosaic_gpu.forward_schedule import DealtItems, DealtTo, Device, ForwardSchedule
from jflash._backends.mosaic_gpu.plan import describe, plan_backward, plan_forward
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.tile_order import TileOrder
from jflash._semantics.spec import Spec


@cover(2)
@pytest.mark.parametrize("staggered", [False, True])
@pytest.mark.parametrize("items", [1, 2, 3, 8])
@pytest.mark.parametrize(("batch", "entries"), [(1, 1), (3, 1), (3, 3), (8, 4)])
@pytest.mark.parametrize("blocks", [1, 2, 5, 8, 13])
def test_every_block_is_an_item_of_one_cta(blocks: int, batch: int, entries: int, items: int, staggered: bool):
    schedule = ForwardSchedule(blocks, batch, items, entries, staggered=staggered)
    everything = []
    for cta in itertools.product(*map(range, schedule.grid)):
        taken = []

        def take(index, carry, cta=cta, taken=taken):
            taken.append(tuple(map(int, schedule.item(cta, index))))
            return carry

        with jax.disable_jit():
            schedule.each(cta, take)
        assert staggered or taken == sorted(taken)
        everything += taken
    assert sorted(everything) == list(itertools.product(range(batch), range(blocks)))


@pytest.mark.parametrize(("items", "ctas"), [(40, 7), (64, 32), (9, 8)])
def test_items_are_dealt_out(items: int, ctas: int):
    """Each once, in their order, and no CTA has an item more to do than another."""
    places, times = tuple((index % 3, index % 2, index) for index in range(items)), tuple(range(items + 5, 5, -1))
    dealt = DealtItems.of(places, times, ctas)
    assert sorted(place for own in dealt.lists for place in own) == sorted(places)
    assert all(own == tuple(sorted(own, key=places.index)) for own in dealt.lists)
    work = [sum(times[turn] for *_, turn in own) for own in dealt.lists]
    assert max(work) - min(work) <= max(times)
    table, taken = jax.jit(dealt.table)(), []

    def take(cta: int, index: int, before: int) -> int:
        """Each CTA of a kernel finds its list in the table."""
        found = DealtTo(table, cta)
        taken.append(tuple(map(int, found.place(index))))
        following = index + 1 if index + 1 < len(dealt.lists[cta]) else None
        given = []
        found.if_next(index, given.append, lambda: given.append(None))
        assert given == [following]
        return before + 1

    with jax.disable_jit():
        counts = [int(DealtTo(table, cta).each(functools.partial(take, cta))) for cta in range(ctas)]
    assert counts == list(map(len, dealt.lists))
    assert taken == [place for own in dealt.lists for place in own]


@pytest.mark.parametrize("empty", [0, 1, 2, 3])
def test_empty_blocks_are_shared_out(empty: int):
    """Of 4 causal blocks some are past the end of a length unknown to the plan: both CTAs still have as much to do."""
    schedule = ForwardSchedule(4, 8, 16, 8, staggered=True)
    to_do = lambda block: 0 if block < empty else 4 - block
    taken = lambda cta: (int(schedule.item((cta, 0), index)[1]) for index in range(16))
    assert len({sum(map(to_do, taken(cta))) for cta in range(2)}) == 1


def last(times: Iterable[float]) -> float:
    """When the last of 132 multiprocessors is done, each of which takes the next CTA when it is free."""
    free = [0.0] * 132
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


def ends(schedule: ForwardSchedule, visits: tuple[float, ...], heads: int, beginning: float) -> float:
    """When the last multiprocessor is done with a forward."""
    axes = heads // schedule.head_groups, schedule.grid[0], schedule.head_groups, schedule.grid[1]
    left = len(visits) * schedule.entries

    def time(cta: int) -> float:
        places = (int(schedule.place(cta, index)) for index in range(schedule.items_per_cta))
        return beginning + sum(visits[place % len(visits)] for place in places if place < left)

    return last(time(cta) for _, cta, _, _ in itertools.product(*map(range, axes)))


@cover(2)
@pytest.mark.parametrize("beginning", [0.5, 3.0])
@pytest.mark.parametrize(("batch", "heads"), [(1, 3), (16, 16), (12, 40), (1, 300)])
@pytest.mark.parametrize("visits", [(8,) * 8, (9, 7, 5, 3, 1), (32,) * 43, (2.5,) * 7, (1,)], ids=len)
def test_forward_leaves_no_processor_waiting(visits: tuple[float, ...], batch: int, heads: int, beginning: float):
    one = ForwardSchedule(len(visits), batch)
    schedule = forward_schedule.choose(one, visits, heads, Device(132, beginning, 2**16))
    assert schedule.batch % schedule.entries == 0
    without = ends(one, visits, heads, beginning)
    assert ends(schedule, visits, heads, beginning) <= 1.02 * without


@pytest.mark.parametrize(("blocks", "heads"), [(43, 8), (22, 16), (11, 32), (86, 8)])
def test_long_blocks_of_few_heads_begin_first(blocks: int, heads: int):
    """A head has too few blocks for all multiprocessors: they would wait for the last one's."""
    visits = tuple(1.5 * float(blocks - block) for block in range(blocks))
    one = ForwardSchedule(blocks, 1)
    schedule = forward_schedule.choose(one, visits, heads, Device(132, 3.0, 2**15))
    assert heads % schedule.head_groups == 0
    assert ends(schedule, visits, heads, 3.0) <= 0.95 * ends(one, visits, heads, 3.0)


def test_ctas_of_long_sequences_take_one_item_and_of_short_ones_many():
    device = Device(132, 1.0, 2**16)
    assert forward_schedule.choose(ForwardSchedule(128, 1), (128,) * 128, 16, device).items_per_cta == 1
    assert forward_schedule.choose(ForwardSchedule(4, 32), (4,) * 4, 16, device).items_per_cta == 16


def spec(head_dim: int, value_dim: int, bias: Any = None, **facts: Any) -> Spec:
    """A call's, with a bias of a dtype: of pairs, or where the head is narrow of keys."""
    shape = (1, 1, 1024, 1024)
    return Spec(
        **dict(batch=2, query_length=1024, key_length=1024, heads=16, key_heads=16) | facts,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=np.dtype(jnp.bfloat16),
        bias_shape=None if bias is None else shape,
        bias_dtype=None if bias is None else np.dtype(bias),
        mask_shape=None,
        operands=frozenset({"query", "key", "value", *(() if bias is None else ("bias",))}),
        scale=0.1,
        query_offset=0,
    )


def plan_fused(call: Spec, processors: int | None) -> FusedPlan:
    """The plan of the fused backward, which the call has."""
    fused = plan_backward(call, processors)[0].plan
    assert isinstance(fused, FusedPlan)
    return fused


def test_tiles_by_length():
    """Four warpgroups where a block visits few tiles, three where it visits many, two where processors would wait."""

    def warpgroups(length: int, causal: bool, heads: int) -> int:
        call = spec(64, 64, batch=1, heads=heads, key_heads=heads, query_length=length, key_length=length)
        return plan_forward(dataclasses.replace(call, is_causal=causal), 132).plan.tile.warpgroups

    assert [warpgroups(256, causal, 1024) for causal in (False, True)] == [4, 4]
    assert [warpgroups(4096, causal, 1024) for causal in (False, True)] == [3, 3]
    assert [warpgroups(128, causal, 1024) for causal in (False, True)] == [2, 2]
    assert [warpgroups(length, True, 1024) for length in (512, 1024)] == [4, 3]
    assert warpgroups(1024, True, 16) == 2


@pytest.mark.parametrize(
    ("dims", "length", "options", "warpgroups"),
    [
        *[((80, 80), 2048, {}, 3), ((80, 80), 1024, {}, 2), ((72, 80), 2048, {}, 3), ((64, 80), 2048, {}, 2)],
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


def backward_ends(schedule: BackwardSchedule, causal: bool) -> float:
    """When the last multiprocessor is done with a backward, as a multiple of what all of them would take together."""
    tiles = [schedule.blocks - block if causal else 1 for block in range(schedule.blocks)]
    times = [tile for _ in range(schedule.waves) for tile in tiles for _ in range(schedule.items)]
    return last(times) / (sum(times) / 132)


@pytest.mark.parametrize(
    ("heads", "blocks", "batch", "items"),
    # 21 and 25 heads, of 96 and of 80 columns; few waves; heads that fill no wave.
    [(21, 32, 4, 4), (25, 32, 4, 4), (25, 64, 2, 10), (15, 128, 1, 3), (3, 16, 8, 24), (16, 128, 1, 1), (3, 16, 1, 3)],
)
def test_waves_of_a_causal_backward(heads: int, blocks: int, batch: int, items: int):
    """No more heads at a time than keep all multiprocessors busy: their sums of dQ are in the cache."""
    schedule = BackwardSchedule.of(heads, heads, blocks, batch, 132, accumulated=blocks)
    assert (schedule.items, schedule.items * schedule.waves) == (items, heads * batch)
    assert backward_ends(schedule, causal=True) < 1.05 or schedule.waves == 1


@pytest.mark.parametrize(
    ("options", "items"),
    [({}, 2), (dict(window=(512, 512)), 2), (dict(is_causal=True), 6), (dict(window=(None, 64)), 6)],
    ids=str,
)
def test_waves_of_blocks_that_are_alike(options: dict, items: int):
    """None needs a partner, however many there are."""
    call = dataclasses.replace(spec(96, 96, heads=21, key_heads=21, query_length=8192, key_length=8192), **options)
    fused = plan_fused(call, 132)
    assert fused.schedule.items == items
    assert options or backward_ends(fused.schedule, causal=False) < 1.05


@pytest.mark.parametrize(
    ("blocks", "alike", "ctas"), [(8, False, 32), (16, False, 128), (8, True, 32), (16, True, 32), (32, True, 128)]
)
def test_small_waves_of_few_blocks(blocks: int, alike: bool, ctas: int):
    """Of twice as many where none is longer than others. Theirs are rounded after as many CTAs as run at a time."""
    schedule = BackwardSchedule.of(16, 16, blocks, 128 // blocks, 132, alike=alike, accumulated=blocks)
    assert schedule.items * blocks == ctas
    assert schedule.lag * ctas >= 132


@pytest.mark.parametrize(("is_causal", "axes"), [(False, ["batch", "block"]), (True, ["block", "batch"])], ids=str)
def test_ctas_that_read_the_same_keys_begin_together(is_causal: bool, axes: list[str]):
    """But causal ones, of which the longest begin first."""
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
    left = smem.CAPACITY - smem.size(shared_memory(call, tile, call.dtype))
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


@pytest.mark.parametrize(
    ("processors", "options", "is_short"),
    [
        (132, dict(batch=33), True),
        (132, dict(batch=33, head_dim=128, value_dim=128), False),
        (132, dict(batch=33, head_dim=96, value_dim=96), False),
        (132, dict(batch=33, query_length=256, head_dim=96, value_dim=96), True),
        (132, dict(batch=33, query_length=513), False),
        # All rows of the heads that share keys.
        (132, dict(batch=66, key_heads=2), False),
        (132, dict(batch=66, key_heads=2, query_length=256), True),
        # Too few heads for all multiprocessors, or too few in the last round.
        (132, dict(batch=27), False),
        (132, dict(batch=40), False),
        (132, dict(batch=60), True),
        (None, {}, True),
        (132, dict(batch=33, deterministic=True), True),
        (132, dict(batch=33, partial=True), False),
        (132, dict(batch=33, bias_shape=(1, 4, 512, 1), bias_dtype=np.dtype(jnp.bfloat16)), False),
    ],
    ids=str,
)
def test_short_calls_have_a_cta_for_each_head(processors: int | None, options: dict, is_short: bool):
    one = dataclasses.replace(spec(64, 64), query_length=512, key_length=700, heads=4, key_heads=4)
    call = dataclasses.replace(one, **options)
    if call.bias_shape is not None:
        call = dataclasses.replace(call, operands=call.operands | {"bias"})
    found = [kernel.plan for kernel in plan_backward(call, processors)]
    assert isinstance(found[0], ShortPlan) == is_short
    assert not is_short or len(found) == 1
    assert all(smem.fits(kernel.launch.smem) for kernel in found)


@pytest.mark.parametrize(
    ("processors", "options", "splits"),
    [
        (132, {}, 4),
        (132, dict(batch=8, heads=10, key_heads=10), 3),
        (132, dict(query_length=900), 2),
        (132, dict(query_length=700), 1),
        # A CTA for almost each multiprocessor, or for all.
        (132, dict(batch=16), 1),
        (32, {}, 1),
        (None, {}, 1),
        # Sums that are not of keys alone, or that go on after the call.
        (132, dict(key_heads=2), 1),
        (132, dict(partial=True), 1),
        (132, dict(alibi_slopes=True), 1),
    ],
    ids=str,
)
def test_queries_of_few_blocks_of_keys_are_shared(processors: int | None, options: dict, splits: int):
    call = spec(64, 64, **dict(batch=4, heads=8, key_heads=8, query_length=4096, key_length=77))
    asked = {name: value for name, value in options.items() if name != "alibi_slopes"}
    call = dataclasses.replace(call, operands=call.operands | (options.keys() - asked.keys()), **asked)
    fused = plan_fused(call, processors)
    assert fused.schedule.splits == splits
    assert fused.schedule.blocks == splits
    assert fused.schedule.stores_sums == (splits > 1 or call.partial or fused.schedule.head_groups > 1)


@pytest.mark.parametrize("length", [1023, 1024, 1025, 1097, 1152])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_there_is_room_for_what_registers_add(head_dim: int, length: int):
    """Of a tile that begins at the last query, or at the multiple of 8 before it."""
    fused = plan_fused(spec(head_dim, head_dim, query_length=length), 132)
    assert fused.tile.adds_registers
    last = (length - 1) // 8 * 8
    assert fused.dq_acc(0).shape[1] >= last + fused.tile.queries


@pytest.mark.parametrize("facts", [dict(logits_soft_cap=50.0), dict(dropout_rate=0.1), dict(scale=None)], ids=str)
def test_what_spills_leaves_room_for_the_cache(facts: dict):
    """Spilled registers are in the cache, which has what shared memory leaves of 256 KiB. A CTA that asks for more than
    196, with one that CUDA takes for itself, is given 228."""
    fused = plan_fused(dataclasses.replace(spec(128, 128), **facts), 132)
    assert fused.tile.stages == 2
    assert smem.size(fused.launch.smem) + 1024 <= 196 * 1024


def test_two_stages_fit_beside_tiles_of_a_bias():
    """With one, the fused backward of 128 columns spills fifteen times as much."""
    fused = plan_fused(spec(128, 128, bias=jnp.bfloat16), 132)
    assert fused.tile.stages == 2


@pytest.mark.parametrize(("count", "parts"), [(9, 4), (8, 4), (1, 3), (0, 2), (10, 1)])
def test_parts_of_a_range_are_all_of_it(count: int, parts: int):
    """Each tile is one part's; a part may have none."""
    every = tile_range.TileRange(jnp.int32(16), jnp.int32(count), None, 64)
    found = [every.share(index, parts) for index in range(parts)]
    starts = [int(part.start(index)) for part in found for index in range(int(part.count))]
    assert starts == [16 + 64 * index for index in range(count)]


@pytest.mark.parametrize(("group", "count"), [(1, 5), (3, 4), (4, 1), (2, 0)])
@pytest.mark.parametrize("kind", ["to the end", "window", "segments", "by head"])
def test_every_tile_of_all_heads_is_visited_once(kind: str, group: int, count: int):
    """In the same order by those that copy tiles and those that compute."""
    spec: Any = types.SimpleNamespace(
        bounds=(3 if kind == "window" else None, 0),
        operands={"query_segments"} if kind == "segments" else set(),
    )
    tiles: Any = types.SimpleNamespace(count=count)
    for block in range(3):
        order = TileOrder(spec, tiles, group, jnp.int32(block), by_head=kind == "by head")
        steps = range(count * group)
        visit = lambda step, head, tile, seen: seen.at[step].set(jnp.array([head, tile]))
        seen = np.asarray(order.each(visit, jnp.full((len(steps) + 1, 2), -1)))[:-1]
        at = [tuple(map(int, order.at(jnp.int32(step), jnp.int32(count)))) for step in steps]
        assert [tuple(place) for place in seen.tolist()] == at
        assert sorted(at) == list(itertools.product(range(group), range(count)))
        if kind == "to the end" and group > 1:
            assert at[:group] == [(head, count - 1) for head in range(group) if count]


def ends_backward(schedule: BackwardSchedule) -> float:
    """When the last multiprocessor is done with a causal backward."""
    axes = schedule.waves, schedule.blocks, schedule.items
    return last(schedule.blocks - block + 1 for _, block, _ in itertools.product(*map(range, axes)))


@pytest.mark.parametrize("blocks", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("heads", "batch"), [(1, 16), (8, 1), (16, 1), (40, 1), (3, 5), (32, 2), (64, 4)])
def test_backward_leaves_no_processor_waiting(heads: int, batch: int, blocks: int):
    """Not much longer than where all is one wave, whose longest blocks begin first."""
    of = lambda processors: BackwardSchedule.of(heads, heads, blocks, batch, processors)
    assert ends_backward(of(132)) <= 1.05 * ends_backward(of(None))
