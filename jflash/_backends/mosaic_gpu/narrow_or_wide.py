"""Which kernels serve a call: those of narrow heads, or those of wide ones, in which two warpgroups share columns.

All are of one kind: where the backward of narrow heads has no room, their forward, which may have some, spills
registers, and that of wide heads does not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax.numpy as jnp

from jflash._backends.mosaic_gpu import backward_dbias, backward_dq, forward_plan, smem
from jflash._backends.mosaic_gpu.backward_dkv import DkvPlan
from jflash._backends.mosaic_gpu.tiles import DqTiles, RowTiles
from jflash._backends.nvidia import bias_and_mask
from jflash._backends.nvidia.smem import Buffers
from jflash._backends.nvidia.tile.gradient_sums import ParameterSums, TableSums
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._semantics.spec import Spec

_MOST_COLUMNS = 256
"""The most columns of a sum of 64 rows that a warpgroup's registers hold."""


@functools.lru_cache(maxsize=256)
def is_wide(spec: Spec) -> bool:
    """Whether some kernel of narrow heads has no room for a call, in registers or for its smallest tiles in memory."""
    return max(spec.head_dim, spec.value_dim) > _MOST_COLUMNS or not all(map(smem.fits, _smallest(spec)))


def _smallest(spec: Spec) -> Iterator[Buffers]:
    """What narrow heads' kernels declare with their smallest tiles."""
    yield forward_plan.shared_memory(spec, forward_plan.SMALLEST_TILE, jnp.dtype(jnp.float32))
    yield backward_dq.shared_memory(spec, DqTiles(1, 64, 1, 1))
    schedule = BackwardSchedule.of(spec.heads, spec.key_heads, 1, spec.batch, None)
    yield DkvPlan(spec, ParameterSums(("bias",)), TableSums.none(spec), 1, schedule).launch.smem
    if bias_and_mask.has_bias_tiles(spec):
        yield backward_dbias.shared_memory(spec, RowTiles(1, 64, 1))
