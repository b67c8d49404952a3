"""What Hopper's kernels copy of a call: tiles of queries, keys, values and dO, by the tensor memory accelerator."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from jflash._backends.mosaic_gpu import pipeline
from jflash._backends.mosaic_gpu.array_shapes import edge_row
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.prepared import LENGTHS
from jflash._backends.nvidia.tile.inputs import KernelInputs


class GmemTile(NamedTuple):
    """A tile of an array `[B, L, N, H]` in device memory."""

    batch: Int[Array, ""]
    first: Int[Array, ""]
    size: int
    head: Int[Array, ""]

    def of(self, ref: Ref, width: int, first_column: int = 0) -> Ref:
        """The tile's part of the array, in columns that fill a buffer of this width."""
        columns = pipeline.columns(width, ref, self.batch, first_column)
        return ref.at[self.batch, pl.ds(self.first, self.size), self.head, columns]


class TmaInputs(KernelInputs):
    """`KernelInputs` whose tiles are copied with zeros for padding."""

    def copy_rows(
        self, name: str, source: GmemTile, target: Ref, full: Ref, first_column: int = 0, cluster: str | None = None
    ) -> None:
        """Copy a tile of queries, keys, values or d_out to shared memory, with zeros for padding: 0 * NaN is NaN.
        `cluster` is as for `pipeline.copy_in`.

        A tile in which padding begins comes from the array's edge, past whose end copies read zeros.
        """
        edge = self.refs.get(f"{name}_edge")
        copy = lambda ref, tile: pipeline.copy_in(tile.of(ref, target.shape[-1], first_column), target, full, cluster)
        if edge is None:
            copy(self.refs[name], source)
            return
        length: Any = self.value(LENGTHS[name], source.batch)
        inside = source.first + source.size <= length
        pl.when(inside)(lambda: copy(self.refs[name], source))
        pl.when(~inside)(lambda: copy(edge, source._replace(first=source.first - edge_row(length))))
