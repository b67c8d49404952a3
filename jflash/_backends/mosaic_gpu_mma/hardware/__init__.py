"""What the kernels ask of any NVIDIA GPU since Ampere."""

from jflash._backends.mosaic_gpu_mma.hardware import sums
from jflash._backends.mosaic_gpu_mma.hardware.copies import Part
from jflash._backends.mosaic_gpu_mma.hardware.ops import MMA, MmaOps
from jflash._backends.mosaic_gpu_mma.hardware.products import STEP, STEPS_OF_PIECES, Operand, Tiles, can_pair

__all__ = ["MMA", "STEP", "STEPS_OF_PIECES", "MmaOps", "Operand", "Part", "Tiles", "can_pair", "sums"]
