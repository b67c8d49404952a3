"""The functions of indices that are timed as a `mask_mod`.

Each is written once, with operators and indexing alone: so it is a function for JAX, for torch, for NumPy, and for the
compiler of fa4-jax, which has no other operations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Int32

Name = Literal["causal", "documents", "prefix", "frames", "neighborhood", "block table"]
Captured = Mapping[str, Any]
Bound = functools.partial[Any]
"""A function with the arguments of a `mask_mod`, `functools.partial(function, captured)`."""

DOCUMENTS = 8
"""Documents in a sequence, as in the case of packed segments."""
FRAME, FRAMES = 256, 4
"""Tokens in a frame, and the frames that a token sees: its own and those before."""
WIDTH, NEAR = 64, 7
"""Pixels in a row, and how far away a pixel is seen along rows and columns."""
BLOCK, KEPT = 128, 8
"""The tokens in a block, and the number of blocks of keys of which a block of queries sees one."""


@dataclasses.dataclass(frozen=True)
class MaskMod:
    """A function, and the arrays that it closes over."""

    function: Callable[..., Any]
    """A function `f(captured, batch, head, query, key)` that says whether the query sees the key."""
    captured: Callable[[int, int, int], dict[str, Int32[np.ndarray, "..."]]] = lambda batch, queries, keys: {}
    """A function from the numbers of batch entries, queries and keys to the arrays, by names of their own."""


def _causal(captured: Captured, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def _documents(captured: Captured, batch: Any, head: Any, query: Any, key: Any) -> Any:
    ids = captured["ids"]
    return (ids[batch, query] == ids[batch, key]) & (key <= query)


def _ids(batch: int, queries: int, keys: int) -> dict[str, np.ndarray]:
    each = -(-queries // DOCUMENTS)
    return {"ids": np.tile(np.arange(max(queries, keys), dtype=np.int32) // each, (batch, 1))}


def _prefix(captured: Captured, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) | (key < captured["lengths"][batch])


def _lengths(batch: int, queries: int, keys: int) -> dict[str, np.ndarray]:
    # Entries differ, and a quarter of the keys is the mean.
    return {"lengths": (keys * (1 + np.arange(batch)) // (2 * (batch + 1))).astype(np.int32)}


def _frames(captured: Captured, batch: Any, head: Any, query: Any, key: Any) -> Any:
    behind = query // FRAME - key // FRAME
    return (behind >= 0) & (behind < FRAMES)


def _neighborhood(captured: Captured, batch: Any, head: Any, query: Any, key: Any) -> Any:
    down, right = query // WIDTH - key // WIDTH, query % WIDTH - key % WIDTH
    return (down <= NEAR) & (down >= -NEAR) & (right <= NEAR) & (right >= -NEAR)


def _block_table(captured: Captured, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return captured["kept"][batch, query // BLOCK, key // BLOCK] != 0


def _kept(batch: int, queries: int, keys: int) -> dict[str, np.ndarray]:
    """Return the blocks of keys that each block of queries keeps, by name: one in eight by chance, one at least."""
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    order = np.random.default_rng(0).random((batch, rows, columns)).argsort(axis=-1).argsort(axis=-1)
    return {"kept": (order < max(1, columns // KEPT)).astype(np.int32)}


MASK_MODS: dict[Name, MaskMod] = {
    "causal": MaskMod(_causal),
    "documents": MaskMod(_documents, _ids),
    "prefix": MaskMod(_prefix, _lengths),
    "frames": MaskMod(_frames),
    "neighborhood": MaskMod(_neighborhood),
    "block table": MaskMod(_block_table, _kept),
}


def bound(name: Name, captured: Captured) -> Bound:
    """Return the function with the arguments of a `mask_mod`, which all libraries have in one order."""
    return functools.partial(MASK_MODS[name].function, captured)


@functools.cache
def visible_pairs(name: Name, batch: int, queries: int, keys: int) -> float:
    """Return how many pairs the function shows, for one head and the mean of the batch entries."""
    mask_mod = bound(name, MASK_MODS[name].captured(batch, queries, keys))
    rows = [np.arange(first, min(first + BLOCK, queries))[:, None] for first in range(0, queries, BLOCK)]
    seen = (mask_mod(entry, 0, row, np.arange(keys)[None]) for entry in range(batch) for row in rows)
    return sum(map(np.count_nonzero, seen)) / batch
