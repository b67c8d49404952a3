"""Serve a character transformer: continuous batching over a paged cache, beside the same model with a dense cache.

Requests come and go at different times. Each step computes one token of every request that decodes, and beside them a
piece of a prompt, in one call of `jflash.ragged_paged_attention` for each layer. Pages are taken when a request begins
and given back when it ends; requests with the same beginning share the pages of it. Always the likeliest token comes
next, so both servers must write the same text.

    python examples/serve.py
    python examples/train_transformer.py --framework flax --weights small.npz
    python examples/serve.py --weights small.npz
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import text
import transformer_flax
import tyro
from flax import nnx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scheduler import PagePool, Request, Scheduler

import jflash

Caches = list[Any]
"""The cache of each layer: pages with keys and values, or a pair of dense arrays."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Serve requests by a paged and by a dense cache, and compare text, speed and memory."""

    requests: int = 48
    """How many there are. Every other begins with the same `prefix` characters."""
    prefix: int = 64
    """Characters that requests share."""
    longest: int = 96
    """Characters that a prompt has besides, at most."""
    wanted: int = 96
    """Tokens that a request asks for, at most."""
    every: float = 2.0
    """Steps from one arrival to the next, on average."""
    slots: int = 16
    """Requests that run at once."""
    budget: int = 64
    """Tokens of a step: one for each request that decodes, and a piece of a prompt."""
    page_size: int = 16
    """Keys in a page."""
    pages: int = 144
    """Pages of the cache."""
    length: int = 256
    """Tokens of the longest sequence that the model has positions for."""
    width: int = 128
    """The model's width, as in train_transformer.py."""
    heads: int = 4
    """The model's attention heads."""
    layers: int = 2
    """The model's layers."""
    weights: pathlib.Path | None = None
    """What train_transformer.py wrote; by default weights are random."""
    rounds: int = 3
    """The number of timed rounds, in turns, after a first one that compiles."""
    seed: int = 0
    """The seed of the weights and of the requests."""


def load(settings: Settings) -> tuple[Any, Any]:
    """The model's structure and its weights.

    Raises:
      SystemExit: if the file has those of a model of another shape.
    """
    shape = {name: getattr(settings, name) for name in ("length", "width", "heads", "layers", "seed")}
    model = transformer_flax.Transformer(text.TOKENS, attention="jflash", **shape)
    structure, weights = nnx.split(model)
    if settings.weights is None:
        return structure, weights
    leaves, tree = jax.tree.flatten(weights)
    with np.load(settings.weights) as file:
        found = [file[name] for name in file.files]
    if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in found]:
        raise SystemExit(f"{settings.weights} has the weights of a model of another shape than {shape}.")
    return structure, jax.tree.unflatten(tree, list(map(jnp.asarray, found)))


def draw(settings: Settings) -> list[Request]:
    """Requests with prompts from the library's text."""
    random, tokens = np.random.default_rng(settings.seed), text.standard_library().tolist()
    arrivals = np.cumsum(random.exponential(settings.every, settings.requests)).astype(int).tolist()
    requests = []
    for number, arrival in enumerate(arrivals):
        start, length = int(random.integers(len(tokens) // 2)), int(random.integers(1, settings.longest + 1))
        prefix = tokens[-settings.prefix :] if number % 2 == 0 else []
        prompt = (*prefix, *tokens[start : start + length])
        requests.append(Request(prompt, int(random.integers(1, settings.wanted + 1)), arrival))
    longest = max(len(request.prompt) + request.wanted for request in requests)
    if longest > settings.length:
        raise SystemExit(f"`--length` must be at least {longest}, for the longest request. Got {settings.length}.")
    return requests


def following(
    model: Any, tokens: jax.Array, positions: jax.Array, attend: Callable[..., jax.Array], last: Any
) -> jax.Array:
    """The likeliest token after each of the `last`; `attend(layer, query, key, value)` has the cache."""
    hidden = model.token(tokens) + model.position(positions)
    for layer, block in enumerate(model.blocks):
        normal = block.attention_norm(hidden)
        heads = [project(normal) for project in (block.attention.query, block.attention.key, block.attention.value)]
        hidden += block.attention.out(attend(layer, *heads))
        hidden += block.down(nnx.gelu(block.up(block.perceptron_norm(hidden))))
    return model.token.attend(model.norm(hidden[last])).argmax(axis=-1)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def paged_step(structure: Any, weights: Any, caches: Caches, step: Any) -> tuple[Caches, jax.Array]:
    """One step over a paged cache: in each layer first the new keys and values, then the attention that sees them."""
    caches, batch = list(caches), step[3:]

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        caches[layer] = jflash.update_pages(caches[layer], key, value, *batch)
        return jflash.ragged_paged_attention(query, caches[layer], *batch, sm_scale=query.shape[-1] ** -0.5)

    model = nnx.merge(structure, weights)
    return caches, following(model, step.tokens, step.positions, attend, step.last)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def dense_step(
    structure: Any, weights: Any, caches: Caches, tokens: jax.Array, before: jax.Array, count: jax.Array
) -> tuple[Caches, jax.Array]:
    """Tokens `[slots, T]`, `count` of each row, behind the `before` that its cache `[slots, length, heads, H]` has."""
    caches = list(caches)
    positions = before[:, None] + jnp.arange(tokens.shape[1])[None]

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        put = jax.vmap(lambda cache, new, start: jax.lax.dynamic_update_slice_in_dim(cache, new, start, 0))
        keys, values = (put(cache, new, before) for cache, new in zip(caches[layer], (key, value), strict=True))
        caches[layer] = keys, values
        lengths = dict(query_seq_lengths=count, key_value_seq_lengths=before + count)
        return jflash.attention(query, keys, values, is_causal=True, query_offset=before, **lengths)

    last = jnp.arange(len(tokens)), jnp.maximum(count, 1) - 1
    return caches, following(nnx.merge(structure, weights), tokens, positions, attend, last)


@dataclasses.dataclass
class Served:
    """What a server did."""

    name: str
    seconds: float
    steps: int
    mebibytes: float
    """The size of the cache in MiB."""
    texts: list[list[int]]


def serve_paged(settings: Settings, model: Any, requests: Sequence[Request], advance: Any) -> tuple[Served, PagePool]:
    """Continuous batching: every step takes what tokens there are."""
    pool = PagePool(settings.pages, settings.page_size)
    width = -(-settings.length // settings.page_size)
    scheduler = Scheduler(requests, pool, slots=settings.slots, budget=settings.budget, width=width)
    head_dim = settings.width // settings.heads
    shape = settings.pages, settings.page_size, 2 * settings.heads, head_dim
    caches = [jnp.zeros(shape) for _ in range(settings.layers)]
    start = time.perf_counter()
    while scheduler.is_busy:
        caches, tokens = paged_step(*model, caches, scheduler.next_step())
        advance(scheduler.advance(np.asarray(tokens)))
    seconds = time.perf_counter() - start
    size = sum(cache.nbytes for cache in caches) / 2**20
    texts = [request.got for request in requests]
    return Served("paged, continuous batches", seconds, scheduler.steps, size, texts), pool


def serve_dense(settings: Settings, model: Any, requests: Sequence[Request], advance: Any) -> Served:
    """Batch after batch: each begins when the last request of the one before is done. No arrival is waited for."""
    slots, head_dim = settings.slots, settings.width // settings.heads
    longest = max(len(request.prompt) for request in requests)
    shape = slots, settings.length, settings.heads, head_dim
    caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(settings.layers)]
    ints = lambda *axes: np.zeros(axes, np.int32)
    texts: list[list[int]] = []
    steps, start = 0, time.perf_counter()
    for first in range(0, len(requests), slots):
        batch = requests[first : first + slots]
        prompts, count, before = ints(slots, longest), ints(slots), ints(slots)
        for row, request in enumerate(batch):
            prompts[row, : len(request.prompt)], count[row] = request.prompt, len(request.prompt)
        caches, tokens = dense_step(*model, caches, prompts, before, count)
        got = [np.asarray(tokens)]
        wanted = np.array([request.wanted for request in batch] + [0] * (slots - len(batch)))
        advance(len(batch))
        while (running := wanted > len(got)).any():
            before, count = before + count, running.astype(np.int32)
            caches, tokens = dense_step(*model, caches, got[-1][:, None].astype(np.int32), before, count)
            got.append(np.asarray(tokens))
            advance(int(running.sum()))
        steps += len(got)
        texts += [[int(step[row]) for step in got[: request.wanted]] for row, request in enumerate(batch)]
    seconds = time.perf_counter() - start
    size = sum(cache.nbytes for cache in jax.tree.leaves(caches)) / 2**20
    return Served("dense, batch after batch", seconds, steps, size, texts)


def main(settings: Settings) -> None:
    """Serve the same requests twice, and compare."""
    console = Console(highlight=False)
    model, requests = load(settings), draw(settings)
    total = sum(request.wanted for request in requests)
    console.print(explained(settings), soft_wrap=True)
    rounds: list[tuple[Served, Served]] = []
    with Progress(console=console) as progress:
        bar = progress.add_task("serving", total=2 * total * (settings.rounds + 1))
        advance = functools.partial(progress.advance, bar)
        for _ in range(settings.rounds + 1):
            requests = draw(settings)
            paged, pool = serve_paged(settings, model, requests, advance)
            rounds.append((paged, serve_dense(settings, model, requests, advance)))
    table = Table("cache", "tokens a second", "steps", "MiB", title=f"{len(requests)} requests, {total:,} tokens")
    for served in zip(*rounds[1:], strict=True):
        table.add_row(*row(served))
    shared = sum(request.shared for request in requests)
    console.print(table)
    console.print(
        f"Pages: {pool.most_used} of {settings.pages} in use at most, {shared} shared, "
        f"{len(pool.free)} free at the end.\n"
        f"The first answer: {written(requests[0].got)!r}",
        soft_wrap=True,
    )
    differing = sum(one != other for one, other in zip(*(served.texts for served in rounds[-1]), strict=True))
    if differing:
        raise SystemExit(f"{differing} of {len(requests)} texts differ.")
    console.print("Both caches gave the same text.")


def row(rounds: Sequence[Served]) -> tuple[str, ...]:
    """For the table: medians, and the slowest and the fastest round."""
    last = rounds[-1]
    speeds = sorted(sum(map(len, served.texts)) / served.seconds for served in rounds)
    tokens = f"{statistics.median(speeds):,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})"
    return last.name, tokens, f"{last.steps:,}", f"{last.mebibytes:.2f}"


def explained(settings: Settings) -> str:
    """What serves the attention of a step."""
    heads = settings.heads, settings.width // settings.heads
    pages = jax.ShapeDtypeStruct((settings.pages, settings.page_size, *heads), jnp.float32)
    query = jax.ShapeDtypeStruct((settings.slots, 1, *heads), jnp.float32)
    table = np.zeros((settings.slots, -(-settings.length // settings.page_size)), np.int32)
    return jflash.explain(query, pages, pages, page_table=table, key_value_seq_lengths=table[:, 0])


def written(tokens: Sequence[int]) -> str:
    """Characters of tokens."""
    return "".join("\n" if token == 0 else chr(ord(" ") + token - 1) for token in tokens)


if __name__ == "__main__":
    main(tyro.cli(Settings))
