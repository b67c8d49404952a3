"""Lists of tiles, pages and items of work in either family of kernels, on a GPU that runs it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import mask_functions
import numpy as np
import oracle
import paged
import pytest
from cases import Case
from kernel_masks import dense_call_of
from on_hardware import poison, served_by, with_nan_in_padding

import jflash
from jflash._backends import mosaic_gpu, mosaic_gpu_mma

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[mosaic_gpu, mosaic_gpu_mma], ids=["mosaic_gpu", "mosaic_gpu_mma"])
def family(request: pytest.FixtureRequest) -> str:
    return served_by(request.param)


@pytest.fixture
def attention(family: str) -> Callable[..., Any]:
    return functools.partial(jflash.attention, implementation=family)


LONG = Case("bfloat16", 523, 640, heads=(4, 2), dims=(128, 128), batch=(2,))
FUNCTIONS = {
    "strided": LONG._replace(dims=(64, 64)),
    "documents in no order": LONG._replace(causal=True, offset="end", dtype="float16"),
    "block table": LONG._replace(query_length=640),
    "window of each head": LONG._replace(heads=(4, 4), window=(200, 300), offset="each"),
    "prefix of each entry": LONG._replace(lengths="both", segments="sorted", sinks=True),
    "images in text": LONG._replace(mask="full", segments="unsorted", dtype="float16", dims=(64, 128)),
    "BigBird": LONG._replace(score_mod="indices", bias="keys", dropout=True),
    "neighbourhood": LONG._replace(dims=(256, 256), heads=(2, 1)),
    "frames": LONG._replace(query_length=150, key_length=1100, mask="keys", causal=True, offset="end"),
    "window of frames": LONG._replace(query_length=13, key_length=17),
    "odd heads causal": LONG._replace(bias="full", heads=(2, 2)),
}


def call_of(name: str, case: Case) -> oracle.Call:
    function = mask_functions.families(max(case.query_length, case.key_length), heads=case.heads[0])[name]
    return dataclasses.replace(cases.build(case), mask_mod=function)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mask_functions(attention: Callable[..., Any], name: str):
    call = call_of(name, FUNCTIONS[name])
    poison()
    oracle.assert_right(oracle.run(attention, with_nan_in_padding(call)), call)


@pytest.mark.parametrize("name", ["documents in no order", "block table", "neighbourhood"])
def test_deterministic(attention: Callable[..., Any], name: str):
    call = call_of(name, FUNCTIONS[name])
    oracle.assert_right(oracle.run(functools.partial(attention, deterministic=True), call), call)


@pytest.mark.parametrize("name", ["documents in no order", "block table"])
def test_tangents(attention: Callable[..., Any], name: str):
    call = call_of(name, FUNCTIONS[name]._replace(dims=(64, 64)))
    along = oracle.draw_tangents(call)
    oracle.assert_tangents_right(oracle.run_tangents(attention, call, along), call, along)


@pytest.mark.parametrize("name", ["block table", "documents in no order", "images in text"])
def test_dense_masks(attention: Callable[..., Any], name: str):
    case = FUNCTIONS[name]
    function = mask_functions.families(640, heads=case.heads[0])[name]
    call = dense_call_of(function, case._replace(mask=None))
    poison()
    oracle.assert_right(oracle.run(attention, with_nan_in_padding(call)), call)


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("query_length", [1, 5])
def test_decoding_by_a_function(attention: Callable[..., Any], heads: tuple[int, int], query_length: int):
    """Heads are packed where keys are shared, and CTAs share a list, of which some have no tile."""
    case = Case("bfloat16", query_length, 5000, heads=heads, dims=(128, 128), batch=(2,))
    call = dataclasses.replace(cases.build(case), mask_mod=lambda b, h, q, k: (k // 128 % 5 == b) & (k % 3 != h))
    oracle.assert_right(oracle.run(attention, call), call)


DECODING = Case("bfloat16", 1, 5000, heads=(8, 2), dims=(128, 128), batch=(7,))
SEVERAL = DECODING._replace(query_length=3, causal=True, offset="each")
PREFILL = DECODING._replace(query_length=300, key_length=1500, causal=True, offset="each", heads=(4, 2))
PAGED: dict[str, tuple[Case, int, dict[str, Any]]] = {
    "pages of 16": (DECODING, 16, {}),
    "interleaved": (SEVERAL, 64, dict(interleaved=True)),
    "pages of 256": (DECODING, 256, {}),
    "pages of 8": (SEVERAL._replace(dims=(64, 64)), 8, {}),
    "window": (SEVERAL._replace(window=(700, 0), causal=False), 16, {}),
    "prefill": (PREFILL, 32, {}),
    "prefill, panels": (PREFILL._replace(dims=(80, 72), dtype="float16"), 128, {}),
    "prefill, d256": (PREFILL._replace(dims=(256, 256), heads=(2, 1)), 16, {}),
    "cap, alibi, sinks": (SEVERAL._replace(soft_cap=1.5, alibi=True, sinks=True), 16, {}),
    "bias and mask": (SEVERAL._replace(key_length=1920, bias="full", mask="full", batch=(2,)), 16, {}),
    "score_mod, bias of keys": (PREFILL._replace(key_length=1536, score_mod="indices", bias="keys"), 128, {}),
    "segments, dropout": (PREFILL._replace(key_length=1520, segments="sorted", dropout=True), 8, {}),
    "both lengths": (PREFILL._replace(lengths="both"), 16, dict(interleaved=True)),
}
WIDE_PAGES: dict[str, tuple[Case, int]] = {
    "latent": (DECODING._replace(heads=(128, 1), dims=(576, 512), key_length=1500), 16),
    "latent, several": (SEVERAL._replace(heads=(16, 1), dims=(576, 512), key_length=1500), 64),
}


@pytest.mark.parametrize(("case", "page_size", "options"), PAGED.values(), ids=PAGED)
def test_pages(attention: Callable[..., Any], case: Case, page_size: int, options: dict[str, Any]):
    """In shuffled pages, with lengths from 0 on, garbage in the table and NaN in pages past each."""
    call = paged.with_lengths(cases.build(case))
    poison()
    got = attention(**paged.paginate(call, page_size, **options), return_residual=True)
    oracle.assert_right(oracle.Results(*got, {}), call)


@pytest.mark.parametrize(("case", "page_size"), WIDE_PAGES.values(), ids=WIDE_PAGES)
def test_wide_pages(case: Case, page_size: int):
    name = served_by(mosaic_gpu)
    call = paged.with_lengths(cases.build(case))
    arguments = paged.paginate(call, page_size)
    got = jflash.attention(**arguments, return_residual=True, implementation=name)
    oracle.assert_right(oracle.Results(*got, {}), call)


@pytest.mark.parametrize("dims", [(512, 512), (576, 576)], ids=str)
@pytest.mark.parametrize(("case", "page_size"), WIDE_PAGES.values(), ids=WIDE_PAGES)
def test_latent_cache(case: Case, page_size: int, dims: tuple[int, int]):
    """One array is keys and values."""
    name, call = served_by(mosaic_gpu), cases.build(case._replace(dims=dims))
    call = paged.with_lengths(dataclasses.replace(call, value=call.key))
    arguments = paged.paginate(call, page_size)
    cache = jnp.asarray(arguments["key"])
    arguments |= dict(key=cache, value=cache)
    poison()
    got = jflash.attention(**arguments, return_residual=True, implementation=name)
    oracle.assert_right(oracle.Results(*got, {}), call)


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_by_a_function(attention: Callable[..., Any], page_size: int):
    call = dataclasses.replace(cases.build(PREFILL), mask_mod=lambda b, h, q, k: ((k // 64 + b) % 2 == 0) | (k == q))
    call = paged.with_lengths(call)
    got = attention(**paged.paginate(call, page_size), return_residual=True)
    oracle.assert_right(oracle.Results(*got, {}), call)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_caches_of_8_bits(family: str, dtype: str, scaled: bool):
    call = paged.of_8_bits(paged.with_lengths(cases.build(SEVERAL._replace(key_length=1000))), dtype)
    arguments = paged.paginate(call, 16, dtype=dtype)
    if scaled:
        arguments |= dict(k_scale=np.float32(0.3), v_scale=np.float32(0.7))
    got = jflash.attention(**arguments, return_residual=True, implementation=family)
    paged.assert_scaled_right(oracle.Results(*got, {}), call, arguments)


MIXED = [(5, 18), (1, 9000), (300, 700), (1, 122), (0, 4), (1, 64), (128, 4000), (1, 1), (3, 59), (0, 0), (7, 7)]
STEPS: dict[str, dict[str, Any]] = {
    "mixed": dict(lengths=MIXED, page_size=16, sinks=np.linspace(-2, 3, 8).astype(np.float32)),
    "mixed, window, cap": dict(lengths=MIXED, page_size=64, sliding_window=333, soft_cap=5.0, interleaved=True),
    "decode": dict(lengths=[(1, 1 + 37 * i) for i in range(60)], page_size=16, interleaved=True),
    "decode, one long": dict(lengths=[(1, 300)] * 9 + [(1, 30000)], page_size=128, spare=(0, 0)),
    "decode, heads of their own": dict(lengths=[(1, 2300)] * 5, page_size=64, heads=(4, 4), dims=(64, 64)),
    "prefill": dict(lengths=[(700, 700), (610, 2000)], page_size=256, dtype="float16", heads=(8, 1)),
    "none": dict(lengths=[(0, 0)], page_size=8),
}


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_ragged(family: str, options: dict[str, Any]):
    plain: dict[str, Any] = dict(heads=(8, 2), dims=(128, 128), dtype="bfloat16", sm_scale=0.09)
    step = paged.ragged(**(plain | options))
    static = {name: step.arguments.pop(name) for name in ("sliding_window", "soft_cap") if name in step.arguments}
    attend = functools.partial(jflash.ragged_paged_attention, **static, implementation=family, return_residual=True)
    poison()
    paged.assert_ragged_right(jax.jit(attend)(**step.arguments), step)


def test_a_step_again(family: str):
    """Items of another step leave nothing behind that the next one reads."""
    attend = jax.jit(functools.partial(jflash.ragged_paged_attention, implementation=family, return_residual=True))
    for seed in range(3):
        step = paged.ragged(MIXED, 16, heads=(8, 2), dims=(128, 128), dtype="bfloat16", sm_scale=0.09, seed=seed)
        paged.assert_ragged_right(attend(**jax.tree.map(jnp.asarray, step.arguments)), step)
