"""Kernels in words, for `explain`."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jflash._backends.nvidia import smem
from jflash._backends.nvidia.launch import KernelPlan


def kernels(heading: str, plans: Iterable[KernelPlan], capacity: int) -> list[str]:
    """Return a heading and each kernel's name, grid, shared memory, tile and schedule, a line each.

    `capacity` is how many bytes of shared memory a CTA may have.
    """
    return [f"{heading}:", *(line for plan in plans for line in _kernel(plan, capacity))]


def _kernel(plan: KernelPlan, capacity: int) -> list[str]:
    launch = plan.launch
    grid = " x ".join(f"{size} {axis}" for axis, size in launch.grid.items())
    if launch.cluster:
        grid += f" in clusters of {math.prod(launch.cluster.values())}"
    warpgroups = f"{launch.warpgroups} warpgroups" if launch.warpgroups else "1 warpgroup"
    return [
        f"  {launch.name}: grid {grid}, {warpgroups}",
        f"    {smem.size(launch.smem) / 1024:.1f} of {capacity / 1024:.1f} KiB of shared memory",
        *(f"    {vars(plan)[name]}" for name in ("tile", "schedule") if name in vars(plan)),
    ]
