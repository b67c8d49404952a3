"""Masks that are functions: exact beside all other options, visited where they show something, and mapped once."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import mask_functions
import numpy as np
import oracle
import pytest
from cases import Case
from short_run import cover

import jflash
from jflash._semantics import visibility
from jflash._semantics.mask_mod import trace_mask_mod

LONG = Case(query_length=523, key_length=640, heads=(2, 1), dims=(16, 8))
"""Several tiles each way, of which the last begin early."""
CASES = [
    ("strided", LONG),
    ("documents in no order", LONG._replace(causal=True, offset="end", dtype="bfloat16")),
    ("block table", LONG._replace(heads=(4, 2), query_length=640, dims=(8, 8))),
    ("window of each head", LONG._replace(heads=(4, 4), window=(200, 300), offset="each")),
    ("prefix of each entry", LONG._replace(lengths="both", segments="sorted", sinks=True)),
    ("images in text", LONG._replace(mask="full", segments="unsorted", dtype="float16")),
    ("BigBird", LONG._replace(score_mod="arrays", bias="keys", dropout=True)),
    ("tree", LONG._replace(query_length=600, key_length=600, batch=(), heads=(1, 1), scale="traced")),
    ("frames", LONG._replace(query_length=150, key_length=1100, mask="keys", causal=True, offset="end")),
    ("window of frames", LONG._replace(query_length=13, key_length=17, batch=(2, 3))),
]
IN_SHORT_RUN = ("prefix of each entry",)


def emulated(case: Case) -> Case:
    """The case in two or three tiles each way, which an emulator of a GPU can do in reasonable time."""
    query_length, key_length = min(case.query_length, 150), min(case.key_length, 290)
    return cases.served(case, "metal")._replace(query_length=query_length, key_length=key_length)


def call_of(name: str, case: Case) -> oracle.Call:
    length = max(case.query_length, case.key_length)
    function = mask_functions.families(length, heads=case.heads[0])[name]
    return dataclasses.replace(cases.build(case), mask_mod=function)


# Metal's lists have tests of their own (test_metal_lists).
@cover(every=2, rest=2)
@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, marks=() if name in IN_SHORT_RUN else cover(0), id=name) for name, case in CASES],
)
def test_exact(attention: Callable[..., Any], backend: str, name: str, case: Case) -> None:
    call = call_of(name, emulated(case) if backend == "metal" else case)
    oracle.assert_right(oracle.run(attention, call), call)


@cover(0)
@pytest.mark.parametrize("name", ["block table", "causal documents"])
def test_tangents(name: str) -> None:
    call = call_of(name, LONG._replace(query_length=640))
    along = oracle.draw_tangents(call)
    attention = functools.partial(jflash.attention, implementation="xla")
    oracle.assert_tangents_right(oracle.run_tangents(attention, call, along), call, along)


ARRAYS = [jnp.asarray(np.random.default_rng(0).normal(size=(1, 1024, 2, 16)), jnp.float32)] * 3


def poisoned(function: Any, **options: Any) -> np.ndarray:
    """Return which queries share a tile with a key of each 128, `[T, S / 128]`.

    The key's value is NaN, and a weight of 0 times that is NaN too.
    """
    length, places = ARRAYS[0].shape[1], np.arange(0, 1024, 128)
    values = np.ones((1, length, 2, len(places)), np.float32)
    values[0, places + 5, :, np.arange(len(places))] = np.nan
    out = jflash.attention(*ARRAYS[:2], values, mask_mod=function, implementation="xla", **options)
    return np.isnan(np.asarray(out)).any((0, 2))


@cover(every=3)
@pytest.mark.parametrize(
    ("name", "options"), [("images in text", dict(is_causal=True)), ("strided", {}), ("documents in no order", {})]
)
def test_only_tiles_that_show_something_are_visited(name: str, options: Any) -> None:
    """Blocks and tiles are of 256 rows and keys here."""
    function = mask_functions.families(1024)[name]
    seen = mask_functions.dense(function, 1, 1, 1024, 1024)[0, 0]
    if options:
        seen = seen & np.tri(1024, dtype=bool)
    by_tile = seen.reshape(4, 256, 4, 256).any((1, 3))
    found = poisoned(function, **options)
    np.testing.assert_array_equal(found, np.repeat(np.repeat(by_tile, 256, 0), 2, 1))


def test_whole_tiles_carry_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has two loops, and the one over whole tiles is traced without a look at who sees whom."""
    looks: list[Any] = []
    visible = visibility.visible
    monkeypatch.setattr(visibility, "visible", lambda spec, tile: looks.append(spec) or visible(spec, tile))
    mask = lambda b, h, q, k: (q // 128) % 3 == (k // 128) % 3
    # With a bias no branch assumes that logits are small, so there is one pair of loops.
    options = dict(bias=np.zeros((1, 1), np.float32), mask_mod=mask, implementation="xla")
    traced = jax.make_jaxpr(lambda query: jflash.attention(query, *ARRAYS[1:], **options))(ARRAYS[0])
    assert str(traced).count("dot_general") == 4
    assert len(looks) == 1


@pytest.fixture(scope="module")
def documents() -> jax.Array:
    return jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 5, 1024)))


@cover(0)
def test_one_map_for_all_layers(documents: jax.Array) -> None:
    """XLA keeps one of equal computations, forward and backward, and nothing of the map is made at compile time."""

    def loss(query: Any) -> Any:
        mask = lambda b, h, q, k: documents[q] == documents[k]
        for _ in range(3):
            query = jflash.attention(query, query, query, mask_mod=mask, implementation="xla")
        return query.sum()

    compiled = jax.jit(jax.grad(loss)).lower(ARRAYS[0]).compile().as_text()
    passes = re.findall(r"while\([^\n]*of_mask_mod[^\n]*", compiled)
    assert len(passes) == 1


def test_tile_map(documents: jax.Array) -> None:
    """An object to pass on: through `jit` as an argument, over a loop, and with any batch where that has no part."""
    mask = lambda b, h, q, k: (documents[q] == documents[k]) & (k <= q)
    tiles = jflash.tile_map(mask, query_length=1024, key_length=1024)
    truth = mask_functions.dense(mask, 1, 1, 1024, 1024).reshape(1, 1, 8, 128, 8, 128)
    np.testing.assert_array_equal(tiles.tiles, truth.any((3, 5)).astype(int) + truth.all((3, 5)))
    assert float(tiles.visited) == truth.any((3, 5)).mean()

    @jax.jit
    def layers(query: Any, tiles: jflash.TileMap) -> Any:
        step = lambda query, _: (jflash.attention(query, query, query, mask_mod=tiles, implementation="xla"), None)
        return jax.lax.scan(step, query, None, length=2)[0]

    query = jnp.concatenate([ARRAYS[0], -ARRAYS[0]])
    want = query
    for _ in range(2):
        want = jflash.attention(want, want, want, mask_mod=mask, implementation="xla")
    np.testing.assert_allclose(layers(query, tiles), want, rtol=0, atol=1e-6)
    assert not re.findall(r"op_name=\"[^\"]*of_mask_mod", layers.lower(query, tiles).compile().as_text())


def test_equal_programs_are_one() -> None:
    """Functions made anew are not compiled anew; what an inner `jit` closes over tells programs apart."""
    window = lambda size: lambda b, h, q, k: q - k < size
    inner = lambda table: lambda b, h, q, k: jax.jit(lambda q: table[q])(q) < k
    of = lambda function: trace_mask_mod(function).mask_mod
    table, other = jnp.arange(3), jnp.arange(3) + 1
    assert of(window(3)) == of(window(3)) != of(window(4))
    assert of(inner(table)) == of(inner(table)) != of(inner(other))
    assert len({of(window(3)), of(window(3)), of(window(4))}) == 2


def test_what_intervals_do_not_see_through_is_said() -> None:
    bits = jnp.arange(64)
    ask = lambda f: jflash.explain(*[jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)] * 3, mask_mod=f)
    assert "intervals do not see through shift_right_arithmetic" in ask(lambda b, h, q, k: (bits[q] >> k) & 1 == 1)
    assert "intervals" not in ask(lambda b, h, q, k: bits[q] >= k)


def test_closed_over_arrays_have_no_gradient() -> None:
    def loss(threshold: Any) -> Any:
        mask = lambda b, h, q, k: (q - k).astype(jnp.float32) < threshold
        return jflash.attention(*ARRAYS, mask_mod=mask, implementation="xla").sum()

    assert jax.grad(loss)(300.0) == 0
