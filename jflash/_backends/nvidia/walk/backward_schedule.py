"""Which block of keys each CTA of a backward kernel has, and in which order CTAs begin.

A block of keys is visited by a head group: all query heads that share the keys, unless that makes too few CTAs for all
multiprocessors. What several groups make of dK and dV is summed in the end, in float32: rounded sums of a few heads
would be less exact than one of all.

The slowest axis of the grid counts waves. A work item, a batch entry of a head group, has CTAs for all its blocks of
keys in one wave. Causal, an item's longest block takes twice as long as the average. Those of all the wave's items
begin first; and a wave has a CTA for every multiprocessor, so that a long one in the last wave follows a short one.

Where CTAs add to accumulators of dQ and items have few blocks, waves are smaller: there are as many long CTAs as short
ones at any time, and accumulators, which exist for a few waves, stay in the cache.

Where they add `in_order`, the blocks of keys that see a tile of queries add to its dQ one after the other, as they
begin. Then waves are twice as large, so that a block begins well after the one before it. In all waves but the last one
the last keys' blocks may begin first (`turned`), which are the shortest if the call is causal: a block finds its first
tiles done, as the one before it began behind them. The last wave begins with the longest blocks, and ends with short
ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jflash._semantics.spec import Spec

_ALMOST_ALL = 0.9
"""The part of the multiprocessors for which a wave needs CTAs: 128 are enough for 132."""
_QUARTER = 0.24
"""The part of the multiprocessors for which a wave of few blocks needs CTAs: 32 are enough."""
_FEW_BLOCKS, _FEW_BLOCKS_ALIKE = 8, 16
"""Blocks of keys up to which waves are small: with fewer, the longest CTA takes little longer than the average; and if
all take the same time, small waves gain something up to the second number."""
_UNPAIRED_WAVES = 0.5
"""Waves for each block with which the schedule keeps an odd number of them. One without a partner takes a share of the
time that falls with their number. Waves twice as large push accumulators of dQ out of the cache, which costs a share
that falls with the number of blocks."""
_FEW_TILES = 4
"""Tiles of 128 queries or keys up to which one CTA rounds a work item's dQ without delay."""
_LAG, _ROOM = 1.45, 1.9
"""CTAs for each multiprocessor after which a small wave's dQ is rounded, or for whose accumulators there is room if the
last CTA of a work item rounds it. Smaller numbers make CTAs wait, and larger ones fill the cache."""


class WorkItem(NamedTuple):
    """What has a CTA for each block of keys."""

    batch: Any
    head_group: Any
    """Query heads that share keys; the groups of one key head are neighbours."""
    key_head: Any
    first_head: Any
    """The first query head of the group."""


@dataclasses.dataclass(frozen=True)
class BackwardSchedule:
    """The CTAs of a grid (waves, blocks, items)."""

    head_groups: int
    """Head groups of each key head."""
    heads: int
    """Query heads of a head group."""
    blocks: int
    """Blocks of keys that a work item has."""
    batch: int
    items: int
    """Work items of a wave."""
    waves: int
    lag: int = 2
    """How many waves later dQ of the fused backward is rounded."""
    room: int | None = None
    """Waves for which accumulators of dQ exist, if the last CTA of a work item rounds it; `None`: later CTAs round."""
    partial: bool = False
    """Whether dK and dV are parts of sums that go on after the call."""
    splits: int = 1
    """CTAs that share a block's queries: the first of every block, then the second. Each counts as a block."""
    in_order: bool = False
    """Whether CTAs add to a tile of dQ in the order in which they begin."""
    turned: bool = False
    """Whether blocks of the last keys begin first, in all waves but the last."""

    @property
    def grid(self) -> dict[str, int]:
        """The axes of a kernel's grid; from the first and the last of them `item` finds a CTA's work item."""
        return dict(wave=self.waves, block=self.blocks, item=self.items)

    @property
    def stores_sums(self) -> bool:
        """Whether dK and dV are stored as they were summed, in float32, to be summed on."""
        return self.head_groups > 1 or self.partial or self.splits > 1

    def is_turned(self, wave: Any) -> Any:
        """Return whether blocks of the last keys begin first in a wave."""
        return wave < self.waves - 1 if self.turned else jnp.bool_(False)

    def block(self, wave: Any, number: Any) -> Any:
        """Return the block of a wave's work item that begins after `number` others."""
        return jnp.where(self.is_turned(wave), self.blocks - 1 - number, number) if self.turned else number

    def split(self, block: Any) -> tuple[Any, Any]:
        """Return a block's place among those that differ in keys, and its split."""
        if self.splits == 1:
            return block, 0
        every = self.blocks // self.splits
        return lax.rem(block, every), lax.div(block, every)

    @staticmethod
    def of(
        spec: Spec,
        heads: int,
        key_heads: int,
        blocks: int,
        processors: int | None,
        *,
        accumulated: int | None = None,
        in_order: bool = False,
    ) -> BackwardSchedule:
        """The schedule for `blocks` of keys of each key head and batch entry of a call.

        `processors` are the device's multiprocessors, `None` where it is unknown. `accumulated` are the tiles of 128
        queries, if CTAs add to a dQ that others round: the accumulators of a few waves should stay in the cache.
        `in_order` says whether they add one after the other.
        """
        left, right = spec.bounds
        # Blocks see about as many tiles unless what they see is bounded on one side, as in causal attention.
        alike = (left is None) == (right is None)
        group, batch = heads // key_heads, spec.batch
        head_groups = _head_groups(group, key_heads * blocks * batch, processors)
        of_group, every = group // head_groups, key_heads * head_groups * batch
        small = accumulated is not None and not in_order and blocks <= (_FEW_BLOCKS_ALIKE if alike else _FEW_BLOCKS)
        at_once = accumulated is not None and of_group * max(accumulated, blocks) <= _FEW_TILES
        # Whole head groups, or entries of one: others would need divisions, in every CTA.
        sizes = [size for size in range(1, every) if batch % size == 0 or (size % batch, every % size) == (0, 0)]
        # Of an odd number of waves, one has no partner with which long and short CTAs are exchanged.
        kept = math.inf if accumulated is None else _UNPAIRED_WAVES * blocks
        least = (_QUARTER if small else _ALMOST_ALL) * (processors or math.inf)
        unpaired = lambda waves: waves % 2 and waves < kept and not alike
        enough = lambda waves: least * (2 if in_order or unpaired(waves) else 1)
        items = next((size for size in sizes if size * blocks >= enough(every // size)), every)
        waves = every // items
        with_ctas = lambda number: math.ceil(number * (processors or 0) / (items * blocks))
        lag = max(2, with_ctas(_LAG)) if small else 2
        room = max(1, min(waves, with_ctas(_ROOM))) if at_once else None
        schedule = BackwardSchedule(head_groups, of_group, blocks, batch, items, waves, lag, room)
        return dataclasses.replace(schedule, partial=spec.partial, in_order=in_order)

    def item(self, wave: Any, number: Any) -> WorkItem:
        """Return a wave's work item; past the last wave it has no head group."""
        if self.items <= self.batch:
            parts = self.batch // self.items
            batch, own = lax.rem(wave, parts) * self.items + number, lax.div(wave, parts)
        else:
            batch = lax.rem(number, self.batch)
            own = wave * (self.items // self.batch) + lax.div(number, self.batch)
        return WorkItem(batch, own, lax.div(own, self.head_groups), own * self.heads)

    def gradient(self, spec: Spec, stored: tuple[int, int], summed: tuple[int, int]) -> jax.ShapeDtypeStruct:
        """Return what a kernel stores for the gradient of keys or values, with (rows, columns) of either form.

        That is `[B, rows, K, columns]` in the call's dtype, or sums `[B, groups, rows, columns]` in float32.
        """
        if self.stores_sums:
            return jax.ShapeDtypeStruct((spec.batch, spec.key_heads * self.head_groups, *summed), jnp.float32)
        rows, columns = stored
        return jax.ShapeDtypeStruct((spec.batch, rows, spec.key_heads, columns), spec.dtype)

    def summed(self, spec: Spec, made: Mapping[str, Array], dims: tuple[int, int]) -> dict[str, Array]:
        """Return the gradients of keys and values by name, `[B, S, K, H]` and `[B, S, K, D]`, from what was stored."""

        def whole(gradient: Array, dim: int) -> Array:
            if not self.stores_sums:
                return gradient
            sums = spec.batch, spec.key_heads, self.head_groups * self.splits
            each = gradient.reshape(*sums, -1, gradient.shape[3])[:, :, :, : spec.key_length, :dim]
            total = each.sum(axis=2).transpose(0, 2, 1, 3)
            return total if self.partial else total.astype(spec.dtype)

        all_dims = zip(("d_key", "d_value"), dims, strict=True)
        return {name: whole(made[name], dim) for name, dim in all_dims if name in made}


def _head_groups(group: int, blocks: int, processors: int | None) -> int:
    """Return the number of groups for the query heads of one key head, if there are `blocks` of keys in all.

    The sums of a group cost as much as a head's visits to a few thousand queries. For four heads and more, 3 CTAs for
    each multiprocessor make up for that, as there are more waves; for fewer only CTAs that would otherwise be missing.
    """
    every = [groups for groups in range(1, group + 1) if group % groups == 0]
    wanted = lambda least, times: (
        groups for groups in every if group >= least * groups and groups * blocks >= times * (processors or 0)
    )
    return next(wanted(4, 3.0), None) or next(wanted(1, 1.5), group)
