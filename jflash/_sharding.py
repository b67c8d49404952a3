"""Attention over several devices: batch and heads may be split, and each device then computes its own part alone.

The rule is given to the partitioner (Shardy) with `custom_partitioning`, so a sharded `jit` gathers nothing that
attention does not need whole: the only communication of its own is the sum, in the backward, of gradients that split
devices share.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jflash._locations import without_locations
from jflash._semantics.spec import Operands, Residuals, Results

_HEADS_AXIS: dict[str, int] = {
    "query": 2, "key": 2, "value": 2, "bias": 1, "mask": 1, "alibi_slopes": 1, "sinks": 1, "head_index": 1,
    "out": 2, "lse": 1, "d_out": 2, "d_lse": 1,
}  # fmt: skip
"""Where the arrays of a call have their heads; the others have none."""


@dataclasses.dataclass(frozen=True)
class _Named:
    """An array of a call, by name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def of_keys(self) -> bool:
        return self.name in ("key", "value")


@dataclasses.dataclass(frozen=True)
class _Split:
    """Which mesh axes the batch, the query heads and the key heads of one call are split over."""

    mesh: Mesh
    batch: int
    heads: int
    key_heads: int
    batch_axes: Any
    head_axes: Any

    @property
    def one_key_head(self) -> bool:
        """Key heads are fewer than devices: each device has all of them, and its queries share one."""
        return self.head_axes is not None and self.key_heads % _devices(self.mesh, self.head_axes) != 0

    def axes(self, array: _Named) -> tuple[Any, Any]:
        """The mesh axes over which an array's batch and heads are split; `None` where it has them whole."""
        along_batch = self.batch_axes if array.shape[0] > 1 or self.batch == 1 else None
        axis = _HEADS_AXIS.get(array.name)
        if axis is None or (array.shape[axis] == 1 < self.heads) or (array.of_keys and self.one_key_head):
            return along_batch, None
        return along_batch, self.head_axes

    def sharding(self, array: _Named) -> NamedSharding:
        along_batch, along_heads = self.axes(array)
        dimensions: list[Any] = [along_batch, *[None] * (len(array.shape) - 1)]
        if array.name in _HEADS_AXIS:
            dimensions[_HEADS_AXIS[array.name]] = along_heads
        return NamedSharding(self.mesh, PartitionSpec(*dimensions))

    def key_head(self) -> Array:
        """The key head of this device's queries, where that is one."""
        own = self.heads // _devices(self.mesh, self.head_axes)
        return lax.axis_index(self.head_axes) * own // (self.heads // self.key_heads)


def shard(function: Callable[..., Any], like: Any, *, key_heads: int, group: int) -> Callable[..., Any]:
    """`function` of `Operands` and what goes with them (all `[#B, ...]`), split over devices by batch and heads.

    Its results have the names and shapes of `like`.
    """
    heads = key_heads * group

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        if any(AxisType.Manual in jax.typeof(leaf).sharding.mesh.axis_types for leaf in leaves):
            # Inside shard_map this is one device's part already; axes left to the compiler, it splits by itself.
            return function(*args)
        results, result_tree = jax.tree.flatten(like)
        # The partitioner keeps what these functions close over: names and shapes, not the arrays.
        inputs = [_Named(name, leaf.shape) for name, leaf in zip(_names(args), leaves, strict=True)]
        outputs = [_Named(name, leaf.shape) for name, leaf in zip(_names((like,)), results, strict=True)]
        query = [array.name for array in inputs].index("query")
        batch = inputs[query].shape[0]

        def flat(*leaves: Any) -> tuple[Any, ...]:
            return tuple(jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))))

        def partition(mesh: Mesh, arg_shapes: Any, result_shapes: Any) -> Any:
            batch_axes, _, head_axes, _ = _padded(arg_shapes[query].sharding, 4)
            batch_devices, head_devices = _devices(mesh, batch_axes), _devices(mesh, head_axes)
            whole_key_heads = key_heads % head_devices == 0
            one_key_head = heads % head_devices == 0 and group % max(1, heads // head_devices) == 0
            split = _Split(
                mesh,
                batch,
                heads,
                key_heads,
                batch_axes if batch % batch_devices == 0 else None,
                head_axes if whole_key_heads or one_key_head else None,
            )

            def local(*leaves: Any) -> tuple[Any, ...]:
                if split.one_key_head:
                    leaves = tuple(
                        lax.dynamic_slice_in_dim(leaf, split.key_head(), 1, 2) if array.of_keys else leaf
                        for array, leaf in zip(inputs, leaves, strict=True)
                    )
                # Else the caller's mesh is written into code that runs on one device.
                with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                    parts = [placed(array, part) for array, part in zip(outputs, flat(*leaves), strict=True)]
                return tuple(sum_shared(array, part) for array, part in zip(outputs, parts, strict=True))

            def placed(array: _Named, part: Array) -> Array:
                if not (array.of_keys and split.one_key_head):
                    return part
                every = jnp.zeros((*part.shape[:2], key_heads, part.shape[3]), part.dtype)
                return lax.dynamic_update_slice_in_dim(every, part, split.key_head(), 2)

            def sum_shared(array: _Named, part: Array) -> Array:
                along_batch, along_heads = split.axes(array)
                for axes, own in ((split.batch_axes, along_batch), (split.head_axes, along_heads)):
                    if axes is not None and own is None:
                        # Not psum: with explicit meshes its reduction does not compile here (jax 0.11 and 0.12).
                        part = lax.all_gather(part, axes).sum(axis=0).astype(part.dtype)
                return part

            shardings = lambda arrays: tuple(map(split.sharding, arrays))
            return mesh, without_locations(local), shardings(outputs), shardings(inputs)

        partitioned = custom_partitioning(flat)
        rule, replicated = _rule(inputs, outputs, batch, heads, key_heads)
        partitioned.def_partition(partition, sharding_rule=rule, need_replication_factors=replicated)
        return jax.tree.unflatten(result_tree, partitioned(*leaves))

    return call


def explicit_mesh(arrays: list[Any]) -> AbstractMesh | None:
    """The mesh with explicit axes that some array's type speaks of."""
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def following(query: Array, mesh: AbstractMesh) -> tuple[NamedSharding, NamedSharding]:
    """Shardings of the output `[*B, T, N, D]` and the log-sum-exp `[*B, T, N]` that follow the query's."""
    *rows, _ = _padded(jax.typeof(query).sharding, query.ndim)
    return NamedSharding(mesh, PartitionSpec(*rows, None)), NamedSharding(mesh, PartitionSpec(*rows))


def varying_alike[Tree](tree: Tree, *, like: Any) -> Tree:
    """`tree` typed as different on all the devices of a `shard_map` on which some array of `like` is."""
    varying = lambda array: jax.typeof(array).manual_axis_type.varying
    axes = frozenset[str]().union(*(varying(array) for array in jax.tree.leaves(like)))
    return jax.tree.map(lambda array: lax.pcast(array, tuple(axes - varying(array)), to="varying"), tree)


def _names(args: tuple[Operands | Results | Residuals, ...]) -> list[str]:
    return [name for arg in args for name, value in arg._asdict().items() for _ in jax.tree.leaves(value)]


def _rule(
    inputs: list[_Named], outputs: list[_Named], batch: int, heads: int, key_heads: int
) -> tuple[str, tuple[str, ...]]:
    """The partitioner's rule in its einsum-like notation: only the batch `b` and the heads `n`, `k` may be split."""
    fresh = (f"x{index}" for index in itertools.count())
    replicated: list[str] = []

    def whole() -> str:
        replicated.append(next(fresh))
        return replicated[-1]

    def dimension(array: _Named, axis: int, size: int) -> str:
        if axis == 0 and size == batch:
            return "b"
        if axis != _HEADS_AXIS.get(array.name) or size not in (heads, key_heads):
            return whole()
        if array.of_keys:
            return "n" if key_heads == heads else "k" if key_heads > 1 else whole()
        return "n" if size == heads else whole()

    sides = [
        ", ".join(" ".join(dimension(array, axis, size) for axis, size in enumerate(array.shape)) for array in side)
        for side in (inputs, outputs)
    ]
    return " -> ".join(sides), tuple(replicated)


def _padded(sharding: Any, rank: int) -> tuple[Any, ...]:
    return (*sharding.spec, *(None,) * (rank - len(sharding.spec)))


def _devices(mesh: Mesh, axes: Any) -> int:
    """How many parts a dimension split over these mesh axes has."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)
