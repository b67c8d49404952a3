"""Bias and mask, `[#B, #N, #T, #S]`: operands with a query and a key axis, of which a call may share any."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Array

from jflash._semantics.spec import Spec


def kind(shape: tuple[int, int, int, int]) -> str:
    """Of a bias or mask `[#B, #N, #T, #S]`: one value for each "tile" element, "row", "column", or a "scalar"."""
    return {(True, True): "tile", (True, False): "row", (False, True): "column", (False, False): "scalar"}[
        shape[2] > 1, shape[3] > 1
    ]


def pair_shapes(spec: Spec) -> dict[str, tuple[int, int, int, int]]:
    """The shapes of bias and mask, where the call has them."""
    shapes = {"bias": spec.bias_shape, "mask": spec.mask_shape}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def has_tiles(spec: Spec) -> bool:
    """Whether there is a bias of both axes, which comes in tiles."""
    return bias_kind(spec) == "tile"


def has_words(spec: Spec) -> bool:
    """Whether there is a mask of both axes, which comes in words of bits."""
    return spec.mask_shape is not None and kind(spec.mask_shape) == "tile"


def tile_bytes(spec: Spec, arrays: Mapping[str, Array]) -> int:
    """Bytes for each logit that tiles of the bias, which is among the arrays, take."""
    return arrays["bias"].dtype.itemsize if has_tiles(spec) else 0


def bias_kind(spec: Spec) -> str | None:
    """`kind` of the bias, if the call has one."""
    return None if spec.bias_shape is None else kind(spec.bias_shape)
