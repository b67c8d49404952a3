"""The structure `Parameters` of shaders/parameters.h: the numbers that come with a launch beside its arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Array

from jflash._semantics.spec import Spec

_ROW_STRIDES = np.dtype([("batch", "<i8"), ("row", "<i4"), ("head", "<i4")], align=True)
_PAIR_STRIDES = np.dtype([("batch", "<i8"), ("head", "<i8"), ("query", "<i8"), ("key", "<i8")], align=True)
_PLANE_STRIDES = np.dtype([("batch", "<i8"), ("head", "<i8")], align=True)
_PLANES = ("key_tiles", "query_tiles", "tile_masks")
"""The arrays `[#B, #N, ...]` of which only the call's arrays say what shares them."""
_SCALES = ("k_scale", "v_scale")
_SHARED = (
    "scale",
    "alibi_slopes",
    "sinks",
    "query_offset",
    "query_lengths",
    "key_lengths",
    "query_segments",
    "key_segments",
    "query_segment_ranges",
    "key_segment_ranges",
    "page_table",
)
"""The arrays `[#B, ...]` of which only the operands say whether the batch shares them."""
PARAMETERS = np.dtype(
    [
        *((name, _ROW_STRIDES) for name in ("query", "key", "value", "out")),
        *((name, _PAIR_STRIDES) for name in ("bias", "mask")),
        *((name, _PLANE_STRIDES) for name in _PLANES),
        *((name, _ROW_STRIDES) for name in _SCALES),
        *((name, "<i4") for name in ("batch", "queries", "keys", "heads", "group", "bias_batch", "bias_heads")),
        *((f"{name}_stride", "<i4") for name in _SHARED),
        ("last_page", "<i4"),
        *((name, "<i4") for name in ("query_offset", "left", "right")),
        *((name, "<f4") for name in ("scale", "soft_cap")),
    ],
    align=True,
)
"""The structure as a dtype."""


def parameters_of(spec: Spec) -> bytes:
    """Return the structure as far as the `Spec` determines it: without what `with_arrays` adds."""
    values = np.zeros((), PARAMETERS)
    queries, keys = (spec.query_length, spec.heads), (spec.key_length, spec.key_heads)
    both = spec.head_dim + spec.value_dim if spec.pages is not None and spec.pages.interleaved else None
    for name, (length, heads), features in (
        ("query", queries, spec.head_dim),
        ("key", keys, both or spec.head_dim),
        ("value", keys, both or spec.value_dim),
        ("out", queries, spec.value_dim),
    ):
        values[name] = (length * heads * features, heads * features, features)
    for name, shape in (("bias", spec.bias_shape), ("mask", spec.mask_shape)):
        if shape is not None:
            values[name] = strides(shape)
    values["batch"], values["heads"], values["group"] = spec.batch, spec.heads, spec.group
    values["queries"], values["keys"] = spec.query_length, spec.key_length
    values["bias_batch"], values["bias_heads"] = (spec.bias_shape or (1, 1))[:2]
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


def with_arrays(parameters: bytes, arrays: Mapping[str, Array], page_size: int) -> bytes:
    """Return the structure with what the shapes of arrays say: the strides of those that batch or heads may share, and
    of a cache."""
    values = np.frombuffer(parameters, PARAMETERS).copy()
    for name in ("key", "value"):
        values[name]["batch"] = strides(arrays[name].shape)[0]
    for name in _SCALES:
        batch, page, head = strides(arrays[name].shape) if name in arrays else (0, 0, 0)
        values[name] = (batch, page, head)
    values["last_page"] = arrays["key"].shape[1] // page_size - 1 if "page_table" in arrays else 0
    for name in _PLANES:
        values[name] = strides(arrays[name].shape)[:2] if name in arrays else (0, 0)
    for name in _SHARED:
        values[f"{name}_stride"] = strides(arrays[name].shape)[0] if name in arrays else 0
    return values.tobytes()


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a packed array, in elements; 0 along axes of size 1."""
    return tuple(0 if size == 1 else math.prod(shape[axis + 1 :]) for axis, size in enumerate(shape))
