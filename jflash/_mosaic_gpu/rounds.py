"""Several blocks of queries, or of keys, that one block of the grid takes, one after the other.

A block of the grid begins and ends in about three microseconds. Where each block of queries visits few tiles, that is a
large part of its time; in rounds, what the next one begins with is loaded before the last one ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How many blocks there are, in the order in which they should be begun, and how many one of the grid takes."""

    blocks: int
    number: int

    @property
    def grid(self) -> int:
        """Blocks of the grid."""
        return -(-self.blocks // self.number)

    def block(self, member: Int[Array, ""], index: Any) -> Int[Array, ""]:
        """What a block of the grid takes in a round: every other round in the opposite order, so that all have as much
        to do; `blocks` or more where nothing is left."""
        backwards = lax.rem(index, 2) == 1
        return index * self.grid + jnp.where(backwards, self.grid - 1 - member, member)

    def each(self, member: Int[Array, ""], body: Callable[[Any, Any], Any]) -> Any:
        """`carry = body(index, carry)` for every round, from 0 on."""
        if self.number == 1:
            return body(0, 0)
        left = (jnp.int32(self.block(member, index) < self.blocks) for index in range(self.number))
        return lax.fori_loop(0, sum(left), body, jnp.int32(0))

    def then(self, member: Int[Array, ""], index: Any, body: Callable[[Int[Array, ""]], None]) -> None:
        """`body` for what comes after a round, if anything does."""
        if self.number > 1:
            block = self.block(member, index + 1)
            pl.when((index + 1 < self.number) & (block < self.blocks))(lambda: body(block))
