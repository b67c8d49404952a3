"""A call through the kernels, in four steps: plan, prepare, launch, finish.

The plan is made before, from the Spec alone. Here operands are put into the form that kernels take, kernels run, and
what they return is given the call's shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.plan import VALUES_ALONE
from jflash._backends.mosaic_gpu.prepared import HopperBackward, HopperForward, HopperTangent
from jflash._backends.nvidia.finish import finish_backward, finish_forward
from jflash._backends.nvidia.launch import Kernel
from jflash._backends.nvidia.prepare import in_32_bits
from jflash._semantics.online_softmax import sinks_gradient
from jflash._semantics.spec import Operands, Residuals, Results


@in_32_bits
def forward(
    kernel: Kernel[Any], operands: Operands, ops: WarpgroupOps
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Return output in the results' dtype and log-sum-exp in float32."""
    plan = kernel.plan
    made = kernel.run(HopperForward(plan.spec, operands, ops))
    return finish_forward(plan.spec, operands, made, packed_heads=plan.packed_heads, splits=plan.splits)


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
    call = HopperTangent(kernel.plan.spec, operands, results, tangents, ops)
    return call.finish(kernel)


@in_32_bits
def backward(kernels: Sequence[Kernel[Any]], operands: Operands, residuals: Residuals, ops: WarpgroupOps) -> Operands:
    """Return the gradients of all operands that have one, in their shapes."""
    call = HopperBackward(kernels[0].plan.spec, operands, residuals, ops)
    made = call.run(kernels)
    return finish_backward(call.spec, operands, made, sinks_gradient(operands.sinks, call.lse, call.delta))
