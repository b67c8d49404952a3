"""A call's arrays in the forms that Hopper's backward kernels take."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import delta, whole_tiles
from jflash._backends.mosaic_gpu.array_shapes import in_panels
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.nvidia.prepared import PreparedBackward


class HopperBackward(PreparedBackward):
    """What Hopper's backward kernels read."""

    _row_sums: dict[str, Array] | None = None

    @functools.cached_property
    def tiles(self) -> dict[str, Float[Array, "B L N columns"]]:
        """Query, key, value and d_out in whole tiles, by name."""
        panels = in_panels(self.spec)
        whole = functools.partial(whole_tiles.whole_tiles, self.spec, in_panels=panels)
        return {name: whole(name, array) for name, array in self.factors.items()}

    @functools.cached_property
    def edges(self) -> dict[str, Array]:
        """The rows of each array with lengths in which padding begins, by name."""
        return whole_tiles.edges(self.operands, self.tiles)

    @property
    def around_queries(self) -> dict[str, Array]:
        """What kernels read besides tiles and row statistics if rows are queries, by name."""
        return self.others | self.packed_mask() | self.edges

    @property
    def around_keys(self) -> dict[str, Array]:
        """What kernels read besides tiles and row statistics if rows are keys, by name."""
        return self.others | self.packed_mask(keys_first=True) | self.edges

    def row_sums(self, *, as_columns: bool = False, dq_acc: jax.ShapeDtypeStruct | None = None) -> dict[str, Array]:
        """Return what one pass over O and dO makes, `delta.delta`: for the first kernel that asks, as it asks."""
        if self._row_sums is None:
            ops = self.ops
            assert isinstance(ops, WarpgroupOps)
            self._row_sums = delta.delta(self.spec, self.residuals, ops, as_columns=as_columns, dq_acc=dq_acc)
        return self._row_sums

    @functools.cached_property
    def delta(self) -> Float[Array, "B N T"]:
        """delta of every row."""
        return self.row_sums()["delta"]
