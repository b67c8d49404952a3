"""The mask in a `score_mod` that chooses -inf by position: sound, and tiles that it hides are not visited."""

import dataclasses
import functools

import cases
import hopper_kernels
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_families import HOPPER
from short_run import cover

import jflash
from jflash._semantics import score_mod_as_mask
from jflash._semantics.score_mod import trace_score_mod

IDS = np.arange(64) * 7 % 5
TABLE = np.where(IDS == 2, -np.inf, IDS).astype(np.float32)
HIDING = {
    "causal": lambda s, b, h, q, k: jnp.where(q >= k, s, -jnp.inf),
    "exchanged, after a cap": lambda s, b, h, q, k: jnp.where(q < k, -jnp.inf, 5 * jnp.tanh(s / 5)),
    "documents and a window": lambda s, b, h, q, k: jnp.where(
        jnp.asarray(IDS)[q] == jnp.asarray(IDS)[k], jnp.where(abs(q - k) < 9 + h, s - 1, -jnp.inf), -jnp.inf
    ),
    "a table of numbers": lambda s, b, h, q, k: jnp.where((q + k) % 3 == b, s, jnp.asarray(TABLE)[k]),
    "nested programs": lambda s, b, h, q, k: jax.jit(lambda s: jnp.where(q == k, s, -jnp.inf).astype(s.dtype))(s),
    "whatever is chosen by the logit": lambda s, b, h, q, k: jnp.where(s > 0, jnp.where(k < 9, s, -jnp.inf), -jnp.inf),
    "no use of the logit": lambda s, b, h, q, k: jnp.where(q > k, 1.0, -jnp.inf),
}
OTHERS = {
    "large numbers": lambda s, b, h, q, k: jnp.where(q >= k, s, -1e9),
    "added": lambda s, b, h, q, k: s + jnp.where(q >= k, 0, -jnp.inf),
    "chosen by the logit": lambda s, b, h, q, k: jnp.where(s > 0, s, -jnp.inf),
    "times": lambda s, b, h, q, k: s * jnp.where(q >= k, 1, 2),
    "computed afterwards": lambda s, b, h, q, k: jnp.exp(jnp.where(q >= k, s, -jnp.inf)),
}


@pytest.mark.parametrize("name", HIDING)
def test_found(name: str):
    """What it says is hidden has -inf, whatever the logit, and of these functions it says that of all such pairs."""
    traced, arrays = trace_score_mod(HIDING[name], np.dtype(np.float32))
    assert score_mod_as_mask.hides(traced)
    mask = score_mod_as_mask.mask_of(traced, arrays)
    of_pairs = lambda function: functools.reduce(
        lambda function, axis: jax.vmap(function, [0 if a == 3 - axis else None for a in range(4)]), range(4), function
    )(*(jnp.arange(n, dtype=jnp.int32) for n in (3, 2, 64, 64)))
    seen = of_pairs(lambda *indices: mask.mask_mod.scalar(*indices, arrays=mask.arrays))
    logits = jnp.asarray([1.5, -3, 0, np.nan, np.inf, -np.inf])
    modified = of_pairs(lambda *indices: jax.vmap(lambda s: HIDING[name](s, *indices))(logits))
    np.testing.assert_array_equal(~seen, jnp.all(modified == -jnp.inf, axis=-1))
    assert not seen.all()


@pytest.mark.parametrize("name", OTHERS)
def test_none_is_found(name: str):
    """NaN may come of -inf that is added, and what is chosen by the logit is of no position."""
    traced, _ = trace_score_mod(OTHERS[name], np.dtype(np.float32))
    assert not score_mod_as_mask.hides(traced)


LENGTH = 768


def blocks(numbers):
    """Causal, where the second 256 keys are seen by none, and the fifth 128 by every other head; of each 384 queries
    the second 128 see none."""
    seen = lambda h, q, k: (k <= q) & (k // 256 != 1) & ((k // 128 != 4) | (h % 2 == 0)) & (q // 128 % 3 != 1)
    return lambda s, b, h, q, k: jnp.where(seen(h, q, k), s + numbers[k // 128], -jnp.inf)


def call_of(case: Case) -> cases.Call:
    numbers = np.linspace(-1, 1, LENGTH // 128).astype(case.dtype)
    return dataclasses.replace(cases.build(case), score_mod=blocks, score_mod_arrays=(numbers,))


def with_nan(call: cases.Call) -> cases.Call:
    """Values that no query sees are NaN: where their tile is visited, 0 * NaN is added."""
    value = call.value.copy()
    value[..., 256:512, :, :] = np.nan
    return dataclasses.replace(call, value=value)


def test_hidden_tiles_are_not_visited():
    """By `xla`, forward and gradients, of which those of hidden keys are 0."""
    case = Case("float32", LENGTH, LENGTH, heads=(2, 1), dims=(16, 16))
    call = call_of(case)
    run = functools.partial(oracle.run, functools.partial(jflash.attention, implementation="xla"))
    oracle.assert_right(run(with_nan(call)), call)


@cover(0)
def test_hidden_tiles_are_not_visited_on_hopper():
    call = call_of(Case("bfloat16", 384, 384, heads=(1, 1), dims=(8, 8)))
    call = dataclasses.replace(call, d_out=None)
    oracle.assert_right(hopper_kernels.run(with_nan(call), family=HOPPER), call)


def test_explain_says_it():
    arrays = [jnp.zeros((1, 64, 1, 8))] * 3
    assert "chooses -inf by position" in jflash.explain(*arrays, score_mod=HIDING["causal"])
    assert "chooses -inf" not in jflash.explain(*arrays, score_mod=OTHERS["added"])
