"""Calls whose queries are rows of one array, each entry's from a start of its own on (`Spec.tokens`).

A step of a server has the tokens of many sequences in one array. Blocks of them are the batch of a call, and a kernel
reads and stores them where they are. For backends that take an array for each entry, the rows are gathered, and the
output's brought back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflash._semantics.search import count_up_to
from jflash._semantics.spec import Operands, Spec

JOINED = frozenset({"query", "out", "query_starts"})
"""The names of the arrays that all entries of the batch have together, and of their places there."""


def places(starts: Int[Array, "B"], tokens: int) -> tuple[Int[Array, "tokens"], Int[Array, "tokens"]]:
    """Return the entry that each token belongs to, and its row there."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    entry = count_up_to(starts, token) - 1
    return entry, token - starts[entry]


def forward_of_entries(
    forward: Callable[[Spec, Operands], tuple[Array, Array]], spec: Spec, operands: Operands
) -> tuple[Float[Array, "1 tokens N D"], Float[Array, "B N T"]]:
    """Return the results of a backend that takes an array for each entry."""
    assert operands.query_starts is not None
    assert spec.tokens is not None
    rows = operands.query_starts[:, None] + jnp.arange(spec.query_length, dtype=jnp.int32)[None]
    query = operands.query[0].at[rows].get(mode="clip")
    operands, starts = operands._replace(query=query, query_starts=None), operands.query_starts
    out, lse = forward(dataclasses.replace(spec, tokens=None).resized(operands), operands)
    return out[places(starts, spec.tokens)][None], lse


def joined(name: str, each: Array, tokens: int) -> Array:
    """Return one of the arrays `JOINED` of several calls, `[calls, ...]`, as that of one call."""
    if name != "query_starts":
        return each.reshape(1, -1, *each.shape[3:])
    return (each + tokens * jnp.arange(len(each), dtype=each.dtype)[:, None]).reshape(-1)
