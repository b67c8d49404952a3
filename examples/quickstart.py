"""jflash in a minute: attention and its gradients, exact, without an array of all pairs of tokens.

The program runs causal attention over random data with jflash and with `jax.nn.dot_product_attention`. It prints which
of jflash's implementations served the call, how far both results are from float64, how long they took and how much
temporary memory they needed.

    python examples/quickstart.py --tokens 8192 --heads 4
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array
from rich.console import Console
from rich.table import Table

import jflash


def with_jflash(query: Array, key: Array, value: Array) -> Array:
    """Causal attention; all three are [batch, tokens, heads, head_dim]."""
    return jflash.attention(query, key, value, is_causal=True)


def with_jax_nn(query: Array, key: Array, value: Array) -> Array:
    """The same call to jax.nn, which holds a number for every pair of tokens."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def as_defined(query: Array, key: Array, value: Array) -> Array:
    """The formula, softmax(Q K^T / sqrt(head_dim)) V: the judge of both, in float64."""
    tokens, head_dim = query.shape[1], query.shape[3]
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * head_dim**-0.5
    logits = jnp.where(jnp.tri(tokens, dtype=bool), logits, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)


def with_gradients(attend: Callable[..., Array]) -> Callable[..., tuple[Array, tuple[Array, ...]]]:
    """Return (query, key, value, weights) -> a weighted sum of the outputs, and its gradients of the first three."""

    def loss(query: Array, key: Array, value: Array, weights: Array) -> Array:
        return (attend(query, key, value) * weights).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def largest_difference(some: Sequence[Array], others: Sequence[Array]) -> float:
    """The largest absolute difference between two lists of arrays."""
    differences = [np.abs(np.float64(a) - np.float64(b)) for a, b in zip(some, others, strict=True)]
    return max(float(difference.max()) for difference in differences)


def median_ms(functions: Sequence[Callable[..., object]], arguments: Sequence[Array], repeats: int) -> list[float]:
    """The median time of each function; they take turns, so that whatever else the machine does meets them all."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def main(tokens: int = 8192, heads: int = 4, head_dim: int = 64, repeats: int = 3) -> None:
    """Compare jflash with jax.nn on causal attention in float32.

    Args:
      tokens: length of the sequence.
      heads: number of heads.
      head_dim: size of a head.
      repeats: timed runs, of which the table shows the median.
    """
    console = Console(highlight=False)
    shape = (1, tokens, heads, head_dim)
    data = [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)]
    query, key, value, weights = data

    # This says which implementation serves, and why no other, from the shapes alone: nothing is computed.
    console.print(jflash.explain(query, key, value, is_causal=True), soft_wrap=True)

    peers = [with_jflash, with_jax_nn]
    forward = [jax.jit(attend).lower(query, key, value).compile() for attend in peers]
    training = [jax.jit(with_gradients(attend)).lower(query, key, value, weights).compile() for attend in peers]

    outputs = [[function(query, key, value)] for function in forward]
    gradients = [function(query, key, value, weights)[1] for function in training]
    first_head = lambda arrays: [array[:, :, :1] for array in arrays]
    with jax.enable_x64(True):
        wide = [array.astype(jnp.float64) for array in first_head(data)]
        true_output = [as_defined(*wide[:3])]
        true_gradients = jax.jit(with_gradients(as_defined))(*wide)[1]

    title = f"Causal attention, float32, {tokens:,} tokens, {heads} heads of {head_dim}"
    table = Table("", "jflash", "jax.nn", "jax.nn / jflash", title=title)
    for column in table.columns[1:]:
        column.justify = "right"

    def add_row(what: str, figures: list[float], form: str, *, end_section: bool = False) -> None:
        ours, theirs = figures
        ratio = f"{theirs / ours:,.1f}" if ours else "-"
        table.add_row(what, form.format(ours), form.format(theirs), ratio, end_section=end_section)

    errors = lambda found, true: [largest_difference(first_head(each), true) for each in found]
    add_row("error of the output *", errors(outputs, true_output), "{:.1e}")
    add_row("error of the gradients *", errors(gradients, true_gradients), "{:.1e}", end_section=True)
    add_row("forward, ms", median_ms(forward, data[:3], repeats), "{:,.0f}")
    add_row("forward and backward, ms", median_ms(training, data, repeats), "{:,.0f}", end_section=True)
    mebibytes = lambda functions: [each.memory_analysis().temp_size_in_bytes / 2**20 for each in functions]
    add_row("temporary memory, forward, MiB", mebibytes(forward), "{:,.1f}")
    add_row("temporary memory, with backward, MiB", mebibytes(training), "{:,.1f}")
    console.print(table)
    console.print("* the largest, against the formula in float64, first head")
    console.print(
        f"jflash and jax.nn differ by at most {largest_difference(*outputs):.1e} in the output "
        f"and {largest_difference(*gradients):.1e} in the gradients of query, key and value.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    tyro.cli(main)
