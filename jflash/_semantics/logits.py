"""The steps that turn products of queries and keys into logits: scale, soft cap, bias, ALiBi, `score_mod`, in that
order.

All of them are elementwise and written in plain JAX. So a backend takes the derivative, of the logits and of every
parameter, with `jax.vjp` on its own tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jflash._semantics.spec import Spec
from jflash._semantics.tile import Parameters, Tile


def soft_cap(products: Float[Array, "..."], scale: Float[Array, "#..."] | float, cap: float) -> Float[Array, "..."]:
    """Return the scaled products, no further from 0 than `cap`."""
    return cap * jnp.tanh(products * (scale / cap))


def modify_logits(
    spec: Spec,
    products: Float[Array, "b k g i j"],
    tile: Tile,
    soft_cap: Callable[[Array, Array | float, float], Array] = soft_cap,
) -> Float[Array, "b k g i j"]:
    """Return the logits of a tile from its products of queries and keys; `soft_cap` is the backend's own function.

    Sources: soft cap, Gemma 2 (arXiv:2408.00118, section 2); ALiBi, arXiv:2108.12409, section 3.
    """
    parameters = tile.parameters
    scale = parameters.scale if parameters.scale is not None else spec.scale
    assert scale is not None
    cap = spec.logits_soft_cap
    logits = products * scale if cap is None else soft_cap(products, scale, cap)
    if parameters.bias is not None:
        logits = logits + parameters.bias.astype(logits.dtype)
    if parameters.alibi_slopes is not None:
        distance = jnp.abs(tile.distance).astype(logits.dtype)
        logits = logits - parameters.alibi_slopes * distance
    if spec.score_mod is not None:
        assert tile.batch is not None
        assert tile.head is not None
        logits = spec.score_mod(logits, tile.batch, tile.head, *tile.indices, parameters.score_mod_arrays)
    return logits


def may_be_nan(spec: Spec) -> bool:
    """Return whether derivatives of unseen logits may be NaN.

    In padding a bias may hold NaN, of which `score_mod` makes a slope.
    """
    return spec.score_mod is not None and "bias" in spec.operands


def without_unseen(spec: Spec, parameters: Parameters, visible: Bool[Array, "..."] | None) -> Parameters:
    """Return the parameters with a bias of 0 where no query sees, if derivatives may be NaN there: 0 * NaN is NaN."""
    if not may_be_nan(spec) or parameters.bias is None or visible is None:
        return parameters
    return parameters._replace(bias=jnp.where(visible, parameters.bias, 0))


def may_end_in_rounding(spec: Spec) -> bool:
    """Return whether the last step of `modify_logits` may be a product that is rounded.

    A scale that is a power of two is never rounded.
    """
    is_exact = spec.scale is not None and math.frexp(spec.scale)[0] in (0.5, -0.5)
    others = spec.logits_soft_cap is not None or spec.score_mod is not None or "alibi_slopes" in spec.operands
    return not is_exact or others
