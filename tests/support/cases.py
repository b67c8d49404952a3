"""The product of features, dtypes and shapes, as a list of cases in which every pair of values meets.

All pairs, because a defect nearly always needs two things at once; with the deep profile all triples.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dropout_masks
import hypothesis
import jax.numpy as jnp
import numpy as np
import short_run
from oracle import Call


class Case(NamedTuple):
    """The words for one call; `build` says what they mean."""

    dtype: str = "float32"
    query_length: int = 131
    key_length: int = 131
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (8, 8)
    batch: tuple[int, ...] = (2,)
    scale: str | None = None
    soft_cap: float | None = None
    bias: str | None = None
    alibi: bool = False
    score_mod: str | None = None
    mask: str | None = None
    causal: bool = False
    offset: str | None = None
    window: int | tuple[int, int] | None = None
    lengths: str | None = None
    segments: str | None = None
    sinks: bool = False
    dropout: bool = False

    def __str__(self) -> str:
        """The shape, and what differs from a call without options."""
        shape = f"{self.dtype}-B{self.batch}-T{self.query_length}-S{self.key_length}-NK{self.heads}-HD{self.dims}"
        options = (
            name if value is True else f"{name}={value}"
            for name, value in self._asdict().items()
            if name not in ("dtype", "query_length", "key_length", "heads", "dims", "batch") and value
        )
        return "-".join((shape, *options)).replace(" ", "")

    @property
    def query_offset(self) -> int | np.ndarray:
        """Static, a traced scalar, or one for each batch entry."""
        T, S = self.query_length, self.key_length
        each = np.arange(math.prod(self.batch), dtype=np.int32).reshape(self.batch) % 7 * (S // 20)
        return {None: 0, "end": S - T, "negative": -3, "each": each, "traced": np.asarray(5, np.int32)}[self.offset]

    @property
    def worthwhile(self) -> bool:
        """Causality and window leave most queries several keys to see."""
        left, right = self.window if isinstance(self.window, tuple) else (self.window, self.window)
        position = np.arange(self.query_length) + int(np.max(self.query_offset))
        first = np.zeros_like(position) if left is None else np.maximum(0, position - left)
        last = np.full_like(position, self.key_length - 1)
        for bound in ((right,) if right is not None else ()) + ((0,) if self.causal else ()):
            last = np.minimum(last, position + bound)
        return bool(np.mean(last - first + 1 >= min(3, self.key_length)) > 0.6)


SHAPES: Mapping[str, Sequence[Any]] = dict(
    dtype=("float32", "bfloat16", "float16"),
    query_length=(1, 13, 128, 199, 257),
    key_length=(1, 17, 128, 131, 293),
    heads=((1, 1), (3, 3), (2, 1), (4, 2), (8, 1)),
    dims=((1, 1), (8, 8), (40, 40), (64, 64), (80, 80), (128, 128), (192, 128)),
    batch=((), (1,), (2,), (2, 3)),
)
FEATURES: Mapping[str, Sequence[Any]] = dict(
    scale=(None, "static", "traced"),
    soft_cap=(None, 1.5),
    bias=(None, "full", "keys", "queries", "heads"),
    alibi=(False, True),
    score_mod=(None, "indices", "arrays"),
    mask=(None, "full", "keys", "queries"),
    causal=(False, True),
    offset=(None, "end", "negative", "each", "traced"),
    window=(None, 40, (150, 0), (10, 90)),
    lengths=(None, "queries", "keys", "both"),
    segments=(None, "sorted", "unsorted"),
    sinks=(False, True),
    dropout=(False, True),
)
SHORT = {**SHAPES, **FEATURES}
LONG = {
    **FEATURES,
    "query_length": (523, 641),
    "key_length": (640, 1100),
    "heads": ((1, 1), (2, 1), (2, 2)),
    "batch": ((), (2,)),
    "bias": (None, "full", "keys", "queries"),
    "offset": (None, "end", "negative", "each"),
}
"""Several tiles each way on every backend."""
QUICK = {
    **FEATURES,
    "dtype": SHAPES["dtype"],
    "query_length": (40, 131),
    "key_length": (37, 150),
    "heads": ((3, 3), (4, 2)),
    "dims": ((40, 40), (24, 48)),
    "batch": ((), (2, 3)),
    "bias": (None, "full", "keys", "heads"),
    "offset": (None, "end", "each"),
}
"""Fewer shapes, and kinds of bias and offset: every pair in a third of the cases."""
ONE_KIND = dict(scale="traced", bias="full", score_mod="arrays", mask="full", offset="each", lengths="both")
FEWER = {
    **QUICK,
    **{name: (None, kind) for name, kind in dict(ONE_KIND, window=(10, 90), segments="sorted").items()},
    **dict(dtype=("float32", "bfloat16"), query_length=(40, 71), key_length=(37, 99), batch=((), (2,))),
}
"""The values of the short run: no kind and one kind of each feature."""
LACKS: Mapping[str, Mapping[str, Any]] = {"metal": dict(score_mod=None, dropout=False)}
"""The options that a backend refuses whatever the rest of the call, with the values that do without."""
EMULATED = {
    **FEATURES,
    **{name: (value,) for name, value in LACKS["metal"].items()},
    "dtype": SHAPES["dtype"],
    "query_length": (1, 13, 40, 71),
    "key_length": (1, 17, 64, 99),
    "heads": ((1, 1), (3, 3), (2, 1), (4, 2)),
    "dims": ((1, 1), (8, 8), (40, 40), (64, 64), (80, 80), (128, 128), (192, 128), (33, 256), (256, 256)),
    "batch": ((), (1,), (3,), (2, 2)),
    "window": (None, 15, (60, 0), (10, 40)),
}
EMULATED_LONG = {
    **EMULATED,
    "query_length": (257, 301),
    "key_length": (293, 350),
    "heads": ((1, 1), (2, 1), (2, 2)),
    "dims": ((8, 8), (32, 40), (64, 64)),
    "batch": ((), (2,)),
    "bias": (None, "full", "keys", "queries"),
    "offset": (None, "end", "negative", "each"),
    "window": LONG["window"],
}
"""The values of SHORT and LONG that an emulator of a GPU can do in reasonable time."""
EMULATED_QUICK = {
    **EMULATED,
    **{name: QUICK[name] for name in ("heads", "dims", "batch", "bias", "offset")},
    "query_length": (13, 40),
    "key_length": (37, 64),
}
EMULATED_FEWER = {
    **EMULATED_QUICK,
    **{name: FEWER[name] for name in ("dtype", "batch", "scale", "bias", "mask", "offset", "lengths", "segments")},
    "window": (None, (10, 40)),
}
EVERYTHING = Case(
    scale="traced",
    soft_cap=1.5,
    bias="full",
    alibi=True,
    mask="full",
    causal=True,
    offset="each",
    window=(150, 0),
    lengths="both",
    segments="sorted",
    sinks=True,
    dropout=True,
)
"""Every option but a score_mod."""
VACUOUS = {("query_length", 1), ("key_length", 1)}
"""A single query or key hides much of what the rest does: what meets in such a case has to meet elsewhere too."""


def product(values: Mapping[str, Sequence[Any]], strength: int) -> Iterator[dict[str, Any]]:
    """Rows of one value each in which any `strength` values of different names are together somewhere.

    Greedy: a row starts from values that have not met, and takes name by name, in an order that is random but the
    same on every run, the worthwhile value that meets most others for the first time.
    """
    shuffle = random.Random(0).shuffle
    missing = {
        frozenset(zip(names, row, strict=True)): None
        for names in itertools.combinations(values, strength)
        for row in itertools.product(*(values[name] for name in names))
    }

    def newly_met(row: dict[str, Any], vacuous: bool) -> list[frozenset[tuple[str, Any]]]:
        combinations = map(frozenset, itertools.combinations(row.items(), strength))
        return [met for met in combinations if met in missing and (not vacuous or met & VACUOUS)]

    while missing:
        row = dict(next(iter(missing)))
        vacuous = not VACUOUS.isdisjoint(row.items())
        names = [name for name in values if name not in row]
        shuffle(names)
        for name in sorted(names, key=lambda name: name not in ("query_length", "key_length")):
            choices = [value for value in values[name] if (name, value) not in VACUOUS]
            shuffle(choices)
            choices = [value for value in choices if Case(**{**row, name: value}).worthwhile] or choices
            row[name] = max(choices, key=lambda value, name=name: len(newly_met({**row, name: value}, vacuous)))
        for met in newly_met(row, vacuous):
            del missing[met]
        yield row


def all_cases(*products: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Every pair of the values of each product; with the deep profile every triple."""
    strength = 3 if hypothesis.settings.get_current_profile_name() == "deep" else 2
    return [Case(**row) for values in products for row in product(values, strength)]


def once(some: list[Case], names: Collection[str] = Case._fields) -> list[Case]:
    """Return as few cases as contain every value of each name."""
    rows = [{name: getattr(case, name) for name in names} for case in some]
    return [some[index] for index in sorted(short_run.covering(rows, 1))]


def served(case: Case, backend: str) -> Case:
    """The case without what the backend refuses whatever the rest."""
    return case._replace(**LACKS.get(backend, {}))


def build(case: Case) -> Call:
    """Arguments and cotangents for a case, random but the same on every run."""
    numbers = np.random.default_rng(zlib.crc32(str(case).encode()))
    batch, T, S, (N, K), (H, D) = case.batch, case.query_length, case.key_length, case.heads, case.dims
    dtype = np.dtype(jnp.dtype(case.dtype))
    accumulator = np.promote_types(dtype, np.float32)
    pairs = (*batch, N, T, S)
    ones = (1,) * len(batch)
    normal = lambda *shape, dtype=accumulator: np.asarray(numbers.standard_normal(shape)).astype(dtype)
    integers = lambda low, high, shape: numbers.integers(low, high, shape, endpoint=True, dtype=np.int32)

    def lengths(most: int) -> np.ndarray:
        """Full for the second entry of the batch, none for the third, from a half up for the others."""
        drawn = integers(most // 2, most, math.prod(batch))
        drawn[1:2], drawn[2:3] = most, 0
        return drawn.reshape(batch)

    boundaries = np.sort(integers(0, min(T, S), (*batch, 1, 2)))

    def segments(length: int) -> np.ndarray:
        """Three in turn, or two all mixed; far apart they differ in bits past the 32nd."""
        if case.segments == "unsorted":
            return integers(0, 1, (*batch, length))
        ids = np.sum(np.arange(length)[:, None] >= boundaries, axis=-1, dtype=np.int32)
        return ids.astype(np.int64) << 32 if case.segments == "far apart" else ids

    score_mods = {None: (None, ()), "indices": (_by_indices, ()), "arrays": (_by_arrays, (normal(N), normal(64)))}
    score_mod, score_mod_arrays = score_mods[case.score_mod]
    scales = {None: None, "static": 0.3, "traced": np.asarray(0.3, accumulator)}
    biases = {"full": pairs, "keys": (1, S), "queries": (N, T, 1), "heads": (*ones, N, 1, 1)}
    masks = {"full": pairs, "keys": (*batch, 1, 1, S), "queries": (T, 1)}
    return Call(
        query=normal(*batch, T, N, H, dtype=dtype),
        key=normal(*batch, S, K, H, dtype=dtype),
        value=normal(*batch, S, K, D, dtype=dtype),
        bias=normal(*biases[case.bias], dtype=dtype if case.bias == "full" else accumulator) if case.bias else None,
        mask=numbers.random(masks[case.mask]) < 0.9 if case.mask else None,
        scale=scales[case.scale],
        is_causal=case.causal,
        query_seq_lengths=lengths(T) if case.lengths in ("queries", "both") else None,
        key_value_seq_lengths=lengths(S) if case.lengths in ("keys", "both") else None,
        local_window_size=case.window,
        logits_soft_cap=case.soft_cap,
        alibi_slopes=numbers.random(N).astype(accumulator) / 8 if case.alibi else None,
        score_mod=score_mod,
        score_mod_arrays=score_mod_arrays,
        query_offset=case.query_offset,
        segment_ids=(segments(T), segments(S)) if case.segments else None,
        sinks=normal(N) if case.sinks else None,
        dropout_rate=dropout_masks.RATE if case.dropout else 0.0,
        dropout_key=dropout_masks.KEY if case.dropout else None,
        keep=dropout_masks.by_definition(pairs) if case.dropout else None,
        d_out=normal(*batch, T, N, D, dtype=dtype),
        d_lse=normal(*batch, T, N),
    )


def of_forward(call: Call) -> Call:
    """The call without cotangents, of which nothing but the forward is run."""
    return dataclasses.replace(call, d_out=None, d_lse=None)


def _by_indices() -> Any:
    """A function of the logit and all four indices, without arrays of its own and without roundings of its own."""

    def score_mod(logit: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return logit * (1 + 0.25 * (batch & 1)) + 0.5 * ((query + 2 * key + head) & 3)

    return score_mod


def _by_arrays(by_head: Any, by_distance: Any) -> Any:
    """A learned bias for each head, and for each distance modulo 64."""

    def score_mod(logit: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return logit + by_head[head] + by_distance[(query - key) & 63]

    return score_mod


def with_64_bits(call: Call) -> Call:
    """The call with whatever may have another dtype than queries in 64 bits, but for what a score_mod closes over."""
    names = "bias", "scale", "alibi_slopes", "sinks", "query_offset", "query_seq_lengths", "key_value_seq_lengths"
    arrays = {name: array for name in names if isinstance(array := getattr(call, name), np.ndarray)}
    dtype = lambda array: np.float64 if jnp.issubdtype(array.dtype, jnp.floating) else np.int64
    return dataclasses.replace(call, **{name: array.astype(dtype(array)) for name, array in arrays.items()})


_LEAST = np.finfo(np.float32).min

LARGE_BIASES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "all the least": lambda key: np.full(key.shape, _LEAST),
    "one a little larger": lambda key: np.where(key == 150, np.nextafter(_LEAST, np.float32(0)), _LEAST),
    "first tile hidden": lambda key: np.where(key < 128, -1e9, 0),
    "first tile hidden most": lambda key: np.where(key < 128, _LEAST, -1e9),
    "up to 2**28": lambda key: np.where(key < 128, 2.0**28 - 16, 2.0**28),
    "up from -2**30": lambda key: np.where(key < 128, -(2.0**30), -(2.0**30) + 64),
    "past 2**29": lambda key: np.where(key < 128, 2.0**29 - 32, 2.0**29 + 64),
    "small, then large": lambda key: np.where(key < 128, 0, 3000) + 0.01 * key,
    "large, then small": lambda key: np.where(key < 128, 3000, 2990) + 0.01 * key,
    "small but for the last": lambda key: np.where(key == 199, -1e9, 0.01 * key),
    "up to the greatest": lambda key: np.where(key == 199, -_LEAST, key),
}
"""Functions of a key's index: biases that differ by much or by nothing, in a tile of 128 keys and from one to the
next."""


def with_bias_of_index(call: Call, values: Callable[[np.ndarray], np.ndarray]) -> Call:
    """The call with a bias that follows from a key's index, as those of `LARGE_BIASES`, and is all that there is to a
    logit."""
    bias = values(np.arange(call.key.shape[-3])).astype(np.float32)
    return dataclasses.replace(call, query=call.query * 0, bias=np.broadcast_to(bias, call.bias.shape))


def with_large_logits(call: Call) -> Call:
    """The call with logits from 700 to 701, the same ones in every 64 keys and each of them a number in float32: the
    products, or the bias if it has one."""
    logits = lambda key: 700 + key % 64 / 64
    if call.bias is not None:
        return with_bias_of_index(call, logits)
    query, key = np.zeros_like(call.query), np.zeros_like(call.key)
    query[..., 0], key[..., 0] = 1, logits(np.arange(key.shape[-3]))[:, None]
    slopes = None if call.alibi_slopes is None else np.zeros_like(call.alibi_slopes)
    return dataclasses.replace(call, query=query, key=key, scale=1.0, alibi_slopes=slopes)


def large_biases_in_a_window(large: int) -> Call:
    """Every other `large` keys have large biases; a window's first tile begins at any multiple of 8."""
    case = Case("bfloat16", 523, 523, heads=(1, 1), dims=(80, 80), batch=(), bias="keys", window=(150, 0))
    return with_bias_of_index(build(case), lambda key: np.where(key // large % 2, 3000, 0) + 0.01 * key)


def with_scale(call: Call, scale: float) -> Call:
    """The call with another scale, and keys with which its logits are of the same size."""
    return dataclasses.replace(call, key=(call.key * (0.2 / scale)).astype(call.key.dtype), scale=scale)


STEPS: dict[str, tuple[float, ...]] = {
    "small": (0, 0, 0),
    "up": (0, 0, 1),
    "down": (0, 0, -1),
    "down at once": (1, 0, 0),
    "up from below": (-1, 0, 0),
    "all below": (-1, -1, -1),
    "up and down": (-1, 1, 0),
    "a little up": (0.25, 0, 0.25),
    "a little below": (-0.25, -0.25, -0.25),
}
"""Multiples of 7/8 of a soft cap for the logit before it, in one tile of 128 keys after the other."""


def with_steps(call: Call, steps: str) -> Call:
    """The call with one of `STEPS`, and little besides, for its products; every other query sees the last tile only."""
    queries, keys = call.query.shape[-3], call.key.shape[-3]
    tile = np.minimum(np.arange(keys) // 128, 2)
    products = np.asarray(STEPS[steps])[tile] * call.logits_soft_cap * 7 / 8 + np.arange(keys) % 16 / 4
    query, key = np.zeros_like(call.query), np.zeros_like(call.key)
    query[..., 0] = 1
    key[..., 0] = products[:, None]
    mask = (np.arange(queries)[:, None] % 2 == 0) | (tile == 2)
    return dataclasses.replace(call, query=query, key=key, scale=1.0, mask=np.broadcast_to(mask, call.mask.shape))


def with_large_products(call: Call) -> Call:
    """The call with every 37th query 30 times as large: so that some warps have products that others do not."""
    large = np.arange(call.query.shape[-3]) % 37 == 0
    query = call.query * np.where(large, 30, 1).astype(call.query.dtype)[:, None, None]
    return dataclasses.replace(call, query=query)
