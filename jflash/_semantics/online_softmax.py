"""Online softmax: the algebra by which a row of probabilities is met one stretch of keys at a time.

Its sources are Milakov and Gimelshein, arXiv:1805.02867, and FlashAttention-2, arXiv:2307.08691, section 3.1. A row's
state is its largest logit so far m, the sum l of exp(logit - m), and the same sum weighted by the values. A row that
has seen no key has m = -inf and l = 0: every step keeps that free of NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


class Rows(NamedTuple):
    """The state of some rows of queries."""

    largest: Float[Array, "*rows"]
    total: Float[Array, "*rows"]
    weighted: Float[Array, "*rows D"]


# 2**f on [-1/2, 1/2] as 1 + f*(c1 + f*(c2 + ...)), minimax in relative error: 1.9e-9 before rounding.
_EXP2 = (0.69314718, 0.24022648, 0.055503324, 0.0096184369, 0.0013398874, 0.00015353362)


@jax.custom_jvp
def exp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return exp(x) for x <= 1, with a relative error of 2e-7 in float32, and zero below the normal range.

    XLA's own exponential costs a CPU a third as much as the matrix products. This one is a polynomial, with one
    instruction for each term. Everywhere but on a CPU the hardware's exponential is faster, and is taken.
    """
    if x.dtype != jnp.float32:
        return jnp.exp(x)
    return lax.platform_dependent(x, cpu=_exp_polynomial, default=jnp.exp)


def _exp_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    result = exp(*primals)
    return result, result * tangents[0]


exp.defjvp(_exp_jvp)


def _exp_polynomial(x: Float[Array, "..."]) -> Float[Array, "..."]:
    x = x * math.log2(math.e)
    whole = jnp.round(x)
    fraction = x - whole
    power = jnp.float32(_EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        power = power * fraction + jnp.float32(coefficient)
    bits = lax.bitcast_convert_type(power * fraction + 1.0, jnp.int32) + (whole.astype(jnp.int32) << 23)
    return jnp.where(x < -126.0, 0.0, lax.bitcast_convert_type(bits, jnp.float32))


def finite_or_zero(largest: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return a reference point to subtract: the largest logit, or 0 for a row that has seen no key."""
    return jnp.where(largest == -jnp.inf, 0.0, largest)


BOUND_LIMIT = 24.0
"""The largest bound of a logit that `step_bounded` takes. exp(-2 * 24) is 1e-21: sums of numbers no smaller lose
nothing to underflow in float32 or bfloat16."""

Weigh = Callable[[Float[Array, "*rows j"]], Float[Array, "*rows D"]]
"""A function from the probabilities of a stretch of keys to their weighted values."""


def start(largest: Float[Array, "*rows"], value_dim: int) -> Rows:
    """Return rows that have seen no key yet; `largest` is -inf, or for `step_bounded` the bound."""
    return Rows(largest, jnp.zeros_like(largest), jnp.zeros((*largest.shape, value_dim), largest.dtype))


def step(rows: Rows, logits: Float[Array, "*rows j"], weigh: Weigh) -> Rows:
    """Show the rows the logits of more keys."""
    largest = jnp.maximum(rows.largest, logits.max(axis=-1))
    reference = finite_or_zero(largest)
    correction = exp(rows.largest - reference)
    probabilities = exp(logits - reference[..., None])
    return Rows(
        largest,
        rows.total * correction + probabilities.sum(axis=-1),
        rows.weighted * correction[..., None] + weigh(probabilities),
    )


def step_bounded(rows: Rows, logits: Float[Array, "*rows j"], weigh: Weigh) -> Rows:
    """Show rows more keys whose logits are all within [-largest, largest], `largest` at most `BOUND_LIMIT`.

    Softmax may subtract any number that keeps exp in range. So no maximum is searched, and nothing is rescaled.
    """
    probabilities = exp(logits - rows.largest[..., None])
    return rows._replace(total=rows.total + probabilities.sum(axis=-1), weighted=rows.weighted + weigh(probabilities))


def exponentials(logits: Float[Array, "*rows j"]) -> tuple[Float[Array, "*rows j"], Float[Array, "*rows"]]:
    """Return exp(logit - largest), where the logits of all keys are at hand, and the largest of each row.

    Product, maximum, subtraction and XLA's own exponential are one kernel on a CPU, if no selection stands between them
    and nothing else asks for the maximum. So a row that sees no key has the lowest finite number for its maximum, and
    its exponentials are 0.

    Logits that end in a product that is rounded must come from behind a barrier. XLA may compute them twice, and
    subtract before it rounds the second time: a large logit less itself would be far from 0.
    """
    fixed, lowest = lax.stop_gradient(logits), np.asarray(jnp.finfo(logits.dtype).min, logits.dtype)
    largest = jnp.maximum(fixed.max(axis=-1), lowest)
    return jnp.exp(logits - largest[..., None]), largest


def divided(exponentials: Float[Array, "*rows j"]) -> Float[Array, "*rows j"]:
    """Return the softmax from the exponentials of whole rows; 0 in rows that see no key."""
    total = exponentials.sum(axis=-1, keepdims=True)
    return exponentials / jnp.where(total == 0, 1, total)


@jax.custom_jvp
def probabilities(logits: Float[Array, "*rows j"], lse: Float[Array, "*rows 1"]) -> Float[Array, "*rows j"]:
    """Return exp(logits - lse), as the derivatives see it.

    It is computed without `lse`, by its own sum, as in plain attention.
    """
    del lse
    return divided(exponentials(logits)[0])


def _probabilities_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    result = probabilities(*primals)
    return result, result * (tangents[0] - tangents[1])


probabilities.defjvp(_probabilities_jvp)


def whole_divided(
    logits: Float[Array, "*rows j"], weigh: Weigh
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Return output and log-sum-exp from the logits of all keys. Probabilities are divided before they weigh values."""
    unscaled, largest = exponentials(logits)
    total = unscaled.sum(axis=-1)
    lse = jnp.where(total == 0, -jnp.inf, largest + jnp.log(jnp.where(total == 0, 1, total)))
    return weigh(divided(unscaled)), lse


def whole(logits: Float[Array, "*rows j"], weigh: Weigh) -> Rows:
    """Return the state of rows after the logits of all keys."""
    probabilities, largest = exponentials(logits)
    return Rows(largest, probabilities.sum(axis=-1), weigh(probabilities))


def finish(rows: Rows, sinks: Float[Array, "*#rows"] | None) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Return the rows' output and log-sum-exp; 0 and -inf for rows that saw no key, with a sink or without."""
    largest, total, weighted = rows
    empty = total == 0
    if sinks is not None:
        largest = jnp.maximum(finite_or_zero(rows.largest), sinks)
        correction = exp(finite_or_zero(rows.largest) - largest)
        total = total * correction + exp(sinks - largest)
        weighted = weighted * correction[..., None]
    total = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
    return weighted / total[..., None], lse


def sinks_gradient(
    sinks: Float[Array, "#B N"] | None, lse: Float[Array, "B N T"], delta: Float[Array, "B N T"]
) -> Float[Array, "#B N"] | None:
    """Return the gradient of the sinks. A sink is a logit with no value, so its dP is 0.

    For rows that saw no key, `lse` must be +inf and `delta` 0.
    """
    if sinks is None:
        return None
    gradient = -jnp.sum(jnp.exp(sinks.astype(lse.dtype)[..., None] - lse) * delta, axis=2)
    gradient = gradient if sinks.shape[0] == gradient.shape[0] else gradient.sum(axis=0, keepdims=True)
    return gradient.astype(sinks.dtype)
