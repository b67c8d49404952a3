"""Several blocks of queries, or of keys, that one block of the grid takes, one after the other.

A block of the grid begins and ends in about three microseconds. Where each block of queries visits few tiles, that is a
large part of its time; in rounds, what the next one begins with is loaded before the last one ends.

The next one is of the same head, so that what runs at the same time shares keys, which stay in the second-level cache.
Only where a head has fewer blocks than there are rounds, it is of another batch entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How many blocks a head has in each batch entry, in the order in which they should be begun, and how many of them
    one block of the grid takes."""

    blocks: int
    batch: int
    number: int

    @property
    def entries(self) -> int:
        """Batch entries that share blocks of the grid."""
        return -(-self.number // self.blocks)

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of the grid: for the blocks of some entries, and for all entries."""
        return -(-self.blocks * self.entries // self.number), -(-self.batch // self.entries)

    def taken(self, member: tuple[Any, Any], index: Any) -> tuple[Any, Any]:
        """The batch entry, and which of its blocks, that a block of the grid takes in a round."""
        block = self._block(member, index)
        if self.entries == 1:
            return member[1], block
        return member[1] * self.entries + lax.div(block, self.blocks), lax.rem(block, self.blocks)

    def _block(self, member: tuple[Any, Any], index: Any) -> Any:
        """Which of the blocks of some entries: every other round in the opposite order, so that all have as much to do;
        past the end where nothing is left."""
        if self.number == 1:
            return member[0]
        backwards = lax.rem(index, 2) == 1
        return index * self.grid[0] + jnp.where(backwards, self.grid[0] - 1 - member[0], member[0])

    def _is_left(self, member: tuple[Any, Any], index: Any) -> Any:
        entries = jnp.minimum(self.entries, self.batch - member[1] * self.entries)
        return self._block(member, index) < self.blocks * entries

    def each(self, member: tuple[Any, Any], body: Callable[[Any, Any], Any]) -> Any:
        """`carry = body(index, carry)` for every round, from 0 on."""
        if self.number == 1:
            return body(0, 0)
        left = (jnp.int32(self._is_left(member, index)) for index in range(self.number))
        return lax.fori_loop(0, sum(left), body, jnp.int32(0))

    def then(self, member: tuple[Any, Any], index: Any, body: Callable[[Any], None]) -> None:
        """`body(index + 1)`, if there is such a round."""
        if self.number > 1:
            pl.when((index + 1 < self.number) & self._is_left(member, index + 1))(lambda: body(index + 1))
