"""Mask functions that people use, which are those of examples/benchmarks, and random ones that are hard to bound."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MaskFunction = Callable[[Any, Any, Any, Any], Any]

_path = Path(__file__).parents[2] / "examples" / "benchmarks" / "mask_functions.py"
_spec = importlib.util.spec_from_file_location("benchmark_of_mask_functions", _path)
assert _spec is not None
assert _spec.loader is not None
benchmark: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(benchmark)
families = benchmark.families


def dense(function: MaskFunction, batch: int, heads: int, queries: int, keys: int) -> np.ndarray:
    """The function of all pairs, `[batch, heads, queries, keys]`."""
    for axis in range(4):
        function = jax.vmap(function, [0 if a == 3 - axis else None for a in range(4)])
    return np.asarray(jax.jit(function)(*(jnp.arange(n, dtype=jnp.int32) for n in (batch, heads, queries, keys))))


@st.composite
def composed(draw: st.DrawFn, length: int) -> MaskFunction:
    """A function of some comparisons of integers and floats, among them such that wrap around, are NaN or infinite."""
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    number = lambda most: int(random.integers(1, most))
    table = jnp.asarray(random.integers(-length, 2 * length, length), jnp.int32)
    bytes_ = jnp.asarray(random.integers(-3, 4, (2, length)), jnp.int8)
    odd = random.normal(size=length)
    odd[random.random(length) < 0.03] = random.choice([np.nan, np.inf, -np.inf])
    odd = jnp.asarray(odd, jnp.float32)
    c, d, e = number(70), number(70), number(70)
    integers: list[MaskFunction] = [
        lambda b, h, q, k: q - k,
        lambda b, h, q, k: q * c - k * d + h,
        lambda b, h, q, k: (q - k) % c,
        lambda b, h, q, k: lax.rem(q - k, jnp.int32(c)),
        lambda b, h, q, k: (q - k) // d,
        lambda b, h, q, k: lax.div(q - 2 * k, jnp.int32(c)),
        lambda b, h, q, k: table[q] - k,
        lambda b, h, q, k: table[jnp.clip(q - k, -5, length + 3)],
        lambda b, h, q, k: table[q - c] - table[k + d],
        lambda b, h, q, k: jnp.take(table, q * 2 - k),
        lambda b, h, q, k: table[q * 40_000_003 + k],
        lambda b, h, q, k: table.at[k - q].get(mode="fill", fill_value=c),
        lambda b, h, q, k: jnp.minimum(q, k * c) - jnp.maximum(q, e),
        lambda b, h, q, k: (q ^ k) & (k | d),
        lambda b, h, q, k: q * (k - length // 2),
        lambda b, h, q, k: bytes_[b, q].astype(jnp.int32) * k,
        lambda b, h, q, k: bytes_[b, q] * jnp.int8(c) + bytes_[0, k],
        lambda b, h, q, k: (q << 3) - (k >> 2),
        lambda b, h, q, k: jnp.sign(q - k) * jnp.where(q % 2 == 0, q, -k),
        lambda b, h, q, k: q * 40_000_003 + k,
        lambda b, h, q, k: (q * 3).astype(jnp.int8).astype(jnp.int32) - k,
        lambda b, h, q, k: (k.astype(jnp.uint32) - q.astype(jnp.uint32) >> 28).astype(jnp.int32),
        lambda b, h, q, k: (q.astype(jnp.uint32) - k.astype(jnp.uint32)).astype(jnp.int32) * c,
        lambda b, h, q, k: ~q + k,
        lambda b, h, q, k: jnp.square(q - k) - c * 100,
        lambda b, h, q, k: lax.cond(q > k, lambda: q - c, lambda: table[k]),
        lambda b, h, q, k: jnp.array([q, k, h * c]).sum(),
        lambda b, h, q, k: jnp.max(table[:8] - q),
        lambda b, h, q, k: jnp.roll(table, 3)[q] % d,
        lambda b, h, q, k: jnp.searchsorted(jnp.sort(table), q),
        lambda b, h, q, k: -abs(q - e),
        lambda b, h, q, k: (jnp.sqrt((q - k).astype(jnp.float32)) * 3).astype(jnp.int32),
    ]
    floats: list[MaskFunction] = [
        lambda b, h, q, k: odd[q] - odd[k],
        lambda b, h, q, k: odd[q] * odd[k],
        lambda b, h, q, k: jnp.maximum(odd[q], k * 0.01),
        lambda b, h, q, k: jnp.sqrt(odd[k]),
        lambda b, h, q, k: odd[q] / (k - c),
        lambda b, h, q, k: jnp.where(q > k, odd[q], -jnp.inf),
        lambda b, h, q, k: jnp.log(q - k) + odd[k],
        lambda b, h, q, k: jnp.floor(q / c) - k / d,
        lambda b, h, q, k: jnp.exp(odd[q]) * (q - k),
        lambda b, h, q, k: jnp.abs(odd[q] - 1),
        lambda b, h, q, k: odd[q].astype(jnp.bfloat16).astype(jnp.float32) + k,
        lambda b, h, q, k: jnp.round(q * 0.1) - jnp.sin(k),
    ]
    compare = st.sampled_from([jnp.less, jnp.less_equal, jnp.equal, jnp.not_equal, jnp.greater_equal, jnp.greater])

    def comparison() -> MaskFunction:
        name, ordered = draw(st.sampled_from(["number", "numbers", "float", "family"])), draw(compare)
        if name == "family":
            return draw(st.sampled_from(list(families(length).values())))
        if name == "float":
            of, bound = draw(st.sampled_from(floats)), draw(st.floats(-2, 2, width=32))
            return lambda *at: ordered(of(*at), bound)
        of, other = draw(st.sampled_from(integers)), draw(st.sampled_from(integers))
        bound = draw(st.integers(-length, length))
        return lambda *at: ordered(of(*at), bound if name == "number" else other(*at))

    def joined(one: MaskFunction, other: MaskFunction) -> MaskFunction:
        how = draw(st.sampled_from([jnp.logical_and, jnp.logical_or, jnp.logical_xor, None]))
        if how is None:
            return lambda *at: jnp.where(one(*at), other(*at), ~other(*at))
        return lambda *at: how(one(*at), other(*at))

    found = comparison()
    for _ in range(draw(st.integers(0, 2))):
        found = joined(found, comparison())
    return found
