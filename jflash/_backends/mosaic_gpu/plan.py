"""Plans: from the Spec and the device's number of multiprocessors to kernels, tiles and schedules, before any array."""

from __future__ import annotations

import math
from typing import Any

from jflash._backends.mosaic_gpu import (
    array_shapes,
    forward_kernel,
    forward_plan,
    forward_wide,
    forward_wide_plan,
    smem,
    tangent_kernel,
)
from jflash._backends.mosaic_gpu.backward_plan import is_wide, plan_backward, wide_fits
from jflash._backends.mosaic_gpu.forward_wide_plan import WideForwardPlan
from jflash._backends.mosaic_gpu.run import VALUES_ALONE
from jflash._backends.nvidia.launch import Kernel, KernelPlan
from jflash._backends.nvidia.tile import operand_pieces
from jflash._semantics.spec import Spec


def plan_forward(spec: Spec, processors: int | None) -> Kernel[Any]:
    """Return the kernel of a call's forward on a device with `processors` multiprocessors; `None` is unknown."""
    if is_wide(spec):
        return Kernel(forward_wide_plan.plan_forward(spec, processors), forward_wide.body)
    return Kernel(forward_plan.plan_forward(spec, processors), forward_kernel.body)


def plan_tangent(spec: Spec, moving: frozenset[str], processors: int | None) -> Kernel[Any]:
    """Return the kernel of a call's tangent, where the operands named in `moving` have tangents.

    Where values alone have, it is the forward's, for their tangents in the place of values.
    """
    if moving == VALUES_ALONE:
        return plan_forward(spec, processors)
    return Kernel(tangent_kernel.plan_tangent(spec, moving, processors), tangent_kernel.TangentCta.body)


def fits(spec: Spec) -> bool:
    """Whether shared memory has room for the smallest tiles of every kernel that a call may need."""
    return not is_wide(spec) or (forward_wide_plan.fits(spec) and wide_fits(spec))


def describe(spec: Spec, processors: int | None) -> str:
    """Return a call's kernels, with tiles, shared memory and schedules, and the copies before them, in words."""
    forward, backward = plan_forward(spec, processors).plan, plan_backward(spec, processors)
    form = type(forward.form).__name__
    details = f"logits {form}, {forward.packed_heads} heads packed, keys in {forward.splits} splits"
    if (products := operand_pieces.products(spec)) > 1:
        details += f", {products} products of pieces for each product"
    if forward.output_stores:
        details += f", output in {forward.output_stores} stores"
    if isinstance(forward, WideForwardPlan) and forward.dealt is not None:
        details += f", lists of up to {max(map(len, forward.dealt.lists))} blocks"
    lines = ["forward:", *_kernel(forward), f"    {details}"]
    if tangent_kernel.fits(spec):
        tangent = plan_tangent(spec, tangent_kernel.MOVING & spec.operands, processors)
        lines += ["tangent:", *_kernel(tangent.plan), f"    output in {tangent.plan.chunks} chunks of columns"]
    lines.append("backward:")
    lines += [line for kernel in backward for line in _kernel(kernel.plan)]
    copies = array_shapes.copied(spec)
    return "\n".join([*lines, "copies:", *(f"  {copy}" for copy in copies or ["none"])])


def _kernel(plan: KernelPlan) -> list[str]:
    """Return a kernel's name, grid and shared memory, and the fields of its tiles and schedule, in words."""
    launch = plan.launch
    grid = " x ".join(f"{size} {axis}" for axis, size in launch.grid.items())
    if launch.cluster:
        grid += f" in clusters of {math.prod(launch.cluster.values())}"
    return [
        f"  {launch.name}: grid {grid}, {launch.warpgroups} warpgroups",
        f"    {smem.size(launch.smem) / 1024:.1f} of {smem.CAPACITY / 1024:.1f} KiB of shared memory",
        *(f"    {vars(plan)[name]}" for name in ("tile", "schedule") if name in vars(plan)),
    ]
