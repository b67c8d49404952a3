"""Properties that must hold between calls, whatever the numbers: drawn by hypothesis, for every backend."""

import dataclasses
from collections.abc import Callable
from typing import Any

import cases
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from operands import normal
from plain_attention import Call, Results
from short_run import cover

Attention = Callable[..., Any]
T, S = 13, 19
LARGEST = np.asarray(3, np.float32)
SLOPES = np.float32([0.1, 0.2, 0.0, 1.0])


def coins(seed: int, *shape: int, heads: float = 0.7) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).random(shape) < heads


def call(seed: int, T: int = T, S: int = S, batch: tuple[int, ...] = (2,), **options: Any) -> Call:
    """Random arrays: 4 query heads on 2 key heads, head dimensions 8 and 6."""
    sizes = {"query": (T, 4, 8), "key": (S, 2, 8), "value": (S, 2, 6), "d_out": (T, 4, 6), "d_lse": (T, 4)}
    arrays = {name: normal(seed + i, *batch, *size) for i, (name, size) in enumerate(sizes.items())}
    return Call(**(arrays | options))


def assert_close(got: Any, want: Any, allowed: Any):
    oracle.assert_within(got, want, jax.tree.map(lambda allowed: 2 * allowed, allowed))


seeds = st.integers(0, 2**20)
positions = st.sampled_from([dict(local_window_size=(5, 2)), {}, dict(is_causal=True), dict(local_window_size=(20, 0))])


def lengths(most: int) -> st.SearchStrategy[np.ndarray]:
    """Draw lengths of two entries at most; the simplest are a few less than the axis."""
    missing = st.tuples(st.integers(0, most), st.integers(0, most))
    return missing.map(lambda pair: (most - np.array([4, 1]) - pair).astype(np.int32) % (most + 1))


visibility = st.fixed_dictionaries(
    dict(
        query_seq_lengths=lengths(T),
        key_value_seq_lengths=lengths(S),
        mask=seeds.map(lambda seed: coins(seed, 2, 1, T, S)),
        bias=seeds.map(lambda seed: normal(seed, 1, 4, T, S)),
    )
)


@cover(every=2)
@hypothesis.given(seed=seeds, dtype=st.sampled_from([jnp.float32, jnp.bfloat16]), where=positions, seen=visibility)
def test_as_jax_nn(attention: Attention, seed: int, dtype: Any, where: dict, seen: dict):
    """Wherever the two mean the same. They differ

    - in a query that sees no key: jax.nn gives the mean of all values, jflash 0, LSE -inf and zero gradients;
    - in a padded query: jax.nn lets it see keys and only then zeroes its output, jflash lets it see none;
    - in padding that holds NaN or infinity, which in jax.nn reaches results (`test_what_padding_holds` below);
    - in the LSE: jax.nn's has no gradient, and is rounded to the query's dtype;
    - in float64, where jax.nn's softmax stays in float32;
    - in the head dimension of the value, which in jax.nn is the key's.
    """
    one = call(seed, value=normal(seed, 2, S, 2, 8), d_out=normal(seed + 1, 2, T, 4, 8), **where, **seen)
    one = dataclasses.replace(one, **{n: getattr(one, n).astype(dtype) for n in ("query", "key", "value")})
    sees = np.isfinite(oracle.exact(one).lse)
    d_out = np.where(sees[..., None], one.d_out, 0).astype(dtype)
    one = dataclasses.replace(one, d_out=d_out, d_lse=np.zeros_like(one.d_lse))
    own, peer = oracle.run(attention, one), oracle.run(jax_nn, one)
    comparable = sees & (dtype == jnp.float32)
    rows = lambda results: results._replace(
        out=jnp.where(sees[..., None], results.out, 0), lse=jnp.where(comparable, results.lse, 0)
    )
    assert_close(rows(own), rows(peer), oracle.tolerances(one))


def jax_nn(**options: Any) -> Any:
    """`jax.nn.dot_product_attention` with jflash's arguments."""
    for name in ("alibi_slopes", "score_mod", "mask_mod", "segment_ids", "sinks", "logits_soft_cap", "dropout_key"):
        assert options.pop(name, None) is None
    assert options.pop("query_offset") == options.pop("dropout_rate") == 0
    out, lse = jax.nn.dot_product_attention(**options)
    return out, lse.astype(jnp.float32)


@cover(every=2)
@hypothesis.given(seed=seeds, cut=st.sampled_from([7, 1, S - 1]), where=positions, seen=visibility)
def test_keys_in_two_calls_merged_by_lse(attention: Attention, seed: int, cut: int, where: dict, seen: dict):
    whole = call(seed, alibi_slopes=SLOPES, **where, **seen)
    parts = [
        oracle.run(
            attention,
            dataclasses.replace(
                whole,
                key=whole.key[:, start:stop],
                value=whole.value[:, start:stop],
                bias=whole.bias[..., start:stop],
                mask=whole.mask[..., start:stop],
                query_offset=-start,
                key_value_seq_lengths=np.clip(whole.key_value_seq_lengths - start, 0, stop - start),
            ),
        )
        for start, stop in ((0, cut), (cut, S))
    ]
    lse = np.logaddexp(parts[0].lse, parts[1].lse)
    weights = [np.exp(part.lse - np.where(lse == -np.inf, 0, lse)) for part in parts]
    out = sum(weight[..., None] * part.out for weight, part in zip(weights, parts, strict=True))
    one, allowed = oracle.run(attention, whole), oracle.tolerances(whole)
    assert_close((out, lse), (one.out, one.lse), (allowed.out, allowed.lse))


@cover(every=2)
@hypothesis.given(seed=seeds, seen=visibility)
def test_the_order_of_keys_does_not_matter(attention: Attention, seed: int, seen: dict):
    order = np.random.default_rng(seed).permutation(S)
    ids = np.zeros((2, T), np.int32), coins(seed, 2, S).astype(np.int32)
    one = call(seed, segment_ids=ids, **(seen | dict(key_value_seq_lengths=None)))
    moved = dataclasses.replace(
        one,
        key=one.key[:, order],
        value=one.value[:, order],
        bias=one.bias[..., order],
        mask=one.mask[..., order],
        segment_ids=(ids[0], ids[1][:, order]),
    )
    back = np.argsort(order)
    got, want = oracle.run(attention, moved), oracle.run(attention, one)
    gradients = got.gradients | dict(
        key=got.gradients["key"][:, back], value=got.gradients["value"][:, back], bias=got.gradients["bias"][..., back]
    )
    assert_close(got._replace(gradients=gradients), want, oracle.tolerances(one))


@cover(every=2)
@hypothesis.given(seed=seeds, cuts=st.sampled_from([(1, 12), (6, 7)]), where=positions)
def test_packed_sequences_are_sequences_apart(attention: Attention, seed: int, cuts: tuple[int, int], where: dict):
    ids = np.digitize(np.arange(S), cuts)[None]
    packed = call(seed, T=S, batch=(1,), segment_ids=ids, alibi_slopes=SLOPES, **where)
    got, allowed = oracle.run(attention, packed), oracle.tolerances(packed)
    slopes = 0
    for segment in range(3):
        rows = ids[0] == segment
        arrays = {name: getattr(packed, name)[:, rows] for name in ("query", "key", "value", "d_out", "d_lse")}
        apart = oracle.run(attention, dataclasses.replace(packed, segment_ids=None, **arrays))
        slopes += apart.gradients.pop("alibi_slopes")
        gradients = {name: got.gradients[name][:, rows] for name in apart.gradients}
        limits = allowed._replace(gradients={name: allowed.gradients[name] for name in apart.gradients})
        assert_close(Results(got.out[:, rows], got.lse[:, rows], gradients), apart, limits)
    assert_close(slopes, got.gradients["alibi_slopes"], allowed.gradients["alibi_slopes"])


def saturate(largest: Any) -> Any:
    """A `score_mod` whose derivatives depend on the logit."""
    return lambda logit, batch, head, query, key: largest * jnp.tanh(logit / largest)


SATURATED = dict(local_window_size=(9, 4), scale=LARGEST / 9, score_mod=saturate, score_mod_arrays=(LARGEST,))
SOME = np.array([0, 1], np.int32)


@hypothesis.example(seed=0, poison=np.nan, queries=SOME, keys=SOME, options=SATURATED)
@hypothesis.given(
    seed=seeds,
    poison=st.sampled_from([np.nan, np.inf, -np.inf]),
    queries=lengths(T),
    keys=lengths(S),
    options=st.sampled_from(
        [
            dict(is_causal=True, alibi_slopes=SLOPES, sinks=SLOPES, logits_soft_cap=2.0),
            dict(),
            SATURATED,
        ]
    ),
)
def test_what_padding_holds(
    attention: Attention,
    backend: str,
    seed: int,
    poison: float,
    queries: np.ndarray,
    keys: np.ndarray,
    options: dict,
):
    """Changes no bit of anything, and is itself given no gradient."""
    if "score_mod" in cases.LACKS.get(backend, ()):
        options = {name: option for name, option in options.items() if not name.startswith("score_mod")}
    bias = normal(seed + 9, 2, 4, T, S)
    clean = call(seed, query_seq_lengths=queries, key_value_seq_lengths=keys, bias=bias, **options)
    query_padding, key_padding = np.arange(T) >= queries[:, None], np.arange(S) >= keys[:, None]
    padding = {
        "query": query_padding[..., None, None],
        "key": key_padding[..., None, None],
        "value": key_padding[..., None, None],
        "bias": (query_padding[:, :, None] | key_padding[:, None, :])[:, None],
        "d_out": query_padding[..., None, None],
        "d_lse": query_padding[..., None],
    }
    fill = lambda value: {n: np.where(p, np.float32(value), getattr(clean, n)) for n, p in padding.items()}
    want, got = (oracle.run(attention, dataclasses.replace(clean, **fill(value))) for value in (0, poison))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(want))
    for name in ("query", "key", "value", "bias"):
        assert not np.any(np.where(padding[name], want.gradients[name], 0))
    assert not np.any(np.where(padding["d_out"], want.out, 0))
    assert np.all(want.lse[query_padding] == -np.inf)


@cover(every=2)
@hypothesis.given(seed=seeds, rows=st.sampled_from([8, 1]), where=positions, traced=st.booleans())
def test_query_offset_gives_the_last_rows(attention: Attention, seed: int, rows: int, where: dict, traced: bool):
    """The last rows and the keys' gradients are those of the whole problem, where only these rows have cotangents."""
    ids = coins(seed, 2, S).astype(np.int32)
    options = dict(alibi_slopes=SLOPES, bias=normal(seed + 9, 4, S, S), segment_ids=(ids, ids), **where)
    whole = call(seed, T=S, **options)
    ends = np.arange(S) >= S - rows
    d_out, d_lse = whole.d_out * ends[:, None, None], whole.d_lse * ends[:, None]
    whole = dataclasses.replace(whole, d_out=d_out, d_lse=d_lse)
    last = dataclasses.replace(
        whole,
        query=whole.query[:, -rows:],
        bias=whole.bias[:, -rows:],
        segment_ids=(ids[:, -rows:], ids),
        d_out=whole.d_out[:, -rows:],
        d_lse=whole.d_lse[:, -rows:],
        query_offset=np.full(2, S - rows, np.int32) if traced else S - rows,
    )
    got, want = oracle.run(attention, last), oracle.run(attention, whole)
    gradients = want.gradients | dict(query=want.gradients["query"][:, -rows:], bias=want.gradients["bias"][:, -rows:])
    end = Results(want.out[:, -rows:], want.lse[:, -rows:], gradients)
    assert_close(got, end, oracle.tolerances(whole))


@cover(every=2)
@hypothesis.given(seed=seeds, dtype=st.sampled_from([jnp.bfloat16, jnp.float32]), where=positions, seen=visibility)
def test_large_logits_stay_finite(attention: Attention, seed: int, dtype: Any, where: dict, seen: dict):
    one = call(seed, scale=np.asarray(1e4, np.float32), **where, **seen)
    narrow = {name: getattr(one, name).astype(dtype) for name in ("query", "key", "value", "d_out")}
    got = oracle.run(attention, dataclasses.replace(one, **narrow))
    assert all(np.isfinite(leaf.astype(jnp.float32)).all() for leaf in jax.tree.leaves((got.out, got.gradients)))
    np.testing.assert_array_equal(got.lse == -np.inf, oracle.exact(one).lse == -np.inf)
    # An average of values is no larger than they are, but for its rounding.
    most = float(np.abs(one.value).max()) * (1 + 4 * float(jnp.finfo(dtype).eps))
    assert np.abs(got.out.astype(jnp.float32)).max() <= most


@cover(every=2)
@hypothesis.given(seed=seeds, where=positions)
def test_minus_infinity_is_not_seen(attention: Attention, seed: int, where: dict):
    seen = coins(seed, 2, 4, T, S)
    seen[0, :, 2] = False
    bias = normal(seed + 9, 2, 4, T, S)
    masked = call(seed, mask=seen, bias=bias, **where)
    minus_infinity = dataclasses.replace(masked, mask=None, bias=np.where(seen, bias, -np.float32(np.inf)))
    got, want = oracle.run(attention, minus_infinity), oracle.run(attention, masked)
    assert_close(got, want, oracle.tolerances(masked))
    assert not np.any(np.where(seen, 0, got.gradients["bias"]))
    np.testing.assert_array_equal(got.out[0, 2], 0)
    np.testing.assert_array_equal(got.lse[0, 2], -np.inf)
    np.testing.assert_array_equal(got.gradients["query"][0, 2], 0)


@cover(every=2)
@hypothesis.given(seed=seeds, where=st.sampled_from([dict(local_window_size=(S, S)), {}]))
def test_a_sink_is_a_key_without_a_value(attention: Attention, seed: int, where: dict):
    sinks = normal(seed + 9, 4)
    with_sink = call(seed, sinks=sinks, **where)
    zero = lambda array: np.concatenate([array, np.zeros_like(array[:, :1])], axis=1)
    bias = np.zeros((4, 1, S + 1), np.float32)
    bias[:, 0, S] = sinks
    with_key = dataclasses.replace(
        with_sink, sinks=None, key=zero(with_sink.key), value=zero(with_sink.value), bias=bias
    )
    got, want = oracle.run(attention, with_sink), oracle.run(attention, with_key)
    gradients = {
        name: want.gradients[name][:, : getattr(with_sink, name).shape[1]] for name in ("query", "key", "value")
    }
    gradients["sinks"] = want.gradients["bias"][:, 0, S]
    assert_close(got, want._replace(gradients=gradients), oracle.tolerances(with_sink))


@cover(every=2)
@hypothesis.given(seed=seeds, where=positions)
def test_grouped_heads_are_repeated_keys(attention: Attention, seed: int, where: dict):
    grouped = call(seed, **where)
    repeat = lambda array: np.repeat(array, 2, axis=-2)
    apart = dataclasses.replace(grouped, key=repeat(grouped.key), value=repeat(grouped.value))
    got, want = oracle.run(attention, grouped), oracle.run(attention, apart)
    total = lambda array: array.reshape(*array.shape[:-2], 2, 2, array.shape[-1]).sum(axis=-2)
    gradients = want.gradients | dict(key=total(want.gradients["key"]), value=total(want.gradients["value"]))
    assert_close(got, want._replace(gradients=gradients), oracle.tolerances(grouped))


@cover(every=2)
@pytest.mark.parametrize("batch", [pytest.param((3,), marks=cover(0)), (2, 3)], ids=str)
def test_batch_axes_are_loops(attention: Attention, batch: tuple[int, ...]):
    options = dict(
        bias=normal(9, *batch, 4, 1, S),
        mask=coins(9, *batch[:-1], 1, 1, T, S),
        query_seq_lengths=np.arange(3, dtype=np.int32) * np.ones(batch, np.int32) * 5,
        query_offset=np.arange(3, dtype=np.int32) * np.ones(batch, np.int32),
        is_causal=True,
    )
    whole = call(5, batch=batch, **options)
    got, allowed = oracle.run(attention, whole), oracle.tolerances(whole)
    for index in np.ndindex(batch):
        at = lambda array, index=index: np.broadcast_to(array, (*batch, *array.shape[len(batch) :]))[index]
        names = ("query", "key", "value", "bias", "mask", "query_seq_lengths", "query_offset", "d_out", "d_lse")
        single = dataclasses.replace(whole, **{name: np.asarray(at(getattr(whole, name))) for name in names})
        assert_close(oracle.run(attention, single), jax.tree.map(at, got), allowed)
