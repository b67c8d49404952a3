"""What kernels with a warpgroup that copies have in common: a plan, and CTAs that carry it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Launch, Refs, WarpgroupOps
from jflash._backends.mosaic_gpu.inputs import KernelInputs
from jflash._semantics.spec import Spec


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """A kernel, before any array."""

    spec: Spec

    @property
    def launch(self) -> Launch:
        """The kernel's grid, results and shared memory."""
        raise NotImplementedError


class Cta[Plan: KernelPlan]:
    """What a CTA's warpgroups share. The last one copies tiles ahead of the others, which compute."""

    def __init__(self, plan: Plan, refs: Refs, ops: WarpgroupOps, **options: Any) -> None:
        """`options` are those of `KernelInputs`."""
        self.plan, self.refs, self.smem, self.ops = plan, refs, refs.smem, ops
        self.inputs = KernelInputs(plan.spec, ops, refs.arrays, **options)
        self.warpgroup = lax.axis_index("warpgroup")

    @classmethod
    def launch(cls, plan: Plan, arrays: Mapping[str, Any], ops: WarpgroupOps) -> dict[str, Array]:
        """Launch the plan's kernel; its results by name.

        `arrays`, or references inside `pl.run_state`: query, key, value, and in a backward d_out, in whole tiles; in a
        backward row statistics, as `row_statistics.for_fused` has them for the fused one and `subtrahends` for others;
        and what was prepared of the other operands.
        """
        return plan.launch.run(lambda refs: cls(plan, refs, ops).run(), arrays, ops)

    def run(self) -> None:
        """Each warpgroup's part."""
        last = lax.axis_size("warpgroup") - 1
        pl.when(self.warpgroup < last)(self.compute)
        pl.when(self.warpgroup == last)(self.copy)

    @property
    def own(self) -> Any:
        """The rows of the CTA's tile that are this warpgroup's."""
        return pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def compute(self) -> None:
        """What a warpgroup does that computes."""
        raise NotImplementedError

    def copy(self) -> None:
        """What the warpgroup does that copies."""
        raise NotImplementedError
