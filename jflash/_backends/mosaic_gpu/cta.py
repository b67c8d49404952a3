"""What a CTA's warpgroups share: the last one copies tiles ahead of the others, which compute."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.tma_inputs import GmemTile, TmaInputs
from jflash._backends.nvidia.launch import KernelPlan, Refs
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS


class Cta[Plan: KernelPlan]:
    """A CTA of any kernel with a warpgroup that copies."""

    def __init__(self, plan: Plan, refs: Refs, ops: WarpgroupOps, **options: Any) -> None:
        """`options` are those of `KernelInputs`.

        A subclass calls this among its own reads of the grid's indices. Their order is that of the PTX that was
        measured: another one makes other code.
        """
        self.plan, self.refs, self.smem, self.ops = plan, refs, refs.smem, ops
        self.inputs = TmaInputs(plan.spec, ops, refs.arrays, **options)
        self.warpgroup = lax.axis_index("warpgroup")

    def run(self) -> None:
        """Run this warpgroup."""
        last = lax.axis_size("warpgroup") - 1
        pl.when(self.warpgroup < last)(self.compute)
        pl.when(self.warpgroup == last)(self.copy)

    @property
    def warpgroup_rows(self) -> Any:
        """The rows of the CTA's tile that are this warpgroup's."""
        return pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def compute(self) -> None:
        """Run a warpgroup that computes."""
        raise NotImplementedError

    def copy(self) -> None:
        """Run the warpgroup that copies."""
        raise NotImplementedError

    def copy_rows(self, tile: GmemTile, full: Ref, **buffers: Ref) -> None:
        """Copy the same tile of each named array to its buffer."""
        for name, buffer in buffers.items():
            self.inputs.copy_rows(name, tile, buffer, full)
