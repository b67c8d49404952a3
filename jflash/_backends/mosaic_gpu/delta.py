"""What the backward needs before its first tile, in one pass over the output and its cotangent.

    delta   = sum(dO * O) - d_lse
    columns = [-lse / scale, -delta]     each in three pieces, for those products that subtract both
    dq_acc  = 0                          where the fused backward begins to accumulate dQ

A CTA takes 64 queries of one head. Neighbours take other heads of the same queries: in device memory those are side by
side. The pass is bound by what it reads, and writes little beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import pipeline, row_statistics, smem
from jflash._backends.mosaic_gpu.array_shapes import block_shape, forward_in_panels, panel_dim, tile_dims
from jflash._backends.mosaic_gpu.bf16_columns import STORED_COLUMNS
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.panels import panel
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.prepare import MARGIN
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._semantics.spec import Residuals, Spec


def delta(
    spec: Spec, residuals: Residuals, ops: WarpgroupOps, *, as_columns: bool, dq_acc: jax.ShapeDtypeStruct | None
) -> dict[str, Array]:
    """Launch the kernel; delta `[B, N, T]`, 0 for queries that see nothing.

    Also zeros, if `dq_acc` are wanted, and `as_columns` the row statistics of a fused backward, `[B, N, L, 8]`.
    """
    out, lse, d_out, d_lse = residuals
    batch, length, heads, value_dim = out.shape
    rows = round_up(length, WARPGROUP_ROWS)
    # Tiles may begin at the last query: what they read behind it is written too.
    stored_rows = rows + MARGIN if as_columns else rows
    _, width = tile_dims(spec)
    part = next(columns for columns in (64, 32, 16) if width % columns == 0)
    factors = dict(out=out, d_out=d_out)
    shape, panels = (WARPGROUP_ROWS, width), forward_in_panels(spec)
    is_whole = panel_dim(value_dim) == value_dim if panels else block_shape(out.shape) == out.shape
    tile = functools.partial(smem.tile, shape, out.dtype, value_dim, chunk=part, in_panels=panels)
    tiles = [tile() for _ in factors] if is_whole else []
    if not tiles or not smem.fits(tiles):
        # Cheaper than padded copies of both. Of float32 some heads that other kernels serve have no room here.
        products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
        factors, tiles, d_lse = {}, [], d_lse - products.sum(axis=-1).transpose(0, 2, 1)
    results = dict(delta=jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32))
    if as_columns:
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
    made = launch.run(lambda refs: _kernel(spec, ops, part, refs), arrays, ops)
    return made | dict(delta=made["delta"][:, :, :length])


def _kernel(spec: Spec, ops: WarpgroupOps, part: int, refs: Refs) -> None:
    arrays, results, shared = refs
    b, block, head = (lax.axis_index(name) for name in ("batch", "block", "head"))
    own = pl.ds(block * WARPGROUP_ROWS, WARPGROUP_ROWS)
    rows = results["delta"].shape[2]

    @pl.when(block * WARPGROUP_ROWS < rows)
    def _() -> None:
        # There are no buffers where the products were summed before.
        for name, buffer in zip(("out", "d_out"), shared.factors, strict=False):
            values = pipeline.columns(buffer.shape[1], arrays[name], b)
            pipeline.copy_in(arrays[name].at[b, own, head, values], buffer, shared.full)
        if "dq_acc" in results:
            _zero(results["dq_acc"], own, ops)
        lse, d_lse = (ops.load(arrays[name].at[b, head, own], 0) for name in ("lse", "d_lse"))
        products = _products(shared, part, ops)
        delta = jnp.where(lse == -jnp.inf, 0.0, products.sum(axis=1) - d_lse)
        results["delta"][b, head, own] = delta
        if "columns" in results:
            results["columns"][b, head, own] = row_statistics.columns(spec, lse, delta, ops)

    if "columns" in results:

        @pl.when(block * WARPGROUP_ROWS >= rows)
        def _() -> None:
            nothing = ops.full((WARPGROUP_ROWS,), -jnp.inf), ops.full((WARPGROUP_ROWS,), 0)
            results["columns"][b, head, own] = row_statistics.columns(spec, *nothing, ops)


def _zero(acc: Ref, rows: Any, ops: WarpgroupOps) -> None:
    """Each head's CTAs zero one accumulator, as far as there are as many."""
    zeros = ops.zeros_strided((WARPGROUP_ROWS, acc.shape[2]))
    place = lax.axis_index("batch") * lax.axis_size("head") + lax.axis_index("head")

    @pl.when(place < acc.shape[0])
    def _() -> None:
        acc[place, rows] = zeros


def _products(shared: Buffers, part: int, ops: WarpgroupOps) -> Float[Array, "rows part"]:
    """dO * O, summed over the parts of the columns."""

    def multiplied(index: Any, total: Array) -> Array:
        first = pl.multiple_of(index * part, part)
        left, right = (ops.load(panel(tile, first, part)).astype(jnp.float32) for tile in shared.factors)
        return total + left * right

    total = ops.full((WARPGROUP_ROWS, part), 0)
    if shared.factors:
        plgpu.barrier_wait(shared.full)
        total = lax.fori_loop(0, shared.factors[0].shape[1] // part, multiplied, total)
    return total
