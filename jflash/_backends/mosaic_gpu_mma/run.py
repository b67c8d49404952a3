"""A call through the kernels: its arrays are prepared, its kernels run, and their results get the call's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.forward_kernel import ForwardPlan
from jflash._backends.mosaic_gpu_mma.ops import MmaOps
from jflash._backends.mosaic_gpu_mma.prepared import MmaBackward, MmaCall
from jflash._backends.nvidia.finish import finish_backward, finish_forward
from jflash._backends.nvidia.launch import Kernel
from jflash._backends.nvidia.prepare import in_32_bits
from jflash._semantics.online_softmax import sinks_gradient
from jflash._semantics.spec import Operands, Residuals


@in_32_bits
def forward(
    kernel: Kernel[ForwardPlan], operands: Operands, ops: MmaOps
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Return the output in the results' dtype and the log-sum-exp in float32."""
    plan = kernel.plan
    made = kernel.run(MmaCall(plan.spec, operands, ops))
    return finish_forward(plan, operands, made)


@in_32_bits
def backward(kernels: Sequence[Kernel[Any]], operands: Operands, residuals: Residuals, ops: MmaOps) -> Operands:
    """Return the gradients of all operands that have one, in their shapes."""
    call = MmaBackward(kernels[0].plan.spec, operands, residuals, ops)
    made = call.run(kernels)
    return finish_backward(call.spec, operands, made, sinks_gradient(operands.sinks, call.lse, call.delta))
