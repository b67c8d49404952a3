"""The online softmax and its exponential."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_run import cover

from jflash._semantics import online_softmax


def test_exp_is_exact_to_a_few_roundings():
    x = np.concatenate([np.linspace(-87, 1, 200_001), -np.logspace(-8, 1.9, 50_001)]).astype(np.float32)
    got, truth = np.asarray(online_softmax.exp(jnp.asarray(x)), np.float64), np.exp(x.astype(np.float64))
    # The exponent x * log2(e) is off by the rounding of log2(e) and of the product, and the result by as much.
    constant = abs(float(np.float32(np.log2(np.e))) / np.log2(np.e) - 1)
    allowed = truth * (2e-7 + np.abs(x.astype(np.float64)) * (2.0**-24 + constant))
    assert (np.abs(got - truth) <= allowed).all()


def test_exp_at_the_ends():
    got = online_softmax.exp(jnp.array([-jnp.inf, -1e30, -89.0, 0.0, jnp.nan], jnp.float32))
    np.testing.assert_array_equal(got, np.array([0, 0, 0, 1, np.nan], np.float32))


def test_exp_has_its_derivatives():
    x = jnp.linspace(-20.0, 0.5, 101)
    for order in (jax.grad, lambda f: jax.grad(jax.grad(f))):
        np.testing.assert_allclose(jax.vmap(order(online_softmax.exp))(x), jnp.exp(x), rtol=2e-6)


@cover(1)
@pytest.mark.parametrize("sinks", [None, 0.7])
@pytest.mark.parametrize("pieces", [(0, 5, 12), (0, 1, 2, 12), (0, 12)])
@pytest.mark.parametrize("bounded", [False, True])
def test_any_split_of_the_keys_gives_the_same(pieces, sinks, bounded):
    logits = jax.random.normal(jax.random.key(0), (3, 12)).at[1].set(-jnp.inf).at[2, 4].set(-jnp.inf)
    values = jax.random.normal(jax.random.key(1), (12, 2))
    step = online_softmax.step_bounded if bounded else online_softmax.step
    state = online_softmax.start(jnp.full(3, 6.0 if bounded else -jnp.inf), 2)
    for start, stop in itertools.pairwise(pieces):
        state = step(state, logits[:, start:stop], lambda p, v=values[start:stop]: p @ v)
    out, lse = online_softmax.finish(state, None if sinks is None else jnp.float32(sinks))
    exponentials = np.exp(np.asarray(logits, np.float64))
    total = exponentials.sum(axis=1) + (0 if sinks is None else np.exp(sinks))
    weighted = exponentials @ np.asarray(values, np.float64)
    seen = np.array([True, False, True])
    np.testing.assert_allclose(out, np.where(seen[:, None], weighted / np.maximum(total, 1e-9)[:, None], 0), rtol=2e-6)
    np.testing.assert_allclose(np.asarray(lse)[seen], np.log(total[seen]), rtol=2e-6, atol=2e-6)
    assert lse[1] == -jnp.inf
