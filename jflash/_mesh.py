"""The facts about devices that are in the types of arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array


def explicit_mesh(arrays: Sequence[Any]) -> AbstractMesh | None:
    """Return the mesh with explicit axes that some array's type names; inside a `shard_map`, the `shard_map`'s."""
    context = jax.sharding.get_abstract_mesh()
    meshes = [context] if context.manual_axes else [jax.typeof(array).sharding.mesh for array in arrays]
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def in_shard_map(arrays: Sequence[Any]) -> bool:
    """Return whether the arrays are one device's part of a `shard_map`."""
    return any(AxisType.Manual in jax.typeof(array).sharding.mesh.axis_types for array in arrays)


def in_mesh(arrays: Sequence[Any]) -> bool:
    """Return whether there is a mesh around what is traced now, or in some array's type."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return not all(mesh.empty for mesh in meshes)


def following(query: Array, mesh: AbstractMesh) -> tuple[NamedSharding, NamedSharding]:
    """Return shardings of the output `[*B, T, N, D]` and the log-sum-exp `[*B, T, N]` that follow the query's."""
    *rows, _ = dimensions(jax.typeof(query).sharding, query.ndim)
    return NamedSharding(mesh, PartitionSpec(*rows, None)), NamedSharding(mesh, PartitionSpec(*rows))


def varying_alike[Tree](tree: Tree, *, like: Any) -> Tree:
    """Return `tree` typed as different on all the devices of a `shard_map` on which some array of `like` is."""
    return varying_over(tree, frozenset[str]().union(*map(_varying, jax.tree.leaves(like))))


def varying_over[Tree](tree: Tree, axes: Iterable[str]) -> Tree:
    """Return `tree` typed as different on all devices along some axes of a `shard_map`."""
    return jax.tree.map(lambda array: lax.pcast(array, tuple({*axes} - _varying(array)), to="varying"), tree)


def _varying(array: Any) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying


def sharding_of(array: Any) -> Any:
    """Return an array's sharding, as far as it is known: a traced array has it in its type, if anywhere."""
    return jax.typeof(array).sharding if isinstance(array, Tracer) else getattr(array, "sharding", None)


def dimensions(sharding: Any, rank: int) -> list[Any]:
    """Return what a sharding says of each of an array's axes."""
    return [*sharding.spec, *[None] * (rank - len(sharding.spec))]


def canonical_axes(sharding: Any, rank: int) -> list[tuple[str, ...]]:
    """Return the mesh axes, major first, over which an array `[*B, L, N, H]` is split: those of B, L, N, H."""
    each = [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dimensions(sharding, rank)]
    return [tuple(itertools.chain.from_iterable(each[:-3])), *each[-3:]]


def devices(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    """Return into how many parts these mesh axes split an axis."""
    return math.prod(mesh.shape[name] for name in axes)
