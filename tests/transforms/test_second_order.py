"""Derivatives of derivatives: reverse over reverse on the tiled backend, every mode and order on the reference.

In float64, so that what is wrong stands out from what is rounded: 1e-16 for each of a few thousand operations, with
room for cancellation.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from plain_attention import Call
from refusals import skip_refused

import jflash
from jflash import _dispatch

Arrays = dict[str, Any]
ROUNDED = 1e-11

SMALL = Case(dtype="float64", query_length=7, key_length=9, heads=(4, 2), dims=(5, 3))
FEATURES = {
    "plain": SMALL,
    "bias": SMALL._replace(bias="heads", scale="traced", causal=True, offset="each"),
    "score_mod": SMALL._replace(score_mod="arrays", bias="full", mask="full"),
    "window": SMALL._replace(window=(3, 1), alibi=True, soft_cap=1.5),
    "lengths": SMALL._replace(lengths="both", segments="sorted", sinks=True, bias="keys"),
    "dropout": SMALL._replace(dropout=True, bias="queries"),
    "tiles": SMALL._replace(query_length=523, key_length=640, heads=(1, 1), dims=(2, 2), batch=(), causal=True),
}
REVERSE_ONLY = [name for name, backend in _dispatch.BACKENDS.items() if hasattr(backend, "backward")]
IN_SHORT_RUN = ("score_mod", "lengths")
TWICE = [name for name in REVERSE_ONLY if getattr(_dispatch.BACKENDS[name], "DIFFERENTIABLE_BACKWARD", False)]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


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


def along(gradient: Callable[[Arrays], Arrays]) -> Callable[[Arrays], jax.Array]:
    """The derivative in one direction, which is a scalar again."""
    return lambda arrays: sum(
        jax.tree.leaves(jax.tree.map(jnp.vdot, gradient(arrays), direction(arrays))), start=jnp.zeros(())
    )


def derivative(implementation: str, call: Call, order: int) -> Arrays:
    function, arrays = objective(implementation, call)
    for _ in range(order - 1):
        function = along(jax.grad(function))
    return jax.jit(jax.grad(function))(arrays)


def assert_same(got: Any, want: Any):
    def compare(path: Any, got: Any, want: Any):
        largest = np.max(np.abs(want), initial=1e-3)
        np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDED * largest, err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(compare, got, want)


def marked(names: Iterable[str]) -> list[Any]:
    """Between them those of the short run have most features."""
    return [pytest.param(name, marks=() if name in IN_SHORT_RUN else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("implementation", TWICE)
@pytest.mark.parametrize("name", marked(FEATURES))
def test_reverse_over_reverse(implementation: str, name: str):
    call = cases.build(FEATURES[name])
    assert_same(derivative(implementation, call, 2), derivative("reference", call, 2))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", TWICE)
def test_third_order(implementation: str):
    call = cases.build(SMALL._replace(batch=(), heads=(1, 1), causal=True))
    assert_same(derivative(implementation, call, 3), derivative("reference", call, 3))


@pytest.mark.parametrize("name", marked(name for name in FEATURES if name != "tiles"))
def test_forward_mode_of_the_reference(name: str):
    """Against central differences, which are off by step**2 times a third derivative and by rounding over step."""
    function, arrays = objective("reference", cases.build(FEATURES[name]))
    tangent, step = direction(arrays), 1e-5
    value, got = jax.jit(lambda arrays: jax.jvp(function, (arrays,), (tangent,)))(arrays)
    move = lambda size: jax.tree.map(lambda array, towards: array + size * towards, arrays, tangent)
    ahead, behind = (jax.jit(function)(move(size)) for size in (step, -step))
    np.testing.assert_allclose(got, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(value, (ahead + behind) / 2, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_forward_over_reverse_of_the_reference():
    """`jax.hessian` is that, and the same as reverse over reverse."""
    function, arrays = objective("reference", cases.build(SMALL._replace(batch=(), heads=(1, 1), sinks=True)))
    assert_same(jax.jit(jax.hessian(function))(arrays), jax.jit(jax.jacrev(jax.grad(function)))(arrays))


@pytest.mark.parametrize("implementation", REVERSE_ONLY)
@pytest.mark.parametrize("transform", [jax.jacfwd, jax.hessian], ids=["jacfwd", "hessian"])
def test_forward_mode_elsewhere_says_where_to_go(implementation: str, transform: Callable[..., Any]):
    call = cases.build(SMALL)
    skip_refused(implementation, **oracle.arguments(call))
    function, arrays = objective(implementation, call)
    with pytest.raises(TypeError, match="forward-mode") as refusal:
        transform(function)(arrays)
    assert any("implementation='reference'" in note for note in refusal.value.__notes__)
