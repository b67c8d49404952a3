"""Hopper kernels in Pallas (Mosaic GPU): the default on NVIDIA GPUs of compute capability 9.0.

`plan` chooses kernels, tiles and schedules from the Spec; `run` prepares operands, launches and finishes. A kernel's
plan says what it is launched with, its `Cta` what each warpgroup does, in the operations of `ops`.

Pallas is imported with the first call that the kernels serve: not every machine has it.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from jflash import _platform
from jflash._backends.nvidia import cache_rows, facts
from jflash._backends.nvidia.facts import facts_of
from jflash._platform import Platform
from jflash._semantics import visits
from jflash._semantics.spec import Operands, Residuals, Results, Spec


def unsupported(spec: Spec, platform: Platform) -> str | None:
    """Return why a call cannot run on a platform, in words for the user; `None`: it can."""
    if platform.compute_capability != "9.0":
        return f"it needs an NVIDIA Hopper GPU (compute capability 9.0), and this is {platform}."
    return unsupported_call(spec)


def unsupported_call(spec: Spec) -> str | None:
    """Return why the kernels cannot serve a call on any machine; `None`: they can."""
    if (reason := facts.unsupported(spec, widest=576)) is not None:
        return reason
    from jflash._backends.mosaic_gpu import array_shapes, converted_tile, plan

    reason = array_shapes.unsupported_cache(spec) or converted_tile.unsupported(spec)
    if reason is None and cache_rows.converts(spec) and plan.is_wide(spec):
        return f"it converts no paged cache of heads as wide as H={spec.head_dim} and D={spec.value_dim}."
    if reason is not None or plan.fits(spec):
        return reason
    such = f"with H={spec.head_dim} and D={spec.value_dim}" + " and such a bias" * facts_of(spec).has_bias_tiles
    if not facts_of(spec).is_float32:
        return f"{such} its tiles do not fit in shared memory."
    pieces = facts_of(spec).pieces
    return f"it takes float32 as {pieces} bfloat16 pieces; {such} their tiles do not fit in shared memory."


def visits_lists(spec: Spec, platform: Platform) -> bool:
    """Return whether the kernels visit tiles by lists, made of a map of what the call's functions show."""
    return visits.has_map(spec)


def takes_tokens(spec: Spec) -> bool:
    """Return whether the forward takes queries that are rows of one array: that of narrow heads does."""
    from jflash._backends.mosaic_gpu import plan

    return not plan.is_wide(spec)


def forward(spec: Spec, operands: Operands) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Return output in the results' dtype and log-sum-exp in float32."""
    from jflash._backends.mosaic_gpu import plan, run
    from jflash._backends.mosaic_gpu.ops import HOPPER

    return run.forward(plan.plan_forward(spec, _platform.current().processors), operands, HOPPER)


def unsupported_tangent(spec: Spec) -> str | None:
    """Return why `tangent` cannot serve a call that `forward` serves, in words for the user; `None`: it can."""
    from jflash._backends.mosaic_gpu import tangent_kernel

    return None if tangent_kernel.fits(spec) else "its tiles do not fit in shared memory beside those of their tangents"


def tangent(spec: Spec, operands: Operands, results: Results, tangents: Operands) -> Results:
    """Return the tangents of output and log-sum-exp; `None` stands for an operand's tangent of 0."""
    from jflash._backends.mosaic_gpu import plan, run
    from jflash._backends.mosaic_gpu.ops import HOPPER

    kernel = plan.plan_tangent(spec, run.moving(tangents), _platform.current().processors)
    return run.tangent(kernel, operands, results, tangents, HOPPER)


def backward(spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
    """Return the gradients of all operands that have one, in their shapes."""
    from jflash._backends.mosaic_gpu import plan, run
    from jflash._backends.mosaic_gpu.ops import HOPPER

    found = plan.plan_backward(spec, _platform.current().processors)
    return run.backward(found, operands, residuals, HOPPER)


def describe(spec: Spec, platform: Platform) -> str:
    """Return the plans of a call's forward, tangent and backward, in words."""
    from jflash._backends.mosaic_gpu import plan

    return plan.describe(spec, platform.processors)
