"""Hopper kernels in Pallas (Mosaic GPU): the default on NVIDIA GPUs of compute capability 9.0.

`plan` chooses kernels, tiles and schedules from the Spec; `call` prepares operands, launches and finishes. A kernel of
`kernels` reads what `inputs` prepared, is scheduled by `schedule`, and is written in the operations of `hardware`.
`logits` has the forms of a forward's logits, and their derivatives.

Pallas is imported with the first call that the kernels serve: not every machine has it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash import _platform
from jflash._platform import Platform
from jflash._semantics.spec import Operands, Residuals, Results, Spec


def unsupported(spec: Spec, platform: Platform) -> str | None:
    """Only Hopper runs these kernels."""
    if platform.compute_capability != "9.0":
        return f"it needs an NVIDIA Hopper GPU (compute capability 9.0), and this is {platform}."
    return unsupported_call(spec)


def unsupported_call(spec: Spec) -> str | None:
    """What the kernels cannot do on any machine."""
    if spec.mask_mod is not None:
        return "it has no mask_mod yet."
    if spec.pages is not None:
        return "it takes no paged cache yet (`page_table`)."
    if spec.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it takes bfloat16, float16 and float32. Got {spec.dtype}."
    widest, dims = max(spec.head_dim, spec.value_dim), f"H={spec.head_dim} and D={spec.value_dim}"
    if widest > 576:
        return f"H and D must be at most 576. Got {dims}."
    if (reason := unsupported_score_mod(spec)) is not None:
        return reason
    return _unsupported_operands(spec, dims)


def unsupported_score_mod(spec: Spec) -> str | None:
    """Kernels take what a score_mod closes over number by number."""
    if spec.score_mod is None:
        return None
    from jflash._semantics import score_mod_reads

    return score_mod_reads.unsupported(spec)


def _unsupported_operands(spec: Spec, dims: str) -> str | None:
    """float32 has products of some precisions, and takes the room of as many operands of 16 bits as they ask for."""
    from jflash._backends.mosaic_gpu import plan
    from jflash._backends.nvidia import bias_and_mask
    from jflash._backends.nvidia.tile import operand_pieces

    if (reason := operand_pieces.unsupported(spec)) is not None:
        return reason
    if plan.fits(spec):
        return None
    such = f"with {dims}" + " and such a bias" * bias_and_mask.has_bias_tiles(spec)
    if spec.dtype != jnp.float32:
        return f"{such} its tiles do not fit in shared memory."
    pieces = operand_pieces.number(spec)
    return f"it takes float32 as {pieces} bfloat16 pieces; {such} their tiles do not fit in shared memory."


def forward(spec: Spec, operands: Operands) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Output in the results' dtype and log-sum-exp in float32."""
    from jflash._backends.mosaic_gpu import plan, run
    from jflash._backends.mosaic_gpu.ops import HOPPER

    return run.forward(plan.plan_forward(spec, _platform.current().processors), operands, HOPPER)


def unsupported_tangent(spec: Spec) -> str | None:
    """Of a call that `forward` serves: why `tangent` cannot, in words for the user; `None`: it can."""
    from jflash._backends.mosaic_gpu import tangent_kernel

    return None if tangent_kernel.fits(spec) else "its tiles do not fit in shared memory beside those of their tangents"


def tangent(spec: Spec, operands: Operands, results: Results, tangents: Operands) -> Results:
    """Return the tangents of output and log-sum-exp; `None` stands for an operand's tangent of 0."""
    from jflash._backends.mosaic_gpu import plan, run
    from jflash._backends.mosaic_gpu.ops import HOPPER

    kernel = plan.plan_tangent(spec, run.moving(tangents), _platform.current().processors)
    return run.tangent(kernel, operands, results, tangents, HOPPER)


def backward(spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
    """Gradients of all operands that have one, in their shapes."""
    from jflash._backends.mosaic_gpu import plan, run
    from jflash._backends.mosaic_gpu.ops import HOPPER

    found = plan.plan_backward(spec, _platform.current().processors)
    return run.backward(found, operands, residuals, HOPPER)


def describe(spec: Spec, platform: Platform) -> str:
    """The plans of a call's forward, tangent and backward, in words."""
    from jflash._backends.mosaic_gpu import plan

    return plan.describe(spec, platform.processors)
