"""Work items that are dealt out before the call, to as many CTAs as run at once: each has a list of them.

A CTA begins and ends in about three microseconds. One with a list loads what the next item begins with while the last
one ends. Each item goes to the CTA that should be done first, as multiprocessors take the CTAs of a grid: so all have
as much to do, and items that follow each other, which share keys, are worked on at the same time.

Source: R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969): list scheduling.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Int

from jflash._backends.nvidia.ops import Ref

TABLE = "items"
"""The lists' name among a kernel's arrays."""

Place = tuple[int, int, int]
"""The head of an item, its batch entry, and its turn among the blocks of these."""


@dataclasses.dataclass(frozen=True)
class DealtItems:
    """A list of items for each CTA."""

    lists: tuple[tuple[Place, ...], ...]

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(places: tuple[Place, ...], times: tuple[float, ...], ctas: int) -> DealtItems:
        """Items with these places, in the order in which they should begin, and the time that each turn takes."""
        lists = [list[Place]() for _ in range(ctas)]
        free = [(0.0, cta) for cta in range(ctas)]
        for place in places:
            start, cta = free[0]
            lists[cta].append(place)
            heapq.heapreplace(free, (start + times[place[2]], cta))
        return DealtItems(tuple(map(tuple, lists)))

    def table(self) -> Int[Array, "ctas places 3"]:
        """Of each CTA the number of its items, and their places."""
        return _table.bind(items=self)


def each(table: Ref, cta: Any, body: Callable[[Any, Any], Any]) -> Any:
    """`carry = body(index, carry)` for every item of a CTA, from 0 on."""
    return lax.fori_loop(0, table[cta, 0, 0], body, jnp.int32(0))


def if_next(table: Ref, cta: Any, index: Any, body: Callable[[Any], None], otherwise: Callable[[], None]) -> None:
    """`body(index + 1)`, if a CTA has such an item, else `otherwise()`."""
    lax.cond(index + 1 < table[cta, 0, 0], lambda: body(index + 1), otherwise)


def place(table: Ref, cta: Any, index: Any) -> tuple[Any, Any, Any]:
    """Where a CTA's `index`-th item is."""
    return table[cta, 1 + index, 0], table[cta, 1 + index, 1], table[cta, 1 + index, 2]


def _shape(items: DealtItems) -> tuple[int, int, int]:
    return len(items.lists), 1 + max(map(len, items.lists)), 3


def _values(items: DealtItems) -> Int[np.ndarray, "ctas places 3"]:
    table = np.zeros(_shape(items), np.int32)
    for row, places in zip(table, items.lists, strict=True):
        row[0], row[1 : 1 + len(places)] = len(places), places
    return table


# `custom_partitioning` refuses arrays that a traced function closes over, as this would be.
_table = Primitive("jflash_items")
_table.def_impl(lambda items: jnp.asarray(_values(items)))
_table.def_abstract_eval(lambda items: ShapedArray(_shape(items), jnp.int32))
mlir.register_lowering(_table, lambda _, items: [mlir.ir_constant(_values(items))])
