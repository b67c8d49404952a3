"""Which blocks of keys the grid of a backward kernel has, and in which order they begin.

A block of keys is visited by a set of the heads that share them: by all, unless that makes too few blocks for all
processors. What several sets make of dK and dV is summed in the end, in float32: rounded sums of a few heads would be
less exact than one of all.

The slowest axis of the grid counts turns. Who has a block in a turn is a unit: a batch entry of a set. Causal, a unit's
longest block takes twice as long as all do on average. Those of all the turn's units begin first; and a turn has a
block for every processor, so that whoever has a long one in the last turn had a short one in the turn before.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_ALMOST = 0.9
"""Of the processors, for which a turn has blocks: 128 are enough for 132."""


class Unit(NamedTuple):
    """What has a block of its own for all keys."""

    batch: Any
    set: Any
    """Of heads that share keys; those of one head of keys are beside each other."""
    key_head: Any
    first_head: Any
    """Of queries, of the set."""


@dataclasses.dataclass(frozen=True)
class Turns:
    """The blocks of a grid."""

    sets: int
    """Of each head of keys."""
    heads: int
    """Of a set."""
    blocks: int
    """Of keys, that a unit has."""
    batch: int
    units: int
    """Of a turn."""
    number: int
    """Of turns."""

    @staticmethod
    def of(heads: int, key_heads: int, blocks: int, batch: int, processors: int | None) -> Turns:
        """For so many blocks of keys that each head of keys has in each batch entry; `processors` of the device, `None`
        if nobody knows."""
        group = heads // key_heads
        sets = _sets(group, key_heads * blocks * batch, processors)
        every = key_heads * sets * batch
        # Whole sets, or entries of one: others would need divisions, in every block.
        sizes = [size for size in range(1, every) if batch % size == 0 or (size % batch, every % size) == (0, 0)]
        # Of an odd number of turns, one has no other in which long and short are exchanged.
        enough = lambda number: _ALMOST * (processors or math.inf) * (1 + number % 2)
        units = next((size for size in sizes if size * blocks >= enough(every // size)), every)
        return Turns(sets, group // sets, blocks, batch, units, every // units)

    def unit(self, turn: Any, number: Any) -> Unit:
        """One of a turn's; past the last turn, of no set."""
        if self.units <= self.batch:
            parts = self.batch // self.units
            batch, own = lax.rem(turn, parts) * self.units + number, lax.div(turn, parts)
        else:
            batch = lax.rem(number, self.batch)
            own = turn * (self.units // self.batch) + lax.div(number, self.batch)
        return Unit(batch, own, lax.div(own, self.sets), own * self.heads)

    def gradient(self, of: Array, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        """What is stored for keys or values `[B, S, K, H]`: the same, or of several sets `[B, sets, rows, columns]`."""
        if self.sets == 1:
            return jax.ShapeDtypeStruct(of.shape, of.dtype)
        return jax.ShapeDtypeStruct((len(of), of.shape[2] * self.sets, rows, columns), jnp.float32)

    def summed(self, gradient: Array, of: Array) -> Float[Array, "B S K H"]:
        """The whole gradient, of what was stored."""
        if self.sets == 1:
            return gradient
        batch, rows, key_heads, columns = of.shape
        each = gradient[:, :, :rows, :columns].reshape(batch, key_heads, self.sets, rows, columns)
        return each.sum(axis=2).transpose(0, 2, 1, 3).astype(of.dtype)


def _sets(group: int, blocks: int, processors: int | None) -> int:
    """How many sets there are of heads that share keys, if all keys have so many blocks.

    The sums of a set take as long as a head's visits to a few thousand queries. Of four heads and more, 3 blocks for
    each processor make up for that, as there are more turns; of fewer only those without which processors would wait.
    """
    every = [sets for sets in range(1, group + 1) if group % sets == 0]
    wanted = lambda least, times: (
        sets for sets in every if group >= least * sets and sets * blocks >= times * (processors or 0)
    )
    return next(wanted(4, 3.0), None) or next(wanted(1, 1.5), group)
