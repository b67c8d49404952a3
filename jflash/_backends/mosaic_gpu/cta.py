"""What kernels have in common whose last warpgroup copies tiles ahead of the others, which compute."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.tma_inputs import TmaInputs
from jflash._backends.nvidia.launch import KernelPlan, Refs
from jflash._backends.nvidia.smem import WARPGROUP_ROWS


class Cta[Plan: KernelPlan]:
    """What a CTA's warpgroups share. The last one copies tiles ahead of the others, which compute."""

    def __init__(self, plan: Plan, refs: Refs, ops: WarpgroupOps, **options: Any) -> None:
        """`options` are those of `KernelInputs`.

        A subclass calls this among its own reads of the grid's indices. Their order is that of the PTX that was
        measured: another one makes other code.
        """
        self.plan, self.refs, self.smem, self.ops = plan, refs, refs.smem, ops
        self.inputs = TmaInputs(plan.spec, ops, refs.arrays, **options)
        self.warpgroup = lax.axis_index("warpgroup")

    def run(self) -> None:
        """Each warpgroup's part."""
        last = lax.axis_size("warpgroup") - 1
        pl.when(self.warpgroup < last)(self.compute)
        pl.when(self.warpgroup == last)(self.copy)

    @property
    def warpgroup_rows(self) -> Any:
        """The rows of the CTA's tile that are this warpgroup's."""
        return pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def compute(self) -> None:
        """What a warpgroup does that computes."""
        raise NotImplementedError

    def copy(self) -> None:
        """What the warpgroup does that copies."""
        raise NotImplementedError
