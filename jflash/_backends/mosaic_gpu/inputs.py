"""What a kernel knows of its call besides queries, keys and values, and the tile of it that a warpgroup works on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu import elementwise, mask_kernel, pairs
from jflash._backends.mosaic_gpu import operations as ops
from jflash._backends.mosaic_gpu.operations import Operations, Ref
from jflash._backends.mosaic_gpu.tiles import round_up
from jflash._semantics import visibility
from jflash._semantics.logits import modify_logits, without_unseen
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import Parameters, Tile, zero_padding

MARGIN = 256
"""Elements past the end of a vector that a tile at its end may read."""

LARGEST = 128
"""Rows of the largest tile that is copied from an array with lengths."""

_LENGTHS = {"query": "query_lengths", "d_out": "query_lengths", "key": "key_lengths", "value": "key_lengths"}


class Arrays(NamedTuple):
    """What a backward kernel takes its tiles from, and what else `prepare` and `edges` made of its call, by name.

    T, S, H and D are multiples of 8 here.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K D"]
    d_out: Float[Array, "B T N D"]
    sides: dict[str, Array]


def prepare(spec: Spec, operands: Operands, *others: str) -> dict[str, Array]:
    """The operands but query, key and value, a mask of both axes, and `others`, as kernels take them, by name.

    Vectors get a margin.
    """
    prepared: dict[str, Array] = {}
    for name in ("scale", "alibi_slopes", "sinks", "query_offset", "query_lengths", "key_lengths"):
        array = getattr(operands, name)
        if array is not None:
            dtype = jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32
            prepared[name] = array.astype(dtype)
    if spec.score_mod is not None:
        assert operands.batch_index is not None
        assert operands.head_index is not None
        prepared["batch_index"] = operands.batch_index.astype(jnp.int32)
        prepared["head_index"] = operands.head_index.astype(jnp.int32)
    for name in ("query_segments", "key_segments"):
        array = getattr(operands, name)
        if array is not None:
            prepared[name] = _with_margin(array.astype(jnp.int32), (1,))
    for name, shape in pairs.pair_shapes(spec).items():
        array = getattr(operands, name)
        if name in others or (name == "mask" and pairs.has_words(spec)):
            continue
        match pairs.kind(shape):
            case "tile":
                rows, columns = round_up(shape[2], 8) - shape[2], round_up(shape[3], 64) - shape[3]
                if rows or columns:
                    array = jnp.pad(array, ((0, 0), (0, 0), (0, rows), (0, columns)))
            case "row":
                array = _with_margin(array[..., 0].astype(jnp.float32), (2,))
            case "column":
                array = _with_margin(array[..., 0, :].astype(jnp.float32), (2,))
            case _:
                array = array[..., 0, 0].astype(jnp.float32)
        prepared[name] = array
    return prepared


def words(spec: Spec, operands: Operands, operations: Operations, *, keys_first: bool = False) -> dict[str, Array]:
    """A mask of both axes, by name, as words of bits along the columns of a kernel's tiles."""
    if not pairs.has_words(spec):
        return {}
    assert operands.mask is not None
    return {"mask": mask_kernel.words(operands.mask, keys_first, operations)}


def edges(operands: Operands, arrays: Mapping[str, Float[Array, "B L N H"]]) -> dict[str, Array]:
    """Of each array with lengths the rows of the largest tile in which padding begins, padding as zeros: see
    `Inputs.copy_rows`."""
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        lengths = getattr(operands, _LENGTHS[name])
        if lengths is not None:
            first = _edge(jnp.broadcast_to(lengths, array.shape[:1]))
            rows = first[:, None] + jnp.arange(LARGEST + 8)
            tile = array.at[jnp.arange(len(array))[:, None], rows].get(mode="clip")
            found[f"{name}_edge"] = zero_padding(tile, lengths - first)
    return found


def _edge(length: Array) -> Array:
    """A row, multiple of 8, before which no tile begins in which padding does, when the length is `length`."""
    return lax.div(jnp.maximum(length - LARGEST, 0), 8) * 8


def _with_margin(array: Array, axes: tuple[int, ...]) -> Array:
    widths = [(0, MARGIN + -size % 8 if axis in axes else 0) for axis, size in enumerate(array.shape)]
    return jnp.pad(array, widths)


class Place(NamedTuple):
    """Where a tile of logits begins."""

    batch: Int[Array, ""]
    head: Int[Array, ""]
    query: Int[Array, ""] | int
    key: Int[Array, ""] | int


class Rows(NamedTuple):
    """A tile of an array `[B, L, N, H]`."""

    batch: Int[Array, ""]
    first: Int[Array, ""]
    size: int
    head: Int[Array, ""]
    columns: Any

    def of(self, ref: Ref) -> Ref:
        """The tile's part of the array."""
        return ref.at[self.batch, pl.ds(self.first, self.size), self.head, self.columns]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """References to what `prepare` made."""

    spec: Spec
    operations: Operations
    refs: Mapping[str, Ref]
    packed: int = 1
    """Query heads whose rows take turns in a tile of queries; a row's query is its index divided by it."""
    keys_first: bool = False
    """Whether a tile's rows are keys and its columns queries."""
    has_bias: bool = True
    """Whether the bias, if there is one, is still to be added to products: see `key_columns`."""

    def value(self, name: str, batch: Int[Array, ""], head: Int[Array, ""] | None = None) -> Array | None:
        """A scalar of an operand `[#B]` or `[#B, #N]`; `None` if the call does not have it."""
        ref = self.refs.get(name)
        if ref is None:
            return None
        return ref[tuple(index(ref, batch, head))[: len(ref.shape)]]

    def part(self, name: str, batch: Int[Array, ""], head: Int[Array, ""]) -> Ref:
        """What one batch entry and head have of an operand `[#B, #N, ...]`."""
        ref = self.refs[name]
        return ref.at[index(ref, batch, head)]

    def copy_rows(self, name: str, source: Ref, rows: Rows, target: Ref, filled: Ref) -> None:
        """Copy a tile of queries, keys, values or d_out to shared memory, with zeros for padding: 0 * NaN is NaN.

        A tile in which padding begins comes from the array's edge, past whose end all is read as zero.
        """
        edge = self.refs.get(f"{name}_edge")
        copy = lambda ref, rows: plgpu.copy_gmem_to_smem(rows.of(ref), target, filled)
        if edge is None:
            copy(source, rows)
            return
        length = self.value(_LENGTHS[name], rows.batch)
        assert length is not None
        inside = rows.first + rows.size <= length
        pl.when(inside)(lambda: copy(source, rows))
        pl.when(~inside)(lambda: copy(edge, rows._replace(first=rows.first - _edge(length))))

    def along_keys(self, place: Place, shape: tuple[int, int]) -> dict[str, Array]:
        """The bias of a tile if there is one value for each key, by name, like the `tiles` of others.

        For who has something else to do until it is there.
        """
        if pairs.bias_kind(self.spec) != "column" or not self.has_bias:
            return {}
        return {"bias": self._vector("bias", place, place.key, shape, 0 if self.keys_first else 1)}

    def words(self, place: Place, shape: tuple[int, int]) -> dict[str, Array]:
        """The bits of a tile's mask, by name, like the `tiles` of others; for who has something else to do first."""
        if not pairs.has_words(self.spec):
            return {}
        ref = self.refs["mask"]
        row, column = (place.key, place.query) if self.keys_first else (place.query, place.key)
        columns = pl.ds(lax.div(column, 64), shape[1] // 64)
        at = *index(ref, place.batch, place.head)[:2], lax.div(row, 64), columns
        return {"mask": self.operations.load_words(ref.at[at])}

    def tile(self, place: Place, shape: tuple[int, int], tiles: Mapping[str, Array]) -> Tile:
        """What `_scores` and `_visibility` need of the tile of `shape` at `place`.

        `tiles` are those of bias and mask, of which there are those named by `tiled`, and maybe `along_keys`.
        """
        spec, operations = self.spec, self.operations
        query_axis, key_axis = (1, 0) if self.keys_first else (0, 1)
        query = operations.index(shape, query_axis) + place.query
        if self.packed > 1:
            query = lax.div(query, jnp.full_like(query, self.packed))
        key = operations.index(shape, key_axis) + place.key
        offset: Any = spec.query_offset if spec.query_offset is not None else self.value("query_offset", place.batch)

        def pair(name: str) -> Array | None:
            shapes = pairs.pair_shapes(spec)
            if name not in shapes or (name == "bias" and not self.has_bias):
                return None
            if name in tiles:
                return tiles[name]
            match pairs.kind(shapes[name]):
                case "row":
                    return self._vector(name, place, place.query, shape, query_axis)
                case "column":
                    return self._vector(name, place, place.key, shape, key_axis)
                case _:
                    return self.value(name, place.batch, place.head)

        def segments(name: str, first: Any, axis: int) -> Array | None:
            return self._vector(name, place, first, shape, axis) if name in self.refs else None

        if pairs.has_words(spec):
            mask = operations.bits(tiles["mask"], shape)
        else:
            numbers = pair("mask")
            mask = None if numbers is None else numbers != 0
        bias = pair("bias")
        return Tile(
            parameters=Parameters(
                scale=self.value("scale", place.batch),
                bias=None if bias is None else bias.astype(jnp.float32),
                alibi_slopes=self.value("alibi_slopes", place.batch, place.head),
                score_mod_arrays=(),
            ),
            query=query,
            key=key,
            position=query + offset,
            batch=self.value("batch_index", place.batch),
            head=self.value("head_index", place.batch, place.head),
            mask=mask,
            query_lengths=self.value("query_lengths", place.batch),
            key_lengths=self.value("key_lengths", place.batch),
            query_segments=segments("query_segments", place.query, query_axis),
            key_segments=segments("key_segments", place.key, key_axis),
            dropout_seed=None,
        )

    def _vector(self, name: str, place: Place, first: Any, shape: tuple[int, int], axis: int) -> Array:
        """The part of an operand `[#B, L]` or `[#B, #N, L]` along one axis of a tile, repeated along the other."""
        ref = self.refs[name]
        shared = index(ref, place.batch, place.head)[: len(ref.shape) - 1]
        vector = self.operations.load(ref.at[(*shared, pl.ds(first, shape[axis]))], axis)
        return (ops.along_rows, ops.along_columns)[axis](vector, shape)

    @property
    def exponent(self) -> Exponent:
        """The call's way from logits to weights."""
        return exponent(self.spec)

    def logits(self, products: Array, place: Place, shape: tuple[int, int], tiles: Mapping[str, Array]) -> Array:
        """What `_scores` makes of a tile of products; a plain call's are as good as they are."""
        if is_plain(self.spec):
            return products
        tile = self.tile(place, shape, tiles)
        return elementwise.lowerable(lambda p: modify_logits(self.spec, p, tile, self._soft_cap))(products)

    def _soft_cap(self, products: Array, scale: Array | float, cap: float) -> Array:
        return elementwise.soft_cap(products, scale, cap, self.operations.are_below)

    def with_gradients(
        self, products: Array, place: Place, shape: tuple[int, int], tiles: Mapping[str, Array], wanted: Sequence[str]
    ) -> tuple[Array, Callable[[Array], tuple[Array, dict[str, Array]]]]:
        """`logits`, and what takes their cotangents to those of the products and, by name, of the parameters `wanted`.

        A parameter's cotangent is that of its value at every element of the tile. A plain call's products have their
        logits' cotangent as it is: the scale is left to be applied to their sums.
        """
        if is_plain(self.spec):
            return products, lambda cotangent: (cotangent, {})
        tile = self.tile(place, shape, tiles)

        def modify(products: Array, values: dict[str, Array]) -> Array:
            parameters = without_unseen(self.spec, tile.parameters._replace(**values), self.visible(tile))
            return modify_logits(self.spec, products, tile._replace(parameters=parameters), self._soft_cap)

        values = {name: jnp.broadcast_to(getattr(tile.parameters, name), shape) for name in wanted}
        logits, pull_back = jax.vjp(modify, products, values)
        return logits, elementwise.lowerable(pull_back)

    def hide(
        self, values: Array, place: Place, shape: tuple[int, int], tiles: Mapping[str, Array], hidden: float
    ) -> Array:
        """`values` of a tile where, but for a dense mask, the query sees the key, `hidden` elsewhere."""
        tile = self.tile(place, shape, tiles)._replace(mask=None)
        return jnp.where(self.visible(tile), values, hidden)

    def hide_masked(
        self, values: Array, place: Place, shape: tuple[int, int], tiles: Mapping[str, Array], hidden: float
    ) -> Array:
        """`values` of a tile where a dense mask, if there is one, lets the query see the key, `hidden` elsewhere."""
        mask = self.tile(place, shape, tiles).mask
        return values if mask is None else jnp.where(jnp.broadcast_to(mask, shape), values, hidden)

    def visible(self, tile: Tile) -> Array:
        """Which logits of a tile count; those of keys past the end do not."""
        if tile.key_lengths is None:
            tile = tile._replace(key_lengths=jnp.int32(self.spec.key_length))
        seen = visibility.visible(self.spec, tile)
        assert seen is not None
        return seen


def index(ref: Ref, batch: Any, head: Any) -> tuple[Any, ...]:
    """Where a batch entry and head are in an operand that may share them."""
    return tuple(0 if size == 1 else at for size, at in zip(ref.shape, (batch, head), strict=False))


def sums_scale(spec: Spec) -> float:
    """What a plain call leaves to be applied to the sums over its products' cotangents."""
    if not is_plain(spec):
        return 1.0
    assert spec.scale is not None
    return spec.scale


def is_plain(spec: Spec) -> bool:
    """Whether a logit is its product times a positive number known beforehand, which float32 can be divided by."""
    unmodified = _follows_products(spec) and spec.logits_soft_cap is None
    return unmodified and spec.scale is not None and spec.scale > 1e-20


def is_capped(spec: Spec) -> bool:
    """Whether a logit is its product scaled and capped, and no more; by as much as `SoftCap` has constants for."""
    return _follows_products(spec) and spec.logits_soft_cap is not None and spec.logits_soft_cap < 2**14


def _follows_products(spec: Spec) -> bool:
    return spec.score_mod is None and {"bias", "alibi_slopes"}.isdisjoint(spec.operands)


@dataclasses.dataclass(frozen=True)
class Exponent:
    """How logits become weights, exp(logit - reference), with the hardware's base-2 exponential."""

    factor: float
    """From a logit, or of a plain call a product, to base 2."""
    exact: bool
    """Subtract first: a bias may be as large as its dtype allows."""
    limit: float = math.inf
    """Of references: up to it, rounding half a unit scales weights by no more than their dtype has room for."""

    def __call__(self, logits: Array, reference: Array) -> Array:
        """Weights from logits and, broadcast to them, what `of` returned for their reference."""
        if self.exact:
            return jnp.exp2((logits - reference) * self.factor)
        return jnp.exp2(logits * self.factor - reference)

    def relative_to(self, reference: Array) -> tuple[Array | float, Array]:
        """Two numbers for a row, with which exp2(logits * factor - subtrahend) are its weights.

        Rounding the subtrahend scales all of them alike, and they are divided by their sum. Past the limit the factor
        is 1, and nothing is rounded: logits are so far from each other that the largest has all the weight either way.
        """
        if not self.exact:
            return self.factor, self.of(reference)
        factor = jnp.where(jnp.abs(reference) < self.limit, self.factor, 1.0)
        return factor, reference * factor

    def rescaling(self, before: Array, reference: Array) -> Array:
        """What weights relative to a row's reference before are multiplied with, to be relative to another."""
        (factor_before, subtrahend_before), (factor, subtrahend) = map(self.relative_to, (before, reference))
        difference = subtrahend_before - subtrahend
        if self.exact:
            difference = jnp.where(factor_before == factor, difference, before - reference)
        return jnp.exp2(difference)

    def of_difference(self, products: Array) -> Array:
        """Weights of a plain call from products less their reference, in their own units."""
        return jnp.exp2(products * self.factor)

    def of(self, reference: Array) -> Array:
        """A reference, in the units of logits, as it is subtracted."""
        return reference if self.exact else reference * self.factor


def exponent(spec: Spec) -> Exponent:
    """The call's way from logits to weights."""
    if is_plain(spec):
        assert spec.scale is not None
        return Exponent(spec.scale * math.log2(math.e), exact=False)
    exact = "bias" in spec.operands or spec.score_mod is not None
    # Where weights are off by 2**8 and 2**32, and logits 8 and 32 from each other at least.
    limit = 2.0**27 if spec.dtype == jnp.float16 else 2.0**29
    return Exponent(math.log2(math.e), exact, limit)
