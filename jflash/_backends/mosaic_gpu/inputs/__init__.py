"""What the kernels read of a call: how its operands are prepared, and how a tile's are loaded."""

from jflash._backends.mosaic_gpu.inputs.array_shapes import (
    block_dims,
    forward_in_panels,
    in_panels,
    panel_dim,
    tile_dims,
    values_in_panels,
    whole_dims,
    whole_rows,
)
from jflash._backends.mosaic_gpu.inputs.call_tiles import CallTiles
from jflash._backends.mosaic_gpu.inputs.kernel_inputs import GmemTile, KernelInputs, Loaded, TileCoord

__all__ = ["CallTiles", "GmemTile", "KernelInputs", "Loaded", "TileCoord", "block_dims", "forward_in_panels"]
__all__ += ["in_panels", "panel_dim", "tile_dims", "values_in_panels", "whole_dims", "whole_rows"]
