"""In which order a block of keys goes through the queries that can see it.

What one block loads and adds to, others should too before it leaves the cache. With heads one by one, blocks that see
fewer queries go ahead of the others: at 16,384 causal tokens each is soon at another head's queries and dQ. So where
all blocks go on to the last query, they begin with it: all heads' last tile, then the one before it.

Elsewhere, as with a window, blocks are at different tiles anyway, and should be at the same head. Of that they begin at
different tiles: adding to one dQ at once, they would wait for each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jflash._backends.mosaic_gpu.spans import Walk
from jflash._semantics.spec import Spec


@dataclasses.dataclass(frozen=True)
class Order:
    """The tiles of a block's walk, for each query head of its set."""

    walk: Walk
    heads: int
    """Of the set."""
    by_head: bool
    turn: Int[Array, ""]
    """By how many tiles later this block begins with a head."""

    @staticmethod
    def of(spec: Spec, walk: Walk, heads: int, block: Int[Array, ""], *, by_head: bool) -> Order:
        """The order of a block; with `by_head` heads come one by one for another reason."""
        to_the_end = spec.bounds[0] is None and "query_segments" not in spec.operands
        return Order(walk, heads, by_head or heads == 1 or not to_the_end, block)

    def at(self, step: Int[Array, ""], count: Int[Array, ""]) -> tuple[Any, Int[Array, ""]]:
        """The head, of the set, and the tile; `count` is the walk's."""
        if not self.by_head:
            return lax.rem(step, self.heads), count - 1 - lax.div(step, self.heads)
        return lax.div(step, count), self._turned(lax.rem(step, count), count)

    def each[Carry](
        self,
        body: Callable[[Any, Any, Any, Carry], Carry],
        carry: Carry,
        finish_head: Callable[[Any, Carry], Carry] = lambda head, carry: carry,
    ) -> Carry:
        """`carry = body(step, head, tile, carry)` for all; after each head, if they come one by one, `finish_head`."""
        count = self.walk.count
        if not self.by_head:
            return lax.fori_loop(
                0, count * self.heads, lambda step, carry: body(step, *self.at(step, count), carry), carry
            )

        def attend_head(head: Any, carry: Carry) -> Carry:
            visit = lambda index, carry: body(head * count + index, head, self._turned(index, count), carry)
            return finish_head(head, lax.fori_loop(0, count, visit, carry))

        return attend_head(jnp.int32(0), carry) if self.heads == 1 else lax.fori_loop(0, self.heads, attend_head, carry)

    def _turned(self, index: Any, count: Any) -> Any:
        return index if self.heads == 1 else lax.rem(index + self.turn, count)
