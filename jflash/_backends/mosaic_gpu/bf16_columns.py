"""float32 numbers as columns of bfloat16 pieces, which the matrix unit adds to products: in the forward a bias of keys.

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

from jflash._backends.mosaic_gpu import pipeline, smem
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.pipeline import GmemTile
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.ops import Ref, along_columns
from jflash._backends.nvidia.prepared import MARGIN
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.threads.pieces import PIECES
from jflash._backends.nvidia.tile import logits, operand_pieces, softmax
from jflash._backends.nvidia.tile.inputs import KernelInputs, TileCoord, shared_index
from jflash._backends.nvidia.tile.logits import LogitsForm, Plain
from jflash._backends.nvidia.tile.softmax import Softmax
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics.spec import Operands, Spec

STORED_COLUMNS = 8
"""Columns in device memory: up to two numbers' pieces, in rows of 16 bytes, the least that copies take."""
SMEM_COLUMNS = 16
"""Columns in shared memory: K of the matrix unit's instruction. Copies read 0 for what is not stored."""

_PIECES, _LARGE, _HAS_LARGE = "bias_pieces", "large_biases", "has_large_biases"


def smem_tile(*rows: int) -> Any:
    """Shared memory for the columns of some tiles, `[*rows, 16]`."""
    return smem.tile((*rows, SMEM_COLUMNS), jnp.bfloat16, STORED_COLUMNS)


def of_rows(ref: Ref, rows: Any, batch: Any) -> Ref:
    """The columns of some rows, in device memory, of a batch entry's `[L, 8]`."""
    return ref.at[rows, pipeline.columns(SMEM_COLUMNS, ref, batch)]


def form(spec: Spec, *, sums_in_parts: bool = False) -> LogitsForm:
    """Return the form of a call's logits in a kernel to whose products the matrix unit may add a bias."""
    return BiasByMma(sums_in_parts) if _serves(spec) else logits.form(spec, sums_in_parts=sums_in_parts)


def _serves(spec: Spec) -> bool:
    """Whether a call's logits are its products, scaled, and a bias of keys; for heads up to 128."""
    alone = spec.added == frozenset({"bias"}) and spec.score_mod is None and spec.logits_soft_cap is None
    is_scaled = spec.scale is not None and 1e-20 < spec.scale < 1e20
    # For wider ones, shared memory has no room for the bias's columns beside an output of its own.
    is_narrow = max(spec.head_dim, spec.value_dim) <= 128
    return alone and is_scaled and is_narrow and facts_of(spec).bias_kind == "column"


class BiasByMma(Plain):
    """Products to which the matrix unit adds the bias of keys; large biases are added in registers."""

    bias_by_mma = True

    def prefetch(self, inputs: KernelInputs, at: TileCoord, keys: int, warpgroups: int) -> dict[str, Array]:
        ref = inputs.refs[_HAS_LARGE]
        place = *shared_index(ref, at.batch, at.head)[:2], lax.div(at.key, keys)
        has_large = {_HAS_LARGE: ref[place]}
        return inputs.load_packed_mask(at, (WARPGROUP_ROWS, keys)) | has_large

    def step(self, s: Float[Array, "rows keys"], mask: TileContext, before: Softmax | None) -> Softmax:
        inputs, at, shape, scale = mask.inputs, mask.at, s.shape, mask.inputs.spec.scale
        assert scale is not None

        def with_large_biases(s: Array) -> Array:
            bias = inputs.ops.load(inputs.part(_LARGE, at.batch, at.head).at[pl.ds(at.key, shape[1])], 1)
            return s * scale + along_columns(bias, shape)

        # A tile's logits are numbers for each times one for all.
        has_large = mask.loaded[_HAS_LARGE] != 0
        numbers, unit = lax.cond(has_large, with_large_biases, lambda s: s, s), jnp.where(has_large, 1.0, scale)
        numbers, exponent = mask.hide(numbers, -jnp.inf), self.exponent(inputs.spec)
        return softmax.step(exponent, numbers, unit, mask, before, in_parts=self.sums_in_parts)


def prepare_bias(spec: Spec, operands: Operands, keys: int) -> dict[str, Array]:
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
    first, *others = operand_pieces.split_numbers(jnp.where(is_finite, values, 0))
    stored = jnp.stack([jnp.where(is_finite, first, values), *others], -1).astype(jnp.bfloat16)
    return jnp.pad(stored, [(0, 0), (0, 0), (0, 0), (0, STORED_COLUMNS - PIECES)])


def of_keys(inputs: KernelInputs, keys: GmemTile, head: Any) -> Ref:
    """The columns of the bias of a tile of keys, in device memory."""
    return of_rows(inputs.part(_PIECES, keys.batch, head), pl.ds(keys.first, keys.size), keys.batch)


def add_bias(acc_s: Any, columns: Ref, ops: WarpgroupOps) -> None:
    """Issue the product that adds a tile's columns to S."""
    # Behind the pieces are zeros, so all columns may be 1. Where only three are 1, the compiler keeps what it computes
    # them from in registers, and spills.
    ones = ops.full((WARPGROUP_ROWS, SMEM_COLUMNS), 1).astype(jnp.bfloat16)
    ops.mma(acc_s, ones, columns.T)
