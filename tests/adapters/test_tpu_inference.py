"""A step as tpu-inference calls for it: the cache gets the step's keys and values, and is attended to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged
import pytest
from short_run import cover

import jflash
from jflash import tpu_inference

STEPS = [(5, 18), (1, 29), (20, 20), (1, 1), (3, 16)]
PAGE_SIZE = 16


def arguments(dtype: str, heads: tuple[int, int], head_dim: int, stored: str, **options: Any) -> Any:
    """A step whose newest keys and values are not in the cache yet, and the step by itself."""
    step = paged.ragged(STEPS, PAGE_SIZE, heads=heads, dims=(head_dim, head_dim), dtype=dtype, **options)
    given = step.arguments
    key, value = (np.asarray(jnp.asarray(cache).astype(stored)) for cache in given["kv_pages"])
    shape = tpu_inference.get_kv_cache_shape(*key.shape[:2], *key.shape[2:], stored)
    cache = np.full(shape, np.nan, jnp.dtype(stored)).reshape(*shape[:2], -1, shape[4])
    # What a row has besides its heads is multiplied by 0, as on a TPU.
    cache[..., head_dim:] = cache[:, :, 2 * heads[1] :] = 3
    held = cache[:, :, : 2 * heads[1], :head_dim]
    held[:, :, 0::2], held[:, :, 1::2] = key, value
    new = [np.zeros((len(given["q"]), heads[1], head_dim), jnp.dtype(stored)) for _ in range(2)]
    table, starts = given["page_indices"], given["cu_q_lens"]
    for sequence, (count, length) in enumerate(STEPS):
        for index in range(count):
            place = length - count + index
            row = table[sequence, place // PAGE_SIZE], place % PAGE_SIZE
            for some, pages in zip(new, (key, value), strict=True):
                some[starts[sequence] + index] = pages[row]
            cache[row] = np.nan
    batch = given["kv_lens"], table.reshape(-1), starts, np.array([1, 1, len(STEPS)], np.int32)
    return (given["q"], *new, cache.reshape(shape), *batch), step


@cover(every=4)
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "stored", "options"),
    [
        ("float32", (4, 2), 16, "float32", dict(sm_scale=0.25)),
        pytest.param("bfloat16", (3, 3), 128, "bfloat16", dict(sm_scale=0.1, sliding_window=7), marks=cover(0)),
        ("bfloat16", (4, 1), 64, "float8_e4m3fn", dict(soft_cap=3.0)),
    ],
    ids=["float32", "bfloat16", "8 bits, a head that fills a half"],
)
def test_out_and_cache(dtype: str, heads: tuple[int, int], head_dim: int, stored: str, options: dict[str, Any]):
    given, step = arguments(dtype, heads, head_dim, stored, **options)
    scales = dict(k_scale=0.5, v_scale=2.0) if stored != dtype else {}
    out, cache = tpu_inference.ragged_paged_attention(*given, **options, **scales)
    pages = [np.asarray(jnp.asarray(pages).astype(stored)) for pages in step.arguments["kv_pages"]]
    want = jflash.ragged_paged_attention(**step.arguments | scales | dict(kv_pages=tuple(pages)))
    np.testing.assert_allclose(out, np.asarray(want, out.dtype), rtol=2 * jnp.finfo(dtype).eps, atol=1e-6)
    assert cache.shape == given[3].shape
    flat = np.asarray(cache).reshape(*cache.shape[:2], -1, cache.shape[4])[:, :, : 2 * heads[1], :head_dim]
    for sequence, (_, length) in enumerate(STEPS):
        place = np.arange(length)
        row = step.arguments["page_indices"][sequence, place // PAGE_SIZE], place % PAGE_SIZE
        for first, own in enumerate(pages):
            np.testing.assert_array_equal(flat[row][:, first::2].astype(np.float32), own[row].astype(np.float32))


def test_every_token_sees_all_keys():
    """Without the causal mask."""
    given, step = arguments("float32", (4, 2), 16, "float32")
    out, _ = tpu_inference.ragged_paged_attention(*given, use_causal_mask=False, sliding_window=3)
    starts = step.arguments["cu_q_lens"]
    for sequence, call in enumerate(step.calls):
        want = jflash.attention(call.query, call.key, call.value, scale=1.0)
        np.testing.assert_allclose(out[starts[sequence] : starts[sequence + 1]], want, atol=1e-5)


def test_a_cache_that_is_shared_is_read_alone():
    given, _ = arguments("float32", (4, 2), 16, "float32")
    out, cache = tpu_inference.ragged_paged_attention(*given)
    noise = [np.full_like(new, 7) for new in given[1:3]]
    held = np.asarray(cache)
    again, kept = tpu_inference.ragged_paged_attention(given[0], *noise, held, *given[4:], update_kv_cache=False)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(kept, held)


@cover(0)
def test_queries_of_8_bits():
    """As if the caller had rounded them."""
    given, _ = arguments("bfloat16", (4, 2), 64, "float8_e4m3fn")
    query = given[0] * jnp.bfloat16(4)
    got, _ = tpu_inference.ragged_paged_attention(query, *given[1:], q_scale=0.25, sm_scale=0.1)
    rounded = jnp.clip(query / jnp.bfloat16(0.25), -448, 448).astype(jnp.float8_e4m3fn).astype(jnp.bfloat16)
    want, _ = tpu_inference.ragged_paged_attention(rounded, *given[1:], sm_scale=0.025)
    np.testing.assert_allclose(*(np.asarray(array, np.float32) for array in (got, want)), atol=1e-2)


def test_cache_is_donated_and_output_has_its_dtype():
    given, _ = arguments("float32", (4, 2), 16, "float32")
    cache = jnp.asarray(given[3])
    out, _ = tpu_inference.ragged_paged_attention(*given[:3], cache, *given[4:], out_dtype=jnp.bfloat16)
    assert cache.is_deleted()
    assert out.dtype == jnp.bfloat16


def test_ranks_are_not_promoted():
    """Nor by `ragged_paged_attention` and `update_pages`, which it calls."""
    given, _ = arguments("float32", (4, 2), 24, "float32")
    with jax.numpy_rank_promotion("raise"):
        tpu_inference.ragged_paged_attention(*given, k_scale=0.5, q_scale=None)


GOOD, _ = arguments("float32", (4, 2), 16, "float32")
NAMES = ("queries", "keys", "values", "kv_cache", "kv_lens", "page_indices", "cu_q_lens", "distribution")


@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [
        (NotImplementedError, "`debug_mode`", dict(debug_mode=True)),
        (ValueError, "`sliding_window` must be positive", dict(sliding_window=-1)),
        (ValueError, "`soft_cap` must be positive", dict(soft_cap=0.0)),
        (TypeError, "must have the dtype of `kv_cache`", dict(keys=GOOD[1].astype(np.float16))),
        (ValueError, "`keys` and `values` must have the same shape", dict(keys=GOOD[1][1:])),
        (ValueError, "`kv_cache` must have the shape .* for these keys", dict(kv_cache=GOOD[3][..., :64])),
        (ValueError, "`queries` heads must be a multiple", dict(queries=GOOD[0][:, :3])),
        (ValueError, "`page_indices` must have the shape", dict(page_indices=GOOD[5][1:])),
        (ValueError, r"`distribution` must have the shape \(3,\)", dict(distribution=GOOD[7][:2])),
        (ValueError, "`queries` must have the axes", dict(queries=GOOD[0][0])),
    ],
)  # fmt: skip
def test_wrong_argument(error: type[Exception], message: str, wrong: dict[str, Any]):
    with pytest.raises(error, match=message):
        tpu_inference.ragged_paged_attention(**dict(zip(NAMES, GOOD, strict=True)) | wrong)
