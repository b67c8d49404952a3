"""Kernels through jax-mps's proposed `metal_kernel_jit`, by a STAND-IN for it: not a sign that jax-mps runs them.

The stand-in records each call, writes the signature as that function's documentation says, and runs the kernel in the
emulator.
"""

import functools
import re
import types
from typing import Any

import cases
import jax
import jax.numpy as jnp
import oracle
import pytest
from cases import Case
from operands import PLAIN
from refusals import skip_refused

import jflash
from jflash import _platform
from jflash._platform import Platform
from jflash_metal import _ffi, _mps

MPS = Platform("mps", "Apple M", None)
METAL_NAMES = {
    "float32": "float", "float16": "half", "bfloat16": "bfloat", "int32": "int", "bool": "bool", "uint8": "uchar",
}  # fmt: skip
ATTRIBUTES = {
    "threadgroup_position_in_grid": "uint3", "thread_index_in_threadgroup": "uint", "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
}  # fmt: skip


class StandIn:
    """`metal_kernel_jit(name, inputs, *, ...)`, and a record of the names that it was called with."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(
        self,
        name: str,
        inputs: list[jax.Array],
        *,
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        source: str,
        header: str,
        input_names: list[str],
        output_names: list[str],
    ) -> list[jax.Array]:
        self.names.append(name)
        assert len(inputs) == len(input_names)
        assert len(output_shapes) == len(output_names)
        assert all(array.size >= 8 for array in inputs), "smaller ones come in constant memory"
        results = [jax.ShapeDtypeStruct(*pair) for pair in zip(output_shapes, output_dtypes, strict=True)]
        pointers = [("const device", array, own) for array, own in zip(inputs, input_names, strict=True)]
        pointers += [("device", result, own) for result, own in zip(results, output_names, strict=True)]
        signature = [
            f"{space} {METAL_NAMES[jnp.dtype(array.dtype).name]}* {own} [[buffer({index})]]"
            for index, (space, array, own) in enumerate(pointers)
        ]
        signature += [f"{kind} {own} [[{own}]]" for own, kind in ATTRIBUTES.items() if re.search(rf"\b{own}\b", source)]
        text = f"{header}\nkernel void {name}({', '.join(signature)}) {{\n{source}\n}}\n"
        groups = tuple(total // size for total, size in zip(grid, threadgroup, strict=True))
        return list(_ffi.launch(text, name, groups, threadgroup, b"", inputs, results))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    skip_refused("metal", **PLAIN)
    kernel = StandIn()
    module = types.SimpleNamespace(metal_kernel_jit=kernel)
    monkeypatch.setattr(_mps, "launcher", lambda: module.metal_kernel_jit)
    monkeypatch.setattr(_platform, "current", lambda: MPS)
    jax.clear_caches()
    yield kernel
    jax.clear_caches()


@pytest.mark.parametrize(
    "case",
    [
        Case(query_length=40, key_length=50, dims=(40, 24), batch=(), causal=True),
        Case(
            dtype="bfloat16",
            query_length=40,
            key_length=50,
            heads=(4, 2),
            scale="traced",
            soft_cap=1.5,
            bias="full",
            alibi=True,
            mask="keys",
            offset="each",
            window=(30, 5),
            lengths="both",
            segments="sorted",
            sinks=True,
        ),
        Case(query_length=40, key_length=50, bias="keys", batch=(2,)),
    ],
    ids=["causal", "everything", "keys' bias"],
)
def test_right_by_way_of_a_stand_in(stand_in: StandIn, case: Case) -> None:
    call = cases.build(case)
    attention = functools.partial(jflash.attention, implementation="metal")
    oracle.assert_right(oracle.run(attention, call), call)
    assert set(stand_in.names) == {"jflash_forward", "jflash_delta", "jflash_d_query", "jflash_d_key_value"}


def test_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as no release of jax-mps has it."""
    monkeypatch.setattr(_platform, "current", lambda: MPS)
    assert _mps.launcher() is None
    verdict, refusal = jflash.explain(**PLAIN, implementation="metal").splitlines()
    assert verdict.startswith("No implementation")
    assert "metal_kernel_jit" in refusal
    assert jflash.explain(**PLAIN).startswith("xla serves")
