"""A `score_mod` that is a soft cap is computed as one, and no other function is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflash
from jflash import _canonical
from jflash._semantics.score_mod import trace_score_mod

LEARNED = jnp.float32(30.0)
CAPS: dict[str, tuple[Callable[..., Any], float]] = {
    "quotient": (lambda s, *_: 50.0 * jnp.tanh(s / 50.0), 50.0),
    "products": (lambda s, *_: jnp.tanh(0.02 * s) * 50.0, 50.0),
    "in jit": (jax.jit(lambda s, *_: jnp.multiply(30, jnp.tanh(jnp.divide(s, 30)))), 30.0),
    "in steps": (lambda s, *_: 2 * (jnp.tanh(s / 4 / 5) * 10), 20.0),
    "of one": (lambda s, *_: jnp.tanh(s), 1.0),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "another slope": lambda s, *_: 25.0 * jnp.tanh(s / 50.0),
    "negative": lambda s, *_: -50.0 * jnp.tanh(-s / 50.0),
    "no cap": lambda s, *_: 2.0 * s,
    "twice": lambda s, *_: jnp.tanh(jnp.tanh(s)),
    "by position": lambda s, b, h, i, j: 50.0 * jnp.tanh(s / 50.0) - jnp.abs(i - j),
    "by head": lambda s, b, h, i, j: (1.0 + h) * jnp.tanh(s / (1.0 + h)),
    "of an index": lambda s, b, h, i, j: 50.0 * jnp.tanh(i / 50.0),
    "learned": lambda s, *_: LEARNED * jnp.tanh(s / LEARNED),
    "infinite": lambda s, *_: jnp.inf * jnp.tanh(s / jnp.inf),
    "by zero": lambda s, *_: 50.0 * jnp.tanh(s / 0.0),
    "a constant": lambda s, *_: jnp.float32(3.0),
}


def spec_of(score_mod: Callable[..., Any], **options: Any) -> Any:
    array = jnp.zeros((1, 4, 2, 8))
    traced = trace_score_mod(score_mod, np.dtype(np.float32))
    return _canonical.canonicalize(array, array, array, score_mod=traced, **options)[0]


@pytest.mark.parametrize("name", CAPS)
def test_caps(name: str):
    score_mod, cap = CAPS[name]
    spec = spec_of(score_mod)
    assert spec.score_mod is None
    np.testing.assert_allclose(spec.logits_soft_cap, cap, rtol=1e-6)
    assert spec.operands.isdisjoint({"batch_index", "head_index"})


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str):
    spec = spec_of(OTHERS[name])
    assert spec.score_mod is not None
    assert spec.logits_soft_cap is None


@pytest.mark.parametrize(
    "options",
    [dict(bias=jnp.zeros((4, 4))), dict(alibi_slopes=jnp.ones(2)), dict(logits_soft_cap=3.0)],
    ids=lambda options: next(iter(options)),
)
def test_what_stands_between_products_and_the_cap(options: dict[str, Any]):
    """A function's cap comes after bias, slopes and the argument's cap."""
    assert spec_of(CAPS["quotient"][0], **options).score_mod is not None


def test_results_and_gradients():
    """Results and gradients are those of `logits_soft_cap`, where logits are large enough to differ from others."""
    arrays = 4 * jax.random.normal(jax.random.key(0), (3, 2, 20, 2, 8))
    loss = lambda arrays, **options: (jflash.attention(*arrays, **options) ** 2).sum()
    found, of_found = jax.value_and_grad(loss)(arrays, score_mod=lambda s, *_: 2.0 * jnp.tanh(s / 2.0))
    wanted, of_wanted = jax.value_and_grad(loss)(arrays, logits_soft_cap=2.0)
    assert found == wanted
    np.testing.assert_array_equal(of_found, of_wanted)
