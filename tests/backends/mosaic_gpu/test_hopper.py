"""The Hopper kernels on a Hopper: the same questions as everywhere, over the product of what they take."""

import dataclasses
import functools
import itertools

import cases
import hopper_kernels
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import score_mod_tables
from cases import Case
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernel_families import plan_of
from kernel_values import ON_HARDWARE, drawn
from on_hardware import poison, served_by, with_nan_in_padding
from short_run import cover

import jflash
from jflash import _platform, _tuning
from jflash._backends import mosaic_gpu
from jflash._backends.mosaic_gpu import plan
from jflash._backends.mosaic_gpu.backward_fused import FusedPlan
from jflash._backends.mosaic_gpu.backward_short import ShortPlan
from jflash._backends.mosaic_gpu.dq_accumulator import DqAccumulator, RoundedByLast, RoundedLater
from jflash._backends.mosaic_gpu.tiles import RowTiles

pytestmark = pytest.mark.gpu

VALUES = {**ON_HARDWARE, "dims": (*ON_HARDWARE["dims"], (257, 64), (64, 512), (320, 320), (512, 512), (576, 512))}


def hopper() -> bool:
    return _platform.current().compute_capability == "9.0"


# Elsewhere all of them would be skipped with one reason: one of them says it.
PRODUCT = list(cases.product(VALUES, 2)) if hopper() else [{}]
FROM_REGISTERS = ("bfloat16", (64, 64)), ("float16", (40, 24)), ("bfloat16", (80, 80)), ("float32", (128, 100))
"""Where dQ is added from registers, if logits are products times a number."""
WIDEST = (512, 512), (576, 576)
"""The most columns that tiles of 128 keys have room for, and the most of all."""
CASES = [
    *(Case(**row) for row in PRODUCT),
    *(
        Case(dtype, 330, 280, heads=(4, 2), dims=dims, batch=(2,), **options)
        for dtype, dims in (FROM_REGISTERS if hopper() else ())
        for options in ({}, dict(causal=True, lengths="both"), dict(window=(40, 90), segments="sorted"))
    ),
    # With blocks in pairs, more than there are multiprocessors, or not, and limits that are known or not.
    *(
        Case("bfloat16", 330, 280, heads=(8, 2), dims=dims, batch=(4,), **options)
        for dims in (WIDEST if hopper() else ())
        for options in ({}, dict(causal=True), dict(window=(100, 0)), dict(causal=True, lengths="both"))
    ),
    *([Case("float32", 330, 280, heads=(8, 2), dims=(256, 256), batch=(4,), causal=True)] if hopper() else []),
    # Some columns of the queries stay in registers.
    *(Case("bfloat16", 520, 640, dims=dims) for dims in [(192, 128), (256, 256)]),
    *(pytest.param(drawn(VALUES, seed), marks=cover(0)) for seed in range(400 if hopper() else 0)),
]
# Wide in three pieces the first, which take no soft cap; in two the others.
FLOAT32 = {**VALUES, "dtype": ("float32",), "dims": ((192, 160), (256, 256), (480, 64)), "soft_cap": (None,)}
FLOAT32_CASES = [Case(**row) for row in ([*cases.product(FLOAT32, 2)][::5] if hopper() else [{}])]


@pytest.fixture(autouse=True)
def _on_hopper():
    served_by(mosaic_gpu)


def attention(*args, **kwargs):
    """The kernels, after memory that the allocator may hand out again was filled with NaN."""
    return jflash.attention(*args, implementation="mosaic_gpu", **kwargs)


def assert_exact(case: Case):
    """Padding holds NaN, which must reach nothing."""
    call = cases.build(case)
    poison()
    planted = with_nan_in_padding(call)
    run = lambda **options: oracle.run(in_precision(**options), planted)
    hopper_kernels.assert_right(run, call)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case):
    assert_exact(case)


@pytest.mark.parametrize("case", FLOAT32_CASES, ids=str)
def test_wide_heads_of_float32(case: Case):
    assert_exact(case)


@pytest.mark.parametrize("dims", [(192, 192), (256, 256), (512, 64)], ids=str)
@pytest.mark.parametrize("options", [dict(causal=True), dict(lengths="both", dropout=True)], ids=str)
def test_long_sums_of_wide_heads_of_float32(dims: tuple[int, int], options: dict):
    assert_exact(Case("float32", 1100, 2300, heads=(4, 2), dims=dims, batch=(2,), **options))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tangents(case: Case):
    """Along all that may move; padding holds NaN, of the tangents too."""
    call = cases.build(case)
    along = oracle.draw_tangents(call)
    poison()
    planted = with_nan_in_padding(call)
    moving = dataclasses.replace(call, **{name: along[name] for name in ("query", "key", "value")})
    nan = {name: getattr(with_nan_in_padding(moving), name) for name in ("query", "key", "value")}
    spec, _ = hopper_kernels.canonical(call)
    reason = mosaic_gpu.unsupported_call(spec)
    if reason is not None:
        pytest.skip(f"mosaic_gpu: {reason}")
    got = oracle.run_tangents(attention, planted, along | nan)
    # Where there is no room for a tangent, it is xla's, which takes TF32 for float32.
    by_xla = mosaic_gpu.unsupported_tangent(spec) is not None
    oracle.assert_tangents_right(got, call, along, as_tf32=case.dtype == "float32", in_tf32=by_xla)


@functools.cache
def in_precision(**options):
    """One function for each precision, whose compilation the next such call finds."""
    return functools.partial(attention, **options)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (512, 512)], ids=str)
@pytest.mark.parametrize("options", [{}, dict(bias="full"), dict(bias="keys", soft_cap=1.5), dict(sinks=True)], ids=str)
def test_deterministic(dims, options):
    """The same bits on every run, with enough blocks that their order varies."""
    case = Case("bfloat16", 1024, 1100, heads=(8, 2), dims=dims, batch=(3,), causal=True, **options)
    call = cases.build(case)
    deterministic = lambda *args, **kwargs: attention(*args, deterministic=True, **kwargs)
    first, *others = [jax.tree.map(np.asarray, oracle.run(deterministic, call)) for _ in range(4)]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True, sinks=True),
        dict(window=(150, 0)),
        dict(window=(40, 90), offset="each"),
        dict(lengths="both", causal=True),
        dict(segments="sorted"),
        dict(bias="full", mask="queries"),
        dict(mask="full", alibi=True),
    ],
    ids=str,
)
def test_rounds(dims, options):
    """Short rows, enough of them for a CTA to take several blocks of queries."""
    case = Case("bfloat16", 400, 150, heads=(16, 4), dims=dims, batch=(25,), **options)
    call = cases.build(case)
    poison()
    oracle.assert_right(oracle.run(attention, with_nan_in_padding(call)), call)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (72, 72), (128, 128)], ids=str)
@pytest.mark.parametrize(
    ("queries", "kind", "batch", "heads"),
    [
        # As many heads as leave multiprocessors idle if each has a CTA.
        *((130, RoundedByLast, *items) for items in ((108, (2, 2)), (108, (4, 2)), (12, (18, 18)), (12, (36, 18)))),
        *((600, RoundedLater, *items) for items in ((198, (2, 2)), (198, (4, 2)), (22, (18, 18)), (22, (36, 18)))),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(90, 20), lengths="both")], ids=str)
def test_sums_of_few_heads_at_a_time(
    dims: tuple[int, int], queries: int, kind: type[DqAccumulator], batch: int, heads: tuple[int, int], options: dict
):
    """Short sequences, enough of them that heads and batch entries take each other's place in the sums of dQ: in turns
    of some entries of a head, and of several heads."""
    call = cases.build(Case("bfloat16", queries, 130, heads=heads, dims=dims, batch=(batch,), **options))
    fused = plan_of(plan.plan_backward(hopper_kernels.canonical(call)[0], _platform.current().processors), FusedPlan)
    assert fused is not None
    assert fused.dq is kind
    assert (fused.schedule.items < batch) == (batch > 100)
    assert kind.waves_with_room(fused.schedule) < fused.schedule.waves
    poison()
    oracle.assert_right(oracle.run(attention, with_nan_in_padding(call)), call)


SHORT = [
    ((130, 200), 56, (4, 4), (64, 64)),
    ((70, 150), 56, (8, 4), (64, 40)),
    ((500, 390), 28, (4, 4), (64, 64)),
    ((140, 150), 56, (4, 4), (96, 96)),
    ((140, 150), 56, (4, 4), (72, 72)),
]
SHORT_OPTIONS = [
    {},
    dict(causal=True, offset="end"),
    dict(window=(90, 20), lengths="both"),
    dict(segments="sorted", causal=True),
    # Beside their tiles there is no room for 500 queries.
    dict(bias="full", mask="full"),
    dict(bias="keys", alibi=True, soft_cap=1.5),
    dict(dropout=True, score_mod="indices"),
    dict(dtype="float16", causal=True),
]


@pytest.mark.parametrize(
    ("lengths", "batch", "heads", "dims", "options"),
    [
        (lengths, *rest, options)
        for (lengths, *rest), options in itertools.product(SHORT, SHORT_OPTIONS)
        if not (lengths[0] == 500 and options.get("bias") == "full")
    ],
    ids=str,
)
def test_short_backward(
    lengths: tuple[int, int], batch: int, heads: tuple[int, int], dims: tuple[int, int], options: dict
):
    """A CTA takes several heads, where there are 224; the same bits on every run."""
    given = dict(dtype="bfloat16") | options
    call = cases.build(
        Case(query_length=lengths[0], key_length=lengths[1], heads=heads, dims=dims, batch=(batch,), **given)
    )
    kernels = plan.plan_backward(hopper_kernels.canonical(call)[0], _platform.current().processors)
    assert plan_of(kernels, ShortPlan) is not None
    poison()
    first, second = (oracle.run(attention, with_nan_in_padding(call)) for _ in range(2))
    oracle.assert_right(first, call)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("kind", score_mod_tables.KINDS)
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [((64, 64), "float32"), ((128, 128), "bfloat16"), ((256, 256), "float16"), ((512, 512), "float32")],
    ids=str,
)
@pytest.mark.parametrize("options", score_mod_tables.ON_HARDWARE, ids=str)
def test_tables(kind: str, dims: tuple[int, int], dtype: str, options: dict):
    """Tables that a score_mod reads by position, and their gradients, in a dtype of their own."""
    case = Case("bfloat16", 523, 640, (4, 2), dims, (3,))._replace(**options)
    call = score_mod_tables.call(case, kind, dtype)
    poison()
    oracle.assert_right(oracle.run(attention, with_nan_in_padding(call)), call)


@pytest.mark.parametrize("query_length", [1, 4])
@pytest.mark.parametrize("heads", [(16, 1), (128, 1), (24, 2)], ids=str)
@pytest.mark.parametrize(("dtype", "dims"), [("bfloat16", (576, 512)), ("float32", (256, 256))], ids=str)
def test_decoding_of_wide_heads(dtype: str, dims: tuple[int, int], heads: tuple[int, int], query_length: int):
    """Heads packed into rows, keys in splits."""
    assert_exact(Case(dtype, query_length, 2500, heads, dims, (3,), causal=True, offset="end", lengths="keys"))


@pytest.mark.parametrize(
    ("dim", "tile"),
    [
        *[(64, RowTiles(3, 128, 2)), (64, RowTiles(4, 64, 3)), (64, RowTiles(4, 64, 4))],
        *[(80, RowTiles(3, 112, 2)), (96, RowTiles(3, 96, 2)), (112, RowTiles(3, 96, 2))],
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True, sinks=True),
        dict(window=(150, 0), lengths="both"),
        dict(causal=True, lengths="both", mask="keys"),
        dict(segments="sorted"),
    ],
    ids=str,
)
def test_tiles_of_more_warpgroups(dim: int, tile: RowTiles, options: dict):
    """Other tests have too few blocks for these tiles."""
    length = 390 + tile.warpgroups + tile.stages
    # 8 divides the keys, or values in panels would want tiles of 64 of them.
    call = cases.build(Case("bfloat16", length, 504, (6, 3), (dim, dim), (3,), **options))
    poison()
    with _tuning.trying({_tuning.TuningKey("mosaic_gpu forward", (dim, dim, 0, "long")): tile}) as trial:
        oracle.assert_right(oracle.run(attention, with_nan_in_padding(call)), call)
    assert trial.asked


@pytest.mark.parametrize("large", [128, 192])
def test_large_biases_in_a_window(large: int):
    """A tile's biases may be large in some part of it."""
    call = cases.large_biases_in_a_window(large)
    oracle.assert_right(oracle.run(attention, call), call)


@pytest.mark.parametrize("scale", [2.0**-40, 1e-18, 0.3, 1.0, 2.0])
def test_bias_of_keys_by_scale(scale: float):
    """The forward divides it by the scale."""
    call = cases.with_scale(cases.build(Case("bfloat16", 700, 600, dims=(64, 128), bias="keys")), scale)
    oracle.assert_right(oracle.run(attention, call), call)


@pytest.mark.parametrize("seed", range(10))
@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(data=hypothesis.strategies.data())
def test_any_lengths(seed: int, data):
    """Lengths and offsets that no list thought of."""
    length = hypothesis.strategies.integers(1, 700)
    case = drawn(VALUES, 10_000 + seed)._replace(
        query_length=data.draw(length), key_length=data.draw(length), batch=(2,)
    )
    call = cases.build(case)
    hopper_kernels.assert_right(lambda **options: oracle.run(in_precision(**options), call), call)


def over_devices(queries: PartitionSpec, keys: PartitionSpec, strategy: str | None = None, **operands):
    """Queries, and keys and values, split over all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    for name, spec in (("query", queries), ("key", keys), ("value", keys)):
        operands[name] = jax.lax.with_sharding_constraint(operands[name], NamedSharding(mesh, spec))
    return attention(**operands, sequence_strategy=strategy)


WHOLE = PartitionSpec()
BATCH, SEQUENCE, HEADS = (PartitionSpec(*[None] * axis, "x") for axis in range(3))
SPLITS = {
    "batch": (BATCH, BATCH),
    "heads": (HEADS, HEADS),
    **{strategy: (SEQUENCE, SEQUENCE, strategy) for strategy in ("ring", "all_to_all", "gather")},
    "queries": (SEQUENCE, WHOLE),
    "keys": (WHOLE, SEQUENCE),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True, soft_cap=40.0),
        dict(causal=True, lengths="both", sinks=True),
        dict(bias="full", mask="full", scale="traced"),
        dict(bias="keys", alibi=True, segments="sorted"),
        dict(score_mod="indices", window=40, offset="each"),
    ],
    ids=str,
)
def test_several_devices(options: dict, split: str):
    if jax.device_count() == 1:
        pytest.skip("One device.")
    call = cases.build(Case("bfloat16", 304, 400, (8, 4), (64, 64), (4,), **options))
    oracle.assert_right(oracle.run(functools.partial(over_devices, *SPLITS[split]), call), call)


def mapped(query, key, value, **options):
    return jax.vmap(functools.partial(attention, **options))(query, key, value)


def exported(query, key, value, **options):
    """By way of bytes, with the gradient."""
    arrays = query, key, value
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    stored = jax.export.export(jax.jit(functools.partial(attention, **options)))(*shapes).serialize(vjp_order=1)
    return jax.export.deserialize(stored).call(*arrays)


def rematerialized(query, key, value, **options):
    return jax.checkpoint(functools.partial(attention, **options))(query, key, value)


@pytest.mark.parametrize("transformed", [mapped, exported, rematerialized])
@pytest.mark.parametrize("options", [{}, dict(causal=True, soft_cap=40.0), dict(window=40)], ids=str)
def test_transformations(options: dict, transformed):
    call = cases.build(Case("bfloat16", 300, 400, (4, 2), (128, 128), (2, 3), **options))
    oracle.assert_right(oracle.run(transformed, call), call)


def test_is_the_default():
    query = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    assert jflash.explain(query, query, query).startswith("mosaic_gpu serves")
    assert jflash.explain(*[query.astype(jnp.float32)] * 3).startswith("mosaic_gpu serves")
