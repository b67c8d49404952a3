"""What a kernel reads of its call besides queries, keys and values, and where the tile lies that it reads it for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from jflash._backends.nvidia.facts import Kind, facts_of
from jflash._backends.nvidia.ops import Ops, Ref, along_columns, along_rows
from jflash._backends.nvidia.smem import WARP_ROWS
from jflash._semantics.spec import Spec
from jflash._semantics.tile import LIMITS, PARAMETERS, Parameters, Tile, in_range

_SEGMENTS: dict[str, Kind] = {"query_segments": "row", "key_segments": "column"}

Loaded = Mapping[str, Array]
"""What a kernel has loaded of a tile's bias and packed mask, and made of its words of dropout, by name."""


class TileCoord(NamedTuple):
    """The corner of a tile of logits."""

    batch: Int[Array, ""]
    head: Int[Array, ""]
    query: Int[Array, ""] | int
    key: Int[Array, ""] | int


@dataclasses.dataclass(frozen=True)
class KernelInputs:
    """References to what `prepared` makes, and how a tile reads them."""

    spec: Spec
    ops: Ops
    refs: Mapping[str, Ref]
    packed_heads: int = 1
    """Query heads that are interleaved in the rows of a tile; a row's query is its index divided by it."""
    keys_first: bool = False
    """Whether a tile's rows are keys and its columns queries."""
    warps_share_keys: bool = False
    """Whether each warp's 16 rows of a tile `[64, columns]` are the same queries, and its columns the warp's quarter of
    the keys, in order."""
    has_bias: bool = True
    """Whether the bias, if the call has one, is still to be added to products: see `bf16_columns`."""

    def value(self, name: str, batch: Int[Array, ""], head: Int[Array, ""] | None = None) -> Array | None:
        """Return a scalar of an operand `[#B]` or `[#B, #N]`; `None` if the call does not have it."""
        ref = self.refs.get(name)
        value = None if ref is None else ref[shared_index(ref, batch, head)]
        return in_range(self.spec, name, value) if name in LIMITS else value

    def part(self, name: str, batch: Int[Array, ""], head: Int[Array, ""]) -> Ref:
        """Return what one batch entry and head have of an operand `[#B, #N, ...]`."""
        ref = self.refs[name]
        return ref.at[shared_index(ref, batch, head)]

    def load_key_bias(self, at: TileCoord, shape: tuple[int, int]) -> dict[str, Array]:
        """Load the bias of a tile ahead, by name, if it has one value for each key."""
        if facts_of(self.spec).bias_kind != "column" or not self.has_bias:
            return {}
        return {"bias": self._part_of_tile("bias", at, shape, {})}

    def load_packed_mask(self, at: TileCoord, shape: tuple[int, int]) -> dict[str, Array]:
        """Load the packed mask of a tile ahead, by name, if the call has one."""
        if not facts_of(self.spec).has_packed_mask:
            return {}
        ref = self.refs["mask"]
        row, column = (at.key, at.query) if self.keys_first else (at.query, at.key)
        columns = pl.ds(lax.div(column, 64), max(1, shape[1] // 64))
        place = *shared_index(ref, at.batch, at.head)[:2], lax.div(row, 64), columns
        words = self.ops.load_strided(ref.at[place], 1)
        if shape[1] < 64:
            # A word has the bits of 64 columns: those from the tile's first on become the lowest of each half.
            first = lax.rem(column, 64)
            words = lax.shift_right_logical(words, jnp.full_like(words, lax.div(first, 4)))
        return {"mask": words}

    def parameters(self, at: TileCoord, shape: tuple[int, ...], loaded: Loaded) -> Parameters:
        """Return what shapes the logits of the tile of `shape` at `at`, and load of it what is not `loaded`."""

        def read(name: str) -> Array | None:
            if name == "bias" and not self.has_bias:
                return None
            value = self._part_of_tile(name, at, shape, loaded)
            return value.astype(jnp.float32) if name == "bias" and value is not None else value

        return Parameters(**{name: read(name) for name in PARAMETERS}, score_mod_arrays=())

    def tile(self, at: TileCoord, shape: tuple[int, ...], loaded: Loaded) -> Tile:
        """Return what `_semantics` needs of the tile of `shape` at `at`, and load of it what is not `loaded`."""
        spec, ops = self.spec, self.ops
        query = self._queries(at, shape)
        head: Any = self.value("head_index", at.batch, at.head * self.packed_heads)
        if self.packed_heads > 1:
            packed = jnp.full_like(query, self.packed_heads)
            head = None if head is None else head + lax.rem(query, packed)
            query = lax.div(query, packed)
        key = self._keys(at, shape)
        offset: Any = spec.query_offset if spec.query_offset is not None else self.value("query_offset", at.batch)

        read = lambda name: self._part_of_tile(name, at, shape, loaded)
        if facts_of(spec).has_packed_mask:
            mask = ops.expand_mask(loaded["mask"], shape)
        else:
            numbers = read("mask")
            mask = None if numbers is None else numbers != 0
        distance = None
        if "alibi_slopes" in spec.operands:
            distance = ops.distances(shape, at.query + offset - at.key, keys_first=self.keys_first)
        tile = Tile(
            parameters=self.parameters(at, shape, loaded),
            query=query,
            key=key,
            first_query=read("first_query"),
            first_key=read("first_key"),
            position=query + offset,
            batch=read("batch_index"),
            head=head,
            mask=mask,
            query_lengths=read("query_lengths"),
            key_lengths=read("key_lengths"),
            query_segments=read("query_segments"),
            key_segments=read("key_segments"),
            dropout_seed=None,
            distance_override=distance,
        )
        # Packed heads lie between a tile's rows.
        if (spec.score_mod is None and spec.mask_mod is None) or self.packed_heads > 1:
            return tile
        query, key = tile._replace(query=at.query, key=at.key).indices
        return tile._replace(
            key_minus_query_override=ops.key_minus_query(shape, key - query, keys_first=self.keys_first)
        )

    def _queries(self, at: TileCoord, shape: tuple[int, ...]) -> Array:
        """Return the index of each element's query, or of its row of packed heads."""
        if not self.warps_share_keys:
            return self.ops.indices(shape, int(self.keys_first), at.query)
        row = self.ops.indices(shape, 0, 0)
        return lax.rem(row, jnp.full_like(row, WARP_ROWS)) + at.query

    def _keys(self, at: TileCoord, shape: tuple[int, ...]) -> Array:
        """Return the index of each element's key."""
        key = self.ops.indices(shape, 1 - self.keys_first, at.key)
        if not self.warps_share_keys:
            return key
        row = self.ops.indices(shape, 0, 0)
        return key + lax.div(row, jnp.full_like(row, WARP_ROWS)) * shape[1]

    def _part_of_tile(self, name: str, at: TileCoord, shape: tuple[int, ...], loaded: Loaded) -> Any:
        """Return a scalar, or a vector of `[#B, L]` or `[#B, #N, L]` along an axis of a tile, repeated along the other.

        It is what was `loaded`, if that was, and `None` if the call does not have the operand.
        """
        if name in loaded:
            return loaded[name]
        ref, kinds = self.refs.get(name), _SEGMENTS | facts_of(self.spec).kinds
        if ref is None or kinds.get(name) not in ("row", "column"):
            return self.value(name, at.batch, at.head)
        of_keys = kinds[name] == "column"
        first, axis = at.key if of_keys else at.query, int(of_keys != self.keys_first)
        shared = shared_index(ref, at.batch, at.head)[: len(ref.shape) - 1]
        vector = self.ops.load(ref.at[(*shared, pl.ds(first, shape[axis]))], axis)
        return (along_rows, along_columns)[axis](vector, shape)


def shared_index(ref: Ref, batch: Any, head: Any) -> tuple[Any, ...]:
    """Return where a batch entry and head are in an operand that may share them."""
    return tuple(0 if size == 1 else at for size, at in zip(ref.shape, (batch, head), strict=False))
