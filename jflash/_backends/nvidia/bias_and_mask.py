"""Bias and mask, `[#B, #N, #T, #S]`: which axes an operand has decides how a kernel reads it."""

from __future__ import annotations

from typing import Literal

from jflash._semantics.spec import Spec

Kind = Literal["tile", "row", "column", "scalar"]
"""One value for each element of a tile of logits, for each query, for each key, or for each head."""


def kinds(spec: Spec) -> dict[str, Kind]:
    """The kinds of bias and mask, where the call has them."""
    by_axes: dict[tuple[bool, bool], Kind]
    by_axes = {(True, True): "tile", (True, False): "row", (False, True): "column", (False, False): "scalar"}
    shapes = {"bias": spec.bias_shape, "mask": spec.mask_shape}
    return {name: by_axes[shape[2] > 1, shape[3] > 1] for name, shape in shapes.items() if shape is not None}


def bias_kind(spec: Spec) -> Kind | None:
    """The kind of the bias, if the call has one."""
    return kinds(spec).get("bias")


def has_bias_tiles(spec: Spec) -> bool:
    """Whether the bias has both axes; kernels copy its tiles to shared memory."""
    return bias_kind(spec) == "tile"


def has_packed_mask(spec: Spec) -> bool:
    """Whether the mask has both axes; kernels read it as a packed mask."""
    return kinds(spec).get("mask") == "tile"


def bias_tile_bytes(spec: Spec) -> int:
    """Bytes for each logit that tiles of the bias take in shared memory."""
    return spec.bias_dtype.itemsize if spec.bias_dtype is not None and has_bias_tiles(spec) else 0
