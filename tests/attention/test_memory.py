"""Temporary memory of tiled backends, as the compiler plans it: in proportion to T + S, with every derivative."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from refusals import skip_refused
from short_run import cover

import jflash
from jflash import _dispatch

HEADS, HEAD_DIM = 8, 64


@pytest.fixture(params=[name for name, backend in _dispatch.BACKENDS.items() if hasattr(backend, "backward")])
def attention(request: pytest.FixtureRequest) -> Callable[..., Any]:
    skip_refused(request.param, array(1, 8, 1, 8), array(1, 8, 1, 8), array(1, 8, 1, 8))
    return functools.partial(jflash.attention, implementation=request.param)


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def temporary(function: Any, *arguments: Any) -> int:
    """Bytes."""
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def forward(attention: Callable[..., Any]) -> Callable[..., Any]:
    return attention


def forward_and_backward(attention: Callable[..., Any]) -> Callable[..., Any]:
    def function(query: Any, key: Any, value: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(attention, query, key, value)
        return out, pull_back(d_out)

    return function


def jvp(attention: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: jax.jvp(attention, arrays[:3], arrays[3:])


def hessian_vector_product(attention: Callable[..., Any]) -> Callable[..., Any]:
    gradient = jax.grad(lambda *arrays: jnp.sum(attention(*arrays) ** 2), (0, 1, 2))
    return lambda *arrays: jax.jvp(gradient, arrays[:3], arrays[3:])


def gradient_of_jvp(attention: Callable[..., Any]) -> Callable[..., Any]:
    def scalar(*arrays: Any) -> Any:
        return jnp.sum(jax.jvp(attention, arrays[:3], arrays[3:])[1] ** 2)

    return jax.grad(scalar, range(6))


@cover(rest=2)
@pytest.mark.parametrize("options", [pytest.param({}, marks=cover(0)), dict(is_causal=True)], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("part", "arrays", "most"),
    [
        # A gradient has the forward in it.
        pytest.param(forward, 3, 1, marks=cover(0)),
        (forward_and_backward, 4, 3),
        pytest.param(jvp, 6, 2, marks=cover(0)),
        pytest.param(hessian_vector_product, 6, 6, marks=cover(0)),
        pytest.param(gradient_of_jvp, 6, 6, marks=cover(0)),
    ],
    ids=["forward", "backward", "jvp", "hessian_vector_product", "gradient_of_jvp"],
)
def test_in_proportion_to_the_length(
    attention: Callable[..., Any], part: Any, arrays: int, most: int, options: dict[str, Any]
):
    used = {
        length: temporary(part(functools.partial(attention, **options)), *[array(1, length, HEADS, HEAD_DIM)] * arrays)
        for length in (16384, 32768)
    }
    operands_and_output = 4 * 16384 * HEADS * HEAD_DIM * 4
    assert used[16384] <= most * operands_and_output
    assert used[32768] <= 2.05 * used[16384]


@cover(1, every=5)
@pytest.mark.parametrize(("batch", "length"), [(32, 64), (2, 256), (1, 362), (1, 512), (1, 1024)])
def test_small_calls_take_a_constant_besides(attention: Callable[..., Any], batch: int, length: int):
    """A gradient holds, besides as much as the arrays, five tiles of the largest number of logits that one may have."""
    call = forward_and_backward(functools.partial(attention, is_causal=True))
    arrays = 4 * batch * length * HEADS * HEAD_DIM * 4
    assert temporary(call, *[array(batch, length, HEADS, HEAD_DIM)] * 4) <= arrays + 5 * 4 * 2**20


@cover(every=3)
@pytest.mark.parametrize("bias", [(1, HEADS, 1, 4096), (1, HEADS, 4096, 1), (4096,)], ids=str)
def test_gradient_of_a_broadcast_bias(attention: Callable[..., Any], bias: tuple[int, ...]):
    length = 4096
    arguments = [array(1, length, HEADS, HEAD_DIM)] * 3

    def gradients(bias: Any, query: Any, key: Any, value: Any) -> Any:
        return jax.grad(lambda bias, query: attention(query, key, value, bias).sum(), (0, 1))(bias, query)

    assert temporary(gradients, array(*bias), *arguments) < 0.2 * 4 * HEADS * length**2


def test_a_bias_that_is_not_differentiated_costs_nothing(attention: Callable[..., Any]):
    length = 4096
    arguments = [array(1, length, HEADS, HEAD_DIM)] * 3
    bias = array(1, HEADS, length, length)

    def gradient(bias: Any, query: Any, key: Any, value: Any) -> Any:
        return jax.grad(lambda query: attention(query, key, value, bias).sum())(query)

    assert temporary(gradient, bias, *arguments) < 0.2 * 4 * math.prod(bias.shape)
