"""The two families of kernels in Pallas Mosaic GPU, and what tests ask of each."""

from __future__ import annotations

import functools
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from interpreter import Interpreter
from mma_interpreter import MmaInterpreter

from jflash._backends import mosaic_gpu, mosaic_gpu_mma
from jflash._backends.mosaic_gpu import plan as hopper_plan
from jflash._backends.mosaic_gpu import run as hopper_call
from jflash._backends.mosaic_gpu.ops import HOPPER as HOPPER_OPS
from jflash._backends.mosaic_gpu_mma import plan as mma_plan
from jflash._backends.mosaic_gpu_mma import run as mma_call
from jflash._backends.mosaic_gpu_mma.cta import MMA as MMA_OPS
from jflash._backends.nvidia.launch import Kernel
from jflash._platform import Platform
from jflash._semantics.spec import Spec


def plan_of[Plan](kernels: Sequence[Kernel[Any]], kind: type[Plan]) -> Plan | None:
    """The plan of this very kind among those of a backward's kernels, if there is one."""
    return next((kernel.plan for kernel in kernels if type(kernel.plan) is kind), None)


class Family(NamedTuple):
    """A backend, and a call of it on hardware or in the interpreter."""

    backend: Any
    call: Any
    """`forward(plan, operands, ops)`, and likewise `backward`."""
    plans: Callable[[Spec, int], tuple[Any, Any]]
    """A call's forward and backward plans for a device with this number of multiprocessors."""
    ops: Any
    interpreter: Callable[[Any], Any]
    unsupported: Callable[[Spec], str | None]
    """Why a call cannot be served where these plans are made; `None` if it can."""


HOPPER = Family(
    backend=mosaic_gpu,
    call=hopper_call,
    plans=lambda spec, processors: (
        hopper_plan.plan_forward(spec, processors),
        hopper_plan.plan_backward(spec, processors),
    ),
    ops=HOPPER_OPS,
    interpreter=Interpreter,
    unsupported=mosaic_gpu.unsupported_call,
)


def _without_fused(spec: Spec, processors: int) -> tuple[Any, Any]:
    with unittest.mock.patch.object(hopper_plan, "_plan_fused", return_value=None):
        return HOPPER.plans(spec, processors)


TWO_KERNELS = HOPPER._replace(plans=_without_fused)
"""Hopper's kernels where the fused backward does not serve a call, as where dQ has no order. With deterministic=True
those of dQ and of dK and dV take its place, in each of which every sum has an owner."""


def mma(compute_capability: str) -> Family:
    """The kernels by `mma.sync`, as they are planned for GPUs of a compute capability."""

    platform = functools.partial(Platform, "gpu", "some GPU", compute_capability)

    def plans(spec: Spec, processors: int) -> tuple[Any, Any]:
        on = platform(processors)
        return mma_plan.plan_forward(spec, on), mma_plan.plan_backward(spec, on)

    unsupported = lambda spec: mosaic_gpu_mma.unsupported(spec, platform(None))
    return Family(mosaic_gpu_mma, mma_call, plans, MMA_OPS, MmaInterpreter, unsupported)
