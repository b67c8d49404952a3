"""The functions of one logit that are timed as a `score_mod`, and what takes their place in a library that has none.

Each is written once, with the functions of jax.numpy that torch has too, under the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

Name = Literal["soft cap", "scalar", "per head", "relative"]
Form = Literal["score_mod", "logits_soft_cap", "bias"]
"""The argument by which a library is asked for a function of one logit."""

CAP = 50.0
FARTHEST = 128
"""The distance in tokens beyond which all distances have one number of a table."""


@dataclasses.dataclass(frozen=True)
class ScoreMod:
    """A function, and the arrays that it closes over."""

    function: Callable[..., Any]
    """A function `f(numbers, captured, logit, head, query, key)`; `numbers` is jax.numpy or torch."""
    captured: Callable[[int], dict[str, Array]]
    """A function from the number of heads to the arrays. Those in `cases.DIFFERENTIATED` are learned."""
    stand_in: Form
    """The argument that computes the same in a library without `score_mod`. A bias is made from the arrays in the timed
    call."""


def _soft_cap(numbers: Any, captured: Any, logit: Any, head: Any, query: Any, key: Any) -> Any:
    return CAP * numbers.tanh(logit / CAP)


def _scalar(numbers: Any, captured: Any, logit: Any, head: Any, query: Any, key: Any) -> Any:
    return logit - captured["rate"] * numbers.abs(query - key)


def _per_head(numbers: Any, captured: Any, logit: Any, head: Any, query: Any, key: Any) -> Any:
    return logit - captured["slopes"][head] * numbers.abs(query - key)


def _relative(numbers: Any, captured: Any, logit: Any, head: Any, query: Any, key: Any) -> Any:
    return logit + captured["table"][head, numbers.clip(key - query, -FARTHEST, FARTHEST) + FARTHEST]


def slopes(heads: int) -> Array:
    """Return ALiBi's slopes, one for each head."""
    return 2.0 ** -jnp.linspace(1, 8, heads)


SCORE_MODS: dict[Name, ScoreMod] = {
    "soft cap": ScoreMod(_soft_cap, lambda heads: {}, "logits_soft_cap"),
    "scalar": ScoreMod(_scalar, lambda heads: {"rate": jnp.asarray(0.125)}, "bias"),
    "per head": ScoreMod(_per_head, lambda heads: {"slopes": slopes(heads)}, "bias"),
    "relative": ScoreMod(
        _relative,
        lambda heads: {"table": slopes(heads)[:, None] * jnp.cos(jnp.arange(2.0 * FARTHEST + 1))},
        "bias",
    ),
}


def bound(name: Name, numbers: Any, captured: dict[str, Any]) -> Callable[..., Any]:
    """Return the function with the arguments of a `score_mod`, which jflash and torch have in one order."""
    function = SCORE_MODS[name].function

    def score_mod(logit: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return function(numbers, captured, logit, head, query, key)

    return score_mod


def bias(name: Name, captured: dict[str, Array], heads: int, queries: int, keys: int, dtype: str) -> Array:
    """Return what the function adds to every logit, `[1, heads, queries, keys]`."""
    head, query = jnp.arange(heads)[:, None, None], jnp.arange(queries)[:, None]
    added = bound(name, jnp, captured)(jnp.zeros(()), None, head, query, jnp.arange(keys))
    return jnp.broadcast_to(added, (1, heads, queries, keys)).astype(dtype)
