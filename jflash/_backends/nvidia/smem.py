"""Shared memory: the buffers and barriers that a kernel declares, and how many bytes they take.

A kernel declares them once, as `Buffers` of types. That structure is what it allocates (its scratch types), what its
tiles are chosen by (`size`), and, with references for types, what it uses.
"""

from __future__ import annotations

import math
import types
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUP_ROWS = 64
"""Rows of a tile that one warpgroup works on: M of the matrix unit's instruction, on Hopper."""

WARP_ROWS = 16
"""Rows of a warpgroup's tile that each of its four warps has."""

_ALIGNMENT, _BARRIER = 1024, 8
"""Pallas begins every buffer at a multiple of 1024 bytes; a barrier takes 8."""


@jax.tree_util.register_pytree_node_class
class Buffers(types.SimpleNamespace):
    """Buffers and barriers by name: types in a kernel's declaration, references in the kernel."""

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """Return what the names stand for, and the names, for JAX."""
        return tuple(vars(self).values()), tuple(vars(self))

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], buffers: tuple[Any, ...]) -> Self:
        """Return what was flattened, for JAX."""
        return cls(**dict(zip(names, buffers, strict=True)))


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def vectors(*shape: int, dtype: Any = jnp.float32) -> Any:
    """Return shared memory for vectors `[..., length]`."""
    return plgpu.SMEM(shape, dtype)


def barriers(number: int, arrivals: int = 1) -> Any:
    """Return barriers that complete a phase after `arrivals` arrivals."""
    return plgpu.Barrier(num_barriers=number, num_arrivals=arrivals)


def size(declaration: Any) -> int:
    """Return the bytes that a declaration takes; what a union holds shares its bytes."""

    def taken(leaf: Any) -> int:
        if isinstance(leaf, plgpu.Barrier | plgpu.ClusterBarrier):
            return int(np.prod(leaf.num_barriers)) * _BARRIER
        return round_up(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize, _ALIGNMENT)

    return sum(map(taken, jax.tree.leaves(declaration)))


def opened(references: Any) -> Any:
    """Return what a kernel uses, from references in the structure of what it declared.

    What it uses in several views is one leaf of its `Buffers`, with methods that are named as these functions.
    """
    return _each(lambda views: views.opened(), references)


def in_one_view(declaration: Any) -> Any:
    """Return a declaration for an interpreter, which gives each view memory of its own."""
    return _each(lambda views: views.in_one_view(), declaration)


def _each(of_views: Any, tree: Any) -> Any:
    is_views = lambda leaf: hasattr(leaf, "in_one_view")
    return jax.tree.map(lambda leaf: of_views(leaf) if is_views(leaf) else leaf, tree, is_leaf=is_views)
