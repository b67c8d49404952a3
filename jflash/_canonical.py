"""The canonical form of a call of `attention`: `Spec` and `Operands`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32

from jflash import _arguments, _pages
from jflash._semantics import dropout, mask_mod_as_options, score_mod_as_cap
from jflash._semantics.dtypes import widened
from jflash._semantics.spec import Operands, Spec, shape_facts


def canonicalize(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    scale: Any = None,
    is_causal: Any = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    logits_soft_cap: Any = None,
    alibi_slopes: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    query_offset: Any = None,
    segment_ids: Any = None,
    sinks: Any = None,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    broadcast_dropout: Any = False,
    precision: Any = None,
    deterministic: Any = False,
    sequence_axis: Any = None,
    sequence_strategy: Any = None,
    page_table: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[Spec, Operands, tuple[int, ...]]:
    """Return the call's static facts, its arrays, and the batch axes that the results get back.

    `score_mod` must be what `trace_score_mod` returned, and `mask_mod` what `trace_mask_mod` did.

    Raises:
      ValueError, TypeError: as `attention`, all of them before the first array is touched.
    """
    cache = _pages.Cache(key, value, page_table, k_scale, v_scale)
    pages = cache.check(query, key_value_seq_lengths, sequence_axis)
    *batch_axes, query_length, heads, head_dim = query.shape
    sequence_axes = _arguments.sequence_axes(sequence_axis)
    devices = lax.axis_size(sequence_axes) if sequence_axes else 1
    batch_axes, key_length = tuple(batch_axes), key.shape[-3] if pages is None else cache.places
    whole_query, whole_key = query_length * devices, key_length * devices
    pair_shape = (*batch_axes, heads, query_length, whole_key)
    accumulator = widened(query.dtype)
    static: dict[str, Any] = dict(
        is_causal=_arguments.static_bool("is_causal", is_causal),
        window=_arguments.window(local_window_size),
        logits_soft_cap=_arguments.soft_cap(logits_soft_cap),
        dropout_rate=dropout.possible_rate(_arguments.dropout(dropout_rate, dropout_key)),
        broadcast_dropout=_arguments.static_bool("broadcast_dropout", broadcast_dropout),
        precision=_arguments.precision(precision),
        deterministic=_arguments.static_bool("deterministic", deterministic),
        sequence_axes=sequence_axes if devices > 1 else (),
        sequence_strategy=_arguments.sequence_strategy(sequence_strategy),
        value_is_key=value is key,
    )
    if bias is not None:
        _arguments.bias(bias, pair_shape)
    if mask is not None:
        _arguments.mask(mask, pair_shape)
    if scale is not None:
        _arguments.scale(scale)
    if alibi_slopes is not None:
        _arguments.per_head("alibi_slopes", alibi_slopes, heads)
    if sinks is not None:
        _arguments.per_head("sinks", sinks, heads)
    if query_seq_lengths is not None:
        _arguments.lengths("query_seq_lengths", query_seq_lengths, batch_axes, "T", whole_query)
    if key_value_seq_lengths is not None:
        _arguments.lengths("key_value_seq_lengths", key_value_seq_lengths, batch_axes, "S", whole_key)
    if segment_ids is not None:
        segment_ids = _arguments.segment_ids(segment_ids, batch_axes, query_length, key_length)
        static["same_segments"] = segment_ids[0] is segment_ids[1]
    query_offset = 0 if query_offset is None else query_offset
    _arguments.query_offset(query_offset, batch_axes)
    comes_first = logits_soft_cap is None and bias is None and alibi_slopes is None
    score_mod, captured, cap = _score_mod_or_cap(score_mod, comes_first=comes_first)
    if cap is not None:
        static["logits_soft_cap"] = cap
    if mask_mod is not None:
        sizes = math.prod(batch_axes), heads, whole_query, whole_key
        mask_mod, bounded = _mask_mod_or_bounds(mask_mod, sizes, query_offset, static["is_causal"], static["window"])
        static |= bounded

    dropped = (dropout_key, broadcast_dropout) if dropout_rate > 0 else None
    query_segments = key_segments = None
    if segment_ids is not None:
        ids: Any = [_merge_batch(ids, batch_axes) for ids in segment_ids]
        query_segments, key_segments = _segments(ids, sequence_axes if devices > 1 else ())
    scale_is_array, offset_is_array = _arguments.is_array(scale), _arguments.is_array(query_offset)
    operands = Operands(
        query=_merge_batch(query, batch_axes),
        **_keys_and_values(cache, batch_axes, accumulator),
        bias=_bias(_pairs(bias, batch_axes), accumulator),
        mask=_pairs(mask, batch_axes),
        scale=jnp.asarray(scale).astype(accumulator)[None] if scale_is_array else None,
        alibi_slopes=_shared(alibi_slopes, accumulator),
        sinks=_shared(sinks, accumulator),
        query_offset=_in_32_bits(query_offset) if offset_is_array else None,
        query_lengths=_in_32_bits(query_seq_lengths),
        key_lengths=_in_32_bits(key_value_seq_lengths),
        query_segments=query_segments,
        key_segments=key_segments,
        **_indices(math.prod(batch_axes), heads, score_mod is not None or mask_mod is not None, dropped),
        score_mod_arrays=tuple(array[None] for array in captured),
        mask_mod_arrays=() if mask_mod is None else tuple(array[None] for array in mask_mod.arrays),
        coverage=None if mask_mod is None else mask_mod.coverage,
    )
    spec = Spec(
        **shape_facts(operands, pages),
        **static,
        pages=pages,
        scale=None if scale_is_array else head_dim**-0.5 if scale is None else float(scale),
        query_offset=None if offset_is_array else int(query_offset),
        score_mod=score_mod,
        mask_mod=None if mask_mod is None else mask_mod.mask_mod,
    )
    return spec, operands, batch_axes


def _score_mod_or_cap(score_mod: Any, *, comes_first: bool) -> tuple[Any, tuple[Array, ...], float | None]:
    """Return a call's `score_mod`, the arrays that it reads, and the soft cap that it is.

    Where nothing comes between the scale and `score_mod`, one that is a soft cap is the call's, and no function.
    """
    if score_mod is None:
        return None, (), None
    function, captured = score_mod
    cap = score_mod_as_cap.cap_of(function) if comes_first else None
    return (function, captured, None) if cap is None else (None, (), cap)


def _mask_mod_or_bounds(
    mask_mod: Any, sizes: tuple[int, ...], query_offset: Any, is_causal: bool, window: tuple[int, int] | None
) -> tuple[Any, dict[str, Any]]:
    """Check a call's `mask_mod`, and return it, or none and the `is_causal` and `window` that say the same.

    Without an offset, positions are the indices that the function is given.
    """
    if mask_mod.shape is not None:
        _arguments.mask_mod_shape(mask_mod.shape, mask_mod.mask_mod.looks_at, sizes)
    has_offset = _arguments.is_array(query_offset) or query_offset != 0
    bounds = None if has_offset else mask_mod_as_options.bounds(mask_mod.mask_mod)
    return (mask_mod, {}) if bounds is None else (None, _bounded(bounds, is_causal, window))


def _bounded(
    bounds: tuple[int | None, int | None], is_causal: bool, window: tuple[int, int] | None
) -> dict[str, bool | tuple[int | None, int | None] | None]:
    """Return `is_causal` and `window` of a call with these, and with (left, right) bounds besides."""
    both = zip(bounds, window or (None, None), strict=True)
    left, right = (min((side for side in sides if side is not None), default=None) for sides in both)
    is_causal = is_causal or right == 0
    right = 0 if is_causal else right
    is_window = left is not None or right not in (None, 0)
    return dict(is_causal=is_causal, window=(left, right) if is_window else None)


def _indices(batch: int, heads: int, has_functions: bool, dropped: tuple[Any, Any] | None) -> dict[str, Array]:
    """Return the operands that say which entry and head a row is of, and seed its dropout, where they are asked for.

    `dropped` is dropout's key, and whether all entries and heads have the same.
    """
    if not has_functions and dropped is None:
        return {}
    entry = jnp.arange(batch, dtype=jnp.int32)
    made = dict(batch_index=entry, head_index=jnp.arange(heads, dtype=jnp.int32)[None])
    if dropped is not None:
        key, is_broadcast = dropped
        made["dropout_seed"] = dropout.seeds(key, jnp.zeros_like(entry) if is_broadcast else entry)
    return made


def _keys_and_values(cache: _pages.Cache, batch_axes: tuple[int, ...], accumulator: np.dtype[Any]) -> dict[str, Any]:
    """Return the operands that hold keys and values."""
    if cache.page_table is not None:
        return cache.operands(accumulator)
    return dict(key=_merge_batch(cache.key, batch_axes), value=_merge_batch(cache.value, batch_axes))


def _merge_batch(array: Any, batch_axes: tuple[int, ...]) -> Array:
    """Return `[*#B, ...]` as `[#B, ...]`; what the whole batch shares stays shared."""
    array = jnp.asarray(array)
    have, rest = array.shape[: len(batch_axes)], array.shape[len(batch_axes) :]
    if all(size == 1 for size in have):
        return array.reshape(1, *rest)
    if have != batch_axes:
        array = jnp.broadcast_to(array, (*batch_axes, *rest))
    return array.reshape(math.prod(batch_axes), *rest)


def _pairs(array: Any, batch_axes: tuple[int, ...]) -> Array | None:
    """Return `[*#B, #N, #T, #S]`, whose first axes may be missing, as `[#B, #N, #T, #S]`."""
    if array is None:
        return None
    array = jnp.asarray(array)
    return _merge_batch(array.reshape((1,) * (len(batch_axes) + 3 - array.ndim) + array.shape), batch_axes)


def _shared(array: Any, dtype: np.dtype[Any]) -> Array | None:
    return None if array is None else jnp.asarray(array).astype(dtype)[None]


def _bias(bias: Array | None, accumulator: np.dtype[Any]) -> Array | None:
    """Return the bias in a dtype that queries may have, and no wider than the logits that it is added to."""
    if bias is None or (bias.dtype.name in _arguments.DTYPES and bias.dtype.itemsize <= accumulator.itemsize):
        return bias
    return bias.astype(accumulator)


def _segments(ids: list[Array], sequence_axes: tuple[str, ...]) -> list[Int32[Array, "#B L"]]:
    """Return the queries' and the keys' ids in 32 bits: equal where they were, which is all that is asked of them.

    Where their dtypes have more than 2**32 numbers between them, ids become their places among all ids of their batch
    entry in order, including the ids on other devices. Where they have fewer, ids that are wrapped stay different.
    """
    limits = [jnp.iinfo(array.dtype) for array in ids]
    if max(dtype.max for dtype in limits) - min(dtype.min for dtype in limits) < 2**32:
        return [array.astype(jnp.int32) for array in ids]
    # Arrays of 64 bits outlive the context in which JAX makes them.
    with jax.enable_x64(True):
        wide = [array.astype(jnp.uint64) for array in ids]
        every = [lax.all_gather(array, sequence_axes, axis=1, tiled=True) for array in wide] if sequence_axes else wide
        in_order = jnp.sort(jnp.concatenate(every, axis=1), axis=1)
        places = map(jax.vmap(_place), [in_order, in_order], wide)
        # Negative ids are wrapped, and may have met unsigned ones: they go before all others.
        below = in_order.shape[1] + 1
        return [jnp.where(array < 0, place - below, place) for array, place in zip(ids, places, strict=True)]


def _place(in_order: Int[Array, "n"], ids: Int[Array, "L"]) -> Int32[Array, "L"]:
    """Return how many numbers come before each id, as `jnp.searchsorted` does, which fails in some `shard_map` (jax
    0.12)."""
    count, before = len(in_order), jnp.zeros_like(ids, jnp.int32)
    for bit in reversed(range(count.bit_length())):
        further = before + 2**bit
        is_before = (further <= count) & (in_order[jnp.minimum(further, count) - 1] < ids)
        before = jnp.where(is_before, further, before)
    return before


def _in_32_bits(array: Any) -> Int32[Array, "#B"] | None:
    """Return offsets or lengths as int32, wider ones clamped to what it holds; who reads them limits them further
    (`tile.in_range`)."""
    if array is None:
        return None
    array = jnp.asarray(array).reshape(-1)
    return array if array.dtype == jnp.int32 else _clamped(array)


@jax.jit
def _clamped(array: Int[Array, "..."]) -> Int32[Array, "..."]:
    """Clamp an array, compiled: else numbers are sent to the device, which `jax.transfer_guard` may forbid."""
    limits = jnp.iinfo(jnp.int32)
    if array.dtype.itemsize >= 4:
        array = jnp.clip(array, max(limits.min, int(jnp.iinfo(array.dtype).min)), limits.max)
    return array.astype(jnp.int32)
