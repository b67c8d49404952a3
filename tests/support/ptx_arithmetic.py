"""PTX's numbers and what its instructions make of them, in numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def unsigned(width: int) -> Any:
    return {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[width]


def typed(bits: np.ndarray, kind: str) -> np.ndarray:
    """Bits as numbers of a type of PTX."""
    return bits.view(f"{ {'f': 'f', 's': 'i'}.get(kind[0], 'u') }{int(kind[1:]) // 8}")


def number(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float32)


def bits(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers, np.float32).view(np.uint32)


def quotient(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.trunc(left / np.where(right == 0, 1, right)).astype(left.dtype)


def _width(bits: np.ndarray) -> Any:
    return bits.dtype.type(8 * bits.dtype.itemsize)


PAIRS = {"f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16}
"""The numbers of words that have two."""
PREDICATES = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}
COMPARISONS = {
    **{name: getattr(np, long) for name, long in dict(eq="equal", ne="not_equal", lt="less", le="less_equal").items()},
    **dict(gt=np.greater, ge=np.greater_equal),
    **dict(neu=np.not_equal, nan=lambda left, right: np.isnan(left) | np.isnan(right)),
    **dict(ltu=lambda left, right: ~(left >= right), leu=lambda left, right: ~(left > right)),
    **dict(gtu=lambda left, right: ~(left <= right), geu=lambda left, right: ~(left < right)),
}
FLOATS = {
    **dict(add=np.add, sub=np.subtract, mul=np.multiply, div=np.divide, neg=np.negative, abs=np.abs),
    **dict(ex2=np.exp2, lg2=np.log2, rcp=np.reciprocal),
    "fma": lambda a, b, c: a.astype(np.float64) * b + c,
}
INTEGERS = {
    **dict(add=np.add, sub=np.subtract, mul=np.multiply, neg=np.negative, abs=np.abs, max=np.maximum, min=np.minimum),
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "div": quotient},
    "rem": lambda left, right: left - quotient(left, right) * right,
    "mad": lambda a, b, c: a * b + c,
    "bfe": lambda bits, start, count: (bits << _width(bits) - start - count) >> _width(bits) - count,
}
