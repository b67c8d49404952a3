"""Checks every argument of `attention` and brings the call into canonical form, before anything is computed.

ValueError is for values that are wrong, TypeError for things of the wrong kind; each message names the argument, the
rule and what came.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash import _dropout, _score_mod
from jflash._spec import Operands, Spec, shape_facts

DTYPES = ("float32", "bfloat16", "float16", "float64")
_LIMIT = 2**30
"""Positions are 32-bit integers; windows and offsets stay far enough below that sums of them do not wrap."""


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
    query_offset: Any = 0,
    segment_ids: Any = None,
    sinks: Any = None,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    precision: Any = None,
    deterministic: Any = False,
) -> tuple[Spec, Operands, tuple[int, ...]]:
    """The call's static facts, its arrays, and the batch axes that the results get back."""
    query, key, value = _check_query_key_value(query, key, value)
    *batch_axes, query_length, heads, head_dim = query.shape
    batch_axes = tuple(batch_axes)
    key_length, key_heads = key.shape[-3:-1]
    batch = math.prod(batch_axes)
    dtype = np.dtype(query.dtype)
    accumulator = np.dtype(jnp.promote_types(dtype, jnp.float32))
    merge = lambda array: _merge_batch(array, batch_axes)
    pair_shape = (*batch_axes, heads, query_length, key_length)

    if bias is not None:
        bias = _array("bias", bias)
        if bias.dtype == bool:
            raise TypeError("`bias` is added to the logits; a bool array of who may attend is `mask`. Got dtype bool.")
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"`bias` must have a floating-point dtype. Got {bias.dtype}.")
        bias = merge(_broadcastable("bias", bias, pair_shape))
    if mask is not None:
        mask = _array("mask", mask)
        if mask.dtype != bool:
            raise TypeError(
                "`mask` must be bool, True where a query may attend; an additive mask is `bias`. "
                f"Got dtype {mask.dtype}."
            )
        mask = merge(_broadcastable("mask", mask, pair_shape))

    static_scale, scale = _check_scale(scale, head_dim, accumulator)
    static_offset, offset = _check_query_offset(query_offset, batch_axes)
    query_segments, key_segments = _check_segment_ids(segment_ids, batch_axes, query_length, key_length)
    if score_mod is not None:
        score_mod, score_mod_arrays = _score_mod.trace(score_mod, accumulator)
    else:
        score_mod_arrays = ()
    dropout_rate, dropout_key = _check_dropout(dropout_rate, dropout_key)
    batch_index = head_index = seed = None
    if score_mod is not None or dropout_rate > 0:
        batch_index = jnp.arange(batch, dtype=jnp.int32)
        head_index = jnp.arange(heads, dtype=jnp.int32)[None]
    if dropout_rate > 0:
        assert batch_index is not None
        seed = _dropout.seeds(dropout_key, batch_index)

    operands = Operands(
        query=merge(query),
        key=merge(key),
        value=merge(value),
        bias=bias,
        mask=mask,
        scale=scale,
        alibi_slopes=_per_head("alibi_slopes", alibi_slopes, heads, accumulator),
        sinks=_per_head("sinks", sinks, heads, accumulator),
        query_offset=offset,
        query_lengths=_lengths("query_seq_lengths", query_seq_lengths, batch_axes, "T", query_length),
        key_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, batch_axes, "S", key_length),
        query_segments=query_segments,
        key_segments=key_segments,
        batch_index=batch_index,
        head_index=head_index,
        dropout_seed=seed,
        score_mod_arrays=tuple(array[None] for array in score_mod_arrays),
    )
    spec = Spec(
        **shape_facts(operands),
        scale=static_scale,
        query_offset=static_offset,
        is_causal=static_bool("is_causal", is_causal),
        window=_check_window(local_window_size),
        logits_soft_cap=_check_soft_cap(logits_soft_cap),
        score_mod=score_mod,
        dropout_rate=dropout_rate,
        precision=_check_precision(precision),
        deterministic=static_bool("deterministic", deterministic),
    )
    return spec, operands, batch_axes


def static_bool(name: str, value: Any) -> bool:
    """A Python bool, or the error that says so."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"`{name}` must be known when the call is traced: a Python bool. Got {_describe(value)}.")
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be a bool. Got {_describe(value)}.")
    return bool(value)


def _describe(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return f"a traced {value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    return repr(value)


def _array(name: str, value: Any) -> Array:
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"`{name}` must be a JAX or NumPy array. Got {type(value).__name__}.")
    if isinstance(value, np.ndarray) and value.dtype == object:
        raise TypeError(f"`{name}` must be an array of numbers. Got an array of Python objects.")
    return jnp.asarray(value)


def _number(name: str, value: Any, rule: str) -> float:
    """A static real number as a float."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"`{name}` must be known when the call is traced: a Python number. Got {_describe(value)}.")
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be {rule}. Got {_describe(value)}.")
    return float(value)


def _check_query_key_value(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array]:
    query, key, value = _array("query", query), _array("key", key), _array("value", value)
    for name, array, axes in (("query", query, "T, N, H"), ("key", key, "S, K, H"), ("value", value, "S, K, D")):
        if array.ndim < 3:
            raise ValueError(f"`{name}` must have at least the axes [{axes}]. Got shape {array.shape}.")
        if array.dtype.name not in DTYPES:
            raise TypeError(f"`{name}` must have one of the dtypes {', '.join(DTYPES)}. Got {array.dtype}.")
        if 0 in array.shape[-2:]:
            raise ValueError(f"`{name}` must have at least one head and one feature. Got shape {array.shape}.")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            "`query`, `key` and `value` must have the same dtype. "
            f"Got {query.dtype}, {key.dtype} and {value.dtype}."
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            "`query`, `key` and `value` must have the same batch axes (all before the last three). "
            f"Got {query.shape[:-3]}, {key.shape[:-3]} and {value.shape[:-3]}."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"`query` and `key` must have the same head dimension. Got H={query.shape[-1]} and H={key.shape[-1]}."
        )
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(
            "`key` and `value` must have the same length and heads. "
            f"Got [S, K]={list(key.shape[-3:-1])} and {list(value.shape[-3:-1])}."
        )
    if query.shape[-2] % key.shape[-2] != 0:
        raise ValueError(
            f"`query` heads must be a multiple of `key` heads. Got N={query.shape[-2]} and K={key.shape[-2]}."
        )
    return query, key, value


def _broadcastable(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    """`array` with the axes it lacks in front, each of its axes 1 or that of `shape` ([*B, N, T, S])."""
    padded = (1,) * (len(shape) - array.ndim) + array.shape
    if array.ndim > len(shape) or any(have not in (1, want) for have, want in zip(padded, shape, strict=True)):
        raise ValueError(
            f"`{name}` must be broadcastable to [*B, N, T, S], each axis 1, missing or full. "
            f"Got {array.shape} for {shape}."
        )
    return array.reshape(padded)


def _merge_batch(array: Array, batch_axes: tuple[int, ...]) -> Array:
    """[*#B, ...] -> [#B, ...]: kept shared where the whole batch shares it."""
    have, rest = array.shape[: len(batch_axes)], array.shape[len(batch_axes) :]
    if all(size == 1 for size in have):
        return array.reshape(1, *rest)
    if have != batch_axes:
        array = jnp.broadcast_to(array, (*batch_axes, *rest))
    return array.reshape(math.prod(batch_axes), *rest)


def _check_scale(scale: Any, head_dim: int, accumulator: np.dtype[Any]) -> tuple[float | None, Array | None]:
    if scale is None:
        return head_dim**-0.5, None
    if isinstance(scale, jax.Array | np.ndarray):
        if scale.shape != ():
            raise ValueError(f"`scale` must be one number. Got shape {scale.shape}.")
        if not jnp.issubdtype(scale.dtype, jnp.floating):
            raise TypeError(f"`scale` must have a floating-point dtype. Got {scale.dtype}.")
        return None, jnp.asarray(scale).astype(accumulator)[None]
    static = _number("scale", scale, "a number or a scalar array")
    if not math.isfinite(static):
        raise ValueError(f"`scale` must be finite. Got {scale}.")
    return static, None


def _check_query_offset(offset: Any, batch_axes: tuple[int, ...]) -> tuple[int | None, Array | None]:
    if isinstance(offset, jax.Array | np.ndarray):
        _check_integers("query_offset", offset)
        if offset.shape not in ((), batch_axes):
            raise ValueError(f"`query_offset` must have the shape () or that of the batch, {batch_axes}. "
                             f"Got {offset.shape}.")
        return None, jnp.asarray(offset).astype(jnp.int32).reshape(-1)
    static = _integer("query_offset", offset, "an integer or an integer array")
    if abs(static) >= _LIMIT:
        raise ValueError(f"`query_offset` must be between -2**30 and 2**30. Got {static}.")
    return static, None


def _check_integers(name: str, array: Any) -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`{name}` must have an integer dtype. Got {array.dtype}.")


def _integer(name: str, value: Any, rule: str) -> int:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"`{name}` must be known when the call is traced: {rule}. Got {_describe(value)}.")
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be {rule}. Got {_describe(value)}.")
    return int(value)


def _check_window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    rule = "an integer or a pair (left, right) of them"
    pair: Sequence[Any] = window if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2:
        raise ValueError(f"`local_window_size` must be {rule}. Got {window!r}.")
    left, right = (_integer("local_window_size", side, rule) for side in pair)
    if left < 0 or right < 0:
        raise ValueError(f"`local_window_size` counts keys on each side and must not be negative. Got {window!r}.")
    return min(left, _LIMIT), min(right, _LIMIT)


def _check_soft_cap(cap: Any) -> float | None:
    if cap is None:
        return None
    static = _number("logits_soft_cap", cap, "a positive number or None")
    if not (static > 0 and math.isfinite(static)):
        raise ValueError(f"`logits_soft_cap` must be positive and finite. Got {cap}.")
    return static


def _per_head(name: str, array: Any, heads: int, accumulator: np.dtype[Any]) -> Array | None:
    if array is None:
        return None
    array = _array(name, array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"`{name}` must have a floating-point dtype. Got {array.dtype}.")
    if array.shape != (heads,):
        raise ValueError(f"`{name}` must have one value for each query head, shape ({heads},). Got {array.shape}.")
    return array.astype(accumulator)[None]


def _lengths(name: str, lengths: Any, batch_axes: tuple[int, ...], axis: str, most: int) -> Array | None:
    if lengths is None:
        return None
    known = isinstance(lengths, np.ndarray | np.generic)
    array = _array(name, lengths)
    _check_integers(name, array)
    if array.shape != batch_axes:
        raise ValueError(f"`{name}` must have one length for each batch entry, shape {batch_axes}. Got {array.shape}.")
    if known and lengths.size and not 0 <= lengths.min() <= lengths.max() <= most:
        raise ValueError(f"`{name}` must be between 0 and {axis}={most}. Got {lengths.min()} to {lengths.max()}.")
    return jnp.clip(array, 0, most).astype(jnp.int32).reshape(-1)


def _check_segment_ids(
    segment_ids: Any, batch_axes: tuple[int, ...], query_length: int, key_length: int
) -> tuple[Array | None, Array | None]:
    if segment_ids is None:
        return None, None
    pair = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(f"`segment_ids` must be one array or a pair (query's, key's). Got {len(pair)} of them.")
    merged: list[Array] = []
    for side, ids, length in (("query", pair[0], query_length), ("key", pair[1], key_length)):
        ids = _array("segment_ids", ids)
        _check_integers("segment_ids", ids)
        if ids.shape != (*batch_axes, length):
            raise ValueError(
                f"`segment_ids` of the {side} must have the shape {(*batch_axes, length)}; where T and S differ, "
                f"give a pair. Got {ids.shape}."
            )
        merged.append(_merge_batch(ids.astype(jnp.int32), batch_axes))
    return merged[0], merged[1]


def _check_dropout(rate: Any, key: Any) -> tuple[float, Array | None]:
    static = _number("dropout_rate", rate, "a number")
    if not 0 <= static < 1:
        raise ValueError(f"`dropout_rate` must be at least 0 and below 1. Got {rate}.")
    if static > 0 and key is None:
        raise ValueError(f"`dropout_key` is needed when `dropout_rate` is above 0. Got dropout_rate={rate} and no key.")
    if key is not None:
        if not isinstance(key, jax.Array | np.ndarray):
            raise TypeError(f"`dropout_key` must be a JAX random key. Got {_describe(key)}.")
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if not typed and key.dtype != jnp.uint32:
            raise TypeError(f"`dropout_key` must be a JAX random key, such as jax.random.key(0). Got {_describe(key)}.")
        if key.ndim != (0 if typed else 1):
            raise ValueError(f"`dropout_key` must be one key. Got shape {key.shape}.")
    return static, key


def _check_precision(precision: Any) -> Any:
    """One of the spellings that `jax.lax.dot_general` takes, made hashable."""
    if isinstance(precision, list):
        precision = tuple(precision)
    parts = precision if isinstance(precision, tuple) else (precision,)
    names = ("default", "high", "highest", "fastest", "bfloat16", "bfloat16_3x", "float32", "tensorfloat32")
    presets = tuple(preset.name for preset in jax.lax.DotAlgorithmPreset)
    for part in parts:
        known = part is None or isinstance(part, jax.lax.Precision | jax.lax.DotAlgorithmPreset | jax.lax.DotAlgorithm)
        if not known and not (isinstance(part, str) and (part in names or part in presets)):
            raise ValueError(
                "`precision` must be None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset, their names or a pair. "
                f"Got {precision!r}."
            )
    return precision
