"""What the backward needs before its first tile, in one pass over the output and its cotangent.

    delta   = sum(dO * O) - d_lse
    columns = [-lse / scale, -delta]     each in three pieces, for those products that take both off
    sums    = 0                          of dQ, where the fused backward begins to add

A block takes 64 queries of one head. Neighbours take other heads of the same queries: in device memory those are side
by side. The pass is bound by what it reads, and writes little beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import statistics, tiles
from jflash._backends.mosaic_gpu.operations import Operations, Ref
from jflash._backends.mosaic_gpu.tiles import ROWS
from jflash._semantics.spec import Residuals, Spec


class Delta(NamedTuple):
    """What the kernel makes."""

    delta: Float[Array, "B N T"]
    """0 for queries that see nothing."""
    columns: Float[Array, "B N L 8"] | None
    """Of `statistics`."""
    sums: Float[Array, "places L H"] | None
    """Zeros."""


def delta(spec: Spec, residuals: Residuals, sums: jax.ShapeDtypeStruct | None, operations: Operations) -> Delta:
    """The kernel's call, for the fused backward with its `sums`, and columns if it takes any."""
    out, lse, d_out, d_lse = residuals
    factors = [out, d_out]
    if tiles.whole(out.shape) != out.shape:
        # Rather than copies of both with more rows or columns.
        products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
        factors, d_lse = [], d_lse - products.sum(axis=-1).transpose(0, 2, 1)
    as_columns = sums is not None and statistics.are_columns(spec)
    batch, length, heads, value_dim = out.shape
    whole = tiles.round_up(length, ROWS)
    # Tiles may begin at the last query: what they read behind it is written too.
    blocks = (statistics.stored_rows(length) if as_columns else whole) // ROWS
    width = tiles.round_up(value_dim, 16)
    part = next(columns for columns in (64, 32, 16) if width % columns == 0)
    room = [(0, 0), (0, 0), (0, whole - length)]
    lse, d_lse = jnp.pad(lse, room, constant_values=-jnp.inf), jnp.pad(d_lse, room)

    def kernel(lse_ref: Ref, d_lse_ref: Ref, *refs: Any) -> None:
        factor_refs, (delta_ref, *more_refs, own_factors, filled) = refs[: len(factors)], refs[len(factors) :]
        b, block, head = (lax.axis_index(name) for name in ("batch", "block", "head"))
        own = pl.ds(block * ROWS, ROWS)

        def multiplied(index: Any, total: Array) -> Array:
            columns = pl.ds(pl.multiple_of(index * part, part), part)
            left, right = (operations.load(ref.at[:, columns]).astype(jnp.float32) for ref in own_factors)
            return total + left * right

        @pl.when(block * ROWS < whole)
        def _() -> None:
            values = tiles.columns(width, value_dim, b)
            for ref, own_factor in zip(factor_refs, own_factors, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[b, own, head, values], own_factor, filled)
            if sums is not None:
                zeros, place = operations.zero_rows((ROWS, sums.shape[2])), b * heads + head

                @pl.when(place < sums.shape[0])
                def _() -> None:
                    more_refs[-1][place, own] = zeros

            row_lse, row_d_lse = (operations.load(ref.at[b, head, own], 0) for ref in (lse_ref, d_lse_ref))
            total = operations.full((ROWS, part), 0)
            if factors:
                plgpu.barrier_wait(filled)
                total = lax.fori_loop(0, width // part, multiplied, total)
            row_delta = jnp.where(row_lse == -jnp.inf, 0.0, total.sum(axis=1) - row_d_lse)
            delta_ref[b, head, own] = row_delta
            if as_columns:
                more_refs[0][b, head, own] = statistics.columns(spec, row_lse, row_delta, operations)

        if as_columns:

            @pl.when(block * ROWS >= whole)
            def _() -> None:
                nothing = operations.full((ROWS,), -jnp.inf), operations.full((ROWS,), 0)
                more_refs[0][b, head, own] = statistics.columns(spec, *nothing, operations)

    kernel.__name__ = f"jflash_delta_{value_dim}"
    columns = jax.ShapeDtypeStruct((batch, heads, blocks * ROWS, statistics.STORED), jnp.bfloat16)
    first, *more = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, whole), jnp.float32),
            *([columns] if as_columns else []),
            *([] if sums is None else [sums]),
        ),
        grid=(batch, blocks, heads),
        grid_names=("batch", "block", "head"),
        scratch_types=[
            [tiles.shared((ROWS, width), out.dtype, value_dim, part=part) for _ in factors],
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=tiles.COMPILER,
        interpret=operations.interpret,
    )(lse, d_lse, *factors)
    return Delta(first[:, :, :length], more[0] if as_columns else None, None if sums is None else more[-1])
