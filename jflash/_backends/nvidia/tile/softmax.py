"""Probabilities, exp(logit - reference), by the hardware's base-2 exponential; and the online softmax of a forward.

Source: FlashAttention-2, arXiv:2307.08691, section 3.1.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.ops import Ops, Rows, Tile, along_rows
from jflash._backends.nvidia.tile import dropped
from jflash._backends.nvidia.tile.soft_cap import SoftCap
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics.online_softmax import finite_or_zero
from jflash._semantics.spec import Spec

LOG2_E = math.log2(math.e)

_SMALL = {jnp.dtype(jnp.bfloat16): 30.0, jnp.dtype(jnp.float16): 13.0, jnp.dtype(jnp.float32): 30.0}
"""The largest binary exponents that P, in its dtype, has room for relative to a logit of 0.

float32 then has room for the sums of values whose magnitudes add up to no more than 2**97.
"""

PARTS_OF_L = 8
"""Parts of l, where it has any: sums of every eighth column. Of eight neighbours a thread has two in the matrix unit's
layouts, so that a step sends nothing from thread to thread. It keeps four numbers for the two of whole sums."""


@dataclasses.dataclass(frozen=True)
class Exponent:
    """The conversion of a call's logits to base 2."""

    factor: float
    """What takes a logit, or a plain call's product, to base 2."""
    exact: bool
    """Whether the reference is subtracted first: a bias may be as large as its dtype allows."""
    limit: float = math.inf
    """The largest reference whose rounding scales probabilities by no more than their dtype has room for."""

    def __call__(self, logits: Array, reference: Array | None) -> Array:
        """Probabilities from logits and, broadcast to them, their reference in `units`; `None`: it is subtracted."""
        if reference is None:
            return jnp.exp2(logits * self.factor)
        if self.exact:
            return jnp.exp2((logits - reference) * self.factor)
        return jnp.exp2(logits * self.factor - reference)

    def units(self, logits: Array) -> Array:
        """Logits in the units of a reference: in base 2, unless they have to be exact."""
        return logits if self.exact else logits * self.factor

    def relative_to(self, reference: Array) -> tuple[Array | float, Array]:
        """Two numbers for a row, with which exp2(logits * factor - subtrahend) are its weights; `reference` in `units`.

        Rounding the subtrahend scales all of them alike, and they are divided by their sum. Past the limit the factor
        is 1, and nothing is rounded: logits are so far apart that the largest has all the weight either way.
        """
        if not self.exact:
            return self.factor, reference
        is_below = self._is_below_limit(reference)
        return jnp.where(is_below, self.factor, 1.0), self._subtrahend(reference, is_below)

    def rescaling(self, before: Array, reference: Array) -> Array:
        """The factor that makes weights relative to a row's `before` relative to its new reference.

        Both subtrahends are numbers that were rounded, and no product stands next to the difference: the compiler
        would make one instruction of the two, which does not round, and with every tile the weights before would drift.
        """
        if not self.exact:
            return jnp.exp2(before - reference)
        was_below, is_below = map(self._is_below_limit, (before, reference))
        difference = self._subtrahend(before, was_below) - self._subtrahend(reference, is_below)
        return jnp.exp2(jnp.where(was_below == is_below, difference, before - reference))

    def _is_below_limit(self, reference: Array) -> Array:
        return jnp.abs(reference) < self.limit

    def _subtrahend(self, reference: Array, is_below_limit: Array) -> Array:
        return jnp.where(is_below_limit, reference * self.factor, reference)


def exponent(spec: Spec) -> Exponent:
    """The conversion of a call's logits."""
    facts = facts_of(spec)
    if facts.is_plain:
        return Exponent(facts.sums_scale * LOG2_E, exact=False)
    exact = "bias" in spec.operands or spec.score_mod is not None
    # Where weights are off by 2**8 and 2**32, and logits at least 8 and 32 apart.
    limit = 2.0**27 if spec.dtype == jnp.float16 else 2.0**29
    return Exponent(LOG2_E, exact, limit)


class Softmax(NamedTuple):
    """P of the last tile, and the rows' statistics after it."""

    p: Tile
    """In the call's dtype."""
    m: Rows
    """What P is relative to: the largest logit so far, in the exponent's `units`; with a soft cap sometimes 0."""
    l: Float[Array, "rows *parts"]
    """The sum of the rows' weights, whole or in `PARTS_OF_L`."""
    rescale: Rows
    """The factor that takes the sums before the last tile to those after it."""


def step(
    exponent: Exponent, s: Tile, unit: Array | float, mask: TileContext, before: Softmax | None, *, in_parts: bool
) -> Softmax:
    """Show the rows the logits of more keys: s, times `unit`; l is `in_parts` or whole."""
    inputs, dtype = mask.inputs, mask.inputs.spec.dtype
    m = exponent.units(s.max(axis=1) * unit)
    if before is not None:
        m = jnp.maximum(before.m, m)
    reference = finite_or_zero(m)
    factor, subtrahend = exponent.relative_to(reference)
    factor, shape = factor * unit, s.shape
    scaled = s * (along_rows(factor, shape) if isinstance(factor, jax.Array) else factor)
    p = jnp.exp2(scaled - along_rows(subtrahend, shape))
    l = _sums(inputs.ops, p, in_parts=in_parts)
    if before is None:
        rescale = inputs.ops.full(shape[:1], 0.0)
    else:
        rescale = exponent.rescaling(before.m, reference)
        l = scaled_rows(before.l, rescale) + l
    return Softmax(dropped.keep(inputs, mask.at, p, mask.loaded).astype(dtype), m, l, rescale)


def whole(l: Float[Array, "rows *parts"]) -> Rows:
    """l, from its parts if it has any."""
    return l if l.ndim == 1 else l.sum(axis=1)


def _sums(ops: Ops, p: Tile, *, in_parts: bool) -> Float[Array, "rows *parts"]:
    return ops.partial_sums(p, PARTS_OF_L) if in_parts else p.sum(axis=1)


def capped_step(s: Tile, mask: TileContext, before: Softmax | None, *, in_parts: bool) -> Softmax:
    """`step` with a tile's products, which are scaled and capped here; exponents are in base 2.

    Where all of a tile's logits are small, their exponentials fit P's dtype relative to what m was before, and the
    search for the row's maximum is left out.
    """
    inputs, shape = mask.inputs, s.shape
    ops, is_partial, dtype = inputs.ops, mask.tile.is_partial, inputs.spec.dtype
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
            is_empty = whole(before.l) == 0
            largest = jnp.maximum(largest, jnp.where(is_empty, -jnp.inf, kept))
            rescale = jnp.where(is_empty, 1.0, jnp.exp2(kept - largest))
        m = finite_or_zero(largest)
        return logits - along_rows(m, shape), m, rescale

    def exponentiate(exponents: Array) -> tuple[Array, Array]:
        p = jnp.exp2(exponents)
        return dropped.keep(inputs, mask.at, p, mask.loaded).astype(dtype), _sums(ops, p, in_parts=in_parts)

    def all_small_and_seen(numbers: Array) -> tuple[Array, ...]:
        # One basic block, in which exponentials are made beside the polynomials.
        return *exponentiate(mask.hide_if_whole(of_small(numbers), -jnp.inf)), kept, ones

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
        l = scaled_rows(before.l, rescale) + l
    return Softmax(p, m, l, rescale)


def scaled_rows(sums: Float[Array, "rows *columns"], rescale: Rows) -> Float[Array, "rows *columns"]:
    """Each row of O, or of l, times its own number."""
    return sums * along_rows(rescale, sums.shape)


def last_factor(spec: Spec, exponent: Exponent, m: Rows, l: Rows, sink: Array | None) -> tuple[Rows, Rows]:
    """What times O is the rows' output, and their log-sum-exp, from m and whole l, as `normalizer` has them."""
    factor, lse = normalizer(finite_or_zero(m) * (1.0 if exponent.exact else 1 / LOG2_E), l, sink)
    return dropped.scaled(spec, factor), lse


def normalizer(reference: Rows, l: Rows, sink: Array | None) -> tuple[Rows, Rows]:
    """What normalizes sums over exponentials relative to a finite natural number, of which l is one; and log l.

    For rows that saw no key they are 0 and -inf, with a sink or without.
    """
    empty = l == 0
    factor = 1 / jnp.where(empty, 1.0, l)
    if sink is not None:
        largest = jnp.maximum(reference, sink)
        shrink = jnp.exp(reference - largest)
        l = l * shrink + jnp.exp(sink - largest)
        reference, factor = largest, shrink / l
    lse = jnp.where(empty, -jnp.inf, reference + jnp.log(jnp.where(empty, 1.0, l)))
    return jnp.where(empty, 0.0, factor), lse
