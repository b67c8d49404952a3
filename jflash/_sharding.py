"""Attention over several devices: batch and heads may be split, and each device then computes its own part alone.

The rule is given to the partitioner (Shardy) with `custom_partitioning`, so a sharded `jit` needs no gathering of
anything: the only communication is the sum, in the backward, of gradients that split devices share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jflash._spec import Operands, Residuals

_HEADS_AXIS: dict[str, int] = {
    "query": 2, "key": 2, "value": 2, "bias": 1, "mask": 1, "alibi_slopes": 1, "sinks": 1, "head_index": 1,
    "out": 2, "lse": 1, "d_out": 2, "d_lse": 1,
}  # fmt: skip
"""Where the arrays of `Operands` and `Residuals` have their heads; the others have none."""


def shard(function: Callable[..., Any], *, key_heads: int, group: int) -> Callable[..., Any]:
    """`function` of `Operands` and `Residuals` (all `[#B, ...]`), split over devices by batch and heads."""

    def call(*args: Any) -> Any:
        arrays, tree = jax.tree.flatten(args)
        # The partitioner keeps what these functions close over: shapes, not the arrays.
        leaves = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        names = _names(args)
        results = jax.eval_shape(function, *args)
        result_names = _result_names(results)
        result_leaves, result_tree = jax.tree.flatten(results)
        batch = leaves[names.index("query")].shape[0]
        heads = key_heads * group

        def flat(*leaves: Any) -> tuple[Any, ...]:
            return tuple(jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))))

        def partition(mesh: Mesh, arg_shapes: Any, result_shapes: Any) -> Any:
            batch_axes, _, head_axes, _ = _padded(arg_shapes[names.index("query")].sharding, 4)
            if batch % _devices(mesh, batch_axes) != 0:
                batch_axes = None
            # Queries of one key head may only be apart when all of them share it.
            if key_heads % _devices(mesh, head_axes) != 0 and not (
                key_heads == 1 and heads % _devices(mesh, head_axes) == 0
            ):
                head_axes = None
            key_head_axes = head_axes if key_heads % _devices(mesh, head_axes) == 0 else None

            def split(name: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
                """The mesh axes over which this array's batch and heads are split."""
                along_heads = key_head_axes if name in ("key", "value") else head_axes
                axis = _HEADS_AXIS.get(name)
                has_heads = axis is not None and (shape[axis] > 1 or heads == 1)
                return batch_axes if shape[0] > 1 or batch == 1 else None, along_heads if has_heads else None

            def sharding(name: str, shape: tuple[int, ...]) -> NamedSharding:
                along_batch, along_heads = split(name, shape)
                axes: list[Any] = [None] * len(shape)
                axes[0] = along_batch
                if name in _HEADS_AXIS:
                    axes[_HEADS_AXIS[name]] = along_heads
                return NamedSharding(mesh, PartitionSpec(*axes))

            def local(*leaves: Any) -> tuple[Any, ...]:
                summed: list[Any] = []
                # Else the caller's mesh is written into code that runs on one device.
                with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                    parts = flat(*leaves)
                for name, shape, part in zip(result_names, result_leaves, parts, strict=True):
                    along_batch, along_heads = split(name, shape.shape)
                    missing = [
                        axes for axes, own in ((batch_axes, along_batch), (head_axes, along_heads)) if axes and not own
                    ]
                    for axes in missing:
                        # Not psum: with explicit meshes its reduction does not compile here (jax 0.11 and 0.12).
                        part = lax.all_gather(part, axes).sum(axis=0).astype(part.dtype)
                    summed.append(part)
                return tuple(summed)

            return (
                mesh,
                local,
                tuple(sharding(name, leaf.shape) for name, leaf in zip(result_names, result_leaves, strict=True)),
                tuple(sharding(name, leaf.shape) for name, leaf in zip(names, leaves, strict=True)),
            )

        partitioned = custom_partitioning(flat)
        rule, sizes, replicated = _rule(
            [(n, x.shape) for n, x in zip(names, leaves, strict=True)],
            [(n, x.shape) for n, x in zip(result_names, result_leaves, strict=True)],
            batch, key_heads, group,
        )  # fmt: skip
        partitioned.def_partition(partition, sharding_rule=rule, need_replication_factors=replicated, **sizes)
        return jax.tree.unflatten(result_tree, partitioned(*arrays))

    return call


def in_auto_mode(function: Callable[[Operands], tuple[Array, Array]], operands: Operands) -> tuple[Array, Array]:
    """`function` of operands whose types may carry shardings (a mesh with explicit axes); its results follow the query.

    What is inside is left to the partitioner, which has its rule.
    """
    meshes = [jax.typeof(array).sharding.mesh for array in jax.tree.leaves(operands)]
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    if not explicit:
        return function(operands)
    batch, length, heads, _ = _padded(jax.typeof(operands.query).sharding, 4)
    out = NamedSharding(explicit[0], PartitionSpec(batch, length, heads, None))
    lse = NamedSharding(explicit[0], PartitionSpec(batch, heads, length))
    return jax.sharding.auto_axes(function, out_sharding=(out, lse))(operands)


def _names(args: tuple[Any, ...]) -> list[str]:
    names: list[str] = []
    for arg in args:
        for name, value in arg._asdict().items():
            names += [name] * len(jax.tree.leaves(value))
    return names


def _result_names(results: Any) -> list[str]:
    return _names((results,)) if isinstance(results, Operands | Residuals) else ["out", "lse"]


def _rule(
    arguments: list[tuple[str, tuple[int, ...]]],
    results: list[tuple[str, tuple[int, ...]]],
    batch: int,
    key_heads: int,
    group: int,
) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """The partitioner's rule in its einsum-like notation: only batch `b` and heads `k`, `g` may be split."""
    fresh = (f"x{index}" for index in itertools.count())
    replicated: list[str] = []
    compound = key_heads > 1 and group > 1

    def factor() -> str:
        replicated.append(next(fresh))
        return replicated[-1]

    def dimensions(name: str, shape: tuple[int, ...]) -> str:
        words: list[str] = []
        for axis, size in enumerate(shape):
            if axis == 0 and size == batch:
                words.append("b")
            elif axis != _HEADS_AXIS.get(name) or size == 1 < key_heads * group:
                words.append(factor())
            elif name in ("key", "value"):
                words.append("k" if key_heads > 1 or group == 1 else factor())
            else:
                words.append("(k g)" if compound else "k" if group == 1 else "g")
        return " ".join(words)

    sides = [", ".join(dimensions(name, shape) for name, shape in side) for side in (arguments, results)]
    return " -> ".join(sides), {"g": group} if compound else {}, tuple(replicated)


def _padded(sharding: NamedSharding, rank: int) -> tuple[Any, ...]:
    return (*sharding.spec, *(None,) * (rank - len(sharding.spec)))


def _devices(mesh: Mesh, axes: Any) -> int:
    """How many parts a dimension split over these mesh axes has."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    count = 1
    for name in names:
        count *= mesh.shape[name]
    return count
