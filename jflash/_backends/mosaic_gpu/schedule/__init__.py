"""Which CTA visits which tiles, and in which order."""

from jflash._backends.mosaic_gpu.schedule.backward_schedule import BackwardSchedule, WorkItem
from jflash._backends.mosaic_gpu.schedule.dbias_schedule import DbiasSchedule
from jflash._backends.mosaic_gpu.schedule.forward_schedule import ForwardSchedule
from jflash._backends.mosaic_gpu.schedule.query_tiles import QueryProducer, TileOrder
from jflash._backends.mosaic_gpu.schedule.tile_range import TileMask, TileRange
from jflash._backends.mosaic_gpu.schedule.tiles import DqTiles, FusedTiles, RowTiles, ShortTiles, WalkedTiles, WideTiles

__all__ = ["BackwardSchedule", "DbiasSchedule", "DqTiles", "ForwardSchedule", "FusedTiles"]
__all__ += ["QueryProducer", "RowTiles", "ShortTiles", "TileMask", "TileOrder", "TileRange", "WalkedTiles"]
__all__ += ["WideTiles", "WorkItem"]
