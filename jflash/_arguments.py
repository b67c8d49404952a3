"""Checks of every argument of `attention`, made before anything is computed or compiled.

A wrong value raises a ValueError, a thing of the wrong kind a TypeError. Each message names the argument, the rule and
what came.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

DTYPES = ("float32", "bfloat16", "float16", "float64")
STRATEGIES = ("ring", "all_to_all", "gather")
OFFSET_LIMIT = 2**29
WINDOW_LIMIT = 2**30
"""The largest window. Positions are 32-bit integers: a window, an offset and a length together must not wrap."""
_LARGEST_FLOAT = int(np.finfo(np.float64).max)


def query_key_value(query: Any, key: Any, value: Any) -> None:
    """Check `[*B, T, N, H]`, `[*B, S, K, H]` and `[*B, S, K, D]` arrays of one dtype; N must be a multiple of K."""
    for name, array, axes in (("query", query, "T, N, H"), ("key", key, "S, K, H"), ("value", value, "S, K, D")):
        heads(name, array, axes)
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            "`query`, `key` and `value` must have the same dtype: x.astype(dtype) casts one. "
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
        heads_first = 0 not in (query.shape[-3], key.shape[-3]) and query.shape[-3] % key.shape[-3] == 0
        remedy = " The axes are [*B, T, N, H]: if heads come first, give jnp.swapaxes(x, -3, -2) of all three."
        raise ValueError(
            "`query` heads must be a multiple of `key` heads. "
            f"Got N={query.shape[-2]} and K={key.shape[-2]}.{remedy if heads_first else ''}"
        )


def heads(name: str, array: Any, axes: str, dtypes: Sequence[str] = DTYPES) -> None:
    """Check an array's dtype, that its last axes are these, and that they hold a head and a feature at least."""
    _array(name, array)
    if array.ndim < 3:
        raise ValueError(
            f"`{name}` must have at least the axes [{axes}]; a single head is x[:, None, :]. Got shape {array.shape}."
        )
    if array.dtype.name not in dtypes:
        raise TypeError(f"`{name}` must have one of the dtypes {', '.join(dtypes)}. Got {array.dtype}.")
    if 0 in array.shape[-2:]:
        raise ValueError(f"`{name}` must have at least one head and one feature. Got shape {array.shape}.")


def array(name: str, value: Any) -> None:
    """Check that a value is an array of numbers."""
    _array(name, value)


def integers(name: str, array: Any) -> None:
    """Check that a value is an array of integers."""
    _array(name, array)
    _integers(name, array)


def floating(name: str, array: Any) -> None:
    """Check that a value is an array of floating-point numbers."""
    _array(name, array)
    _floating(name, array)


def bias(array: Any, shape: tuple[int, ...]) -> None:
    """Check that `bias` is floating and broadcastable to `shape`, which is `[*B, N, T, S]`."""
    _array("bias", array)
    if array.dtype == bool:
        raise TypeError("`bias` is added to the logits; a bool array of who may attend is `mask`. Got dtype bool.")
    _floating("bias", array)
    _broadcastable("bias", array, shape)


def mask(array: Any, shape: tuple[int, ...]) -> None:
    """Check that `mask` is bool and broadcastable to `shape`, which is `[*B, N, T, S]`."""
    _array("mask", array)
    if array.dtype != bool:
        is_floating = jnp.issubdtype(array.dtype, jnp.floating)
        additive = ", for one of 0 and -inf mask == 0; what is added to logits is `bias`" if is_floating else ""
        raise TypeError(
            "`mask` must be bool, True where a query may attend; for a mask of ones and zeros give mask != 0"
            f"{additive}. Got dtype {array.dtype}."
        )
    _broadcastable("mask", array, shape)


def scale(value: Any, name: str = "scale") -> None:
    """Check that a scale is a finite number or a floating scalar array."""
    if is_array(value):
        if value.shape != ():
            raise ValueError(f"`{name}` must be one number. Got shape {value.shape}.")
        _floating(name, value)
    else:
        finite(name, value, "a number or a scalar array")


def finite(name: str, value: Any, rule: str) -> None:
    """Check that a number of Python or NumPy is finite."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    static = _number(name, value, rule)
    if not math.isfinite(static):
        raise ValueError(f"`{name}` must be finite. Got {static}.")


def is_array(value: Any) -> bool:
    """Return whether a number is an array to compute with. A NumPy scalar is as good as a Python number."""
    return isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and value.ndim > 0)


def static_bool(name: str, value: Any) -> bool:
    """Return the argument as a bool; it must be known when the call is traced."""
    _known(name, value, "a Python bool")
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be a bool. Got {_describe(value)}.")
    return bool(value)


def window(value: Any) -> tuple[int, int] | None:
    """Return `local_window_size` as (left, right)."""
    if value is None:
        return None
    rule = "an integer or a pair (left, right) of them"
    arrays = [side for side in jax.tree.leaves(value) if isinstance(side, jax.Array)]
    if arrays:
        raise TypeError(
            f"`local_window_size` must be known when the call is traced: {rule}, as Python numbers. Name it in "
            "jax.jit's static_argnames; a window that is computed is a `score_mod` that gives -inf outside of it. "
            f"Got {_describe(arrays[0])}."
        )
    pair: Sequence[Any] = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"`local_window_size` must be {rule}. Got {value!r}.")
    left, right = (_integer("local_window_size", side, rule) for side in pair)
    if left < 0 or right < 0:
        raise ValueError(
            "`local_window_size` counts keys on each side and must not be negative; give the number of keys for no "
            "limit. "
            f"Got {value!r}."
        )
    return min(left, WINDOW_LIMIT), min(right, WINDOW_LIMIT)


def keys_back(name: str, value: Any) -> tuple[int, int] | None:
    """Return a positive number of keys, up to the query's own, as the window (left, right); `None` is none."""
    if value is None:
        return None
    static = _integer(name, value, "a positive integer or None")
    if static <= 0:
        raise ValueError(f"`{name}` must be positive. Got {static}.")
    return min(static - 1, WINDOW_LIMIT), 0


def soft_cap(value: Any, name: str = "logits_soft_cap") -> float | None:
    """Return a soft cap as a float; it must be positive and finite."""
    if value is None:
        return None
    static = _number(name, value, "a positive number or None")
    if not (static > 0 and math.isfinite(static)):
        raise ValueError(f"`{name}` must be positive and finite. Got {static}.")
    return static


def per_head(name: str, array: Any, heads: int) -> None:
    """Check that an argument is a floating array `[N]`."""
    _array(name, array)
    _floating(name, array)
    if array.shape != (heads,):
        raise ValueError(f"`{name}` must have one value for each query head, shape ({heads},). Got {array.shape}.")


def query_offset(value: Any, batch_axes: tuple[int, ...]) -> None:
    """Check that `query_offset` is an integer, or an integer array `[]` or `[*B]`, within `OFFSET_LIMIT` of 0."""
    if is_array(value):
        _integers("query_offset", value)
        if value.shape not in ((), batch_axes):
            raise ValueError(
                f"`query_offset` must have the shape () or that of the batch, {batch_axes}. Got {value.shape}."
            )
        _known_range("query_offset", value, -OFFSET_LIMIT, OFFSET_LIMIT, "-2**29 and 2**29")
    else:
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value[()]
        static = _integer("query_offset", value, "an integer or an integer array")
        if abs(static) > OFFSET_LIMIT:
            raise ValueError(f"`query_offset` must be between -2**29 and 2**29. Got {static}.")


def lengths(name: str, array: Any, batch_axes: tuple[int, ...], axis: str, most: int) -> None:
    """Check that lengths are integers `[*B]`, and from 0 to the axis' length where values can be seen."""
    rule = f"one length for each batch entry; jnp.full({batch_axes}, length) has the same for all"
    if not isinstance(array, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"`{name}` must be an integer array of {rule}. Got {array!r}.")
    _array(name, array)
    _integers(name, array)
    if array.shape != batch_axes:
        raise ValueError(f"`{name}` must have the shape {batch_axes}, {rule}. Got {array.shape}.")
    _known_range(name, array, 0, most, f"0 and {axis}={most}")


def segment_ids(value: Any, batch_axes: tuple[int, ...], query_length: int, key_length: int) -> tuple[Any, Any]:
    """Return the query's ids `[*B, T]` and the key's `[*B, S]`; both must be integers."""
    pair = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"`segment_ids` must be one array or a pair (query's, key's). Got {len(pair)} of them.")
    for side, ids, length in (("query", pair[0], query_length), ("key", pair[1], key_length)):
        _array("segment_ids", ids)
        _integers("segment_ids", ids)
        if ids.shape != (*batch_axes, length):
            raise ValueError(
                f"`segment_ids` of the {side} must have the shape {(*batch_axes, length)}; where T and S differ, "
                f"give a pair. Got {ids.shape}."
            )
        if not jax.config.jax_enable_x64:
            limits = np.iinfo(np.int32)
            _known_range("segment_ids", ids, limits.min, limits.max, "-2**31 and 2**31 - 1 (or enable x64)")
    return pair[0], pair[1]


def dropout(rate: Any, key: Any) -> float:
    """Return the dropout rate, at least 0 and below 1; a rate above 0 needs a key."""
    static = _number("dropout_rate", rate, "a number")
    if not 0 <= static < 1:
        raise ValueError(f"`dropout_rate` must be at least 0 and below 1. Got {static}.")
    if key is None:
        if static > 0:
            raise ValueError(
                f"`dropout_key` is needed when `dropout_rate` is above 0. Got dropout_rate={rate} and no key."
            )
        return static
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"`dropout_key` must be a JAX random key. Got {_describe(key)}.")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and key.dtype != jnp.uint32:
        raise TypeError(f"`dropout_key` must be a JAX random key, such as jax.random.key(0). Got {_describe(key)}.")
    if key.shape != (() if typed else jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape):
        raise ValueError(f"`dropout_key` must be one key. Got shape {key.shape}.")
    return static


def precision(value: Any) -> Any:
    """Return `precision` in a hashable spelling that `jax.lax.dot_general` takes; None is JAX's configured one."""
    value = jax.config.jax_default_matmul_precision if value is None else value
    levels = ("default", "high", "highest", "fastest", "bfloat16", "bfloat16_3x", "float32", "tensorfloat32")
    presets = tuple(preset.name for preset in jax.lax.DotAlgorithmPreset)

    def level(one: Any) -> bool:
        return one is None or isinstance(one, jax.lax.Precision) or (isinstance(one, str) and one in levels)

    if isinstance(value, tuple | list):
        if len(value) == 2 and all(level(one) for one in value):
            left, right = value
            return None if left is None and right is None else (left, right)
    elif (
        level(value)
        or isinstance(value, jax.lax.DotAlgorithmPreset | jax.lax.DotAlgorithm)
        or (isinstance(value, str) and value in presets)
    ):
        return value
    raise ValueError(
        "`precision` must be None, a jax.lax.Precision or its name, a pair of those, or a jax.lax.DotAlgorithmPreset "
        f"or its name. Got {value!r}."
    )


def size(name: str, value: Any) -> int:
    """A positive integer."""
    static = _integer(name, value, "a positive integer")
    if static < 1:
        raise ValueError(f"`{name}` must be a positive integer. Got {static}.")
    return static


def mask_mod_shape(made_for: tuple[int, ...], looks_at: Sequence[bool], call: tuple[int, ...]) -> None:
    """Check that a `jflash.tile_map` is for calls of this size; batch entries and heads matter if it looks at them."""
    names = "batch", "heads", "query_length", "key_length"
    wanted = dict(zip(names, call, strict=True))
    matters = (*looks_at[:2], True, True)
    if any(m and have != want for m, have, want in zip(matters, made_for, call, strict=True)):
        written = lambda sizes: ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"`mask_mod` is a map that was made for calls of another size; for this one it is "
            f"jflash.tile_map(f, {written(wanted)}). Got {written(dict(zip(names, made_for, strict=True)))}."
        )


def sequence_axes(value: Any) -> tuple[str, ...]:
    """Return the names of mesh axes; they must be axes of the `jax.shard_map` around the call."""
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`sequence_axis` must be the name of a mesh axis, or a tuple of names. Got {value!r}.")
    here = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not set(names) <= set(here) or len(set(names)) < len(names):
        raise ValueError(
            "`sequence_axis` must name axes of the jax.shard_map around the call, each once; elsewhere arrays say by "
            f"their shardings how they are split. Got {value!r}, and the axes here are {here}."
        )
    return tuple(names)


def sequence_strategy(value: Any) -> str | None:
    """Return the name of a strategy, one of `STRATEGIES`, or None."""
    if value is not None and value not in STRATEGIES:
        raise ValueError(f"`sequence_strategy` must be one of {', '.join(STRATEGIES)}, or None. Got {value!r}.")
    return value


def _describe(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return f"a traced {value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    return repr(value)


def _array(name: str, value: Any) -> None:
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"`{name}` must be a JAX or NumPy array. Got {type(value).__name__}.")
    if not (value.dtype == bool or jnp.issubdtype(value.dtype, jnp.number)):
        raise TypeError(f"`{name}` must be an array of numbers. Got dtype {value.dtype}.")


def _floating(name: str, array: Any) -> None:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"`{name}` must have a floating-point dtype. Got {array.dtype}.")


def _integers(name: str, array: Any) -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`{name}` must have an integer dtype. Got {array.dtype}.")


def _broadcastable(name: str, array: Any, shape: tuple[int, ...]) -> None:
    padded = (1,) * (len(shape) - array.ndim) + array.shape
    if array.ndim > len(shape) or any(have not in (1, want) for have, want in zip(padded, shape, strict=True)):
        remedies = {
            2: f" If its axes are [B, S], give {name}[:, None, None].",
            3: f" If its axes are [B, T, S], give {name}[:, None].",
        }
        raise ValueError(
            f"`{name}` must be broadcastable to [*B, N, T, S], each axis 1, missing from the left, or full. "
            f"Got {array.shape} for {shape}.{remedies.get(array.ndim, '') if array.ndim < len(shape) else ''}"
        )


def _known_range(name: str, array: Any, least: int, most: int, words: str) -> None:
    """Refuse values that are out of range, if they can be seen without waiting for a device."""
    if isinstance(array, np.ndarray | np.generic) and array.size and not least <= array.min() <= array.max() <= most:
        raise ValueError(f"`{name}` must be between {words}. Got {array.min()} to {array.max()}.")


def _known(name: str, value: Any, kind: str) -> None:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"`{name}` must be known when the call is traced: {kind}. Name it in jax.jit's static_argnames. "
            f"Got {_describe(value)}."
        )


def _number(name: str, value: Any, rule: str) -> float:
    _known(name, value, "a Python number")
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be {rule}. Got {_describe(value)}.")
    if isinstance(value, numbers.Integral) and abs(int(value)) > _LARGEST_FLOAT:
        raise ValueError(f"`{name}` must be {rule} within the range of a float. Got an integer beyond it.")
    return float(value)


def _integer(name: str, value: Any, rule: str) -> int:
    _known(name, value, rule)
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be {rule}. Got {_describe(value)}.")
    return int(value)
