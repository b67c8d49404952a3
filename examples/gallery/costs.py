"""What each recipe of the gallery costs: its time relative to a full call of `jflash.attention` on the same arrays.

    python examples/gallery/costs.py              # prints the figures
    python examples/gallery/costs.py --write      # puts them into the table of README.md

Recipe and full call take turns, round by round, and the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import alibi
import causal
import cross_attention
import decoding
import hessian_vector_product
import jax
import jax.numpy as jnp
import merging
import neighborhood
import numpy as np
import packed_documents
import per_example_gradients
import prefix_lm
import relative_bias
import score_mods
import sliding_window
import soft_cap
import streaming
import triangle_attention
import tyro
from _report import Attention, normal, with_gradients
from jax import Array
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jflash

README = pathlib.Path(__file__).with_name("README.md")
TOKENS, HEADS, HEAD_DIM = 4096, 8, 64
COLUMNS = ("seen", "forward", "with gradients", "temporary MiB")
CAUSAL = (TOKENS + 1) / (2 * TOKENS)
FILLED, DECODED = 1024, 32
"""Of a cache of `TOKENS` places, those that are filled before, and how many tokens are decoded then."""


class Case(NamedTuple):
    """A recipe, and the full call that it is held against."""

    recipe: Attention
    arrays: tuple[Any, ...]
    seen: float
    """The share of all query-key pairs that count."""
    full: Attention
    full_arrays: tuple[Any, ...]
    work: Literal["both", "forward", "gradients"] = "both"
    """What is timed: output, and output with gradients; output alone; or, of functions that give gradients, these."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measure what each recipe costs: float32, 4,096 tokens, 8 heads of 64, or as many pairs in another shape."""

    rounds: int = 9
    """Measurements of each."""
    write: bool = False
    """Put the figures into README.md."""


def full(query: Array, key: Array, value: Array) -> Array:
    """Attention without any option."""
    return jflash.attention(query, key, value)


def beside_full(
    recipe: Attention, seen: float, *others: Any, shape: tuple[int, ...] = (1, TOKENS, HEADS, HEAD_DIM)
) -> Case:
    """A recipe that takes query, key, value and others."""
    arrays = tuple(normal(*[shape] * 3))
    return Case(recipe, (*arrays, *others), seen, full, arrays)


def cases() -> dict[tuple[str, str], Case]:
    """By file and function."""
    window = sliding_window.WINDOW
    windowed = (window * TOKENS - window * (window - 1) / 2) / TOKENS**2
    lengths = np.array([1100, 300, 50, 900, 600, 146, 700, 300])
    documents = jnp.repeat(jnp.arange(len(lengths)), lengths)[None]
    prefix = jnp.array([TOKENS // 4])
    prefixed = CAUSAL + float(prefix[0] * (prefix[0] - 1)) / 2 / TOKENS**2
    (table,) = normal((relative_bias.BUCKETS, HEADS))
    (gates,) = normal((HEADS,))
    side = int(TOKENS**0.5)
    square = neighborhood.mask(side, side).mean().item()
    short = (4, TOKENS // 4, HEADS, HEAD_DIM)
    padded = jnp.array([(1024, 1024), (700, 512), (300, 256), (100, 900)])
    shared = (padded[:, 0] * padded[:, 1]).sum().item() / (4 * (TOKENS // 4) ** 2)
    residues = 256
    (pair_bias,) = normal((triangle_attention.HEADS, residues, residues))
    rows = lambda head_dim: (residues, residues, triangle_attention.HEADS, head_dim)
    wide_neighborhood = lambda query, key, value: neighborhood.attend(query, key, value, side)
    return {
        ("causal", "attend"): beside_full(causal.attend, CAUSAL),
        ("sliding_window", "attend"): beside_full(sliding_window.attend, windowed, gates),
        ("streaming", "attend"): beside_full(streaming.attend, windowed + streaming.FIRST / TOKENS),
        ("packed_documents", "attend"): beside_full(
            packed_documents.attend, (lengths * (lengths + 1)).sum().item() / 2 / TOKENS**2, documents
        ),
        ("prefix_lm", "attend"): beside_full(prefix_lm.attend, prefixed, prefix),
        ("prefix_lm", "with_mask"): beside_full(prefix_lm.with_mask, prefixed, prefix),
        ("prefix_lm", "with_score_mod"): beside_full(prefix_lm.with_score_mod, prefixed, prefix),
        ("neighborhood", "attend"): beside_full(wide_neighborhood, square),
        ("alibi", "attend"): beside_full(alibi.attend, CAUSAL, alibi.paper_slopes(HEADS)),
        ("relative_bias", "attend"): beside_full(relative_bias.attend, 1.0, table),
        ("relative_bias", "with_score_mod"): beside_full(relative_bias.with_score_mod, 1.0, table),
        ("soft_cap", "attend"): beside_full(soft_cap.attend, CAUSAL),
        ("score_mods", "attend"): beside_full(score_mods.attend, CAUSAL, gates),
        ("cross_attention", "attend"): beside_full(cross_attention.attend, shared, padded, shape=short),
        ("merging", "attend"): beside_full(merging.attend, CAUSAL),
        ("triangle_attention", "heads of 32"): beside_full(triangle_attention.attend, 1.0, pair_bias, shape=rows(32)),
        ("triangle_attention", "heads of 8"): beside_full(triangle_attention.attend, 1.0, pair_bias, shape=rows(8)),
        ("decoding", "decode"): _decoding(decoding.decode, TOKENS),
        ("decoding", "decode_in_ring"): _decoding(decoding.decode_in_ring, window),
        ("per_example_gradients", "attend"): _per_example_gradients(),
        ("hessian_vector_product", "attend"): _hessian_vector_product(),
    }


def _decoding(step: Callable[..., Any], places: int) -> Case:
    """Several tokens, so that the cache is changed in place as it is where it is donated."""

    def attend_to_all(cache: Any, query: Array, key: Array, value: Array, position: Array) -> Any:
        cache = decoding.write(cache, key, value, position)
        return cache, jflash.attention(query, *cache)

    def decode(step: Callable[..., Any]) -> Attention:
        def tokens(query: Array, key: Array, value: Array, *cache: Array) -> Array:
            at = FILLED + jnp.arange(DECODED)
            return jax.lax.scan(lambda cache, token: step(cache, *token), cache, (query, key, value, at))[1]

        return tokens

    batch = 8
    new = normal(*[(DECODED, batch, 1, HEADS, HEAD_DIM)] * 3)
    cache = lambda places: normal(*[(batch, places, HEADS, HEAD_DIM)] * 2)
    seen = min(FILLED + DECODED / 2, places) / TOKENS
    every = (*new, *cache(TOKENS))
    return Case(decode(step), (*new, *cache(places)), seen, decode(attend_to_all), every, "forward")


def _per_example_gradients() -> Case:
    """Beside the gradient of the sum of the losses."""
    examples, tokens = 8, TOKENS // 8
    arrays = normal((3, HEADS * HEAD_DIM, HEADS, HEAD_DIM), (examples, tokens, HEADS * HEAD_DIM))

    def gradient(weights: Array, examples: Array) -> Array:
        loss = lambda weights, example: per_example_gradients.loss(jflash.attention, weights, example)
        return jax.grad(lambda weights: jax.vmap(loss, (None, 0))(weights, examples).sum())(weights)

    seen = (tokens + 1) / (2 * tokens)
    arrays = tuple(arrays)
    return Case(per_example_gradients.attend, arrays, seen, gradient, arrays, "gradients")


def _hessian_vector_product() -> Case:
    """Beside forward and backward."""
    arrays = tuple(normal(*[(1, TOKENS, HEADS, HEAD_DIM)] * 6))
    return Case(hessian_vector_product.attend, arrays, CAUSAL, with_gradients(full), arrays[:3], "gradients")


class Timed(NamedTuple):
    """A case's two programs, compiled."""

    recipe: Callable[[], object]
    full: Callable[[], object]
    mebibytes: float
    """Temporary memory of the recipe, as XLA has planned it."""

    def ratio(self) -> float:
        """Of the times of one call each."""
        return _seconds(self.recipe) / _seconds(self.full)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def timed(case: Case, *, gradients: bool) -> Timed:
    """The programs of a case's output, or of its output and gradients."""

    def compiled(function: Attention, arrays: tuple[Any, ...]) -> tuple[Callable[[], object], float]:
        differentiated = with_gradients(function) if gradients and case.work == "both" else function
        program = jax.jit(differentiated).lower(*arrays).compile()
        call = lambda: program(*arrays)
        jax.block_until_ready(call())
        return call, program.memory_analysis().temp_size_in_bytes / 2**20

    recipe, mebibytes = compiled(case.recipe, case.arrays)
    return Timed(recipe, compiled(case.full, case.full_arrays)[0], mebibytes)


def measure(case: Case, rounds: int) -> list[str]:
    """The case's figures, in the order of `COLUMNS`."""
    programs = {
        "forward": timed(case, gradients=False) if case.work != "gradients" else None,
        "gradients": timed(case, gradients=True) if case.work != "forward" else None,
    }
    ratios = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            if program is not None:
                ratios[name].append(program.ratio())
    median = lambda name: f"{statistics.median(ratios[name]):.2f}" if ratios[name] else ""
    last = programs["gradients"] or programs["forward"]
    assert last is not None
    return [f"{case.seen:.0%}", median("forward"), median("gradients"), f"{last.mebibytes:,.0f}"]


def write(figures: Mapping[tuple[str, str], list[str]]) -> None:
    """Put the figures into those rows of README.md whose first link names a file and, as its title, a function."""
    lines = README.read_text().splitlines()
    for number, line in enumerate(lines):
        row = re.match(r'\| .*?\]\((\w+)\.py "([\w ]+)"\)', line)
        if row is not None:
            cells = line.split(" | ")[: -len(COLUMNS)]
            lines[number] = " | ".join([*cells, *figures[row[1], row[2]]]) + " |"
    README.write_text("\n".join(lines) + "\n")


def main(settings: Settings) -> None:
    """Measure, print, and write if asked."""
    jax.config.update("jax_platforms", "cpu")
    console = Console(highlight=False)
    figures = {}
    for name, case in track(cases().items(), "recipes", console=console):
        figures[name] = measure(case, settings.rounds)
        jax.clear_caches()
    table = Table("recipe", *COLUMNS, caption=f"{datetime.date.today()}, jax {jax.__version__}")
    for (file, function), cells in figures.items():
        table.add_row(f"{file}.{function}", *cells)
    console.print(table)
    if settings.write:
        write(figures)


if __name__ == "__main__":
    main(tyro.cli(Settings))
