"""A paged cache by `mma.sync`: what threads copy and convert, and calls in Pallas' interpreter."""

import dataclasses
import functools

import cases
import hopper_kernels
import jax.numpy as jnp
import kernel_families
import numpy as np
import oracle
import paged
import pytest
from cases import Case
from lanes import Warpgroup
from short_run import cover

from jflash._backends import mosaic_gpu_mma
from jflash._backends.mosaic_gpu_mma import cache_numbers, plan
from jflash._backends.mosaic_gpu_mma.copies import copy_tile
from jflash._backends.mosaic_gpu_mma.paged_copies import Conversion, PagedRows, PageNumbers, convert_tile
from jflash._backends.mosaic_gpu_mma.smem_tile import LeftOperand, SmemTile
from jflash._backends.nvidia.threads.builder import THREADS
from jflash._backends.nvidia.threads.device_rows import Rows
from jflash._platform import Platform

LENGTH, PAGES = 50, 23
"""A sequence's rows, and the pages of a cache."""
DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8", "float16", "bfloat16", "float32")


def normal(*shape: int, dtype: str) -> np.ndarray:
    return (3 * np.random.default_rng(0).standard_normal(shape)).astype(jnp.dtype(dtype))


def table_of(page_size: int) -> np.ndarray:
    """The pages of the sequence, in random order, with garbage past its end."""
    used = -(-LENGTH // page_size)
    table = np.full(used + 3, paged.GARBAGE, np.int32)
    table[:used] = np.random.default_rng(1).integers(0, PAGES, used)
    return table


def memory(o_dtype: np.dtype, cache: np.ndarray, page_size: int, first: int, room: int) -> tuple[Warpgroup, PagedRows]:
    """A warpgroup with scales and the cache of two heads in device memory, and in shared memory `room` and then the
    numbers of the pages from that of row `first` on; and the second head's rows."""
    scales = np.float32(0.5) + np.arange(PAGES, dtype=np.float32)
    parts = [np.pad(part.reshape(-1).view(np.uint8), (0, -part.nbytes % 64)) for part in (scales, cache)]
    rows, heads, columns = cache.shape
    item = cache.dtype.itemsize
    of_head = Rows(len(parts[0]) + columns * item, rows, columns, heads * columns * item, item)
    o = Warpgroup(o_dtype, room, np.concatenate(parts))
    first_page, table = first // page_size, table_of(page_size)
    numbers = table[np.minimum(first_page + np.arange(128), len(table) - 1)]
    o.shared = np.concatenate([o.shared, numbers.view(np.uint8)])
    return o, PagedRows(*dataclasses.astuple(of_head), PageNumbers(o(room), o(first_page), page_size))


def rows_of(o: Warpgroup, tile: SmemTile, dtype: str, piece: int = 0) -> np.ndarray:
    """A tile as `ldmatrix` reads it, of 64 rows."""
    o.dtype = np.dtype(jnp.dtype(dtype))
    words = LeftOperand(o, tile, o(0)).pieces(piece + 1)[piece]
    words = [word for index in range(tile.columns // 16) for word in words.fragment(0, index)]
    return np.asarray(words).reshape(-1, 2, 4, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(64, -1)


def wanted(cache: np.ndarray, page_size: int, first: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """64 rows of the second head, from `first` on, and their pages; past the sequence's end zeros."""
    place = first + np.arange(64)
    page = table_of(page_size)[np.minimum(place, LENGTH - 1) // page_size]
    found = np.zeros((64, columns), cache.dtype)
    found[:, : cache.shape[2]] = cache[page * page_size + place % page_size, 1]
    return np.where((place < LENGTH)[:, None], found, np.zeros_like(found)), page


@pytest.mark.parametrize("page_size", [1, 6, 16, 100])
@pytest.mark.parametrize("columns", [16, 40, 128])
def test_copies(columns: int, page_size: int):
    """From the fifth row on: each from its page, with zeros past the end."""
    cache = normal(PAGES * page_size, 2, columns, dtype="bfloat16")
    tile = SmemTile(64, -(-columns // 16) * 16)
    o, rows = memory(cache.dtype, cache, page_size, 5, tile.bytes)
    copy_tile(o, rows, tile, o(0), o(5), o(LENGTH))
    np.testing.assert_array_equal(rows_of(o, tile, "bfloat16"), wanted(cache, page_size, 5, tile.columns)[0])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("stored", "pieces"), [("bfloat16", 1), ("float16", 1), ("bfloat16", 2), ("bfloat16", 3)])
@pytest.mark.parametrize("cached", DTYPES)
def test_conversions(cached: str, stored: str, pieces: int, scaled: bool):
    """Numbers times their page's scale in float32, rounded once, or in pieces that add up to them."""
    cache = normal(PAGES * 16, 2, 24, dtype=cached)
    tile = SmemTile(64, 32)
    o, rows = memory(cache.dtype, cache, 16, 3, pieces * tile.bytes)
    conversion = Conversion(cached, stored, pieces, np.int64(0) if scaled else None, 4)
    convert_tile(o, rows, conversion, tile, o(0), o(3), o(LENGTH))
    want, page = wanted(cache, 16, 3, 32)
    want = want.astype(np.float32) * ((np.float32(0.5) + page[:, None]) if scaled else 1)
    got = [rows_of(o, tile, stored, piece) for piece in range(pieces)]
    np.testing.assert_array_equal(got[0], want.astype(jnp.dtype(stored)))
    errors = np.abs(sum(map(np.float64, got)) - want)
    assert (errors <= np.abs(want) * 2.0 ** (-8 * pieces if stored == "bfloat16" else -11)).all()


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float32"])
def test_every_number(dtype: str):
    """Every number of 8 and of 16 bits is converted, NaN, infinities and the smallest among them."""
    size = jnp.dtype(dtype).itemsize
    numbers = np.arange(256**size).astype(f"u{size}").view(jnp.dtype(dtype))
    every = np.pad(numbers, (0, -len(numbers) % (8 * THREADS)))
    for chunk in every.reshape(-1, THREADS, 8):
        o = Warpgroup(np.dtype(jnp.bfloat16), 16, chunk)
        with np.errstate(invalid="ignore"):
            loaded = cache_numbers.load(o, dtype, np.arange(THREADS, dtype=np.int64) * 8 * size, 0)
            got = np.stack(loaded, axis=1) * np.float32(cache_numbers.UNITS.get(dtype, 1))
        np.testing.assert_array_equal(got, chunk.astype(np.float32))


def test_pieces_of_large_numbers():
    """What is finite has finite pieces, though the largest numbers round to infinity; what is not is its own first."""
    large = np.finfo(np.float32).max
    numbers = np.resize(np.float32([large, -large, np.inf, -np.inf, np.nan, 3.39e38, 1e-40, 0]), (8, THREADS))
    o = Warpgroup(np.dtype(jnp.bfloat16), 16, np.zeros(4, np.float32))
    with np.errstate(invalid="ignore"):
        words = cache_numbers.chunks(o, "bfloat16", list(numbers), 3)
    pieces = [np.stack(piece, axis=1).view(jnp.bfloat16).astype(np.float64).T for piece in words]
    finite = np.isfinite(numbers)
    np.testing.assert_array_equal(pieces[0][~finite], numbers[~finite])
    assert not np.any([piece[~finite] for piece in pieces[1:]])
    np.testing.assert_allclose(sum(pieces)[finite], numbers[finite], rtol=2**-23, atol=2**-126)


run = functools.partial(hopper_kernels.run, processors=108, family=kernel_families.mma("8.0"), detect_races=False)


def slow(*row: object):
    return pytest.param(*row, marks=cover(0))


FEW = Case("bfloat16", query_length=3, key_length=200, heads=(4, 2), dims=(40, 24), batch=(5,))


@pytest.mark.parametrize(
    ("case", "page_size", "interleaved"),
    [
        # Heads packed into rows and keys in several parts; all that a length can be.
        (FEW._replace(query_length=1, key_length=1100, dims=(64, 64)), 16, False),
        (FEW._replace(query_length=70, causal=True, offset="each", dims=(64, 64), sinks=True), 1, True),
        slow(FEW._replace(window=(50, 3), mask="keys", lengths="queries", dtype="float16"), 40, False),
        slow(FEW._replace(bias="full", mask="full", dropout=True, score_mod="arrays"), 200, False),
        slow(FEW._replace(dtype="float32", causal=True, offset="each", dims=(24, 24)), 8, True),
    ],
    ids=str,
)
def test_calls(case: Case, page_size: int, interleaved: bool):
    """In shuffled pages, with garbage past every end and NaN in what no length has."""
    call = paged.with_lengths(cases.build(case))
    got = run(call, **paged.paginate(call, page_size, interleaved=interleaved))
    oracle.assert_right(got, call, as_tf32=case.dtype == "float32")


@pytest.mark.parametrize(
    ("dtype", "stored", "interleaved"),
    [
        ("bfloat16", "int8", False),
        slow("float16", "float8_e4m3fn", True),
        slow("bfloat16", "bfloat16", False),
        slow("float32", "float8_e5m2", False),
    ],
)
def test_scaled_and_8_bits(dtype: str, stored: str, interleaved: bool):
    call = paged.with_lengths(cases.build(FEW._replace(dtype="float32", dims=(40, 40), batch=(3,))))
    call = dataclasses.replace(paged.of_8_bits(call, stored), query=call.query.astype(dtype))
    arguments = paged.paginate(call, 16, dtype=stored, interleaved=interleaved)
    pages, heads = arguments["key"].shape[0], call.key.shape[-2]
    k_scale = 0.05 + np.arange(pages * heads, dtype=np.float32).reshape(pages, heads) / 128
    arguments |= dict(k_scale=k_scale, v_scale=0.3)
    paged.assert_scaled_right(run(call, **arguments), call, arguments, as_tf32=dtype == "float32")


def test_rows_that_are_not_whole_chunks_are_refused():
    call = paged.with_lengths(cases.build(FEW._replace(dims=(20, 24))))
    spec, _ = hopper_kernels.canonical_arguments(**paged.paginate(call, 16))
    assert "H=20" in mosaic_gpu_mma.unsupported_call(spec)


def test_described():
    """A call with pages has no backward."""
    call = paged.with_lengths(cases.build(FEW))
    spec, _ = hopper_kernels.canonical_arguments(**paged.paginate(call, 16))
    assert "backward" not in plan.described(spec, Platform("gpu", "some GPU", "8.6", 84))
