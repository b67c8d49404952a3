"""The row statistics that the backward takes from a query's products: lse from S, and delta from dP.

Where queries are a tile's columns, every thread needs those of a quarter of them. The fused backward subtracts them
while products are made, in one of two ways:

Columns: the matrix unit subtracts them, as three more columns of each product.

    S^T - lse / scale = [K, 1, 1, 1] [Q, -high, -middle, -low]^T      lse / scale = high + middle + low, in bfloat16

Vectors, where tiles of a bias leave no room for that, or a logit is more than a product times the scale: every thread
reads them from shared memory, and accumulators begin there instead of at 0. With dropout, which comes between dP and
delta, delta is subtracted after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import bf16_columns, piece_products
from jflash._backends.mosaic_gpu.bf16_columns import PIECES, SMEM_COLUMNS, STORED_COLUMNS
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.nvidia import bias_and_mask
from jflash._backends.nvidia.ops import Ref, along_columns, along_rows
from jflash._backends.nvidia.prepare import with_margin
from jflash._backends.nvidia.prepared import for_exponent
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import base2, operand_pieces
from jflash._backends.nvidia.tile.inputs import KernelInputs
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._semantics.spec import Spec


def as_columns(spec: Spec) -> bool:
    """Whether the fused backward takes a call's row statistics as columns."""
    return base2.is_plain(spec) and not bias_and_mask.has_bias_tiles(spec) and spec.dropout_rate == 0


def begin_at_vectors(spec: Spec) -> tuple[bool, bool]:
    """Whether the accumulators of S and of dP begin at a call's vectors, where it has no columns."""
    return base2.is_plain(spec), spec.dropout_rate == 0


def early(spec: Spec) -> int:
    """How many of its vectors the fused backward needs before its first product: both, if both accumulators begin at
    one."""
    return 2 if all(begin_at_vectors(spec)) else 1


def for_fused(
    spec: Spec, lse: Float[Array, "B N T"], delta: Float[Array, "B N T"], columns: Array | None
) -> dict[str, Array]:
    """For the fused backward, by name: columns, if it has any; else where its accumulators begin, of which that of S is
    lse itself in a call that is not plain."""
    if columns is not None:
        return dict(columns=columns, ones=ones())
    if base2.is_plain(spec):
        assert spec.scale is not None
        first = with_margin(-lse / spec.scale, (2,), -jnp.inf)
    else:
        first = for_exponent(spec, lse)
    return dict(lse=first, delta=with_margin(-delta, (2,)))


def columns(
    spec: Spec, lse: Float[Array, "rows"], delta: Float[Array, "rows"], ops: WarpgroupOps
) -> Float[Array, "rows 8"]:
    """Some queries' columns, made in a kernel. `lse` is -inf where there is no query or it sees nothing."""
    assert spec.scale is not None
    # Infinity times 0, for the other product, would be NaN.
    least = -float(jnp.finfo(jnp.bfloat16).max)
    first = jnp.where(lse == -jnp.inf, least, jnp.maximum(lse * (-1 / spec.scale), least))
    index = ops.iota((lse.shape[0], STORED_COLUMNS), 1)
    made = ops.full(index.shape, 0)
    pieces = operand_pieces.split_numbers(first, ops.rounded) + operand_pieces.split_numbers(-delta, ops.rounded)
    for column, piece in enumerate(pieces):
        made = jnp.where(index == column, along_rows(piece, index.shape), made)
    return made.astype(jnp.bfloat16)


def ones() -> Float[Array, "2 64 16"]:
    """What columns are multiplied with: 1 for the pieces of lse, and of delta."""
    # By operations: `custom_partitioning` takes no function that closes over an array.
    number, column = (lax.broadcasted_iota(jnp.int32, (2, WARPGROUP_ROWS, SMEM_COLUMNS), axis) for axis in (0, 2))
    return (lax.div(column, PIECES) == number).astype(jnp.bfloat16)


def in_device_memory(inputs: KernelInputs, batch: Any, head: Any, rows: Any) -> list[Ref]:
    """Some queries' columns, or their lse and delta, in device memory."""
    if "columns" in inputs.refs:
        return [bf16_columns.of_rows(inputs.refs["columns"].at[batch, head], rows, batch)]
    return [inputs.refs[name].at[batch, head, rows] for name in ("lse", "delta")]


class RowStatistics:
    """A tile's, in shared memory, when its columns, or its first vector, have arrived."""

    def __init__(self, inputs: KernelInputs, shape: tuple[int, int], refs: Sequence[Ref], ones: Ref | None) -> None:
        """`ones` are for columns."""
        self.inputs, self.shape, self.refs, self.ones = inputs, shape, refs, ones
        self.lse = None
        """If it is not subtracted before the exponent."""
        if not base2.is_plain(inputs.spec):
            self.lse = along_columns(inputs.ops.load(refs[0], 1), shape)

    def begin(self, *accumulators: Any) -> None:
        """Before the first product: set those of the accumulators of S and dP that begin at a vector, if it is there.

        If dP's were set after S was issued, ptxas would wait for S first.
        """
        if self.ones is None:
            for number, accumulator in enumerate(accumulators[: early(self.inputs.spec)]):
                self._begin(accumulator, number)

    def issued(self, b: Pieces) -> int:
        """How many products `mma` issues."""
        return piece_products.issued(b) + (self.ones is not None)

    def mma(self, accumulator: Any, a: Pieces, b: Pieces, number: int) -> None:
        """Issue a @ b less lse / scale (number 0; of a plain call) or less delta (1; without dropout)."""
        ops = self.inputs.ops
        assert isinstance(ops, WarpgroupOps)
        if self.ones is None and number >= early(self.inputs.spec):
            self._begin(accumulator, number)
        piece_products.mma(accumulator, a, b, ops)
        if self.ones is not None:
            ops.mma(accumulator, self.ones.at[number], self.refs[0].T)

    def _begin(self, accumulator: Any, number: int) -> None:
        if begin_at_vectors(self.inputs.spec)[number]:
            accumulator[...] = along_columns(self.inputs.ops.load(self.refs[number], 1), self.shape)

    def delta(self) -> Float[Array, "keys queries"] | None:
        """delta, unless the products subtract it: with dropout, which stands between dP and delta."""
        if self.inputs.spec.dropout_rate == 0:
            return None
        return -along_columns(self.inputs.ops.load(self.refs[1], 1), self.shape)
