"""Calls whose queries are rows of one array, each entry's from a start of its own on (`Spec.tokens`).

A step of a server has the tokens of many sequences in one array. Blocks of them are the batch of a call, and a kernel
reads and stores them where they are. For backends that take an array for each entry, the rows are gathered, and the
output's brought back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflash._semantics.search import count_up_to
from jflash._semantics.spec import Operands, Spec

_ROWS_AXIS = dict(query=1, out=1, page_table=0)
"""The axis of an array that all entries of the batch have together along which each finds its place."""

_PLACES = dict(query_starts="query", table_rows="page_table")
"""The arrays of the entries' places, and what they are places in."""

JOINED = _ROWS_AXIS.keys() | _PLACES
"""The names of all these arrays, which do not have the batch in front."""


def places(starts: Int[Array, "B"], tokens: int) -> tuple[Int[Array, "tokens"], Int[Array, "tokens"]]:
    """Return the entry that each token belongs to, and its row there."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    entry = count_up_to(starts, token) - 1
    return entry, token - starts[entry]


def forward_of_entries(
    forward: Callable[[Spec, Operands], tuple[Array, Array]], spec: Spec, operands: Operands
) -> tuple[Float[Array, "1 tokens N D"], Float[Array, "B N T"]]:
    """Return the results of a backend that takes an array for each entry."""
    assert spec.tokens is not None
    assert operands.query_starts is not None
    assert operands.page_table is not None
    rows = operands.query_starts[:, None] + jnp.arange(spec.query_length, dtype=jnp.int32)[None]
    query = operands.query[0].at[rows].get(mode="clip")
    table, starts = operands.page_table[operands.table_rows], operands.query_starts
    operands = operands._replace(query=query, page_table=table, query_starts=None, table_rows=None)
    out, lse = forward(dataclasses.replace(spec, tokens=None).resized(operands), operands)
    return out[places(starts, spec.tokens)][None], lse


def joined(name: str, each: Array, shapes: Mapping[str, tuple[int, ...]]) -> Array:
    """Return one of the arrays `JOINED` of several calls, `[calls, ...]`, as that of one call. The `shapes` are those
    of one of the several calls, by name."""
    if name in _PLACES:
        array = _PLACES[name]
        rows = shapes[array][_ROWS_AXIS[array]]
        return (each + rows * jnp.arange(len(each), dtype=each.dtype)[:, None]).reshape(-1)
    # The axes before it have one element.
    axis = _ROWS_AXIS[name]
    return each.reshape(*each.shape[1 : 1 + axis], -1, *each.shape[2 + axis :])
