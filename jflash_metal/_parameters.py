"""`Parameters` of shaders/parameters.h: what comes with a launch beside its arrays."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Array

from jflash._semantics.spec import Operands, Spec

_ROW_STRIDES = np.dtype([("batch", "<i8"), ("row", "<i4"), ("head", "<i4")], align=True)
_PAIR_STRIDES = np.dtype([("batch", "<i8"), ("head", "<i8"), ("query", "<i8"), ("key", "<i8")], align=True)
PARAMETERS = np.dtype(
    [
        *((name, _ROW_STRIDES) for name in ("query", "key", "value", "out")),
        *((name, _PAIR_STRIDES) for name in ("bias", "mask")),
        *((name, "<i4") for name in ("batch", "queries", "keys", "heads", "group", "bias_batch", "bias_heads")),
        *(
            (f"{name}_stride", "<i4")
            for name in (
                "scale",
                "alibi_slopes",
                "sinks",
                "query_offset",
                "query_lengths",
                "key_lengths",
                "query_segments",
                "key_segments",
                "query_ranges",
                "key_ranges",
            )
        ),
        *((name, "<i4") for name in ("query_offset", "left", "right")),
        *((name, "<f4") for name in ("scale", "soft_cap")),
    ],
    align=True,
)
"""`Parameters` of shaders/parameters.h."""


def parameters(spec: Spec, operands: Operands) -> bytes:
    """The structure for one call, as it lies in memory."""
    values = np.zeros((), PARAMETERS)
    queries, keys = (spec.query_length, spec.heads), (spec.key_length, spec.key_heads)
    for name, (length, heads), features in (
        ("query", queries, spec.head_dim),
        ("key", keys, spec.head_dim),
        ("value", keys, spec.value_dim),
        ("out", queries, spec.value_dim),
    ):
        values[name] = (length * heads * features, heads * features, features)
    for name in ("bias", "mask"):
        array = getattr(operands, name)
        if array is not None:
            values[name] = strides(array.shape)
    values["batch"], values["heads"], values["group"] = spec.batch, spec.heads, spec.group
    values["queries"], values["keys"] = spec.query_length, spec.key_length
    values["bias_batch"], values["bias_heads"] = (spec.bias_shape or (1, 1))[:2]
    for name in ("scale", "alibi_slopes", "sinks", "query_offset", "query_lengths", "key_lengths"):
        values[f"{name}_stride"] = batch_stride(getattr(operands, name))
    for side in ("query", "key"):
        segments = getattr(operands, f"{side}_segments")
        values[f"{side}_segments_stride"] = batch_stride(segments)
        if segments is not None and segments.shape[0] > 1:
            values[f"{side}_ranges_stride"] = 2 * -(-segments.shape[1] // 8)
    left, right = spec.bounds
    for name, value in (
        ("query_offset", spec.query_offset),
        ("left", left),
        ("right", right),
        ("scale", spec.scale),
        ("soft_cap", spec.logits_soft_cap),
    ):
        values[name] = 0 if value is None else value
    return values.tobytes()


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Distances between neighbours along each axis of a packed array, in elements; 0 along axes of size 1."""
    return tuple(0 if size == 1 else math.prod(shape[axis + 1 :]) for axis, size in enumerate(shape))


def batch_stride(array: Array | None) -> int:
    """Of an array `[#B, ...]`; 0 where there is none."""
    return 0 if array is None else strides(array.shape)[0]
