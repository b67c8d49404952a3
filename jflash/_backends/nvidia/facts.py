"""What kernels ask of a Spec, derived once: how bias and mask are read, what logits are, how float32 is multiplied."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from jflash._semantics import visits
from jflash._semantics.spec import Spec

Kind = Literal["tile", "row", "column", "scalar"]
"""The axes of a bias or mask: one value for each element of a tile of logits, each query, each key, or each head."""

PIECES_BY_PRECISION = {
    **dict.fromkeys(("DEFAULT", "HIGH", "TF32_TF32_F32", "BF16_BF16_F32_X3"), 2),
    **dict.fromkeys(("HIGHEST", "BF16_BF16_F32_X6"), 3),
    "BF16_BF16_F32": 1,
}
"""How many bfloat16 pieces float32 operands have, by the precision's name (`tile.operand_pieces`)."""


class Facts:
    """The facts of one call that decide which kernels serve it and what they compute."""

    def __init__(self, spec: Spec) -> None:
        by_axes: dict[tuple[bool, bool], Kind]
        by_axes = {(True, True): "tile", (True, False): "row", (False, True): "column", (False, False): "scalar"}
        shapes = {"bias": spec.bias_shape, "mask": spec.mask_shape}
        self.kinds: dict[str, Kind] = {
            name: by_axes[shape[2] > 1, shape[3] > 1] for name, shape in shapes.items() if shape is not None
        }
        """The kinds of bias and mask, where the call has them."""
        self.bias_kind = self.kinds.get("bias")
        """The kind of the bias, `None` without one."""
        self.has_bias_tiles = self.bias_kind == "tile"
        """Whether the bias has both axes, so that kernels copy its tiles to shared memory."""
        self.has_packed_mask = self.kinds.get("mask") == "tile"
        """Whether the mask has both axes, so that kernels read it packed."""
        self.has_lists = visits.has_gaps(spec)
        """Whether blocks visit lists of tiles, and not ranges."""
        self.bias_tile_bytes = spec.bias_dtype.itemsize if spec.bias_dtype is not None and self.has_bias_tiles else 0
        """Bytes for each logit that tiles of the bias take in shared memory."""

        self.follows_products = spec.score_mod is None and not spec.added
        """Whether nothing but the scale and a soft cap stands between a product and its logit."""
        scale = spec.scale if self.follows_products and spec.logits_soft_cap is None else None
        self.is_plain = scale is not None and scale > 1e-20
        """Whether a logit is its product times a static positive number that float32 can be divided by."""
        self.sums_scale = scale if scale is not None and self.is_plain else 1.0
        """The factor that a plain call leaves to be applied to the sums over its products' cotangents."""

        self.is_float32 = spec.dtype == jnp.float32
        given = spec.precision if isinstance(spec.precision, tuple) else (spec.precision,)
        self.precisions = [_name(precision) for precision in given]
        """The names of the call's precision, or of the two of a pair."""
        known = [PIECES_BY_PRECISION.get(name, 1) for name in self.precisions]
        self.pieces = max(known) if self.is_float32 else 1
        """How many pieces an operand has."""
        self.operand_dtype = np.dtype(jnp.bfloat16) if self.is_float32 else spec.dtype
        """The dtype of the matrix unit's operands."""
        self.tuned_pieces = (self.pieces,) if self.is_float32 else ()
        """What the tiles of a float32 call are tuned for besides head dims."""


@functools.lru_cache(maxsize=1024)
def facts_of(spec: Spec) -> Facts:
    """Return the facts of a call."""
    return Facts(spec)


def unsupported(spec: Spec, widest: int) -> str | None:
    """Return why no kernel for heads of up to `widest` columns takes a call, in words for the user; `None`: some do."""
    if spec.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it takes bfloat16, float16 and float32. Got {spec.dtype}."
    if max(spec.head_dim, spec.value_dim) > widest:
        return f"H and D must be at most {widest}. Got H={spec.head_dim} and D={spec.value_dim}."
    from jflash._backends.nvidia.tile import mask_mod_reads, operand_pieces
    from jflash._semantics import score_mod_reads

    return score_mod_reads.unsupported(spec) or mask_mod_reads.unsupported(spec) or operand_pieces.unsupported(spec)


def _name(precision: Any) -> str:
    if precision is None:
        return "DEFAULT"
    if isinstance(precision, str) and not hasattr(lax.DotAlgorithmPreset, precision):
        precision = lax.Precision(precision)
    return precision if isinstance(precision, str) else getattr(precision, "name", str(precision))
