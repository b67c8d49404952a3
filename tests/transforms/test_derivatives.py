"""Every derivative under every transform: the rows of `derivatives`, each held against plain attention in float64.

Each is made of `xla` and of the definition in float64, and of the Hopper kernels, in Pallas' interpreter, in bfloat16.
"""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import differentiable_attention
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivatives import DEVICES, EAGER, ROWS, Arrays, Attention
from interpreter import Interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from short_run import cover

import jflash
from jflash import _dispatch

ROUNDED = 1e-10
"""The error allowed, relative to the largest number: 1e-16 for each of a few thousand operations, with room for
cancellation."""

ALSO_EAGER = ("jvp", "grad", "jvp of grad", "linearize", "vmap of jvp")
IN_SHORT_RUN = ("jvp", "grad of jvp", "three deep: push of pull of push", "vmap of jvp of grad", "float0")


def attend(implementation: str, x: Arrays, lengths: Any) -> Any:
    return jflash.attention(
        **x, key_value_seq_lengths=lengths, is_causal=True, implementation=implementation, return_residual=True
    )


def plain(x: Arrays, lengths: Any) -> Any:
    return differentiable_attention.attention(**x, key_value_seq_lengths=lengths, is_causal=True)


def of_bfloat16(attention: Attention) -> Attention:
    """Arrays in the kernels' dtype, output in float32."""

    def call(x: Arrays, lengths: Any) -> Any:
        narrow = {name: x[name].astype(jnp.bfloat16) for name in ("query", "key", "value", "bias")}
        out, lse = attention({**x, **narrow}, lengths)
        return out.astype(jnp.float32), lse

    return call


def made(row: str, attention: Attention, *, eager: bool = False) -> Any:
    """Return the derivatives in NumPy."""
    function = ROWS[row]
    if eager or row in EAGER:
        return jax.tree.map(np.asarray, function(attention))
    return jax.tree.map(np.asarray, jax.jit(lambda: function(attention))())


@functools.cache
def truth(row: str) -> Any:
    with jax.enable_x64(True):
        return made("one device" if row in DEVICES else row, plain)


def assert_near(got: Any, want: Any, allowed: Callable[[np.ndarray], Any]) -> None:
    def compare(path: Any, got: np.ndarray, want: np.ndarray) -> None:
        np.testing.assert_allclose(got, want, rtol=0, atol=allowed(want), err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(compare, got, want)


@cover(rest=2)
@pytest.mark.parametrize(
    ("implementation", "row"),
    [
        *(pytest.param("xla", row, marks=() if row in IN_SHORT_RUN[:3] else cover(0)) for row in ROWS),
        # JAX alone takes its derivatives.
        *(pytest.param("reference", row, marks=cover(0)) for row in (*IN_SHORT_RUN, *DEVICES)),
    ],
)
def test_every_derivative(implementation: str, row: str) -> None:
    with jax.enable_x64(True):
        got = made(row, functools.partial(attend, implementation))
    assert_near(got, truth(row), lambda want: ROUNDED * np.max(np.abs(want), initial=1e-3))


@cover(0)
@pytest.mark.parametrize("row", ALSO_EAGER)
def test_eager(row: str) -> None:
    with jax.enable_x64(True):
        got = made(row, functools.partial(attend, "xla"), eager=True)
    assert_near(got, truth(row), lambda want: ROUNDED * np.max(np.abs(want), initial=1e-3))


def test_a_linear_function_is_compiled_alone():
    """No program of a tangent is traced before it is lowered, and none beside it wants the devices."""
    query, *moved = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 4)).astype(np.float32)
    attend = lambda query: jflash.attention(query, query, query, is_causal=True, implementation="xla")
    _, push = jax.linearize(attend, query)
    for t_query in moved:
        want = jax.jvp(attend, (query,), (t_query,))[1]
        np.testing.assert_allclose(jax.jit(push)(t_query), want, rtol=1e-5, atol=1e-6)


ONE_AT_A_TIME = threading.Lock()
"""The interpreter's memory is global: for the process, not for one test."""


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> str:
    """The Hopper kernels as a backend for any machine."""
    from jflash._backends.mosaic_gpu import plan, run

    ops = Interpreter(plgpu.InterpretGPUParams(detect_races=False))

    def on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
        """The interpreter has effects in an order, which no part of another program may have."""
        compiled = jax.jit(function)

        def run(*args: Any) -> Any:
            # The interpreter fails the check for leaked tracers, and may be called from a thread that checks.
            with ONE_AT_A_TIME, jax.check_tracer_leaks(False):
                return jax.tree.map(np.asarray, compiled(*jax.device_put(args, jax.devices()[-1])))

        return lambda *args: jax.pure_callback(run, jax.eval_shape(function, *args), *args)

    def forward(spec: Any, operands: Any) -> Any:
        return on_the_host(lambda operands: run.forward(plan.plan_forward(spec, 132), operands, ops))(operands)

    def tangent(spec: Any, operands: Any, results: Any, tangents: Any) -> Any:
        moving = frozenset(name for name, tangent in tangents._asdict().items() if jax.tree.leaves(tangent))
        planned = plan.plan_tangent(spec, moving, 132)
        return on_the_host(lambda *args: run.tangent(planned, *args, ops))(operands, results, tangents)

    def backward(spec: Any, *args: Any) -> Any:
        return on_the_host(lambda *args: run.backward(plan.plan_backward(spec, 132), *args, ops))(*args)

    served = lambda spec, platform: None
    kernels = types.SimpleNamespace(unsupported=served, forward=forward, tangent=tangent, backward=backward)
    monkeypatch.setattr(_dispatch, "BACKENDS", {**_dispatch.BACKENDS, "interpreted": kernels})
    return "interpreted"


THROUGH_KERNELS = (
    *("jvp", "vmap", "vmap over lengths", "vmap of jvp", "jvp of vmap", "float0", "symbolic zeros"),
    *(f"jvp of {name}" for name in ("query", "key", "value", "bias", "scale", "sinks")),
    *("vmap of jvp over one operand", "vmap of jvp over directions", "linearize", "linear_transpose"),
    *("grad", "grad of the log-sum-exp", "grad of vmap", "vmap of grad", "checkpoint, nothing"),
    *("grad of jvp", "jvp of grad", "MeanFlow"),
)
"""The functions that give the kernels operands or tangents of their own. The rest is one program around them, whatever
the backend."""


@cover(0, rest=6)
@pytest.mark.parametrize("row", [pytest.param(row, marks=() if row == "jvp" else cover(0)) for row in THROUGH_KERNELS])
def test_every_derivative_of_the_kernels(interpreted: str, row: str) -> None:
    """Derivatives are as exact as plain attention's under the same transform, by the rule for numbers; `xla` makes what
    is lacking."""
    with jax.enable_x64(False):
        got = made(row, of_bfloat16(functools.partial(attend, interpreted)))
        yardstick = made(row, of_bfloat16(plain))

    def compare(path: Any, got: np.ndarray, want: np.ndarray, yardstick: np.ndarray) -> None:
        size = np.max(np.abs(want), initial=0)
        allowed = 2 * np.max(np.abs(yardstick - want), initial=0) + 4 * float(jnp.finfo(jnp.bfloat16).eps) * size
        np.testing.assert_allclose(got, want, rtol=0, atol=allowed, err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(compare, got, truth(row), yardstick)
