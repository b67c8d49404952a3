"""A call through the kernels: plan, prepare, launch, finish, as in `mosaic_gpu.call`, and with what is there."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import row_statistics
from jflash._backends.mosaic_gpu_mma.backward_dbias import backward_dbias
from jflash._backends.mosaic_gpu_mma.backward_dkv import backward_dkv
from jflash._backends.mosaic_gpu_mma.backward_dq import backward_dq
from jflash._backends.mosaic_gpu_mma.backward_fused import backward as launch_fused
from jflash._backends.mosaic_gpu_mma.cta import copies_bias
from jflash._backends.mosaic_gpu_mma.forward_kernel import ForwardPlan
from jflash._backends.mosaic_gpu_mma.forward_kernel import forward as launch_forward
from jflash._backends.mosaic_gpu_mma.ops import MmaOps
from jflash._backends.mosaic_gpu_mma.plan import BackwardPlan
from jflash._backends.nvidia import bias_and_mask, prepare
from jflash._backends.nvidia.finish import finish_backward, finish_forward
from jflash._backends.nvidia.prepare import in_32_bits, packed_mask
from jflash._backends.nvidia.tile import operand_pieces, score_mod_reads
from jflash._backends.nvidia.walk import tile_range
from jflash._semantics.online_softmax import sinks_gradient
from jflash._semantics.spec import Operands, Residuals, Spec


@in_32_bits
def forward(
    plan: ForwardPlan, operands: Operands, ops: MmaOps
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Output in the results' dtype and log-sum-exp in float32."""
    spec, packed = plan.spec, plan.packed_heads
    query = operands.query if packed == 1 else prepare.pack_heads(operands.query, packed)
    arrays = dict(query=query, key=operands.key, value=operands.value)
    arrays = {name: _in_chunks(spec, array) for name, array in arrays.items()} | _others(spec, operands)
    arrays |= packed_mask(spec, operands, ops) | tile_range.table(spec, operands, max(plan.tile.rows // packed, 1))
    made = launch_forward(plan, arrays, ops)
    return finish_forward(spec, operands, made, packed_heads=packed, splits=plan.splits)


@in_32_bits
def backward(plan: BackwardPlan, operands: Operands, residuals: Residuals, ops: MmaOps) -> Operands:
    """Gradients of all operands that have one, in their shapes."""
    spec, table = plan.spec, functools.partial(tile_range.table, plan.spec, operands)
    arrays = dict(query=operands.query, key=operands.key, value=operands.value, d_out=residuals.d_out)
    delta = _delta(residuals)
    lse = jnp.where(residuals.lse == -jnp.inf, jnp.inf, residuals.lse)
    rows = row_statistics.lse_and_delta(spec, lse, delta)
    arrays = {name: _in_chunks(spec, array) for name, array in arrays.items()} | _others(spec, operands) | rows
    of_queries = arrays | packed_mask(spec, operands, ops)
    by_keys = lambda tile: arrays | packed_mask(spec, operands, ops, keys_first=True) | table(tile.rows, of_keys=True)
    if plan.fused is not None:
        gradients, schedule = launch_fused(plan.fused, by_keys(plan.fused.tile), ops), plan.fused.schedule
    else:
        assert plan.dq is not None
        gradients = backward_dq(plan.dq, of_queries | table(plan.dq.tile.rows), ops)
        for one in plan.dkv:
            gradients |= backward_dkv(one, by_keys(one.tile), ops)
        schedule = plan.dkv[0].schedule
    gradients |= schedule.summed(spec, gradients, (spec.head_dim, spec.value_dim))
    if plan.dbias is not None:
        gradients["whole_d_bias"] = backward_dbias(plan.dbias, of_queries | table(plan.dbias.tile.rows), ops)
    return finish_backward(spec, operands, gradients, sinks_gradient(operands.sinks, lse, delta))


def _delta(residuals: Residuals) -> Float[Array, "B N T"]:
    """What the forward's softmax takes from every dP of a row, sum(dO * O) - d_lse; 0 where a row sees nothing."""
    products = residuals.out.astype(jnp.float32) * residuals.d_out.astype(jnp.float32)
    delta = products.sum(axis=-1).transpose(0, 2, 1) - residuals.d_lse
    return jnp.where(residuals.lse == -jnp.inf, 0, delta)


def _in_chunks(spec: Spec, array: Float[Array, "B L N H"]) -> Float[Array, "B L N columns"]:
    """In pieces, with H a multiple of 8: copies take 16 bytes at a time."""
    return operand_pieces.split_array(spec, jnp.pad(array, [(0, 0)] * 3 + [(0, -array.shape[3] % 8)]))


def _others(spec: Spec, operands: Operands) -> dict[str, Array]:
    """The operands but query, key, value and a packed mask, by name. A bias of both axes is padded for copies."""
    has_bias_tiles = bias_and_mask.has_bias_tiles(spec)
    found = prepare.operands_for_kernels(spec, operands, except_bias=has_bias_tiles)
    found |= score_mod_reads.prepare(operands.score_mod_arrays)
    if operands.bias is None or not has_bias_tiles:
        return found
    missing = -operands.bias.shape[3] % 8 if copies_bias(spec) else 0
    return found | {"bias": jnp.pad(operands.bias, [(0, 0)] * 3 + [(0, missing)])}
