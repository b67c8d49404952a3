"""float32 operands as bfloat16 pieces, whose products the matrix unit makes.

    x   = x_0 + x_1 + ...          each the bfloat16 number nearest to what is left
    x y = the sum of x_i y_j       where i + j is less than the number of pieces

Two pieces have 16 bits and three products (x3), where TF32 has 11 bits; three pieces have 24 bits and six products
(x6), nearly float32's own. The matrix unit takes TF32 in one layout only, which P V does not have; it takes bfloat16 in
any. An array's pieces lie side by side along its last axis. An operand of 16 bits is one piece: itself.

Source: Henry, Tang and Heinecke, arXiv:1904.06376, section II.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.nvidia.facts import PIECES_BY_PRECISION, facts_of
from jflash._backends.nvidia.ops import Ops, rounded
from jflash._semantics.score_mod import equations
from jflash._semantics.spec import Spec

Pieces = tuple[Any, ...]
"""An operand of the matrix unit: registers or shared memory of each piece, the largest first."""

_LESS_EXACT = ("tanh", "sin", "cos")
"""Functions that the hardware computes less exactly than float32 has room for: the first with a relative error of 1e-5,
the others with one that grows with the argument."""


def unsupported(spec: Spec) -> str | None:
    """Return why products of pieces are not a call's, in words for the user; `None` if they are."""
    if not facts_of(spec).is_float32:
        return None
    unknown = next((name for name in facts_of(spec).precisions if name not in PIECES_BY_PRECISION), None)
    if unknown is not None:
        return f"it has no float32 products of precision {unknown}."
    if facts_of(spec).pieces < 3:
        return None
    if spec.logits_soft_cap is not None:
        return "its soft cap has a relative error of 1e-6, which is more than float32's own precision allows."
    program = () if spec.score_mod is None else equations(spec.score_mod.jaxpr.jaxpr)
    names = (equation.primitive.name for equation in program)
    if (inexact := next((name for name in names if name in _LESS_EXACT), None)) is not None:
        return f"`score_mod` uses {inexact}, whose error there is more than float32's own precision allows."
    return None


def products(spec: Spec) -> int:
    """Return how many products of the matrix unit one of a call's products is."""
    return len(order(facts_of(spec).pieces))


def split_numbers(rest: Float[Array, "..."], number: int = 3) -> list[Float[Array, "..."]]:
    """bfloat16 numbers, the largest first, whose sum is the given finite number; fewer than three approximate it."""
    pieces = [rounded(rest)]
    while len(pieces) < number:
        rest = rest - pieces[-1]
        pieces.append(rounded(rest))
    return pieces


def split_array(spec: Spec, array: Float[Array, "... H"], parts: int = 1) -> Float[Array, "... columns"]:
    """Return an operand in device memory as kernels copy it: of each chunk of its columns all pieces.

    What is not finite is its own first piece, and the only one.
    """
    if not facts_of(spec).is_float32:
        return array
    shape = array.shape
    array = array.reshape(*shape[:-1], parts, shape[-1] // parts)
    # A finite number that rounds to infinity would be lost.
    most = float(jnp.finfo(jnp.bfloat16).max)
    is_finite = jnp.isfinite(array)
    first, *others = split_numbers(jnp.where(is_finite, jnp.clip(array, -most, most), 0), facts_of(spec).pieces)
    pieces = [jnp.where(is_finite, first, array), *others]
    return jnp.concatenate(pieces, axis=-1).astype(facts_of(spec).operand_dtype).reshape(*shape[:-1], -1)


def transposed(pieces: Pieces) -> Pieces:
    """Return each piece transposed."""
    return tuple(piece.T for piece in pieces)


def split(spec: Spec, values: Float[Array, "rows columns"], ops: Ops) -> Pieces:
    """Return the pieces of an operand in registers."""
    if not facts_of(spec).is_float32:
        return (values.astype(spec.dtype),)
    pieces: list[Array] = []
    while len(pieces) < facts_of(spec).pieces - 1:
        piece, values = ops.leading_piece(values)
        pieces.append(piece)
    return *pieces, values.astype(facts_of(spec).operand_dtype)


def order(count: int) -> list[tuple[int, int]]:
    """Return which pieces of two operands are multiplied, in the order in which their products are added.

    The smallest come first, as what is added to zeros is rounded least.
    """
    return [(left, total - left) for total in reversed(range(count)) for left in range(total + 1)]
