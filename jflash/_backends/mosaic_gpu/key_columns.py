"""A bias of keys, which the matrix unit adds in the forward: three more columns of keys.

    Q K^T + bias / scale = [Q, 1, 1, 1] [K, high, middle, low]^T
    bias / scale = high + middle + low, in bfloat16

Unless the scale is a power of two, bias / scale is a bias rounded once more. Of two large ones only the difference
counts, which that may change: those are 0 here, and added to the logits of the tiles of keys that have any.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu import inputs, pairs, statistics, tiles
from jflash._backends.mosaic_gpu.inputs import Inputs, Place, Rows
from jflash._backends.mosaic_gpu.operations import Operations, Ref, along_columns, rounded
from jflash._backends.mosaic_gpu.statistics import COLUMNS, PIECES, STORED
from jflash._backends.mosaic_gpu.tiles import ROWS
from jflash._semantics.spec import Operands, Spec

_PIECES, _LARGE, _ARE_LARGE = "bias_pieces", "large_biases", "biases_are_large"


def are_there(spec: Spec) -> bool:
    """Whether a call's logits are its products, scaled, and a bias of keys.

    With heads of more than 128 columns there is less room for the output in shared memory: short sequences took up to
    13% longer, long ones of d256 up to 4% less.
    """
    alone = "alibi_slopes" not in spec.operands and spec.score_mod is None and spec.logits_soft_cap is None
    is_scaled = spec.scale is not None and 1e-20 < spec.scale < 1e20
    is_narrow = max(spec.head_dim, spec.value_dim) <= 128
    return alone and is_scaled and is_narrow and pairs.bias_kind(spec) == "column"


def _scale(spec: Spec) -> float:
    assert spec.scale is not None
    return spec.scale


def _large(spec: Spec) -> float:
    """Biases from which on a quotient of theirs is infinite, or the last bit of it more than logits may be off by."""
    is_exact = math.frexp(_scale(spec))[0] == 0.5
    return 2.0**120 * min(_scale(spec), 1.0) if is_exact else 2.0**10


def prepare(spec: Spec, operands: Operands, keys: int) -> dict[str, Array]:
    """The bias as the kernel takes it, by name, with room for a tile of `keys` that begins at the last one."""
    assert operands.bias is not None
    bias = operands.bias[..., 0, :].astype(jnp.float32)
    bias = jnp.pad(bias, [(0, 0), (0, 0), (0, -bias.shape[-1] % keys + inputs.MARGIN)])
    # A bias of -inf hides a key, however it is added; one that is NaN stays so.
    is_large = (jnp.abs(bias) >= _large(spec)) & ~jnp.isinf(bias)
    pieces = _pieces(jnp.where(is_large, 0, bias) / _scale(spec))
    by_tile = is_large.astype(jnp.int32).reshape(*bias.shape[:2], -1, keys)
    # A tile may begin anywhere, and then has some keys of the next one.
    following = jnp.pad(by_tile[:, :, 1:], [(0, 0), (0, 0), (0, 1), (0, 0)])
    are_large = (by_tile | following).max(-1)
    return {_PIECES: pieces, _LARGE: jnp.where(is_large, bias, 0), _ARE_LARGE: are_large}


def _pieces(values: Array) -> Array:
    """`[B, N, L]` as `[B, N, L, 8]`: numbers that bfloat16 has, whose sum is the given one, and zeros."""
    is_finite = jnp.isfinite(values)
    first, *others = statistics.pieces(jnp.where(is_finite, values, 0), rounded)
    stored = jnp.stack([jnp.where(is_finite, first, values), *others], -1).astype(jnp.bfloat16)
    return jnp.pad(stored, [(0, 0), (0, 0), (0, 0), (0, STORED - PIECES)])


def shared(tile: tiles.ForwardTiles) -> Any:
    """Shared memory for some tiles' pieces."""
    return tiles.shared((tile.stages, tile.keys, COLUMNS), jnp.bfloat16, STORED)


def part(call: Inputs, keys: Rows, head: Any) -> Ref:
    """The pieces of a tile of keys, in device memory."""
    columns = tiles.columns(COLUMNS, STORED, keys.batch)
    return call.part(_PIECES, keys.batch, head).at[pl.ds(keys.first, keys.size), columns]


def add(products: Any, pieces: Ref, operations: Operations) -> None:
    """Add a tile's pieces to its products, in the background."""
    # Behind the pieces are zeros, so all columns may be 1. Where three are, what they are computed from stays in
    # registers, even if they are in shared memory: d128 spilled 92 bytes.
    ones = operations.full((ROWS, COLUMNS), 1).astype(jnp.bfloat16)
    operations.multiply(products, ones, pieces.T)


def are_large(call: Inputs, place: Place, keys: int) -> dict[str, Array]:
    """Whether a tile's biases may be, by name: for who has something else to do until it is known."""
    ref = call.refs[_ARE_LARGE]
    at = *inputs.index(ref, place.batch, place.head)[:2], lax.div(place.key, keys)
    return {_ARE_LARGE: ref[at]}


def numbers(call: Inputs, products: Array, place: Place, loaded: dict[str, Array]) -> tuple[Array, Array]:
    """A tile's logits are these numbers times that one."""
    scale, shape = _scale(call.spec), products.shape

    def logits(products: Array) -> Array:
        bias = call.operations.load(call.part(_LARGE, place.batch, place.head).at[pl.ds(place.key, shape[1])], 1)
        return products * scale + along_columns(bias, shape)

    are_large = loaded[_ARE_LARGE] != 0
    return lax.cond(are_large, logits, lambda products: products, products), jnp.where(are_large, 1.0, scale)
