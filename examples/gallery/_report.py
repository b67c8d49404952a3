"""What the files of the gallery share: random arrays, and a report of how exact a call is and how much it computes."""

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
"""Of arrays; query, key and value come first."""


class Report(NamedTuple):
    """What was found about one call."""

    errors: Mapping[str, tuple[float, float]]
    """For each result the largest error of jflash and of plain attention, both in float32. They are relative to the
    largest number that plain attention has there in float64."""
    seen: float
    """The share of all query-key pairs that count."""
    computed: float | None
    """The share of those that are in tiles which jflash computes; `None`: not measured."""


def normal(*shapes: tuple[int, ...]) -> list[Array]:
    """Normal float32 arrays."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


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

    return output_and_gradients


def compare(attend: Attention, plain: Attention, arrays: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """`Report.errors` of each result; the two return one array, or a dictionary of them."""
    ours, theirs = (jax.jit(function)(*arrays) for function in (attend, plain))
    with jax.enable_x64(True):
        exact = jax.jit(plain)(*(_widened(array) for array in arrays))
    if not isinstance(exact, dict):
        ours, theirs, exact = ({"output": result} for result in (ours, theirs, exact))

    def error(result: Array, exact: Array) -> float:
        return float(np.abs(np.float64(result) - np.float64(exact)).max() / np.abs(exact).max())

    return {name: (error(ours[name], exact[name]), error(theirs[name], exact[name])) for name in exact}


def shares(attend: Attention, query: Array, key: Array, *others: Any) -> tuple[float, float]:
    """`Report.seen` and `Report.computed` of `attend(query, key, value, *others)`.

    With the identity as values the output is the weights, and keys that are seen have some. With NaN in the place of
    ones, a key's NaN comes out, in a column of its own, of every query that shares a tile with it: a weight of 0 times
    NaN is NaN. This shows nothing of padding, by `query_seq_lengths` or `key_value_seq_lengths`, which jflash reads as
    zeros.
    """
    length = key.shape[-3]
    diagonal = lambda number: jnp.where(jnp.eye(length, dtype=bool), number, 0.0)[:, None]
    values = lambda number: jnp.broadcast_to(diagonal(number), (*key.shape[:-1], length))
    attend = jax.jit(attend)
    weights, spread = (attend(query, key, values(number), *others) for number in (1.0, jnp.nan))
    return float((weights > 0).mean()), float(jnp.isnan(spread).mean())


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
