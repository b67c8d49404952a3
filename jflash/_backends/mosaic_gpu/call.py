"""A call through the kernels, in four steps: plan, prepare, launch, finish.

`prepare` puts operands into the form that kernels take, `launch` runs them, and `finish` gives what they return the
call's shapes and dtypes. The plan is made before, from the Spec alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import logits
from jflash._backends.mosaic_gpu.hardware.warpgroup import WarpgroupOps
from jflash._backends.mosaic_gpu.inputs import bias_and_mask, bias_columns, row_statistics
from jflash._backends.mosaic_gpu.inputs.prepare import (
    edges,
    operands_for_kernels,
    pack_heads,
    pad_to_whole_tiles,
    unpack_heads,
)
from jflash._backends.mosaic_gpu.kernels import backward_dbias, backward_dkv, backward_dq, delta
from jflash._backends.mosaic_gpu.kernels.backward import backward as launch_backward
from jflash._backends.mosaic_gpu.kernels.backward_plan import FusedPlan
from jflash._backends.mosaic_gpu.kernels.forward import forward as launch_forward
from jflash._backends.mosaic_gpu.kernels.forward_plan import ForwardPlan
from jflash._backends.mosaic_gpu.kernels.pack_mask import pack_mask
from jflash._backends.mosaic_gpu.plan import BackwardPlan
from jflash._backends.mosaic_gpu.schedule import tile_range
from jflash._semantics.online_softmax import finite_or_zero, sinks_gradient
from jflash._semantics.spec import Operands, Residuals, Spec

Arrays = dict[str, Array]
"""What a kernel is launched with, by name."""


def forward(
    plan: ForwardPlan, operands: Operands, ops: WarpgroupOps
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Output in the query's dtype and log-sum-exp in float32."""
    out, lse = launch_forward(plan, _prepare_forward(plan, operands, ops), ops)
    return _finish_forward(plan, operands, out, lse)


def _prepare_forward(plan: ForwardPlan, operands: Operands, ops: WarpgroupOps) -> Arrays:
    spec, packed = plan.spec, plan.packed_heads
    if packed == 1:
        query = pad_to_whole_tiles(operands.query)
    else:
        query = pad_to_whole_tiles(pack_heads(operands.query, packed), axis=2)
    key, value = pad_to_whole_tiles(operands.key), pad_to_whole_tiles(operands.value)
    bias_by_mma = logits.form(spec).bias_by_mma
    arrays = dict(query=query, key=key, value=value)
    arrays |= operands_for_kernels(spec, operands, except_bias=bias_by_mma)
    arrays |= _packed_mask(spec, operands, ops) | edges(operands, dict(value=value))
    if bias_by_mma:
        arrays |= bias_columns.prepare(spec, operands, plan.tile.keys)
    rows, missing = max(plan.tile.rows // packed, 1), plan.missing_rows // packed
    return arrays | tile_range.table(spec, operands, rows, missing)


def _finish_forward(plan: ForwardPlan, operands: Operands, out: Array, lse: Array) -> tuple[Array, Array]:
    if plan.packed_heads > 1:
        out = out.swapaxes(2, 3)
    out, lse = (out[0], lse[0]) if plan.splits == 1 else _merge(operands, out, lse)
    out, lse = out[:, : plan.rows, :, : plan.spec.value_dim].astype(plan.spec.dtype), lse[:, :, : plan.rows]
    if plan.packed_heads > 1:
        out = unpack_heads(out, plan.packed_heads)
        lse = unpack_heads(lse.transpose(0, 2, 1), plan.packed_heads).transpose(0, 2, 1)
    return out, lse


def _merge(operands: Operands, out: Array, lse: Array) -> tuple[Array, Array]:
    """One output and log-sum-exp from those of all splits: `[splits, B, T, N, D]`, `[splits, B, N, L]`."""
    largest = finite_or_zero(lse.max(axis=0))
    weights = jnp.exp(lse - largest)
    total = weights.sum(axis=0)
    empty = total == 0
    if operands.sinks is not None:
        total = total + jnp.exp(operands.sinks[:, :, None].astype(jnp.float32) - largest)
    total = jnp.where(empty, 1, total)
    factors = jnp.moveaxis(weights / total, 3, 2)[:, :, : out.shape[2], :, None]
    return (out * factors).sum(axis=0), jnp.where(empty, -jnp.inf, largest + jnp.log(total))


class _Prepared(NamedTuple):
    """What the backward's kernels take."""

    tiles: Arrays
    """Query, key, value and d_out in whole tiles."""
    others: Arrays
    """The other operands, for tiles whose rows are queries."""
    keys_first: Arrays
    """Likewise, for tiles whose rows are keys."""


class _Statistics(NamedTuple):
    """A query's statistics, and what the fused kernel takes in their place."""

    lse: Float[Array, "B N T"]
    delta: Float[Array, "B N T"]
    made: delta.Delta


def backward(plan: BackwardPlan, operands: Operands, residuals: Residuals, ops: WarpgroupOps) -> Operands:
    """Gradients of all operands that have one, in their dtypes and shapes."""
    spec = plan.spec
    prepared = _prepare_backward(spec, operands, residuals, ops)
    dq_acc = None if plan.fused is None else plan.fused.dq_acc(ops.margin)
    made = delta.delta(spec, residuals, dq_acc, ops)
    lse = jnp.where(residuals.lse == -jnp.inf, jnp.inf, residuals.lse)
    statistics = _Statistics(lse, made.delta, made)
    rows: Arrays = dict(zip(("lse", "delta"), row_statistics.subtrahends(spec, lse, made.delta), strict=True))
    if plan.fused is not None:
        gradients = _launch_fused(plan.fused, operands, prepared, statistics, ops)
    else:
        gradients = _launch_dq_and_dkv(plan, operands, prepared, rows, ops)
    if plan.dbias is not None:
        table = tile_range.table(spec, operands, plan.dbias.tile.rows)
        arrays = prepared.tiles | rows | prepared.others | table
        gradients["whole_d_bias"] = backward_dbias.backward_dbias(plan.dbias, arrays, ops)
    return _finish_backward(spec, operands, gradients, sinks_gradient(operands.sinks, lse, made.delta))


def _prepare_backward(spec: Spec, operands: Operands, residuals: Residuals, ops: WarpgroupOps) -> _Prepared:
    arrays = dict(query=operands.query, key=operands.key, value=operands.value, d_out=residuals.d_out)
    tiles = {name: pad_to_whole_tiles(array) for name, array in arrays.items()}
    found, others = edges(operands, tiles), operands_for_kernels(spec, operands)
    mask, mask_of_keys = (_packed_mask(spec, operands, ops, keys_first=first) for first in (False, True))
    return _Prepared(tiles, others | mask | found, others | mask_of_keys | found)


def _packed_mask(spec: Spec, operands: Operands, ops: WarpgroupOps, *, keys_first: bool = False) -> Arrays:
    """A mask of both axes, packed, by name."""
    if not bias_and_mask.has_packed_mask(spec):
        return {}
    assert operands.mask is not None
    return {"mask": pack_mask(operands.mask, ops, keys_first=keys_first)}


def _launch_fused(
    plan: FusedPlan, operands: Operands, prepared: _Prepared, statistics: _Statistics, ops: WarpgroupOps
) -> Arrays:
    made = statistics.made
    assert made.dq_acc is not None
    if made.columns is None:
        vectors = row_statistics.vectors(plan.spec, statistics.lse, statistics.delta)
        rows = dict(zip(("lse", "delta"), vectors, strict=True))
    else:
        rows = dict(columns=made.columns, ones=row_statistics.ones())
    table = tile_range.table(plan.spec, operands, plan.tile.keys, of_keys=True)
    arrays = prepared.tiles | rows | prepared.keys_first | table | dict(dq_acc=made.dq_acc)
    return launch_backward(plan, arrays, ops)


def _launch_dq_and_dkv(
    plan: BackwardPlan, operands: Operands, prepared: _Prepared, rows: Arrays, ops: WarpgroupOps
) -> Arrays:
    assert plan.dq is not None
    assert plan.dkv is not None
    table = tile_range.table(plan.spec, operands, plan.dq.tile.rows)
    made = backward_dq.backward_dq(plan.dq, prepared.tiles | rows | prepared.others | table, ops)
    table = tile_range.table(plan.spec, operands, row_statistics.WARPGROUP_ROWS, of_keys=True)
    return made | backward_dkv.backward_dkv(plan.dkv, prepared.tiles | rows | prepared.keys_first | table, ops)


def _finish_backward(spec: Spec, operands: Operands, gradients: Arrays, d_sinks: Array | None) -> Operands:
    def trimmed(name: str) -> Array:
        like = getattr(operands, name)
        return gradients[f"d_{name}"][:, : like.shape[1], :, : like.shape[3]].astype(like.dtype)

    def summed(name: str) -> Array | None:
        total = gradients.get(f"d_{name}")
        return None if total is None else _to_parameter(spec, name, total, getattr(operands, name))

    return Operands(
        query=trimmed("query"),
        key=trimmed("key"),
        value=trimmed("value"),
        bias=gradients["whole_d_bias"] if "whole_d_bias" in gradients else summed("bias"),
        scale=summed("scale"),
        alibi_slopes=summed("alibi_slopes"),
        sinks=d_sinks,
    )


def _to_parameter(spec: Spec, name: str, total: Array, like: Array) -> Array:
    """A parameter's gradient from what kernels summed, `[B, N, L]`."""
    kind = bias_and_mask.bias_kind(spec) if name == "bias" else "scalar"
    if kind in ("row", "column"):
        assert spec.bias_shape is not None
        total = total[:, :, : max(spec.bias_shape[2:])]
        total = total[..., None] if kind == "row" else total[:, :, None]
    else:
        total = total.sum(axis=2)
        if name == "bias":
            total = total[..., None, None]
        elif like.ndim == 1:
            total = total.sum(axis=1)
    shared = tuple(axis for axis, size in enumerate(like.shape) if size == 1 and total.shape[axis] > 1)
    return total.sum(axis=shared, keepdims=True).astype(like.dtype)
