"""A `score_mod` that closes over arrays in the Hopper kernels: what is read of them, by which index, to what use."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import cases
import hopper_kernels
import jax
import jax.numpy as jnp
import kernel_families
import numpy as np
import oracle
import pytest
import score_mod_tables
from cases import Case
from equations import equations
from h200 import H200
from kernel_families import TWO_KERNELS
from lanes import Warpgroup
from on_hardware import with_nan_in_padding
from plain_attention import Call
from short_run import cover

import jflash
from jflash import _platform
from jflash._backends import mosaic_gpu, mosaic_gpu_mma
from jflash._backends.nvidia.threads.builder import THREADS, as_tree
from jflash._backends.nvidia.threads.table import diagonals, differences, totals
from jflash._backends.nvidia.tile.score_mod_reads import rest
from jflash._semantics import score_mod_reads
from jflash._semantics.score_mod import trace_score_mod
from jflash._semantics.spec import Residuals

NUMBERS = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
SEGMENT = np.arange(300, dtype=np.int32) // 50
SEEN = np.random.default_rng(1).random(300) < 0.8
draw = lambda *shape: np.random.default_rng(shape).standard_normal(shape).astype(np.float32)

closing = lambda t: lambda logit, b, h, q, k: logit + t[0, 0, k]
clipped = lambda query, key: jnp.clip(query - key + 32, 0, 63)
READS = {
    "of a scalar": (lambda t: lambda logit, b, h, q, k: logit * t[0, 0, 0], [False]),
    "of each head": (lambda t: lambda logit, b, h, q, k: logit * t[0, h, 1], [False]),
    "of each head and entry": (lambda t: lambda logit, b, h, q, k: logit + t[b & 1, h, 1], [False]),
    "by distance": (lambda t: lambda logit, b, h, q, k: logit + t[1, h, clipped(q, k)], [True]),
    "of a row, by key": (lambda t: lambda logit, b, h, q, k: logit * t[0][h][k & 63], [True]),
    "two": (lambda t: lambda logit, b, h, q, k: logit * t[0, h, 0] + t[1, 0, q & 63], [False, True]),
    "inside a function of JAX's": (
        lambda t: lambda logit, b, h, q, k: jax.jit(lambda t, h: t[0, h, 1])(t, h) * logit,
        [False],
    ),
}
"""What is made of an array, and which of its reads go by position."""
REFUSED = {
    "an index that depends on the logit": lambda t: lambda logit, *_: t[0, 0, (logit > 0).astype(int)],
    "an index that it read from another": lambda t: lambda logit, *_: logit + t[0, 0, t[0, 0, 0].astype(int)],
    "by its index: reduce_sum": lambda t: lambda logit, *_: logit + t.sum(),
    "by its index: gather": lambda t: lambda logit, b, h, q, k: logit + t.at[0, 0, q - k].get(mode="fill"),
    "more than 64 KiB": lambda t: closing(jnp.tile(t, (1, 1, 99))),
    "an array of uint8": lambda t: closing(t.astype(jnp.uint8)),
    "by its index: jit": lambda t: jax.jit(closing(t)),
    "a derivative of its own": lambda t: lambda logit, *_: jax.nn.relu(logit) + t[0, 0, 0],
}


def spec_of(score_mod):
    arrays = {name: jnp.zeros((2, 40, 2, 8), jnp.bfloat16) for name in ("query", "key", "value")}
    return hopper_kernels.canonical_arguments(**arrays, score_mod=score_mod)[0]


@pytest.mark.parametrize("kind", READS)
def test_reads(kind: str):
    """A number that positions have no part in is one for all of a tile."""
    made, by_position = READS[kind]
    spec = spec_of(made(jnp.asarray(NUMBERS)))
    assert mosaic_gpu.unsupported_call(spec) is None
    assert [read.by_position for read in score_mod_reads.smooth(spec)] == by_position
    assert len(score_mod_reads.tables(spec)) == any(by_position)


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason: str):
    refusal = mosaic_gpu.unsupported_call(spec_of(REFUSED[reason](jnp.asarray(NUMBERS))))
    assert refusal is not None
    assert reason in refusal


PYTHONS_NUMBERS = {
    "of positions": lambda logit, b, h, q, k: logit - 0.5 * (q - k),
    "chosen": lambda logit, b, h, q, k: logit + jnp.where(q > k, 0, -1000) + jnp.where(h > 0, 0.5, -jnp.inf),
    "in functions": lambda logit, b, h, q, k: logit * jnp.exp(-0.1 * jnp.clip(q - k, -9, 9)) + (q // 16 == k % 5) * 0.5,
    "in a loop": lambda logit, *_: jax.lax.fori_loop(0, 3, lambda _, x: 1.5 * x, logit),
}
WIDE = {
    "an array of float64": lambda logit, b, h, q, k: logit + jnp.asarray(NUMBERS, jnp.float64)[0, 0, k],
    "an array of int64": lambda logit, b, h, q, k: logit + jnp.asarray(NUMBERS, jnp.int64)[0, 0, k],
    "computes in float64": lambda logit, *_: logit / np.sqrt(64),
    "computes in int64": lambda logit, b, h, q, k: logit + ((q - k).astype(int) * 2**40 > 5),
    "in float64; x.astype(logit.dtype)": lambda logit, b, h, q, k: logit + jnp.where(q > k, 0.0, -1e300),
    "in int64; x.astype(logit.dtype)": lambda logit, b, h, q, k: logit + jnp.where(q > k, 0, 2**40),
}


@pytest.mark.parametrize("kind", [*PYTHONS_NUMBERS, *READS])
def test_pythons_numbers_have_the_logits_bits(kind: str):
    """With `jax_enable_x64` too, on every backend."""
    score_mod = PYTHONS_NUMBERS[kind] if kind in PYTHONS_NUMBERS else READS[kind][0](jnp.asarray(NUMBERS))
    want = spec_of(score_mod)
    with jax.enable_x64(True):
        got = spec_of(score_mod)
        assert mosaic_gpu.unsupported_call(got) is None
    assert got.score_mod.program == want.score_mod.program


@pytest.mark.parametrize("reason", WIDE)
def test_other_numbers_of_64_bits_are_refused(reason: str):
    """Numbers of 64 bits are neither rounded nor cut off."""
    with jax.enable_x64(True):
        score_mod = WIDE[reason]
        spec = spec_of(lambda logit, *indices: score_mod(logit, *indices).astype(logit.dtype))
        assert reason in mosaic_gpu.unsupported_call(spec)
        assert mosaic_gpu_mma.unsupported_call(spec) == mosaic_gpu.unsupported_call(spec)


def test_sums_in_one_order():
    """Sums have one order, but for the gradients of tables, if they are asked for."""
    table = jnp.asarray(NUMBERS)
    for backend in (mosaic_gpu, mosaic_gpu_mma):
        refusal = lambda kind, backend=backend, **asked: backend.unsupported_call(
            dataclasses.replace(spec_of(READS[kind][0](table)), deterministic=True, **asked)
        )
        assert "in any order" in refusal("by distance")
        assert refusal("by distance", undifferentiated=frozenset({"score_mod_arrays"})) is None
        assert refusal("of each head") is None


def test_the_rest_is_the_score_mod():
    """With what it reads given, as with the arrays."""
    score_mod, arrays = trace_score_mod(READS["two"][0](jnp.asarray(NUMBERS)), np.dtype(np.float32))
    logits, (query, key) = jnp.asarray(draw(5, 7)), (jnp.asarray(index) for index in np.indices((5, 7), np.int32))
    batch, head = jnp.int32(1), jnp.int32(2)
    spec = dataclasses.replace(spec_of(lambda logit, *_: logit * arrays[0][0, 0, 0]), score_mod=score_mod)
    reads = NUMBERS[0, 2, 0], NUMBERS[1, 0, np.asarray(query) & 63]
    tile = SimpleNamespace(key_minus_query=key - query)
    got = rest(spec, tile).score_mod(logits, batch, head, query, key, reads)
    want = logits * NUMBERS[0, 2, 0] + NUMBERS[1, 0, np.asarray(query) & 63]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_differences_are_the_tiles_own():
    """What a score_mod makes of key - query, or query - key, is made of the tile's; and of the indices what is not."""
    logits, (query, key) = jnp.asarray(draw(5, 7)), (jnp.asarray(index) for index in np.indices((5, 7), np.int32))
    spec, marked = spec_of(lambda logit, b, h, q, k: logit + (k - q) - 1000 * (q - k) + 0 * (k + q)), 100 + key - query
    got = rest(spec, SimpleNamespace(key_minus_query=marked)).score_mod(
        logits, jnp.int32(0), jnp.int32(0), query, key, ()
    )
    np.testing.assert_allclose(got, logits + 1001 * marked, rtol=1e-6)


def with_score_mod(case: Case, score_mod, *arrays: np.ndarray) -> Call:
    return dataclasses.replace(cases.build(case), score_mod=score_mod, score_mod_arrays=arrays)


def by_head(factor, added):
    return lambda logit, b, h, q, k: logit * factor[()] + added[b & 1, h]


def capped_by_head(caps):
    return lambda logit, b, h, q, k: caps[h] * jnp.tanh(logit / 1.5)


def of_segments(added):
    def score_mod(logit, b, h, q, k):
        segment = jnp.asarray(SEGMENT)
        seen = (segment[q] == segment[k]) & jnp.asarray(SEEN)[k]
        return jnp.where(seen, logit + added[h], -jnp.inf)

    return score_mod


FUSED = Case("bfloat16", 131, 128, heads=(2, 1), dims=(64, 64), batch=(2,))
ROWS = [
    (FUSED, by_head, (draw(), draw(2, 2)), {}),
    (
        FUSED._replace(key_length=200, causal=True),
        by_head,
        (draw(), draw(2, 2)),
        dict(family=TWO_KERNELS, deterministic=True),
    ),
    (FUSED._replace(dtype="float32", bias="keys", lengths="both"), by_head, (draw(), draw(2, 2)), {}),
    (FUSED._replace(query_length=40, segments="sorted"), of_segments, (draw(2),), {}),
    (FUSED._replace(dims=(320, 288), causal=True, key_length=140), by_head, (draw(), draw(2, 2)), {}),
    (FUSED._replace(dtype="float32", causal=True), capped_by_head, (draw(2),), {}),
]


@cover(0, rest=3)
@pytest.mark.parametrize("row", [ROWS[0], *(pytest.param(row, marks=cover(0)) for row in ROWS[1:])])
def test_numbers_of_heads(row):
    """With their gradients, and in both modes."""
    case, score_mod, arrays, options = row
    call = with_score_mod(case, score_mod, *arrays)
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call, **options), call)
    hopper_kernels.assert_tangents_right(call, oracle.draw_tangents(call))


NARROW = FUSED._replace(key_length=100)
TWO_KERNELS = FUSED._replace(dims=(192, 128))
TABLES = [
    (NARROW._replace(causal=True, query_length=70), "three reads", "bfloat16", {}),
    (FUSED._replace(query_length=1, heads=(4, 2), key_length=700), "clipped distance", "float32", {}),
    (TWO_KERNELS._replace(heads=(4, 2), query_length=200, lengths="both"), "buckets", "float16", {}),
    # All CTAs add to one sum, which the interpreter would take for a race.
    (FUSED._replace(heads=(4, 2), key_length=200, lengths="both"), "buckets", "float16", dict(processors=1)),
    (FUSED._replace(dtype="float32", window=(40, 10), offset="each", lengths="both"), "three reads", "float32", {}),
    (TWO_KERNELS._replace(bias="full", sinks=True), "clipped distance", "bfloat16", {}),
    (FUSED._replace(dims=(257, 512), causal=True), "buckets", "float32", {}),
    (NARROW._replace(mask="full", dropout=True, soft_cap=1.5), "where seen", "float32", {}),
    (NARROW._replace(segments="sorted", alibi=True, scale="traced", bias="keys"), "where seen", "bfloat16", {}),
]


@cover(rest=4)
@pytest.mark.parametrize("row", [TABLES[0], *(pytest.param(row, marks=cover(0)) for row in TABLES[1:])])
def test_tables(row):
    """Read by position, with their gradients; padding holds NaN, which must reach nothing."""
    case, kind, dtype, options = row
    call = score_mod_tables.call(case, kind, dtype)
    planted, races = with_nan_in_padding(call), case.key_length <= 128
    run = functools.partial(hopper_kernels.run, planted, detect_races=races, **options)
    hopper_kernels.assert_right(run, call)
    hopper_kernels.assert_tangents_right(call, oracle.draw_tangents(call))


@cover(0)
def test_a_table_for_each_batch_entry():
    """As from `jax.vmap`: their gradients are not added up."""
    call = score_mod_tables.call(NARROW, "clipped distance")
    (table,), results = call.score_mod_arrays, []
    for entry in range(2):
        alone = dataclasses.replace(
            call,
            **{name: getattr(call, name)[entry : entry + 1] for name in ("query", "key", "value", "d_out", "d_lse")},
            score_mod_arrays=(table * (1 + entry),),
        )
        results.append(hopper_kernels.run(alone).gradients["score_mod_arrays"][0])
    spec, operands = hopper_kernels.canonical(call)
    operands = operands._replace(score_mod_arrays=(jnp.stack([table, 2 * table]),))
    forward, backward = hopper_kernels.functions()
    out, lse = forward(spec, operands)
    residuals = Residuals(out, lse, jnp.asarray(call.d_out), jnp.asarray(call.d_lse).transpose(0, 2, 1))
    (got,) = backward(spec, operands, residuals).score_mod_arrays
    np.testing.assert_allclose(got, jnp.stack(results), rtol=1e-5, atol=1e-5)


@cover(1)
@pytest.mark.parametrize("dims", [(64, 64), (256, 256), (512, 512)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lengths", [(100, 100), (4096, 4096), (4096, 77)], ids=str)
def test_one_kernel_sums_a_table(lengths: tuple[int, int], dtype: str, dims: tuple[int, int]):
    """One kernel of a backward makes sums, about as many as CTAs run at a time, and no more than there are blocks."""
    case = NARROW._replace(dtype=dtype, query_length=lengths[0], key_length=lengths[1], dims=dims, batch=(3,))
    spec, _ = hopper_kernels.canonical(score_mod_tables.call(case, "clipped distance"))
    for family in (kernel_families.HOPPER, kernel_families.mma("8.0")):
        if family.backend.unsupported_call(spec) is not None:
            continue
        plans = [kernel.plan for kernel in family.plans(spec, 132)[1]]
        sums = [plan.tables for plan in plans if getattr(plan, "tables", None) and plan.tables.reads]
        assert len(sums) == 1
        assert 0 < sums[0].of_entry <= min(44, spec.heads * sums[0].blocks)
        undifferentiated = dataclasses.replace(spec, undifferentiated=frozenset({"score_mod_arrays"}))
        others = [getattr(kernel.plan, "tables", None) for kernel in family.plans(undifferentiated, 132)[1]]
        assert not any(tables.reads for tables in others if tables is not None)


def test_a_threads_sums():
    """All of a thread's elements are added once; neighbours with one index by one addition."""
    o, eights = Warpgroup(np.dtype(np.float32), 0, np.zeros(0)), 8
    order = diagonals(eights)
    assert sorted(order) == list(itertools.product(range(eights), range(2), range(2)))
    row, column = lambda half: o.row.astype(int) + 8 * half, lambda eight, k: 8 * eight + 2 * o.pair.astype(int) + k
    values = [np.random.default_rng(place).standard_normal(THREADS) for place in range(len(order))]
    values[3][:] = 0
    indices = {
        "distance": ([row(half) - column(eight, k) + 64 for eight, half, k in order], 2 * (eights + 1)),
        "one": ([np.full(THREADS, 5)] * len(order), 1),
        "all but one": ([*[np.full(THREADS, 5)] * (len(order) - 1), np.full(THREADS, 6)], 2),
        "drawn": (list(np.random.default_rng(0).integers(0, 96, (len(order), THREADS))), len(order)),
    }
    for index, most in indices.values():
        got, want, count = np.zeros(96), np.zeros(96), np.zeros(THREADS, int)
        for place, total, wanted in totals(o, index, values):
            np.add.at(got, place[wanted], total[wanted])
            count += wanted
        np.add.at(want, np.asarray(index), np.asarray(values))
        np.testing.assert_allclose(got, want, atol=1e-12)
        assert count.max() <= most
        np.testing.assert_array_equal(differences(o, index) == 0, np.ptp(np.asarray(index), axis=0) == 0)
    np.testing.assert_allclose(as_tree(o.arith.addf, values[1:]), np.sum(values[1:], axis=0), atol=1e-12)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_gpu_mma"])
def test_gradient_beside_a_mask_mod_that_reads(implementation: str, monkeypatch: pytest.MonkeyPatch):
    """Traced with a GPU's own operations, of which a read has no derivative; the interpreter's are plain array code."""
    monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"cuda": H200})
    ids = jnp.arange(256) // 100

    def loss(query: jax.Array, bias: jax.Array) -> jax.Array:
        mask_mod = lambda b, h, q, k: ids[q] == ids[k]
        options = dict(bias=bias, score_mod=lambda logit, *_: 2 * logit, mask_mod=mask_mod)
        out = jflash.attention(query, query, query, **options, implementation=implementation)
        return out.astype(jnp.float32).sum()

    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 256, 2, 64), (1, 2, 1, 256)))
    made = [equation.primitive.name for equation in equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arrays).jaxpr)]
    assert "mpmd_map" in made
