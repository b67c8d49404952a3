"""The Metal backend's own: who may use it, what its kernels cost, and that their order of work changes no bit.

That its results are right is shown with every other backend's (test_exactness, test_transforms, ...), here on Linux by
the emulator, which fails a launch for a race, an access out of bounds or a read of what nobody wrote.
"""

import dataclasses
import functools
import itertools
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
import short_run
from cases import Case
from operands import PLAIN, assert_same
from refusals import skip_refused

import jflash
import jflash_metal
from jflash import _canonical, _dispatch, _platform
from jflash._platform import Platform
from jflash._semantics.spec import Spec
from jflash_metal import _blocks, _ffi, _parameters, _source

attention = functools.partial(jflash.attention, implementation="metal")
HEADERS = _source.SHADERS
EVERYTHING = Case(
    query_length=75,
    key_length=100,
    heads=(4, 2),
    dims=(16, 24),
    scale="traced",
    soft_cap=1.5,
    bias="full",
    alibi=True,
    mask="full",
    causal=True,
    offset="each",
    window=(60, 5),
    lengths="both",
    segments="sorted",
    sinks=True,
)


@pytest.fixture
def emulated() -> None:
    """Skips where the kernels cannot run, or where nothing counts and checks them."""
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
    """It refuses and says how to build it; nothing else changes."""
    monkeypatch.setattr(_ffi, "_LIBRARY", Path("nowhere"))
    verdict, refusal = jflash.explain(**PLAIN, implementation="metal").splitlines()
    assert verdict.startswith("No implementation")
    assert "not built" in refusal
    assert "pip install" in refusal
    with pytest.raises(NotImplementedError, match="not built"):
        attention(**PLAIN)
    jflash.attention(**PLAIN)


def test_only_by_name() -> None:
    assert "metal" not in _dispatch.candidates(None)
    assert "metal" not in jflash.explain(**PLAIN)
    assert _dispatch.candidates("metal") == ("metal",)


def test_parameters_are_laid_out_alike() -> None:
    """The same names in the same order and types; that sizes agree, the shader asserts when it is compiled."""
    text = (HEADERS / "parameters.h").read_text()
    types = {"long": np.dtype("<i8"), "int": np.dtype("<i4"), "float": np.dtype("<f4")}
    for struct in ("RowStrides", "PairStrides", "Parameters"):
        body = re.search(rf"struct {struct} \{{(.*?)\n\}};", text, re.DOTALL)[1]
        fields = re.findall(r"^  (\w+) (\w+);$", body, re.MULTILINE)
        types[struct] = np.dtype([(name, types[kind]) for kind, name in fields], align=True)
    assert types["Parameters"] == _parameters.PARAMETERS


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dims", list(itertools.product([1, 8, 33, 64, 100, 128, 192, 250, 256], repeat=2)), ids=str)
def test_blocks_fit(itemsize: int, dims: tuple[int, int]) -> None:
    memory, blocks = _blocks.Memory(itemsize, *dims), _blocks.blocks_of(itemsize, *dims)
    for kernel in ("forward", "d_query", "d_key_value"):
        assert getattr(memory, kernel)(getattr(blocks, kernel)) <= 32768


@short_run.cover(1)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dims", [(33, 7), (64, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_what_the_shaders_take(dtype: str, dims: tuple[int, int]) -> None:
    """The sizes that blocks are chosen by are those that the entry points declare."""
    one = cases.build(Case(dtype=dtype, query_length=9, key_length=9, dims=dims, batch=()))
    _ffi.forget_counters()
    jax.block_until_ready(oracle.run(attention, one))
    itemsize = jnp.dtype(dtype).itemsize
    memory, blocks = _blocks.Memory(itemsize, *dims), _blocks.blocks_of(itemsize, *dims)
    counted = {counters.entry: counters.threadgroup_memory for counters in _ffi.counters()}
    assert counted.pop("delta") == 0
    assert counted == {name: getattr(memory, name)(getattr(blocks, name)) for name in counted}
    assert set(counted) == {"forward", "d_query", "d_key_value"}


def test_a_source_has_what_the_call_uses() -> None:
    """And is the same for calls of other sizes and numbers, so that it compiles once."""
    text = _source.forward(spec_of(is_causal=True), "float32")
    assert "#define HAS_RIGHT 1\n" in text
    assert "#define HAS_LEFT 0\n" in text
    assert "#include <metal_stdlib>" in text
    assert '#include "' not in text
    longer = {name: jnp.concatenate([array] * 3, axis=1) for name, array in PLAIN.items()}
    others = dict(is_causal=True, scale=0.3, query_offset=4)
    assert _source.forward(_canonical.canonicalize(**longer, **others)[0], "float32") == text
    assert _source.forward(spec_of(local_window_size=(3, 4)), "float32") != text


@pytest.mark.usefixtures("emulated")
def test_any_order_of_threads_gives_the_same_bits() -> None:
    """No result is added to by several, so `deterministic` is kept without doing anything for it."""
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
    """With a single key dP is delta but for roundings, which are all that the bias's gradient then has wrong."""
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


@short_run.cover(1)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 75, 100), (1, 4, 75, 100), (4, 1, 100), (1, 75, 1), (75, 100)], ids=str)
def test_gradient_of_a_shared_bias(batch: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Of every way to share one, and never by way of an array that has the axes it lacks."""
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


def equations(jaxpr: Any) -> Any:
    """All of a program, those inside others' parameters too."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", ["bias", "scale", "alibi_slopes", "key"])
def test_what_nobody_differentiates_is_not_computed(name: str) -> None:
    one = cases.build(EVERYTHING)
    arrays = {"bias": one.bias, "scale": one.scale, "alibi_slopes": one.alibi_slopes, "key": one.key}
    rest = {other: array for other, array in arrays.items() if other != name}
    call = lambda array: attention(one.query, value=one.value, **rest, **{name: array}).sum()
    _ffi.forget_counters()
    jax.block_until_ready(jax.grad(call)(arrays[name]))
    entries = [counters.entry for counters in _ffi.counters()]
    assert entries == ["forward", "delta", "d_key_value" if name == "key" else "d_query"]


@pytest.mark.usefixtures("emulated")
def test_wide_integers_and_floats() -> None:
    """Segment ids beyond 32 bits stay apart, and a float64 bias has a float64 gradient."""
    one = cases.build(Case(query_length=20, key_length=30, segments="unsorted", bias="full", batch=(2,)))
    far = tuple(ids.astype(np.int64) << 32 for ids in one.segment_ids)
    with jax.enable_x64(True):
        call = lambda ids, bias: attention(one.query, one.key, one.value, bias, segment_ids=ids).sum()
        gradient = jax.grad(call, argnums=1)
        near, distant = gradient(one.segment_ids, one.bias), gradient(far, one.bias.astype(np.float64))
    assert distant.dtype == jnp.float64
    assert_same(distant.astype(jnp.float32), near)


@pytest.mark.usefixtures("emulated")
def test_on_a_thread_each() -> None:
    """Calls at the same time do not meet."""
    calls = [cases.build(Case(query_length=33 + i, key_length=40, batch=(), causal=bool(i % 2))) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for got, one in zip(pool.map(functools.partial(oracle.run, attention), calls), calls, strict=True):
            oracle.assert_right(got, one)


def test_platform_here_is_the_cpu() -> None:
    """What the tests above take for granted."""
    assert _platform.current().name == "cpu"
