"""The walk over tiles that both passes share: blocks of query rows, and for each the tiles of keys it can see."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jflash._backends.xla import plans
from jflash._backends.xla.plans import Tiles
from jflash._mesh import varying_alike
from jflash._semantics import pages, visibility, visits
from jflash._semantics import tile as tiles
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import PARAMETERS, Corner, Parameters, Tile, TileShape, cut, paste_add


def is_whole(spec: Spec, shape: TileShape) -> bool:
    """Return whether one tile is the whole call."""
    sizes = shape.batch, shape.key_heads, shape.queries, shape.keys
    return sizes == (spec.batch, spec.key_heads, spec.query_length, spec.key_length)


def one_tile_for_a_block(spec: Spec, shape: Tiles) -> bool:
    """Return whether one tile holds all that a block's rows see."""
    if shape.listed:
        return shape.keys == spec.key_length
    window = plans.seen_at_once(spec)
    in_step = "query_offset" not in spec.operands or shape.batch == 1
    return shape.keys == spec.key_length or (in_step and window is not None and window + shape.queries <= shape.keys)


def tile_lists(spec: Spec, operands: Operands, shape: Tiles) -> visits.Lists | None:
    """Return the lists of the tiles that all blocks visit, made before the walk; `None`: blocks have ranges."""
    if not shape.listed or is_whole(spec, shape):
        return None
    queries = visits.cuts(spec.query_length, shape.queries, early=True)
    keys = visits.cuts(spec.key_length, shape.keys)
    heads = shape.key_heads * spec.group
    return visits.list_tiles(spec, operands, queries, keys, batches=shape.batch, heads=heads)


def holds_rows(spec: Spec, shape: Tiles) -> bool:
    """Return whether a tile has all keys that its rows see, in this call or besides it, and makes use of that."""
    held = shape.held_keys is None or shape.keys <= shape.held_keys or is_whole(spec, shape)
    return held and one_tile_for_a_block(spec, shape) and not spec.partial


class Block(NamedTuple):
    """Some query rows of some batch entries and heads."""

    batch: Int[Array, ""]
    key_head: Int[Array, ""]
    first: Int[Array, ""]
    """The first row. The last block of a sequence begins early rather than end late."""
    fresh: Bool[Array, "i"] | None
    """True for rows that no earlier block had; `None`: all."""


def for_each_block[Carry](
    spec: Spec, operands: Operands, shape: TileShape, body: Callable[[Block, Carry], Carry], carry: Carry
) -> Carry:
    """Fold `body` over all blocks of query rows."""
    carry = varying_alike(carry, like=operands.query)
    blocks = -(-spec.query_length // shape.queries)
    groups = spec.key_heads // shape.key_heads

    def step(index: Int[Array, ""], carry: Carry) -> Carry:
        row_block, rest = index % blocks, index // blocks
        nominal = row_block * shape.queries
        first = jnp.minimum(nominal, spec.query_length - shape.queries)
        ragged = spec.query_length % shape.queries != 0
        fresh = first + jnp.arange(shape.queries) >= nominal if ragged else None
        block = Block(rest // groups * shape.batch, rest % groups * shape.key_heads, first, fresh)
        return body(block, carry)

    return _loop(blocks * groups * (spec.batch // shape.batch), step, carry)


def _loop[Carry](count: Int[Array, ""] | int, body: Callable[[Int[Array, ""], Carry], Carry], carry: Carry) -> Carry:
    """Run `body` for each index below `count`, in int32 even where Python's integers become int64."""
    if isinstance(count, int) and count == 1:
        return body(jnp.int32(0), carry)
    return lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), body, carry)


@dataclasses.dataclass(frozen=True)
class Span:
    """The part [start, stop) of a tile's keys that is this tile's own; the rest belongs to its neighbours.

    Both are `None` for a tile without neighbours, whose keys are all that its rows see.
    """

    start: Int[Array, ""] | None = None
    stop: Int[Array, ""] | None = None


def for_each_tile[Carry](
    spec: Spec,
    operands: Operands,
    shape: Tiles,
    block: Block,
    body: Callable[[Corner, Span | None, Carry], Carry],
    carry: Carry,
    lists: visits.Lists | None = None,
) -> Carry:
    """Fold `body` over the tiles of keys that the block can see: those of its list, or all in a range.

    Tiles that every row sees whole come with no span, and need no mask; the others come with theirs. Without lists
    tiles begin where the visible keys do rather than at multiples of their size, so a window is covered by as few as
    can be.
    """
    carry = varying_alike(carry, like=operands.query)
    size, length = shape.keys, spec.key_length
    corner = lambda key: Corner(block.batch, block.key_head, block.first, key)
    unmasked = lambda index, carry: body(corner(full_start + index * size), None, carry)
    if lists is not None:
        return _for_each_listed(spec, shape, block, body, carry, lists)
    limited = visibility.limited(spec)
    if not limited and length % size == 0:
        full_start = jnp.int32(0)
        return _loop(length // size, unmasked, carry)

    if is_whole(spec, shape):
        return body(corner(jnp.int32(0)), Span(), carry)
    spans = visibility.key_spans(spec, operands, block.batch, shape.batch, block.first, shape.queries)
    if one_tile_for_a_block(spec, shape):
        visit = lambda carry: body(corner(jnp.minimum(spans.start, length - size)), Span(), carry)
        if visibility.every_row_sees(spec):
            return visit(carry)
        return lax.cond(spans.start < spans.stop, visit, lambda carry: carry, carry)

    tiles = lambda keys: (keys + size - 1) // size
    whole = (spans.full_stop - spans.full_start) // size
    full_start = jnp.where(whole > 0, spans.full_start, spans.start)
    full_stop = full_start + whole * size
    left, right = tiles(full_start - spans.start), tiles(spans.stop - full_stop)

    def masked(index: Int[Array, ""], carry: Carry) -> Carry:
        on_left = index < left
        start = jnp.where(on_left, spans.start + index * size, full_stop + (index - left) * size)
        stop = jnp.minimum(start + size, jnp.where(on_left, full_start, spans.stop))
        return body(corner(jnp.minimum(start, length - size)), Span(start, stop), carry)

    if spec.mask_shape is None:
        carry = _loop(whole, unmasked, carry)
    return _loop(left + right, masked, carry)


def _for_each_listed[Carry](
    spec: Spec,
    shape: TileShape,
    block: Block,
    body: Callable[[Corner, Span | None, Carry], Carry],
    carry: Carry,
    lists: visits.Lists,
) -> Carry:
    """Fold `body` over the tiles of a block's list, first those that are seen whole."""
    size, length = shape.keys, spec.key_length
    # The last block begins early.
    row = (block.first + shape.queries - 1) // shape.queries
    places = zip((block.batch // shape.batch, block.key_head // shape.key_heads, row), lists.shape, strict=False)
    own = lists[tuple(jnp.minimum(place, count - 1) for place, count in places)]
    count, entries = own[0], own[1:]
    whole = jnp.sum((jnp.arange(entries.size) < count) & ~visits.is_partial(entries), dtype=jnp.int32)

    def unmasked(index: Int[Array, ""], carry: Carry) -> Carry:
        start = visits.start(entries[index], size)
        return body(Corner(block.batch, block.key_head, block.first, start), None, carry)

    def masked(index: Int[Array, ""], carry: Carry) -> Carry:
        start = visits.start(entries[whole + index], size)
        corner = Corner(block.batch, block.key_head, block.first, jnp.minimum(start, length - size))
        return body(corner, Span(start, jnp.minimum(start + size, length)), carry)

    return _loop(count - whole, masked, _loop(whole, unmasked, carry))


def visible(spec: Spec, tile: Tile, span: Span | None) -> Bool[Array, "#b #k #g #i #j"] | None:
    """Return True for logits of a tile that count; `None`: all."""
    if span is None:
        return None
    seen = visibility.visible(spec, tile)
    if span.start is None or span.stop is None:
        return seen
    own = (tile.key >= span.start) & (tile.key < span.stop)
    return own if seen is None else own & seen


def without_group[T](spec: Spec, arrays: T) -> T:
    """Return a tile's arrays without the axis of a group's heads where a group has one head: `[b, k, i, ...]`.

    XLA's CPU compiler takes an axis of size 1 between two others for another layout. It would copy the tile, and not
    make the row's maximum and the exponentials in the product's kernel.
    """
    return arrays if spec.group > 1 else jax.tree.map(lambda array: jnp.squeeze(array, 2), arrays)


def with_group[T](spec: Spec, arrays: T) -> T:
    """Return the arrays that `without_group` took, with the group's axis."""
    return arrays if spec.group > 1 else jax.tree.map(lambda array: jnp.expand_dims(array, 2), arrays)


def axes_of_rows(spec: Spec) -> int:
    """Return how many axes say which row of a tile a number belongs to."""
    return 4 if spec.group > 1 else 3


def load_tile(spec: Spec, operands: Operands, corner: Corner, shape: TileShape) -> Tile:
    """Return the tile at a corner, its arrays without the group's axis where a group has one head."""
    whole = tiles.load_tile(spec, operands, corner, shape)
    broadcast = whole._replace(parameters=None, dropout_seed=None, mask_mod_arrays=())
    return without_group(spec, broadcast)._replace(
        parameters=_parameters(without_group, spec, whole.parameters),
        dropout_seed=whole.dropout_seed,
        mask_mod_arrays=whole.mask_mod_arrays,
    )


def load_parameters(spec: Spec, whole: Parameters, corner: Corner, shape: TileShape) -> Parameters:
    """Return the tile's part of a whole call's parameters."""
    return _parameters(without_group, spec, tiles.load_parameters(spec, whole, corner, shape))


def add_parameters(spec: Spec, sums: Parameters, part: Parameters, corner: Corner, shape: TileShape) -> Parameters:
    """Return `sums` with `part` added where `load_parameters` takes it."""
    return tiles.add_parameters(spec, sums, _parameters(with_group, spec, part), corner, shape)


def _parameters(change: Callable[[Spec, Any], Any], spec: Spec, parameters: Parameters) -> Parameters:
    return parameters._replace(**{name: change(spec, getattr(parameters, name)) for name in PARAMETERS})


def load_rows(spec: Spec, array: Array, block: Block, shape: TileShape) -> Array:
    """Return the block's part of `[B, T, K, G, ...]` as `[b, k, g, i, ...]`, `[b, k, i, ...]` without a group."""
    rest = array.shape[4:]
    part = cut(
        array,
        (block.batch, block.first, block.key_head, 0, *[0] * len(rest)),
        (shape.batch, shape.queries, shape.key_heads, spec.group, *rest),
    )
    return without_group(spec, jnp.moveaxis(part, 1, 3))


def add_rows(spec: Spec, array: Array, part: Array, block: Block) -> Array:
    """Return `array` with `part` added where `load_rows` takes it."""
    starts = (block.batch, block.first, block.key_head, 0, *[0] * (array.ndim - 4))
    return paste_add(array, jnp.moveaxis(with_group(spec, part), 3, 1), starts)


def pairs(spec: Spec, products: Float[Array, "b k gi j"]) -> Float[Array, "b k g i j"]:
    """Return products with query heads and rows taken apart."""
    batch, heads, _, columns = products.shape
    return products if spec.group == 1 else products.reshape(batch, heads, spec.group, -1, columns)


def load_keys(array: Array, corner: Corner, shape: TileShape) -> Array:
    """Return the tile's part of `[B, S, K, ...]` as `[b, k, j, ...]`."""
    rest = array.shape[3:]
    part = cut(
        array,
        (corner.batch, corner.key, corner.key_head, *[0] * len(rest)),
        (shape.batch, shape.keys, shape.key_heads, *rest),
    )
    return jnp.moveaxis(part, 1, 2)


def load_keys_and_values(
    spec: Spec, operands: Operands, corner: Corner, shape: TileShape
) -> tuple[Float[Array, "b k j H"], Float[Array, "b k j D"]]:
    """Return the tile's part of the keys and of the values, taken out of their pages where the call has pages."""
    if spec.pages is not None:
        return pages.load(spec, operands, corner, shape)
    return load_keys(operands.key, corner, shape), load_keys(operands.value, corner, shape)


def add_keys(array: Array, part: Array, corner: Corner) -> Array:
    """Return `array` `[B, K, ..., S]` with `part` `[b, k, j, ...]` added where `load_keys` takes it."""
    starts = (corner.batch, corner.key_head, *[0] * (array.ndim - 3), corner.key)
    return paste_add(array, jnp.moveaxis(part, 2, -1), starts)


def zero_padding(
    array: Float[Array, "b k *axes H"], index: Int[Array, "..."], lengths: Int[Array, "..."] | None
) -> Float[Array, "b k *axes H"]:
    """Return `array` with zeros in rows at or past the length: padding may hold NaN, and 0 * NaN is NaN."""
    return array if lengths is None else jnp.where(index < lengths, array, 0)


def zero_padded_keys(array: Float[Array, "b k j H"], tile: Tile) -> Float[Array, "b k j H"]:
    """Return a tile's keys or values, with padding as zeros."""
    if tile.key_lengths is None:
        return array
    return zero_padding(array, tile.key.reshape(1, 1, -1, 1), tile.key_lengths.reshape(-1, 1, 1, 1))


def dot(
    spec: Spec, left: Float[Array, "b k m h"], right: Float[Array, "b k n h"], contract: tuple[int, int]
) -> Float[Array, "b k m n"]:
    """Return the matrix products of every batch entry and head, accumulated in the accumulator's dtype."""
    dimensions: Any = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    return lax.dot_general(left, right, dimensions, precision=spec.precision, preferred_element_type=spec.accumulator)


def products(
    spec: Spec, shape: Tiles, left: Float[Array, "b k m h"], right: Float[Array, "b k n h"]
) -> Float[Array, "b k m n"]:
    """Return the matrix products of which a tile of logits, or of their derivatives, is made.

    On a GPU, XLA computes exponentials inside the product's kernel, in float32: that saves a pass. Where the result is
    rounded, doing so costs a pass instead, so a product of 16-bit numbers is written out first.
    """
    made = dot(spec, left, right, (3, 3))
    rounds = spec.dtype != spec.accumulator and shape.by_passes and not is_whole(spec, shape)
    return lax.optimization_barrier(made) if rounds else made
