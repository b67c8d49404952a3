"""The forward of few rows by `mma.sync`: 8-bit operands and sums of warps thread by thread, and whole calls."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import cases
import hopper_kernels
import jax.numpy as jnp
import kernel_families
import numpy as np
import oracle
import paged
import pytest
from cases import Case
from h200 import H200
from lanes import Warpgroup
from short_run import cover

from jflash import _dispatch
from jflash._backends.mosaic_gpu_mma import plan
from jflash._backends.mosaic_gpu_mma.byte_operand import ByteOperand, rows_beside_bytes
from jflash._backends.mosaic_gpu_mma.forward_few_rows import FewRowsCta
from jflash._backends.mosaic_gpu_mma.forward_kernel import ForwardCta
from jflash._backends.mosaic_gpu_mma.products import Chosen, RegisterOperand, multiply
from jflash._backends.mosaic_gpu_mma.smem_tile import LeftOperand, SmemTile
from jflash._backends.mosaic_gpu_mma.warp_sums import NUMBERS, sums
from jflash._backends.nvidia.threads.builder import THREADS
from jflash._platform import Platform

BYTES = ("float8_e4m3fn", "float8_e5m2", "int8")
HALVES = ("bfloat16", "float16")


class Words(Warpgroup):
    """A warpgroup whose matrices, and operands of products, are words of 32 bits."""

    def load_matrices(self, address: Any, offset: int, *, transpose: bool) -> Sequence[np.ndarray]:
        found = super().load_matrices(address, offset, transpose=transpose)
        return [np.ascontiguousarray(words).view(np.uint32)[:, 0] for words in found]

    def load_word(self, address: Any, offset: int) -> np.ndarray:
        return self.load_number(address, offset).view(np.uint32)

    def multiply_add(self, dtype: str, a: Any, b: Any, c: Any) -> np.ndarray:
        halves = [np.broadcast_to(x, (THREADS,)).copy().view(jnp.dtype(dtype)) for x in (a, b, c)]
        with np.errstate(invalid="ignore"):
            a, b, c = (half.astype(np.float64) for half in halves)
            made = a * b + c
        return made.astype(jnp.dtype(dtype)).view(np.uint32)

    def held(self, value: int) -> np.ndarray:
        return self(value)

    def meet(self) -> None:
        """Nothing: each instruction is that of all threads."""

    def multiply(self, dtype: Any, factors: Any, c: Sequence[Any]) -> list[np.ndarray]:
        pairs = lambda words: [np.ascontiguousarray(word).view(dtype).reshape(-1, 2) for word in words]
        return super().multiply(dtype, [(pairs(a), pairs(b)) for a, b in factors], c)


def in_memory(dtype: str, *arrays: np.ndarray) -> tuple[Words, list[int]]:
    """Shared memory with tiles of 16-bit numbers, or of pairs of bytes, one behind the other; and where each begins."""
    o = Words(np.dtype(jnp.dtype(dtype)), 0, np.zeros(1, np.float32))
    starts = []
    for array in arrays:
        starts.append(o.shared.size)
        rows = array.shape[0]
        words = array.view(np.uint16).reshape(rows, -1)
        tile = SmemTile(rows, words.shape[1])
        held = np.zeros(tile.bytes, np.uint8)
        for row in range(rows):
            for chunk in range(words.shape[1] // 8):
                o_row = Words(np.dtype(np.uint16), 0, np.zeros(1, np.float32))
                place = tile.place(row, chunk - chunk % tile.chunks)
                place += int(tile.permuted(o_row, o_row(row), o_row(chunk % tile.chunks))[0])
                held[place : place + 16] = words[row, 8 * chunk : 8 * chunk + 8].view(np.uint8)
        o.shared = np.concatenate([o.shared, held])
    return o, starts


def numbers(*shape: int, dtype: str) -> np.ndarray:
    made = np.random.default_rng(0).standard_normal(shape) * (20 if dtype == "int8" else 1)
    return made.astype(jnp.dtype(dtype))


def tile_of(pairs: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """64 rows of an accumulator, from each thread's pairs of numbers."""
    every = np.stack([np.stack(pair, axis=-1) for pair in pairs])
    # Eight, half; warp, row, pair, neighbour.
    return every.reshape(-1, 2, 4, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(64, -1)


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("cached", BYTES)
def test_every_byte(cached: str, stored: str):
    """Every number of 8 bits is converted, with NaN and infinities where the dtype has them."""
    bytes_ = np.resize(np.arange(256, dtype=np.uint8), 4 * THREADS)
    o = Words(np.dtype(np.uint16), 16, np.zeros(1, np.float32))
    operand = ByteOperand(o, SmemTile(16, 16), o(0), (cached, stored))
    even, odd = operand._converted(bytes_.view(np.uint32))
    got = np.stack([even, odd], axis=1).view(jnp.dtype(stored)).reshape(-1, 2, 2).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(got.astype(np.float32), bytes_.view(jnp.dtype(cached)).astype(np.float32))


@pytest.mark.parametrize(("cached", "stored"), [("int8", "bfloat16"), ("float8_e4m3fn", "float16")])
@pytest.mark.parametrize("columns", [32, 64, 96, 128])
def test_products_with_bytes(columns: int, cached: str, stored: str):
    """Q K^T of 16 rows, and P V, whose columns come in another order that the sums of warps undo."""
    q, k, p = numbers(16, columns, dtype=stored), numbers(32, columns, dtype=cached), numbers(64, 32, dtype=stored)
    o, (at_q, at_k, at_p, scratch) = in_memory(stored, q, k, p, np.zeros((4 * NUMBERS, 32), np.float32))
    dtypes, zero = (cached, stored), np.zeros(THREADS, np.float32)
    byte_tile = SmemTile(32, columns // 2)
    words = rows_beside_bytes(o, SmemTile(16, columns), o(at_q))
    s = [[zero] * 2 for _ in range(8)]
    keys = ByteOperand(o, byte_tile, o(at_k), dtypes)
    multiply(o, o.dtype, [s], [RegisterOperand([words])], [keys], Chosen([(0, 0)], transposed=True))
    wide = lambda array: array.astype(np.float64)
    np.testing.assert_allclose(tile_of(s), np.tile(wide(q) @ wide(k).T, (4, 1)), rtol=1e-5, atol=1e-3)
    acc = [[zero] * 2 for _ in range(columns // 4)]
    values = ByteOperand(o, byte_tile, o(at_k), dtypes)
    multiply(o, o.dtype, [acc], [LeftOperand(o, SmemTile(64, 32), o(at_p))], [values], Chosen([(0, 0)]))
    found = sums(o, [number for pair in acc for number in pair], o(scratch), made_of_bytes=True)
    want = np.tile((wide(p) @ wide(k)).reshape(4, 16, columns).sum(axis=0), (4, 1))
    np.testing.assert_allclose(tile_of(list(zip(found[::2], found[1::2], strict=True))), want, rtol=1e-5, atol=1e-3)


def test_sums_of_warps():
    """Each warp's rows become the sums of all warps', of more columns than go through shared memory at a time."""
    o, (scratch,) = in_memory("bfloat16", np.zeros((4 * NUMBERS, 32), np.float32))
    values = numbers(64, 96, dtype="float32")
    given = values.reshape(4, 2, 8, 12, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(-1, THREADS)
    found = sums(o, list(given), o(scratch), made_of_bytes=False)
    want = np.tile(values.reshape(4, 16, 96).sum(axis=0), (4, 1))
    np.testing.assert_allclose(tile_of(list(zip(found[::2], found[1::2], strict=True))), want, rtol=1e-6)


def test_16_rows_are_every_warps():
    rows = numbers(16, 64, dtype="bfloat16")
    o, (start,) = in_memory("bfloat16", rows)
    operand = LeftOperand(o, SmemTile(16, 64), o(start))
    words = [word for index in range(4) for word in operand.fragment(0, index)]
    got = tile_of([word.view(jnp.bfloat16).reshape(-1, 2).T for word in words])
    np.testing.assert_array_equal(got, np.tile(rows, (4, 1)))


run = functools.partial(hopper_kernels.run, processors=108, family=kernel_families.mma("8.0"), detect_races=False)
FEW = Case("bfloat16", query_length=1, key_length=300, heads=(8, 2), dims=(64, 32), batch=(5,))


def slow(*row: object):
    return pytest.param(*row, marks=cover(0))


@pytest.mark.parametrize(
    ("changed", "page_dtype", "is_before"),
    [
        (dict(dims=(128, 128)), "int8", True),
        (dict(dims=(128, 128), query_length=8), "int8", False),
        (dict(dims=(128, 128)), None, False),
        (dict(dims=(128, 72)), "int8", False),
        (dict(dims=(64, 64)), None, True),
        (dict(dims=(64, 64), alibi=True), None, False),
    ],
    ids=str,
)
def test_asked_before_hopper(changed: dict[str, Any], page_dtype: str | None, is_before: bool):
    """On a Hopper GPU few queries on 8 bits, or on narrow heads, are served here first; elsewhere the order is one."""
    call = paged.with_lengths(cases.build(FEW._replace(**changed)))
    call = call if page_dtype is None else paged.of_8_bits(call, page_dtype)
    spec, _ = hopper_kernels.canonical_arguments(**paged.paginate(call, 16, dtype=page_dtype))
    hopper, ampere = H200, Platform("gpu", "NVIDIA A100", "8.0", 108)
    kernels = ["mosaic_gpu_mma", "mosaic_gpu"] if is_before else ["mosaic_gpu", "mosaic_gpu_mma"]
    assert list(_dispatch.in_order(spec, None, hopper)[:2]) == kernels
    assert _dispatch.in_order(spec, None, ampere)[0] == "mosaic_gpu"


def assert_few_rows(arguments: dict[str, Any]) -> None:
    spec, _ = hopper_kernels.canonical_arguments(**arguments)
    assert plan.plan_forward(spec, Platform("gpu", "some GPU", "8.0", 108)).cta is FewRowsCta


def test_float32_has_another_kernel():
    """Of one piece too, whose logits and weights are of another dtype than what is multiplied."""
    call = cases.build(FEW._replace(dtype="float32"))
    spec, _ = hopper_kernels.canonical(call, precision="BF16_BF16_F32")
    assert plan.plan_forward(spec, Platform("gpu", "some GPU", "8.0", 108)).cta is ForwardCta


@pytest.mark.parametrize(
    ("case", "page_size", "interleaved"),
    [
        (FEW._replace(query_length=4, causal=True, offset="each", window=(70, 3), soft_cap=20.0), 16, False),
        slow(FEW._replace(heads=(3, 3), sinks=True, dtype="float16", dims=(40, 40), key_length=130), 8, True),
        slow(FEW._replace(query_length=16, heads=(2, 2), lengths="queries", dims=(136, 64)), 100, False),
    ],
    ids=str,
)
def test_calls(case: Case, page_size: int, interleaved: bool):
    call = paged.with_lengths(cases.build(case))
    arguments = paged.paginate(call, page_size, interleaved=interleaved)
    assert_few_rows(arguments)
    oracle.assert_right(run(call, **arguments), call)


BY_PAGE = np.linspace(0.5, 5, 60, dtype=np.float32)[:, None]


@pytest.mark.parametrize(
    ("dtype", "stored", "scales"),
    [
        ("bfloat16", "int8", dict(k_scale=0.05, v_scale=0.3)),
        slow("float16", "float8_e4m3fn", dict(v_scale=np.array([[0.3, 2.0]], np.float32))),
        slow("bfloat16", "float8_e5m2", {}),
        slow("bfloat16", "int8", dict(k_scale=BY_PAGE / 60, v_scale=0.5 + BY_PAGE.repeat(2, axis=1))),
        slow("float16", "int8", dict(k_scale=0.05, v_scale=BY_PAGE)),
    ],
)
def test_8_bits(dtype: str, stored: str, scales: dict[str, Any]):
    """Without scales, with one for all or for each head, which are applied to sums, and with one for each page."""
    call = paged.with_lengths(cases.build(FEW._replace(dtype="float32", batch=(3,))))
    call = dataclasses.replace(paged.of_8_bits(call, stored), query=call.query.astype(dtype))
    arguments = paged.paginate(call, 16, dtype=stored)
    assert arguments["key"].shape[0] == 60
    assert_few_rows(arguments)
    paged.assert_scaled_right(run(call, **arguments, **scales), call, arguments | scales)
