"""Kernels by `mma.sync` in Pallas (Mosaic GPU), for NVIDIA GPUs since Ampere.

They are `mosaic_gpu`'s second family: the Spec's plan, the inputs, masks, logits and softmax are the same, the matrix
unit and the copies are what every GPU since compute capability 8.0 has. Where both can serve, on a Hopper, `mosaic_gpu`
is asked first.

A backward is one kernel for dQ, dK and dV, with five products, which adds dQ up in device memory (`backward_fused`).
In float32, where every sum must have one order, where a bias has one value for each query, or where its tiles do not
fit in shared memory, there are two or three kernels, in which a CTA owns all that it sums.

Pallas is imported with the first call that the kernels serve: not every machine has it.
"""

from __future__ import annotations

import re

import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash import _platform
from jflash._backends import mosaic_gpu
from jflash._backends.mosaic_gpu_mma.shared_memory import SHARED_MEMORY
from jflash._platform import Platform
from jflash._semantics.spec import Operands, Residuals, Spec


def unsupported(spec: Spec, platform: Platform) -> str | None:
    """GPUs whose shared memory is known run these kernels."""
    capability = platform.compute_capability
    if capability is None or not re.fullmatch(r"\d+\.\d+", capability) or float(capability) < 8:
        return f"it needs an NVIDIA GPU since Ampere (compute capability 8.0 or newer), and this is {platform}."
    if capability not in SHARED_MEMORY:
        return f"it has no tiles for compute capability {capability}, of {platform}."
    return unsupported_call(spec)


def unsupported_call(spec: Spec) -> str | None:
    """What the kernels cannot do on any machine."""
    if spec.mask_mod is not None:
        return "it has no mask_mod yet."
    if spec.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it takes bfloat16, float16 and float32. Got {spec.dtype}."
    if max(spec.head_dim, spec.value_dim) > 256:
        return f"H and D must be at most 256. Got H={spec.head_dim} and D={spec.value_dim}."
    if (reason := mosaic_gpu.unsupported_score_mod(spec)) is not None:
        return reason
    if spec.dtype != jnp.float32:
        return None
    from jflash._backends.nvidia.tile import operand_pieces

    return operand_pieces.unsupported(spec)


def forward(spec: Spec, operands: Operands) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Output in the results' dtype and log-sum-exp in float32."""
    from jflash._backends.mosaic_gpu_mma import plan, run
    from jflash._backends.mosaic_gpu_mma.ops import MMA

    return run.forward(plan.plan_forward(spec, _platform.current()), operands, MMA)


def backward(spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
    """Gradients of all operands that have one, in their shapes."""
    from jflash._backends.mosaic_gpu_mma import plan, run
    from jflash._backends.mosaic_gpu_mma.ops import MMA

    return run.backward(plan.plan_backward(spec, _platform.current()), operands, residuals, MMA)


def describe(spec: Spec, platform: Platform) -> str:
    """The plans of a call's forward and backward, in words."""
    from jflash._backends.mosaic_gpu_mma import plan

    return plan.describe(spec, platform)
