"""The online softmax of logits that are products, scaled and capped.

Where all of a tile's logits are small, their exponentials fit P's dtype relative to what m was before, and the search
for the row's maximum is left out.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.exponent import LOG2_E
from jflash._backends.mosaic_gpu.hardware.soft_cap import SoftCap
from jflash._backends.mosaic_gpu.hardware.warpgroup import along_rows
from jflash._backends.mosaic_gpu.inputs.tile_mask import TileMask
from jflash._backends.mosaic_gpu.online_softmax import Softmax, finite_or_zero

_SMALL = {jnp.dtype(jnp.bfloat16): 30.0, jnp.dtype(jnp.float16): 13.0}
"""The largest binary exponents that P, in its dtype, has room for relative to a logit of 0.

float32 then has room for the sums of values whose magnitudes add up to no more than 2**97.
"""


def step(s: Float[Array, "rows keys"], mask: TileMask, before: Softmax | None, dtype: Any) -> Softmax:
    """Show the rows a tile's products; exponents are in base 2."""
    inputs, shape = mask.inputs, s.shape
    ops, is_partial = inputs.ops, mask.is_partial
    scale, cap = inputs.spec.scale, inputs.spec.logits_soft_cap
    scale = inputs.value("scale", mask.at.batch) if scale is None else scale
    assert scale is not None
    assert cap is not None
    soft_cap, numbers = SoftCap.of(s, scale, cap, factor=LOG2_E, most=_SMALL[dtype])
    zeros, ones = ops.full(shape[:1], 0.0), ops.full(shape[:1], 1.0)
    # Relative to an m below 0 a small logit might weigh too much.
    kept = zeros if before is None else before.m
    are_small = ops.warp_all_below(numbers, soft_cap.limit)
    if before is not None:
        are_small &= ops.warp_all(kept >= 0)

    def of_small(numbers: Array) -> Array:
        exponents = soft_cap.of_small(numbers)
        return exponents if before is None else exponents - along_rows(kept, shape)

    def small(numbers: Array) -> tuple[Array, Array, Array]:
        return mask.hide(of_small(numbers), -jnp.inf), kept, ones

    def any_size(numbers: Array) -> tuple[Array, Array, Array]:
        logits = mask.hide(soft_cap.of_any(numbers), -jnp.inf)
        largest, rescale = logits.max(axis=1), ones
        if before is not None:
            is_empty = before.l == 0
            largest = jnp.maximum(largest, jnp.where(is_empty, -jnp.inf, kept))
            rescale = jnp.where(is_empty, 1.0, jnp.exp2(kept - largest))
        m = finite_or_zero(largest)
        return logits - along_rows(m, shape), m, rescale

    def exponentiate(exponents: Array) -> tuple[Array, Array]:
        p = jnp.exp2(exponents)
        return p.astype(dtype), p.sum(axis=1)

    def all_small_and_seen(numbers: Array) -> tuple[Array, ...]:
        # One basic block, in which exponentials are made beside the polynomials.
        return *exponentiate(mask.hide_by_dense_mask(of_small(numbers), -jnp.inf)), kept, ones

    def others(numbers: Array) -> tuple[Array, ...]:
        if is_partial is None:
            exponents, *rest = any_size(numbers)
        else:
            exponents, *rest = lax.cond(are_small, small, any_size, numbers)
        results = *exponentiate(exponents), *rest
        ops.prevent_tail_merge()
        return results

    all_seen = True if is_partial is None else ~is_partial
    p, l, m, rescale = lax.cond(are_small & all_seen, all_small_and_seen, others, numbers)
    if before is not None:
        l = before.l * rescale + l
    return Softmax(p, m, l, rescale)
