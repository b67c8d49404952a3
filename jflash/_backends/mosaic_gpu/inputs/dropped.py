"""Dropout in the kernels. A backward holds both P and what of it is kept in one register, by the sign.

    signed P = P where kept, -P where dropped
    P kept   = max(signed P, 0)
    dP       = dO V^T / (1 - rate) where signed P > 0, 0 elsewhere
    dS       = |signed P| (dP - delta)

The forward leaves the factor 1 / (1 - rate) to its output, and a backward that of dV to its store.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.inputs.kernel_inputs import KernelInputs, TileCoord, shared_index
from jflash._semantics import dropout
from jflash._semantics.spec import Spec

Tile = Float[Array, "rows columns"]


def kept(inputs: KernelInputs, at: TileCoord, p: Tile) -> Tile:
    """P kept."""
    return p if inputs.spec.dropout_rate == 0 else _drop(inputs, at, p, signed=False)


def signed(inputs: KernelInputs, at: TileCoord, p: Tile) -> Tile:
    """Signed P; P itself without dropout."""
    return p if inputs.spec.dropout_rate == 0 else _drop(inputs, at, p, signed=True)


def kept_of_signed(spec: Spec, p: Tile) -> Tile:
    """P kept, from signed P."""
    return p if spec.dropout_rate == 0 else jnp.maximum(p, 0.0)


def d_logits(spec: Spec, p: Tile, dp: Tile, delta: Tile) -> Tile:
    """dS from signed P and dO V^T."""
    if spec.dropout_rate == 0:
        return p * (dp - delta)
    return jnp.abs(p) * (dp * jnp.where(p > 0, 1 / (1 - spec.dropout_rate), 0.0) - delta)


def scaled(spec: Spec, values: Float[Array, "..."]) -> Float[Array, "..."]:
    """With what makes up for the dropped: values / (1 - rate)."""
    return values if spec.dropout_rate == 0 else values * (1 / (1 - spec.dropout_rate))


def _drop(inputs: KernelInputs, at: TileCoord, p: Tile, *, signed: bool) -> Tile:
    spec, ops, value = inputs.spec, inputs.ops, inputs.value
    words = inputs.refs["dropout_seed"]
    entry = shared_index(words, at.batch, None)[0]
    head: Any = value("head_index", at.batch, at.head)
    seed = dropout.head_seed(spec, (words[entry, 0], words[entry, 1]), head)
    first_query, first_key = (value(name, at.batch) for name in ("first_query", "first_key"))
    if first_query is None and first_key is None:
        # A tile begins at multiples of 16.
        counter = dropout.counter(seed.before, lax.div(at.query, 2), lax.div(at.key, 2))
        return ops.drop(p, counter, seed.middle, dropout.dropped(spec), keys_first=inputs.keys_first, signed=signed)
    queries, keys = (ops.iota(p.shape, int(axis)) for axis in (inputs.keys_first, not inputs.keys_first))
    query, key = (x if first is None else x + first for x, first in ((at.query, first_query), (at.key, first_key)))
    keep = dropout.keep(spec, seed, queries + query, keys + key)
    return jnp.where(keep, p, -p if signed else 0.0)
