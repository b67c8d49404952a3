"""After the fused backward: dQ in the call's dtype and order, from the sums in device memory.

    dQ = scale * sums         where a CTA takes 64 rows of one head

Of a partial call, whose sums go on, it stays float32.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma import device_sums
from jflash._backends.mosaic_gpu_mma.cta import MmaOps, d_query_type
from jflash._backends.mosaic_gpu_mma.run import MmaBackward
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import KernelPlan, Launch, Refs, cta_index
from jflash._backends.nvidia.smem import WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True)
class RoundDqPlan(KernelPlan):
    """The kernel, before any array."""

    columns: int
    """Columns of the sums."""
    room: int
    """Rows of the sums for what a tile that begins at the last query has behind it."""
    together: int
    """Numbers that one instruction added."""

    def sums(self, margin: int) -> tuple[int, ...]:
        """Return the shape of the sums of all heads, with a margin of rows."""
        spec = self.spec
        return spec.batch, spec.heads, *device_sums.shape(spec.query_length + max(self.room, margin), self.columns)

    def arrays(self, call: MmaBackward) -> dict[str, Array]:
        return dict(dq_acc=call.made["dq_acc"])

    @property
    def launch(self) -> Launch:
        """The kernel's grid and result."""
        spec = self.spec
        return Launch(
            name=f"jflash_mma_round_d_query_{spec.head_dim}_{spec.value_dim}",
            # In dQ heads of the same queries are side by side.
            grid=dict(batch=spec.batch, block=pl.cdiv(spec.query_length, WARPGROUP_ROWS), head=spec.heads),
            results=dict(d_query=d_query_type(spec)),
        )


class RoundDqCta(NamedTuple):
    """A CTA, which rounds 64 rows of one head."""

    plan: RoundDqPlan
    refs: Refs
    ops: MmaOps

    def run(self) -> None:
        """Round the rows."""
        (plan, refs, ops), (batch, head, block) = self, map(cta_index, ("batch", "head", "block"))
        first, source = block * WARPGROUP_ROWS, refs.arrays["dq_acc"].at[batch, head]
        rows = ops.load_sums(source, first, plan.columns, plan.together) * facts_of(plan.spec).sums_scale
        target = refs.results["d_query"].at[batch].at[:, head]
        ops.store_rows(rows, target, first, plan.spec.query_length)
