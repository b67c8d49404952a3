"""The oracle itself: against `jax.nn`, and its gradients, derived by hand, against differences of its own results."""

import dataclasses

import cases
import jax
import numpy as np
import oracle
import pytest
from cases import Case
from plain_attention import Call, Results

SMALL = Case(query_length=13, key_length=17, heads=(4, 2), dims=(5, 3), batch=(2,))
AS_JAX_NN = SMALL._replace(dims=(8, 8), scale="static", bias="full", mask="keys", causal=True, offset=None)
FEATURES = [
    SMALL,
    SMALL._replace(scale="traced", soft_cap=1.5, alibi=True, offset="end"),
    SMALL._replace(bias="heads", sinks=True, causal=True, dropout=True),
    SMALL._replace(bias="keys", score_mod="arrays", lengths="both"),
    SMALL._replace(bias="queries", score_mod="indices", window=(3, 2), segments="sorted", sinks=True),
]


def as_jax_nn(call: Call) -> Results:
    """By `jax.nn` and JAX's own derivative of it."""
    options = dict(scale=call.scale, is_causal=call.is_causal, mask=call.mask, return_residual=True)
    attention = lambda *arrays: jax.nn.dot_product_attention(*arrays, **options)
    (out, lse), pull_back = jax.vjp(attention, call.query, call.key, call.value, call.bias)
    gradients = pull_back((call.d_out, call.d_lse.astype(lse.dtype)))
    return Results(out, lse, dict(zip(("query", "key", "value", "bias"), gradients, strict=True)))


def test_truth_is_jax_nn_in_float64():
    with jax.enable_x64(True):
        call = cases.build(AS_JAX_NN._replace(dtype="float64"))
        oracle.assert_right(as_jax_nn(call), call)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_yardstick_is_as_exact_as_jax_nn(dtype: str):
    """Neither stricter than plain attention as JAX does it, nor laxer: within a factor of two, over all of an array."""
    call = cases.build(AS_JAX_NN._replace(dtype=dtype, query_length=128, key_length=131, dims=(64, 64)))
    truth = oracle.exact(call)
    mean_error = lambda got, truth: float(np.sqrt(np.mean((np.asarray(got).astype(np.float64) - truth) ** 2)))
    own = jax.tree.map(mean_error, oracle.plain(call), truth)
    peer = jax.tree.map(mean_error, as_jax_nn(call), truth)
    ratios = jax.tree.map(lambda own, peer: own / peer, own, peer)
    assert all(0.5 < ratio < 2 for ratio in jax.tree.leaves(ratios)), ratios


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_gradients_are_differences(case: Case):
    """Along a random direction in each argument, in float64."""
    call = cases.build(case)
    numbers = np.random.default_rng(0)
    step = 1e-6

    def weighted(call: Call) -> float:
        out, lse, _ = oracle.exact(call)
        return float(np.sum(out * call.d_out) + np.sum(np.where(np.isfinite(lse), lse, 0) * call.d_lse))

    for name, gradient in oracle.exact(call).gradients.items():
        value = jax.tree.map(lambda array: array.astype(np.float64), getattr(call, name))
        direction = jax.tree.map(lambda array: numbers.standard_normal(array.shape), value)
        move = lambda size, value=value, direction=direction: jax.tree.map(lambda v, d: v + size * d, value, direction)
        # The softmax's type is the query's, which stays as it is; the arguments that move are wider.
        ahead, behind = (weighted(dataclasses.replace(call, **{name: move(size)})) for size in (step, -step))
        expected = sum(map(np.vdot, jax.tree.leaves(gradient), jax.tree.leaves(direction)))
        # The difference is off by step**2 times a third derivative, and by the rounding of results of size up to 100.
        np.testing.assert_allclose((ahead - behind) / (2 * step), expected, rtol=1e-6, atol=1e-6)
