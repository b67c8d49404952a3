"""How well the tiles of a mask function are known, for functions that people use: python mask_functions.py 4096

Of all tiles of 128 x 128 it prints the share that is visited, the share that is visited with a mask, and of the latter
how many need none: they are empty or full, and neither intervals nor the second pass said so. Up to 8,192 tokens the
truth is the function of every pair, beyond that what a second pass over all partial tiles finds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflash._semantics import coverage
from jflash._semantics.coverage import Coverage, Grid
from jflash._semantics.mask_mod import trace_mask_mod

MaskFunction = Callable[[Any, Any, Any, Any], Any]
BATCH, HEADS = 2, 4


def families(length: int, batch: int = BATCH, heads: int = HEADS) -> Mapping[str, MaskFunction]:
    """Return mask functions by name, for self-attention of that many tokens, the same on every run."""
    random = np.random.default_rng(0)
    array = lambda numbers: jnp.asarray(np.asarray(numbers), jnp.int32)
    boundaries = np.sort(random.choice(np.arange(1, length), max(2, length // 512), replace=False))
    documents = array(np.searchsorted(boundaries, np.arange(length), side="right"))
    # Runs of 40 to 90 tokens in no order, three or so of each document.
    runs = np.repeat(np.arange(length // 40 + 1), random.integers(40, 90, length // 40 + 1))[:length]
    packed = array(random.permutation(length // 40 + 1)[runs] % max(2, length // 120))
    mixed = array(random.integers(0, 8, (batch, length)))
    prefix = array(random.integers(1, length, batch))
    images = np.zeros(length, int)
    for number, first in enumerate(range(length // 16 + 5, length - length // 8, length // 5)):
        images[first : first + length // 9] = number + 1
    images = array(images)
    windows = array([64, 256, length // 4, length][:heads])
    side = int(np.sqrt(length))
    random_blocks = array([random.choice(max(length // 64, 1), 3) for _ in range(-(-length // 64))])
    chosen = jnp.asarray(random.random((heads, -(-length // 64), -(-length // 64))) < 0.15)
    ancestors, base = jnp.asarray(tree_ancestors(min(length, 512))), length - min(length, 512)
    slopes = jnp.asarray(random.random(heads), jnp.float32)
    return {
        "causal": lambda b, h, q, k: k <= q,
        "window": lambda b, h, q, k: (q - k >= 0) & (q - k < 256),
        "symmetric window": lambda b, h, q, k: jnp.abs(q - k) <= 256,
        "window of each head": lambda b, h, q, k: (k <= q) & (q - k < windows[h]),
        "prefix of each entry": lambda b, h, q, k: (k <= q) | (k < prefix[b]),
        "documents": lambda b, h, q, k: documents[q] == documents[k],
        "causal documents": lambda b, h, q, k: (documents[q] == documents[k]) & (k <= q),
        "documents in no order": lambda b, h, q, k: packed[q] == packed[k],
        "documents mixed": lambda b, h, q, k: mixed[b, q] == mixed[b, k],
        "images in text": lambda b, h, q, k: (k <= q) | ((images[q] == images[k]) & (images[q] > 0)),
        "frames": lambda b, h, q, k: k // 96 <= q // 96,
        "window of frames": lambda b, h, q, k: (q // 96 - k // 96 >= 0) & (q // 96 - k // 96 < 4),
        "dilated": lambda b, h, q, k: ((q - k) % 1000 == 0) & (q >= k),
        "dilated window": lambda b, h, q, k: ((q - k) % 4 == 0) & (jnp.abs(q - k) <= 512),
        "neighbourhood": lambda b, h, q, k: (jnp.abs(q // side - k // side) <= 3) & (jnp.abs(q % side - k % side) <= 3),
        "BigBird": lambda b, h, q, k: (
            (jnp.abs(q // 64 - k // 64) <= 1) | (q < 64) | (k < 64) | jnp.any(random_blocks[q // 64] == k // 64)
        ),
        "sinks and window": lambda b, h, q, k: ((k < 4) | (q - k < 512)) & (k <= q),
        "strided": lambda b, h, q, k: (k <= q) & ((q - k < 128) | (k % 512 >= 496)),
        "tree": lambda b, h, q, k: jnp.where(k < base, True, (q >= base) & ancestors[q - base, k - base]),
        "block table": lambda b, h, q, k: chosen[h, q // 64, k // 64] & (k <= q),
        "distance": lambda b, h, q, k: jnp.exp(-slopes[h] * jnp.abs(q - k).astype(jnp.float32) / 64) > 0.01,
        "butterfly": lambda b, h, q, k: ((q // 128) ^ (k // 128)) < 2,
        "odd heads causal": lambda b, h, q, k: jnp.where(h % 2 == 1, k <= q, True),
    }


def tree_ancestors(nodes: int) -> np.ndarray:
    """Return `[nodes, nodes]`: whether the second is an ancestor of the first in a random tree, or the first itself."""
    random, found = np.random.default_rng(1), np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        found[node] |= found[random.integers(0, node)]
    return found


class Row(NamedTuple):
    """What is known of a function's tiles, and what is true."""

    tiles: int
    visited: int
    partial: int
    """How many are visited with a mask."""
    wrongly: int
    """How many of those are empty or full."""
    milliseconds: float
    """How long the map takes to make, compiled."""

    def __str__(self) -> str:
        """Return the cells of a table."""
        share = lambda count: f"{count / self.tiles:.2%}"
        return f"{share(self.visited)} | {share(self.partial)} | {self.wrongly} | {self.milliseconds:.1f}"


def measure(function: MaskFunction, length: int, repeats: int = 3) -> Row:
    """Make the map of a function, and hold it against the truth."""
    traced = trace_mask_mod(function)
    by_batch, by_head, *_ = traced.mask_mod.looks_at
    grid = Grid(BATCH if by_batch else 1, HEADS if by_head else 1, length, length)
    make = lambda: coverage.of_mask_mod(traced.mask_mod, traced.arrays, *grid[:4])
    found, times = Coverage.decoded(jax.block_until_ready(make())), []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(make())
        times.append(time.perf_counter() - start)
    found = Coverage(*map(np.asarray, found))
    truth = by_pairs(function, grid) if length <= 8192 else by_second_pass(traced, grid, found)
    assert not (found.full & ~truth.full).any()
    assert not (truth.some & ~found.some).any()
    partial = found.some & ~found.full
    wrongly = partial & ~(truth.some & ~truth.full)
    return Row(partial.size, int(found.some.sum()), int(partial.sum()), int(wrongly.sum()), 1e3 * min(times, default=0))


def by_pairs(function: MaskFunction, grid: Grid) -> Coverage:
    """The truth, by the function of all pairs, a batch entry and head at a time."""
    queries, keys = jnp.arange(grid.queries, dtype=jnp.int32), jnp.arange(grid.keys, dtype=jnp.int32)
    pairs = jax.jit(
        lambda b, h: jax.vmap(jax.vmap(lambda q, k: function(b, h, q, k), (None, 0)), (0, None))(queries, keys)
    )
    rows, columns = grid.tiles
    full, some = (np.zeros((grid.batch, grid.heads, rows, columns), bool) for _ in range(2))
    for entry, head in np.ndindex(grid.batch, grid.heads):
        seen = np.asarray(pairs(jnp.int32(entry), jnp.int32(head))).reshape(rows, grid.tile, columns, grid.tile)
        full[entry, head], some[entry, head] = seen.all((1, 3)), seen.any((1, 3))
    return Coverage(full, some)


def by_second_pass(traced: Any, grid: Grid, found: Coverage) -> Coverage:
    """The truth, by a look at the pairs of all tiles that are called partial."""
    look = jax.jit(lambda arrays, found: coverage.refined(traced.mask_mod, arrays, grid, found, found.partial))
    return Coverage(*map(np.asarray, look(traced.arrays, Coverage(*map(jnp.asarray, found)))))


def main() -> None:
    """Print a row for each function."""
    length = int(sys.argv[1])
    print("| function | visited | with a mask | of those, empty or full | ms |\n|---|---|---|---|---|")
    for name, function in families(length).items():
        print(f"| {name} | {measure(function, length)} |", flush=True)


if __name__ == "__main__":
    main()
