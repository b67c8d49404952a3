"""Plans: from the Spec and the device's number of multiprocessors to kernels, tiles and schedules, before any array."""

from jflash._backends.mosaic_gpu.plan.backward import BackwardPlan, plan_backward
from jflash._backends.mosaic_gpu.plan.describe import describe
from jflash._backends.mosaic_gpu.plan.forward import plan_forward

__all__ = ["BackwardPlan", "describe", "plan_backward", "plan_forward"]
