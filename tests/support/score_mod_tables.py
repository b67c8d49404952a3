"""Functions of a logit that read tables at an index computed from positions, each with tables to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cases
import jax.numpy as jnp
import numpy as np
from cases import Case
from plain_attention import Call


def _by_clipped_distance(table: Any) -> Any:
    """Most of a long call reads the ends."""
    return lambda logit, b, h, q, k: logit + table[h, jnp.clip(k - q + 100, 0, 127)]


def _by_bucket(table: Any) -> Any:
    """Each distance up to 7, and buckets of 16."""

    def score_mod(logit: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = jnp.abs(q - k)
        return logit + table[h, jnp.where(distance < 8, distance, 8 + jnp.minimum(distance >> 4, 7))]

    return score_mod


def _by_three_reads(factors: Any, added: Any) -> Any:
    """Return a `score_mod` with two tables, one of them read twice, from before the first number, which counts from the
    last, to past the last.

    Numbers of 16 bits meet the logit first: among themselves they would be rounded to 16 bits.
    """

    def score_mod(logit: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return logit + 0.25 * logit * factors[q - k] + added[b & 1, h, k - 30] + factors[k]

    return score_mod


def _where_seen(by_head: Any, table: Any) -> Any:
    """Keys that it hides count for nothing, whatever their table holds."""
    seen = lambda q, k: (q + 2 * k) % 5 != 0
    return lambda logit, b, h, q, k: jnp.where(seen(q, k), logit * by_head[h] + table[(q + k) & 31], -jnp.inf)


KINDS: dict[str, tuple[Callable[..., Any], Callable[[int], list[tuple[int, ...]]]]] = {
    "clipped distance": (_by_clipped_distance, lambda heads: [(heads, 128)]),
    "buckets": (_by_bucket, lambda heads: [(heads, 16)]),
    "three reads": (_by_three_reads, lambda heads: [(40,), (2, heads, 64)]),
    "where seen": (_where_seen, lambda heads: [(heads,), (32,)]),
}
"""Each with its tables' shapes for a number of heads, in the order of the first reads, as a jaxpr has them."""

ON_HARDWARE = [
    dict(causal=True, lengths="both"),
    dict(window=(150, 0), offset="each", soft_cap=40.0),
    dict(bias="full", mask="full", dropout=True),
    # A CTA takes many blocks.
    dict(causal=True, batch=(30,), heads=(16, 4)),
]
"""Options beside which they are tested on a GPU."""


def call(case: Case, kind: str, dtype: str = "float32") -> Call:
    """A case with a function of a kind, and its tables."""
    score_mod, shapes = KINDS[kind]
    tables = (
        np.random.default_rng(shape).standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes(case.heads[0])
    )
    return dataclasses.replace(cases.build(case), score_mod=score_mod, score_mod_arrays=tuple(tables))
