"""Items of work of about one length, for sequences whose lengths are known on the device alone.

Each block of queries of a batch entry walks over tiles of keys. Of sequences of different lengths the longest would
keep all others waiting. So walks that are longer than one and a half shares of all work are cut into pieces:

    share = ceil(tiles of all walks / shares), at least 4 tiles
    a walk of t tiles is made max(round(t / share), 1) items, at most one tile apart in length

That is up to `walks + shares` items: a static grid, whose last CTAs may find nothing to do. Items go by the length of
their walks, the longest first. So those of cut walks are the first ones, and an item's index says where a piece leaves
its result. A kernel makes the list (`nvidia.deal`). Behind the items it has the cut walks, for the kernel that merges
their pieces.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jflash._backends.nvidia.facts import facts_of
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
class Shares:
    """What is known of a call's items before any array."""

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


class Item(NamedTuple):
    """A CTA's item, in a kernel."""

    index: Any
    batch: Int[Array, ""]
    block: Int[Array, ""]
    first: Int[Array, ""]
    tiles: Int[Array, ""]
    kind: Int[Array, ""]

    @staticmethod
    def read(items: Ref, index: Any) -> Item:
        """Read an item of the list."""
        return Item(index, *(items[index, column] for column in range(COLUMNS)))

    @property
    def is_one(self) -> Bool[Array, ""]:
        """Whether there is such an item."""
        return self.kind > 0

    @property
    def is_piece(self) -> Bool[Array, ""]:
        """Whether the item is a piece of a walk that was cut."""
        return self.kind > 1

    def of(self, walk: Walk) -> TileRange:
        """Return the item's tiles of its walk, a range: at least one, which hides all keys if the walk has none."""
        assert isinstance(walk, TileRange), "calls with lists of tiles are not dealt out"
        return dataclasses.replace(walk, first=walk.start(self.first), count=jnp.maximum(self.tiles, 1))


class Cut(NamedTuple):
    """A walk that was cut into pieces, in a kernel."""

    batch: Int[Array, ""]
    block: Int[Array, ""]
    first_piece: Int[Array, ""]
    """The item that is its first piece."""
    pieces: Int[Array, ""]
    """The number of its pieces; 0 if there is no such walk."""

    @staticmethod
    def read(items: Ref, shares: Shares, index: Any) -> Cut:
        """Read a cut walk, which is behind all items in the list."""
        return Cut(*(items[shares.items + index, column] for column in range(4)))
