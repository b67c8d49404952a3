"""Kernels by `mma.sync` in Pallas (Mosaic GPU), for NVIDIA GPUs since Ampere.

They use the matrix unit and the copies that every GPU since compute capability 8.0 has. On a Hopper GPU, which both
families serve, `mosaic_gpu` is asked first, but for some calls with few queries (`asked_before`).

A backward is one kernel for dQ, dK and dV, with five products, which adds dQ up in device memory (`backward_fused`).
In float32, where every sum must have one order, where a bias has one value for each query, or where its tiles do not
fit in shared memory, there are two or three kernels, in which a CTA owns all that it sums.

Pallas is imported with the first call that the kernels serve: not every machine has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxtyping import Array, Float

from jflash import _platform
from jflash._backends.nvidia import facts
from jflash._backends.nvidia.facts import facts_of
from jflash._platform import Platform
from jflash._semantics import visits
from jflash._semantics.spec import Operands, Residuals, Spec

SHARED_MEMORY: Mapping[str, int] = {
    **dict.fromkeys(("8.0", "8.7"), 163 * 1024),
    **dict.fromkeys(("8.6", "8.9", "12.0", "12.1"), 99 * 1024),
    **dict.fromkeys(("9.0", "10.0", "10.3"), 227 * 1024),
}
"""Bytes that a CTA may have, by compute capability (CUDA programming guide). No compiler checks them."""


def unsupported(spec: Spec, platform: Platform) -> str | None:
    """Return why a call cannot be served, in words for the user; `None` if it can."""
    capability = platform.compute_capability
    if capability is None or not re.fullmatch(r"\d+\.\d+", capability) or float(capability) < 8:
        return f"it needs an NVIDIA GPU since Ampere (compute capability 8.0 or newer), and this is {platform}."
    if capability not in SHARED_MEMORY:
        return f"it has no tiles for compute capability {capability}, of {platform}."
    reason = unsupported_call(spec)
    if reason is not None or not facts_of(spec).is_float32:
        return reason
    from jflash._backends.mosaic_gpu_mma import plan

    if plan.fits(spec, platform):
        return None
    return (
        f"it takes float32 as {facts_of(spec).pieces} bfloat16 pieces; with H={spec.head_dim} and D={spec.value_dim} "
        f"their tiles do not fit in {SHARED_MEMORY[capability] // 1024} KiB of shared memory."
    )


def unsupported_call(spec: Spec) -> str | None:
    """Return why no GPU serves a call by these kernels, in words for the user; `None` if some do."""
    if spec.pages is not None and (spec.head_dim % 8, spec.value_dim % 8) != (0, 0):
        return f"of a paged cache H and D must be multiples of 8. Got H={spec.head_dim} and D={spec.value_dim}."
    return facts.unsupported(spec, widest=256)


def asked_before(spec: Spec, platform: Platform) -> str | None:
    """Return the backend before which `implementation=None` asks this one: on a Hopper GPU, which others serve too,
    few queries on a paged cache of 8 bits, or of narrow heads, are faster here."""
    if platform.compute_capability != "9.0" or spec.pages is None or spec.symbolic_size is not None:
        return None
    from jflash._backends.mosaic_gpu_mma import forward_few_rows

    is_faster = forward_few_rows.stays_in_bytes(spec) or max(spec.head_dim, spec.value_dim) <= 64
    return "mosaic_gpu" if is_faster and forward_few_rows.serves(spec) else None


def visits_lists(spec: Spec, platform: Platform) -> bool:
    """Return whether the kernels visit tiles by lists, made of a map of what the call's functions show."""
    return visits.has_map(spec)


def takes_tokens(spec: Spec) -> bool:
    """Return whether the forward takes queries that are rows of one array."""
    return True


def forward(spec: Spec, operands: Operands) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Return the output in the results' dtype and the log-sum-exp in float32."""
    from jflash._backends.mosaic_gpu_mma import plan, run
    from jflash._backends.mosaic_gpu_mma.cta import MMA

    return run.forward(plan.plan_forward(spec, _platform.current()), operands, MMA)


def backward(spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
    """Return the gradients of all operands that have one, in their shapes."""
    from jflash._backends.mosaic_gpu_mma import plan, run
    from jflash._backends.mosaic_gpu_mma.cta import MMA

    return run.backward(plan.plan_backward(spec, _platform.current()), operands, residuals, MMA)


def describe(spec: Spec, platform: Platform) -> str:
    """Return the plans of a call's forward and backward, in words."""
    from jflash._backends.mosaic_gpu_mma import plan

    return plan.described(spec, platform)
