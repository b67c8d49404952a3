"""Compiles calls for an H200, without one, with lists or when decoding, and prints how many kernels XLA makes.

    python list_compile.py

The attention kernels are counted too, and what is in a branch or a loop is not: it runs in some calls only.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import h200
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jflash

attend = functools.partial(jflash.attention, implementation="mosaic_gpu")
BFLOAT16, INT32 = jnp.bfloat16, jnp.int32
STEP = [((68,), INT32), ((68, 256), INT32), ((69,), INT32), ((1,), INT32)]
PAGES = ((64 * 256 + 1, 16, 8, 128), BFLOAT16)
RAGGED = [((2112, 32, 128), BFLOAT16), PAGES, PAGES, *STEP]
DECODING = [((64, 1, 32, 128), BFLOAT16), PAGES, PAGES, ((64, 256), INT32), ((64,), INT32)]
SQUARE = [((2, 8192, 16, 128), BFLOAT16)] * 3


def causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """A map whose second pass is a branch, and a list."""
    return attend(query, key, value, mask_mod=lambda batch, head, i, j: (j <= i) | (j < 4))


def gradient(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    """The same, with the list of the backward."""
    return jax.vjp(causal, query, key, value)[1](query)


def decoding(query: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
    """Items of work, and their merge."""
    return attend(query, keys, values, page_table=table, key_value_seq_lengths=lengths)


def layers(query: jax.Array, *cache: jax.Array) -> jax.Array:
    """The same list for three layers. JAX traces the first apart, so XLA takes its list for another."""
    return functools.reduce(lambda query, _: decoding(query, *cache), range(3), query)


def latent(query: jax.Array, cache: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
    """A latent cache whose rows are keys and, without their last columns, values: nothing copies it."""
    return decoding(query, cache, cache, table, lengths)[..., :512]


def ragged(query: jax.Array, keys: jax.Array, values: jax.Array, *batch: jax.Array) -> jax.Array:
    """Blocks of the tokens of several sequences, dealt out."""
    return jflash.ragged_paged_attention(query, (keys, values), *batch, implementation="mosaic_gpu")


def with_sinks(query: jax.Array, keys: jax.Array, values: jax.Array, *batch: jax.Array) -> jax.Array:
    """The same, with a logit more for each head."""
    *of_step, sinks = batch
    options = dict(sinks=sinks, implementation="mosaic_gpu")
    return jflash.ragged_paged_attention(query, (keys, values), *of_step, **options)


def step(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
    """Heads that are packed, keys that may be split, and padding."""
    return attend(query, key, value, key_value_seq_lengths=lengths)


def cached(batch: int, length: int) -> list[Any]:
    """The arguments of a decoding step without pages."""
    keys = ((batch, length, 8, 128), BFLOAT16)
    return [((batch, 1, 32, 128), BFLOAT16), keys, keys, ((batch,), INT32)]


CALLS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "causal": (causal, SQUARE),
    "gradient": (gradient, SQUARE),
    "step": (step, cached(16, 8192)),
    "step of splits": (step, cached(1, 32768)),
    "ragged": (ragged, RAGGED),
    "ragged with sinks": (with_sinks, [*RAGGED, ((32,), jnp.float32)]),
    "decoding": (decoding, DECODING),
    "latent": (
        latent,
        [((64, 1, 128, 576), BFLOAT16), ((64 * 64, 64, 1, 576), BFLOAT16), ((64, 64), INT32), ((64,), INT32)],
    ),
    "layers": (layers, [((61, 1, 32, 128), BFLOAT16), PAGES, PAGES, ((61, 256), INT32), ((61,), INT32)]),
}


def kernels(text: str) -> Iterator[str]:
    """Yield the operations of a compiled program's entry that run as kernels."""
    entry = text[text.index("\nENTRY ") :]
    for line in entry[: entry.index("\n}")].splitlines():
        found = re.search(r"= (?:\(.*?\)|\S+) (fusion|sort|scatter|reduce-window|custom-call|copy)\(", line)
        if found:
            yield found[1]


def main() -> None:
    """Count the kernels of each call."""
    h200.is_the_target()
    sharding = h200.over(1, PartitionSpec())
    counts: dict[str, int] = {}
    for name, (call, arrays) in CALLS.items():
        structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in arrays]
        text = jax.jit(call).lower(*structs).compile().as_text()
        counts[name] = len(list(kernels(text)))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
