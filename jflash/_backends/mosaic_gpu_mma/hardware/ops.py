"""What a warpgroup does with its tiles where there is no `wgmma`: Hopper's operations, but for products and copies."""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.hardware import Ref, WarpgroupOps
from jflash._backends.mosaic_gpu_mma.hardware import copies, products
from jflash._backends.mosaic_gpu_mma.hardware.products import Tiles


class MmaOps(WarpgroupOps, Protocol):
    """The operations of a warpgroup that is a CTA, by instructions that every GPU since Ampere has.

    Tiles of logits have the layout of Hopper's, so that what Hopper's operations do with them is the same.
    """

    def add_product(self, acc: Tiles, a: Tiles | Ref, b: Ref, *, transposed: bool) -> Tiles:
        """acc + a @ b, or with `transposed` acc + a @ b.T, of blocks of 64 rows: `a` in registers or shared memory."""
        return products.add_product(acc, a, b, transposed=transposed)

    def load_rows(self, ref: Ref) -> Tiles:
        """Rows in shared memory as blocks of 64 in registers."""
        return products.load_rows(ref)

    def copy_rows(self, source: Ref, target: Ref, first: Any, limit: Any) -> None:
        """Begin to copy rows of `[L, H]`, from `first` on, to shared memory; zeros for those from `limit` on."""
        copies.copy_rows(source, target, first, limit)

    def commit(self) -> None:
        """Make a group of the copies that began since the last one."""
        copies.commit()

    def wait(self, pending: int = 0) -> None:
        """Wait until all copies but those of the last `pending` groups have arrived, and all threads are here."""
        copies.wait(pending)

    def store_rows(self, values: Float[Array, "64 D"], target: Ref, first: Any, limit: Any) -> None:
        """Store rows in `[L, D]`, from `first` on, as far as they are below `limit`, in the array's dtype."""
        copies.store_rows(values.astype(target.dtype), target, first, limit)

    def load_tile(self, source: Ref, row: Any, column: Any, shape: tuple[int, int], *, transposed: bool) -> Array:
        """A tile of `[L, M]` in device memory, or its transpose, 0 past the array's ends."""
        return copies.load_tile(source, row, column, shape, transposed=transposed)


class _Mma(MmaOps):
    interpret = None
    margin = 0


MMA: MmaOps = _Mma()
