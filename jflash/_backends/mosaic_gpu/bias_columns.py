"""A bias of keys that the matrix unit adds in the forward: three more columns of keys.

    Q K^T + bias / scale = [Q, 1, 1, 1] [K, high, middle, low]^T
    bias / scale = high + middle + low, in bfloat16

Unless the scale is a power of two, bias / scale is a bias rounded once more. Of two large ones only the difference
counts, which that may change: large biases are 0 here, and added to the logits of the tiles of keys that have any.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import bf16_columns
from jflash._backends.mosaic_gpu.bf16_columns import PIECES, SMEM_COLUMNS, STORED_COLUMNS
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.tma_inputs import GmemTile
from jflash._backends.nvidia import bias_and_mask
from jflash._backends.nvidia.ops import Ref, along_columns, rounded
from jflash._backends.nvidia.prepare import MARGIN
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import logits, operand_pieces, softmax
from jflash._backends.nvidia.tile.inputs import KernelInputs, Loaded, TileCoord, shared_index
from jflash._backends.nvidia.tile.logits import LogitsForm, Plain
from jflash._backends.nvidia.tile.softmax import Softmax
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics.spec import Operands, Spec

_PIECES, _LARGE, _HAS_LARGE = "bias_pieces", "large_biases", "has_large_biases"


def serves(spec: Spec) -> bool:
    """Whether a call's logits are its products, scaled, and a bias of keys; for heads up to 128."""
    alone = "alibi_slopes" not in spec.operands and spec.score_mod is None and spec.logits_soft_cap is None
    is_scaled = spec.scale is not None and 1e-20 < spec.scale < 1e20
    # For wider ones, shared memory has no room for the bias's columns beside an output of its own.
    is_narrow = max(spec.head_dim, spec.value_dim) <= 128
    return alone and is_scaled and is_narrow and bias_and_mask.bias_kind(spec) == "column"


def form(spec: Spec, *, sums_in_parts: bool = False) -> LogitsForm:
    """Return the form of a call's logits in a kernel to whose products the matrix unit may add a bias."""
    return BiasByMma(sums_in_parts) if serves(spec) else logits.form(spec, sums_in_parts=sums_in_parts)


class BiasByMma(Plain):
    """Products to which the matrix unit adds the bias of keys; large biases are added in registers."""

    bias_by_mma = True

    def prefetch(self, inputs: KernelInputs, at: TileCoord, keys: int, warpgroups: int) -> dict[str, Array]:
        has_large = load_has_large(inputs, at, keys)
        return inputs.load_packed_mask(at, (WARPGROUP_ROWS, keys)) | has_large

    def step(self, s: Float[Array, "rows keys"], mask: TileContext, before: Softmax | None) -> Softmax:
        numbers, unit = with_large_biases(mask.inputs, s, mask.at, mask.loaded)
        numbers, exponent = mask.hide(numbers, -jnp.inf), self.exponent(mask.inputs.spec)
        return softmax.step(exponent, numbers, unit, mask, before, in_parts=self.sums_in_parts)


def prepare(spec: Spec, operands: Operands, keys: int) -> dict[str, Array]:
    """The bias as the kernel takes it, by name, with room for a tile of `keys` that begins at the last one."""
    assert operands.bias is not None
    assert spec.scale is not None
    bias = operands.bias[..., 0, :].astype(jnp.float32)
    bias = jnp.pad(bias, [(0, 0), (0, 0), (0, -bias.shape[-1] % keys + MARGIN)])
    # A large one's quotient is infinite, or has a last bit that counts more than the rule for numbers.
    is_exact = math.frexp(spec.scale)[0] == 0.5
    large = 2.0**120 * min(spec.scale, 1.0) if is_exact else 2.0**10
    # A bias of -inf hides a key, however it is added; one that is NaN stays NaN.
    is_large = (jnp.abs(bias) >= large) & ~jnp.isinf(bias)
    pieces = _pieces(jnp.where(is_large, 0, bias) / spec.scale)
    by_tile = is_large.astype(jnp.int32).reshape(*bias.shape[:2], -1, keys)
    # A tile may begin anywhere, and then holds some keys of the next one.
    following = jnp.pad(by_tile[:, :, 1:], [(0, 0), (0, 0), (0, 1), (0, 0)])
    has_large = (by_tile | following).max(-1)
    return {_PIECES: pieces, _LARGE: jnp.where(is_large, bias, 0), _HAS_LARGE: has_large}


def _pieces(values: Array) -> Array:
    """`[B, N, L]` as `[B, N, L, 8]`: bfloat16 numbers whose sum is the given one, and zeros."""
    is_finite = jnp.isfinite(values)
    first, *others = operand_pieces.split_numbers(jnp.where(is_finite, values, 0), rounded)
    stored = jnp.stack([jnp.where(is_finite, first, values), *others], -1).astype(jnp.bfloat16)
    return jnp.pad(stored, [(0, 0), (0, 0), (0, 0), (0, STORED_COLUMNS - PIECES)])


def part(inputs: KernelInputs, keys: GmemTile, head: Any) -> Ref:
    """The columns of a tile of keys, in device memory."""
    pieces = inputs.part(_PIECES, keys.batch, head)
    return bf16_columns.part(pieces, pl.ds(keys.first, keys.size), keys.batch)


def add(acc_s: Any, columns: Ref, ops: WarpgroupOps) -> None:
    """Issue the product that adds a tile's columns to S."""
    # Behind the pieces are zeros, so all columns may be 1. Where only three are 1, the compiler keeps what it computes
    # them from in registers, and spills.
    ones = ops.full((WARPGROUP_ROWS, SMEM_COLUMNS), 1).astype(jnp.bfloat16)
    ops.mma(acc_s, ones, columns.T)


def load_has_large(inputs: KernelInputs, at: TileCoord, keys: int) -> dict[str, Array]:
    """Whether a tile has large biases, by name; for kernels that load it ahead."""
    ref = inputs.refs[_HAS_LARGE]
    place = *shared_index(ref, at.batch, at.head)[:2], lax.div(at.key, keys)
    return {_HAS_LARGE: ref[place]}


def with_large_biases(inputs: KernelInputs, s: Array, at: TileCoord, loaded: Loaded) -> tuple[Array, Array]:
    """Two factors of a tile's logits: numbers for each, and one for all."""
    scale, shape = inputs.spec.scale, s.shape
    assert scale is not None

    def logits(s: Array) -> Array:
        bias = inputs.ops.load(inputs.part(_LARGE, at.batch, at.head).at[pl.ds(at.key, shape[1])], 1)
        return s * scale + along_columns(bias, shape)

    has_large = loaded[_HAS_LARGE] != 0
    return lax.cond(has_large, logits, lambda s: s, s), jnp.where(has_large, 1.0, scale)
