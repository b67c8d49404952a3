"""Bias and mask, `[#B, #N, #T, #S]`: operands with a query and a key axis, of which a call may share any."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Array

from jflash._spec import Spec


def kind(shape: tuple[int, int, int, int]) -> str:
    """Of a bias or mask `[#B, #N, #T, #S]`: one value for each "tile" element, "row", "column", or a "scalar"."""
    return {(True, True): "tile", (True, False): "row", (False, True): "column", (False, False): "scalar"}[
        shape[2] > 1, shape[3] > 1
    ]


def pair_shapes(spec: Spec) -> dict[str, tuple[int, int, int, int]]:
    """The shapes of bias and mask, where the call has them."""
    shapes = {"bias": spec.bias_shape, "mask": spec.mask_shape}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def tiled(spec: Spec) -> tuple[str, ...]:
    """Which of bias and mask come in tiles."""
    return tuple(name for name, shape in pair_shapes(spec).items() if kind(shape) == "tile")


def tile_bytes(spec: Spec, arrays: Mapping[str, Array]) -> int:
    """Bytes for each logit that tiles of bias and mask, which are among the arrays, take."""
    return sum(arrays[name].dtype.itemsize for name in tiled(spec))


def bias_kind(spec: Spec) -> str | None:
    """`kind` of the bias, if the call has one."""
    return None if spec.bias_shape is None else kind(spec.bias_shape)
