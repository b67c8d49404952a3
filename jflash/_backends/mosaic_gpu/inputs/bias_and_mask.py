"""Bias and mask, `[#B, #N, #T, #S]`: which axes an operand has decides how a kernel reads it."""

from __future__ import annotations

from typing import Literal

from jflash._semantics.spec import Spec

Kind = Literal["tile", "row", "column", "scalar"]
"""One value for each element of a tile of logits, for each query, for each key, or for each head."""


def kind(shape: tuple[int, int, int, int]) -> Kind:
    """The kind of a bias or mask of this shape."""
    by_query, by_key = shape[2] > 1, shape[3] > 1
    if by_query:
        return "tile" if by_key else "row"
    return "column" if by_key else "scalar"


def shapes(spec: Spec) -> dict[str, tuple[int, int, int, int]]:
    """The shapes of bias and mask, where the call has them."""
    all_shapes = {"bias": spec.bias_shape, "mask": spec.mask_shape}
    return {name: shape for name, shape in all_shapes.items() if shape is not None}


def bias_kind(spec: Spec) -> Kind | None:
    """The kind of the bias, if the call has one."""
    return None if spec.bias_shape is None else kind(spec.bias_shape)


def has_bias_tiles(spec: Spec) -> bool:
    """Whether the bias has both axes; kernels copy its tiles to shared memory."""
    return bias_kind(spec) == "tile"


def has_packed_mask(spec: Spec) -> bool:
    """Whether the mask has both axes; kernels read it as a packed mask."""
    return spec.mask_shape is not None and kind(spec.mask_shape) == "tile"


def bias_tile_bytes(spec: Spec) -> int:
    """Bytes for each logit that tiles of the bias take in shared memory."""
    if not has_bias_tiles(spec):
        return 0
    assert spec.bias_dtype is not None
    return spec.bias_dtype.itemsize
