"""What each CTA of the Hopper backward does, and when: its waves, short calls, and what registers add."""

import dataclasses
import itertools
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hopper_schedules import backward_schedule, last, plan_fused, spec

from jflash._backends.mosaic_gpu import smem
from jflash._backends.mosaic_gpu.backward_short import ShortPlan
from jflash._backends.mosaic_gpu.plan import plan_backward
from jflash._backends.mosaic_gpu.query_walk import QueryWalkPlan
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._backends.nvidia.walk.tile_order import TileOrder
from jflash._semantics import visibility
from jflash._semantics.spec import Operands


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
    schedule = backward_schedule(heads, heads, blocks, batch, 132, accumulated=blocks)
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
    """A wave has twice as many blocks where none is longer. dQ is rounded after as many CTAs as run at once."""
    schedule = backward_schedule(16, 16, blocks, 128 // blocks, 132, alike=alike, accumulated=blocks)
    assert schedule.items * blocks == ctas
    assert schedule.lag * ctas >= 132


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
    """A tile begins at the last query, or at the multiple of 8 before it."""
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


def ends_backward(schedule: BackwardSchedule) -> float:
    """When the last multiprocessor is done with a causal backward."""
    axes = schedule.waves, schedule.blocks, schedule.items
    return last(schedule.blocks - block + 1 for _, block, _ in itertools.product(*map(range, axes)))


@pytest.mark.parametrize("blocks", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("heads", "batch"), [(1, 16), (8, 1), (16, 1), (40, 1), (3, 5), (32, 2), (64, 4)])
def test_backward_leaves_no_processor_waiting(heads: int, batch: int, blocks: int):
    """Not much longer than where all is one wave, whose longest blocks begin first."""
    of = lambda processors: backward_schedule(heads, heads, blocks, batch, processors)
    assert ends_backward(of(132)) <= 1.05 * ends_backward(of(None))


@pytest.mark.parametrize(("group", "count"), [(1, 5), (3, 4), (4, 1), (2, 0)])
@pytest.mark.parametrize("kind", ["to the end", "window", "segments", "mask function", "by head"])
def test_every_tile_of_all_heads_is_visited_once(kind: str, group: int, count: int):
    """In the same order by those that copy tiles and those that compute."""
    spec: Any = types.SimpleNamespace(
        bounds=(3 if kind == "window" else None, 0),
        operands={"query_segments"} if kind == "segments" else set(),
        mask_mod=object() if kind == "mask function" else None,
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


@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize("length", [1, 64, 170, 520])
@pytest.mark.parametrize(
    "options",
    [
        *({}, dict(is_causal=True), dict(window=(90, 20)), dict(is_causal=True, query_offset=37)),
        *(dict(deterministic=True), dict(window=(90, 20), deterministic=True)),
    ],
    ids=str,
)
def test_rows_of_all_tiles(length: int, options: dict[str, Any], processors: int):
    """Row statistics have a row for all that is read: tiles may end behind the last query."""
    call = dataclasses.replace(spec(64, 64, query_length=length, key_length=300), **options)
    (walk,) = (kernel.plan for kernel in plan_backward(call, processors) if isinstance(kernel.plan, QueryWalkPlan))
    nothing = Operands(query=None, key=None, value=None)
    for first_key in range(0, 300, walk.tile.keys):
        spans = visibility.query_spans(call, nothing, 0, 1, first_key, walk.tile.keys)
        first, count = tile_range.of_spans(call, spans, walk.tile.queries, alignment=walk.alignment)
        assert first + count * walk.tile.queries <= walk.rows_read
