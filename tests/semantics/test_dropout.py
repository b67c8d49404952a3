"""Dropout is fair, independent, and the same mask on every backend, forward and backward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropout_masks import dropout_mask
from operands import PLAIN
from refusals import skip_refused
from short_run import cover

from jflash._semantics import dropout

KEY = jax.random.key(11)
SHAPE = (3, 8, 64, 128)
"""[B, N, T, S]: 200,000 draws."""
SIGMAS = 5
"""The farthest that a fair draw may be from its mean: further once in two million tests, and with one key always the
same."""


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate(rate: float):
    """Over all, and in every row and column no more scattered than fair coins are."""
    kept = dropout_mask(SHAPE, rate, KEY)
    assert abs(kept.mean() - (1 - rate)) < SIGMAS * np.sqrt(rate * (1 - rate) / kept.size)
    for axes in ((3,), (2,), (2, 3), (0, 1, 2), (0, 1, 3)):
        counts = kept.sum(axis=axes).ravel()
        draws = kept.size // counts.size
        chi_square = np.sum((counts - draws * (1 - rate)) ** 2) / (draws * rate * (1 - rate))
        # Its variance is that of squares of binomials: 2 for each count, and more where few are dropped.
        spread = np.sqrt(counts.size * (2 + 1 / (draws * rate * (1 - rate))))
        assert abs(chi_square - counts.size) < SIGMAS * spread


def test_neighbours_are_independent():
    """Along each axis, at a distance of 1 and of powers of two; and from one key to the next."""
    signs = np.where(dropout_mask(SHAPE, 0.5, KEY), 1.0, -1.0)
    others = {"another key": np.where(dropout_mask(SHAPE, 0.5, jax.random.fold_in(KEY, 1)), 1.0, -1.0)}
    for axis, size in enumerate(SHAPE):
        for distance in [d for d in (1, 2, 4, 8, 16, 32, 64) if d < size]:
            others[f"axis {axis}, {distance} on"] = np.roll(signs, distance, axis)
    # Each pair once, and no probability with itself.
    exchanged = np.triu(np.swapaxes(signs[..., :64], 2, 3), 1)
    others["queries for keys"] = np.pad(exchanged, [(0, 0)] * 3 + [(0, 64)])
    # Of the four that have one counter, the first with each of the others.
    fours = signs.reshape(*SHAPE[:2], -1, 2, 8, SHAPE[3] // 16, 2, 8)
    alone = np.zeros_like(fours)
    for name, query, key in (("halves of a word", 0, 1), ("words of a counter", 1, 0), ("across", 1, 1)):
        shifted = alone.copy()
        shifted[:, :, :, 0, :, :, 0] = fours[:, :, :, query, :, :, key]
        others[name] = shifted.reshape(SHAPE)
    for name, other in others.items():
        assert abs(np.sum(signs * other)) < SIGMAS * np.sqrt(np.sum(np.abs(other))), name


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_no_shift_repeats_it(rate: float):
    """Correlations with itself after every shift of queries and keys, and of every row or column with every other."""
    size = 1024
    kept = dropout_mask((1, size, size), rate, KEY)[0].astype(float)
    scores = (kept - (1 - rate)) / np.sqrt(rate * (1 - rate))
    spectrum = np.abs(np.fft.rfft2(scores)) ** 2
    shifted = np.fft.irfft2(spectrum, s=scores.shape).ravel()[1:] / size
    pairs = [(other @ other.T)[np.triu_indices(size, 1)] / np.sqrt(size) for other in (scores, scores.T)]
    for correlations in (shifted, *pairs):
        # Of a million independent ones, one is above 7 in one of a million draws.
        assert np.abs(correlations).max() < 7
        assert abs(correlations.var() - 1) < SIGMAS * np.sqrt(4 / correlations.size)
    # The largest of half a million exponentials.
    assert spectrum.max() / scores.size < np.log(scores.size) + 14


def test_rates_that_exist():
    """The nearest multiple of 2**-15, of which none is 0, and none 1."""
    rates = {0.0: 0, 1e-9: 1, 0.1: 3277, 0.5: 16384, 1 - 1e-9: 32767}
    assert {rate: dropout.possible_rate(rate) * 2**15 for rate in rates} == rates


def test_broadcast_dropout(backend: str):
    """One mask for all batch entries and heads: that of the first entry's first head."""
    skip_refused(backend, **PLAIN, dropout_rate=0.3, dropout_key=KEY, broadcast_dropout=True)
    shape = (2, 3, 4, 40, 50)
    shared = dropout_mask(shape, 0.3, KEY, backend, broadcast_dropout=True)
    np.testing.assert_array_equal(shared, np.broadcast_to(dropout_mask(shape, 0.3, KEY)[0, 0, 0], shape))


@cover(1)
@pytest.mark.parametrize("shape", [(2, 3, 4, 37, 53), (1, 2, 600, 1100)], ids=str)
def test_every_backend_draws_the_same(backend: str, shape: tuple[int, ...]):
    skip_refused(backend, **PLAIN, dropout_rate=0.3, dropout_key=KEY)
    np.testing.assert_array_equal(dropout_mask(shape, 0.3, KEY, backend), dropout_mask(shape, 0.3, KEY))


def test_mask_does_not_depend_on_the_shape(backend: str):
    skip_refused(backend, **PLAIN, dropout_rate=0.3, dropout_key=KEY)
    whole, part = dropout_mask((3, 4, 64, 80), 0.3, KEY, backend), dropout_mask((2, 3, 13, 21), 0.3, KEY, backend)
    np.testing.assert_array_equal(part, whole[:2, :3, :13, :21])


def test_any_kind_of_key():
    typed = dropout_mask((1, 2, 16, 16), 0.3, KEY)
    np.testing.assert_array_equal(dropout_mask((1, 2, 16, 16), 0.3, jax.random.key_data(KEY)), typed)
    philox = dropout_mask((1, 2, 16, 16), 0.3, jax.random.key(0, impl="rbg"))
    assert 0.5 < philox.mean() < 0.9


def test_backward_drops_what_the_forward_dropped(attention: Callable[..., Any]):
    """The value's gradient is, with equal probabilities, the mask, transposed, times the cotangent."""
    batch, heads, queries, keys, rate = 2, 3, 40, 24, 0.25
    query, key = jnp.zeros((batch, queries, heads, 8)), jnp.zeros((batch, keys, heads, 8))
    value = jax.random.normal(KEY, (batch, keys, heads, 8))
    drop = lambda value: attention(query, key, value, dropout_rate=rate, dropout_key=KEY)
    out, pull_back = jax.vjp(drop, value)
    probabilities = dropout_mask((batch, heads, queries, keys), rate, KEY) / (keys * (1 - rate))
    d_out = jax.random.normal(jax.random.fold_in(KEY, 2), out.shape)
    sums = 1e-6 * keys  # Each is of up to 40 terms below 1, in float32.
    np.testing.assert_allclose(out, np.einsum("bnts,bsnd->btnd", probabilities, value), atol=sums)
    np.testing.assert_allclose(pull_back(d_out)[0], np.einsum("bnts,btnd->bsnd", probabilities, d_out), atol=sums)


def test_rate_zero_is_no_dropout(attention: Callable[..., Any]):
    query = jax.random.normal(KEY, (1, 13, 2, 8))
    drop = attention(query, query, query, dropout_rate=0.0, dropout_key=KEY)
    np.testing.assert_array_equal(drop, attention(query, query, query))
