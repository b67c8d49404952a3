"""The order in which a block of keys visits the tiles of queries that see it.

What one CTA loads and adds to, others should use before it leaves the cache. With heads one by one, CTAs that see fewer
queries run ahead of the others, and are soon at another head's queries and dQ. So where all blocks of keys go on to the
last query, they begin with it: the last tile of all heads, then the one before it.

Elsewhere, as with a window, CTAs are at different tiles anyway, and should be at the same head. There they begin at
different tiles: adding to the same dQ at once, they would wait for each other.

Where they take turns (`InTurn`), a block comes to each tile after the one that began before it. So if its tiles begin
before the other's it goes up, and if they end behind them it goes down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jflash._backends.nvidia.walk.tile_list import TileList
from jflash._backends.nvidia.walk.tile_range import Walk
from jflash._semantics.spec import Spec


def is_by_head(spec: Spec, heads: int, *, is_listed: bool = False) -> bool:
    """Return whether it is better that `heads` come one by one; tiles may be listed."""
    to_the_end = spec.bounds[0] is None and not is_listed and "query_segments" not in spec.operands
    return heads == 1 or not to_the_end


class TileOrder:
    """The order of a block's tiles, for each of the `heads` of its head group."""

    def __init__(self, spec: Spec, tiles: Walk, heads: int, block: Int[Array, ""], *, by_head: bool) -> None:
        """Heads come one by one if the kernel wants them so, `by_head`, or if that is the better order."""
        self.tiles, self.heads = tiles, heads
        self.by_head = by_head or is_by_head(spec, heads, is_listed=isinstance(tiles, TileList))
        self.rotation = block
        """By how many tiles later this block begins with a head."""

    def at(self, step: Int[Array, ""], count: Int[Array, ""]) -> tuple[Any, Int[Array, ""]]:
        """Return the head, counted in its group, and the tile of a step; `count` is the range's."""
        if not self.by_head:
            return lax.rem(step, self.heads), count - 1 - lax.div(step, self.heads)
        return lax.div(step, count), self._of_head(lax.rem(step, count), count)

    def each[Carry](
        self,
        body: Callable[[Any, Any, Any, Carry], Carry],
        carry: Carry,
        finish_head: Callable[[Any, Carry], Carry] = lambda head, carry: carry,
    ) -> Carry:
        """`carry = body(step, head, tile, carry)` for all; after each head, if they come one by one, `finish_head`."""
        count = self.tiles.count
        if not self.by_head:
            visit_step = lambda step, carry: body(step, *self.at(step, count), carry)
            return lax.fori_loop(0, count * self.heads, visit_step, carry)

        def visit_head(head: Any, carry: Carry) -> Carry:
            visit = lambda index, carry: body(head * count + index, head, self._of_head(index, count), carry)
            return finish_head(head, lax.fori_loop(0, count, visit, carry))

        return visit_head(jnp.int32(0), carry) if self.heads == 1 else lax.fori_loop(0, self.heads, visit_head, carry)

    def _of_head(self, index: Any, count: Any) -> Any:
        """Return the tile that is visited after `index` others of a head, if heads come one by one."""
        return index if self.heads == 1 else lax.rem(index + self.rotation, count)


class InTurn(TileOrder):
    """The order of a block's tiles where blocks visit each tile one after the other."""

    def __init__(self, spec: Spec, tiles: Walk, heads: int, *, by_head: bool, up: Any) -> None:
        """A head that comes by itself begins with its first tile if the order goes `up`, or else with its last."""
        super().__init__(spec, tiles, heads, jnp.int32(0), by_head=by_head)
        self.up = up

    def step(self, head: Any, index: Any) -> Any:
        """Return the step of a head's tile, as `at` counts them."""
        count = self.tiles.count
        if not self.by_head:
            return (count - 1 - index) * self.heads + head
        # What comes after how many others, and how many others come before: it is the same from either end.
        return head * count + self._of_head(index, count)

    def _of_head(self, index: Any, count: Any) -> Any:
        return jnp.where(self.up, index, count - 1 - index)
