"""Calls with keys and values in the pages of a cache, in random order, with garbage where nothing may be read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from plain_attention import Call, Results

GARBAGE = -(2**31)
"""In the table, past the end of a sequence."""


def lengths(batch: tuple[int, ...], most: int) -> np.ndarray:
    """0, 1, one short of full, full, a half, and so on in turn, for each entry."""
    some = [0, 1, most - 1, most, most // 2]
    return np.resize(np.array(some, np.int32), batch)


def with_lengths(call: Call) -> Call:
    """The call without cotangents, and with such lengths of its keys."""
    *batch, S, _, _ = call.key.shape
    return dataclasses.replace(call, key_value_seq_lengths=lengths(tuple(batch), S), d_out=None, d_lse=None)


def paginate(
    call: Call, page_size: int, *, interleaved: bool = False, dtype: Any = None, seed: int = 0
) -> dict[str, Any]:
    """The arguments of the same call with its keys and values in pages of a size, of a `dtype` that holds them exactly.

    Rows past a length are NaN (of integers the least), pages that no entry has too.
    """
    *batch, S, K, H = call.key.shape
    D = call.value.shape[-1]
    numbers = np.random.default_rng(seed)
    entries, pages = math.prod(batch), -(-S // page_size)
    dtype = np.dtype(call.key.dtype if dtype is None else dtype)
    nothing = jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else np.nan
    order = numbers.permutation(entries * pages + 3).astype(np.int32)
    table = np.full((entries, pages), GARBAGE, np.int32)
    cache = [np.full((len(order), page_size, K, width), nothing).astype(dtype) for width in (H, D)]
    of_entries = [array.reshape(entries, S, K, -1) for array in (call.key, call.value)]
    for entry, length in enumerate(call.key_value_seq_lengths.ravel()):
        used = -(-int(length) // page_size)
        table[entry, :used] = order[entry * pages : entry * pages + used]
        place = np.arange(length)
        for paged, array in zip(cache, of_entries, strict=True):
            paged[table[entry, place // page_size], place % page_size] = array[entry, :length].astype(dtype)
    key, value = cache
    if interleaved:
        key, value = np.stack([key, value], axis=3).reshape(*key.shape[:2], 2 * K, H), None
    return oracle.arguments(call, key=key, value=value, page_table=table.reshape(*batch, pages))


def of_8_bits(call: Call, dtype: str) -> Call:
    """The call with keys and values that a cache of 8 bits holds exactly: small integers, or rounded numbers."""
    numbers = np.random.default_rng(0)
    spread = (lambda array: numbers.integers(-9, 10, array.shape)) if dtype == "int8" else (lambda array: array)
    held = {name: spread(getattr(call, name)).astype(dtype).astype(np.float32) for name in ("key", "value")}
    return dataclasses.replace(call, **held)


def assert_scaled_right(got: Results, call: Call, arguments: dict[str, Any], *, as_tf32: bool = False) -> None:
    """Results for a cache with scales are right: the truth has its numbers times their scales in float64.

    The yardstick rounds those to the query's dtype.
    """
    cache, table = arguments["key"], np.maximum(arguments["page_table"], 0)
    (pages, size), heads = cache.shape[:2], call.key.shape[-2]

    def dequantized(name: str, scale: Any) -> np.ndarray:
        each = np.broadcast_to(np.asarray(1.0 if scale is None else scale, np.float64), (pages, heads))
        rows = np.repeat(each[table], size, axis=-2)[..., : call.key.shape[-3], :, None]
        return getattr(call, name).astype(np.float64) * rows

    factors = {name: dequantized(name, arguments.get(f"{name[0]}_scale")) for name in ("key", "value")}
    wide = dataclasses.replace(call, **factors)
    dtype = call.query.dtype
    narrow = dataclasses.replace(wide, key=wide.key.astype(dtype), value=wide.value.astype(dtype))
    truth, rounded, allowed = oracle.exact(wide), oracle.exact(narrow), oracle.tolerances(narrow)
    if as_tf32:
        by_tf32 = oracle.tf32(narrow)
        allowed = jax.tree.map(lambda limit, a, b: max(limit, oracle.error(a, b)), allowed, by_tf32, truth)
    more = jax.tree.map(lambda limit, a, b: limit + 2 * oracle.error(a, b), allowed, rounded, truth)
    oracle.assert_within(got, truth, more)


class RaggedCall(NamedTuple):
    """A step of several sequences: the call of each by itself, and the arguments of all together."""

    calls: list[Call]
    arguments: dict[str, Any]


def ragged(
    lengths: Sequence[tuple[int, int]],
    page_size: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: str = "float32",
    interleaved: bool = False,
    spare: tuple[int, int] = (7, 3),
    seed: int = 0,
    **options: Any,
) -> RaggedCall:
    """Sequences of so many tokens and keys each, in pages in random order, with garbage past every end.

    `spare` are the tokens and the sequences that the arrays have room for besides. `options` are those of
    `ragged_paged_attention`.
    """
    numbers = np.random.default_rng(seed)
    (N, K), (H, D) = heads, dims
    normal = lambda *shape: numbers.standard_normal(shape).astype(jnp.dtype(dtype))
    tokens, room = sum(count for count, _ in lengths), max(length for _, length in lengths)
    pages = [-(-length // page_size) for _, length in lengths]
    order = iter(numbers.permutation(sum(pages) + 2).astype(np.int32))
    seqs = len(lengths) + spare[1]
    table = np.full((seqs, max(-(-room // page_size), 1)), GARBAGE, np.int32)
    cache = [np.full((sum(pages) + 2, page_size, K, width), np.nan, jnp.dtype(dtype)) for width in (H, D)]
    query = normal(tokens + spare[0], N, H)
    starts = np.full(seqs + 1, 10**6, np.int32)
    starts[: len(lengths) + 1] = np.cumsum([0, *(count for count, _ in lengths)])
    kv_lens = np.full(seqs, 10**6, np.int32)
    calls = []
    window, scale = options.get("sliding_window"), options.get("sm_scale", 1.0)
    for sequence, (count, length) in enumerate(lengths):
        key, value = normal(length, K, H), normal(length, K, D)
        table[sequence, : pages[sequence]] = [next(order) for _ in range(pages[sequence])]
        place = np.arange(length)
        for paged, array in zip(cache, (key, value), strict=True):
            paged[table[sequence, place // page_size], place % page_size] = array
        kv_lens[sequence] = length
        calls.append(
            Call(
                query[starts[sequence] : starts[sequence] + count],
                key,
                value,
                scale=scale,
                is_causal=True,
                query_offset=length - count,
                local_window_size=None if window is None else (window - 1, 0),
                logits_soft_cap=options.get("soft_cap"),
                sinks=options.get("sinks"),
            )
        )
    kv_pages = np.stack(cache, axis=3).reshape(*cache[0].shape[:2], 2 * K, H) if interleaved else tuple(cache)
    arguments = dict(
        q=query,
        kv_pages=kv_pages,
        kv_lens=kv_lens,
        page_indices=table,
        cu_q_lens=starts,
        num_seqs=np.array([len(lengths)], np.int32),
    )
    return RaggedCall(calls, arguments | options)


def assert_ragged_right(results: tuple[Any, Any], step: RaggedCall) -> None:
    """Each sequence is right by itself, and what belongs to none is 0, its log-sum-exp -inf."""
    out, lse = map(np.asarray, results)
    starts = step.arguments["cu_q_lens"]
    for sequence, call in enumerate(step.calls):
        own = slice(starts[sequence], starts[sequence + 1])
        if call.query.size and call.key.size:
            oracle.assert_right(Results(out[own], lse[own], {}), call)
    last = starts[len(step.calls)]
    assert np.all(out[last:] == 0)
    assert np.all(lse[last:] == -np.inf)
