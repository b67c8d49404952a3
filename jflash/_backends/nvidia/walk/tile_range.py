"""The tiles of keys that a block of queries visits, or of queries that a block of keys visits; and a tile's mask.

They are a range, or with a mask of pairs a list (`tile_list`). A kernel finds a range from the block's index and its
entry's offset and lengths; with segments it reads a small table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jflash._backends.nvidia import cache_rows
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import mask_mod_reads
from jflash._backends.nvidia.tile.inputs import KernelInputs, Loaded, TileCoord
from jflash._backends.nvidia.walk import tile_list
from jflash._backends.nvidia.walk.tile_list import Blocks, ListedTile, TileList
from jflash._semantics import visibility
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import LIMITS
from jflash._semantics.visibility import Spans


class Place(NamedTuple):
    """Where a block lies."""

    batch: Any
    group: Any
    """The head, or the group of neighbouring query heads for all of which the block visits the same tiles."""
    block: Any


HIDING = frozenset({"query_lengths", "key_lengths", "query_segments"})
"""Operands whose values, unknown before the call, limit what is seen."""

TABLE = "tile_ranges"
"""The table's name among a kernel's arrays."""


def block_start(block: Any, size: int, missing: int = 0) -> Any:
    """Return where a block of `size` begins, if the first one lacks `missing` rows."""
    return jnp.maximum(block * size - missing, 0) if missing else block * size


def table(spec: Spec, operands: Operands, blocks: Blocks) -> dict[str, Int[Array, "B blocks 4"]]:
    """Return the spans of every block; nothing if a kernel finds them."""
    if "query_segments" not in spec.operands:
        return {}
    size, length = blocks.rows, spec.key_length if blocks.of_keys else spec.query_length
    find = visibility.query_spans if blocks.of_keys else visibility.key_spans
    spans = functools.partial(find, spec, operands._replace(mask=None))
    one = lambda batch, block: jnp.stack(spans(batch, 1, block_start(block, size, blocks.missing), min(size, length)))
    every = jax.vmap(jax.vmap(one, (None, 0)), (0, None))
    return {TABLE: every(jnp.arange(spec.batch), jnp.arange(-(-length // size)))}


@dataclasses.dataclass(frozen=True)
class TileRange:
    """The tiles that a block visits, of `size` each, from `first` on.

    Tiles outside [whole_start, whole_stop) need a mask, apart from a dense one; `None` if no tile does.
    """

    first: Int[Array, ""]
    count: Int[Array, ""]
    whole: tuple[Int[Array, ""], Int[Array, ""]] | None
    size: int

    @property
    def may_be_partial(self) -> bool:
        """Whether some tile may be partial."""
        return self.whole is not None

    def tile(self, index: Int[Array, ""] | int) -> TileInRange:
        """Return the tile that is visited after `index` others."""
        return TileInRange(self, index)

    def start(self, index: Int[Array, ""] | int) -> Int[Array, ""]:
        """Return the first key, or query, of the tile that is visited after `index` others."""
        return self.first + index * self.size

    def share(self, index: Int[Array, ""] | int, shares: int) -> TileRange:
        """Return one CTA's share of a range; it may have no tile."""
        if shares == 1:
            return self
        each = lax.div(self.count + shares - 1, shares)
        return dataclasses.replace(
            self, first=self.start(index * each), count=jnp.clip(self.count - index * each, 0, each)
        )

    def split(self, index: Int[Array, ""], splits: int) -> TileRange:
        """Return one CTA's share of a range that several split: at least one tile, which may be past the end."""
        if splits == 1:
            return dataclasses.replace(self, count=jnp.maximum(self.count, 1))
        stop = self.first + self.count * self.size
        each = lax.div(self.count + splits - 1, splits)
        first = jnp.minimum(self.first + index * each * self.size, stop)
        count = jnp.maximum(jnp.minimum(self.count - index * each, each), 1)
        whole = self.whole if self.whole is not None else (self.first, stop)
        return dataclasses.replace(self, first=first, count=count, whole=whole)


@dataclasses.dataclass(frozen=True)
class TileInRange:
    """A tile of a range."""

    range: TileRange
    index: Int[Array, ""] | int
    """How many of the range's tiles come before it."""

    @property
    def start(self) -> Int[Array, ""]:
        """The tile's first key, or query."""
        return self.range.start(self.index)

    @property
    def is_partial(self) -> Bool[Array, ""] | None:
        """Whether more than a dense mask hides some of the tile; `None` if nothing ever does."""
        if self.range.whole is None:
            return None
        start, (whole_start, whole_stop) = self.start, self.range.whole
        return (start < whole_start) | (start + self.range.size > whole_stop)

    def part(self, first: Int[Array, ""] | int, size: int) -> TileInRange:
        """Return `size` of the tile's keys, from `first` on."""
        return dataclasses.replace(self.range, first=first, count=jnp.int32(1), size=size).tile(0)


Walk = TileRange | TileList
"""What a block visits."""
VisitedTile = TileInRange | ListedTile
"""One of the tiles that a block visits."""


def visited(inputs: KernelInputs, place: Place, rows: int, size: int, missing: int = 0, *, alignment: int = 8) -> Walk:
    """Return the tiles of `size` keys that a block of `rows` queries visits; or those of queries, if rows are keys.

    The first block lacks `missing` rows. Tiles begin at multiples of `alignment`, and where masks, words and pages do.
    """
    listed = tile_list.visited(inputs, *place, size)
    if listed is not None:
        return listed
    spec, of_keys = inputs.spec, inputs.keys_first
    batch, _, block = place
    rows, missing = max(rows // inputs.packed_heads, 1), missing // inputs.packed_heads
    row = block_start(block, rows, missing)
    known: Any = inputs.refs.get(TABLE)
    if known is None:
        found = _spans(inputs, batch, row, rows)
    else:
        found = Spans(*(known[batch, block, part] for part in range(4)))
    first, count = of_spans(spec, found, size, alignment=alignment)
    whole = found.full_start, found.full_stop
    ragged = spec.key_length % (rows if of_keys else size) != 0
    if ragged and of_keys:
        # What is read as keys past the end is 0, and would have weights.
        whole = whole[0], jnp.where(row + rows > spec.key_length, first, whole[1])
    return TileRange(first, count, whole if ragged or is_limited(spec) else None, size)


def seen_tile(
    inputs: KernelInputs, place: Place, rows: int, first: Any, size: int
) -> tuple[VisitedTile, Bool[Array, ""]]:
    """Return the tile of `size` keys at `first`, and whether a block of `rows` queries sees some of it."""
    known = tile_list.seen_tile(inputs, *place, first, size)
    if known is not None:
        return known
    tiles = visited(inputs, place, rows, size)
    assert isinstance(tiles, TileRange), "kernels with lists of tiles have kinds here"
    seen = (first < tiles.first + tiles.count * size) & (first + size > tiles.first)
    return tiles.tile(0).part(first, size), seen


def of_spans(spec: Spec, spans: Spans, size: int, *, alignment: int = 8) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return where the first tile of `size` keys begins that has some of what is seen, and how many tiles have."""
    tiled = facts_of(spec).has_bias_tiles or facts_of(spec).has_packed_mask
    # Dropout has words of 16 keys.
    alignment = max(alignment, 64 if tiled else 16 if spec.dropout_rate > 0 else 8)
    alignment = math.lcm(alignment, cache_rows.alignment(spec, size))
    first = lax.div(spans.start, alignment) * alignment
    return first, jnp.where(spans.start < spans.stop, lax.div(spans.stop - first + size - 1, size), 0)


def is_limited(spec: Spec) -> bool:
    """Return whether more than a mask of one axis, and where the keys end, says what is seen."""
    return spec.bounds != (None, None) or facts_of(spec).has_lists or not HIDING.isdisjoint(spec.operands)


def blocks_grow(spec: Spec) -> bool:
    """Return whether each block of queries sees more keys than the last."""
    left, right = spec.bounds
    return left is None and right is not None


def _spans(inputs: KernelInputs, batch: Any, first: Any, rows: int) -> Spans:
    """Return the spans of some rows in a call without segments."""
    limits: Any = {name: inputs.value(name, batch) for name in LIMITS}
    find = visibility.query_spans if inputs.keys_first else visibility.key_spans
    return find(inputs.spec, _of_limits(limits), 0, 1, first, rows)


def limits(operands: Operands) -> dict[str, Int[Array, "B"]]:
    """Return the operands that say what an entry's queries see, in a call without segments, by name."""
    found = {name: getattr(operands, name) for name in LIMITS}
    return {name: array for name, array in found.items() if array is not None}


def key_spans(spec: Spec, limits: Mapping[str, Int[Array, ""]], first: Any, rows: int) -> Spans:
    """Return the spans of keys that some rows of queries see of an entry with these `limits`."""
    return visibility.key_spans(spec, _of_limits(limits), 0, 1, first, rows)


def _of_limits(limits: Mapping[str, Any]) -> Operands:
    nothing: Any = None
    return Operands(query=nothing, key=nothing, value=nothing, **limits)


def own_key_tiles(inputs: KernelInputs, tiles: Walk, at: TileCoord) -> tuple[Any, Any, Walk]:
    """Return the share of a CTA's tiles that a warpgroup's rows, from `at` on, see.

    That is the first index and the one after the last, at least one tile; and the range with what is whole for these
    rows. It is all where a table or a list says what is seen, or heads are packed.
    """
    spec = inputs.spec
    if TABLE in inputs.refs or isinstance(tiles, TileList) or inputs.packed_heads > 1:
        return 0, tiles.count, tiles
    found = _spans(inputs, at.batch, at.query, WARPGROUP_ROWS)
    seen_stop = jnp.where(at.query < spec.query_length, found.stop, found.start)
    start = jnp.clip(lax.div(found.start - tiles.first, tiles.size), 0, tiles.count - 1)
    stop = jnp.clip(lax.div(seen_stop - tiles.first + tiles.size - 1, tiles.size), start + 1, tiles.count)
    whole = None if tiles.whole is None else (found.full_start, jnp.minimum(found.full_stop, tiles.whole[1]))
    return start, stop, dataclasses.replace(tiles, whole=whole)


@dataclasses.dataclass(frozen=True)
class TileContext:
    """A tile of logits in its kernel: where it lies, what was loaded of it, and what of it is hidden."""

    inputs: KernelInputs
    tile: VisitedTile
    at: TileCoord
    loaded: Loaded

    def hide(self, values: Array, hidden: float) -> Array:
        """Return `values` where the query sees the key, and `hidden` elsewhere."""
        values, is_partial = self.hide_if_whole(values, hidden), self.tile.is_partial
        if is_partial is None:
            return values

        def hide_by_position(values: Array) -> Array:
            (rows, columns), width = values.shape, mask_mod_reads.columns_together(self.inputs.spec, values.shape[1])
            some = [lax.slice(values, (0, first), (rows, first + width)) for first in range(0, columns, width)]
            parts = [self._hide_columns(part, number * width, hidden) for number, part in enumerate(some)]
            return lax.concatenate(parts, 1) if len(parts) > 1 else parts[0]

        return lax.cond(is_partial, hide_by_position, lambda values: values, values)

    def _hide_columns(self, values: Array, first: int, hidden: float) -> Array:
        """Return some of the tile's columns, from the `first` on, with what its place hides of them."""
        at = self.at
        if first:
            at = at._replace(query=at.query + first) if self.inputs.keys_first else at._replace(key=at.key + first)
        tile = self.inputs.tile(at, values.shape, self.loaded)
        if not self.is_listed:
            tile = tile._replace(mask=None)
        return jnp.where(mask_mod_reads.visible(self.inputs, at, tile), values, hidden)

    def hide_if_whole(self, values: Array, hidden: float) -> Array:
        """Return `values` with what is hidden of a tile that is not partial: by a dense mask, unless it is listed."""
        mask = None if self.is_listed else self.inputs.tile(self.at, values.shape, self.loaded).mask
        return values if mask is None else jnp.where(jnp.broadcast_to(mask, values.shape), values, hidden)

    @property
    def is_listed(self) -> bool:
        """Whether a list says how much is seen of the tile, a dense mask included."""
        return isinstance(self.tile, ListedTile)
