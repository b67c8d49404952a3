"""What the kernels ask of a GPU: shared memory, and a warpgroup's operations."""

from jflash._backends.mosaic_gpu.hardware.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.mosaic_gpu.hardware.warpgroup import HOPPER, Ref, WarpgroupOps, along_columns, along_rows, rounded

__all__ = ["HOPPER", "WARPGROUP_ROWS", "Buffers", "Ref", "WarpgroupOps"]
__all__ += ["along_columns", "along_rows", "round_up", "rounded"]
