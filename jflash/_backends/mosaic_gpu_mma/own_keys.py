"""What kernels whose CTAs own keys have in common: their grid, and where dK and dV go."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma.cta import TiledPlan, rows_of_head
from jflash._backends.mosaic_gpu_mma.prepared import MmaBackward
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import round_up
from jflash._backends.nvidia.tile.gradient_sums import SummingPlan
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule, WorkItem


@dataclasses.dataclass(frozen=True)
class KeysPlan(SummingPlan, TiledPlan):
    """A kernel whose CTAs own keys, before any array. It sums parameters' gradients over queries."""

    schedule: BackwardSchedule

    def arrays(self, call: MmaBackward) -> dict[str, Array]:
        return call.of_keys | call.ranges(self.tile.rows, of_keys=True)

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        dims = self.spec.head_dim, self.spec.value_dim
        return super().finish(made, changed) | self.schedule.summed(self.spec, made, dims)

    @property
    def grid(self) -> dict[str, int]:
        """The kernel's."""
        schedule = self.schedule
        return dict(wave=schedule.waves, block=schedule.blocks, item=schedule.items)

    @property
    def key_rows(self) -> int:
        """The rows of all blocks of keys."""
        return self.schedule.blocks * self.tile.rows

    @property
    def gradients(self) -> dict[str, jax.ShapeDtypeStruct]:
        """dK and dV, by name."""
        dims = dict(d_key=round_up(self.spec.head_dim, 8), d_value=round_up(self.spec.value_dim, 8))
        of = lambda dim: self.schedule.gradient(self.spec, (self.spec.key_length, dim), (self.key_rows, dim))
        return {name: of(dim) for name, dim in dims.items()}

    def gradient_of(self, result: Ref, item: WorkItem) -> Ref:
        """Where the gradient of a work item's keys or values is stored, `[L, H]`."""
        if self.schedule.stores_sums:
            return rows_of_head(result, item.batch, item.head_group, heads_first=True)
        return rows_of_head(result, item.batch, item.key_head)
