"""float32 operands as bfloat16 pieces, whose products the matrix unit makes.

    x   = x_0 + x_1 + ...          each the bfloat16 number nearest to what is left
    x y = the sum of x_i y_j       where i + j is less than the number of pieces

Two pieces have 16 bits and three products (x3), where TF32 has 11 bits; three pieces have 24 bits and six products
(x6), nearly float32's own. The matrix unit takes TF32 in one layout only, which P V does not have; it takes bfloat16 in
any. An array's pieces lie side by side along its last axis. An operand of 16 bits is one piece: itself.

Source: Henry, Tang and Heinecke, arXiv:1904.06376, section II.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.nvidia.ops import Ops, rounded
from jflash._semantics.score_mod import equations
from jflash._semantics.spec import Spec

Pieces = tuple[Any, ...]
"""An operand of the matrix unit: registers or shared memory of each piece, the largest first."""

_BY_PRECISION = {
    **dict.fromkeys(("DEFAULT", "HIGH", "TF32_TF32_F32", "BF16_BF16_F32_X3"), 2),
    **dict.fromkeys(("HIGHEST", "BF16_BF16_F32_X6"), 3),
    "BF16_BF16_F32": 1,
}
"""How many pieces float32 operands have, by the precision's name."""

_LESS_EXACT = ("tanh", "sin", "cos")
"""Functions that the hardware computes less exactly than float32 has room for: the first with a relative error of 1e-5,
the others with one that grows with the argument."""


def unsupported(spec: Spec) -> str | None:
    """Return why products of pieces are not a call's, in words for the user; `None` if they are."""
    if spec.dtype != jnp.float32:
        return None
    if (unknown := next((name for name in _precisions(spec) if name not in _BY_PRECISION), None)) is not None:
        return f"it has no float32 products of precision {unknown}."
    if number(spec) < 3:
        return None
    if spec.logits_soft_cap is not None:
        return "its soft cap has a relative error of 1e-6, which is more than float32's own precision allows."
    program = () if spec.score_mod is None else equations(spec.score_mod.jaxpr.jaxpr)
    names = (equation.primitive.name for equation in program)
    if (inexact := next((name for name in names if name in _LESS_EXACT), None)) is not None:
        return f"`score_mod` uses {inexact}, whose error there is more than float32's own precision allows."
    return None


def number(spec: Spec) -> int:
    """Return how many pieces an operand has."""
    return max(_BY_PRECISION[name] for name in _precisions(spec)) if spec.dtype == jnp.float32 else 1


def facts(spec: Spec) -> tuple[int, ...]:
    """Return what the tiles of a float32 call are tuned for besides head dims."""
    return (number(spec),) if spec.dtype == jnp.float32 else ()


def _precisions(spec: Spec) -> list[str]:
    """Return the names of a call's precision, or of the two of a pair."""
    given = spec.precision if isinstance(spec.precision, tuple) else (spec.precision,)
    return [_name(precision) for precision in given]


def _name(precision: Any) -> str:
    if precision is None:
        return "DEFAULT"
    if isinstance(precision, str) and not hasattr(lax.DotAlgorithmPreset, precision):
        precision = lax.Precision(precision)
    return precision if isinstance(precision, str) else getattr(precision, "name", str(precision))


def dtype(spec: Spec) -> np.dtype[Any]:
    """Return the dtype of the matrix unit's operands."""
    return np.dtype(jnp.bfloat16) if spec.dtype == jnp.float32 else spec.dtype


def products(spec: Spec) -> int:
    """Return how many products of the matrix unit one of a call's products is."""
    return len(order(number(spec)))


def split_numbers(
    rest: Float[Array, "..."], rounded: Callable[[Array], Array], number: int = 3
) -> list[Float[Array, "..."]]:
    """bfloat16 numbers, the largest first, whose sum is the given finite number; fewer than three approximate it.
    `rounded` gives the nearest bfloat16."""
    pieces = [rounded(rest)]
    while len(pieces) < number:
        rest = rest - pieces[-1]
        pieces.append(rounded(rest))
    return pieces


def split_array(spec: Spec, array: Float[Array, "... H"], parts: int = 1) -> Float[Array, "... columns"]:
    """Return an operand in device memory as kernels copy it: of each chunk of its columns all pieces.

    What is not finite is its own first piece, and the only one.
    """
    if spec.dtype != jnp.float32:
        return array
    shape = array.shape
    array = array.reshape(*shape[:-1], parts, shape[-1] // parts)
    # A finite number that rounds to infinity would be lost.
    most = float(jnp.finfo(jnp.bfloat16).max)
    is_finite = jnp.isfinite(array)
    first, *others = split_numbers(jnp.where(is_finite, jnp.clip(array, -most, most), 0), rounded, number(spec))
    pieces = [jnp.where(is_finite, first, array), *others]
    return jnp.concatenate(pieces, axis=-1).astype(dtype(spec)).reshape(*shape[:-1], -1)


def transposed(pieces: Pieces) -> Pieces:
    """Return each piece transposed."""
    return tuple(piece.T for piece in pieces)


def split(spec: Spec, values: Float[Array, "rows columns"], ops: Ops) -> Pieces:
    """Return the pieces of an operand in registers."""
    if spec.dtype != jnp.float32:
        return (values.astype(spec.dtype),)
    pieces: list[Array] = []
    while len(pieces) < number(spec) - 1:
        piece, values = ops.leading_piece(values)
        pieces.append(piece)
    return *pieces, values.astype(dtype(spec))


def order(count: int) -> list[tuple[int, int]]:
    """Return which pieces of two operands are multiplied, in the order in which their products are added.

    The smallest come first, as what is added to zeros is rounded least.
    """
    return [(left, total - left) for total in reversed(range(count)) for left in range(total + 1)]
