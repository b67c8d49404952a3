"""Attention over several devices: batch, heads and sequences may be split.

The rule is given to the partitioner (Shardy) with `custom_partitioning`, so a sharded `jit` gathers nothing that
attention does not need whole. Each device computes its own part of batch and heads alone. Where sequences are split,
`_split` chooses what to do and `_sequence` computes it. In the backward, the gradients of shared arrays are summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from jflash import _mesh, _ring, _split
from jflash._locations import without_locations
from jflash._ring import SequenceSplit
from jflash._semantics.dtypes import widened
from jflash._semantics.spec import HEADS_AXIS, KEYS_AXIS, QUERIES_AXIS, Operands, Residuals, Results, Spec
from jflash._split import Named


def shard(function: Callable[..., Any], spec: Spec, like: Any) -> Callable[..., Any]:
    """Return `function` split over devices.

    It is called with the split of the sequences, or `None`, then `Operands` and what goes with them (all `[#B, ...]`).
    Its results have the names and shapes of `like`.
    """

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        whole = spec.resized(args[0])
        if _mesh.in_shard_map(leaves):
            # These arrays are one device's part already. The compiler itself splits the axes that were left to it.
            return function(_ring.in_shard_map(whole), *args)
        results, result_tree = jax.tree.flatten(like)
        # The partitioner keeps what these functions close over: names and shapes, not the arrays.
        of_operands = isinstance(like, Operands)
        inputs = [Named(name, leaf.shape) for name, leaf in zip(_names(args), leaves, strict=True)]
        outputs = [Named(name, leaf.shape) for name, leaf in zip(_names((like,)), results, strict=True)]
        query, key = ([array.name for array in inputs].index(name) for name in ("query", "key"))

        def flat(sequence: SequenceSplit | None, *leaves: Any) -> tuple[Any, ...]:
            return tuple(jax.tree.leaves(function(sequence, *jax.tree.unflatten(tree, leaves))))

        def partition(mesh: Mesh, arg_shapes: Any, result_shapes: Any) -> Any:
            axes = (_mesh.canonical_axes(arg_shapes[index].sharding, 4) for index in (query, key))
            split = _split.choose(whole, mesh, *axes)

            def local(*leaves: Any) -> tuple[Any, ...]:
                if split.one_key_head:
                    leaves = tuple(
                        lax.dynamic_slice_in_dim(leaf, split.key_head(), 1, 2) if array.of_keys else leaf
                        for array, leaf in zip(inputs, leaves, strict=True)
                    )
                # Without this, the caller's mesh is written into one device's code, and into the sums' additions.
                with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                    parts = zip(outputs, flat(split.sequence, *leaves), strict=True)
                    return tuple(summed(array, placed(array, part)) for array, part in parts)

            def placed(array: Named, part: Array) -> Array:
                if not (array.of_keys and split.one_key_head):
                    return part
                every = jnp.zeros((*part.shape[:2], whole.key_heads, part.shape[3]), part.dtype)
                return lax.dynamic_update_slice_in_dim(every, part, split.key_head(), 2)

            def summed(array: Named, part: Array) -> Array:
                shared = split.missing(array) if of_operands else ()
                if not shared:
                    return part
                wide = part.astype(widened(part.dtype))
                return lax.psum(wide, shared).astype(part.dtype)

            shardings = lambda arrays: tuple(map(split.sharding, arrays))
            return mesh, without_locations(local), shardings(outputs), shardings(inputs)

        partitioned = custom_partitioning(lambda *leaves: flat(None, *leaves))
        rule, replicated = _rule(inputs, outputs, whole)
        partitioned.def_partition(partition, sharding_rule=rule, need_replication_factors=replicated)
        return jax.tree.unflatten(result_tree, partitioned(*leaves))

    return call


def _names(args: tuple[Operands | Results | Residuals, ...]) -> list[str]:
    return [name for arg in args for name, value in arg._asdict().items() for _ in jax.tree.leaves(value)]


def _rule(inputs: list[Named], outputs: list[Named], spec: Spec) -> tuple[str, tuple[str, ...]]:
    """Return the partitioner's rule in its einsum-like notation.

    The batch `b`, the heads `n` and `k`, the queries `t` and the keys `s` may be split. The same mesh axes may split
    queries and keys. Of a call with `Spec.tokens` the heads alone may be.
    """
    fresh = (f"x{index}" for index in itertools.count())
    replicated: list[str] = []

    def whole() -> str:
        replicated.append(next(fresh))
        return replicated[-1]

    def dimension(array: Named, axis: int, size: int) -> str:
        if spec.tokens is not None and axis != HEADS_AXIS.get(array.name):
            return whole()
        if axis == 0 and size == spec.batch:
            return "b"
        # A symbolic size is not known to be above 1, but is equal to no number.
        if size not in (0, 1):
            if axis == QUERIES_AXIS.get(array.name) and size == spec.query_length:
                return "t"
            if axis == KEYS_AXIS.get(array.name) and size == spec.key_length and spec.pages is None:
                return "s"
        if axis != HEADS_AXIS.get(array.name) or size not in (spec.heads, spec.key_heads):
            return whole()
        if array.of_keys:
            return "n" if spec.group == 1 else "k" if spec.key_heads > 1 else whole()
        return "n" if size == spec.heads else whole()

    sides = [
        ", ".join(" ".join(dimension(array, axis, size) for axis, size in enumerate(array.shape)) for array in side)
        for side in (inputs, outputs)
    ]
    return " -> ".join(sides), tuple(replicated)
