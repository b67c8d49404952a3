"""What a CTA owns and visits at a time, and the tiles of each kernel among which plans choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jflash._backends.nvidia.smem import WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a CTA owns and visits at a time, in every kernel."""

    blocks: int
    """Blocks of 64 rows that the CTA owns: of queries, or where keys are rows, of keys."""
    size: int
    """Keys, or queries, of a tile that it visits."""
    stages: int = 1
    """Visited tiles that are in shared memory together."""
    held: int = 0
    """Operands of the CTA's rows, of those that the kernel names first, that are in registers. From shared memory they
    are read again for every tile."""

    @property
    def rows(self) -> int:
        """Rows that a CTA owns."""
        return self.blocks * WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardTile(Tile):
    """A tile of the forward."""

    held_columns: int = 0
    """Columns of Q that are in registers where Q is not, a multiple of 16."""
    paired: bool = False
    """Whether O is a pair of blocks (`products`), for which P goes through shared memory; of one block and stage."""
    sums_in_parts: bool = False
    """Whether registers are left for the parts of a row's sum."""
    warps_share_keys: bool = False
    """Whether all warps have the same rows, up to 16, and each has a quarter of a tile's keys; of one block."""


@dataclasses.dataclass(frozen=True)
class FusedTile(Tile):
    """A tile of the fused backward."""

    warpgroups: int = 1
    """Warpgroups that share the CTA's rows."""
    passes: int = 1
    """Parts of a visited tile whose products with the CTA's rows come one after the other: fewer are in registers at a
    time."""


@dataclasses.dataclass(frozen=True)
class DbiasTile(Tile):
    """A tile of the bias's gradient; every block of rows has a warpgroup of its own."""

    lends: bool = dataclasses.field(default=False, kw_only=True)
    """Whether the operands of the first product leave their shared memory to those of the second."""


def _tiles[Kind](kind: Callable[..., Kind], *fields: tuple[int, ...]) -> tuple[Kind, ...]:
    return tuple(kind(*numbers) for numbers in fields)


_FORWARD = {
    64: _tiles(ForwardTile, (2, 64), (2, 64, 2), (2, 64, 1, 1)),
    128: _tiles(ForwardTile, (2, 64), (2, 64, 2), (1, 64), (1, 64, 2, 1)),
    256: _tiles(ForwardTile, (1, 64), (1, 32, 2, 1), (1, 32)),
}
_FEW_ROWS, _FEW_ROWS_OF_BYTES = (
    tuple(ForwardTile(1, *size, warps_share_keys=True) for size in sizes)
    for sizes in (((64, 2), (64, 1)), ((128, 2), (64, 2), (64, 1)))
)
_IN_PARTS = {128: (ForwardTile(2, 64, sums_in_parts=True), *_FORWARD[128])}
# Other logits than products leave no registers for tiles of 128 keys, and for what is held of Q.
_OF_PRODUCTS = {
    64: (ForwardTile(2, 128), *_FORWARD[64]),
    256: (ForwardTile(1, 64, held_columns=128, paired=True, sums_in_parts=True), *_FORWARD[256]),
}
_NARROW = _tiles(Tile, (1, 32), (1, 16))
_NARROW_FORWARD = _tiles(ForwardTile, (1, 32), (1, 16))
_LENDING = tuple(DbiasTile(1, size, lends=True) for size in (32, 16))
_DBIAS_OF_PIECES = {256: (*_tiles(DbiasTile, (1, 32), (1, 64)), *_LENDING)}

TILES: Mapping[str, Mapping[int, Mapping[int, Sequence[Tile]]]] = {
    "forward": {
        1: _FORWARD,
        2: {
            64: _tiles(ForwardTile, (1, 64), (1, 32, 2), (2, 32)),
            128: _tiles(ForwardTile, (1, 32), (1, 64), (1, 32, 2)),
            192: _tiles(ForwardTile, (1, 32), (1, 64), (1, 16)),
            256: _tiles(ForwardTile, (1, 16), (1, 32)),
        },
        3: {
            64: _tiles(ForwardTile, (1, 64), (1, 32), (2, 32)),
            128: _tiles(ForwardTile, (1, 32), (1, 64)),
            256: _NARROW_FORWARD,
        },
    },
    "forward, few rows": {1: {256: _FEW_ROWS}},
    "forward, few rows of bytes": {1: {64: _FEW_ROWS, 128: _FEW_ROWS_OF_BYTES, 256: _FEW_ROWS}},
    "forward, unbiased": {1: _FORWARD | _IN_PARTS},
    "forward, plain": {1: _FORWARD | _OF_PRODUCTS},
    "forward, causal": {1: _FORWARD | _OF_PRODUCTS | _IN_PARTS},
    "forward, short": {
        1: {128: _tiles(ForwardTile, (1, 64, 2), (1, 64)), 256: _tiles(ForwardTile, (1, 64), (1, 32))},
        2: {256: _tiles(ForwardTile, (1, 64), (1, 32), (1, 16))},
        3: {128: _tiles(ForwardTile, (1, 64), (1, 32)), 256: _NARROW_FORWARD},
    },
    "backward": {
        1: {
            64: _tiles(FusedTile, (2, 64, 2, 0, 1, 2), (2, 64, 2, 4, 2), (1, 64, 2), (1, 64)),
            128: _tiles(FusedTile, (2, 64, 2, 0, 2), (2, 64, 1, 0, 2), (1, 64), (1, 64, 2), (1, 64, 1, 0, 2)),
            256: _tiles(FusedTile, (1, 64, 2, 0, 2), (1, 64, 1, 0, 2)),
        }
    },
    "d_query": {
        1: {
            64: _tiles(Tile, (2, 64, 2), (2, 32, 2, 1), (1, 64, 2, 2)),
            128: _tiles(Tile, (2, 32, 2), (1, 64, 2, 2), (1, 64, 2)),
            256: _tiles(Tile, (1, 32), (1, 32, 1, 1)),
        },
        2: {64: _tiles(Tile, (1, 64), (1, 32, 2), (2, 32)), 256: _NARROW},
        3: {64: _tiles(Tile, (1, 32), (1, 64)), 256: _NARROW},
    },
    "d_key d_value": {
        1: {
            64: _tiles(Tile, (2, 32, 2), (1, 64, 2, 2), (1, 64, 2)),
            128: _tiles(Tile, (1, 64), (1, 32, 2, 2), (1, 32, 2, 1)),
            # One of both dims is 128 at most.
            256: _tiles(Tile, (1, 32, 2), (1, 32)),
        },
        2: {64: _tiles(Tile, (1, 32, 2), (1, 64)), 256: _NARROW},
        3: {64: _tiles(Tile, (1, 32), (1, 64)), 256: _NARROW},
    },
    "d_key": {1: {256: _tiles(Tile, (1, 32), (1, 32, 2, 1))}, 2: {256: _NARROW}, 3: {256: _NARROW}},
    "d_value": {
        1: {256: _tiles(Tile, (1, 64), (1, 32, 1, 1))},
        2: {256: _tiles(Tile, (1, 32), (1, 64), (1, 16))},
        3: {256: _NARROW},
    },
    "d_bias": {
        1: {
            128: _tiles(DbiasTile, (1, 128), (2, 128), (1, 64)),
            256: (*_tiles(DbiasTile, (2, 64), (1, 64), (1, 32)), _LENDING[0]),
        },
        2: _DBIAS_OF_PIECES,
        3: _DBIAS_OF_PIECES,
    },
}
"""Each kernel's tiles by the number of its operands' pieces and up to a head dim; some fit in 99 KiB.

First come the fastest of one piece, causal on an H100. Of more pieces none was measured: first come those that spill
few registers and are as fast ones of one piece are.
"""
