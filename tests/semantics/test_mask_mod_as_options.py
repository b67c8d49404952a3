"""A `mask_mod` that is causality or a window is computed as one, and no other function is."""

from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import mask_functions
import numpy as np
import pytest
from jax import lax

import jflash
from jflash import _canonical
from jflash._semantics import mask_mod_as_options
from jflash._semantics.mask_mod import trace_mask_mod
from jflash._semantics.spec import Spec

LENGTH = 300
ARRAYS = [jax.ShapeDtypeStruct((2, LENGTH, 2, 8), jnp.float32)] * 3
Function = Callable[..., Any]


def spec_of(mask_mod: Function | jflash.TileMap | None = None, **options: Any) -> Spec:
    """The spec of a call without the names of its arrays."""
    found: list[Spec] = []

    def attend(query: Any, key: Any, value: Any) -> None:
        traced = None if mask_mod is None else trace_mask_mod(mask_mod)
        found.append(_canonical.canonicalize(query, key, value, mask_mod=traced, **options)[0])

    jax.eval_shape(attend, *ARRAYS)
    return found[0]


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lambda b, h, q, k: k <= q, dict(is_causal=True)),
        (lambda b, h, q, k: q - k > -1, dict(is_causal=True)),
        (lambda b, h, q, k: (q - k >= 0) & (q - k < 256), dict(is_causal=True, local_window_size=(255, 0))),
        (lambda b, h, q, k: jnp.logical_and(k < q + 1, 7 + k >= q), dict(is_causal=True, local_window_size=(7, 0))),
        (lambda b, h, q, k: jnp.abs(k - q) <= 7, dict(local_window_size=(7, 7))),
        (jax.jit(lambda b, h, q, k: abs(k - q) < 7), dict(local_window_size=(6, 6))),
        (lambda b, h, q, k: q == k, dict(is_causal=True, local_window_size=(0, 0))),
        (lambda b, h, q, k: (q + 5 > k) & (q - 9 < k), dict(local_window_size=(8, 4))),
    ],
)
def test_options_that_say_the_same(function: Function, options: dict[str, Any]) -> None:
    assert spec_of(function) == spec_of(**options)


def test_beside_options() -> None:
    """What both allow is seen; a bound on one side leaves the other open."""
    before = lambda b, h, q, k: k <= q + 3
    assert spec_of(before).bounds == (None, 3)
    assert spec_of(before, is_causal=True) == spec_of(is_causal=True)
    assert spec_of(before, local_window_size=(5, 9)) == spec_of(local_window_size=(5, 3))
    assert spec_of(before, local_window_size=(5, 2)) == spec_of(local_window_size=(5, 2))
    assert spec_of(lambda b, h, q, k: q - k <= 4, is_causal=True) == spec_of(is_causal=True, local_window_size=(4, 0))


IDS = np.zeros((2, LENGTH), np.int32)
OTHERS: dict[str, Function] = {
    "an alternative": lambda b, h, q, k: (k <= q) | (k < 5),
    "the opposite": lambda b, h, q, k: ~(k > q),
    "no own key": lambda b, h, q, k: k + 1 <= q,
    "a multiple": lambda b, h, q, k: 2 * k <= q,
    "past a window": lambda b, h, q, k: jnp.abs(q - k) > 3,
    "by head": lambda b, h, q, k: k <= q + h,
    "segments": lambda b, h, q, k: (jnp.asarray(IDS)[b, q] == jnp.asarray(IDS)[b, k]) & (k <= q),
    "a number that is an array": lambda b, h, q, k: q - k < jnp.asarray(IDS)[0, 0] + 5,
    "numbers that wrap": lambda b, h, q, k: k <= q + (2**31 - 1),
    "numbers that wrap in between": lambda b, h, q, k: k <= q + 2**30 + 2**30 - 2**30 - 2**30 + 5,
    "unsigned numbers": lambda b, h, q, k: q.astype(jnp.uint32) - k.astype(jnp.uint32) < 9,
    "bytes": lambda b, h, q, k: k.astype(jnp.int8) <= q.astype(jnp.int8),
    "floats": lambda b, h, q, k: k.astype(jnp.bfloat16) <= q.astype(jnp.bfloat16),
    "a float between integers": lambda b, h, q, k: q - k < 2.5,
    "bits": lambda b, h, q, k: ((q - k) & 1) == 0,
    "a remainder": lambda b, h, q, k: lax.rem(q - k, jnp.int32(3)) <= 0,
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS.keys())
def test_what_options_do_not_say(function: Function) -> None:
    assert spec_of(function).mask_mod is not None


def test_positions_are_not_indices() -> None:
    """`query_offset` moves positions, and not the indices that the function is given."""
    assert spec_of(lambda b, h, q, k: k <= q, query_offset=3).mask_mod is not None
    assert spec_of(lambda b, h, q, k: k <= q, query_offset=0).mask_mod is None


@hypothesis.given(mask_functions.composed(LENGTH))
@hypothesis.settings(max_examples=60)
def test_bounds_are_true(function: Function) -> None:
    """Whatever is said of a function is true of all its pairs."""
    traced = trace_mask_mod(function)
    bounds = mask_mod_as_options.bounds(traced.mask_mod)
    hypothesis.event("bounded" if bounds else "not")
    if bounds is None:
        return
    seen = mask_functions.dense(function, 2, 2, LENGTH, LENGTH)
    (left, right), distance = bounds, np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    told = (distance <= (LENGTH if left is None else left)) & (-distance <= (LENGTH if right is None else right))
    np.testing.assert_array_equal(seen, np.broadcast_to(told, seen.shape))


def test_a_map_is_not_needed() -> None:
    """A function with its map made before is understood as well, and the sizes of its map are still checked."""
    tiles = jflash.tile_map(lambda b, h, q, k: k <= q, query_length=256, key_length=256)
    query = jax.random.normal(jax.random.key(0), (1, 256, 2, 8))
    got, want = (jflash.attention(query, query, query, **o) for o in (dict(mask_mod=tiles), dict(is_causal=True)))
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="256"):
        jflash.attention(query[:, :128], query, query, mask_mod=tiles)
