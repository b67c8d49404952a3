"""Calls small enough to be one tile: right, without loops, and with no product made twice. And tiles with all keys.

All of it with a CPU's plan and with a GPU's, on this machine.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from h200 import H200
from plain_attention import Call
from short_run import cover

import jflash
from jflash import _canonical, _dispatch, _platform
from jflash._backends import xla
from jflash._backends.xla import plans, tiling
from jflash._semantics.score_mod import trace_score_mod

Attention = Callable[..., Any]
ATTENTION = {
    name: functools.partial(jflash.attention, implementation=f"xla as planned for a {name}") for name in ("cpu", "gpu")
}
"""Under names of their own: by that compiled calls are found again."""


@pytest.fixture(params=ATTENTION)
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attention:
    if request.param == "gpu":
        monkeypatch.setattr(_platform, "current", lambda: H200)
    chosen = ATTENTION[request.param]
    monkeypatch.setitem(_dispatch.BACKENDS, chosen.keywords["implementation"], xla)
    return chosen


SMALL = Case(query_length=64, key_length=75, heads=(4, 2), dims=(16, 24), batch=(3,))
CASES = {
    "plain": SMALL,
    "causal": SMALL._replace(causal=True, offset="negative"),
    "window": SMALL._replace(window=40, offset="each", soft_cap=1.5),
    "mask": SMALL._replace(mask="full", bias="full", sinks=True),
    "bias": SMALL._replace(bias="keys", alibi=True, scale="traced"),
    "lengths": SMALL._replace(lengths="both", bias="queries", sinks=True),
    "segments": SMALL._replace(segments="unsorted", causal=True),
    "score_mod": SMALL._replace(score_mod="arrays", mask="keys", lengths="keys"),
    "dropout": SMALL._replace(dropout=True, causal=True),
    "one key": SMALL._replace(key_length=1),
}


def spec_of(call: Call) -> Any:
    options = oracle.arguments(call)
    score_mod = options.pop("score_mod")
    traced = None if score_mod is None else trace_score_mod(score_mod, np.dtype(np.float32))
    return _canonical.canonicalize(**options, score_mod=traced)[0]


@cover(1, rest=2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_right(attention: Attention, name: str, dtype: str):
    call = cases.build(CASES[name]._replace(dtype=dtype))
    spec = spec_of(call)
    assert all(tiling.is_whole(spec, plans.plan(spec, work)) for work in ("forward", "backward"))
    oracle.assert_right(oracle.run(attention, call), call)


@cover(1, rest=2)
@pytest.mark.parametrize("keys", [1, 2, 75])
@pytest.mark.parametrize(
    "options",
    [
        dict(mask=np.zeros((64, 1), bool)),
        dict(bias=np.full((64, 1), -np.inf, np.float32)),
        dict(is_causal=True, query_offset=-64),
        dict(local_window_size=4, query_offset=80),
        dict(key_value_seq_lengths=np.array([0])),
    ],
    ids=lambda options: next(reversed(options)),
)
def test_rows_that_see_nothing(attention: Attention, options: dict[str, Any], keys: int):
    query, key = (np.random.default_rng(0).standard_normal((1, n, 2, 8), np.float32) for n in (64, keys))
    call = functools.partial(attention, **options, return_residual=True)
    (out, lse), pull_back = jax.vjp(call, query, key, key)
    assert not np.any(out)
    assert np.all(lse == -np.inf)
    assert not any(np.any(gradient) for gradient in pull_back((jnp.ones_like(out), jnp.ones_like(lse))))


@cover(1)
@pytest.mark.parametrize("scale", [None, 1.0, 3.0])
@pytest.mark.parametrize("query_length", [256, 1300])
def test_gradients_of_few_keys(attention: Attention, query_length: int, scale: float | None):
    """Gradients are as exact as plain attention's, with nothing allowed for a log-sum-exp that is one rounded
    number."""
    call = cases.build(Case(query_length=query_length, key_length=8, heads=(4, 4), dims=(64, 64)))
    call = dataclasses.replace(call, scale=scale)
    spec = spec_of(call)
    assert plans.plan(spec, "backward").keys == spec.key_length
    truth, plain = oracle.exact(call), oracle.plain(call)
    allowed = jax.tree.map(lambda truth, plain: 2 * oracle.error(plain, truth), truth, plain)
    oracle.assert_within(oracle.run(attention, call), truth, allowed)


@cover(1)
@pytest.mark.parametrize("rows", [64, 1300])
@pytest.mark.parametrize("keys", [1, 64])
def test_rows_that_see_one_key(attention: Attention, rows: int, keys: int):
    """The weight of a single key is 1 whatever its logit, and so it is in plain attention, without an error."""
    query, key, value, d_out = np.random.default_rng(0).standard_normal((4, 1, rows, 2, 8), np.float32)
    call = functools.partial(attention, mask=np.arange(rows)[:, None] % keys == np.arange(keys))
    out, pull_back = jax.vjp(call, query, key[:, :keys], value[:, :keys])
    np.testing.assert_array_equal(out, value[:, np.arange(rows) % keys])
    d_query, d_key, _ = pull_back(d_out)
    assert not np.any(d_query)
    assert not np.any(d_key)


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_large_logits(attention: Attention, size: int, causal: bool):
    """Products are of whole numbers, and so exact in float32."""
    call = cases.build(SMALL._replace(causal=causal))
    query, key = (np.round(size * array) for array in (call.query, call.key))
    call = Call(query, key, call.value, is_causal=causal, d_out=call.d_out, d_lse=call.d_lse)
    oracle.assert_right(oracle.run(attention, call), call)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("query", "keys"), [(1e5, 1e5), (1e30, (-1e30, 0.1)), (1e30, -1e30)], ids=str)
def test_logits_near_the_largest_numbers(
    attention: Attention, query: float, keys: float | tuple[float, ...], causal: bool
):
    """A product times the scale, less itself, is 0 however it is rounded; -inf has no weight."""
    normal = np.random.default_rng(0).standard_normal((3, 1, 64, 2, 8), np.float32)
    if query == 1e5:
        q, k, v = normal * np.array([query, keys, 1], np.float32).reshape(3, 1, 1, 1, 1)
    else:
        q, k, v = np.full_like(normal[0], query), np.full_like(normal[1], np.ravel(keys)[0]), normal[2]
        k[:, :1] = np.ravel(keys)[-1]
    results = {}
    reference = functools.partial(jflash.attention, implementation="reference")
    for name, function in {"reference": reference, "xla": attention}.items():
        call = functools.partial(function, is_causal=causal, return_residual=True)
        (out, lse), pull_back = jax.jit(functools.partial(jax.vjp, call))(q, k, v)
        results[name] = out, lse, *pull_back((jnp.ones_like(out), jnp.ones_like(lse)))
    for found, right in zip(results["xla"], results["reference"], strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5)


def compiled(function: Callable[..., Any], *arrays: Any) -> str:
    return jax.jit(function).lower(*arrays).compile().as_text()


LIMITED = [
    {},
    dict(is_causal=True),
    dict(local_window_size=16),
    dict(key_value_seq_lengths=np.array([64, 32])),
    dict(query_seq_lengths=np.array([64, 32])),
    dict(segment_ids=np.arange(64)[None] // np.array([[32], [20]])),
    dict(mask=np.tri(64, dtype=bool)),
    dict(bias=np.tri(64, dtype=np.float32)),
]


@cover(1)
@pytest.mark.parametrize("options", LIMITED, ids=lambda options: next(iter(options), "plain"))
def test_no_product_is_made_twice(attention: Attention, options: dict[str, Any]):
    """A program with forward and backward has six: of the backward's five, one is the forward's. And no branches."""
    array = jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.float32)

    def gradients(query: Any, key: Any, value: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(functools.partial(attention, **options), query, key, value)
        return out, pull_back(d_out)

    program = compiled(gradients, *[array] * 4)
    assert len(re.findall(r" dot\(", program)) == 6
    assert not re.search(r" (while|conditional)\(", program)
