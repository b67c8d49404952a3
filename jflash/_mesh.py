"""What the types of arrays say about devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array


def explicit_mesh(arrays: Sequence[Any]) -> AbstractMesh | None:
    """The mesh with explicit axes that some array's type speaks of."""
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def in_shard_map(arrays: Sequence[Any]) -> bool:
    """Whether the arrays are one device's part of a `shard_map`."""
    return any(AxisType.Manual in jax.typeof(array).sharding.mesh.axis_types for array in arrays)


def following(query: Array, mesh: AbstractMesh) -> tuple[NamedSharding, NamedSharding]:
    """Shardings of the output `[*B, T, N, D]` and the log-sum-exp `[*B, T, N]` that follow the query's."""
    *rows, _ = dimensions(jax.typeof(query).sharding, query.ndim)
    return NamedSharding(mesh, PartitionSpec(*rows, None)), NamedSharding(mesh, PartitionSpec(*rows))


def varying_alike[Tree](tree: Tree, *, like: Any) -> Tree:
    """`tree` typed as different on all the devices of a `shard_map` on which some array of `like` is."""
    varying = lambda array: jax.typeof(array).manual_axis_type.varying
    axes = frozenset[str]().union(*(varying(array) for array in jax.tree.leaves(like)))
    return jax.tree.map(lambda array: lax.pcast(array, tuple(axes - varying(array)), to="varying"), tree)


def dimensions(sharding: Any, rank: int) -> list[Any]:
    """What a sharding says of each of an array's axes."""
    return [*sharding.spec, *[None] * (rank - len(sharding.spec))]


def axis_names(dimension: Any) -> tuple[str, ...]:
    """The mesh axes over which one axis of an array is split, major first."""
    return () if dimension is None else (dimension,) if isinstance(dimension, str) else tuple(dimension)


def devices(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    """How many parts an axis split over these mesh axes has."""
    return math.prod(mesh.shape[name] for name in axes)
