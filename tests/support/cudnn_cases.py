"""The calls that cuDNN's attention is tested with, in its stand-in and on a GPU: what it takes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from cases import Case
from plain_attention import Call

VALUES = dict(
    dtype=("bfloat16", "float16"),
    query_length=(2, 14, 128, 200, 258, 524),
    key_length=(2, 18, 128, 132, 294, 640),
    heads=((1, 1), (3, 3), (2, 1), (4, 2), (8, 1)),
    dims=((8, 8), (24, 24), (40, 40), (64, 64), (80, 80), (120, 120), (128, 128)),
    batch=((), (2,), (2, 3)),
    scale=(None, "static"),
    causal=(False, True),
    lengths=(None, "queries", "keys", "both"),
)
SMALL = VALUES | dict(
    query_length=(2, 14, 40), key_length=(2, 18, 64), heads=((1, 1), (4, 2)), dims=((8, 8), (24, 24)), batch=((), (3,))
)
"""The same in little time."""


def windows(dtype: str, T: int, S: int, dim: int, lefts: Sequence[int]) -> list[Case]:
    """Windows that end at the query, by themselves or because they are causal."""
    case = functools.partial(Case, dtype, T, S, dims=(dim, dim), batch=(3,))
    return [
        *(
            case(window=(left, 0), **options)
            for left in lefts
            for options in ({}, dict(causal=True), dict(lengths="queries"))
        ),
        case(window=(lefts[0], 7), causal=True),
    ]


def of_output(call: Call) -> Call:
    """The call with cotangents of its output alone."""
    return dataclasses.replace(call, d_lse=np.zeros_like(call.d_lse))


def constant_lse(attention: Callable[..., Any]) -> Callable[..., Any]:
    """`attention` with a log-sum-exp that has no gradient, as far as JAX can know."""

    def call(*args: Any, **options: Any) -> Any:
        out, lse = attention(*args, **options)
        return out, jax.lax.stop_gradient(lse)

    return call
