"""A call through the kernels: plan, prepare, launch, finish, as in `mosaic_gpu.call`, and with what is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.forward_kernel import ForwardPlan
from jflash._backends.mosaic_gpu_mma.forward_kernel import forward as launch_forward
from jflash._backends.mosaic_gpu_mma.ops import MmaOps
from jflash._backends.mosaic_gpu_mma.prepared import MmaBackward, MmaCall, in_chunks
from jflash._backends.nvidia import prepare
from jflash._backends.nvidia.finish import finish_backward, finish_forward
from jflash._backends.nvidia.launch import Kernel
from jflash._backends.nvidia.prepare import in_32_bits
from jflash._semantics.online_softmax import sinks_gradient
from jflash._semantics.spec import Operands, Residuals


@in_32_bits
def forward(
    plan: ForwardPlan, operands: Operands, ops: MmaOps
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Output in the results' dtype and log-sum-exp in float32."""
    spec, packed = plan.spec, plan.packed_heads
    query = operands.query if packed == 1 else prepare.pack_heads(operands.query, packed)
    arrays = dict(query=query, key=operands.key, value=operands.value)
    call = MmaCall(spec, operands, ops)
    arrays = {name: in_chunks(spec, array) for name, array in arrays.items()} | call.others
    arrays |= call.packed_mask() | call.ranges(max(plan.tile.rows // packed, 1))
    made = launch_forward(plan, arrays, ops)
    return finish_forward(spec, operands, made, packed_heads=packed, splits=plan.splits)


@in_32_bits
def backward(kernels: Sequence[Kernel[Any]], operands: Operands, residuals: Residuals, ops: MmaOps) -> Operands:
    """Return the gradients of all operands that have one, in their shapes."""
    call = MmaBackward(kernels[0].plan.spec, operands, residuals, ops)
    made = call.run(kernels)
    return finish_backward(call.spec, operands, made, sinks_gradient(operands.sinks, call.lse, call.delta))
