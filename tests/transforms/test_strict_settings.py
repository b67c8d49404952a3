"""Attention under the settings with which large code bases have JAX refuse what is often a mistake, or look for one."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import H200
from hopper_kernels import canonical_arguments
from kernel_families import HOPPER, Family, mma
from operands import ALL, PLAIN, assert_same, attend, attend_and_pull_back, cotangents, draw, reference, served, split
from refusals import skip_refused
from short_run import cover

import jflash
from jflash import _platform
from jflash._semantics.spec import Residuals

WHEN_TRACED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "leaks": jax.checking_leaks,
}
WHEN_RUN: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no jit": jax.disable_jit,
    "keys": lambda: jax.legacy_prng_key("error"),
    "key reuse": lambda: jax.debug_key_reuse(True),
    "NaN": lambda: jax.debug_nans(True),
}
OTHERS = sorted(set(ALL) - set(PLAIN) - {"query_segments", "key_segments"})
OPTIONS = {
    "plain": (),
    **{name: (name,) for name in OTHERS},
    "segments": ("query_segments", "key_segments"),
    "all": tuple(name for name in ALL if name not in PLAIN),
}
"""By name, the operands besides query, key and value."""
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@cover(1)
@pytest.mark.parametrize("mode", ["dtypes", "ranks", pytest.param("leaks", marks=cover(0))])
def test_when_traced(backend: str, mode: str) -> None:
    """Every dtype and option, and derivatives of both orders and modes."""
    skip_refused(backend, **PLAIN)
    for dtype in DTYPES:
        # What is particular to a dtype of 16 bits is to this one.
        each = dtype == jnp.bfloat16 and mode != "leaks"
        for names in OPTIONS.values() if each else [OPTIONS["plain"], OPTIONS["all"]]:
            everything = served(ALL, backend)
            operands = {name: everything[name] for name in (*PLAIN, *names) if name in everything}
            operands |= {name: operands[name].astype(dtype) for name in PLAIN}
            smooth, rest = split(operands)

            def results(smooth: Any, rest: Any = rest) -> Any:
                return attend({**smooth, **rest}, backend)

            def gradient(smooth: Any, results: Callable[..., Any] = results) -> Any:
                (out, lse), pull_back = jax.vjp(results, smooth)
                return pull_back((out, lse))[0]

            with WHEN_TRACED[mode]():
                jax.eval_shape(gradient, smooth)
                if len(names) != 1:
                    push = lambda function, smooth=smooth: jax.jvp(function, (smooth,), (smooth,))
                    jax.eval_shape(lambda results=results, push=push: push(results))
                    jax.eval_shape(lambda gradient=gradient, push=push: push(gradient))


KERNEL_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": dict(query_seq_lengths=np.array([100, 200]), key_value_seq_lengths=np.array([130, 7])),
    "bias": dict(bias=np.zeros((1, 4, 256, 256), np.float32)),
    "mask": dict(mask=np.ones((1, 4, 256, 256), bool)),
    "slopes": dict(alibi_slopes=np.zeros(4, np.float32), is_causal=True, query_offset=np.array([3, 4])),
    "sinks": dict(sinks=np.zeros(4, np.float32), local_window_size=(5, 3)),
    "segments": dict(segment_ids=np.zeros((2, 256), np.int32), logits_soft_cap=5.0),
    "dropout": dict(dropout_rate=0.1, dropout_key=jax.random.key(0)),
    "score_mod": dict(score_mod=lambda logit, batch, head, query, key: jnp.where(query > key, logit, 2 * logit)),
}


@cover(0)
@pytest.mark.parametrize("mode", ["dtypes", "ranks"])
@pytest.mark.parametrize("family", [HOPPER, mma("8.0")], ids=["hopper", "mma"])
def test_kernels_when_traced(family: Family, mode: str) -> None:
    """The two families for NVIDIA GPUs, which no other test traces on a machine without one under these settings."""
    for dtype in (jnp.bfloat16, jnp.float32):
        query, key = (np.zeros((2, 256, heads, 64), dtype) for heads in (4, 2))
        for options in KERNEL_OPTIONS.values() if dtype == jnp.bfloat16 else [KERNEL_OPTIONS["plain"]]:
            with WHEN_TRACED[mode]():
                spec, operands = canonical_arguments(query=query, key=key, value=key, **options)
                forward, backward = family.plans(spec, 132)
                call = family.call
                run = functools.partial(call.forward, forward, ops=family.ops)
                _, results = jax.make_jaxpr(run, return_shape=True)(operands)
                residuals = Residuals(*results, *results)
                jax.make_jaxpr(functools.partial(call.backward, backward, ops=family.ops))(operands, residuals)


@cover(1)
@pytest.mark.parametrize("mode", ["dtypes", pytest.param("ranks", marks=cover(0))])
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu", pytest.param("mosaic_gpu_mma", marks=cover(0))])
def test_walks_when_traced(implementation: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map of a mask function and the lists made of it, items of work on pages, and splits of the keys."""
    if implementation != "xla":
        # On a GPU `xla` makes no map: it is asked on this machine's platform.
        monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"cuda": H200})
        monkeypatch.setattr(_platform, "current", lambda: H200)
    attend = functools.partial(jflash.attention, implementation=implementation)
    documents = jnp.arange(2000, dtype=jnp.int32).reshape(2, 1000) // 300
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)

    def of_documents(query: jax.Array, key: jax.Array) -> Any:
        mask_mod = lambda batch, head, i, j: (documents[batch, i] == documents[batch, j]) | (j < head + 2)
        out, pull_back = jax.vjp(functools.partial(attend, mask_mod=mask_mod), query, key, key)
        return pull_back(out)

    def step(query: jax.Array, pages: jax.Array, integers: list[jax.Array], sinks: jax.Array) -> Any:
        options = dict(sinks=sinks, implementation=implementation, return_residual=True)
        return jflash.ragged_paged_attention(query, (pages, pages), *integers, **options)

    integers = [shape(*sizes, dtype=jnp.int32) for sizes in ((20,), (20, 64), (21,), (1,))]
    with WHEN_TRACED[mode]():
        jax.eval_shape(of_documents, shape(2, 1000, 4, 64), shape(2, 1000, 2, 64))
        jax.eval_shape(step, shape(300, 8, 128), shape(99, 16, 2, 128), integers, shape(8, dtype=jnp.float32))
        jax.eval_shape(attend, shape(1, 1, 8, 64), *[shape(1, 30_000, 2, 64)] * 2)


@cover(1, rest=2)
@pytest.mark.parametrize("mode", [pytest.param("no jit", marks=cover(0)), *list(WHEN_RUN)[1:]])
def test_when_run(backend: str, mode: str) -> None:
    """Step by step, outside of `jax.jit`."""
    skip_refused(backend, **PLAIN)
    operands = served(draw(), backend)
    want = reference(served(ALL, backend))
    with WHEN_RUN[mode]():
        got = attend_and_pull_back(operands, implementation=backend)
    assert_same(got, want)


@pytest.mark.parametrize("wrap", [lambda function: function, pytest.param(jax.jit, marks=cover(0))])
def test_nothing_is_sent_to_the_device(backend: str, wrap: Callable[..., Any]) -> None:
    """Neither forward nor backward transfers anything if its arrays are on the device."""
    operands = served(draw(), backend)
    skip_refused(backend, **PLAIN)
    smooth, rest = split(operands)
    attended = wrap(lambda smooth: attend({**smooth, **rest}, backend))
    weights = cotangents(jax.tree.map(jnp.zeros_like, attended(smooth)))
    with jax.transfer_guard("disallow"):
        results, pull_back = jax.vjp(attended, smooth)
        (gradients,) = pull_back(weights)
    assert_same((results, gradients), reference(served(ALL, backend)))


def test_a_nan_is_reported(backend: str) -> None:
    """As JAX reports it, with the step that made it."""
    skip_refused(backend, **PLAIN)
    query = PLAIN["query"].at[0, 0, 0, 0].set(jnp.nan)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jflash.attention(query, PLAIN["key"], PLAIN["value"], implementation=backend)


def test_infinities_of_a_query_that_sees_no_key_are_reported(backend: str) -> None:
    skip_refused(backend, **PLAIN)
    hidden = np.array([0, 0])
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        jflash.attention(**PLAIN, key_value_seq_lengths=hidden, implementation=backend)
