"""What must hold between calls, whatever the numbers: drawn by hypothesis, for every backend.

Two results that should be equal may each be wrong by the tolerance of `oracle`, so they may differ by twice that.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from plain_attention import Call, Results

Attention = Callable[..., Any]
EPS = float(np.finfo(np.float32).eps)
T, S = 13, 19
"""One shape for all: a new one costs a compilation, and the shapes are the business of test_exactness."""


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def call(seed: int, T: int = T, S: int = S, batch: tuple[int, ...] = (2,), **options: Any) -> Call:
    """Random arrays: 4 query heads on 2 key heads, head dimensions 8 and 6."""
    sizes = {"query": (T, 4, 8), "key": (S, 2, 8), "value": (S, 2, 6), "d_out": (T, 4, 6), "d_lse": (T, 4)}
    arrays = {name: normal(seed + i, *batch, *size) for i, (name, size) in enumerate(sizes.items())}
    return Call(**arrays, **options)


def assert_close(got: Any, want: Any, allowed: Any):
    jax.tree.map(
        lambda g, w, a: np.testing.assert_array_less(oracle.error(g, np.asarray(w)), 2 * a + 1e-30), got, want, allowed
    )


seeds = st.integers(0, 2**20)
lengths = lambda most: st.lists(st.integers(1, most), min_size=2, max_size=2).map(np.array)
visibility = st.fixed_dictionaries(
    {},
    optional={
        "is_causal": st.booleans(),
        "local_window_size": st.sampled_from([(5, 2), (20, 0), 7]),
        "query_seq_lengths": lengths(T),
        "key_value_seq_lengths": lengths(S),
        "mask": seeds.map(lambda seed: np.random.default_rng(seed).random((2, 1, T, S)) < 0.8),
    },
)
features = st.fixed_dictionaries(
    {},
    optional={
        "scale": st.sampled_from([0.2, -1.0]),
        "bias": seeds.map(lambda seed: normal(seed, 1, 4, T, S)),
    },
)


@hypothesis.given(seed=seeds, seen=visibility, features=features)
def test_as_jax_nn(attention: Attention, seed: int, seen: dict, features: dict):
    """jax.nn's arguments mean the same, but for queries that see no key, whatever is in padding, and the dtype and
    gradient of the log-sum-exp. Its own error is the yardstick here."""
    one = call(seed, **seen, **features)
    one = dataclasses.replace(one, d_lse=np.zeros_like(one.d_lse))
    truth = oracle.exact(one)
    hypothesis.assume(np.isfinite(truth.lse).all() or "query_seq_lengths" in seen)

    def jax_nn(**options: Any) -> Any:
        options = {name: value for name, value in options.items() if value is not None}
        for name in ("return_residual", "query_offset", "dropout_rate"):
            options.pop(name, None)
        for name in ("query_seq_lengths", "key_value_seq_lengths"):
            if name in options:
                options[name] = jnp.asarray(options[name], jnp.int32)
        return jax.nn.dot_product_attention(**options), jnp.zeros(truth.lse.shape)

    # A padded query sees nothing; jax.nn lets its output be cut off, but not its gradients.
    rows = np.arange(T) < one.query_seq_lengths[:, None] if one.query_seq_lengths is not None else np.ones((2, T), bool)
    hypothesis.assume(np.isfinite(truth.lse)[rows].all())
    peer, own = oracle.run(jax_nn, one), oracle.run(attention, one)
    magnitude = jax.tree.map(lambda x: float(np.max(np.abs(np.nan_to_num(x, posinf=0, neginf=0)), initial=0)), truth)
    for name in ("out", "gradients"):
        errors = [jax.tree.map(oracle.error, getattr(r, name), getattr(truth, name)) for r in (own, peer)]
        jax.tree.map(
            lambda own, peer, size: np.testing.assert_array_less(own, 2 * peer + 4 * EPS * size + 1e-30),
            *errors,
            getattr(magnitude, name),
        )


@hypothesis.given(seed=seeds, cut=st.integers(1, S - 1), seen=visibility)
def test_keys_in_two_calls_merged_by_lse(attention: Attention, seed: int, cut: int, seen: dict):
    whole = call(seed, **seen)
    parts: list[Any] = []
    for start, stop in ((0, cut), (cut, S)):
        one = dataclasses.replace(
            whole,
            key=whole.key[:, start:stop],
            value=whole.value[:, start:stop],
            query_offset=-start,
            mask=None if whole.mask is None else whole.mask[..., start:stop],
            key_value_seq_lengths=None
            if whole.key_value_seq_lengths is None
            else np.clip(whole.key_value_seq_lengths - start, 0, stop - start),
        )
        parts.append(oracle.run(attention, one))
    lse = jnp.logaddexp(parts[0].lse, parts[1].lse)
    weights = [jnp.where(part.lse == -jnp.inf, 0, jnp.exp(part.lse - lse)) for part in parts]
    out = sum(weight[..., None] * part.out for weight, part in zip(weights, parts, strict=True))
    one, allowed = oracle.run(attention, whole), oracle.tolerances(whole)
    assert_close((out, lse), (one.out, one.lse), (allowed.out, allowed.lse))


@hypothesis.given(seed=seeds, mask=seeds, order=st.permutations(range(S)))
def test_the_order_of_keys_does_not_matter(attention: Attention, seed: int, mask: int, order: list[int]):
    one = call(
        seed,
        bias=normal(seed + 9, 2, 1, T, S),
        mask=np.random.default_rng(mask).random((1, 4, T, S)) < 0.7,
        segment_ids=(np.zeros((2, T), np.int32), np.random.default_rng(mask + 1).integers(0, 2, (2, S))),
    )
    moved = dataclasses.replace(
        one,
        key=one.key[:, order],
        value=one.value[:, order],
        bias=one.bias[..., order],
        mask=one.mask[..., order],
        segment_ids=(one.segment_ids[0], one.segment_ids[1][:, order]),
    )
    back = np.argsort(order)
    got, want = oracle.run(attention, moved), oracle.run(attention, one)
    gradients = dict(got.gradients)
    gradients.update(key=gradients["key"][:, back], value=gradients["value"][:, back])
    gradients.update(bias=gradients["bias"][..., back])
    assert_close(Results(got.out, got.lse, gradients), want, oracle.tolerances(one))


@hypothesis.given(seed=seeds, cuts=st.tuples(st.integers(1, 6), st.integers(7, S - 1)), causal=st.booleans())
def test_packed_sequences_are_sequences_apart(attention: Attention, seed: int, cuts: tuple[int, int], causal: bool):
    ids = np.digitize(np.arange(S), cuts)[None]
    packed = call(seed, T=S, batch=(1,), segment_ids=ids, is_causal=causal)
    got, allowed = oracle.run(attention, packed), oracle.tolerances(packed)
    for segment in range(3):
        rows = ids[0] == segment
        arrays = {name: getattr(packed, name)[:, rows] for name in ("query", "key", "value", "d_out", "d_lse")}
        apart = oracle.run(attention, dataclasses.replace(packed, segment_ids=None, **arrays))
        part = Results(got.out[:, rows], got.lse[:, rows], {name: g[:, rows] for name, g in got.gradients.items()})
        assert_close(part, apart, allowed)


@hypothesis.given(
    seed=seeds,
    poison=st.sampled_from([np.nan, np.inf, -np.inf]),
    queries=lengths(T),
    keys=lengths(S),
    bias=st.booleans(),
)
def test_what_padding_holds_reaches_nothing(
    attention: Attention, seed: int, poison: float, queries: np.ndarray, keys: np.ndarray, bias: bool
):
    clean = call(seed, query_seq_lengths=queries, key_value_seq_lengths=keys)
    if bias:
        clean = dataclasses.replace(clean, bias=normal(seed + 9, 2, 4, T, S))
    padded = {"query": (T, queries), "key": (S, keys), "value": (S, keys), "d_out": (T, queries), "d_lse": (T, queries)}
    poisoned = {name: getattr(clean, name).copy() for name in padded}
    for name, (length, lengths) in padded.items():
        poisoned[name][np.arange(length) >= lengths[:, None]] = poison
    if bias:
        outside = (np.arange(T) >= queries[:, None])[:, :, None] | (np.arange(S) >= keys[:, None])[:, None, :]
        poisoned["bias"] = np.where(outside[:, None], np.float32(poison), clean.bias)
    want, got = oracle.run(attention, clean), oracle.run(attention, dataclasses.replace(clean, **poisoned))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.isfinite(np.asarray(want.out)).all()


@hypothesis.given(seed=seeds, rows=st.integers(1, S), window=st.sampled_from([None, (4, 3)]))
def test_query_offset_gives_the_last_rows(attention: Attention, seed: int, rows: int, window: Any):
    whole = call(seed, T=S, is_causal=True, local_window_size=window, alibi_slopes=np.float32([0.1, 0.2, 0.0, 1.0]))
    last = dataclasses.replace(
        whole,
        query=whole.query[:, -rows:],
        d_out=whole.d_out[:, -rows:],
        d_lse=whole.d_lse[:, -rows:],
        query_offset=np.asarray(S - rows, np.int32),
    )
    got, want, allowed = oracle.run(attention, last), oracle.run(attention, whole), oracle.tolerances(whole)
    assert_close((got.out, got.lse), (want.out[:, -rows:], want.lse[:, -rows:]), (allowed.out, allowed.lse))


@hypothesis.given(seed=seeds, dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]), seen=visibility)
def test_large_logits_stay_finite(attention: Attention, seed: int, dtype: Any, seen: dict):
    one = call(seed, scale=1e4, **seen)
    arrays = {name: getattr(one, name).astype(dtype) for name in ("query", "key", "value", "d_out")}
    arrays["d_lse"] = np.zeros_like(one.d_lse)
    got = oracle.run(attention, dataclasses.replace(one, **arrays))
    assert np.isfinite(np.asarray(got.out, np.float32)).all()
    assert not np.isnan(got.lse).any()
    # The gradients hold the factor 1e4 themselves, which float16 does not.
    wide = got.gradients if dtype != jnp.float16 else {"value": got.gradients["value"]}
    assert all(np.isfinite(np.asarray(gradient, np.float32)).all() for gradient in wide.values())


@hypothesis.given(seed=seeds, mask=seeds)
def test_minus_infinity_is_not_seen(attention: Attention, seed: int, mask: int):
    seen = np.random.default_rng(mask).random((2, 1, T, S)) < 0.5
    seen[0, 0, :2] = False
    masked = call(seed, mask=seen)
    biased = dataclasses.replace(masked, mask=None, bias=np.where(seen, 0, -np.inf).astype(np.float32))
    got, want = oracle.run(attention, biased), oracle.run(attention, masked)
    assert np.isfinite(np.asarray(got.gradients.pop("bias"))).all()
    assert_close(got, want, oracle.tolerances(masked))
    np.testing.assert_array_equal(got.out[0, :2], 0)
    np.testing.assert_array_equal(got.lse[0, :2], -np.inf)


@hypothesis.given(seed=seeds)
def test_a_sink_is_a_key_without_a_value(attention: Attention, seed: int):
    sinks = normal(seed + 9, 4)
    with_sink = call(seed, sinks=sinks)
    zero = lambda array: np.concatenate([array, np.zeros_like(array[:, :1])], axis=1)
    bias = np.zeros((1, 4, 1, S + 1), np.float32)
    bias[0, :, 0, S] = sinks
    with_key = dataclasses.replace(
        with_sink, sinks=None, key=zero(with_sink.key), value=zero(with_sink.value), bias=bias
    )
    got, want, allowed = oracle.run(attention, with_sink), oracle.run(attention, with_key), oracle.tolerances(with_sink)
    gradients = {
        name: want.gradients[name][:, :S] if name != "query" else want.gradients[name]
        for name in ("query", "key", "value")
    }
    gradients["sinks"] = want.gradients["bias"][0, :, 0, S]
    assert_close(got, Results(want.out, want.lse, gradients), allowed)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_batch_axes_and_groups_are_loops(attention: Attention, batch: tuple[int, ...]):
    one = call(5, batch=batch, bias=normal(9, *(1,) * len(batch), 4, 1, S), is_causal=True)
    got, allowed = oracle.run(attention, one), oracle.tolerances(one)
    for index in np.ndindex(batch):
        for head in range(4):
            single = Call(
                query=one.query[index][:, head : head + 1],
                key=one.key[index][:, head // 2 : head // 2 + 1],
                value=one.value[index][:, head // 2 : head // 2 + 1],
                d_out=one.d_out[index][:, head : head + 1],
                d_lse=one.d_lse[index][:, head : head + 1],
                bias=one.bias.reshape(4, 1, S)[head : head + 1],
                is_causal=True,
            )
            part = oracle.run(attention, single)
            heads = functools.partial(np.take, indices=[head], axis=1)
            assert_close(
                (part.out, part.lse, part.gradients["query"]),
                (heads(got.out[index]), heads(got.lse[index]), heads(got.gradients["query"][index])),
                (allowed.out, allowed.lse, allowed.gradients["query"]),
            )
