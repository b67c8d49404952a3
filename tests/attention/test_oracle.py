"""The oracle itself: against `jax.nn`, and its gradients, derived by hand, against differences of its own results."""

import dataclasses
import math

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from plain_attention import Call, PlainAttention, Precision, Results
from short_run import cover

SMALL = Case(query_length=13, key_length=17, heads=(4, 2), dims=(5, 3), batch=(2,))
AS_JAX_NN = SMALL._replace(dims=(8, 8), scale="static", bias="full", mask="keys", causal=True, offset=None)
FEATURES = [
    SMALL,
    SMALL._replace(scale="traced", soft_cap=1.5, alibi=True, offset="end"),
    SMALL._replace(bias="heads", sinks=True, causal=True, dropout=True),
    SMALL._replace(bias="keys", score_mod="arrays", lengths="both"),
    SMALL._replace(bias="queries", score_mod="indices", window=(3, 2), segments="sorted", sinks=True),
]


def comparable(case: Case) -> Call:
    """Return the call without what `jax.nn` has otherwise: rows that see no key, and a derivative of the
    log-sum-exp."""
    call = cases.build(case)
    call.mask[..., 0] = True
    return dataclasses.replace(call, d_lse=np.zeros_like(call.d_lse))


def by_jax_nn(call: Call) -> Results:
    """`jax.nn`'s results, and JAX's own derivative of them."""
    options = dict(scale=call.scale, is_causal=call.is_causal, mask=call.mask, return_residual=True)
    attention = lambda arrays: jax.nn.dot_product_attention(**arrays, **options)
    # Not jitted: there jax.nn has no float16 on the CPU.
    arrays = {name: getattr(call, name) for name in ("query", "key", "value", "bias")}
    (out, lse), pull_back = jax.vjp(attention, arrays)
    return Results(out, lse, *pull_back((call.d_out, jnp.zeros_like(lse))))


def test_truth_is_jax_nn():
    call = comparable(AS_JAX_NN)
    oracle.assert_right(by_jax_nn(call), call)


@cover(0)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_yardstick_is_as_exact_as_jax_nn(dtype: str):
    """Neither stricter than plain attention as JAX does it nor laxer: within a factor of two, over all of an array."""
    call = comparable(AS_JAX_NN._replace(dtype=dtype, query_length=128, key_length=131, dims=(64, 64)))
    truth = oracle.exact(call)
    mean_error = lambda got, truth: float(np.sqrt(np.mean((np.asarray(got).astype(np.float64) - truth) ** 2)))
    own, peer = (jax.tree.map(mean_error, got, truth) for got in (oracle.plain(call), by_jax_nn(call)))
    ratios = jax.tree.map(lambda own, peer: own / peer, own, peer)
    assert all(0.5 < ratio < 2 for ratio in jax.tree.leaves((ratios.out, ratios.gradients))), ratios


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_gradients_are_differences(case: Case):
    """Along a random direction in each argument, in float64."""
    call = cases.build(case)
    numbers = np.random.default_rng(0)
    step = 1e-6

    def weighted(call: Call) -> float:
        out, lse, _ = PlainAttention(call, Precision(np.dtype(np.float64))).results()
        return float(np.sum(out * call.d_out) + np.sum(np.where(np.isfinite(lse), lse, 0) * call.d_lse))

    for name, gradient in oracle.exact(call).gradients.items():
        value = jax.tree.map(lambda array: array.astype(np.float64), getattr(call, name))
        direction = jax.tree.map(lambda array: numbers.standard_normal(array.shape), value)
        move = lambda size, value=value, direction=direction: jax.tree.map(lambda v, d: v + size * d, value, direction)
        ahead, behind = (weighted(dataclasses.replace(call, **{name: move(size)})) for size in (step, -step))
        expected = sum(map(np.vdot, jax.tree.leaves(gradient), jax.tree.leaves(direction)))
        # The difference is off by step**2 times a third derivative, and by the rounding of results of size up to 100.
        np.testing.assert_allclose((ahead - behind) / (2 * step), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_tangents_are_the_gradients_transpose(case: Case):
    """Along tangents of all arguments, and of each alone."""
    call = cases.build(case)
    plain = PlainAttention(call, Precision(np.dtype(np.float64)))
    gradients, every = plain.results().gradients, oracle.draw_tangents(call)
    assert gradients.keys() == every.keys()
    for along in (every, *({name: tangent} for name, tangent in every.items())):
        t_out, t_lse = plain.tangents(along)
        # A row that sees nothing has cotangents, and no tangents.
        assert np.all(t_out[np.isinf(oracle.exact(call).lse)] == 0)
        forwards = np.vdot(t_out, call.d_out) + np.vdot(t_lse, call.d_lse)
        dots = jax.tree.map(np.vdot, {name: gradients[name] for name in along}, along)
        np.testing.assert_allclose(forwards, sum(jax.tree.leaves(dots)), rtol=1e-9, atol=1e-9)


def test_a_signaling_nan_is_an_infinite_error():
    """Memory that was never written may hold one, and its cast warns."""
    signaling = np.array([0x7F800001], np.uint32).view(np.float32)
    assert oracle.error(signaling, np.zeros(1)) == math.inf
