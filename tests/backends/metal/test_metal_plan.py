"""The Metal backend's plans: made from a `Spec` without an array, printable, and true to what the shaders declare."""

import dataclasses
import itertools
import re
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from metal_shader import MISSING
from short_run import cover

import jflash
import jflash_metal
from jflash._platform import Platform
from jflash._semantics.spec import Spec
from jflash_metal import _blocks, _ffi, _parameters, _plan, _source

SPEC = Spec(
    batch=2,
    query_length=70,
    key_length=100,
    heads=4,
    key_heads=2,
    head_dim=64,
    value_dim=32,
    dtype=np.dtype(jnp.bfloat16),
    bias_shape=None,
    bias_dtype=None,
    mask_shape=None,
    operands=frozenset({"query", "key", "value"}),
    scale=0.125,
    query_offset=0,
    is_causal=True,
)


def with_bias(shape: tuple[int, int, int, int], bias_dtype: Any, **more: Any) -> Spec:
    return dataclasses.replace(
        SPEC, bias_shape=shape, bias_dtype=np.dtype(bias_dtype), operands=SPEC.operands | {"bias"}, **more
    )


def results_of(spec: Spec) -> dict[str, list[str]]:
    """The names of what each kernel of the backward writes."""
    return {kernel.entry: [result.name for result in kernel.results] for kernel in _plan.plan_backward(spec).kernels}


def test_plans_are_values() -> None:
    """Equal for equal calls, hashable, and made once."""
    same = dataclasses.replace(SPEC)
    assert _plan.plan_forward(SPEC) is _plan.plan_forward(same)
    assert hash(_plan.plan_backward(SPEC)) == hash(_plan.plan_backward(same))
    (kernel,) = _plan.plan_forward(SPEC).kernels
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernel.entry = "other"


def test_grids_cover_the_call() -> None:
    (forward,) = _plan.plan_forward(SPEC).kernels
    grids = {kernel.entry: kernel.grid for kernel in _plan.plan_backward(SPEC).kernels}
    sizes = _blocks.blocks_of(2, 64, 32)
    assert forward.grid == (-(-70 // sizes.forward.rows), 4, 2)
    assert grids == {
        "delta": (18, 4, 2),
        "d_query": (-(-70 // sizes.d_query.rows), 4, 2),
        "d_key_value": (-(-100 // sizes.d_key_value.rows), 2, 2),
    }


@pytest.mark.parametrize(
    ("shape", "kernel", "name"),
    [
        ((2, 4, 70, 100), "d_query", "d_bias"),
        ((1, 4, 70, 100), "d_bias", "d_bias"),
        ((1, 4, 70, 1), "d_query", "d_bias_rows"),
        ((2, 1, 1, 100), "d_key_value", "d_bias_columns"),
    ],
)
def test_kernel_that_has_the_gradient_of_a_bias(shape: tuple[int, int, int, int], kernel: str, name: str) -> None:
    results = results_of(with_bias(shape, np.float32))
    assert [entry for entry, names in results.items() if name in names] == [kernel]
    constant = results_of(with_bias(shape, np.float32, undifferentiated=frozenset({"bias"})))
    assert not any(name in names for names in constant.values())


@pytest.mark.parametrize("shape", [(2, 4, 70, 100), (1, 4, 70, 100)])
def test_results_of_a_part_are_in_float32(shape: tuple[int, int, int, int]) -> None:
    """Results of a part are in float32; those of a whole call have the dtypes of the operands that they belong to."""
    dtypes = []
    for partial in (False, True):
        spec = with_bias(shape, jnp.bfloat16, partial=partial)
        kernels = _plan.plan_forward(spec).kernels + _plan.plan_backward(spec).kernels
        dtypes.append({result.name: result.dtype for kernel in kernels for result in kernel.results})
    whole, part = dtypes
    narrow = {name for name, dtype in whole.items() if dtype == SPEC.dtype}
    assert narrow == {"out", "d_query", "d_key", "d_value", "d_bias"}
    assert whole.keys() == part.keys()
    assert set(part.values()) == {np.dtype(np.float32)}


@pytest.mark.parametrize(("dtype", "scalar"), [(np.float32, "float"), (jnp.bfloat16, "bfloat"), (np.float16, "half")])
def test_dtype_of_the_bias(dtype: Any, scalar: str) -> None:
    """Comes from the `Spec`."""
    spec = with_bias((2, 4, 70, 100), dtype)
    assert f"#define BIAS_SCALAR {scalar}\n" in _plan.plan_forward(spec).source()


def test_description() -> None:
    text = jflash_metal.describe(with_bias((1, 1, 1, 100), np.float32), Platform("cpu", "cpu", None))
    memory = _plan.plan_forward(SPEC).kernels[0].threadgroup_memory
    for sentence in (
        "kernel forward: 3x4x2 threadgroups of 128 threads",
        f"threadgroup memory: {memory:,} bytes (q ",
        "kernel d_key_value",
        "d_value bfloat16[2, 100, 2, 32], d_bias_columns float32[2, 4, 100]",
        "features: HAS_BIAS, BIAS_BY_KEY, HAS_RIGHT",
        "prepared by copying: nothing",
    ):
        assert sentence in text, text


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dims", list(itertools.product([1, 8, 33, 64, 100, 128, 192, 250, 256], repeat=2)), ids=str)
def test_blocks_fit(itemsize: int, dims: tuple[int, int]) -> None:
    memory, blocks = _blocks.Memory(itemsize, *dims), _blocks.blocks_of(itemsize, *dims)
    for kernel in ("forward", "d_query", "d_key_value"):
        assert sum(getattr(memory, kernel)(getattr(blocks, kernel)).values()) <= 32768
    assert sum(memory.d_bias(blocks.d_query).values()) <= 32768


@cover(1)
@pytest.mark.parametrize("dims", [(33, 7), (64, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_memory_is_what_the_shaders_take(dtype: str, dims: tuple[int, int]) -> None:
    call = cases.build(
        Case(dtype=dtype, query_length=9, key_length=9, heads=(2, 2), dims=dims, batch=(1,), bias="full")
    )
    call = dataclasses.replace(call, bias=call.bias[:, :1])
    attention = lambda *args, **options: jflash.attention(*args, **options, implementation="metal")
    _ffi.forget_counters()
    jax.block_until_ready(oracle.run(attention, call))
    head_dim, value_dim = dims
    shapes = dict(batch=1, query_length=9, key_length=9, heads=2, key_heads=2, head_dim=head_dim, value_dim=value_dim)
    spec = with_bias((1, 1, 9, 9), call.bias.dtype, **shapes, dtype=np.dtype(call.query.dtype), is_causal=False)
    kernels = _plan.plan_forward(spec).kernels + _plan.plan_backward(spec).kernels
    counted = [(counters.entry, counters.threadgroup_memory) for counters in _ffi.counters()]
    assert counted == [(kernel.entry, kernel.threadgroup_memory) for kernel in kernels]
    assert [entry for entry, _ in counted] == ["forward", "delta", "d_query", "d_key_value", "d_bias"]


def test_names_are_those_of_the_shaders() -> None:
    """Names agree for threadgroup variables in every entry point, and for operands in the order of their buffers."""
    spec = with_bias((1, 1, 70, 100), np.float32)
    text = "".join((_source.SHADERS / name).read_text() for name in ("forward.metal", "backward.metal"))
    for kernel in _plan.plan_forward(spec).kernels + _plan.plan_backward(spec).kernels:
        body = re.search(rf"^kernel void {kernel.entry}\((.*?)^\}}", text, re.MULTILINE | re.DOTALL)[1]
        assert sorted(re.findall(r"^  threadgroup \w+ (\w+)\[", body, re.MULTILINE)) == sorted(dict(kernel.memory))
    macro = re.findall(r"^  X\(\w+, (\w+), (\d+)\)", (_source.SHADERS / "operands.h").read_text(), re.MULTILINE)
    assert macro == [(name, str(index)) for index, name in enumerate(_plan.OPERANDS)]


def test_parameters_are_laid_out_alike() -> None:
    """The same names in the same order and types; that sizes agree, the shader asserts when it is compiled."""
    text = (_source.SHADERS / "parameters.h").read_text()
    types = {"long": np.dtype("<i8"), "int": np.dtype("<i4"), "float": np.dtype("<f4")}
    for struct in ("RowStrides", "PairStrides", "PlaneStrides", "Parameters"):
        body = re.search(rf"struct {struct} \{{(.*?)\n\}};", text, re.DOTALL)[1]
        fields = re.findall(r"^  (\w+) (\w+);$", body, re.MULTILINE)
        types[struct] = np.dtype([(name, types[kind]) for kind, name in fields], align=True)
    assert types["Parameters"] == _parameters.PARAMETERS


def test_a_source_has_what_the_call_uses() -> None:
    """A source is the same for calls of other sizes and numbers, so that it compiles once."""
    text = _plan.plan_forward(SPEC).source()
    assert "#define HAS_RIGHT 1\n" in text
    assert "#define HAS_LEFT 0\n" in text
    assert "#include <metal_stdlib>" in text
    assert '#include "' not in text
    longer = dataclasses.replace(SPEC, query_length=210, batch=5, scale=0.3, query_offset=4)
    assert _plan.plan_forward(longer).source() == text
    assert _plan.plan_forward(dataclasses.replace(SPEC, is_causal=False, window=(3, 4))).source() != text
