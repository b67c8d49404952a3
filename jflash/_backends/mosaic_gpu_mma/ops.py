"""What a warpgroup does with its tiles where there is no `wgmma`: Hopper's operations, but for products and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflash._backends.mosaic_gpu_mma import copies, device_sums, products
from jflash._backends.mosaic_gpu_mma.copies import Part
from jflash._backends.mosaic_gpu_mma.device_sums import Sums
from jflash._backends.mosaic_gpu_mma.products import Operand, Tiles
from jflash._backends.nvidia.ops import Ref, WarpgroupOps
from jflash._backends.nvidia.threads import indices


class MmaOps(WarpgroupOps, Protocol):
    """The operations of a warpgroup that is a CTA, by instructions that every GPU since Ampere has.

    Tiles of logits have the layout of Hopper's, so that what Hopper's operations do with them is the same.
    """

    def indices(self, shape: tuple[int, ...], axis: int, first: Any) -> Int[Array, "64 columns"]:
        """Each element's index along `axis`, counted from `first` on."""
        return indices.make(shape, axis, jnp.int32(first))

    def add_product(
        self,
        acc: Tiles,
        a: Operand,
        b: Ref,
        order: Sequence[tuple[int, int]],
        *,
        transposed: bool,
        first_row: Any = None,
        a_transposed: bool = False,
        steps: Sequence[int] | None = None,
        first_column: int = 0,
    ) -> Tiles:
        """acc + a @ b, or with `transposed` acc + a @ b.T, of blocks of 64 rows: `a` in registers or shared memory, and
        of those pieces of both that `order` has.

        b's rows count from `first_row` on, and its columns from `first_column`. With `a_transposed` it is a.T @ b, and
        `a` in shared memory. Of the steps of 16 in K only those of `steps` may be taken, whose columns in registers
        may be the only ones.
        """
        options: dict[str, Any] = dict(transposed=transposed, a_transposed=a_transposed, first_row=first_row)
        return products.add_product(acc, a, b, order, steps=steps, first_column=first_column, **options)

    def add_pair_product(
        self,
        acc: Tiles,
        a: Operand,
        b: Ref,
        *,
        a_transposed: bool = False,
        steps: Sequence[int] | None = None,
        first_column: int = 0,
    ) -> Tiles:
        """acc + a @ b, or a.T @ b, for a pair of blocks (`products`): of 64 rows, and each of half of the columns, or
        of some from `first_column` on of each half; and of one piece."""
        options: dict[str, Any] = dict(transposed=False, a_transposed=a_transposed, paired=True)
        return products.add_product(acc, a, b, [(0, 0)], steps=steps, first_column=first_column, **options)

    def load_rows(
        self, ref: Ref, *, columns: int | None = None, transposed: bool = False, paired: bool = False
    ) -> tuple[Tiles, ...]:
        """Rows in shared memory, or of its transpose, in registers: of each piece blocks of 64, or a pair, or their
        first columns."""
        return products.load_rows(ref, columns=columns, transposed=transposed, paired=paired)

    def scaled_pair(self, pair: Tiles, factors: Ref) -> Tiles:
        """A pair of blocks, each row times its own of 64 numbers in shared memory."""
        return products.scaled_pair(pair, factors)

    def copy_rows(self, source: Ref, target: Ref, first: Any, limit: Any, part: Part | None = None) -> None:
        """Begin to copy rows of `[L, H]`, from `first` on, or a part of their columns, to shared memory.

        In the place of rows from `limit` on come zeros. Pieces, which lie side by side in rows, are tiles there,
        `[pieces, rows, columns]`.
        """
        copies.copy_rows(source, target, first, limit, part)

    def copy_numbers(self, source: Ref, target: Ref, first: Any) -> None:
        """Begin to copy float32 numbers of `[L]`, from `first` on, to shared memory: as many as `target` has."""
        copies.copy_numbers(source, target, first)

    def commit(self) -> None:
        """Make a group of the copies that began since the last one."""
        copies.commit()

    def wait(self, pending: int = 0, *, warpgroups: int = 1) -> None:
        """Wait until all copies but those of the last `pending` groups have arrived, and all threads are here."""
        copies.wait(pending, warpgroups)

    def meet(self, warpgroups: int) -> None:
        """Wait until all threads of the CTA, which has `warpgroups`, are here, and see what they stored."""
        copies.meet(warpgroups)

    def store_tile(self, values: Tiles, target: Ref, first_column: Any) -> None:
        """Store blocks of rows in a tile of shared memory, `[rows, M]`, from a column on."""
        copies.store_tile(values, target, first_column)

    def store_rows(
        self, values: Float[Array, "64 D"], target: Ref, first: Any, limit: Any, part: Part | None = None
    ) -> None:
        """Store rows, or a part of their columns, in `[L, D]`, in the array's dtype: from `first` to below `limit`."""
        copies.store_rows(values.astype(target.dtype), target, first, limit, part)

    def store_pair(self, pair: Tiles, target: Ref, first: Any, limit: Any, part: Part | None = None) -> None:
        """Store rows, or a part of their columns, of which a pair of blocks has each half, likewise."""
        for number, values in enumerate(pair):
            copies.store_rows(values.astype(target.dtype), target, first, limit, part, number)

    def add_rows(self, values: Float[Array, "64 columns"], target: Sums, row: Any, column: Any, together: int) -> None:
        """Add rows to sums in device memory, from a row and a column on."""
        device_sums.add_rows(values, target, row, column, together)

    def add_pair(self, pair: Tiles, target: Sums, row: Any, column: Any, together: int, half: int) -> None:
        """Add a pair of blocks, or some columns of one whose blocks have `half` of all, likewise."""
        for number, values in enumerate(pair):
            device_sums.add_rows(values, target, row, column, together, number, half)

    def load_sums(self, source: Sums, row: Any, columns: int, together: int) -> Float[Array, "64 columns"]:
        """Rows of sums in device memory, from a row on."""
        return device_sums.load_rows(source, row, columns, together)

    def load_device_rows(
        self, source: Ref, first: Any, limit: Any, pieces: int, column: int, width: int
    ) -> tuple[Tiles, ...]:
        """64 rows of `[L, H]` in device memory from `first` on in registers, of each piece `width` columns from
        `column` on; zeros for rows from `limit` on, which is at most L, and for columns past H."""
        return copies.load_device_rows(source, first, limit, pieces, column, width)

    def load_tile(self, source: Ref, row: Any, column: Any, shape: tuple[int, int], *, transposed: bool) -> Array:
        """A tile of `[L, M]` in device memory, or its transpose, 0 past the array's ends."""
        return copies.load_tile(source, row, column, shape, transposed=transposed)


class _Mma(MmaOps):
    interpret = None
    margin = 0


MMA: MmaOps = _Mma()
