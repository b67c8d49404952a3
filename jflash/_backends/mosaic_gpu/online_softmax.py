"""The online softmax of a warpgroup's rows, in the forward.

Source: FlashAttention-2, arXiv:2307.08691, section 3.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.exponent import LOG2_E, Exponent
from jflash._backends.mosaic_gpu.hardware.warpgroup import along_rows


class Softmax(NamedTuple):
    """P of the last tile, and the rows' statistics after it."""

    p: Float[Array, "rows keys"]
    m: Float[Array, "rows"]
    """What P is relative to: the largest logit so far, as the exponent takes it. With a soft cap sometimes 0, and then
    never -inf."""
    l: Float[Array, "rows"]
    rescale: Float[Array, "rows"]
    """From the sums before the last tile to those after it."""


def step(
    exponent: Exponent, s: Float[Array, "rows keys"], unit: Array | float, before: Softmax | None, dtype: Any
) -> Softmax:
    """Show the rows the logits of more keys: s, times `unit`."""
    m = s.max(axis=1) * unit
    if before is not None:
        m = jnp.maximum(before.m, m)
    reference = finite_or_zero(m)
    factor, subtrahend = exponent.relative_to(reference)
    factor, shape = factor * unit, s.shape
    scaled = s * (along_rows(factor, shape) if isinstance(factor, jax.Array) else factor)
    p = jnp.exp2(scaled - along_rows(subtrahend, shape))
    l = p.sum(axis=1)
    if before is None:
        return Softmax(p.astype(dtype), m, l, l)
    rescale = exponent.rescaling(before.m, reference)
    return Softmax(p.astype(dtype), m, before.l * rescale + l, rescale)


def rescaled(state: Softmax, acc_o: Float[Array, "rows D"]) -> Float[Array, "rows D"]:
    """O relative to the last tile's m, from O relative to the m before it."""
    return scaled_rows(acc_o, state.rescale)


def scaled_rows(acc_o: Float[Array, "rows D"], rescale: Float[Array, "rows"]) -> Float[Array, "rows D"]:
    """Each row of O times its own number."""
    return acc_o * along_rows(rescale, acc_o.shape)


def finish(
    exponent: Exponent, state: Softmax, acc_o: Float[Array, "rows D"], sink: Float[Array, ""] | None
) -> tuple[Float[Array, "rows D"], Float[Array, "rows"]]:
    """The rows' output and log-sum-exp; 0 and -inf for those that saw no key, with a sink or without."""
    empty = state.l == 0
    unit = 1.0 if exponent.exact else 1 / LOG2_E
    reference, l = exponent.of(finite_or_zero(state.m)) * unit, state.l
    factor = 1 / jnp.where(empty, 1.0, l)
    if sink is not None:
        largest = jnp.maximum(reference, sink)
        shrink = jnp.exp(reference - largest)
        l = l * shrink + jnp.exp(sink - largest)
        reference, factor = largest, shrink / l
    lse = jnp.where(empty, -jnp.inf, reference + jnp.log(jnp.where(empty, 1.0, l)))
    return acc_o * along_rows(jnp.where(empty, 0.0, factor), acc_o.shape), lse


def finite_or_zero(m: Float[Array, "rows"]) -> Float[Array, "rows"]:
    """A row that has seen no key yet has nothing to be relative to."""
    return jnp.where(m == -jnp.inf, 0.0, m)
