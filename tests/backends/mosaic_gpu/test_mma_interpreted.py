"""The kernels by `mma.sync` in Pallas' interpreter: right over a short product of features."""

import dataclasses
import functools

import cases
import hopper_kernels
import kernel_families
import numpy as np
import oracle
import pytest
import score_mod_tables
from cases import Case
from kernel_values import INTERPRETED
from on_hardware import with_nan_in_padding
from short_run import cover

from jflash import _tuning
from jflash._backends.mosaic_gpu_mma.tiles import TILES, FusedTile
from jflash._tuning import TuningKey

VALUES = {
    **INTERPRETED,
    "key_length": (17, 131, 200),
    "dims": ((40, 24), (64, 64), (80, 80), (33, 100), (192, 128), (1, 5)),
}
CASES = [Case(batch=(2,), **row) for row in cases.product(VALUES, 2)][::2]
FUSED_TILES = TILES["backward"][1]


def forms(case: Case) -> int:
    """Return in how many ways a case's tiles are loaded; what is made of them is array code (test_backward_tile)."""
    return sum((bool(case.soft_cap), case.mask == "full", case.bias == "full"))


# float32 has several products for one.
OF_16_BITS = [case for case in CASES if case.dtype != "float32"]
IN_SHORT_RUN = max(OF_16_BITS, key=forms)


def run(call: cases.Call, capability: str = "8.0", processors: int = 108, **options: object) -> oracle.Results:
    """No races are looked for: CTAs add to the same dQ, and a warpgroup's threads are one to the interpreter."""
    family = kernel_families.mma(capability)
    return hopper_kernels.run(call, processors, family=family, detect_races=False, **options)


def assert_right(
    call: cases.Call, capability: str = "8.0", processors: int = 108, given: cases.Call | None = None
) -> None:
    """In each precision; what is `given` to the kernels may hold other numbers in padding."""
    run_in = functools.partial(run, call if given is None else given, capability, processors)
    hopper_kernels.assert_right(run_in, call, kernel_families.mma(capability))


def slow(*row: object):
    return pytest.param(*row, marks=cover(0))


@cover(rest=4)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == IN_SHORT_RUN else cover(0)) for case in CASES], ids=str
)
def test_right(case: Case):
    assert_right(cases.build(case))


@cover(every=2)
@pytest.mark.parametrize(
    "options", [dict(causal=True, sinks=True, heads=(2, 1)), slow(dict(lengths="both", segments="sorted"))], ids=str
)
def test_output_in_pairs(options: dict):
    """Heads are so wide that a warp holds half of the columns of its rows' output."""
    call = cases.build(Case("bfloat16", 70, 131, dims=(256, 256), **(dict(batch=()) | options)))
    oracle.assert_right(run(call), call)


@cover(0)
def test_bias_of_32_bits():
    """A bias of 32 bits comes from device memory, and loses no bit; one of 16 comes through shared memory."""
    call = cases.build(Case("bfloat16", 70, 131, heads=(2, 1), dims=(64, 64), bias="full", causal=True, batch=()))
    call = dataclasses.replace(call, bias=call.bias.astype(np.float32) * (1 + 2**-12))
    oracle.assert_right(run(call), call)


@cover(0)
@pytest.mark.parametrize(("queries", "keys"), [(640, 64), slow(64, 640)])
def test_long_sums_of_float32(queries: int, keys: int):
    """Where the matrix unit adds, what is below the last place is cut off: sums over many tiles must not drift."""
    call = cases.build(Case("float32", queries, keys, heads=(1, 1), dims=(64, 64), batch=()))
    oracle.assert_right(run(call, precision="highest"), call)


@cover(every=100, rest=2)
@pytest.mark.parametrize("case", OF_16_BITS[::2], ids=str)
def test_deterministic(case: Case):
    """By kernels of which every CTA owns what it sums; float32 has no others."""
    call = cases.build(case)
    oracle.assert_right(run(call, deterministic=True), call)


@cover(0, rest=6)
@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True, lengths="both", bias="keys", alibi=True, scale="traced", dropout=True, heads=(4, 2)),
        dict(mask="full", bias="full", segments="sorted", offset="end"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dim", "tile"), [(dim, tile) for dim, tiles in FUSED_TILES.items() for tile in tiles], ids=str
)
def test_fused_tiles(dim: int, tile: FusedTile, options: dict):
    """All that a search might choose on some GPU; numbers are added four at a time, or one by one."""
    call = cases.build(Case("bfloat16", 140, 150, dims=(dim, dim - 8), **(dict(heads=(2, 1), batch=()) | options)))
    key = TuningKey("mosaic_gpu_mma backward", (dim, dim - 8))
    with _tuning.trying({key: tile}) as trial:
        oracle.assert_right(run(call, "8.0" if tile.stages == 1 else "9.0"), call)
    assert key in trial.asked


SHORT = dict(dtype="float32", query_length=70, key_length=80)


@cover(0, rest=4)
@pytest.mark.parametrize("capability", ["8.0", "8.6"])
@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ((64, 64), dict(causal=True, offset="end")),
        ((128, 128), dict(window=(40, 10), lengths="both")),
        # Where there is least shared memory, dQ, dK and dV come from a kernel each, with tiles of 32.
        ((256, 256), dict(mask="full", bias="full")),
        ((256, 256), dict(bias="keys", dropout=True, segments="sorted")),
        # With tiles of 16, where six products are made of one on 8.0 alone.
        slow((64, 240), dict(SHORT, mask="full", bias="keys", dropout=True)),
        slow((150, 144), dict(SHORT, bias="full", mask="full", lengths="both")),
    ],
    ids=str,
)
def test_budgets(dims: tuple[int, int], options: dict, capability: str):
    """Tiles differ by how much shared memory there is."""
    given = dict(dtype="bfloat16") | options
    call = cases.build(Case(**dict(query_length=140, key_length=150, heads=(2, 1), dims=dims, batch=()) | given))
    assert_right(call, capability, given=with_nan_in_padding(call))


@cover(every=8, rest=2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("processors", "key_length"), [(1, 300), (108, 1100)])
@pytest.mark.parametrize("query_length", [1, 3])
def test_decoding(query_length: int, processors: int, key_length: int, dtype: str):
    """Heads packed into rows, keys in several parts, lengths for each sequence."""
    case = Case(dtype, query_length, key_length, heads=(4, 2), dims=(64, 64), lengths="keys", batch=(2,))
    assert_right(cases.of_forward(cases.build(case)), "8.0", processors)


@cover(0)
@pytest.mark.parametrize("options", [dict(causal=True, offset="end"), dict(bias="keys", lengths="keys")], ids=str)
def test_sums_of_head_groups(options: dict):
    """On a device with many multiprocessors, heads that share keys form several groups, whose dK and dV are summed."""
    call = cases.build(Case("bfloat16", 200, 100, heads=(8, 1), dims=(64, 64), batch=(), **options))
    oracle.assert_right(run(call), call)


@cover(0, rest=4)
@pytest.mark.parametrize(("dtype", "cap"), [("bfloat16", 1024.0), ("float16", 64.0)])
@pytest.mark.parametrize("steps", cases.STEPS)
def test_soft_cap_from_tile_to_tile(steps: str, dtype: str, cap: float):
    """What weights are relative to changes only where it must."""
    case = Case(dtype, 70, 390, heads=(1, 1), dims=(64, 64), batch=(), soft_cap=cap, mask="full", sinks=cap == 64)
    call = cases.of_forward(cases.with_steps(cases.build(case), steps))
    oracle.assert_right(run(call), call)


@cover(0, rest=3)
@pytest.mark.parametrize("values", cases.LARGE_BIASES)
def test_large_biases(values: str):
    call = cases.build(Case("bfloat16", 70, 200, heads=(1, 1), dims=(64, 64), batch=(), bias="keys"))
    call = cases.with_bias_of_index(call, cases.LARGE_BIASES[values])
    oracle.assert_right(run(call), call, by_lse=True)


@cover(every=3)
@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True, lengths="both", sinks=True),
        dict(bias="full", mask="full", segments="sorted"),
        dict(bias="keys", alibi=True, scale="traced", soft_cap=1.5, score_mod="indices"),
    ],
    ids=str,
)
def test_nothing_but_a_function_of_the_operands(options: dict):
    """`custom_partitioning`, through which every call goes on a device, takes no function that holds other arrays."""
    call = cases.build(Case("bfloat16", 131, 200, heads=(2, 1), dims=(64, 64), batch=(2,), **options))
    for closed in hopper_kernels.traced(call, family=kernel_families.mma("8.0")):
        assert not closed.consts
        assert not closed.effects


BASE = Case("bfloat16", 131, 128, heads=(2, 1), dims=(64, 64), batch=(2,))
TABLES = [
    (BASE._replace(causal=True, query_length=70), "three reads", "bfloat16", 108),
    (BASE._replace(heads=(4, 2), query_length=200, lengths="both"), "buckets", "float16", 1),
    (BASE._replace(dtype="float16", query_length=1, heads=(4, 2), key_length=700), "clipped distance", "float32", 108),
    (BASE._replace(mask="full", bias="full", dropout=True, soft_cap=1.5), "where seen", "float32", 108),
    (BASE._replace(dims=(256, 256), segments="sorted", sinks=True), "three reads", "float32", 108),
    (BASE._replace(dtype="float32", lengths="both", causal=True), "three reads", "float32", 1),
    # A CTA takes several blocks.
    (BASE._replace(dtype="float32", dims=(128, 128), batch=()), "buckets", "float32", 1),
]


@cover(rest=2)
@pytest.mark.parametrize("row", [TABLES[0], *(pytest.param(row, marks=cover(0)) for row in TABLES[1:])])
def test_tables(row):
    """That a score_mod reads by position, with their gradients; padding holds NaN, which must reach nothing."""
    case, kind, dtype, processors = row
    call = score_mod_tables.call(case, kind, dtype)
    assert_right(call, "8.6", processors, given=with_nan_in_padding(call))


@cover(0)
def test_forward_alone():
    case = Case("bfloat16", 131, 4000, heads=(2, 2), dims=(64, 64), batch=(), causal=True, offset="end")
    call = cases.of_forward(cases.build(case))
    oracle.assert_right(run(call), call)
