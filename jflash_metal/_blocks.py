"""How large the blocks of each kernel are: as large as threadgroup memory and registers allow."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

from jflash._semantics.spec import Spec

THREADGROUP_MEMORY = 32768
"""Bytes that a threadgroup may have on every Apple GPU that has SIMD-group matrices (Metal feature set tables)."""
ACCUMULATORS = 64
"""32-bit registers that the sums of a thread may take; an Apple GPU has 128 for each thread at full precision."""
SIMDGROUPS = 4


@dataclasses.dataclass(frozen=True)
class Block:
    """What a threadgroup of a kernel holds: a block of one side, and tiles of the other that stream by."""

    rows: int
    columns: int
    streams: int = 1
    """2: keys and values (or queries and their outputs' gradients) of a tile are both held."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of threadgroup memory that the kernels take, as the entry points declare it."""

    itemsize: int
    head_dim: int
    value_dim: int

    def _tile(self, rows: int, features: int) -> int:
        return rows * (_whole(features) * self.itemsize + 16)

    def _products(self, block: Block) -> int:
        return block.rows * (block.columns + 4) * 4

    def _stream(self, block: Block) -> int:
        tiles = [self._tile(block.columns, features) for features in (self.head_dim, self.value_dim)]
        return sum(tiles) if block.streams == 2 else max(tiles)

    @staticmethod
    def _facts(block: Block) -> int:
        return 20 * (block.rows + block.columns)

    _SCRATCH = SIMDGROUPS * 64 * 4

    def forward(self, block: Block) -> int:
        """Of the kernel `forward`."""
        weights = self._tile(block.rows, block.columns)
        own = self._tile(block.rows, self.head_dim) + 4 * block.rows
        return own + self._stream(block) + self._products(block) + weights + self._SCRATCH + self._facts(block)

    def _backward(self, block: Block, weights: int) -> int:
        own = self._tile(block.rows, self.head_dim) + self._tile(block.rows, self.value_dim)
        tiles = 2 * self._products(block) + weights * self._tile(block.rows, block.columns)
        return own + self._stream(block) + tiles + self._SCRATCH + self._facts(block)

    def d_query(self, block: Block) -> int:
        """Of the kernel `d_query`."""
        return self._backward(block, weights=1)

    def d_key_value(self, block: Block) -> int:
        """Of the kernel `d_key_value`."""
        return self._backward(block, weights=2)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of each kernel of a call."""

    forward: Block
    d_query: Block
    d_key_value: Block


def _whole(features: int) -> int:
    return -(-features // 8) * 8


def _registers(rows: int, *widths: int) -> int:
    """Of a thread for [rows, width] sums: each 8x8 matrix takes two of every thread."""
    share = SIMDGROUPS * 8 // rows
    return sum(2 * -(-(_whole(width) // 8) // share) for width in widths)


def blocks(spec: Spec) -> Blocks:
    """The blocks with which the fewest bytes stream by, of those that fit into threadgroup memory and registers."""
    return blocks_of(spec.dtype.itemsize, spec.head_dim, spec.value_dim)


@functools.lru_cache(maxsize=256)
def blocks_of(itemsize: int, heads: int, values: int) -> Blocks:
    """The same from what they depend on: bytes of a number, head dimension, head dimension of the values."""
    memory = Memory(itemsize, heads, values)

    def best(
        bytes_of: Callable[[Block], int], widths: tuple[int, ...], traffic: Callable[[Block], float], streams: int
    ) -> Block:
        every = (Block(*sizes) for sizes in itertools.product((32, 16, 8), (32, 16, 8), (2, 1)[2 - streams :]))
        fitting = [
            block
            for block in every
            if bytes_of(block) <= THREADGROUP_MEMORY and _registers(block.rows, *widths) <= ACCUMULATORS
        ]
        # Of equals the one with the fewest barriers: four for each tile, and two where its halves share a place.
        return min(fitting, key=lambda block: (traffic(block), (8 - 2 * block.streams) / block.columns))

    by_rows: Callable[[Block], float] = lambda block: 1 / block.rows
    # Where its halves share a place, a tile of queries comes twice: for the logits and for dK.
    twice: Callable[[Block], float] = lambda block: (1 + (2 - block.streams) * heads / (heads + values)) / block.rows
    return Blocks(
        forward=best(memory.forward, (values,), by_rows, 1),
        d_query=best(memory.d_query, (heads,), by_rows, 2),
        d_key_value=best(memory.d_key_value, (heads, values), twice, 2),
    )
