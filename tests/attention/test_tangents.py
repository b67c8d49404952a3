"""Tangents follow the rule for numbers: at most twice plain attention's error in the call's dtype, and a few roundings.

Among the cases are those in which a tangent made of P * tS, without its mean, is several times less exact: a few keys
have all the weight, or all keys have much in common.
"""

from typing import Any

import differentiable_attention
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from short_run import cover

import jflash

HEADS, KEY_HEADS, DIM = 2, 1, 64
LENGTHS = {"whole rows": (192, 8), "tiles": (64, 2500)}
"""The numbers of queries and keys: in one tile a row has all its keys; in the other calls it has not."""
KINDS: dict[str, dict[str, float]] = {
    "normal": {},
    "peaked": dict(size=16),
    "nearly one key": dict(size=64),
    "shared mean": dict(shared=10),
    "shared mean, peaked": dict(size=4, shared=3),
}
IN_SHORT_RUN = [
    ("tiles", "bfloat16", "shared mean"),
    ("whole rows", "float32", "peaked"),
    ("tiles", "float32", "peaked"),
]
ROWS = [(lengths, dtype, kind) for lengths in LENGTHS for dtype in ("float32", "bfloat16", "float16") for kind in KINDS]


def draw(lengths: tuple[int, int], dtype: str, size: float = 1, shared: float = 0) -> Any:
    """Query, key and value, and their tangents."""
    rows, keys = lengths
    normal = np.random.default_rng(0).standard_normal
    shapes = (1, rows, HEADS, DIM), (1, keys, KEY_HEADS, DIM), (1, keys, KEY_HEADS, DIM)
    query, key, value = map(normal, shapes)
    point = size * query, key + shared * normal((1, 1, KEY_HEADS, DIM)), value
    return jax.tree.map(lambda array: array.astype(jnp.dtype(dtype)), (point, tuple(map(normal, shapes))))


def tangents(attention: Any, arrays: Any) -> Any:
    """Return the tangents of output and log-sum-exp, in NumPy."""
    push = jax.jit(lambda point, along: jax.jvp(attention, point, along)[1])
    return tuple(np.asarray(array) for array in push(*arrays))


@cover(rest=2)
@pytest.mark.parametrize(
    ("lengths", "dtype", "kind"),
    [pytest.param(*row, marks=() if row in IN_SHORT_RUN else cover(0)) for row in ROWS],
)
def test_as_exact_as_plain_attention(lengths: str, dtype: str, kind: str) -> None:
    arrays = draw(LENGTHS[lengths], dtype, **KINDS[kind])
    attention = lambda *point: jflash.attention(*point, implementation="xla", return_residual=True)
    got, yardstick = tangents(attention, arrays), tangents(differentiable_attention.attention, arrays)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda array: array.astype(np.float64), arrays)
        truth = tangents(differentiable_attention.attention, wide)

    def allowed(truth: np.ndarray, yardstick: np.ndarray) -> float:
        """Return the error allowed, with two roundings of a sum on top: with few numbers plain attention may be exact
        by luck."""
        return 2 * oracle.error(yardstick, truth) + 2 * float(np.finfo(np.float32).eps) * np.max(np.abs(truth))

    oracle.assert_within(got, truth, tuple(map(allowed, truth, yardstick)))
