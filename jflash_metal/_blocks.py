"""The blocks of each kernel: the largest that fit into threadgroup memory and registers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

THREADGROUP_MEMORY = 32768
"""The bytes per threadgroup on every Apple GPU that has SIMD-group matrices (Metal feature set tables)."""
ACCUMULATORS = 64
"""The 32-bit registers per thread for accumulators; an Apple GPU has 128 per thread at full occupancy."""
SIMDGROUPS = 4
THREADS = 32 * SIMDGROUPS


@dataclasses.dataclass(frozen=True)
class Block:
    """The rows and columns that a threadgroup holds: `rows` of one side, which stay, and `columns` of the other, which
    stream."""

    rows: int
    columns: int
    streams: int = 1
    """The number of tiles of a step that are held at once: 2 are keys and values, or queries and dO; 1 means they take
    turns."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes of each kernel's threadgroup variables, by the names that its entry point gives them."""

    itemsize: int
    head_dim: int
    value_dim: int

    def _tile(self, rows: int, features: int) -> int:
        return rows * (_whole(features) * self.itemsize + 16)

    def _stream(self, block: Block) -> int:
        tiles = [self._tile(block.columns, features) for features in (self.head_dim, self.value_dim)]
        return sum(tiles) if block.streams == 2 else max(tiles)

    @staticmethod
    def _scores(block: Block) -> int:
        return block.rows * (block.columns + 4) * 4

    _METADATA = 20
    _SCRATCH = SIMDGROUPS * 64 * 4

    def forward(self, block: Block) -> dict[str, int]:
        """Return the bytes of the kernel `forward`."""
        return dict(
            q=self._tile(block.rows, self.head_dim),
            kv=self._stream(block),
            s=self._scores(block),
            p=self._tile(block.rows, block.columns),
            scratch=self._SCRATCH,
            rescale=4 * block.rows,
            query_metadata=self._METADATA * block.rows,
            key_metadata=self._METADATA * block.columns,
        )

    def d_bias(self, block: Block) -> dict[str, int]:
        """Return the bytes of the kernel `d_bias`."""
        return dict(
            block_qk=self._tile(block.rows, self.head_dim),
            block_vdo=self._tile(block.rows, self.value_dim),
            stream=self._stream(block),
            s=self._scores(block),
            dp=self._scores(block),
            block_metadata=self._METADATA * block.rows,
            tile_metadata=self._METADATA * block.columns,
        )

    def d_query(self, block: Block) -> dict[str, int]:
        """Return the bytes of the kernel `d_query`."""
        return dict(self.d_bias(block), ds=self._tile(block.rows, block.columns), scratch=self._SCRATCH)

    def d_key_value(self, block: Block) -> dict[str, int]:
        """Return the bytes of the kernel `d_key_value`."""
        return dict(self.d_query(block), p=self._tile(block.rows, block.columns))


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of each kernel of a call; `d_bias` has those of `d_query`."""

    forward: Block
    d_query: Block
    d_key_value: Block


def _whole(features: int) -> int:
    return -(-features // 8) * 8


def _registers(rows: int, *widths: int) -> int:
    """Return the registers per thread for [rows, width] accumulators: each 8x8 matrix takes two registers of every
    thread."""
    share = SIMDGROUPS * 8 // rows
    return sum(2 * -(-(_whole(width) // 8) // share) for width in widths)


@functools.lru_cache(maxsize=256)
def blocks_of(itemsize: int, head_dim: int, value_dim: int) -> Blocks:
    """Return the blocks, among those that fit, with which the fewest bytes stream by."""
    memory = Memory(itemsize, head_dim, value_dim)

    def best(
        variables: Callable[[Block], dict[str, int]],
        widths: tuple[int, ...],
        traffic: Callable[[Block], float],
        streams: int,
    ) -> Block:
        every = (Block(*sizes) for sizes in itertools.product((32, 16, 8), (32, 16, 8), (2, 1)[2 - streams :]))
        fitting = [
            block
            for block in every
            if sum(variables(block).values()) <= THREADGROUP_MEMORY and _registers(block.rows, *widths) <= ACCUMULATORS
        ]
        # Among equals the fewest barriers win: four per tile, and two more if its halves take turns.
        return min(fitting, key=lambda block: (traffic(block), (8 - 2 * block.streams) / block.columns))

    by_rows: Callable[[Block], float] = lambda block: 1 / block.rows
    # If its halves take turns, a tile of queries is loaded twice: for the logits and for dK.
    reload: Callable[[Block], float] = lambda block: (
        (1 + (2 - block.streams) * head_dim / (head_dim + value_dim)) / block.rows
    )
    return Blocks(
        forward=best(memory.forward, (value_dim,), by_rows, 1),
        d_query=best(memory.d_query, (head_dim,), by_rows, 2),
        d_key_value=best(memory.d_key_value, (head_dim, value_dim), reload, 2),
    )
