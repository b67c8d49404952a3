"""The row statistics of the backward, lse and delta: one pass that makes them, and two ways to subtract them.

`row_sums` is one pass over the output and its cotangent.

    delta   = sum(dO * O) - d_lse
    columns = [-lse / scale, -delta]     each in three pieces, for those products that subtract both
    dq_acc  = 0                          where the fused backward begins to accumulate dQ

Where queries are a tile's columns, every thread needs the statistics of a quarter of them. The fused backward subtracts
them while products are made, in one of two ways:

Columns: the matrix unit subtracts them, as three more columns of each product.

    S^T - lse / scale = [K, 1, 1, 1] [Q, -high, -middle, -low]^T      lse / scale = high + middle + low, in bfloat16

Vectors, where tiles of a bias leave no room for that, or a logit is more than a product times the scale: every thread
reads them from shared memory, and accumulators begin there instead of at 0. With dropout, which comes between dP and
delta, delta is subtracted after it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import bf16_columns, piece_products, pipeline, smem
from jflash._backends.mosaic_gpu.array_shapes import block_shape, forward_in_panels, panel_dim, tile_dims
from jflash._backends.mosaic_gpu.bf16_columns import SMEM_COLUMNS, STORED_COLUMNS
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.panels import panel
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Launch, Refs, cta_index, grid_size
from jflash._backends.nvidia.ops import Ref, Rows, along_columns
from jflash._backends.nvidia.prepared import for_exponent, with_margin
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.threads.pieces import PIECES
from jflash._backends.nvidia.tile.inputs import KernelInputs
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._semantics.spec import Residuals, Spec


def as_columns(spec: Spec) -> bool:
    """Whether the fused backward takes a call's row statistics as columns."""
    return facts_of(spec).is_plain and not facts_of(spec).has_bias_tiles and spec.dropout_rate == 0


def begin_at_vectors(spec: Spec) -> tuple[bool, bool]:
    """Whether the accumulators of S and of dP begin at a call's vectors, where it has no columns."""
    return facts_of(spec).is_plain, spec.dropout_rate == 0


def early(spec: Spec) -> int:
    """How many vectors the fused backward needs before its first product: both, if both accumulators begin at one."""
    return 2 if all(begin_at_vectors(spec)) else 1


def for_fused(
    spec: Spec, lse: Float[Array, "B N T"], delta: Float[Array, "B N T"], columns: Array | None
) -> dict[str, Array]:
    """Return what the fused backward reads, by name: columns, if there are any, or where its accumulators begin."""
    if columns is not None:
        return dict(columns=columns, ones=ones())
    plain_scale = spec.scale if facts_of(spec).is_plain else None
    first = with_margin(-lse / plain_scale, (2,), -jnp.inf) if plain_scale else for_exponent(spec, lse)
    return dict(lse=first, delta=with_margin(-delta, (2,)))


def columns(spec: Spec, lse: Rows, delta: Rows, ops: WarpgroupOps) -> Float[Array, "rows 8"]:
    """Return some queries' columns, in a kernel. `lse` is -inf where there is no query or it sees nothing."""
    assert spec.scale is not None
    # Infinity times 0, for the other product, would be NaN.
    least = -float(jnp.finfo(jnp.bfloat16).max)
    first = jnp.where(lse == -jnp.inf, least, jnp.maximum(lse * (-1 / spec.scale), least))
    return ops.piece_columns((first, -delta), STORED_COLUMNS)


def ones() -> Float[Array, "2 64 16"]:
    """Return what columns are multiplied with: 1 for the pieces of lse, and of delta."""
    # By operations: `custom_partitioning` takes no function that closes over an array.
    number, column = (lax.broadcasted_iota(jnp.int32, (2, WARPGROUP_ROWS, SMEM_COLUMNS), axis) for axis in (0, 2))
    return (lax.div(column, PIECES) == number).astype(jnp.bfloat16)


def in_device_memory(inputs: KernelInputs, batch: Any, head: Any, rows: Any) -> list[Ref]:
    """Return references to some queries' columns, or to their lse and delta."""
    if "columns" in inputs.refs:
        return [bf16_columns.of_rows(inputs.refs["columns"].at[batch, head], rows, batch)]
    return [inputs.refs[name].at[batch, head, rows] for name in ("lse", "delta")]


class RowStatistics:
    """The statistics of a tile in shared memory, when its columns, or its first vector, have arrived."""

    def __init__(self, inputs: KernelInputs, shape: tuple[int, int], refs: Sequence[Ref], ones: Ref | None) -> None:
        """`ones` are for columns."""
        self.inputs, self.shape, self.refs, self.ones = inputs, shape, refs, ones
        self.lse = None if facts_of(inputs.spec).is_plain else self._along_columns(0)
        """lse, unless the products subtract it."""

    def _along_columns(self, number: int) -> Float[Array, "keys queries"]:
        return along_columns(self.inputs.ops.load(self.refs[number], 1), self.shape)

    def begin(self, *accumulators: Any) -> None:
        """Set those of the accumulators of S and dP that begin at a vector which is there before the first product.

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
            accumulator[...] = self._along_columns(number)

    def delta(self) -> Float[Array, "keys queries"] | None:
        """delta, unless the products subtract it: with dropout, which stands between dP and delta."""
        return None if self.inputs.spec.dropout_rate == 0 else -self._along_columns(1)


def row_sums(
    spec: Spec,
    residuals: Residuals,
    ops: WarpgroupOps,
    *,
    column_rows: int | None = None,
    dq_acc: jax.ShapeDtypeStruct | None = None,
) -> dict[str, Array]:
    """Return delta `[B, N, T]`, 0 for queries that see nothing, by name.

    With it come zeros `dq_acc`, and `columns` `[B, N, L, 8]` of at least `column_rows` rows, if the fused backward
    takes the statistics as columns.
    """
    out, lse, d_out, d_lse = residuals
    batch, length, heads, value_dim = out.shape
    rows = round_up(length, WARPGROUP_ROWS)
    # What tiles read behind the last query is written too.
    stored_rows = max(rows, round_up(column_rows or 0, WARPGROUP_ROWS))
    _, width = tile_dims(spec)
    chunk = next(columns for columns in (64, 32, 16) if width % columns == 0)
    factors, panels = dict(out=out, d_out=d_out), forward_in_panels(spec)
    is_whole = panel_dim(value_dim) == value_dim if panels else block_shape(out.shape) == out.shape
    tile = functools.partial(smem.tile, (WARPGROUP_ROWS, width), out.dtype, value_dim, chunk=chunk, in_panels=panels)
    tiles = [tile() for _ in factors] if is_whole else []
    if not tiles or not smem.fits(tiles):
        # Cheaper than padded copies of both. Of float32 some heads that other kernels serve have no room here.
        products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
        factors, tiles, d_lse = {}, [], d_lse - products.sum(axis=-1).transpose(0, 2, 1)
    results = dict(delta=jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32))
    if column_rows is not None:
        results["columns"] = jax.ShapeDtypeStruct((batch, heads, stored_rows, STORED_COLUMNS), jnp.bfloat16)
    if dq_acc is not None:
        results["dq_acc"] = dq_acc
    launch = Launch(
        name=f"jflash_delta_{value_dim}",
        grid=dict(batch=batch, block=stored_rows // WARPGROUP_ROWS, head=heads),
        results=results,
        smem=Buffers(factors=tiles, full=smem.barriers(1, arrivals=smem.copies(*tiles) or 1)),
    )
    room = [(0, 0), (0, 0), (0, rows - length)]
    arrays = dict(lse=jnp.pad(lse, room, constant_values=-jnp.inf), d_lse=jnp.pad(d_lse, room)) | factors
    made = launch.run(lambda refs: _kernel(spec, ops, chunk, refs), arrays, ops)
    return made | dict(delta=made["delta"][:, :, :length])


def _kernel(spec: Spec, ops: WarpgroupOps, chunk: int, refs: Refs) -> None:
    arrays, results, shared = refs
    b, block, head = (cta_index(name) for name in ("batch", "block", "head"))
    rows, length = pl.ds(block * WARPGROUP_ROWS, WARPGROUP_ROWS), results["delta"].shape[2]

    @pl.when(block * WARPGROUP_ROWS < length)
    def _() -> None:
        # There are no buffers where the products were summed before.
        for name, buffer in zip(("out", "d_out"), shared.factors, strict=False):
            values = pipeline.columns(buffer.shape[1], arrays[name], b)
            pipeline.copy_in(arrays[name].at[b, rows, head, values], buffer, shared.full)
        if "dq_acc" in results:
            _zero(results["dq_acc"], rows, ops)
        lse, d_lse = (ops.load(arrays[name].at[b, head, rows], 0) for name in ("lse", "d_lse"))
        products = _products(shared, chunk, ops)
        delta = jnp.where(lse == -jnp.inf, 0.0, products.sum(axis=1) - d_lse)
        results["delta"][b, head, rows] = delta
        if "columns" in results:
            results["columns"][b, head, rows] = columns(spec, lse, delta, ops)

    if "columns" in results and results["columns"].shape[2] > length:

        @pl.when(block * WARPGROUP_ROWS >= length)
        def _() -> None:
            nothing = ops.full((WARPGROUP_ROWS,), -jnp.inf), ops.full((WARPGROUP_ROWS,), 0)
            results["columns"][b, head, rows] = columns(spec, *nothing, ops)


def _zero(acc: Ref, rows: Any, ops: WarpgroupOps) -> None:
    """Zero rows of an accumulator: each head's CTAs have one, as far as there are as many."""
    zeros = ops.zeros_strided((WARPGROUP_ROWS, acc.shape[2]))
    place = cta_index("batch") * grid_size("head") + cta_index("head")

    @pl.when(place < acc.shape[0])
    def _() -> None:
        acc[place, rows] = zeros


def _products(shared: Buffers, chunk: int, ops: WarpgroupOps) -> Float[Array, "rows chunk"]:
    """Return dO * O, summed over chunks of the columns."""

    def multiplied(index: Any, total: Array) -> Array:
        first = pl.multiple_of(index * chunk, chunk)
        left, right = (ops.load(panel(tile, first, chunk)).astype(jnp.float32) for tile in shared.factors)
        return total + left * right

    total = ops.full((WARPGROUP_ROWS, chunk), 0)
    if shared.factors:
        plgpu.barrier_wait(shared.full)
        total = lax.fori_loop(0, shared.factors[0].shape[1] // chunk, multiplied, total)
    return total
