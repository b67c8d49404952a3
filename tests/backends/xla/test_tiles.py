"""The walk over tiles: the same result whatever the tiles, and no more of them than some query can see."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from operands import normal
from plain_attention import Call
from short_run import cover

import jflash
from jflash import _canonical, _dispatch
from jflash._backends import xla
from jflash._backends.xla import plans, tiling
from jflash._backends.xla.plans import Tiles

numbers = np.random.default_rng(0)
T, S = 131, 149


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(is_causal=True, query_offset=-7),
    "window": dict(local_window_size=(40, 9)),
    "offsets": dict(local_window_size=(20, 9), query_offset=np.array([-40, 0, 60])),
    "lengths": dict(query_seq_lengths=np.array([67, 0, 131]), key_value_seq_lengths=np.array([149, 5, 60])),
    "segments": dict(
        segment_ids=(np.sort(numbers.integers(0, 5, (3, T)), axis=1), np.sort(numbers.integers(0, 5, (3, S)), axis=1))
    ),
    "bias": dict(bias=normal(0, 4, 1, S), logits_soft_cap=3.0),
    "mask": dict(mask=numbers.random((T, S)) < 0.8),
    "sinks": dict(sinks=normal(0, 4), alibi_slopes=numbers.random(4).astype(np.float32)),
}
SHAPES = [(1, 1, 32, 48), (3, 2, 131, 32), (1, 2, 16, 149), (3, 1, 64, 64)]
NARROW = [("window", (3, 1, 16, 96)), ("offsets", (1, 1, 16, 96)), ("offsets", (3, 1, 16, 96))]
"""A tile holds all that 16 rows see, but not where it has several batch entries and each has its own offset."""


GPU = [
    ("causal", (1, 2, 64, 149), "float32"),
    ("lengths", (3, 1, 64, 149), "bfloat16"),
    ("bias", (1, 1, 64, 64), "float32"),
    ("sinks", (1, 2, 64, 149), "bfloat16"),
]
"""Tiles with the numbers of a GPU's, which have all keys of some rows, or not."""


def call(query: np.ndarray, key: np.ndarray, value: np.ndarray, **options: Any) -> Call:
    rows = query.shape[:-1]
    d_out = normal(3, *rows, value.shape[-1]).astype(query.dtype)
    return Call(query, key, value, d_out=d_out, d_lse=normal(4, *rows), **options)


TILED = [*zip(FEATURES, itertools.cycle(SHAPES), strict=False), *(("lengths", shape) for shape in SHAPES[:3]), *NARROW]
IN_SHORT_RUN = [*TILED[2:6], NARROW[-1]]
"""The shapes of tiles, among all, that decide which of them are visited."""
ROWS = [
    *(pytest.param(*row, {}, "float32", marks=() if row in IN_SHORT_RUN else cover(0)) for row in TILED),
    *(pytest.param(feature, shape, dict(by_passes=True), dtype) for feature, shape, dtype in GPU),
    pytest.param("segments", (3, 2, 64, 149), dict(by_passes=True, held_keys=100), "float32"),
]


@pytest.mark.parametrize(("feature", "shape", "policy", "dtype"), ROWS)
def test_any_tiles_are_right(
    monkeypatch: pytest.MonkeyPatch,
    feature: str,
    shape: tuple[int, int, int, int],
    policy: dict[str, Any],
    dtype: str,
):
    tiles = Tiles(*shape, **policy)
    name = f"xla in {tiles}"
    monkeypatch.setitem(_dispatch.BACKENDS, name, xla)
    monkeypatch.setattr(plans, "plan", lambda spec, work: tiles)
    arrays = normal(0, 3, T, 4, 8), normal(1, 3, S, 2, 8), normal(2, 3, S, 2, 16)
    one = call(*(array.astype(dtype) for array in arrays), **FEATURES[feature])
    oracle.assert_right(oracle.run(functools.partial(jflash.attention, implementation=name), one), one)


@pytest.mark.parametrize("size", [1, 40])
def test_large_logits_do_without_the_bound(size: int):
    """Small norms take the bounded softmax. With large ones it would underflow, and rows would seem to see no key.

    Of whole numbers, as their products are exact in float32. What the largest of other products loses by rounding is
    luck, plain attention's and ours, and decides the error of all. The log-sum-exp of large logits is rounded.
    """
    query, key = (np.round(normal(seed, 1, length, 2, 16)) for seed, length in enumerate((64, 1100)))
    one = call(size * query, key, normal(2, 1, 1100, 2, 16))
    got = oracle.run(functools.partial(jflash.attention, implementation="xla"), one)
    oracle.assert_right(got, one, by_lse=size > 1)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 1.0),
        (dict(is_causal=True), 0.6),
        (dict(local_window_size=256), 1 / 15),
        (dict(local_window_size=(1023, 0)), 0.15),
        (dict(key_value_seq_lengths=np.array([2048])), 0.13),
        (dict(query_seq_lengths=np.array([2048])), 0.13),
        (dict(segment_ids=np.arange(16384)[None] // 1024), 0.1),
    ],
    ids=lambda value: next(iter(value), "full") if isinstance(value, dict) else "",
)
def test_only_tiles_that_are_seen_are_visited(options: dict[str, Any], most: float):
    """The logits of all visited tiles, as a part of all logits, at 16,384 tokens."""
    length = 16384

    def count(query: Any) -> Any:
        spec, operands, _ = _canonical.canonicalize(query, query, query, **options)
        shape = plans.plan(spec, "forward")
        add = lambda corner, span, total: total + shape.queries * shape.keys
        body = lambda block, total: tiling.for_each_tile(spec, operands, shape, block, add, total)
        return tiling.for_each_block(spec, operands, shape, body, jnp.float32(0))

    assert jax.jit(count)(jnp.zeros((1, length, 1, 64))) <= most * length * length
