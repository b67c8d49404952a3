"""The Hopper kernels with a paged cache, in Pallas' interpreter: right, free of races, padding without effect."""

import dataclasses
from typing import Any

import cases
import hopper_kernels
import numpy as np
import oracle
import paged
import pytest
from cases import Case
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_families import HOPPER
from short_run import cover

from jflash._backends import mosaic_gpu
from jflash._backends.mosaic_gpu import plan
from jflash._backends.nvidia import deal

DECODING = Case("bfloat16", 1, 300, heads=(4, 2), dims=(64, 64), batch=(3,))
PREFILL = DECODING._replace(query_length=140, heads=(1, 1), causal=True, offset="each")
SEVERAL = DECODING._replace(query_length=3, causal=True, offset="each")
CASES: dict[str, tuple[Case, int, dict[str, Any]]] = {
    "interleaved": (SEVERAL, 16, dict(interleaved=True)),
    "pages larger than a tile": (DECODING, 256, {}),
    "pages of 8": (DECODING, 8, {}),
    "pages of 192, panels": (DECODING._replace(dims=(40, 24), dtype="float16"), 192, {}),
    "window": (SEVERAL._replace(window=(50, 0), causal=False), 64, {}),
    "prefill": (PREFILL, 32, {}),
    "prefill, wide heads": (PREFILL._replace(query_length=70, dims=(256, 128)), 128, {}),
    "cap, alibi, sinks": (SEVERAL._replace(soft_cap=1.5, alibi=True, sinks=True), 16, {}),
    "bias and mask": (SEVERAL._replace(key_length=192, heads=(2, 1), bias="full", mask="full", batch=(2,)), 16, {}),
    "score_mod, bias of keys": (SEVERAL._replace(key_length=384, score_mod="indices", bias="keys"), 128, {}),
    "segments, dropout": (PREFILL._replace(query_length=20, key_length=304, segments="sorted", dropout=True), 8, {}),
    "latent": (DECODING._replace(key_length=100, heads=(4, 1), dims=(576, 512)), 16, {}),
    "wide heads": (SEVERAL._replace(key_length=140, dims=(320, 320)), 64, dict(interleaved=True)),
    "both lengths": (PREFILL._replace(query_length=70, lengths="both"), 16, dict(interleaved=True)),
}


def slow(*names: str) -> list[Any]:
    return [pytest.param(*row, id=name, marks=cover(0) if name in names else ()) for name, row in CASES.items()]


@cover(rest=2)
@pytest.mark.parametrize(("case", "page_size", "options"), slow(*list(CASES)[2:]))
def test_exact(case: Case, page_size: int, options: dict[str, Any]):
    """In shuffled pages, with lengths from 0 on, garbage in the table and NaN in pages past each."""
    call = paged.with_lengths(cases.build(case))
    oracle.assert_right(hopper_kernels.run(call, **paged.paginate(call, page_size, **options)), call)


CONVERTED: dict[str, tuple[Case, int, dict[str, Any], str | None]] = {
    "int8, scales of pages": (SEVERAL._replace(dims=(128, 64)), 16, dict(dtype="int8"), "pages"),
    "float8, a scale for each head, panels": (
        PREFILL._replace(query_length=131, heads=(4, 2), dims=(128, 64)),
        32,
        dict(dtype="float8_e4m3fn"),
        "heads",
    ),
    "float8 of a larger range, float16": (
        DECODING._replace(key_length=700, dtype="float16", dims=(32, 96)),
        64,
        dict(dtype="float8_e5m2"),
        None,
    ),
    "int8, interleaved, bias of keys": (
        SEVERAL._replace(key_length=384, bias="keys"),
        128,
        dict(dtype="int8", interleaved=True),
        None,
    ),
    "float16, a scale for each page, wide": (
        SEVERAL._replace(query_length=17, heads=(8, 2), dims=(256, 256), batch=(1,), key_length=200, dtype="float16"),
        64,
        {},
        "pages",
    ),
}


@cover(2)
@pytest.mark.parametrize(("case", "page_size", "options", "scales"), CONVERTED.values(), ids=CONVERTED)
def test_converted(case: Case, page_size: int, options: dict[str, Any], scales: str | None):
    """Caches of 8 bits, or with scales, become numbers of the query's dtype by the warpgroups that copy."""
    call = paged.with_lengths(cases.build(case))
    if "dtype" in options:
        call = paged.of_8_bits(call, options["dtype"])
    arguments = paged.paginate(call, page_size, **options)
    numbers, pages = np.random.default_rng(0), arguments["key"].shape[0]
    shape = {"pages": (pages, case.heads[1]), "heads": (1, case.heads[1])}
    if scales is not None:
        draw = lambda: numbers.uniform(0.2, 2, shape[scales]).astype(np.float32)
        arguments |= dict(k_scale=draw(), v_scale=draw())
    paged.assert_scaled_right(hopper_kernels.run(call, **arguments), call, arguments)


@cover(0)
def test_mask_mod():
    """A list of tiles, which begin where pages do."""
    call = dataclasses.replace(cases.build(PREFILL), mask_mod=lambda b, h, q, k: ((k // 64 + b) % 2 == 0) | (k == q))
    call = paged.with_lengths(call)
    oracle.assert_right(hopper_kernels.run(call, **paged.paginate(call, 16)), call)


@cover(0)
@pytest.mark.parametrize(
    ("case", "page_size"),
    [
        (DECODING, 16),
        (PREFILL._replace(offset="end"), 128),
        (DECODING._replace(dims=(288, 272)), 16),
        (PREFILL._replace(offset="end", query_length=70, dims=(272, 272)), 64),
    ],
    ids=["decoding", "prefill", "decoding, wide heads", "prefill, wide heads"],
)
def test_pieces(case: Case, page_size: int):
    """Keys of an entry that several CTAs share, of which one has the end; another entry has a single key.

    The first of the blocks of queries lacks rows.
    """
    call = paged.with_lengths(cases.build(case._replace(key_length=1100, batch=(2,))))
    call = dataclasses.replace(call, key_value_seq_lengths=np.array([1, 900], np.int32))
    arguments = paged.paginate(call, page_size)
    spec, operands = hopper_kernels.canonical(call, **arguments)
    forward = plan.plan_forward(spec, 132).plan
    ops = HOPPER.interpreter(plgpu.InterpretGPUParams())
    assert deal.deal(spec, operands, forward.visits, forward.shares, ops)[forward.shares.items, 3] > 1
    oracle.assert_right(hopper_kernels.run(call, **arguments), call)


@cover(0)
def test_one_cache_for_each_entry():
    """As `jax.vmap` over the pages makes of them."""
    call = paged.with_lengths(cases.build(DECODING._replace(batch=(2,), key_length=140)))
    spec, operands = hopper_kernels.canonical(call, **paged.paginate(call, 16))
    other = lambda cache: np.concatenate([cache, np.roll(cache, 16, axis=1)])
    pages = operands.key.shape[1] // 16
    operands = operands._replace(
        key=other(operands.key),
        value=other(operands.value),
        page_table=np.array(operands.page_table) + np.array([[0], [1]], np.int32),
    )
    operands = operands._replace(page_table=operands.page_table % pages)
    ops = HOPPER.interpreter(plgpu.InterpretGPUParams(detect_races=True))
    out, lse = HOPPER.call.forward(plan.plan_forward(spec.resized(operands), 132), operands, ops)
    oracle.assert_right(oracle.Results(out, lse.swapaxes(1, 2), {}), call)


@pytest.mark.parametrize(
    ("case", "page_size", "options", "reason"),
    [
        (DECODING, 12, {}, "pages of 8, 16 or 32 keys, or of a multiple of 64. Got pages of 12."),
        (DECODING, 4, {}, "Got pages of 4."),
        (DECODING, 96, {}, "Got pages of 96."),
        (DECODING._replace(dtype="float32"), 16, {}, "paged caches of 16 bits"),
        (
            DECODING._replace(dims=(48, 64)),
            16,
            dict(dtype="int8"),
            "it converts paged caches where 32 divides H and D. Got H=48 and D=64.",
        ),
        (DECODING._replace(dims=(320, 320)), 64, dict(dtype="int8"), "of heads as wide as H=320 and D=320."),
        (DECODING._replace(dims=(60, 64)), 16, {}, "so 8 must divide H and D. Got H=60 and D=64."),
        (DECODING._replace(dims=(40, 40)), 16, dict(interleaved=True), "interleaved pages in sixteens. Got H=40."),
        (
            DECODING._replace(dims=(136, 40), query_length=3, key_length=304, bias="full"),
            16,
            {},
            "in sixteens beside such a bias. Got H=136 and D=40.",
        ),
        (DECODING._replace(dims=(520, 512)), 16, {}, "in sixteens. Got H=520 and D=512."),
    ],
    ids=str,
)
def test_refusals(case: Case, page_size: int, options: dict[str, Any], reason: str):
    call = paged.with_lengths(cases.build(case))
    spec, _ = hopper_kernels.canonical(call, **paged.paginate(call, page_size, **options))
    told = mosaic_gpu.unsupported_call(spec)
    assert told is not None
    assert reason in told


def test_scales_of_small_pages_are_refused():
    """Numbers that are converted at once are rows of one page."""
    call = paged.with_lengths(cases.build(DECODING._replace(dims=(64, 32))))
    spec, _ = hopper_kernels.canonical(call, **paged.paginate(call, 16), k_scale=2.0)
    told = mosaic_gpu.unsupported_call(spec)
    assert told == "it takes scales of pages of at least 32 keys. Got pages of 16."


def test_no_copy_of_the_cache():
    """What is launched reads the cache itself, also where `explain` speaks of copies."""
    call = paged.with_lengths(cases.build(DECODING._replace(dims=(40, 24))))
    spec, _ = hopper_kernels.canonical(call, **paged.paginate(call, 16))
    told = plan.describe(spec, 132)
    assert "key is" not in told
    assert "backward" not in told
