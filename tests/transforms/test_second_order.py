"""Derivatives of derivatives with every option: the tiled backend against the definition.

In float64, so that what is wrong stands out from what is rounded: 1e-16 for each of a few thousand operations, with
room for cancellation. Each call is made as one tile, in which a row has all its keys, and as many.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from plain_attention import Call
from short_run import cover

import jflash
from jflash import _dispatch
from jflash._backends import xla
from jflash._backends.xla import plans
from jflash._backends.xla.plans import Tiles
from jflash._semantics.spec import Spec

Arrays = dict[str, Any]
ROUNDED = 1e-11

SMALL = Case(dtype="float64", query_length=7, key_length=9, heads=(4, 2), dims=(5, 3))
FEATURES = {
    "plain": SMALL,
    "bias": SMALL._replace(bias="heads", scale="traced", causal=True, offset="each"),
    "score_mod": SMALL._replace(score_mod="arrays", bias="full", mask="full"),
    "window": SMALL._replace(window=(3, 1), alibi=True, soft_cap=1.5),
    "lengths": SMALL._replace(lengths="both", segments="sorted", sinks=True, bias="keys"),
    "dropout": SMALL._replace(dropout=True, bias="queries", sinks=True),
}
SHAPES = {
    "one tile": None,
    "tiles": Tiles(1, 1, 4, 5),
    "one tile of a GPU": Tiles(2, 2, 7, 9, by_passes=True),
    "tiles of a GPU": Tiles(1, 2, 4, 9, by_passes=True),
}
"""The shapes of tiles: not even, and first and last blocks of rows are not alike. Those of a GPU have all keys."""


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=SHAPES)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`xla` with tiles of one shape, under a name of its own: by that compiled calls are found again."""
    if (shape := SHAPES[request.param]) is not None:
        monkeypatch.setattr(plans, "plan", lambda spec, work: within(shape, spec))
    name = f"xla in {request.param} of {shape}"
    monkeypatch.setattr(_dispatch, "BACKENDS", {**_dispatch.BACKENDS, name: xla})
    return name


def within(shape: Tiles, spec: Spec) -> Tiles:
    """The tiles, none larger than the call."""
    return dataclasses.replace(
        shape,
        batch=min(shape.batch, spec.batch),
        key_heads=min(shape.key_heads, spec.key_heads),
        queries=min(shape.queries, spec.query_length),
        keys=min(shape.keys, spec.key_length),
    )


def objective(implementation: str, call: Call) -> tuple[Callable[[Arrays], jax.Array], Arrays]:
    """A scalar made of both results, not linear in them, as a function of all arrays that have a gradient."""
    smooth, discrete, static = oracle.split(call)
    attend = oracle.function_of_arrays(functools.partial(jflash.attention, implementation=implementation), static)

    def scalar(smooth: Arrays) -> jax.Array:
        out, lse = attend(smooth, discrete)
        return jnp.vdot(jnp.sin(out), call.d_out) + jnp.vdot(jnp.where(lse == -jnp.inf, 0, lse**2), call.d_lse)

    return scalar, smooth


def direction(arrays: Arrays) -> Arrays:
    numbers = np.random.default_rng(3)
    return jax.tree.map(lambda array: numbers.standard_normal(array.shape), arrays)


def push(function: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
    """The derivative in one direction, in forward mode."""
    return lambda arrays: jax.jvp(function, (arrays,), (direction(arrays),))[1]


def pull(function: Callable[[Arrays], jax.Array]) -> Callable[[Arrays], jax.Array]:
    """The same in reverse mode."""
    return lambda arrays: sum(
        jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(function)(arrays), direction(arrays))), start=jnp.zeros(())
    )


ORDERS: dict[str, Callable[[Callable[[Arrays], jax.Array]], Callable[[Arrays], Any]]] = {
    "jvp": push,
    "jvp of grad": lambda function: push(jax.grad(function)),
    "grad of jvp": lambda function: jax.grad(push(function)),
    "grad of grad": lambda function: jax.grad(pull(function)),
    "jvp of jvp": lambda function: push(push(function)),
}
ROWS = list(itertools.product(FEATURES, ORDERS))
IN_SHORT_RUN = [("score_mod", "grad of jvp"), ("lengths", "jvp of grad"), ("dropout", "jvp")]


def assert_same(got: Any, want: Any) -> None:
    def compare(path: Any, got: Any, want: Any) -> None:
        largest = np.max(np.abs(want), initial=1e-3)
        np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDED * largest, err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(compare, got, want)


def derivative(implementation: str, call: Call, transform: Callable[..., Any]) -> Any:
    function, arrays = objective(implementation, call)
    return jax.jit(transform(function))(arrays)


@functools.cache
def by_definition(feature: str, transform: Callable[..., Any]) -> Any:
    """Return what derivatives in tiles of every shape are held against."""
    return derivative("reference", cases.build(FEATURES[feature]), transform)


@cover(1, rest=6)
@pytest.mark.parametrize(
    ("feature", "order"), [pytest.param(*row, marks=() if row in IN_SHORT_RUN else cover(0)) for row in ROWS]
)
def test_every_option(implementation: str, feature: str, order: str) -> None:
    got = derivative(implementation, cases.build(FEATURES[feature]), ORDERS[order])
    assert_same(got, by_definition(feature, ORDERS[order]))


@functools.cache
def alone(name: str) -> Callable[..., Any]:
    """Derivatives of one operand, of first and second order."""

    def transform(function: Callable[[Arrays], jax.Array]) -> Callable[[Arrays], Any]:
        def both(arrays: Arrays) -> Any:
            one = lambda array: function({**arrays, name: array})
            along = lambda one: lambda array: jax.jvp(one, (array,), (direction(arrays)[name],))[1]
            return along(one)(arrays[name]), along(jax.grad(one))(arrays[name])

        return both

    return transform


@cover(0, rest=6)
@pytest.mark.parametrize("feature", FEATURES)
def test_of_one_operand(implementation: str, feature: str) -> None:
    """Derivatives leave out what has no tangent, or no gradient."""
    call = cases.build(FEATURES[feature])
    for name in oracle.split(call)[0]:
        assert_same(derivative(implementation, call, alone(name)), by_definition(feature, alone(name)))


@cover(0, rest=4)
@pytest.mark.parametrize("steps", list(itertools.product((push, pull), repeat=2)), ids=lambda steps: steps[0].__name__)
def test_third_order(implementation: str, steps: tuple[Callable[..., Any], ...]) -> None:
    call = cases.build(SMALL._replace(batch=(), heads=(1, 1), causal=True, bias="full"))
    nested = lambda function: jax.grad(steps[0](steps[1](function)))
    assert_same(*(derivative(name, call, nested) for name in (implementation, "reference")))


@cover(0)
def test_tiles_of_real_calls() -> None:
    call = cases.build(
        SMALL._replace(query_length=523, key_length=1100, heads=(1, 1), dims=(2, 2), batch=(), causal=True)
    )
    for order in ORDERS.values():
        assert_same(*(derivative(name, call, order) for name in ("xla", "reference")))


@cover(0, rest=4)
@pytest.mark.parametrize("order", ORDERS)
def test_of_some_arrays_of_a_score_mod(implementation: str, order: str) -> None:
    """A `score_mod` closes over three arrays: one is an index, and the derivative of one alone is asked for."""
    query, key, value, first, second = np.random.default_rng(0).standard_normal((5, 2, 6, 2, 4))
    rows = np.array([5, 0, 1, 4, 3, 2])

    def function(name: str) -> Callable[[Arrays], jax.Array]:
        def scalar(arrays: Arrays) -> jax.Array:
            def score_mod(logit: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
                row = jnp.asarray(rows)[query]
                return logit * arrays["first"][batch, row, head, 0] + jnp.asarray(second)[batch, key, head, 1]

            out = jflash.attention(arrays["query"], key, value, score_mod=score_mod, implementation=name)
            return jnp.sum(jnp.sin(out))

        return scalar

    arrays = {"query": query, "first": first}
    assert_same(*(jax.jit(ORDERS[order](function(name)))(arrays) for name in (implementation, "reference")))
