"""The common ground of the gallery: random arrays, and a report of how exact a call is and how much it computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console

Attention = Callable[..., Any]
"""A function of arrays; query, key and value come first."""


class Report(NamedTuple):
    """The findings about one call."""

    errors: Mapping[str, tuple[float, float]]
    """The largest error of jflash and of plain attention for each result, both in float32.

    They are relative to the largest number that plain attention has there in float64.
    """
    seen: float
    """The share of all query-key pairs that count."""
    computed: float | None
    """The share of those that are in tiles which jflash computes; `None`: not measured."""


def normal(*shapes: tuple[int, ...]) -> list[Array]:
    """Normal float32 arrays."""
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes]


def with_gradients(attend: Attention) -> Attention:
    """The output and, of a weighted sum of it, the gradients with respect to all arguments that have one."""
    names = list(inspect.signature(attend).parameters)

    def loss(*arrays: Any) -> tuple[Array, Array]:
        out = attend(*arrays)
        weights = np.cos(np.arange(out.size)).astype(np.float32).reshape(out.shape)
        return (out * weights).sum(), out

    def output_and_gradients(*arrays: Any) -> dict[str, Array]:
        smooth = [place for place, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]
        gradients, out = jax.grad(loss, smooth, has_aux=True)(*arrays)
        return {"output": out, **{f"d_{names[place]}": each for place, each in zip(smooth, gradients, strict=True)}}

    output_and_gradients.__name__ = attend.__name__
    return output_and_gradients


def compare(ways: Sequence[Attention], plain: Attention, arrays: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """`Report.errors` of the results of one way to compute attention, or of several.

    They and `plain` return an array or a dictionary of arrays.
    """
    theirs = jax.jit(plain)(*arrays)
    with jax.enable_x64(True):
        exact = jax.jit(plain)(*(_widened(array) for array in arrays))

    def both(*results: Array) -> tuple[float, float]:
        ours, theirs, exact = (np.asarray(result, np.float64) for result in results)
        size = np.abs(exact).max()
        return float(np.abs(ours - exact).max() / size), float(np.abs(theirs - exact).max() / size)

    errors = {}
    for way in ways:
        pairs = jax.tree.map(both, jax.jit(way)(*arrays), theirs, exact)
        named = pairs if isinstance(pairs, dict) else {"output": pairs}
        of = f" {way.__name__}" if len(ways) > 1 else ""
        errors |= {name + of: pair for name, pair in named.items()}
    return errors


def shares(attend: Attention, query: Array, key: Array, *others: Any) -> tuple[float, float]:
    """`Report.seen` and `Report.computed` of `attend(query, key, value, *others)`.

    With the identity as values the output is the weights, and keys that are seen have some. With NaN in the place of
    ones, a key's NaN comes out, in a column of its own, of every query that shares a tile with it: a weight of 0 times
    NaN is NaN. This shows nothing of padding, by `query_seq_lengths` or `key_value_seq_lengths`, which jflash reads as
    zeros.
    """
    identity = np.eye(key.shape[-3], dtype=np.float32)[:, None]
    diagonals = identity, np.where(identity, np.float32(np.nan), identity)
    values = [np.broadcast_to(diagonal, (*key.shape[:-1], len(diagonal))) for diagonal in diagonals]
    attend = jax.jit(attend)
    weights, spread = (np.asarray(attend(query, key, value, *others)) for value in values)
    return float((weights > 0).mean()), float(np.isnan(spread).mean())


def report(title: str, errors: Mapping[str, tuple[float, float]], seen: float, computed: float | None = None) -> Report:
    """Print it, and return it."""
    console = Console(highlight=False)
    console.print(title, soft_wrap=True)
    for name, (ours, plain) in errors.items():
        console.print(f"  error of {name}: {ours:.1e}; of plain attention: {plain:.1e}", soft_wrap=True)
    tiles = "" if computed is None else f"; computed: {computed:.1%}"
    console.print(f"  query-key pairs seen: {seen:.1%}{tiles}")
    return Report(errors, seen, computed)


def _widened(array: Any) -> Any:
    return np.asarray(array, np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array
