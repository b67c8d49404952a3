"""How the walks of a forward are divided among CTAs: whole, in splits, or as items of work of about one length.

Each block of queries of a batch entry walks over tiles of keys. Where there are fewer walks than multiprocessors, as
when decoding or where few queries see many keys, each is cut into the same number of splits (`Splits`). Of sequences
whose different lengths are known on the device alone, the longest would keep all others waiting. So walks that are
longer than one and a half shares of all work are cut into pieces (`Shares`):

    share = ceil(tiles of all walks / shares), at least 4 tiles
    a walk of t tiles is made max(round(t / share), 1) items, at most one tile apart in length

That is up to `walks + shares` items: a static grid, whose last CTAs may find nothing to do. Items go by the length of
their walks, the longest first. So those of cut walks are the first ones, and an item's index says where a piece leaves
its result. A kernel makes the list (`nvidia.deal`). Behind the items it has the cut walks, for the kernel that merges
the pieces of both kinds (`nvidia.merge`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import cta_index
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.walk.tile_range import TileRange, Walk
from jflash._semantics.spec import Spec

ITEMS = "work_items"
"""The name of the list among kernels' arrays."""

COLUMNS = 5
"""Numbers of an item, and of a cut walk."""

LEAST = 4
"""Tiles of keys that are a share at least: beginning, ending and merging a piece cost about as much as one."""

_SHARES = 2
"""Shares of all work for each CTA that runs at once."""

_MOST_WALKS = 2**12
"""The most walks that are dealt out: each is compared with every other. More of them fill a device well enough."""


@dataclasses.dataclass(frozen=True)
class Splits:
    """Every walk is cut into as many pieces."""

    batch: int
    blocks: int
    """Blocks of queries of a batch entry."""
    each: int = 1
    """Pieces of a walk, of which each has a CTA; 1 if walks stay whole."""

    @staticmethod
    def of(spec: Spec, heads: int, blocks: int, ctas: int | None, least: int) -> Splits:
        """Return as many splits as about `ctas` CTAs at once leave idle, of at least `least` keys each; 1 where that
        number is not known. Walks are those of `blocks` blocks of queries for each of some `heads`."""
        idle = (ctas or 0) // (spec.batch * heads * blocks)
        # Of several blocks each has an output to merge, and those of a window have few tiles.
        is_worth_it = blocks <= 2 or (spec.key_length > 2 * least and None in spec.bounds)
        may_split = is_worth_it and spec.tokens is None
        return Splits(spec.batch, blocks, max(1, min(idle, spec.key_length // least)) if may_split else 1)

    @property
    def cuts(self) -> int:
        """The walks that are cut."""
        return self.batch * self.blocks if self.each > 1 else 0

    @property
    def pieces(self) -> int:
        """The pieces of all of them."""
        return self.cuts * self.each

    def work(self, arrays: Mapping[str, Ref], index: Any) -> Split:
        """Return what a CTA does, in a kernel whose grid has an axis "split"."""
        return Split(cta_index("split"), self)

    def cut(self, arrays: Mapping[str, Ref], index: Any) -> Cut:
        """Return one of the cut walks, in a kernel."""
        return Cut(lax.div(index, self.blocks), lax.rem(index, self.blocks), index * self.each, jnp.int32(self.each))

    def __str__(self) -> str:
        return f"keys in {self.each} splits"


@dataclasses.dataclass(frozen=True)
class Shares:
    """Walks are cut into items of about one length, of which this is known before any array."""

    walks: int
    """Blocks of queries of all batch entries."""
    shares: int
    """Shares into which all work is divided, for the pieces of walks."""

    @staticmethod
    def of(spec: Spec, heads: int, blocks: int, size: int, ctas: int | None) -> Shares | None:
        """Return how a call with a paged cache is dealt out to about `ctas` CTAs at once; `None` if its walks stay
        whole, as they do where that number is not known.

        Walks are those of `blocks` blocks of queries over tiles of `size` keys, the same for all of some `heads`.
        """
        walks, most_tiles, ctas = spec.batch * blocks, -(-spec.key_length // size), ctas or 0
        # Beginning takes a CTA about as long as a tile or two. Few walks are pieces anyway, so each is to begin once.
        each = 1 if 2 * walks * heads <= ctas else _SHARES
        shares = min(each * ctas // heads, walks * (most_tiles // LEAST))
        has_ranges = not facts_of(spec).has_lists and "query_segments" not in spec.operands
        may_cut = spec.pages is not None and has_ranges and not spec.partial
        return Shares(walks, shares) if may_cut and shares > 1 and walks <= _MOST_WALKS else None

    @property
    def items(self) -> int:
        """The most items that there can be."""
        return self.walks + self.shares

    @property
    def cuts(self) -> int:
        """The most walks that can be cut: each has one and a half shares."""
        return min(self.shares * 2 // 3, self.walks)

    @property
    def pieces(self) -> int:
        """The most items that can be pieces: as many as shares, and half a one more for each cut walk."""
        return self.shares * 4 // 3

    def work(self, arrays: Mapping[str, Ref], index: Any) -> Item:
        """Read what a CTA does, in a kernel, from the list of items."""
        return Item(index, *(arrays[ITEMS][index, column] for column in range(COLUMNS)))

    def cut(self, arrays: Mapping[str, Ref], index: Any) -> Cut:
        """Read one of the cut walks, which are behind all items in the list."""
        return Cut(*(arrays[ITEMS][self.items + index, column] for column in range(4)))

    def __str__(self) -> str:
        return f"up to {self.items} items of work, long walks cut into {self.shares}ths of all tiles"


Division = Splits | Shares
"""How a call's walks are divided."""


def divide(spec: Spec, heads: int, blocks: int, size: int, ctas: int | None, least: int) -> Division:
    """Return how walks are divided among about `ctas` CTAs at once: dealt out, or in splits. The arguments are as for
    `Shares.of` and `Splits.of`."""
    return Shares.of(spec, heads, blocks, size, ctas) or Splits.of(spec, heads, blocks, ctas, least)


class Split(NamedTuple):
    """A CTA's split of a walk, in a kernel; a whole walk if it is the only one."""

    number: Any
    splits: Splits

    def run(self, body: Callable[[], None]) -> None:
        """Run the CTA."""
        body()

    def of(self, walk: Walk) -> Walk:
        """Return the split's tiles of its walk."""
        return walk.split(self.number, self.splits.each)

    def piece(self, batch: Any, block: Any) -> Any:
        """Return the number of the piece that this is of the walk of an entry's block."""
        return (batch * self.splits.blocks + block) * self.splits.each + self.number

    def store(self, whole: Callable[[], None], piece: Callable[[], None]) -> None:
        """Store what a whole walk comes to, or a piece."""
        (piece if self.splits.each > 1 else whole)()

    def sink(self, sink: Array) -> Array | None:
        """Return the rows' sink, if it counts here: that of pieces counts where they are merged."""
        return None if self.splits.each > 1 else sink


class Item(NamedTuple):
    """A CTA's item of work, in a kernel."""

    index: Any
    batch: Int[Array, ""]
    block: Int[Array, ""]
    first: Int[Array, ""]
    tiles: Int[Array, ""]
    kind: Int[Array, ""]

    @property
    def _is_piece(self) -> Bool[Array, ""]:
        return self.kind > 1

    def run(self, body: Callable[[], None]) -> None:
        """Run the CTA, if there is such an item."""
        pl.when(self.kind > 0)(body)

    def of(self, walk: Walk) -> TileRange:
        """Return the item's tiles of its walk, a range: at least one, which hides all keys if the walk has none."""
        assert isinstance(walk, TileRange), "calls with lists of tiles are not dealt out"
        return dataclasses.replace(walk, first=walk.start(self.first), count=jnp.maximum(self.tiles, 1))

    def piece(self, batch: Any, block: Any) -> Any:
        """Return the number of the piece, if this is one."""
        return self.index

    def store(self, whole: Callable[[], None], piece: Callable[[], None]) -> None:
        """Store what a whole walk comes to, or a piece."""
        pl.when(self._is_piece)(piece)
        pl.when(~self._is_piece)(whole)

    def sink(self, sink: Array) -> Array:
        """Return the rows' sink; -inf for a piece, whose sink counts where pieces are merged."""
        return sink + jnp.where(self._is_piece, -jnp.inf, 0.0)


Work = Split | Item
"""What a CTA does of a walk, in a kernel."""


class Cut(NamedTuple):
    """A walk that was cut into pieces, in a kernel."""

    batch: Int[Array, ""]
    block: Int[Array, ""]
    first_piece: Int[Array, ""]
    """The item that is its first piece."""
    pieces: Int[Array, ""]
    """The number of its pieces; 0 if there is no such walk."""
