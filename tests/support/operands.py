"""Every array that attention takes, small, and one call that takes them all: what a transform has to carry through.

Tracing and compiling is what these tests cost, so the arrays are tiny, and XLA is told not to optimise (`jit`):
what JAX's transforms make of a call is decided before XLA sees it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflash

Operands = dict[str, jax.Array]
Results = tuple[jax.Array, jax.Array]

SMOOTH = ("query", "key", "value", "bias", "scale", "alibi_slopes", "sinks", "modulation")
"""The operands that have a gradient; `modulation` is the array inside `score_mod`."""

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def normal(seed: int, *shape: int) -> np.ndarray:
    """Normal float32 numbers, the same for the same seed and shape."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def draw(seed: int = 0, *, batch: int = 2, heads: int = 4, key_heads: int = 2) -> Operands:
    """All of them; equal seeds give equal arrays."""
    length, key_length, head_dim, value_dim = 5, 7, 8, 6
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.normal(size=shape).astype(np.float32)
    operands = dict(
        query=normal(batch, length, heads, head_dim),
        key=normal(batch, key_length, key_heads, head_dim),
        value=normal(batch, key_length, key_heads, value_dim),
        bias=normal(batch, 1, length, key_length),
        mask=random.random((batch, heads, length, key_length)) < 0.8,
        scale=np.float32(random.uniform(0.2, 0.6)),
        alibi_slopes=normal(heads) / 4,
        sinks=normal(heads),
        modulation=normal(batch, heads),
        query_seq_lengths=random.integers(2, length + 1, batch),
        key_value_seq_lengths=random.integers(3, key_length + 1, batch),
        query_offset=random.integers(2, 5, batch),
        query_segments=random.integers(0, 2, (batch, length)),
        key_segments=random.integers(0, 2, (batch, key_length)),
    )
    return {**jax.tree.map(jnp.asarray, operands), "dropout_key": jax.random.key(seed)}


LACKS: Mapping[str, tuple[str, ...]] = {"metal": ("modulation", "dropout_key")}
"""The operands that a backend refuses, whatever the rest."""


def served(operands: Operands, backend: str) -> Operands:
    """Return the operands that the backend takes."""
    return {name: array for name, array in operands.items() if name not in LACKS.get(backend, ())}


ALL = draw()
PLAIN = {name: ALL[name] for name in ("query", "key", "value")}


def attend(operands: Operands, implementation: str | None, **options: Any) -> Results:
    """Output and log-sum-exp of a call with whichever operands there are."""
    arrays = dict(operands)
    modulation = arrays.pop("modulation", None)
    segments = tuple(arrays.pop(name) for name in ("query_segments", "key_segments") if name in arrays)

    def score_mod(logit: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return logit + modulation[batch, head] * jnp.cos(query - 2 * key)

    return jflash.attention(
        **arrays,
        is_causal="query_offset" in operands,
        segment_ids=segments or None,
        score_mod=None if modulation is None else score_mod,
        dropout_rate=0.3 if "dropout_key" in operands else 0.0,
        implementation=implementation,
        return_residual=True,
        **options,
    )


def cotangents(results: Results) -> Results:
    """Return a weight of its own for each element of a call's results, with the results' sharding."""

    def weigh(result: jax.Array) -> jax.Array:
        return jnp.cos(jnp.arange(result.size, dtype=result.dtype)).reshape(result.shape) + jnp.zeros_like(result)

    return jax.tree.map(weigh, results)


def collectives(compiled: jax.stages.Compiled) -> list[str]:
    """The kind of each operation of a compiled program that moves something between devices."""
    kinds = r"(all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter)(?:-start)?\("
    return re.findall(kinds, compiled.as_text())


def split(operands: Operands) -> tuple[Operands, Operands]:
    """Return the operands that have a gradient, and the others."""
    smooth = {name: array for name, array in operands.items() if name in SMOOTH}
    return smooth, {name: array for name, array in operands.items() if name not in SMOOTH}


def pull_back(function: Callable[[Operands], Results], operands: Operands) -> tuple[Results, Operands]:
    """Results, and the gradients of all operands that have one."""
    smooth, rest = split(operands)
    results, vjp = jax.vjp(lambda smooth: function({**smooth, **rest}), smooth)
    return results, vjp(cotangents(results))[0]


def attend_and_pull_back(operands: Operands, implementation: str | None) -> tuple[Results, Operands]:
    """The same of `attend`."""
    return pull_back(functools.partial(attend, implementation=implementation), operands)


reference = jit(functools.partial(attend_and_pull_back, implementation="reference"))


def loss(operands: Operands, implementation: str | None) -> jax.Array:
    """A scalar that every result moves; rows that see no key have none."""
    results = attend(operands, implementation)
    weights = cotangents(results)
    return sum(jnp.where(jnp.isinf(x), 0, x * weight).sum() for x, weight in zip(results, weights, strict=True))


def stack(trees: Iterable[Any], axis: int = 0) -> Any:
    """One tree of arrays with a new axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis), *trees)


def assert_same(got: Any, expected: Any) -> None:
    """Equal but for the order of sums.

    64 is the square root of the terms in the longest sum here, that of the scale's gradient: roundings add up like a
    random walk, each relative to the largest value about.
    """

    def compare(path: Any, got: Any, expected: Any) -> None:
        got, expected = np.asarray(got), np.asarray(expected)
        assert got.dtype == expected.dtype
        finite = np.abs(expected[np.isfinite(expected)])
        tolerance = 64 * np.finfo(expected.dtype).eps * max(1.0, np.max(finite, initial=0.0))
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(compare, got, expected)
