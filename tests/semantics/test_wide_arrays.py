"""A `score_mod` that closes over arrays of 16 bits: its numbers are those that JAX has, sums of cotangents are wide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations
from jax import lax
from short_run import cover

from jflash._semantics.score_mod import trace_score_mod

HEADS = 2
LOGITS = np.random.default_rng(0).standard_normal((3, HEADS, 4, 6)).astype(np.float32)
INDICES = tuple(np.indices(LOGITS.shape, np.int32))
ARRAYS = [np.random.default_rng(len(shape)).standard_normal(shape) for shape in ((), (HEADS,), (HEADS, 4))]
PROGRAMS: dict[str, Callable[..., Callable[..., Any]]] = {
    "moved": lambda one, heads, table: lambda logit, b, h, q, k: one * logit + heads[h] - table.T[::-1][q & 3, h],
    "selected": lambda one, heads, table: (
        lambda logit, b, h, q, k: logit + jnp.where(q < k, 0.1, jnp.take(table, k, axis=1, mode="clip")[h])
    ),
    "out of bounds": lambda one, heads, table: (
        lambda logit, b, h, q, k: logit + table.at[h, k].get(mode="fill", fill_value=-0.1)
    ),
    "of a branch": lambda one, heads, table: (
        lambda logit, b, h, q, k: lax.cond(q < k, lambda: logit * table[h, k & 3], lambda: logit + 0.1 * heads[h])
    ),
    "of a computed array": lambda one, heads, table: lambda logit, b, h, q, k: logit * jnp.tanh(table)[h, k & 3],
    "computed": lambda one, heads, table: (
        lambda logit, b, h, q, k: logit - heads[h] * jax.nn.relu(table[h, q & 3] / one) + heads[h] * (q - k)
    ),
    "with the logit in 16 bits": lambda one, heads, table: (
        lambda logit, b, h, q, k: logit.astype(one.dtype) * one + jnp.exp(heads[h])
    ),
}


def drawn(dtype: str) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(array, dtype) for array in ARRAYS)


def modified(program: str, *arrays: Any) -> jax.Array:
    """Return the logits as a backend modifies them."""
    score_mod, held = trace_score_mod(PROGRAMS[program](*arrays), np.dtype(np.float32))
    return score_mod(jnp.asarray(LOGITS), *map(jnp.asarray, INDICES), tuple(array[None] for array in held))


@cover(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers_are_those_of_jax(program: str, dtype: str):
    """Numbers are the same to the last bit where each operation is compiled alone: in one program XLA may leave a
    rounding out."""
    want = jnp.vectorize(PROGRAMS[program](*drawn(dtype)))(LOGITS, *INDICES)
    np.testing.assert_array_equal(modified(program, *drawn(dtype)), want.astype(np.float32))


@pytest.mark.parametrize("program", PROGRAMS)
def test_sums_are_wide(program: str):
    """Sums are wide in gradients, and in gradients of derivatives along arrays."""
    arrays = drawn("bfloat16")
    total = lambda arrays: jnp.sin(modified(program, *arrays)).sum()
    along = lambda arrays: jax.jvp(total, (arrays,), (arrays,))[1]
    for function in (total, along):
        closed = jax.make_jaxpr(jax.grad(function))(arrays)
        assert closed.out_avals == [jax.typeof(array) for array in arrays]
        is_sum = lambda equation: equation.primitive.name in ("reduce_sum", "scatter-add")
        found = list(filter(is_sum, equations(closed.jaxpr)))
        assert found
        assert not [equation for equation in found if equation.outvars[0].aval.dtype == jnp.bfloat16]
