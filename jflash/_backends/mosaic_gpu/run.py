"""A call through the kernels, in four steps: plan, prepare, launch, finish.

The plan is made before, from the Spec alone. Here operands are put into the form that kernels take, kernels run, and
what they return is given the call's shapes and dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import (
    array_shapes,
    bias_columns,
    forward_kernel,
    forward_wide,
    tangent_kernel,
    whole_tiles,
)
from jflash._backends.mosaic_gpu.forward_wide_plan import WideForwardPlan
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.plan import ForwardPlan, TangentPlan
from jflash._backends.mosaic_gpu.prepared import HopperBackward
from jflash._backends.nvidia import prepare
from jflash._backends.nvidia.finish import finish_backward, finish_forward
from jflash._backends.nvidia.launch import Kernel
from jflash._backends.nvidia.prepare import in_32_bits
from jflash._backends.nvidia.prepared import Prepared, for_exponent
from jflash._backends.nvidia.tile import score_mod_reads
from jflash._backends.nvidia.walk import tile_range
from jflash._semantics.online_softmax import sinks_gradient
from jflash._semantics.spec import Operands, Residuals, Results


@in_32_bits
def forward(
    plan: ForwardPlan, operands: Operands, ops: WarpgroupOps
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Output in the results' dtype and log-sum-exp in float32."""
    arrays = _prepare_forward(plan, operands, ops)
    is_wide = isinstance(plan, WideForwardPlan)
    made = forward_wide.forward(plan, arrays, ops) if is_wide else forward_kernel.forward(plan, arrays, ops)
    return finish_forward(plan.spec, operands, made, packed_heads=plan.packed_heads, splits=plan.splits)


def _prepare_forward(plan: ForwardPlan, operands: Operands, ops: WarpgroupOps) -> dict[str, Array]:
    spec, packed = plan.spec, plan.packed_heads
    panels, value_panels = array_shapes.forward_in_panels(spec), array_shapes.values_in_panels(spec)
    if packed == 1:
        query = whole_tiles.whole_tiles(spec, "query", operands.query, in_panels=panels)
    else:
        query = prepare.pack_heads(operands.query, packed)
        query = whole_tiles.whole_tiles(spec, "query", query, axis=2, in_panels=panels)
    key = whole_tiles.whole_tiles(spec, "key", operands.key, in_panels=panels)
    value = whole_tiles.whole_tiles(spec, "value", operands.value, parts=plan.value_parts, in_panels=value_panels)
    bias_by_mma = plan.form.bias_by_mma
    arrays = dict(query=query, key=key, value=value)
    arrays |= prepare.operands_for_kernels(spec, operands, except_bias=bias_by_mma)
    arrays |= score_mod_reads.prepare(operands.score_mod_arrays)
    arrays |= Prepared(spec, operands, ops).packed_mask() | whole_tiles.edges(operands, dict(value=value))
    if bias_by_mma:
        arrays |= bias_columns.prepare(spec, operands, plan.tile.keys)
    rows, missing = max(plan.rows_of_a_range // packed, 1), plan.missing_rows // packed
    return arrays | tile_range.table(spec, operands, rows, missing)


@in_32_bits
def tangent(
    plan: TangentPlan | ForwardPlan, operands: Operands, results: Results, tangents: Operands, ops: WarpgroupOps
) -> Results:
    """The tangents of output and log-sum-exp, in their shapes and dtypes."""
    if isinstance(plan, ForwardPlan):
        out, lse = forward(plan, operands._replace(value=tangents.value), ops)
        return Results(out, jnp.zeros_like(lse))
    spec, part = plan.spec, plan.part
    own, moving = _in_parts(plan, operands), _in_parts(plan, tangents)
    factors = {name: getattr(own, name) for name in ("query", "key", "value")}
    factors |= {f"t_{name}": getattr(moving, name) for name in factors if name in plan.moving}
    of = lambda name: name.removeprefix("t_")
    whole = functools.partial(whole_tiles.whole_tiles, part, in_panels=array_shapes.in_panels(part))
    factors = {name: whole(of(name), factors[name]) for name in (*plan.q, *plan.k, *plan.v)}
    others, pushed = (prepare.operands_for_kernels(spec, some) for some in (operands, tangents))
    others |= score_mod_reads.prepare(operands.score_mod_arrays)
    if "score_mod_arrays" in plan.moving:
        pushed |= score_mod_reads.prepare(_instantiated(operands.score_mod_arrays, tangents.score_mod_arrays))
    arrays = factors | others | {f"t_{name}": array for name, array in pushed.items()}
    arrays |= Prepared(spec, operands, ops).packed_mask() | whole_tiles.edges(operands, factors)
    arrays |= tile_range.table(spec, operands, plan.tile.rows)
    lse = jnp.where(results.lse == -jnp.inf, jnp.inf, results.lse)
    made = tangent_kernel.tangent(plan, arrays | dict(lse=for_exponent(spec, lse)), ops)
    rows = spec.query_length
    t_out = made["t_out"][:, :rows, :, : plan.dims[1]]
    t_out = t_out.reshape(*t_out.shape[:2], spec.heads, -1)[..., : spec.value_dim]
    return Results(t_out.astype(spec.result_dtype), made["t_lse"][:, :, :rows])


def _instantiated(arrays: Sequence[Array], tangents: Sequence[Array | None]) -> list[Array | None]:
    """With zeros for the tangents of arrays that have some, and do not move."""
    zeros = lambda array: jnp.zeros_like(array) if jnp.issubdtype(array.dtype, jnp.inexact) else None
    return [zeros(a) if t is None else t for a, t in zip(arrays, tangents, strict=True)]


def _in_parts(plan: TangentPlan, operands: Operands) -> Operands:
    """Operands, or tangents, with the parts of the values' columns for heads."""

    def split(value: Array) -> Array:
        room = [(0, 0)] * 3 + [(0, plan.parts * plan.dims[1] - value.shape[3])]
        return jnp.pad(value, room).reshape(*value.shape[:2], -1, plan.dims[1])

    return operands._replace(value=jax.tree.map(split, operands.value)) if plan.parts > 1 else operands


@in_32_bits
def backward(kernels: Sequence[Kernel[Any]], operands: Operands, residuals: Residuals, ops: WarpgroupOps) -> Operands:
    """Return the gradients of all operands that have one, in their shapes."""
    call = HopperBackward(kernels[0].plan.spec, operands, residuals, ops)
    made = call.run(kernels)
    return finish_backward(call.spec, operands, made, sinks_gradient(operands.sinks, call.lse, call.delta))
