"""Logits that are hard for either family of kernels, on a GPU that runs it."""

import functools
from collections.abc import Callable

import cases
import oracle
import pytest
from cases import Case
from on_hardware import served_by

import jflash
from jflash._backends import mosaic_gpu, mosaic_gpu_mma

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[mosaic_gpu, mosaic_gpu_mma], ids=["mosaic_gpu", "mosaic_gpu_mma"])
def attention(request: pytest.FixtureRequest) -> Callable:
    return functools.partial(jflash.attention, implementation=served_by(request.param))


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_soft_cap_of_few_large_products(attention: Callable, dims: tuple[int, int], dtype: str):
    call = cases.build(Case(dtype, 300, 400, (2, 1), dims, (2,), soft_cap=20.0, causal=True, offset="end"))
    call = cases.with_large_products(call)
    oracle.assert_right(oracle.run(attention, call), call)


@pytest.mark.parametrize(("dtype", "cap", "dim"), [("bfloat16", 1024.0, 128), ("float16", 64.0, 64)])
@pytest.mark.parametrize("steps", cases.STEPS)
def test_soft_cap_from_tile_to_tile(attention: Callable, steps: str, dtype: str, cap: float, dim: int):
    case = Case(dtype, 70, 390, heads=(1, 1), dims=(dim, dim), batch=(), soft_cap=cap, mask="full", sinks=cap == 64)
    call = cases.with_steps(cases.build(case), steps)
    oracle.assert_right(oracle.run(attention, call), call)


@pytest.mark.parametrize(
    ("dtype", "kind", "dim"), [("bfloat16", "keys", 64), ("bfloat16", "keys", 128), ("float16", "full", 128)]
)
@pytest.mark.parametrize("values", cases.LARGE_BIASES)
def test_large_biases(attention: Callable, values: str, dtype: str, kind: str, dim: int):
    call = cases.build(Case(dtype, 70, 200, heads=(1, 1), dims=(dim, dim), batch=(), bias=kind))
    call = cases.with_bias_of_index(call, cases.LARGE_BIASES[values])
    oracle.assert_right(oracle.run(attention, call), call, by_lse=True)
