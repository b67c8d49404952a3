"""A call whose keys and values are moved into the pages of a cache, in random order, with garbage wherever nothing may
be read."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle
from plain_attention import Call

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
