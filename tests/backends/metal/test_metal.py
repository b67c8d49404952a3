"""The Metal backend's own: what it refuses, gradients of shared biases, and the same bits in every order of threads.

That its results are right is shown with every other backend's (test_exactness, test_transforms, ...), here on Linux by
the emulator, which fails a launch for a race, an access out of bounds or an uninitialised read.
"""

import dataclasses
import functools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from equations import equations
from operands import PLAIN
from refusals import skip_refused
from short_run import cover

import jflash
import jflash_metal
from jflash import _canonical, _dispatch, _platform
from jflash._platform import Platform
from jflash._semantics.spec import Spec
from jflash_metal import _ffi

attention = functools.partial(jflash.attention, implementation="metal")
EVERYTHING = cases.EVERYTHING._replace(
    query_length=75, key_length=100, heads=(4, 2), dims=(16, 24), window=(60, 5), dropout=False
)


@pytest.fixture
def emulated() -> None:
    """Skips where the kernels cannot run, or run without the emulator's counts and checks."""
    skip_refused("metal", **PLAIN)
    if _ffi.host() != "emulator":
        pytest.skip("The kernels run on an Apple GPU here.")


def spec_of(**options: Any) -> Spec:
    arguments: dict[str, Any] = {**PLAIN, **options}
    return _canonical.canonicalize(**arguments)[0]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("METAL", "jax-metal.*no FFI.*JAX_PLATFORMS=cpu"),
        ("mps", "jax-mps.*no FFI.*JAX_PLATFORMS=cpu"),
        ("gpu", "for Apple GPUs.*this is gpu"),
        ("tpu", "for Apple GPUs.*this is tpu"),
    ],
)
def test_other_platforms_are_refused(name: str, sentence: str) -> None:
    assert re.search(sentence, str(jflash_metal.unsupported(spec_of(), Platform(name, name, None))))


@pytest.mark.parametrize("name", ["METAL", "mps"])
def test_xla_serves_apples_own_platforms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_platform, "lowering_targets", lambda _: {name: Platform(name, "Apple M", None)})
    assert jflash.explain(**PLAIN).startswith("xla serves")
    verdict, refusal = jflash.explain(**PLAIN, implementation="metal").splitlines()
    assert verdict.startswith("No implementation")
    assert "no FFI" in refusal


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(query=jnp.zeros((1, 2, 1, 257)), key=jnp.zeros((1, 2, 1, 257))), "up to 256; these are 257 and 6"),
        (dict(value=jnp.zeros((2, 7, 2, 300))), "up to 256; these are 8 and 300"),
        (dict(dropout_rate=0.5, dropout_key=np.asarray([1, 2], np.uint32)), "no dropout"),
    ],
    ids=["head_dim", "value_dim", "dropout"],
)
def test_what_the_shaders_do_not_compute_is_refused(options: dict[str, Any], sentence: str) -> None:
    if "query" in options:
        options = {**options, "value": jnp.zeros((1, 2, 1, 6))}
    assert sentence in str(jflash_metal.unsupported(spec_of(**options), Platform("cpu", "cpu", None)))


def test_without_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend refuses and says how to build the library; nothing else changes."""
    monkeypatch.setattr(_ffi, "_LIBRARY", Path("nowhere"))
    verdict, refusal = jflash.explain(**PLAIN, implementation="metal").splitlines()
    assert verdict.startswith("No implementation")
    assert "not built" in refusal
    assert "pip install" in refusal
    with pytest.raises(NotImplementedError, match="not built"):
        attention(**PLAIN)
    jflash.attention(**PLAIN)


def test_only_by_name() -> None:
    assert "metal" not in _dispatch.in_order(spec_of(), None, Platform("cpu", "cpu", None))
    assert "metal" not in jflash.explain(**PLAIN)
    assert _dispatch.candidates("metal") == ("metal",)


@pytest.mark.usefixtures("emulated")
def test_any_order_of_threads_gives_the_same_bits() -> None:
    """Every result has one writer, so `deterministic` needs nothing more."""
    one = cases.build(EVERYTHING)
    results = []
    try:
        for seed in range(4):
            _ffi.set_schedule(seed)
            results.append(jax.tree.map(np.asarray, oracle.run(attention, one)))
    finally:
        _ffi.set_schedule(0)
    oracle.assert_right(results[0], one)
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])


@pytest.mark.usefixtures("emulated")
def test_sums_that_cancel() -> None:
    """The gradient of a bias is nothing but roundings with a single key: dP equals delta but for these."""
    one = cases.build(
        Case(
            query_length=1,
            key_length=1,
            dims=(80, 80),
            batch=(3,),
            soft_cap=1.5,
            bias="full",
            alibi=True,
            mask="keys",
            offset="negative",
            window=15,
            lengths="both",
        )
    )
    oracle.assert_right(oracle.run(attention, one), one)


@cover(every=8)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 75, 100), (1, 4, 75, 100), (4, 1, 100), (1, 75, 1), (75, 100)], ids=str)
def test_gradient_of_a_shared_bias(batch: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Every way to share a bias is right, and none makes an array with the axes that the bias lacks."""
    if len(shape) == 4 and not batch:
        shape = shape[1:]
    one = cases.build(Case(query_length=75, key_length=100, heads=(4, 2), batch=batch, causal=True, offset="end"))
    bias = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    one = dataclasses.replace(one, bias=bias)
    oracle.assert_right(oracle.run(attention, one), one)

    def gradient(bias: Any) -> Any:
        return jax.grad(lambda bias: attention(one.query, one.key, one.value, bias).sum())(bias)

    largest = max(
        variable.aval.size
        for equation in equations(jax.make_jaxpr(gradient)(bias).jaxpr)
        for variable in equation.outvars
    )
    assert largest <= max(bias.size, one.query.size * 4)
    assert largest < 4 * 75 * 100 or bias.size >= 4 * 75 * 100 or batch


@pytest.mark.usefixtures("emulated")
@cover(every=4)
@pytest.mark.parametrize("name", ["bias", "scale", "alibi_slopes", "key"])
def test_unused_gradients_are_not_computed(name: str) -> None:
    one = cases.build(EVERYTHING)
    arrays = {"bias": one.bias, "scale": one.scale, "alibi_slopes": one.alibi_slopes, "key": one.key}
    rest = {other: array for other, array in arrays.items() if other != name}
    call = lambda array: attention(one.query, value=one.value, **rest, **{name: array}).sum()
    _ffi.forget_counters()
    jax.block_until_ready(jax.grad(call)(arrays[name]))
    entries = [counters.entry for counters in _ffi.counters()]
    assert entries == ["forward", "delta", "d_key_value" if name == "key" else "d_query"]


@pytest.mark.usefixtures("emulated")
def test_on_a_thread_each() -> None:
    """Calls at the same time do not disturb each other: two programs of which each runs three times."""
    calls = [cases.build(Case(query_length=33, key_length=40, batch=(), causal=bool(i % 2))) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for got, one in zip(pool.map(functools.partial(oracle.run, attention), calls), calls, strict=True):
            oracle.assert_right(got, one)


def test_platform_here_is_the_cpu() -> None:
    """The tests above take this for granted."""
    assert _platform.current().name == "cpu"
