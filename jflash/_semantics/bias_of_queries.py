"""The gradient of a bias that all keys share, in closed form.

Such a bias moves all logits of a query alike, so its gradient is the sum of the query's dS over its keys:

    sum_j P_j (dP_j - delta) = d_lse + p_sink delta        p_sink: the sink's share of the softmax; 0 without sinks

Without sinks and a cotangent of the log-sum-exp that is 0, and a backward that adds dS up has roundings in its place:
delta comes from an output that was rounded.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jflash._semantics.spec import Operands, Residuals, Spec


def has_closed_form(spec: Spec) -> bool:
    """Return whether a call asks for such a gradient, and no `score_mod` comes between the bias and the softmax."""
    shape = spec.bias_shape
    return shape is not None and shape[3] == 1 and spec.score_mod is None and "bias" not in spec.undifferentiated


def gradient(
    spec: Spec, operands: Operands, residuals: Residuals, counted: Bool[Array, ""] | bool
) -> Float[Array, "#B #N #T 1"]:
    """Return the gradient of the bias, or 0 where the rows are not `counted` here."""
    wide = lambda array: array.astype(spec.accumulator)
    sees = (residuals.lse > -jnp.inf) & counted
    rows = wide(residuals.d_lse)
    if operands.sinks is not None:
        delta = jnp.einsum("btnd,btnd->bnt", wide(residuals.d_out), wide(residuals.out)) - rows
        # A row that sees nothing has no share either, and its NaN is left out below.
        share = jnp.exp(wide(operands.sinks)[..., None] - jnp.where(sees, residuals.lse, jnp.inf))
        rows = rows + share * jnp.where(sees, delta, 0)
    assert operands.bias is not None
    shape = operands.bias.shape
    shared = tuple(axis for axis in range(3) if shape[axis] == 1)
    total = jnp.where(sees, rows, 0)[..., None].sum(axis=shared, keepdims=True)
    return total.astype(spec.gradient_dtype(operands.bias.dtype))
