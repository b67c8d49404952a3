"""The Hopper kernels in Pallas' interpreter: right, and free of races, over a short product of features."""

import dataclasses
import functools
import re
from typing import Any

import cases
import hopper_kernels
import jax
import jax.numpy as jnp
import oracle
import pytest
from cases import Case
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernel_families import HOPPER, TWO_KERNELS, Family, plan_of
from kernel_values import INTERPRETED
from short_run import cover

from jflash import _tuning
from jflash._backends.mosaic_gpu import forward_schedule, plan
from jflash._backends.mosaic_gpu.backward_fused import FusedPlan
from jflash._backends.mosaic_gpu.backward_short import ShortPlan
from jflash._backends.mosaic_gpu.forward_schedule import Choice
from jflash._backends.mosaic_gpu.tiles import RowTiles

# The interpreter adds in two steps what the hardware adds in one. So what several blocks add to is not for it: the
# fused backward has one block of keys here.
FUSED = {**INTERPRETED, "key_length": (17, 128), "dims": ((80, 80), (112, 72), (64, 64), (40, 24), (33, 100))}
SPLIT = {**INTERPRETED, "key_length": (131, 200), "dims": ((40, 24), (64, 64), (192, 128), (1, 5))}


FUSED_CASES, SPLIT_CASES = (
    [Case(batch=(2,), **row) for row in cases.product(values, 2)][::2] for values in (FUSED, SPLIT)
)


# Two blocks of queries, and the general form of logits in the fused backward. test_any_tiles has two kernels, and
# test_hopper_dkv_dq float32.
GENERAL = dict(soft_cap=1.5, alibi=True, bias="keys", mask="full", causal=True, sinks=True)
IN_SHORT_RUN = Case("bfloat16", 70, 100, (2, 1), (40, 24), (1,), **GENERAL)


def marked(some: list[Case]) -> list:
    return [pytest.param(case, marks=() if case == IN_SHORT_RUN else cover(0)) for case in some]


def slow(*row: object):
    return pytest.param(*row, marks=cover(0))


@cover(rest=7)
@pytest.mark.parametrize("case", marked([IN_SHORT_RUN, *FUSED_CASES]), ids=str)
def test_fused(case: Case):
    call = cases.build(case)
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call), call)


@cover(rest=6)
@pytest.mark.parametrize("case", marked(SPLIT_CASES), ids=str)
def test_split(case: Case):
    call = cases.build(case)
    run = functools.partial(hopper_kernels.run, call, family=TWO_KERNELS, deterministic=True)
    hopper_kernels.assert_right(run, call)


@cover(every=9, rest=3)
@pytest.mark.parametrize(
    ("processors", "lengths", "heads", "dims", "options"),
    [
        # The second block of keys begins at the second tile of queries, where it is the other warpgroup's turn.
        (1, (150, 270), (2, 2), (40, 24), dict(window=(90, 20), lengths="both")),
        (1, (200, 150), (3, 3), (64, 64), {}),
        (2, (320, 300), (4, 4), (64, 64), dict(causal=True, offset="end")),
        # Without room for columns of row statistics.
        (1, (512, 140), (2, 2), (64, 64), dict(causal=True)),
        (1, (100, 150), (4, 2), (64, 64), dict(segments="sorted", causal=True)),
        (1, (100, 150), (2, 2), (80, 80), dict(bias="full", mask="full")),
        (1, (70, 130), (2, 2), (96, 64), dict(bias="keys", alibi=True, soft_cap=1.5)),
        (1, (100, 150), (2, 2), (64, 64), dict(dropout=True, score_mod="indices")),
        (1, (130, 150), (2, 2), (33, 33), dict(causal=True, dtype="float16")),
    ],
    ids=str,
)
def test_dq_in_shared_memory(
    processors: int, lengths: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], options: dict
):
    """A CTA takes several heads, each of which has several blocks of keys."""
    given = dict(dtype="bfloat16") | options
    call = cases.build(
        Case(query_length=lengths[0], key_length=lengths[1], heads=heads, dims=dims, batch=(1,), **given)
    )
    short = plan_of(plan.plan_backward(hopper_kernels.canonical(call)[0], processors), ShortPlan)
    assert short is not None
    assert short.blocks > 1
    assert short.ctas == processors
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call, processors), call)


@cover(every=40, rest=4)
@pytest.mark.parametrize(("items", "pairs", "batch"), [(2, 1, 2), (3, 2, 2), (4, 2, 3)], ids=str)
@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ((64, 64), {}),
        ((64, 64), dict(causal=True, offset="end")),
        ((64, 64), dict(window=(150, 10))),
        ((128, 128), dict(causal=True, lengths="both")),
        ((128, 128), dict(bias="full", window=(100, 0))),
        # The output leaves in two parts, from a buffer of its own.
        ((256, 256), dict(causal=True, offset="end")),
        ((192, 128), dict(lengths="both")),
        # And from the queries' buffer.
        ((256, 256), dict(bias="full")),
        ((80, 80), dict(bias="full", mask="full", causal=True, sinks=True)),
        ((40, 40), dict(segments="sorted", window=(40, 10), soft_cap=1.5)),
        slow((64, 64), dict(causal=True, offset="end", dtype="float32")),
        slow((128, 128), dict(bias="full", window=(100, 0), dtype="float32")),
    ],
    ids=str,
)
def test_several_items_a_cta(
    monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], options: dict, items: int, pairs: int, batch: int
):
    """Each CTA takes several blocks of queries, of one or two batch entries, or of two heads; some CTAs have one less.

    The first block of a head is not whole, and of 2 heads each has its own keys.
    """
    planned = lambda one, *_: Choice(dataclasses.replace(one, items_per_cta=items, pairs=pairs), 0.0)
    monkeypatch.setattr(forward_schedule, "choose", planned)
    given = dict(dtype="bfloat16") | options
    case = Case(query_length=260, key_length=140, heads=(2, 2), dims=dims, batch=(batch,), **given)
    call = cases.of_forward(cases.build(case))
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call), call)


@cover(every=9)
@pytest.mark.parametrize(
    ("dim", "tile"),
    [
        *[(64, RowTiles(3, 128, 2)), (80, RowTiles(3, 112, 2)), (64, RowTiles(4, 64, 3))],
        *[(96, RowTiles(3, 96, 2)), (112, RowTiles(3, 96, 2))],
    ],
    ids=str,
)
def test_head_groups_of_the_forward(monkeypatch: pytest.MonkeyPatch, dim: int, tile: RowTiles):
    """6 causal heads are worked on 3 at a time where three warpgroups compute, and all together where four do."""
    monkeypatch.setattr(forward_schedule, "choose", lambda one, *_: Choice(one, 0.0))
    case = Case("bfloat16", 260, 140, heads=(6, 2), dims=(dim, dim), batch=(), causal=True)
    call = cases.of_forward(cases.build(case))
    with _tuning.trying({_tuning.TuningKey("mosaic_gpu forward", (dim, dim, 0, "long")): tile}):
        oracle.assert_right(hopper_kernels.run(call, deterministic=True), call)
        schedule = plan.plan_forward(hopper_kernels.canonical(call)[0], 132).plan.schedule
    assert schedule.head_groups == (6 if tile.warpgroups > 3 else 3)


# Which CTA adds to which sum, and who rounds it, is array code (test_hopper_dq_accumulator).
@cover(0, rest=6)
@pytest.mark.parametrize(
    ("query_length", "processors", "key_length", "heads", "batch", "options"),
    [
        (300, 1, 100, (3, 3), 1, dict(causal=True, lengths="both")),
        (520, 1, 100, (5, 5), 2, {}),
        (300, 1, 60, (4, 2), 1, dict(window=(40, 10))),
        (520, 1, 200, (3, 3), 1, dict(causal=True, offset="end")),
        (300, 1, 200, (4, 2), 3, dict(causal=True)),
        (520, 1, 100, (3, 1), 4, dict(window=(40, 10), bias="keys")),
        # Waves of work items of several heads and batch entries.
        (300, 3, 100, (2, 2), 9, dict(causal=True)),
        # Heads that share keys are in head groups: of one head, and of two.
        (520, 1, 100, (3, 1), 1, dict(causal=True, offset="end")),
        (300, 2, 200, (4, 1), 1, dict(causal=True, bias="keys", lengths="keys")),
        (520, 2, 140, (4, 1), 1, dict(window=(150, 0))),
        slow(300, 1, 200, (4, 2), 1, dict(causal=True, dtype="float32")),
    ],
    ids=str,
)
def test_accumulators_of_few_heads_at_a_time(
    query_length: int, processors: int, key_length: int, heads: tuple[int, int], batch: int, options: dict
):
    """On so few multiprocessors heads and batch entries take each other's place in the accumulators of dQ.

    Of few queries the last CTA rounds dQ, of more than 512 those of later waves. A head's dQ, or that of all that share
    keys, does not fit in shared memory.
    """
    given = dict(dtype="bfloat16") | options
    dims = (96, 96) if query_length == 300 and heads[0] == heads[1] else (64, 64)
    call = cases.build(
        Case(query_length=query_length, key_length=key_length, heads=heads, dims=dims, batch=(batch,), **given)
    )
    assert plan_of(plan.plan_backward(hopper_kernels.canonical(call)[0], processors), FusedPlan) is not None
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call, processors, detect_races=False), call)


@cover(every=8, rest=2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("processors", "key_length"), [(1, 300), (132, 1100)])
@pytest.mark.parametrize("query_length", [1, 3])
def test_decoding(query_length: int, processors: int, key_length: int, dtype: str):
    """Heads packed into rows, keys in several parts or batch entries in rounds, lengths for each sequence."""
    case = Case(dtype, query_length, key_length, heads=(4, 2), dims=(64, 64), lengths="keys", batch=(2,))
    call = cases.of_forward(cases.build(case))
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call, processors), call)


@cover(0)
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
def test_queries_in_registers(dims: tuple[int, int]):
    """Where nothing is masked, products take some columns of wide heads' queries from registers."""
    call = cases.of_forward(cases.build(Case("bfloat16", 136, 256, heads=(2, 1), dims=dims, batch=())))
    assert plan.plan_forward(hopper_kernels.canonical(call)[0], 132).plan.query_columns_in_registers == 128
    oracle.assert_right(hopper_kernels.run(call), call)


@pytest.mark.parametrize("family", [HOPPER, slow(TWO_KERNELS)], ids=["fused", "two kernels"])
def test_no_weight_on_keys_past_the_end(family: Family):
    """A tile of keys is read as zeros there; sums over it are not cut off as dK is."""
    case = Case("bfloat16", 131, 17, (2, 1), (80, 80), (1,), alibi=True, bias="heads", scale="traced", sinks=True)
    call = cases.build(case)
    got = hopper_kernels.run(call, family=family, deterministic=family is TWO_KERNELS)
    oracle.assert_right(got, call)


@cover(0, rest=2)
@pytest.mark.parametrize("scale", [1e-30, 1e-18])
@pytest.mark.parametrize("mask", [None, "full"])
def test_small_scales(scale: float, mask: str | None):
    """The backward divides the log-sum-exp by the scale, and adds products to what is left."""
    case = Case("bfloat16", 40, 17, dims=(64, 64), lengths="queries", mask=mask)
    call = dataclasses.replace(cases.build(case), scale=scale)
    oracle.assert_right(hopper_kernels.run(call), call)


@cover(0)
@pytest.mark.parametrize("large", [128, 192])
def test_large_biases_in_a_window(large: int):
    """A tile's biases may be large in some part of it."""
    call = cases.large_biases_in_a_window(large)
    oracle.assert_right(hopper_kernels.run(call, family=TWO_KERNELS, deterministic=True), call)


@cover(0, rest=2)
@pytest.mark.parametrize("scale", [2.0**-40, 1e-18, 0.3, 1.0, 2.0])
def test_bias_of_keys_by_scale(scale: float):
    """The forward divides it by the scale."""
    case = Case("bfloat16", 70, 200, heads=(2, 1), dims=(32, 32), batch=(), bias="keys")
    call = cases.with_scale(cases.build(case), scale)
    oracle.assert_right(hopper_kernels.run(call, family=TWO_KERNELS, deterministic=True), call)


@cover(0)
def test_soft_cap_of_few_large_products():
    case = Case("bfloat16", 199, 17, (2, 1), (8, 8), (), soft_cap=40.0, bias="heads", causal=True, window=40)
    call = cases.with_large_products(cases.build(case))
    oracle.assert_right(hopper_kernels.run(call, family=TWO_KERNELS, deterministic=True), call)


@cover(0, rest=3)
@pytest.mark.parametrize(("dtype", "cap"), [("bfloat16", 1024.0), ("bfloat16", 1e5), ("float16", 64.0)])
@pytest.mark.parametrize("steps", cases.STEPS)
def test_soft_cap_from_tile_to_tile(steps: str, dtype: str, cap: float):
    """What weights are relative to changes only where it must."""
    case = Case(dtype, 70, 390, heads=(1, 1), dims=(64, 64), batch=(), soft_cap=cap, mask="full", sinks=cap == 64)
    call = cases.of_forward(cases.with_steps(cases.build(case), steps))
    oracle.assert_right(hopper_kernels.run(call), call)


@cover(0, rest=6)
@pytest.mark.parametrize(
    ("dtype", "kind", "dim"),
    [("bfloat16", "keys", 64), ("float16", "keys", 80), ("float16", "full", 64)],
)
@pytest.mark.parametrize("values", cases.LARGE_BIASES)
def test_large_biases(values: str, dtype: str, kind: str, dim: int):
    call = cases.build(Case(dtype, 70, 200, heads=(1, 1), dims=(dim, dim), batch=(), bias=kind))
    call = cases.with_bias_of_index(call, cases.LARGE_BIASES[values])
    oracle.assert_right(hopper_kernels.run(call, family=TWO_KERNELS, deterministic=True), call, by_lse=True)


@cover(0, rest=2)
@pytest.mark.parametrize("options", [{}, dict(alibi=True), dict(bias="keys"), dict(bias="full")], ids=str)
def test_weights_of_large_logits(options: dict):
    """In base 2 they are rounded: what is summed of one tile must not drift from the next one's.

    With one processor the keys are not split.
    """
    call = cases.build(Case("float32", 3, 1500, heads=(1, 1), dims=(64, 64), batch=(), **options))
    call = cases.of_forward(cases.with_large_logits(call))
    oracle.assert_right(hopper_kernels.run(call, processors=1, precision="highest"), call)


@cover(0)
@pytest.mark.parametrize(("queries", "keys"), [(640, 64), slow(64, 640)])
def test_long_sums_of_float32(queries: int, keys: int):
    """Where the matrix unit adds, what is below the last place is cut off: sums over many tiles must not drift."""
    call = cases.build(Case("float32", queries, keys, heads=(1, 1), dims=(64, 64), batch=()))
    oracle.assert_right(hopper_kernels.run(call, precision="highest"), call)


@cover(every=9)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True, lengths="both", sinks=True),
        dict(bias="full", mask="full", segments="sorted"),
        dict(bias="queries", alibi=True, scale="traced", soft_cap=1.5),
        dict(bias="keys", window=(40, 10), offset="each", score_mod="indices"),
    ],
    ids=str,
)
def test_nothing_but_a_function_of_the_operands(options: dict, deterministic: bool):
    """`custom_partitioning`, through which every call goes on a device, takes no function that holds other arrays, and
    where there are several devices none that has effects."""
    call = cases.build(Case("bfloat16", 131, 200, heads=(2, 1), dims=(64, 64), batch=(2,), **options))
    for closed in (*hopper_kernels.traced(call, deterministic=deterministic), hopper_kernels.traced_tangent(call)):
        assert not closed.consts
        assert not closed.effects


@cover(every=8)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [dict(bias="keys"), dict(bias="queries"), dict(alibi=True), dict(scale="traced")])
def test_kernels_know_no_mesh(options: dict, deterministic: bool):
    """Mosaic lowers no reshape with a sharding, which a pull-back has if a parameter has one and its cotangent none."""
    call = cases.build(Case("bfloat16", 131, 200, heads=(2, 1), dims=(64, 64), batch=(2,), **options))
    score_mod = lambda logit, batch, head, query, key: jnp.where(query > key, 0.3 * logit, logit)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    tangent = hopper_kernels.traced_tangent(call, sharding, score_mod=score_mod)
    for closed in (*hopper_kernels.traced(call, sharding, deterministic=deterministic, score_mod=score_mod), tangent):
        assert "mesh" in str(closed)
        assert not re.search(r"reshape\[[^]]*sharding=(?!None)", str(closed))


@cover(0)
@pytest.mark.parametrize("segments", [None, "sorted"])
def test_parts_that_get_no_keys(segments: str | None):
    """33 tiles in 8 parts are 5 each: the last part has none, and must weigh nothing and read nothing past the end."""
    case = Case("bfloat16", 1, 33 * 128, heads=(2, 1), dims=(8, 8), batch=(), segments=segments)
    call = cases.of_forward(cases.build(case))
    oracle.assert_right(hopper_kernels.run(call), call)


@cover(0)
def test_groups_that_do_not_fill_a_block():
    """16 queries of 12 heads: a block of 128 rows would end amid a query's heads."""
    case = Case("bfloat16", 16, 262, heads=(12, 1), dims=(80, 80), batch=(), causal=True, offset="end")
    call = cases.of_forward(cases.build(case))
    oracle.assert_right(hopper_kernels.run(call), call)


@cover(every=20, rest=4)
@pytest.mark.parametrize(
    ("dims", "options", "place", "deterministic"),
    [
        *((64, dict(causal=True, lengths="both"), place, True) for place in range(1, 5)),
        *((80, dict(causal=True, lengths="both"), 1, deterministic) for deterministic in (False, True)),
        *((40, dict(bias="full", mask="keys"), place, False) for place in range(1, 5)),
    ],
    ids=str,
)
def test_any_tiles(dims: int, options: dict, place: int, deterministic: bool):
    """All tiles are right, also those that only a search on some device would choose."""
    call = cases.build(Case("bfloat16", 131, 128, (2, 1), (dims, dims), (1,), **options))
    how: Any = dict(family=TWO_KERNELS, deterministic=True) if deterministic else {}
    with _tuning.trying({}) as trial:
        hopper_kernels.traced(call, **how)
    answers = {key: candidates[min(place, len(candidates) - 1)] for key, candidates in trial.asked.items()}
    with _tuning.trying(answers) as trial:
        oracle.assert_right(hopper_kernels.run(call, **how), call)
    assert answers.keys() == trial.asked.keys()
    assert max(map(len, trial.asked.values())) > place


@cover(every=5)
@pytest.mark.parametrize(
    ("processors", "lengths", "dims", "options"),
    [
        (5, (650, 128), (128, 64), dict(window=(90, 20))),
        (132, (1100, 77), (64, 64), {}),
        (132, (1040, 60), (64, 64), dict(causal=True, offset="end", lengths="both")),
        (132, (530, 200), (80, 80), dict(causal=True)),
        (12, (520, 140), (64, 64), dict(segments="sorted", dropout=True)),
    ],
    ids=str,
)
def test_queries_in_splits(processors: int, lengths: tuple[int, int], dims: tuple[int, int], options: dict):
    """Several CTAs share the queries of a block of keys; some of them may see none."""
    call = cases.build(Case("bfloat16", *lengths, heads=(2, 2), dims=dims, batch=(1,), **options))
    fused = plan_of(plan.plan_backward(hopper_kernels.canonical(call)[0], processors), FusedPlan)
    assert fused is not None
    assert fused.schedule.splits > 1
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call, processors, detect_races=False), call)
