"""The online softmax of a tile's rows, in the forward.

Source: FlashAttention-2, arXiv:2307.08691, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jflash._backends.mosaic_gpu.elementwise import SoftCap
from jflash._backends.mosaic_gpu.inputs import Exponent, Inputs, is_capped
from jflash._backends.mosaic_gpu.operations import along_rows

_LOG2_E = math.log2(math.e)

_SMALL = {jnp.dtype(jnp.bfloat16): 30.0, jnp.dtype(jnp.float16): 13.0}
"""Weights relative to a logit of 0 whose binary exponents are no further from it need nothing else to be relative to.

P, in its dtype, has room for them, and float32 for the sums of values whose sizes add up to no more than 2**97.
"""


class Softmax(NamedTuple):
    """P of the last tile, and what P is relative to."""

    weights: Float[Array, "rows keys"]
    reference: Float[Array, "rows"]
    """The largest logit so far, as `_exponent` takes it; with a soft cap sometimes 0, and never -inf."""
    total: Float[Array, "rows"]
    correction: Float[Array, "rows"]
    """From the sums before the last tile to those after it."""


class Hidden(NamedTuple):
    """What rows do not see of a tile."""

    is_partial: Bool[Array, ""] | None
    """Whether more than a dense mask hides some of it; `None` if it never does."""
    by_mask: Callable[[Array], Array]
    """Logits, -inf where a dense mask, if there is one, hides them."""
    hide: Callable[[Array], Array]
    """Logits, -inf where anything does."""


def step(
    call: Inputs, numbers: Float[Array, "rows keys"], unit: Array | float, before: Softmax | None, dtype: Any
) -> Softmax:
    """Show the rows the logits of more keys: numbers, times `unit`."""
    largest = numbers.max(axis=1) * unit
    if before is not None:
        largest = jnp.maximum(before.reference, largest)
    reference, exponent = _finite_or_zero(largest), call.exponent
    factor, subtrahend = exponent.relative_to(reference)
    factor, shape = factor * unit, numbers.shape
    scaled = numbers * (along_rows(factor, shape) if isinstance(factor, jax.Array) else factor)
    weights = jnp.exp2(scaled - along_rows(subtrahend, shape))
    total = weights.sum(axis=1)
    if before is None:
        return Softmax(weights.astype(dtype), largest, total, total)
    correction = exponent.rescaling(before.reference, reference)
    return Softmax(weights.astype(dtype), largest, before.total * correction + total, correction)


def capped_step(
    call: Inputs,
    products: Float[Array, "rows keys"],
    batch: Int[Array, ""],
    hidden: Hidden,
    before: Softmax | None,
    dtype: Any,
) -> Softmax:
    """`step` where logits are products scaled and capped: where all are small, nobody looks for the largest."""
    operations, shape = call.operations, products.shape
    scale, cap = call.spec.scale, call.spec.logits_soft_cap
    scale = call.value("scale", batch) if scale is None else scale
    assert scale is not None
    assert cap is not None
    soft_cap, numbers = SoftCap.of(products, scale, cap, factor=_LOG2_E, most=_SMALL[dtype])
    zeros, ones = operations.full(shape[:1], 0.0), operations.full(shape[:1], 1.0)
    # Relative to one below 0 a small logit might weigh too much.
    kept = zeros if before is None else before.reference
    are_small = operations.are_below(numbers, soft_cap.limit)
    if before is not None:
        are_small &= operations.holds(kept >= 0)

    def of_small(numbers: Array) -> Array:
        exponents = soft_cap.of_small(numbers)
        return exponents if before is None else exponents - along_rows(kept, shape)

    def small(numbers: Array) -> tuple[Array, Array, Array]:
        return hidden.hide(of_small(numbers)), kept, ones

    def any_size(numbers: Array) -> tuple[Array, Array, Array]:
        logits = hidden.hide(soft_cap.of_any(numbers))
        largest, correction = logits.max(axis=1), ones
        if before is not None:
            is_empty = before.total == 0
            largest = jnp.maximum(largest, jnp.where(is_empty, -jnp.inf, kept))
            correction = jnp.where(is_empty, 1.0, jnp.exp2(kept - largest))
        reference = _finite_or_zero(largest)
        return logits - along_rows(reference, shape), reference, correction

    def weigh(exponents: Array) -> tuple[Array, Array]:
        weights = jnp.exp2(exponents)
        return weights.astype(dtype), weights.sum(axis=1)

    def all_small_and_seen(numbers: Array) -> tuple[Array, ...]:
        # One piece of code, in which exponentials are made beside the polynomials: 6% faster.
        return *weigh(hidden.by_mask(of_small(numbers))), kept, ones

    def others(numbers: Array) -> tuple[Array, ...]:
        if hidden.is_partial is None:
            exponents, *rest = any_size(numbers)
        else:
            exponents, *rest = lax.cond(are_small, small, any_size, numbers)
        results = *weigh(exponents), *rest
        operations.stay()
        return results

    all_seen = True if hidden.is_partial is None else ~hidden.is_partial
    weights, total, reference, correction = lax.cond(are_small & all_seen, all_small_and_seen, others, numbers)
    if before is not None:
        total = before.total * correction + total
    return Softmax(weights, reference, total, correction)


def corrected(call: Inputs, state: Softmax, sums: Float[Array, "rows D"]) -> Float[Array, "rows D"]:
    """Sums relative to the last reference but one, relative to the last."""
    scale = lambda sums, correction: sums * along_rows(correction, sums.shape)
    if not is_capped(call.spec):
        return scale(sums, state.correction)
    is_same = call.operations.holds(state.correction == 1)
    return lax.cond(is_same, lambda sums, _: sums, scale, sums, state.correction)


def finish(
    call: Inputs, state: Softmax, sums: Float[Array, "rows D"], sink: Float[Array, ""] | None
) -> tuple[Float[Array, "rows D"], Float[Array, "rows"]]:
    """The rows' output and log-sum-exp; 0 and -inf for those that saw no key, with a sink or without."""
    exponent, empty = _exponent(call), state.total == 0
    unit = 1.0 if exponent.exact else 1 / _LOG2_E
    reference, total = exponent.of(_finite_or_zero(state.reference)) * unit, state.total
    factor = 1 / jnp.where(empty, 1.0, total)
    if sink is not None:
        largest = jnp.maximum(reference, sink)
        shrink = jnp.exp(reference - largest)
        total = total * shrink + jnp.exp(sink - largest)
        reference, factor = largest, shrink / total
    lse = jnp.where(empty, -jnp.inf, reference + jnp.log(jnp.where(empty, 1.0, total)))
    return sums * along_rows(jnp.where(empty, 0.0, factor), sums.shape), lse


def _exponent(call: Inputs) -> Exponent:
    """The way from logits to weights; where they are capped, they are in base 2 already."""
    return Exponent(1.0, exact=False) if is_capped(call.spec) else call.exponent


def _finite_or_zero(largest: Float[Array, "rows"]) -> Float[Array, "rows"]:
    """A row that has seen no key yet has nothing to be relative to."""
    return jnp.where(largest == -jnp.inf, 0.0, largest)
