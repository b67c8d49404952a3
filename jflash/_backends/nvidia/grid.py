"""A kernel's grid of CTAs by the names of its axes, of any size.

CUDA counts CTAs along three axes, of which y and z end at 65,535 (CUDA C++ Programming Guide, "Compute Capabilities").
Pallas puts a grid's last axis along x, the one before along y, and all others together along z: 64 heads of 1,024
blocks are one CTA too many. Such a grid becomes one axis along x, which ends at 2^31 - 1, in the same order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from typing import Any

from jax import lax

MOST_CTAS = 65_535
"""The most CTAs along y, and along z."""

_ALL = "ctas"

_traced: ContextVar[Mapping[str, int]] = ContextVar("grid of the kernel that is traced")


def launched(grid: Mapping[str, int]) -> Mapping[str, int]:
    """Return the grid that Pallas is given for `grid`, whose last axis is the fastest."""
    *others, second, _ = 1, 1, *grid.values()
    return grid if max(math.prod(others), second) <= MOST_CTAS else {_ALL: math.prod(grid.values())}


@contextlib.contextmanager
def tracing(grid: Mapping[str, int]) -> Generator[Mapping[str, int]]:
    """Let `index` and `size` answer for `grid`, and yield what Pallas is given for it."""
    token = _traced.set(grid)
    try:
        yield launched(grid)
    finally:
        _traced.reset(token)


def index(axis: str) -> Any:
    """Return, in a kernel, the CTA's index along an axis of its grid."""
    grid = _traced.get()
    if _ALL not in launched(grid):
        return lax.axis_index(axis)
    names, sizes = list(grid), list(grid.values())
    inner = math.prod(sizes[names.index(axis) + 1 :])
    return lax.rem(lax.div(lax.axis_index(_ALL), inner), grid[axis])


def size(axis: str) -> int:
    """Return, in a kernel, the size of an axis of its grid."""
    return _traced.get()[axis]
