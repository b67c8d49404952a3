"""The stretch of keys that a block of queries is shown, against the rule it comes from, row by row."""

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from short_run import cover

from jflash import _arguments, _canonical
from jflash._semantics import visibility
from jflash._semantics.tile import Corner, TileShape, load_tile

QUERIES, KEYS = 24, 31


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def spans_and_rule(first: int, rows: int, **options):
    """`key_spans` of the rows, and what the rule says of each [B, rows, S]."""
    batch = 2
    array = lambda length: jnp.zeros((batch, length, 1, 4))
    spec, operands, _ = _canonical.canonicalize(array(QUERIES), array(KEYS), array(KEYS), **options)
    spans = visibility.key_spans(spec, operands, 0, batch, first, rows)
    whole = load_tile(spec, operands, Corner(0, 0, 0, 0), TileShape(batch, 1, QUERIES, KEYS))
    visible = visibility.visible(spec, whole)
    everyone = np.ones((batch, 1, 1, QUERIES, KEYS), bool)
    rule = everyone if visible is None else np.broadcast_to(visible, everyone.shape)
    return [int(bound) for bound in spans], rule[:, 0, 0, first : first + rows]


@st.composite
def blocks(draw):
    first = draw(st.integers(0, QUERIES - 1))
    return first, draw(st.integers(1, QUERIES - first))


offsets = st.integers(-10, 40)
bounds = st.fixed_dictionaries(
    {"is_causal": st.booleans()},
    optional={
        "local_window_size": st.tuples(st.integers(0, 12), st.integers(0, 12)),
        "query_offset": offsets | st.lists(offsets, min_size=2, max_size=2).map(np.array),
        "query_seq_lengths": st.lists(st.integers(0, QUERIES), min_size=2, max_size=2).map(np.array),
        "key_value_seq_lengths": st.lists(st.integers(0, KEYS), min_size=2, max_size=2).map(np.array),
    },
)


@hypothesis.given(blocks(), bounds)
def test_one_entry_by_its_scalars(block, options):
    """A kernel that knows one batch entry's offset and lengths finds the same."""
    array = lambda length: jnp.zeros((2, length, 1, 4))
    spec, operands, _ = _canonical.canonicalize(array(QUERIES), array(KEYS), array(KEYS), **options)
    for entry in range(2):
        names = ("query_offset", "query_lengths", "key_lengths")
        limits = {name: getattr(operands, name) for name in names if getattr(operands, name) is not None}
        scalars = {name: jnp.broadcast_to(array, 2)[entry] for name, array in limits.items()}
        assert visibility.key_spans(spec, operands._replace(**scalars), 0, 1, *block) == visibility.key_spans(
            spec, operands, entry, 1, *block
        )


@hypothesis.given(bounds)
def test_whether_every_row_sees_a_key(options):
    """Known where offset and bounds are all that there is."""
    array = lambda length: jnp.zeros((2, length, 1, 4))
    spec, _, _ = _canonical.canonicalize(array(QUERIES), array(KEYS), array(KEYS), **options)
    known = {"query_seq_lengths", "key_value_seq_lengths"}.isdisjoint(options) and spec.query_offset is not None
    rule = spans_and_rule(0, QUERIES, **options)[1]
    assert visibility.every_row_sees(spec) == (known and bool(rule.any(axis=-1).all()))


@pytest.mark.parametrize("offset", [-3, -1, 0, 1, 3])
@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(local_window_size=(2, 1))], ids=str)
def test_whether_every_query_sees_itself_in_its_segment(options: dict, offset: int):
    """Known of one array of ids; of other ids for keys, nothing."""
    array, ids = jnp.zeros((2, QUERIES, 1, 4)), np.arange(2 * QUERIES).reshape(2, QUERIES)
    of = lambda ids: _canonical.canonicalize(array, array, array, segment_ids=ids, query_offset=offset, **options)[:2]
    (spec, operands), (other, _) = of(ids), of((ids, ids + 0))
    whole = load_tile(spec, operands, Corner(0, 0, 0, 0), TileShape(2, 1, QUERIES, QUERIES))
    sees = bool(visibility.visible(spec, whole).any(axis=-1).all())
    assert visibility.every_row_sees(spec) == (not visibility.hidden_rows_have_cotangents(spec)) == sees
    assert not visibility.every_row_sees(other)
    assert visibility.hidden_rows_have_cotangents(other)


def sorted_ids(length: int):
    ids = st.lists(st.integers(0, 4), min_size=length, max_size=length).map(sorted)
    return st.lists(ids, min_size=2, max_size=2).map(np.array)


def check(spans: list[int], rule: np.ndarray):
    start, full_start, full_stop, stop = spans
    assert 0 <= start <= full_start <= full_stop <= stop <= KEYS
    assert not rule[..., :start].any()
    assert not rule[..., stop:].any()
    assert rule[..., full_start:full_stop].all()


@hypothesis.settings(max_examples=60)
@hypothesis.given(blocks(), bounds)
def test_spans_are_right_and_no_larger_than_needed(block: tuple[int, int], options: dict):
    spans, rule = spans_and_rule(*block, **options)
    check(spans, rule)
    start, full_start, full_stop, stop = spans
    some, every = rule.any(axis=(0, 1)), rule.all(axis=(0, 1))
    if some.any() and rule.any(axis=2).all():
        # Every row sees something, so the spans are those of the first and last key that any, and all, rows see.
        assert (start, stop) == (np.flatnonzero(some)[0], np.flatnonzero(some)[-1] + 1)
    assert full_stop - full_start == every.sum()


@hypothesis.settings(max_examples=60)
@hypothesis.given(blocks(), bounds, sorted_ids(QUERIES), sorted_ids(KEYS), st.randoms(use_true_random=False))
def test_segments(block, options, queries, keys, random):
    """Sorted ids show a block the segments from its first to its last; shuffled ones never too little."""
    spans, rule = spans_and_rule(*block, segment_ids=(queries, keys))
    check(spans, rule)
    ids = queries[:, block[0] : sum(block)]
    within = (keys >= ids.min(axis=1, keepdims=True)) & (keys <= ids.max(axis=1, keepdims=True))
    shown = np.flatnonzero(within.any(axis=0))
    assert (spans[0], spans[3]) == (shown[0], shown[-1] + 1) if shown.size else spans[0] == spans[3]
    for row in keys:
        random.shuffle(row)
    check(*spans_and_rule(*block, segment_ids=(queries, keys), **options))


def test_a_dense_mask_leaves_nothing_full():
    (_, full_start, full_stop, _), _ = spans_and_rule(0, QUERIES, mask=np.ones((QUERIES, KEYS), bool))
    assert full_start == full_stop


@pytest.mark.parametrize("first", [0, 12])
def test_blocks_of_padding_see_nothing(first: int):
    (start, _, _, stop), _ = spans_and_rule(first, 12, query_seq_lengths=np.array([0, 12 if first else 0]))
    assert start == stop


@cover(1)
@pytest.mark.parametrize("offset", [-_arguments.OFFSET_LIMIT, _arguments.OFFSET_LIMIT])
@pytest.mark.parametrize("window", [2**29, 2**31], ids=["limit", "beyond"])
def test_positions_far_away(attention: Callable[..., Any], offset: int, window: int):
    """Sums of the largest offsets and windows do not wrap around."""
    query, key = normal(0, 2, QUERIES, 1, 4), normal(1, 2, KEYS, 1, 4)
    distance = np.arange(KEYS) - (np.arange(QUERIES)[:, None] + offset)
    got = attention(query, key, key, local_window_size=window, query_offset=offset)
    want = attention(query, key, key, mask=np.abs(distance) <= window)
    np.testing.assert_allclose(got, want, atol=1e-6)
