"""cuDNN's attention by way of jax.nn on a GPU that runs it, by name: the same questions as everywhere, over what it
takes."""

import dataclasses
import functools
from typing import Any

import cases
import cudnn_cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from cudnn_cases import constant_lse, of_output
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from on_hardware import PLAIN, poison, with_nan_in_padding

import jflash
from jflash import _platform
from jflash._backends import cudnn

pytestmark = pytest.mark.gpu

EVEN = dataclasses.replace(PLAIN, query_length=2, key_length=2)
REFUSAL = cudnn.unsupported(EVEN, _platform.current())
attention = functools.partial(jflash.attention, implementation="cudnn")

CASES = [
    *(Case(**row) for row in cases.product(cudnn_cases.VALUES, 2)),
    *cudnn_cases.windows("bfloat16", 258, 294, 64, (0, 40, 600)),
    *cudnn_cases.windows("float16", 130, 130, 128, (17,)),
    *(
        Case("bfloat16", 258, 294, (4, 2), (dim, dim), (3,), causal=causal, lengths=lengths)
        for dim in ((136, 192, 256) if _platform.current().compute_capability == "9.0" else ())
        for causal in (False, True)
        for lengths in (None, "both")
    ),
]


@pytest.fixture(autouse=True)
def _on_hardware():
    if REFUSAL is not None:
        pytest.skip(f"cudnn: {REFUSAL}")


# Elsewhere all of them would be skipped with one reason: one of them says it.
@pytest.mark.parametrize("case", CASES if REFUSAL is None else CASES[:1], ids=str)
def test_exact(case: Case):
    """Padding holds NaN, which must reach nothing; the gradient of the output is cuDNN's."""
    call = of_output(cases.build(case))
    poison()
    oracle.assert_right(oracle.run(constant_lse(attention), with_nan_in_padding(call)), call)


def test_gradient_of_log_sum_exp():
    call = cases.build(Case("bfloat16", 258, 294, (4, 2), (64, 64), (3,), causal=True, lengths="both"))
    oracle.assert_right(oracle.run(attention, with_nan_in_padding(call)), call)


def test_tangents():
    call = cases.build(Case("bfloat16", 258, 294, (4, 2), (64, 64), (3,), causal=True, lengths="both"))
    along = oracle.draw_tangents(call)
    oracle.assert_tangents_right(oracle.run_tangents(attention, call, along), call, along)


def test_large_logits():
    """The statistics that the backward is given are a log-sum-exp in float32."""
    call = cases.with_large_logits(of_output(cases.build(Case("bfloat16", 258, 294, (2, 1), (64, 64), (2,)))))
    oracle.assert_right(oracle.run(constant_lse(attention), call), call)


def mapped(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return jax.vmap(functools.partial(attention, **options))(query, key, value)


def rematerialized(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return jax.checkpoint(functools.partial(attention, **options))(query, key, value)


@pytest.mark.parametrize("transformed", [mapped, rematerialized])
def test_transformations(transformed: Any):
    call = of_output(cases.build(Case("bfloat16", 258, 294, (4, 2), (64, 64), (2, 3), causal=True)))
    oracle.assert_right(oracle.run(constant_lse(transformed), call), call)


@pytest.mark.parametrize("split", [PartitionSpec("x"), PartitionSpec(None, None, "x")], ids=["batch", "heads"])
def test_several_devices(split: PartitionSpec):
    if jax.device_count() == 1:
        pytest.skip("One device.")
    call = of_output(cases.build(Case("bfloat16", 258, 294, (8, 4), (64, 64), (4,), causal=True, lengths="both")))
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))

    def over_devices(**operands: Any) -> Any:
        for name in ("query", "key", "value"):
            operands[name] = jax.lax.with_sharding_constraint(operands[name], NamedSharding(mesh, split))
        return constant_lse(attention)(**operands)

    oracle.assert_right(oracle.run(over_devices, call), call)


def test_forward_runs_once_in_a_training_step():
    """The backward's own, whose results are the forward's, is not in the compiled program."""
    array = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    layers = lambda query: jax.lax.scan(
        lambda x, _: (attention(x, array, array, is_causal=True), None), query, length=2
    )[0]
    loss = lambda query: layers(query).astype(jnp.float32).sum()
    text = jax.jit(jax.grad(loss)).lower(array).compile().as_text()
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1


def test_what_stands_against_some_options():
    """The reasons of refusals that are measurements: when they no longer hold, cuDNN has become better."""
    numbers = np.random.default_rng(0)
    query, key, value = (jnp.asarray(numbers.standard_normal((1, 128, 2, 64)), jnp.bfloat16) for _ in range(3))
    in_jax = functools.partial(jax.nn.dot_product_attention, query, key, value)
    by_cudnn = functools.partial(in_jax, implementation="cudnn")
    for scale in (0.0, -0.3):
        assert not np.any(np.isnan(np.asarray(in_jax(scale=scale, is_causal=True), np.float32)))
        assert np.any(np.isnan(np.asarray(by_cudnn(scale=scale, is_causal=True), np.float32)))
    least = jnp.full((1, 2, 128, 128), -3e38, jnp.bfloat16)
    assert np.all(np.asarray(by_cudnn(bias=least), np.float32) == 0)
    assert np.any(np.asarray(in_jax(bias=least), np.float32) != 0)
    future = by_cudnn(local_window_size=(128, 0)) - by_cudnn(is_causal=True)
    assert np.max(np.abs(np.asarray(future, np.float32))) > 0.1


def test_is_asked_after_the_kernels_but_on_blackwell():
    query = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    is_blackwell = (_platform.current().compute_capability or "").startswith("10.")
    assert jflash.explain(query, query, query).startswith("cudnn serves") == is_blackwell
