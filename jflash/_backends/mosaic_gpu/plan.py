"""Plans: from the Spec and the device's number of multiprocessors to kernels, tiles and schedules, before any array."""

from __future__ import annotations

import math

from jflash._backends.mosaic_gpu import backward_plan, forward_plan, forward_wide_plan, smem, tangent_plan, whole_tiles
from jflash._backends.mosaic_gpu.backward_plan import plan_backward
from jflash._backends.mosaic_gpu.forward_plan import ForwardPlan
from jflash._backends.mosaic_gpu.forward_wide_plan import WideForwardPlan
from jflash._backends.mosaic_gpu.narrow_or_wide import is_wide
from jflash._backends.mosaic_gpu.tangent_plan import TangentPlan
from jflash._backends.nvidia.launch import KernelPlan
from jflash._backends.nvidia.tile import operand_pieces
from jflash._semantics.spec import Spec

__all__ = ["ForwardPlan", "TangentPlan"]
__all__ += ["describe", "fits", "plan_backward", "plan_forward", "plan_tangent"]


def plan_forward(spec: Spec, processors: int | None) -> ForwardPlan:
    """The plan of a call's forward on a device with `processors` multiprocessors; `None` where that is unknown."""
    return (forward_wide_plan if is_wide(spec) else forward_plan).plan_forward(spec, processors)


def plan_tangent(spec: Spec, moving: frozenset[str], processors: int | None) -> TangentPlan | ForwardPlan:
    """The plan of a call's tangent, likewise.

    Where values alone move, it is a forward with their tangents for values.
    """
    if moving == frozenset({"value"}):
        return plan_forward(spec, processors)
    return tangent_plan.plan_tangent(spec, moving, processors)


def fits(spec: Spec) -> bool:
    """Whether shared memory has room for the smallest tiles of every kernel that a call may need."""
    return not is_wide(spec) or (forward_wide_plan.fits(spec) and backward_plan.wide_fits(spec))


def describe(spec: Spec, processors: int | None) -> str:
    """The kernels of forward, tangent and backward, tiles, shared memory and schedules, and the copies before them."""
    forward, backward = plan_forward(spec, processors), plan_backward(spec, processors)
    form = type(forward.form).__name__
    details = f"logits {form}, {forward.packed_heads} heads packed, keys in {forward.splits} splits"
    if (products := operand_pieces.products(spec)) > 1:
        details += f", {products} products of pieces for each product"
    if forward.output_parts:
        details += f", output in {forward.output_parts} parts"
    if isinstance(forward, WideForwardPlan) and forward.dealt is not None:
        details += f", lists of up to {max(map(len, forward.dealt.lists))} blocks"
    lines = ["forward:", *_kernel(forward), f"    {details}"]
    if tangent_plan.fits(spec):
        tangent = plan_tangent(spec, tangent_plan.MOVING & spec.operands, processors)
        assert isinstance(tangent, TangentPlan)
        lines += ["tangent:", *_kernel(tangent), f"    output in {tangent.parts} parts"]
    lines.append("backward:")
    lines += [line for kernel in backward for line in _kernel(kernel.plan)]
    copies = whole_tiles.copied(spec)
    return "\n".join([*lines, "copies:", *(f"  {copy}" for copy in copies or ["none"])])


def _kernel(plan: KernelPlan) -> list[str]:
    """A kernel's name, grid and shared memory, and the fields of its tiles and schedule."""
    launch = plan.launch
    grid = " x ".join(f"{size} {axis}" for axis, size in launch.grid.items())
    if launch.cluster:
        grid += f" in clusters of {math.prod(launch.cluster.values())}"
    return [
        f"  {launch.name}: grid {grid}, {launch.warpgroups} warpgroups",
        f"    {smem.size(launch.smem) / 1024:.1f} of {smem.CAPACITY / 1024:.1f} KiB of shared memory",
        *(f"    {vars(plan)[name]}" for name in ("tile", "schedule") if name in vars(plan)),
    ]
