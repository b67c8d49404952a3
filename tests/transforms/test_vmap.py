"""`vmap` over any of the operands, and of the gradient: every entry is the call of that entry alone.

It draws the dropout of its key, counts its batch from 0, and has its own gradient of what the entries share.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import pytest
from operands import (
    ALL,
    PLAIN,
    Operands,
    assert_same,
    attend,
    attend_and_pull_back,
    cotangents,
    draw,
    jit,
    reference,
    served,
    split,
    stack,
)
from refusals import skip_refused
from short_run import cover


@pytest.fixture(autouse=True)
def _served(backend: str) -> None:
    skip_refused(backend, **PLAIN)


def draw_each(backend: str, **seeds: int) -> Operands:
    """Operands that differ from `ALL` in those that have a seed here."""
    return served({**ALL, **{name: draw(seed)[name] for name, seed in seeds.items()}}, backend)


def entries(backend: str, axes: Mapping[str, int]) -> list[Operands]:
    """Calls that differ in the mapped operands alone."""
    return [draw_each(backend, **dict.fromkeys(axes, seed)) for seed in (1, 2, 3)]


def join(calls: Sequence[Operands], axes: Mapping[str, int]) -> Operands:
    """Return the arrays that `vmap` with `in_axes(call, axes)` takes apart into `calls`."""
    one = calls[0]
    return {name: stack([call[name] for call in calls], axes[name]) if name in axes else one[name] for name in one}


def in_axes(call: Operands, axes: Mapping[str, int]) -> tuple[dict[str, int | None]]:
    return ({name: axes.get(name) for name in call},)


def named(axes: Mapping[str, int]) -> str:
    return "all" if len(axes) == len(ALL) else "+".join(f"{name}{axis or ''}" for name, axis in axes.items())


HALVES = [
    {name: 0 for name, calls in zip(ALL, itertools.combinations(range(6), 3), strict=False) if call in calls}
    for call in range(6)
]
"""Calls in which each operand is mapped three times. No two are in the same three, so of any two each is mapped in some
call without the other."""


@cover(1, rest=2)
@pytest.mark.parametrize(
    "axes",
    [
        *HALVES,
        *(pytest.param({name: 0}, marks=cover(0)) for name in ALL),
        pytest.param(dict(query=0, dropout_key=0, bias=0), marks=cover(0)),
        pytest.param(dict(key=0, value=0, key_value_seq_lengths=0, key_segments=0), marks=cover(0)),
        pytest.param(dict.fromkeys(ALL, 0), marks=cover(0)),
        dict(query=1, key=2, value=-1),
        dict(bias=-1, mask=2, modulation=1, sinks=1, query_segments=0),
    ],
    ids=named,
)
def test_value_and_gradients(backend: str, axes: dict[str, int]) -> None:
    if not served(dict.fromkeys(axes, ALL["scale"]), backend):
        skip_refused(
            backend, **PLAIN, score_mod=lambda logit, *_: logit, dropout_rate=0.5, dropout_key=ALL["dropout_key"]
        )
    calls = entries(backend, axes)
    expected = stack([reference(call) for call in calls])
    moved = np.ptp(np.asarray(expected[0][0]), axis=0).max()
    assert moved > 1e-3, "the mapped operands must matter, or this shows nothing"
    function = jax.vmap(functools.partial(attend_and_pull_back, implementation=backend), in_axes(calls[0], axes))
    assert_same(jit(function)(join(calls, axes)), expected)


@cover(1, rest=2)
@pytest.mark.parametrize(
    "axes",
    [
        dict(key=0, bias=0, query_offset=0),
        pytest.param(dict(dropout_key=0, scale=0, modulation=0), marks=cover(0)),
        dict.fromkeys(ALL, 0),
    ],
    ids=named,
)
def test_gradient_of_vmap(backend: str, axes: dict[str, int]) -> None:
    """An array that the entries share gets the sum of their gradients."""
    calls = entries(backend, axes)
    gradients = stack([reference(call)[1] for call in calls])
    expected = {name: array if name in axes else array.sum(axis=0) for name, array in gradients.items()}
    mapped = jax.vmap(functools.partial(attend, implementation=backend), in_axes(calls[0], axes))
    smooth, rest = split(join(calls, axes))

    @jit
    def gradients_of_vmap(smooth: Operands, rest: Operands) -> Operands:
        results, vjp = jax.vjp(lambda smooth: mapped({**smooth, **rest}), smooth)
        return vjp(jax.vmap(cotangents)(results))[0]

    assert_same(gradients_of_vmap(smooth, rest), expected)


@cover(0)
def test_nested_vmap(backend: str) -> None:
    """Two mapped axes, over different operands and one over both, with the new axes in odd places."""
    inner = dict(query=1, modulation=0, dropout_key=0)
    outer = dict(query=3, key=1, sinks=0, mask=2)
    grid = [
        [
            draw_each(backend, **{name: 1 + (name in inner) * i + 2 * (name in outer) * o for name in inner | outer})
            for i in range(2)
        ]
        for o in range(2)
    ]
    expected = stack([stack([reference(call) for call in row]) for row in grid])
    function = functools.partial(attend_and_pull_back, implementation=backend)
    call = grid[0][0]
    nested = jax.vmap(jax.vmap(function, in_axes(call, inner)), in_axes(call, outer))
    assert_same(jit(nested)(join([join(row, inner) for row in grid], outer)), expected)


def test_empty_axis(backend: str) -> None:
    call = draw_each(backend)
    function = jax.vmap(functools.partial(attend_and_pull_back, implementation=backend), in_axes(call, dict(query=0)))
    (out, lse), gradients = jit(function)({**call, "query": call["query"][None][:0]})
    assert (out.shape, lse.shape) == ((0, 2, 5, 4, 6), (0, 2, 5, 4))
    assert gradients["key"].shape == (0, *ALL["key"].shape)
