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

from jflash._backends.nvidia.ops import Tile
from jflash._backends.nvidia.tile.inputs import KernelInputs, Loaded, TileCoord, shared_index
from jflash._semantics import dropout
from jflash._semantics.dropout import HeadSeed
from jflash._semantics.spec import Spec


def head_seed(inputs: KernelInputs, at: TileCoord) -> HeadSeed | None:
    """The seed of a tile's head; `None` without dropout."""
    if inputs.spec.dropout_rate == 0:
        return None
    words = inputs.refs["dropout_seed"]
    entry = shared_index(words, at.batch, None)[0]
    head: Any = inputs.value("head_index", at.batch, at.head)
    return dropout.head_seed(inputs.spec, (words[entry, 0], words[entry, 1]), head)


def tile_words(inputs: KernelInputs, at: TileCoord, shape: tuple[int, ...], seed: HeadSeed | None) -> dict[str, Array]:
    """The words of a tile, by name; none without dropout, or where tiles may not begin at multiples of 16 of the whole
    call's sequence."""
    if seed is None or not inputs.refs.keys().isdisjoint(("first_query", "first_key")):
        return {}
    counter = dropout.counter(seed.before, lax.div(at.query, 2), lax.div(at.key, 2))
    return {"dropout": inputs.ops.dropout_words(counter, seed.middle, shape, keys_first=inputs.keys_first)}


def keep(inputs: KernelInputs, at: TileCoord, p: Tile, loaded: Loaded | None = None) -> Tile:
    """P kept; by the tile's words if they are among what is `loaded`."""
    return p if inputs.spec.dropout_rate == 0 else _drop(inputs, at, p, loaded or {}, signed=False)


def signed(inputs: KernelInputs, at: TileCoord, p: Tile) -> Tile:
    """Signed P; P itself without dropout."""
    return p if inputs.spec.dropout_rate == 0 else _drop(inputs, at, p, {}, signed=True)


def kept(spec: Spec, p: Tile) -> Tile:
    """P kept, from signed P."""
    return p if spec.dropout_rate == 0 else jnp.maximum(p, 0.0)


def d_logits(spec: Spec, p: Tile, dp: Tile, delta: Tile | None) -> Tile:
    """dS from signed P and dO V^T; without dropout delta may be subtracted already, and is `None` then."""
    if delta is None:
        return p * dp
    if spec.dropout_rate == 0:
        return p * (dp - delta)
    return jnp.abs(p) * (dp * jnp.where(p > 0, 1 / (1 - spec.dropout_rate), 0.0) - delta)


def scaled(spec: Spec, values: Float[Array, "..."]) -> Float[Array, "..."]:
    """`values` / (1 - rate), which makes up for what was dropped."""
    return values if spec.dropout_rate == 0 else values * (1 / (1 - spec.dropout_rate))


def _drop(inputs: KernelInputs, at: TileCoord, p: Tile, loaded: Loaded, *, signed: bool) -> Tile:
    spec, ops, keys_first = inputs.spec, inputs.ops, inputs.keys_first
    seed = None if "dropout" in loaded else head_seed(inputs, at)
    words = loaded if seed is None else tile_words(inputs, at, p.shape, seed)
    if words:
        return ops.drop(p, words["dropout"], dropout.dropped(spec), keys_first=keys_first, signed=signed)
    assert seed is not None
    first_query, first_key = (inputs.value(name, at.batch) for name in ("first_query", "first_key"))
    query, key = (x if first is None else x + first for x, first in ((at.query, first_query), (at.key, first_key)))
    queries, keys = ops.indices(p.shape, int(keys_first), query), ops.indices(p.shape, 1 - keys_first, key)
    keep = dropout.keep(spec, seed, queries, keys)
    return jnp.where(keep, p, -p if signed else 0.0)
