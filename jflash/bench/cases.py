"""The calls of attention that are measured: their arrays, and how many floating-point operations they ask for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash._platform import Platform
from jflash.bench import mask_mods, score_mods

Dtype = Literal["float32", "bfloat16", "float16"]
Mask = Literal["full", "causal"]
Work = Literal["fwd", "bwd", "fwd+bwd", "jvp"]
"""The work that is timed. "jvp" is forward mode: the forward and its tangent in one call."""

DIFFERENTIATED = ("query", "key", "value", "bias", "sinks", "rate", "table")
"""The arrays whose gradients the backward computes, where a case has them. The last two are a `score_mod`'s."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention on random data."""

    name: str
    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    dtype: Dtype
    is_feature: bool = False
    """Whether the case shows what an option costs; if not, it is of the grid of lengths."""
    asked_width: int | None = None
    """Heads times head dimension as they were asked for, if that is no multiple of the head dimension."""
    is_causal: bool = False
    window: int | None = None
    """The number of keys that a query sees, itself included."""
    length: int | None = None
    """The number of queries and keys that are no padding."""
    segments: int = 1
    """The number of sequences of one length that are packed into one."""
    soft_cap: float | None = None
    bias: Literal["per pair", "per key"] | None = None
    """The size of the bias. Every head has its own, and batch entries share it."""
    mask: bool = False
    """Whether there is a random mask, of size [batch, 1, queries, keys]; half of it is False."""
    alibi: bool = False
    sinks: bool = False
    dropout_rate: float = 0.0
    score_mod: score_mods.Name | None = None
    mask_mod: mask_mods.Name | None = None
    has_backward: bool = True
    """Whether such a call is ever differentiated: decoding is not."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The calls that are measured."""

    lengths: tuple[int, ...]
    """Tokens in a sequence."""
    widths: tuple[int, ...]
    """Heads times head dimension: there are as many heads as fit, and at least one."""
    head_dims: tuple[str, ...]
    """Head dimensions, such as 128, or 192/128 for keys of 192 and values of 128."""
    masks: tuple[Mask, ...]
    """What a query sees: everything, or what is not after it."""
    tokens: int
    """Tokens in a batch: the batch size is this divided by the length, and at least 1."""
    dtype: Dtype
    """The dtype of query, key, value and output."""
    features: tuple[str, ...] | None = None
    """Also measure what options and unusual heads cost, on two sequences that together have `tokens`, of the first
    width: every one, or, if words follow, those that have one of them in their names, such as score_mod."""

    @staticmethod
    def for_platform(platform: Platform) -> Grid:
        """Return for a GPU the grid of FlashAttention's README, and elsewhere one that takes two cores of a CPU three
        minutes."""
        if platform.name == "gpu":
            lengths = (512, 1024, 2048, 4096, 8192, 16384)
            return Grid(lengths, (2048,), ("64", "128", "256"), ("full", "causal"), tokens=16384, dtype="bfloat16")
        return Grid((512, 1024, 2048, 4096), (512,), ("64",), ("full", "causal"), tokens=4096, dtype="float32")

    def cases(self) -> list[Case]:
        """Return all cases of the grid.

        Raises:
          ValueError: if a head dimension is not written as one, or no option has a word in its name.
        """
        grid = [
            dataclasses.replace(
                square(mask, self.dtype, max(1, self.tokens // length), length, max(1, width // keys), keys),
                value_dim=values,
                is_causal=mask == "causal",
                asked_width=width if width % keys else None,
            )
            for width in self.widths
            for keys, values in map(_head_dims, self.head_dims)
            for mask in self.masks
            for length in self.lengths
        ]
        if self.features is None:
            return grid
        return grid + _named(feature_cases(self.tokens, self.widths[0], self.dtype), self.features)


def _head_dims(text: str) -> tuple[int, int]:
    """Return the head dimensions of keys and of values."""
    found = re.fullmatch(r"([1-9]\d*)(?:/([1-9]\d*))?", text)
    if found is None:
        raise ValueError(f"A head dimension is written as 128, or as 192/128 for keys and values. Got {text!r}.")
    return int(found[1]), int(found[2] or found[1])


def _named(cases: Sequence[Case], words: Sequence[str]) -> list[Case]:
    """Return the cases with one of the words in their names; all of them, if there are no words."""
    for word in words:
        if not any(word in case.name for case in cases):
            raise ValueError(f"No option has {word!r} in its name. There are: {'; '.join(c.name for c in cases)}.")
    return [case for case in cases if not words or any(word in case.name for word in words)]


def square(name: str, dtype: Dtype, batch: int, length: int, heads: int, head_dim: int) -> Case:
    """Return a case with as many keys as queries, as many key heads as query heads, equal widths, and no option."""
    return Case(name, batch, length, length, heads, heads, head_dim, head_dim, dtype)


def feature_cases(tokens: int, width: int, dtype: Dtype) -> list[Case]:
    """Return one case for each option: two sequences and heads of 128, unless its name says otherwise."""
    length, heads = max(1, tokens // 2), max(1, width // 128)
    fewer = max(1, heads // 8)
    plain = dataclasses.replace(square("full", dtype, 2, length, heads, 128), is_feature=True)
    short = min(256, length)

    def case(name: str, **options: Any) -> Case:
        return dataclasses.replace(plain, name=name, **options)

    small = dict(head_dim=64, value_dim=64, batch=2 * length // short, queries=short, keys=short)
    ragged = length * 5000 // 8192
    odd = dict(head_dim=80, value_dim=80, queries=ragged, keys=ragged)
    wide = dict(head_dim=512, value_dim=512, heads=max(1, width // 512), key_heads=max(1, width // 512))
    latent = dict(head_dim=576, value_dim=512, key_heads=1)
    cache = dict(batch=16, queries=1, keys=4 * length, has_backward=False)
    return [
        plain,
        case("causal, grouped heads", is_causal=True, key_heads=fewer),
        case("causal, window", is_causal=True, window=max(1, length // 8)),
        case("bias per pair", bias="per pair"),
        case("bias per key", bias="per key"),
        case("mask per pair", mask=True),
        case("causal, soft cap", is_causal=True, soft_cap=50.0),
        case("causal, ALiBi", is_causal=True, alibi=True),
        case("causal, sinks", is_causal=True, sinks=True),
        case("causal, score_mod: soft cap", is_causal=True, score_mod="soft cap"),
        case("causal, score_mod: per head", is_causal=True, score_mod="per head"),
        case("score_mod: scalar", score_mod="scalar"),
        case("score_mod: relative", score_mod="relative"),
        *(case(f"mask_mod: {name}", mask_mod=name) for name in mask_mods.MASK_MODS),
        case("dropout of 0.1", dropout_rate=0.1),
        case("causal, 8 packed segments", is_causal=True, segments=8),
        case("half is padding", length=max(1, length // 2)),
        case("causal, keys of 192, values of 128", is_causal=True, head_dim=192),
        case("causal, d72", is_causal=True, head_dim=72, value_dim=72),
        case("causal, ragged, d80", is_causal=True, **odd),
        case("causal, d96", is_causal=True, head_dim=96, value_dim=96),
        case("causal, d512", is_causal=True, **wide),
        case("causal, latent, keys of 576, values of 512", is_causal=True, **latent),
        case("causal, short, d64", is_causal=True, **small),
        case("decoding, grouped heads", **cache, key_heads=fewer),
        case("decoding, latent, keys of 576, values of 512", **cache, **latent),
    ]


def visible_pairs(case: Case) -> float:
    """Return how many pairs of a query and a key are visible, for one head and one batch entry.

    Causal alone counts half of all pairs, as everywhere in the field. A random mask counts nothing off: no tile is
    without a pair that is seen. A `mask_mod` counts what it shows.
    """
    if case.mask_mod is not None:
        return mask_mods.visible_pairs(case.mask_mod, case.batch, case.queries, case.keys)
    if case.is_causal and (case.window, case.length, case.segments) == (None, None, 1):
        return case.queries * case.keys / 2
    query = np.arange(case.queries if case.length is None else case.length)
    stop = np.full_like(query, case.keys if case.length is None else case.length)
    start = np.zeros_like(query)
    if case.is_causal:
        stop = np.minimum(stop, query + 1)
    if case.window is not None:
        start = np.maximum(start, query + 1 - case.window)
    if case.segments > 1:
        first = _segment(case, query) * _segment_length(case)
        start, stop = np.maximum(start, first), np.minimum(stop, first + _segment_length(case))
    return float(np.maximum(stop - start, 0).sum())


def _segment_length(case: Case) -> int:
    return -(-case.queries // case.segments)


def _segment(case: Case, position: np.ndarray) -> np.ndarray:
    return position // _segment_length(case)


def flops(case: Case, work: Work) -> float:
    """Return the floating-point operations: forward two products per visible pair, backward five, tangent six.

    Two products are 2 (H + D) operations for a pair of a head. Five count as 2.5 times that, as everywhere in the
    field.
    """
    forward = 2 * (case.head_dim + case.value_dim) * visible_pairs(case) * case.heads * case.batch
    return {"fwd": 1, "bwd": 2.5, "fwd+bwd": 3.5, "jvp": 4}[work] * forward


def options(case: Case) -> dict[str, Any]:
    """Return the arguments of `jflash.attention` that are no arrays and not the defaults, without functions."""
    given: dict[str, Any] = {}
    if case.is_causal:
        given["is_causal"] = True
    if case.window is not None:
        given["local_window_size"] = (case.window - 1, 0)
    if case.soft_cap is not None:
        given["logits_soft_cap"] = case.soft_cap
    if case.dropout_rate > 0:
        given["dropout_rate"] = case.dropout_rate
    return given


class Data(NamedTuple):
    """The arrays of a case."""

    arguments: dict[str, Array]
    """The arrays among the arguments of `jflash.attention`, by their names."""
    cotangent: Array
    """The cotangent of the output."""
    captured: dict[str, Array]
    """The arrays that the case's `score_mod` and `mask_mod` close over, by names of their own."""


def data(case: Case) -> Data:
    """Return random normal arrays, the same ones every time."""
    B, T, S, N, K = case.batch, case.queries, case.keys, case.heads, case.key_heads
    shapes: dict[str, tuple[int, ...]] = dict(
        query=(B, T, N, case.head_dim),
        key=(B, S, K, case.head_dim),
        value=(B, S, K, case.value_dim),
        cotangent=(B, T, N, case.value_dim),
    )
    if case.bias is not None:
        shapes["bias"] = (1, N, T if case.bias == "per pair" else 1, S)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays: dict[str, Array] = {
        name: jax.random.normal(key, shape, case.dtype) for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    cotangent = arrays.pop("cotangent")
    if case.mask:
        arrays["mask"] = jax.random.bernoulli(jax.random.key(1), shape=(B, 1, T, S))
    if case.length is not None:
        arrays["query_seq_lengths"] = arrays["key_value_seq_lengths"] = jnp.full(B, case.length, jnp.int32)
    if case.segments > 1:
        arrays["segment_ids"] = jnp.tile(_segment(case, np.arange(T)).astype(np.int32), (B, 1))
    if case.alibi:
        arrays["alibi_slopes"] = score_mods.slopes(N)
    if case.sinks:
        arrays["sinks"] = jnp.zeros(N)
    if case.dropout_rate > 0:
        arrays["dropout_key"] = jax.random.PRNGKey(2)
    captured = {} if case.score_mod is None else score_mods.SCORE_MODS[case.score_mod].captured(N)
    if case.mask_mod is not None:
        of_mask_mod = mask_mods.MASK_MODS[case.mask_mod].captured(B, T, S)
        captured |= {name: jnp.asarray(array) for name, array in of_mask_mod.items()}
    return Data(arrays, cotangent, captured)
