"""What the kernels read of a call: how its operands are prepared, and how a tile's are loaded."""

from jflash._backends.mosaic_gpu.inputs.kernel_inputs import GmemTile, KernelInputs, Loaded, TileCoord
from jflash._backends.mosaic_gpu.inputs.prepare import whole_dim, whole_dims

__all__ = ["GmemTile", "KernelInputs", "Loaded", "TileCoord", "whole_dim", "whole_dims"]
