"""The cost of each recipe of the gallery: its time relative to a full call of `jflash.attention` on the same arrays.

    python examples/gallery/costs.py              # prints the figures
    python examples/gallery/costs.py --write      # puts them into the table of README.md

Recipe and full call take turns, round by round, and the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import alibi
import block_table
import causal
import cross_attention
import decoding
import hessian_vector_product
import jax
import jax.numpy as jnp
import mask_mods
import merging
import neighborhood
import numpy as np
import packed_documents
import paged_cache
import per_example_gradients
import prefix_lm
import qk_clip
import ragged_batch
import relative_bias
import rematerialization
import score_mods
import sliding_window
import soft_cap
import streaming
import tree_attention
import triangle_attention
import tyro
from _report import Attention, normal, with_gradients
from jax import Array
from relative_bias import BUCKETS
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jflash

README = pathlib.Path(__file__).with_name("README.md")
TOKENS, HEADS, HEAD_DIM = 4096, 8, 64
COLUMNS = ("seen", "forward", "with gradients", "temporary MiB")
CAUSAL = (TOKENS + 1) / (2 * TOKENS)
FILLED, DECODED = 1024, 32
"""The places filled before, of a cache of `TOKENS`, and how many tokens are decoded then."""


class Case(NamedTuple):
    """A recipe, and the full call that it is held against."""

    recipe: Attention
    arrays: tuple[Any, ...]
    seen: float
    """The share of all query-key pairs that count."""
    full: Attention
    full_arrays: tuple[Any, ...]
    work: Literal["both", "forward", "gradients"] = "both"
    """The work that is timed: output, and output with gradients; output alone; or functions that give gradients, as
    they are."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measure what each recipe costs: float32, 4,096 tokens, 8 heads of 64, or as many pairs in another shape."""

    rounds: int = 9
    """Measurements of each recipe."""
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


def _windowed(window: int) -> float:
    return (window * TOKENS - window * (window - 1) / 2) / TOKENS**2


def _packed_documents() -> Case:
    lengths = np.array([1100, 300, 50, 900, 600, 146, 700, 300])
    seen = (lengths * (lengths + 1)).sum().item() / 2 / TOKENS**2
    return beside_full(packed_documents.attend, seen, jnp.repeat(jnp.arange(len(lengths)), lengths)[None])


def _prefix_lm(way: Attention) -> Case:
    prefix = TOKENS // 4
    return beside_full(way, CAUSAL + prefix * (prefix - 1) / 2 / TOKENS**2, jnp.array([prefix]))


def _neighborhood() -> Case:
    side = math.isqrt(TOKENS)
    wide = lambda query, key, value: neighborhood.attend(query, key, value, side)
    return beside_full(wide, neighborhood.mask(side, side).mean().item())


def _mask_function(make: Callable[[int], mask_mods.MaskMod]) -> Case:
    """With as many batch entries as a function looks at."""
    batch = 2 if make is mask_mods.prefix else 1
    index = jnp.ix_(*map(jnp.arange, (batch, HEADS, TOKENS, TOKENS)))
    seen = float(np.mean(np.asarray(make(TOKENS)(*index))))
    recipe = lambda query, key, value: mask_mods.attend(query, key, value, make)
    return beside_full(recipe, seen, shape=(batch, TOKENS, HEADS, HEAD_DIM))


def _block_table() -> Case:
    arrays = normal(*[(1, TOKENS, HEADS, HEAD_DIM)] * 3)
    blocks = np.asarray(block_table.choose(*arrays[:2])).sum(axis=(2, 3)).mean()
    own = TOKENS / block_table.BLOCK
    seen = ((blocks - own / 2) * block_table.BLOCK**2 + own * block_table.BLOCK / 2) / TOKENS**2
    return beside_full(block_table.attend, float(seen))


def _tree_attention() -> Case:
    nodes = tree_attention.NODES
    parent = tree_attention.parents(nodes)
    hidden = nodes**2 - np.asarray(tree_attention.ancestors(parent)).sum().item()
    arrays = normal(*[(1, length, HEADS, HEAD_DIM) for length in (nodes, TOKENS, TOKENS)])
    return Case(tree_attention.attend, (*arrays, parent), 1 - hidden / (nodes * TOKENS), full, tuple(arrays), "forward")


def _cross_attention() -> Case:
    lengths = np.array([(2048, 2048), (1400, 1024), (600, 512), (200, 1800)])
    seen = lengths.prod(axis=1).sum().item() / TOKENS**2
    return beside_full(cross_attention.attend, seen, jnp.asarray(lengths), shape=(4, TOKENS // 2, HEADS, HEAD_DIM))


def _triangle_attention(head_dim: int) -> Case:
    heads, residues = triangle_attention.HEADS, 256
    (pair_bias,) = normal((heads, residues, residues))
    return beside_full(triangle_attention.attend, 1.0, pair_bias, shape=(residues, residues, heads, head_dim))


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


def _paged_cache() -> Case:
    """As `_decoding`, and beside the same full call."""
    dense = _decoding(decoding.decode, TOKENS)
    batch, page_size = 8, 64
    table = paged_cache.shuffled(batch, TOKENS, page_size)

    def tokens(query: Array, key: Array, value: Array, *pages: Array) -> Array:
        at = FILLED + jnp.arange(DECODED)
        step = lambda pages, token: paged_cache.decode(pages, *token, table)
        return jax.lax.scan(step, pages, (query, key, value, at))[1]

    pages = normal(*[(table.size, page_size, HEADS, HEAD_DIM)] * 2)
    return dense._replace(recipe=tokens, arrays=(*dense.arrays[:3], *pages))


def _ragged_batch() -> Case:
    """One prompt of 128 tokens beside 7 sequences that decode, of `FILLED` keys each, in one call; beside a full call
    of as many sequences with 128 queries each and a dense cache."""
    prompt, seqs, page_size = 128, 8, 64
    step = [(prompt, FILLED), *[(1, FILLED)] * (seqs - 1)]
    batch = ragged_batch.described(step, page_size)
    count = prompt + seqs - 1
    pages = seqs * FILLED // page_size
    arrays = normal((count, HEADS, HEAD_DIM), (pages, page_size, 2 * HEADS, HEAD_DIM))
    dense = tuple(normal((seqs, prompt, HEADS, HEAD_DIM), *[(seqs, TOKENS, HEADS, HEAD_DIM)] * 2))
    pairs = count * FILLED - prompt * (prompt - 1) / 2
    return Case(ragged_batch.attend, (*arrays, *batch), pairs / (seqs * prompt * TOKENS), full, dense, "forward")


def _per_example_gradients() -> Case:
    """Measure per-example gradients beside the gradient of the sum of the losses."""
    examples, tokens = 8, TOKENS // 8
    arrays = normal((3, HEADS * HEAD_DIM, HEADS, HEAD_DIM), (examples, tokens, HEADS * HEAD_DIM))

    def gradient(weights: Array, examples: Array) -> Array:
        loss = lambda weights, example: per_example_gradients.loss(jflash.attention, weights, example)
        return jax.grad(lambda weights: jax.vmap(loss, (None, 0))(weights, examples).sum())(weights)

    seen = (tokens + 1) / (2 * tokens)
    arrays = tuple(arrays)
    return Case(per_example_gradients.attend, arrays, seen, gradient, arrays, "gradients")


def _hessian_vector_product() -> Case:
    """Measure a Hessian-vector product beside forward and backward."""
    arrays = tuple(normal(*[(1, TOKENS, HEADS, HEAD_DIM)] * 6))
    return Case(hessian_vector_product.attend, arrays, CAUSAL, with_gradients(full), arrays[:3], "gradients")


def _rematerialization() -> Case:
    """Beside the same layers, of which nothing is kept."""
    layers, width = 2, HEAD_DIM
    inputs, weights = normal((1, TOKENS, HEADS, width), (layers, 3, HEADS, width, width))
    arrays = inputs, weights / width**0.5
    return Case(rematerialization.attend, arrays, CAUSAL, rematerialization.forget, arrays, "gradients")


WINDOW, FIRST = sliding_window.WINDOW, streaming.FIRST
CASES: Mapping[tuple[str, str], Callable[[], Case]] = {
    ("causal", "attend"): lambda: beside_full(causal.attend, CAUSAL),
    ("sliding_window", "attend"): lambda: beside_full(sliding_window.attend, _windowed(WINDOW), *normal((HEADS,))),
    ("streaming", "attend"): lambda: beside_full(streaming.attend, _windowed(WINDOW) + FIRST / TOKENS),
    ("packed_documents", "attend"): _packed_documents,
    ("prefix_lm", "attend"): lambda: _prefix_lm(prefix_lm.attend),
    ("prefix_lm", "with_mask_mod"): lambda: _prefix_lm(prefix_lm.with_mask_mod),
    ("prefix_lm", "with_mask"): lambda: _prefix_lm(prefix_lm.with_mask),
    ("prefix_lm", "with_score_mod"): lambda: _prefix_lm(prefix_lm.with_score_mod),
    ("neighborhood", "attend"): _neighborhood,
    **{("mask_mods", make.__name__): functools.partial(_mask_function, make) for make in mask_mods.MASKS},
    ("block_table", "attend"): _block_table,
    ("tree_attention", "attend"): _tree_attention,
    ("cross_attention", "attend"): _cross_attention,
    ("alibi", "attend"): lambda: beside_full(alibi.attend, CAUSAL, alibi.paper_slopes(HEADS)),
    ("relative_bias", "attend"): lambda: beside_full(relative_bias.attend, 1.0, *normal((BUCKETS, HEADS))),
    ("relative_bias", "with_bias"): lambda: beside_full(relative_bias.with_bias, 1.0, *normal((BUCKETS, HEADS))),
    ("triangle_attention", "heads of 32"): lambda: _triangle_attention(32),
    ("triangle_attention", "heads of 8"): lambda: _triangle_attention(8),
    ("soft_cap", "attend"): lambda: beside_full(soft_cap.attend, CAUSAL),
    ("score_mods", "attend"): lambda: beside_full(score_mods.attend, CAUSAL, *normal((HEADS,))),
    ("decoding", "decode"): lambda: _decoding(decoding.decode, TOKENS),
    ("decoding", "decode_in_ring"): lambda: _decoding(decoding.decode_in_ring, WINDOW),
    ("paged_cache", "decode"): _paged_cache,
    ("ragged_batch", "attend"): _ragged_batch,
    ("merging", "attend"): lambda: beside_full(merging.attend, CAUSAL),
    ("qk_clip", "output"): lambda: beside_full(qk_clip.output, CAUSAL),
    ("per_example_gradients", "attend"): _per_example_gradients,
    ("hessian_vector_product", "attend"): _hessian_vector_product,
    ("rematerialization", "attend"): _rematerialization,
}
"""The cases by file and function."""


class Timed(NamedTuple):
    """A case's two programs, compiled."""

    recipe: Callable[[], object]
    full: Callable[[], object]
    mebibytes: float
    """Temporary memory of the recipe, as XLA has planned it."""

    def ratio(self) -> float:
        """The ratio of the times of one call each."""
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
    for name, case in track(CASES.items(), "recipes", console=console):
        figures[name] = measure(case(), settings.rounds)
        jax.clear_caches()
    table = Table("recipe", *COLUMNS, caption=f"{datetime.date.today()}, jax {jax.__version__}")
    for (file, function), cells in figures.items():
        table.add_row(f"{file}.{function}", *cells)
    console.print(table)
    if settings.write:
        write(figures)


if __name__ == "__main__":
    main(tyro.cli(Settings))
