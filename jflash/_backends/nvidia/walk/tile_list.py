"""The tiles that a block visits as a list, where a mask leaves tiles empty anywhere.

Lists are made before a kernel (`_semantics.visits`) and lie in device memory. The warpgroups that compute, and the one
that copies ahead of them, read a tile's entry when they visit it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jflash._backends.nvidia import pack_mask
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.threads import packed_mask
from jflash._backends.nvidia.tile.inputs import KernelInputs, shared_index
from jflash._semantics import visits
from jflash._semantics.coverage import Coverage
from jflash._semantics.spec import Operands, Spec

LISTS = "tile_lists"
"""The name among a kernel's arrays of blocks' lists, `[#B, #N, blocks, entries]`; each ends with one past the end."""
KINDS = "tile_kinds"
"""The name of how much blocks see of every tile, `[#B, #N, blocks, tiles]`, as `Coverage.encoded`."""
PackedMask = Int[Array, "#B #N row_tiles column_tiles 128"]


class Blocks(NamedTuple):
    """The blocks of a kernel, and the tiles of which they visit some."""

    rows: int
    """Queries of a block, or keys."""
    size: int
    """Keys of a tile, or queries."""
    heads: int = 1
    """Neighbouring query heads for all of which a block visits the same tiles."""
    missing: int = 0
    """Rows that the first block lacks."""
    of_keys: bool = False
    """Whether blocks have keys."""


def coverage(spec: Spec, operands: Operands, blocks: Blocks, words: PackedMask | None) -> Coverage | None:
    """Return how much each block sees of every tile; `None` where a range says what is visited.

    `#N` counts groups of `blocks.heads` heads. `words` are a packed mask, whose rows are those of the blocks.
    """
    if not facts_of(spec).has_lists:
        return None
    of_queries, of_keys = (blocks.size, blocks.rows) if blocks.of_keys else (blocks.rows, blocks.size)
    # Rows past the last query need no mask.
    of_queries = of_queries if blocks.missing else min(of_queries, spec.query_length)
    queries = visits.cuts(spec.query_length, of_queries, blocks.missing)
    keys = visits.cuts(spec.key_length, of_keys)
    of_mask = None
    if words is not None:
        packed = pack_mask.coverage(words, keys_first=blocks.of_keys)
        of_mask = visits.covering(packed, queries, keys, tile=packed_mask.SIZE)
    found = visits.coverage(spec, operands, queries, keys, 1, blocks.heads, of_mask)
    return found.transposed() if blocks.of_keys else found


@dataclasses.dataclass(frozen=True)
class ListedTile:
    """A tile of a list, whose entry was read."""

    entry: Int[Array, ""]
    size: int

    @property
    def start(self) -> Int[Array, ""]:
        """The tile's first key, or query."""
        return visits.start(self.entry, self.size)

    @property
    def is_partial(self) -> Bool[Array, ""]:
        """Whether some of the tile is hidden."""
        return visits.is_partial(self.entry)

    def part(self, first: Any, size: int) -> ListedTile:
        """Return some of the tile: partial if the tile is."""
        return self


@dataclasses.dataclass(frozen=True)
class TileList:
    """The tiles of `size` that a block visits: as many as `count` of its list, from the one after `first` others on."""

    entries: Ref
    """How many tiles there are, and then the entry of each."""
    first: Int[Array, ""] | int
    count: Int[Array, ""]
    size: int
    may_be_partial = True
    """Whether some tile may be partial."""

    def tile(self, index: Int[Array, ""] | int) -> ListedTile:
        """Read the entry of the tile that is visited after `index` others."""
        return ListedTile(self.entries[1 + self.first + index], self.size)

    def start(self, index: Int[Array, ""] | int) -> Int[Array, ""]:
        """Return the first key, or query, of the tile that is visited after `index` others."""
        return self.tile(index).start

    def share(self, index: Int[Array, ""] | int, shares: int) -> TileList:
        """Return one CTA's share of the list; it may have no tile."""
        if shares == 1:
            return self
        each = lax.div(self.count + shares - 1, shares)
        return dataclasses.replace(
            self, first=self.first + index * each, count=jnp.clip(self.count - index * each, 0, each)
        )

    def split(self, index: Int[Array, ""], splits: int) -> TileList:
        """Return one CTA's share of a list that several split: at least one tile, which may be past the end."""
        if splits == 1:
            return dataclasses.replace(self, count=jnp.maximum(self.count, 1))
        each = lax.div(self.count + splits - 1, splits)
        first = self.first + jnp.minimum(index * each, self.count)
        count = jnp.maximum(jnp.minimum(self.count - index * each, each), 1)
        return dataclasses.replace(self, first=first, count=count)


def visited(inputs: KernelInputs, batch: Any, group: Any, block: Any, size: int) -> TileList | None:
    """Return the list of a block, for a group of heads; `None` if the kernel has no lists."""
    ref = inputs.refs.get(LISTS)
    if ref is None:
        return None
    place = *shared_index(ref, batch, group), block
    entries = ref.at[place]
    return TileList(entries, 0, entries[0], size)


def seen_tile(
    inputs: KernelInputs, batch: Any, group: Any, block: Any, first: Any, size: int
) -> tuple[ListedTile, Bool[Array, ""]] | None:
    """Return the tile of `size` keys at `first`, and whether a block sees some of it; `None` without kinds."""
    ref = inputs.refs.get(KINDS)
    if ref is None:
        return None
    number = lax.div(first, size)
    kind = ref[(*shared_index(ref, batch, group), block, number)]
    return ListedTile(2 * number + (kind == 1).astype(jnp.int32), size), kind > 0
