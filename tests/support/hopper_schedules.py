"""Calls whose Hopper schedules are tested, and how long a schedule takes."""

import heapq
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jflash._backends.mosaic_gpu.backward_fused import FusedPlan
from jflash._backends.mosaic_gpu.plan import plan_backward
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule
from jflash._semantics.spec import Spec


def last(times: Iterable[float]) -> float:
    """Return when the last of 132 multiprocessors is done, each of which takes the next CTA when it is free."""
    free = [0.0] * 132
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


def spec(head_dim: int, value_dim: int, bias: Any = None, **facts: Any) -> Spec:
    """Return the Spec of a call, with a bias of pairs if a dtype is given for it."""
    shape = (1, 1, 1024, 1024)
    return Spec(
        **dict(batch=2, query_length=1024, key_length=1024, heads=16, key_heads=16) | facts,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=np.dtype(jnp.bfloat16),
        bias_shape=None if bias is None else shape,
        bias_dtype=None if bias is None else np.dtype(bias),
        mask_shape=None,
        operands=frozenset({"query", "key", "value", *(() if bias is None else ("bias",))}),
        scale=0.1,
        query_offset=0,
    )


def backward_schedule(
    heads: int,
    key_heads: int,
    blocks: int,
    batch: int,
    processors: int | None,
    *,
    alike: bool = False,
    accumulated: int | None = None,
) -> BackwardSchedule:
    """Return the schedule of blocks that take the same time, or else of causal attention."""
    call = spec(64, 64, batch=batch, is_causal=not alike)
    return BackwardSchedule.of(call, heads, key_heads, blocks, processors, accumulated=accumulated)


def plan_fused(call: Spec, processors: int | None) -> FusedPlan:
    """Return the plan of the call's fused backward, which it must have."""
    fused = plan_backward(call, processors)[0].plan
    assert isinstance(fused, FusedPlan)
    return fused
