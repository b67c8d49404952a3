"""A step's keys and values are written into their pages, and into nothing else, in place."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged
import pytest

import jflash

K, H, D, PAGE_SIZE, PAGES = 2, 8, 6, 4, 12
QUERY_LENGTHS, KV_LENS = [3, 0, 1, 6], [5, 7, 9, 6]
TABLE = np.full((6, 3), paged.GARBAGE, np.int32)
TABLE[:4] = [[7, 2, paged.GARBAGE], [1, 3, paged.GARBAGE], [4, 9, 11], [8, 0, paged.GARBAGE]]
TOKENS = 16
BATCH = dict(
    kv_lens=np.array([*KV_LENS, 10**6, -3], np.int32),
    page_indices=TABLE,
    cu_q_lens=np.array([0, 3, 3, 4, 10, 10**6, -7], np.int32),
    num_seqs=np.array([4], np.int32),
)


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def expected(cache: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Token by token."""
    cache, token = cache.copy(), 0
    for sequence, (count, length) in enumerate(zip(QUERY_LENGTHS, KV_LENS, strict=True)):
        for place in range(length - count, length):
            cache[TABLE[sequence, place // PAGE_SIZE], place % PAGE_SIZE] = new[token]
            token += 1
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_ragged(interleaved: bool, dtype: str):
    caches = normal(0, PAGES, PAGE_SIZE, K, H, dtype=dtype), normal(1, PAGES, PAGE_SIZE, K, H, dtype=dtype)
    new = normal(2, TOKENS, K, H, dtype=dtype), normal(3, TOKENS, K, H, dtype=dtype)
    want = [expected(cache, some) for cache, some in zip(caches, new, strict=True)]
    both = lambda pair: np.stack(pair, axis=3).reshape(PAGES, PAGE_SIZE, 2 * K, H)
    got = jflash.update_pages(both(caches) if interleaved else caches, *new, **BATCH)
    assert type(got) is (type(jnp.zeros(0)) if interleaved else tuple)
    for one, other in zip([got], [both(want)], strict=True) if interleaved else zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_latent():
    """Rows that are keys and values both are one array, without a head for values."""
    cache, new = normal(0, PAGES, PAGE_SIZE, 1, H), normal(1, TOKENS, 1, H)
    want = expected(cache, new)
    np.testing.assert_array_equal(jflash.update_pages(cache, new, None, **BATCH), want)


@pytest.mark.parametrize("axes", [(), (3,), (2, 2)], ids=str)
def test_as_many_tokens_of_each(axes: tuple[int, ...]):
    """A batch stores as many tokens of each sequence; values have another width than keys."""
    entries, length = int(np.prod(axes)), 3
    lengths = np.array([3, 5, 12, 4], np.int32)[:entries].reshape(axes)
    table = np.random.default_rng(0).permutation(PAGES).astype(np.int32)[: 3 * entries].reshape(*axes, 3)
    caches = [normal(0, PAGES, PAGE_SIZE, K, H), normal(1, PAGES, PAGE_SIZE, K, D)]
    new = [normal(2, *axes, length, K, H), normal(3, *axes, length, K, D)]
    got = jflash.update_pages(tuple(caches), *new, lengths, table)
    for cache, some, updated in zip(caches, new, got, strict=True):
        for entry, (last, row) in enumerate(zip(lengths.ravel(), table.reshape(entries, 3), strict=True)):
            for index in range(length):
                place = last - length + index
                cache[row[place // PAGE_SIZE], place % PAGE_SIZE] = some.reshape(entries, length, K, -1)[entry, index]
        np.testing.assert_array_equal(updated, cache)


@pytest.mark.parametrize(
    ("lengths", "table"),
    [([2, 13], [[0, 1, 2], [3, 4, 5]]), ([4, 4], [[PAGES, 1, 2], [-1, 4, 5]])],
    ids=["no room", "no page"],
)
def test_what_has_no_place_is_left_out(lengths: list[int], table: list[list[int]]):
    """The first sequence's first token would stand before its first place, the second's last past its last."""
    cache = normal(0, PAGES, PAGE_SIZE, K, H)
    new = normal(1, 2, 3, K, H)
    got, _ = jflash.update_pages((cache, cache), new, new, np.array(lengths), np.array(table))
    want = cache.copy()
    if lengths == [2, 13]:
        want[0, :2], want[5, 2:] = new[0, 1:], new[1, :2]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("by_page", [False, True])
def test_8_bits_hold_the_nearest_numbers(stored: str, by_page: bool):
    """Divided by the scale, and the greatest that there is in the place of a greater."""
    scale = np.linspace(0.01, 0.02, PAGES * K).astype(np.float32).reshape(PAGES, K) if by_page else 0.015
    limit = float((jnp.iinfo if stored == "int8" else jnp.finfo)(stored).max)
    new = normal(0, TOKENS, K, H) * (0.4 * limit * 0.01)
    new[1] *= 100
    cache = np.zeros((PAGES, PAGE_SIZE, K, H), jnp.dtype(stored))
    got, _ = jflash.update_pages((cache, cache), new, new, **BATCH, k_scale=scale, v_scale=1.0)
    assert got.dtype == stored
    each = np.broadcast_to(scale, (PAGES, K))[:, None, :, None]
    want = expected(np.zeros(cache.shape, np.float32), new) / each
    want = np.clip(want, -limit - (stored == "int8"), limit)
    want = np.round(want) if stored == "int8" else want.astype(stored).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


def test_numbers_of_8_bits_are_taken_as_they_are():
    cache, new = np.zeros((PAGES, PAGE_SIZE, K, H), np.int8), normal(0, TOKENS, K, H, dtype=np.float32)
    new = (20 * new).astype(np.int8)
    got, _ = jflash.update_pages((cache, cache), new, new, **BATCH)
    np.testing.assert_array_equal(got, expected(cache, new))


def test_pages_are_donated():
    caches = [jnp.zeros((PAGES, PAGE_SIZE, K, H)) for _ in range(2)]
    new = normal(0, TOKENS, K, H)
    jflash.update_pages(tuple(caches), new, new, **BATCH)
    assert all(cache.is_deleted() for cache in caches)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("looped", [False, True])
def test_in_place(looped: bool, dtype: str, interleaved: bool):
    """In the compiled text every result is an argument's memory, and nothing as large as the cache is copied or held
    besides; also where several steps are a loop that carries it."""
    pages, tokens = 4096, 64
    shape = lambda *axes, dtype=np.float32: jax.ShapeDtypeStruct(axes, dtype)
    one = shape(pages, 16, 4 if interleaved else 2, 64, dtype=jnp.dtype(dtype))
    kv_pages = one if interleaved else (one, one)
    new = shape(tokens, 2, 64, dtype=jnp.bfloat16 if dtype == "bfloat16" else np.float32)
    index = functools.partial(shape, dtype=np.int32)

    def update(kv_pages: Any, *others: Any) -> Any:
        scale = 0.5 if dtype == "int8" else None
        step = lambda _, kv_pages: jflash.update_pages(kv_pages, *others, k_scale=scale, v_scale=scale)
        return jax.lax.fori_loop(0, 3, step, kv_pages) if looped else step(0, kv_pages)

    lowered = jax.jit(update, donate_argnums=0).lower(kv_pages, new, new, index(8), index(8, 40), index(9), index(1))
    compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    size = sum(cache.size * cache.dtype.itemsize for cache in jax.tree.leaves(kv_pages))
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 100
    header = text.partition("\n")[0]
    assert header.count("may-alias") + header.count("must-alias") == len(jax.tree.leaves(kv_pages))
    copies = [line for line in text.splitlines() if re.search(rf"= \w+\[({pages}|{16 * pages}),\S* copy\(", line)]
    assert copies == []


GOOD = dict(
    kv_pages=(np.zeros((PAGES, PAGE_SIZE, K, H), np.float32), np.zeros((PAGES, PAGE_SIZE, K, D), np.float32)),
    keys=np.zeros((TOKENS, K, H), np.float32),
    values=np.zeros((TOKENS, K, D), np.float32),
    **BATCH,
)
ints = functools.partial(np.zeros, dtype=np.int32)


@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [
        (ValueError, "`kv_pages` must be one array, or a pair.*Got 1", dict(kv_pages=GOOD["kv_pages"][:1])),
        (TypeError, r"`kv_pages\[0\]`.*dtype of `keys` or one of", dict(keys=GOOD["keys"].astype(np.float16))),
        (TypeError, "`keys` and `values` must have the same dtype", dict(values=GOOD["values"].astype(np.float16))),
        (ValueError, r"`values` must have the shape \(16, 2, 6\)", dict(values=np.zeros((TOKENS, K, H), np.float32))),
        (ValueError, r"`keys` must have the shape \(16, 2, 8\)", dict(keys=np.zeros((TOKENS, 1, H), np.float32))),
        (ValueError, "`values` must be given with a pair of pages. Got None", dict(values=None)),
        (ValueError, "`v_scale` scales values. Got it with `values=None`", dict(
            kv_pages=GOOD["kv_pages"][0], values=None, v_scale=2.0,
        )),
        (ValueError, "must be given together", dict(num_seqs=None)),
        (ValueError, r"`keys` must have the shape \(tokens, K, H\) with `cu_q_lens`", dict(
            keys=np.zeros((2, 8, K, H), np.float32), values=np.zeros((2, 8, K, D), np.float32)
        )),
        (ValueError, r"`kv_lens` must have the shape \(6,\)", dict(kv_lens=ints(5))),
        (ValueError, r"`cu_q_lens` must have the shape \(7,\)", dict(cu_q_lens=ints(6))),
        (ValueError, r"`num_seqs` must have the shape \(1,\)", dict(num_seqs=np.int32(4))),
        (ValueError, r"`page_indices` must have the shape \(max_num_seqs, pages\)", dict(page_indices=ints(6))),
        (TypeError, "`kv_lens` must have an integer dtype", dict(kv_lens=np.zeros(6))),
        (ValueError, r"`kv_lens` must have the shape \(\) without", dict(cu_q_lens=None, num_seqs=None)),
        (ValueError, r"`page_indices` must have the shape", dict(cu_q_lens=None, num_seqs=None, kv_lens=np.int32(3))),
        (ValueError, "`k_scale` must be a number, or broadcastable to", dict(k_scale=np.ones(3, np.float32))),
        (ValueError, "`v_scale` divides keys and values that are not in 8 bits", dict(
            kv_pages=tuple(cache.astype(np.int8) for cache in GOOD["kv_pages"]),
            keys=GOOD["keys"].astype(np.int8), values=GOOD["values"].astype(np.int8), v_scale=2.0,
        )),
    ],
)  # fmt: skip
def test_wrong_argument(error: type[Exception], message: str, wrong: dict[str, Any]):
    with pytest.raises(error, match=message):
        jflash.update_pages(**{**GOOD, **wrong})
