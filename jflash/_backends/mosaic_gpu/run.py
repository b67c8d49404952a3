"""A call through the kernels, in four steps: plan, prepare, launch, finish.

The plan is made before, from the Spec alone. Here operands are put into the form that kernels take, each when the first
kernel asks for it; kernels run; and what they return is given the call's shapes and dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import array_shapes, bf16_columns, row_statistics
from jflash._backends.mosaic_gpu.array_shapes import in_panels
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.nvidia import finish, prepared
from jflash._backends.nvidia.launch import Kernel
from jflash._backends.nvidia.prepared import PerQuery, Prepared, PreparedBackward, for_exponent, in_32_bits
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._semantics.spec import Operands, Results, Spec

VALUES_ALONE = frozenset({"value"})
"""The operands that have a tangent where the forward makes the output's, with those tangents for values."""


class HopperForward(Prepared):
    """What Hopper's forward kernels read."""

    def factors(self, value_chunks: int, *, packed: bool) -> dict[str, Float[Array, "B L N columns"]]:
        """Return query, key and value in whole tiles, of the values' columns in as many chunks, by name.

        A paged cache stays as it is, and so do rows of queries whose heads are `packed`.
        """
        spec, operands = self.spec, self.operands
        panels, value_panels = array_shapes.forward_in_panels(spec), array_shapes.values_in_panels(spec)
        whole = functools.partial(array_shapes.whole_tiles, spec)
        query = whole("query", operands.query, whole_rows=not packed, in_panels=panels)
        key, value = operands.key, operands.value
        if spec.pages is None:
            key = whole("key", key, in_panels=panels)
            value = whole("value", value, value_chunks, in_panels=value_panels)
        return dict(query=query, key=key, value=value)

    def shaping(self, bias_columns_of: int | None) -> dict[str, Array]:
        """Return what shapes logits, by name; the bias as columns, for tiles of as many keys, if products add it."""
        by_mma = bias_columns_of is not None
        others = prepared.operands_for_kernels(self.spec, self.operands, except_bias=by_mma)
        columns = bf16_columns.prepare_bias(self.spec, self.operands, bias_columns_of) if by_mma else {}
        return others | self.packed_mask() | columns


class HopperBackward(PreparedBackward):
    """What Hopper's backward kernels read."""

    _row_sums: dict[str, Array] | None = None

    @functools.cached_property
    def tiles(self) -> dict[str, Float[Array, "B L N columns"]]:
        """Query, key, value and d_out in whole tiles, by name."""
        panels = in_panels(self.spec)
        whole = functools.partial(array_shapes.whole_tiles, self.spec, in_panels=panels)
        return {name: whole(name, array) for name, array in self.factors.items()}

    @functools.cached_property
    def edges(self) -> dict[str, Array]:
        """The rows of each array with lengths in which padding begins, by name."""
        return array_shapes.edges(self.spec, self.operands, self.tiles)

    def around(self, *, keys_first: bool = False) -> dict[str, Array]:
        """Return what kernels read besides tiles and row statistics, whose rows are queries or keys, by name."""
        return self.others | self.packed_mask(keys_first=keys_first) | self.edges

    def read(self, blocks: Blocks) -> dict[str, Array]:
        """Return all that a kernel reads whose CTAs visit what these blocks see, by name."""
        return self.tiles | self.rows | self.around(keys_first=blocks.of_keys) | self.visits(blocks)

    def row_sums(self, **options: Any) -> dict[str, Array]:
        """Return what `row_statistics.row_sums` makes, with the options of the first kernel that asks."""
        if self._row_sums is None:
            ops = self.ops
            assert isinstance(ops, WarpgroupOps)
            self._row_sums = row_statistics.row_sums(self.spec, self.residuals, ops, **options)
        return self._row_sums

    @functools.cached_property
    def delta(self) -> Float[Array, "B N T"]:
        return self.row_sums()["delta"]


class HopperTangent(Prepared):
    """What the kernel of the tangent reads."""

    def __init__(self, spec: Spec, operands: Operands, results: Results, tangents: Operands, ops: WarpgroupOps) -> None:
        super().__init__(spec, operands, ops)
        self.results, self.tangents = results, tangents

    def factors(self, chunks: int, of_chunk: Spec, names: Sequence[str]) -> dict[str, Float[Array, "B L N columns"]]:
        """Return arrays and tangents in whole tiles, with `chunks` of the values' columns for heads, by name."""
        panels = in_panels(of_chunk)

        def tiles(name: str) -> Array:
            operand = name.removeprefix("t_")
            array: Array = getattr(self.operands if name == operand else self.tangents, operand)
            if operand == "value" and chunks > 1:
                room = [(0, 0)] * 3 + [(0, chunks * of_chunk.value_dim - array.shape[3])]
                array = jnp.pad(array, room).reshape(*array.shape[:2], -1, of_chunk.value_dim)
            return array_shapes.whole_tiles(of_chunk, operand, array, in_panels=panels)

        return {name: tiles(name) for name in names}

    @property
    def moved_others(self) -> dict[str, Array]:
        """The tangents of operands but query, key and value, by their operands' names with `t_` before them."""
        arrays: tuple[Any, ...] = ()
        if jax.tree.leaves(self.tangents.score_mod_arrays):
            # Arrays that have tangents, and do not move, have zeros.
            zeros = lambda array: jnp.zeros_like(array) if jnp.issubdtype(array.dtype, jnp.inexact) else None
            both: Any = zip(self.operands.score_mod_arrays, self.tangents.score_mod_arrays, strict=True)
            arrays = tuple(zeros(a) if t is None else t for a, t in both)
        tangents = self.tangents._replace(score_mod_arrays=arrays, mask_mod_arrays=())
        moved = prepared.operands_for_kernels(self.spec, tangents)
        return {f"t_{name}": array for name, array in moved.items()}

    @property
    def lse(self) -> PerQuery:
        """The log-sum-exp in the units of the call's exponent, +inf where a query sees nothing."""
        lse = jnp.where(self.results.lse == -jnp.inf, jnp.inf, self.results.lse)
        return for_exponent(self.spec, lse)


forward = functools.partial(finish.forward, HopperForward)
"""Takes a kernel, operands and operations to output and log-sum-exp."""
backward = functools.partial(finish.backward, HopperBackward)
"""Takes kernels, operands, residuals and operations to gradients."""


def moving(tangents: Operands) -> frozenset[str]:
    """Return the names of the operands that have a tangent."""
    return frozenset(name for name, tangent in tangents._asdict().items() if jax.tree.leaves(tangent))


@in_32_bits
def tangent(
    kernel: Kernel[Any], operands: Operands, results: Results, tangents: Operands, ops: WarpgroupOps
) -> Results:
    """Return the tangents of output and log-sum-exp, in their shapes and dtypes."""
    if moving(tangents) == VALUES_ALONE:
        out, lse = forward(kernel, operands._replace(value=tangents.value), ops)
        return Results(out, jnp.zeros_like(lse))
    spec = kernel.plan.spec
    made = kernel.run(HopperTangent(spec, operands, results, tangents, ops))
    t_out = made["t_out"][..., : spec.value_dim]
    return Results(t_out.astype(spec.result_dtype), made["t_lse"][:, :, : spec.query_length])
